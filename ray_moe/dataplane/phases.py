"""Phases: what a step is made of, and which executable may replay it (specification 0x05, 0x06D, 0x06G).

    rows -> split_by_phase -> one unit per phase -> Buckets.choose -> Replay(executable) or Fallback(reason)

Prefill runs with exact, variable shapes. Decode replays a fixed-shape executable when an exact predicate holds, and
otherwise runs as prefill does, with all of its rows. Work is sized by the rows of this invocation; cached context never
counts. Nothing here holds tensors. Letters: T tokens, K top-k, P peers, S physical slots, D hidden, C capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from fractions import Fraction
from functools import cached_property
from operator import gt
from typing import Generic, Literal, TypeVar, get_args

from ray_moe.errors import ConfigError, EvidenceError, RoutesError
from ray_moe.evidence import LogicalBytes, RowSlots

RowT = TypeVar("RowT")

# What one execution unit can be, in the order in which a step runs them.
Phase = Literal["prefill", "decode", "bare"]
PHASES: tuple[Phase, ...] = get_args(Phase)
# An outer batch may be mixed. It is never executed as it is: `split_by_phase` makes units of it.
BatchPhase = Literal["prefill", "decode", "bare", "mixed"]


# The public surfaces that a profile of this contract may be said to match, and how strongly; no others (0x06G). Each is
# named at the revision that 0x00D pins, and none of them says anything about time.
SURFACE_STRENGTH: Mapping[tuple[str, str], str] = {
    ("prefill", "sglang_normal_deepep"): "documentation and source",
    ("decode", "sglang_low_latency"): "documentation and source",
    ("decode", "megatron_inference_nccl_graph"): "conditional on source contract",
    ("decode", "megatron_inference_nvls"): "conditional on hardware and symmetric memory",
    ("oversize_decode", "uncaptured_or_larger_path"): "correctness boundary of this system",
}


# -- Units


@dataclass(frozen=True)
class PhaseUnit(Generic[RowT]):
    """Rows of one phase, in the order in which they were given. `ConfigError` for a phase that no unit can have."""

    phase: Phase
    rows: tuple[RowT, ...]

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise ConfigError(f"an execution unit has one phase of {', '.join(PHASES)}, found {self.phase!r}")


def split_by_phase(rows: Iterable[RowT], phase_of: Callable[[RowT], Phase]) -> tuple[PhaseUnit[RowT], ...]:
    """One unit for each phase that occurs, prefill first (0x05E): every row as it is, in exactly one unit.

    `phase_of` reads the phase that a row carries. Raises `ConfigError` for a row whose phase no unit can have.
    """
    by_phase: dict[Phase, list[RowT]] = {phase: [] for phase in PHASES}
    for row in rows:
        by_phase.setdefault(phase_of(row), []).append(row)
    return tuple(PhaseUnit(phase, tuple(kept)) for phase, kept in by_phase.items() if kept)


# -- What an executable is for


@dataclass(frozen=True)
class ExecutableScope:
    """The coordinates that all bucket sizes of one placement share. Dtypes by torch's names."""

    process_group_id: str
    placement_version: str
    checkpoint_version: str
    hidden_width: int
    top_k: int
    activation_dtype: str
    gate_dtype: str
    dispatch_backend: str
    runner_backend: str


@dataclass(frozen=True)
class ExecutableKey(ExecutableScope):
    """The eleven coordinates that may not drift under a captured executable (0x05D).

    `rank_token_capacities` [P] token slots of each peer, in peer-slot order; `slot_route_capacities` [S] rows of each
    physical slot, in dispatch order. Raises `ConfigError` for a width, top-k or capacity below 1.
    """

    rank_token_capacities: tuple[int, ...]
    slot_route_capacities: tuple[int, ...]

    def __post_init__(self) -> None:
        tokens, routes = self.rank_token_capacities, self.slot_route_capacities
        if min(self.hidden_width, self.top_k, min(tokens, default=0), min(routes, default=0)) < 1:
            raise ConfigError(
                f"hidden_width, top_k and every capacity must be >= 1, found {self.hidden_width}, {self.top_k}, "
                f"{tokens} and {routes}"
            )

    @cached_property
    def scope(self) -> ExecutableScope:
        return ExecutableScope(**{item.name: getattr(self, item.name) for item in fields(ExecutableScope)})


# What the payload ledger of an executable leaves out (0x05C).
EXCLUDED_FROM_PAYLOAD = (
    *("allocator overhead", "collective and kernel workspace"),
    *("expert weights", "graph objects", "unnamed buffers"),
)
# A peer's row of `graph.step_metadata`.
STEP_METADATA = ("valid_tokens", "rank_token_offset", "ep_max_tokens")


@dataclass(frozen=True)
class ElementBytes:
    """Bytes of one element of each stable buffer."""

    hidden: int
    route_id: int
    gate: int
    expert_output: int
    metadata: int


