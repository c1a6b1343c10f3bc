"""The six identity namespaces as distinct types (specification 0x01A0).

The integer 3 can mean logical expert 3, slot 3, rank 3 or the fourth seat of a group. Each namespace is therefore a
type of its own: equal values of two namespaces never compare equal, never order, and every record checks what it is
given. The data plane's tensors hold bare integers; they are made from these types once, when a placement is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

_I = TypeVar("_I", bound="Identity")


@dataclass(frozen=True, order=True, slots=True)
class Identity:
    """A value inside one namespace. Ordering and equality hold only within the namespace."""

    value: Any

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, order=True, slots=True)
class LogicalExpertId(Identity):
    """Names a model function inside one layer; stable within architecture and checkpoint."""

    value: int


@dataclass(frozen=True, order=True, slots=True)
class PhysicalSlotId(Identity):
    """Room for one expert's weights; unique inside one layer of one placement version."""

    value: str


@dataclass(frozen=True, order=True, slots=True)
class ReplicaId(Identity):
    """One copy of one logical expert within one checkpoint version."""

    value: str


@dataclass(frozen=True, order=True, slots=True)
class GlobalRank(Identity):
    """An expert actor of the cluster. Its peer slot inside a group's epoch is another number."""

    value: int


@dataclass(frozen=True, order=True, slots=True)
class ProcessGroupId(Identity):
    """A communicator by name; one membership epoch of it is a `ProcessGroupSpec`."""

    value: str


@dataclass(frozen=True, order=True, slots=True)
class PlacementVersion(Identity):
    """Names one frozen placement for people; the generation is its integer."""

    value: str


@dataclass(frozen=True, order=True, slots=True)
class CheckpointVersion(Identity):
    """Names one state of all parameters; dispatch and combine must agree on it."""

    value: str


def expect(kind: type[_I], given: object, field: str) -> None:
    """Raise `TypeError` unless `given` lives in namespace `kind`; the message names the field and both types."""
    if type(given) is not kind:
        raise TypeError(f"{field}: expected {kind.__name__}, found {type(given).__name__} {given!r}")