@dataclass(frozen=True)
class ExecutableManifest:
    """What one executable reserves under one generation.

    The ledger covers the group: token slots of all peers; the step metadata, equal on every peer, once (0x05C).
    """

    executable_id: str
    key: ExecutableKey
    element_bytes: ElementBytes

    @cached_property
    def reserved_input_slots(self) -> int:
        return sum(self.key.rank_token_capacities)

    @cached_property
    def reserved_runner_rows(self) -> int:
        return sum(self.key.slot_route_capacities)

    @cached_property
    def smallest_capacities(self) -> tuple[int, int]:
        """(token slots of the smallest peer, rows of the smallest slot)."""
        return min(self.key.rank_token_capacities), min(self.key.slot_route_capacities)

    @cached_property
    def payload_bytes(self) -> Mapping[str, LogicalBytes]:
        """Reserved payload by stable buffer; `EXCLUDED_FROM_PAYLOAD` says what it is not."""
        key, size, slots = self.key, self.element_bytes, self.reserved_input_slots
        metadata_values = len(key.rank_token_capacities) * len(STEP_METADATA)
        return {
            "graph.hidden": LogicalBytes(slots * key.hidden_width * size.hidden),
            "graph.route_ids": LogicalBytes(slots * key.top_k * size.route_id),
            "graph.gates": LogicalBytes(slots * key.top_k * size.gate),
            "graph.expert_output": LogicalBytes(slots * key.hidden_width * size.expert_output),
            "graph.step_metadata": LogicalBytes(metadata_values * size.metadata),
        }

    @property
    def total_payload_bytes(self) -> LogicalBytes:
        return sum(self.payload_bytes.values(), start=LogicalBytes(0))


# -- Admission


class FallbackReason(StrEnum):
    """Why a step does not replay, in the order in which the predicate asks (0x05D)."""

    PHASE_NOT_DECODE = "phase_not_decode"
    KEY_MISMATCH = "graph_key_mismatch"
    RANK_TOKEN_CAPACITY = "rank_token_capacity_exceeded"
    SLOT_ROUTE_CAPACITY = "expert_route_capacity_exceeded"
    BUFFER_UNAVAILABLE = "stable_buffer_unavailable"


@dataclass(frozen=True)
class Replay:
    """The step fits this executable."""

    executable_id: str


@dataclass(frozen=True)
class Fallback:
    """The step runs uncaptured, with the same rows, routes and generation."""

    reason: FallbackReason


Decision = Replay | Fallback


@dataclass(frozen=True)
class PhaseStep:
    """One invocation as admission sees it: its phase, the key that it needs, and its counts.

    `rank_tokens` [P] are the rows that each peer brings to this invocation (not its cached context), `slot_routes` [S]
    the routes that each physical slot gets. Raises `RoutesError` as `check_counts` does, and `ConfigError` for an
    unknown phase.
    """

    phase: BatchPhase
    key: ExecutableKey
    rank_tokens: tuple[int, ...]
    slot_routes: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.phase not in get_args(BatchPhase):
            raise ConfigError(f"phase must be one of {', '.join(get_args(BatchPhase))}, found {self.phase!r}")
        check_counts(self.rank_tokens, self.slot_routes, self.key)


def check_counts(rank_tokens: Sequence[int], slot_routes: Sequence[int], key: ExecutableKey) -> None:
    """Raise `RoutesError` unless there is a count for each peer and slot of `key`, none negative, and the routes are
    top-k times the tokens (0x05A)."""
    for what, counts, capacities in (
        ("rank_tokens", rank_tokens, key.rank_token_capacities),
        ("slot_routes", slot_routes, key.slot_route_capacities),
    ):
        if len(counts) != len(capacities):
            raise RoutesError(f"{what} must have {len(capacities)} entries, found {len(counts)}")
        if min(counts) < 0:
            raise RoutesError(f"{what} must be >= 0, found {min(counts)}")
    routes, tokens = sum(slot_routes), sum(rank_tokens)
    if routes != key.top_k * tokens:
        raise RoutesError(
            f"{routes} routes for {tokens} tokens of this invocation; top-k {key.top_k} makes {key.top_k * tokens}"
        )


def admit(step: PhaseStep, manifest: ExecutableManifest, buffers_ready: bool) -> Decision:
    """Whether `step` may replay exactly this executable; else the first reason against it (0x05D).

    The counts of a step fit its own key, so that equal keys also mean vectors of equal length.
    """
    same_key = step.key == manifest.key
    reason = _refusal(step.phase, same_key, step.rank_tokens, step.slot_routes, manifest, lambda _: buffers_ready)
    return Replay(manifest.executable_id) if reason is None else Fallback(reason)


@dataclass(frozen=True)
class Buckets:
    """The executables of one scope, which differ in capacities only; kept smallest first.

    Raises `ConfigError` for none, and for two scopes, numbers of peers or slots, or executables of one name.
    """

    manifests: tuple[ExecutableManifest, ...]

    def __post_init__(self) -> None:
        if not self.manifests:
            raise ConfigError("buckets need at least one executable, found 0")
        keys, names = [item.key for item in self.manifests], [item.executable_id for item in self.manifests]
        if len({(key.scope, len(key.rank_token_capacities), len(key.slot_route_capacities)) for key in keys}) > 1:
            raise ConfigError(f"buckets share one scope, P and S, found {keys}")
        if len(set(names)) < len(names):
            raise ConfigError(f"every bucket has its own name, found {', '.join(names)}")
        by_size = sorted(self.manifests, key=lambda item: (item.reserved_input_slots, item.reserved_runner_rows))
        object.__setattr__(self, "manifests", tuple(by_size))

    def choose(
        self,
        phase: BatchPhase,
        scope: ExecutableScope,
        rank_tokens: Sequence[int],
        slot_routes: Sequence[int],
        buffers_ready: Callable[[str], bool],
    ) -> Decision:
        """The smallest executable that may replay these counts; else the first reason against the largest.

        `buffers_ready` is asked by executable id, of executables that fit. Raises `RoutesError` as `check_counts` does.
        """
        largest = self.manifests[-1]
        same_scope = scope == largest.key.scope
        if same_scope:
            check_counts(rank_tokens, slot_routes, largest.key)
        reason = None
        for manifest in self.manifests:
            reason = _refusal(phase, same_scope, rank_tokens, slot_routes, manifest, buffers_ready)
            if reason is None:
                return Replay(manifest.executable_id)
        assert reason is not None
        return Fallback(reason)


def _refusal(
    phase: BatchPhase,
    same_key: bool,
    rank_tokens: Sequence[int],
    slot_routes: Sequence[int],
    manifest: ExecutableManifest,
    buffers_ready: Callable[[str], bool],
) -> FallbackReason | None:
    if phase != "decode":
        return FallbackReason.PHASE_NOT_DECODE
    if not same_key:
        return FallbackReason.KEY_MISMATCH
    token_floor, row_floor = manifest.smallest_capacities
    # The maximum first: it settles almost every step, and a layer asks for each of its invocations.
    if max(rank_tokens) > token_floor and any(map(gt, rank_tokens, manifest.key.rank_token_capacities)):
        return FallbackReason.RANK_TOKEN_CAPACITY
    if max(slot_routes) > row_floor and any(map(gt, slot_routes, manifest.key.slot_route_capacities)):
        return FallbackReason.SLOT_ROUTE_CAPACITY
    return None if buffers_ready(manifest.executable_id) else FallbackReason.BUFFER_UNAVAILABLE


# -- Accounts


@dataclass(frozen=True)
class ControlRatio:
    """Control items per useful route: a count of planning decisions, analytical, never a time (0x05B).

    It has no conversion to a float. `EvidenceError` when there is no route to share the items.
    """

    items: int
    routes: int

    evidence = "analytical"

    def __post_init__(self) -> None:
        if self.items < 0 or self.routes < 1:
            raise EvidenceError(f"items must be >= 0 and useful routes >= 1, found {self.items} and {self.routes}")

    @property
    def value(self) -> Fraction:
        return Fraction(self.items, self.routes)


@dataclass(frozen=True)
class RowAccount:
    """Token slots that are dispatched and rows that a runner executes, useful and in all; accounts add up."""

    useful_inputs: RowSlots
    dispatch_slots: RowSlots
    useful_routes: RowSlots
    runner_rows: RowSlots

    def __add__(self, other: RowAccount) -> RowAccount:
        return RowAccount(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(RowAccount)))

    @property
    def dispatch_padding(self) -> RowSlots:
        return RowSlots(self.dispatch_slots.value - self.useful_inputs.value)

    @property
    def runner_padding(self) -> RowSlots:
        return RowSlots(self.runner_rows.value - self.useful_routes.value)


@dataclass(frozen=True)
class UnitAccount:
    """What one unit ran. `host_submissions` counts what the host submits, not what a device launches."""

    phase: Phase
    decision: Decision
    rows: RowAccount
    host_submissions: int
    control_items: int

    @property
    def control_ratio(self) -> ControlRatio:
        return ControlRatio(self.control_items, self.rows.useful_routes.value)


def account_for(
    step: PhaseStep, manifest: ExecutableManifest, decision: Decision, *, host_submissions: int, control_items: int
) -> UnitAccount:
    """The account of a unit: a replay executes all that `manifest` reserves, a fallback exact rows (0x05C, 0x05F).

    Raises `ConfigError` for a mixed batch, which is no unit, and for a replay of another executable.
    """
    if step.phase == "mixed":
        raise ConfigError(f"an execution unit has one phase of {', '.join(PHASES)}, found 'mixed'")
    dispatched, run = tokens, routes = sum(step.rank_tokens), sum(step.slot_routes)
    if isinstance(decision, Replay):
        if decision.executable_id != manifest.executable_id:
            raise ConfigError(f"the replay is of {decision.executable_id}, the manifest of {manifest.executable_id}")
        dispatched, run = manifest.reserved_input_slots, manifest.reserved_runner_rows
    rows = RowAccount(RowSlots(tokens), RowSlots(dispatched), RowSlots(routes), RowSlots(run))
    return UnitAccount(step.phase, decision, rows, host_submissions, control_items)


def joint_rows(units: Iterable[UnitAccount]) -> RowAccount:
    """The rows of a step's units together (0x05E)."""
    none = RowSlots(0)
    return sum((unit.rows for unit in units), start=RowAccount(none, none, none, none))
