"""Executables and their bindings: one fixed-shape decode path, many generations (specification 0x05C, 0x06D).

    binding = executable.bind(generation, key, table)          once for each generation
    executable.activate(binding)                               at a step boundary: the one cell that names the placement
    binding.write_validity(step, rank_tokens, slot_routes)     before every launch
    out_TD = binding.launch(step, hidden_TD, topk_ids_TK, gates_TK, body)

An executable holds buffers at stable addresses and no placement. A binding is what the specification calls a graph:
the executable with one generation's table, key, validity and references. Letters: T real tokens of this peer, C_T token
slots of a peer, C_S rows of a slot, K top-k, P peers, S physical slots, D hidden.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ray_moe.dataplane.ledger import DeviceLaunches, HostSubmissions
from ray_moe.dataplane.phases import (
    STEP_METADATA,
    ElementBytes,
    ExecutableKey,
    ExecutableManifest,
    FallbackReason,
    check_counts,
)
from ray_moe.errors import BindingError, ConfigError, RoutesError

TableT = TypeVar("TableT")

# What an unused slot's route names: no vocabulary has it, so nothing can look an expert up for it.
NO_EXPERT = -1


_ONE = HostSubmissions(1)


@dataclass
class HostCounters:
    """Two coordinates of execution, neither derived from the other.

    `host_submissions` counts launches by the host. `device_launches` counts kernels, by a profiler or a captured
    graph's own nodes; None while nothing has counted them.
    """

    host_submissions: HostSubmissions = field(default_factory=lambda: HostSubmissions(0))
    device_launches: DeviceLaunches | None = None

    def add_device_launches(self, counted: DeviceLaunches) -> None:
        self.device_launches = counted if self.device_launches is None else self.device_launches + counted


@dataclass(frozen=True)
class ExecutableShape:
    """What an executable is built for, on the peer with seat `peer`; equal on all peers but for that.

    Raises `ConfigError` for a size below 1, a seat outside [0, P), and route ids that are neither int32 nor int64.
    """

    peer: int
    num_peers: int
    num_slots: int
    tokens_per_rank: int
    rows_per_slot: int
    hidden: int
    top_k: int
    activation: torch.dtype
    gate: torch.dtype
    route_id: torch.dtype = torch.int32

    def __post_init__(self) -> None:
        for name in ("num_peers", "num_slots", "tokens_per_rank", "rows_per_slot", "hidden", "top_k"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, found {getattr(self, name)}")
        if not 0 <= self.peer < self.num_peers:
            raise ConfigError(f"peer must be in [0, {self.num_peers}), found {self.peer}")
        if self.route_id not in (torch.int32, torch.int64):
            raise ConfigError(f"route ids must be int32 or int64, found {self.route_id}")

    def fits(self, key: ExecutableKey) -> bool:
        """Whether `key` names these sizes and dtypes."""
        return (
            (key.hidden_width, key.top_k) == (self.hidden, self.top_k)
            and (key.activation_dtype, key.gate_dtype) == (dtype_name(self.activation), dtype_name(self.gate))
            and key.rank_token_capacities == (self.tokens_per_rank,) * self.num_peers
            and key.slot_route_capacities == (self.rows_per_slot,) * self.num_slots
        )


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def bucket_name(key: ExecutableKey) -> str:
    """The name of a decode executable: 4 token slots a peer under placement-v17 -> "decode.bucket4.v17"."""
    return f"decode.bucket{max(key.rank_token_capacities)}.{key.placement_version.removeprefix('placement-')}"


@dataclass(frozen=True, eq=False)
class StableBuffers:
    """An executable's tensors; their addresses are fixed when it is built, their values change with each launch.

    `hidden` and `expert_output` [C_T, D]; `route_ids` and `gates` [C_T, K]. Views of one int32 tensor, `validity`:
    `real_tokens_by_rank` [P], `valid_tokens` [1], `rank_token_offsets` [P + 1] with the sentinel,
    `valid_routes_by_slot` [S], and `step_metadata` [P, 3], whose row p is `STEP_METADATA`: the real tokens of all
    peers, where p's begin among them, and the most that a peer has.
    """

    hidden: Tensor
    route_ids: Tensor
    gates: Tensor
    expert_output: Tensor
    validity: Tensor
    real_tokens_by_rank: Tensor
    valid_tokens: Tensor
    rank_token_offsets: Tensor
    valid_routes_by_slot: Tensor
    step_metadata: Tensor

    @staticmethod
    def allocate(shape: ExecutableShape, device: torch.device) -> StableBuffers:
        slots, peers = shape.tokens_per_rank, shape.num_peers
        parts = (peers, 1, peers + 1, shape.num_slots, peers * len(STEP_METADATA))
        validity = torch.zeros(sum(parts), dtype=torch.int32, device=device)
        real, total, offsets, routes, metadata = validity.split(parts)
        return StableBuffers(
            hidden=torch.zeros(slots, shape.hidden, dtype=shape.activation, device=device),
            route_ids=torch.full((slots, shape.top_k), NO_EXPERT, dtype=shape.route_id, device=device),
            gates=torch.zeros(slots, shape.top_k, dtype=shape.gate, device=device),
            expert_output=torch.zeros(slots, shape.hidden, dtype=shape.activation, device=device),
            validity=validity,
            real_tokens_by_rank=real,
            valid_tokens=total,
            rank_token_offsets=offsets,
            valid_routes_by_slot=routes,
            step_metadata=metadata.view(peers, len(STEP_METADATA)),
        )

    def addresses(self) -> tuple[int, ...]:
        """Where a replay reads and writes."""
        return tuple(tensor.data_ptr() for tensor in vars(self).values())

    def element_bytes(self) -> ElementBytes:
        return ElementBytes(
            hidden=self.hidden.element_size(),
            route_id=self.route_ids.element_size(),
            gate=self.gates.element_size(),
            expert_output=self.expert_output.element_size(),
            metadata=self.step_metadata.element_size(),
        )


@dataclass(frozen=True)
class StepValidity:
    """What the validity tensors say, on the host, and the step that they were written for."""

    step: int
    rank_tokens: tuple[int, ...]
    slot_routes: tuple[int, ...]


class Executable(Generic[TableT]):
    """One fixed-shape decode path of this peer. All generations replay it, one at a time."""

    def __init__(self, shape: ExecutableShape, device: torch.device, counters: HostCounters) -> None:
        self.shape, self.counters = shape, counters
        self.buffers = StableBuffers.allocate(shape, device)
        self._captured = self.buffers.addresses()
        self._bindings: dict[int, Binding[TableT]] = {}
        self._active: Binding[TableT] | None = None  # the cell
        self._validity: StepValidity | None = None

    def bind(self, generation: int, key: ExecutableKey, table: TableT) -> Binding[TableT]:
        """A binding of its own for a generation; `table` is whatever the body resolves slots with.

        Raises `BindingError`: key_mismatch when `key` names other sizes or dtypes than this executable has, or the
        placement version of another binding; already_bound when the generation has a binding here.
        """
        if not self.shape.fits(key):
            raise BindingError("key_mismatch", f"{key} does not name the sizes and dtypes of {self.shape}")
        if generation in self._bindings:
            raise BindingError("already_bound", f"generation {generation} has {self._bindings[generation]} already")
        for other in self._bindings.values():
            if other.key == key:
                raise BindingError("key_mismatch", f"generation {generation} has the key of {other}: {key}")
        binding = Binding(self, generation, key, table)
        self._bindings[generation] = binding
        return binding

    @property
    def bindings(self) -> Mapping[int, Binding[TableT]]:
        """The bindings that are not free, by generation."""
        return MappingProxyType(self._bindings)

    @property
    def active(self) -> Binding[TableT] | None:
        """What the cell holds."""
        return self._active

    def activate(self, binding: Binding[TableT]) -> None:
        """Set the cell, at a step boundary. `BindingError` other_executable or released."""
        if binding.executable is not self:
            raise BindingError("other_executable", f"{binding} is bound to another executable")
        binding.require_held()
        self._active = binding
        self._validity = None  # it was written under the other table

    def deactivate(self) -> None:
        """Empty the cell, at a step boundary: nothing launches before the next `activate`."""
        self._active = self._validity = None

    @property
    def buffers_ready(self) -> bool:
        """Whether every buffer is where it was when the executable was built."""
        return self.buffers.addresses() == self._captured


class Binding(Generic[TableT]):
    """An executable under one generation: what a launch may use, and who still uses it. Made by `Executable.bind`."""

    def __init__(self, executable: Executable[TableT], generation: int, key: ExecutableKey, table: TableT) -> None:
        self.executable, self.generation, self.key, self.table = executable, generation, key, table
        self.manifest = ExecutableManifest(bucket_name(key), key, executable.buffers.element_bytes())
        self.references = 0

    def __repr__(self) -> str:
        return f"binding {self.manifest.executable_id} of generation {self.generation}"

    def acquire(self) -> None:
        """One more user. `BindingError` released after `free`."""
        self.require_held()
        self.references += 1

    def release(self) -> None:
        """One user less. `BindingError` not_acquired when there is none."""
        if self.references == 0:
            raise BindingError("not_acquired", f"{self} has no reference to give back")
        self.references -= 1

    def free(self) -> None:
        """Give the table up: nothing launches under this generation again, and the generation may be bound anew.

        Raises `BindingError`: referenced while it has users, active while the cell holds it, released when it is free.
        """
        self.require_held()
        if self.references:
            raise BindingError("referenced", f"{self} has {self.references} references")
        if self.executable.active is self:
            raise BindingError("active", f"{self} is in the cell; activate another generation first")
        del self.executable._bindings[self.generation]

    def require_held(self) -> None:
        """`BindingError` released after `free`."""
        if self.executable.bindings.get(self.generation) is not self:
            raise BindingError("released", f"{self} is free")

    def write_validity(self, step: int, rank_tokens: Sequence[int], slot_routes: Sequence[int]) -> None:
        """Write this step's counts into the validity tensors, in place, and tag them with `step`.

        `rank_tokens` [P] are the real tokens of each peer, `slot_routes` [S] the routes of each physical slot. `step`
        is the caller's number of one invocation; each launch needs its own write. Raises `BindingError` released or
        other_generation; rank_token_capacity_exceeded or expert_route_capacity_exceeded when the step must fall back;
        `RoutesError` as `check_counts` does.
        """
        self._require_active()
        check_counts(rank_tokens, slot_routes, self.key)
        shape = self.executable.shape
        most_tokens = max(rank_tokens)
        for reason, found, capacity in (
            (FallbackReason.RANK_TOKEN_CAPACITY, most_tokens, shape.tokens_per_rank),
            (FallbackReason.SLOT_ROUTE_CAPACITY, max(slot_routes), shape.rows_per_slot),
        ):
            if found > capacity:
                raise BindingError(reason, f"step {step}: {self} holds {capacity}, found {found}")
        offsets = list(accumulate(rank_tokens, initial=0))
        values = array("i", rank_tokens)
        values.append(offsets[-1])
        values.extend(offsets)
        values.extend(slot_routes)
        for offset in offsets[:-1]:
            values.extend((offsets[-1], offset, most_tokens))
        self.executable.buffers.validity.copy_(torch.frombuffer(values, dtype=torch.int32))
        self.executable._validity = StepValidity(step, tuple(rank_tokens), tuple(slot_routes))

    def launch(
        self,
        step: int,
        hidden_TD: Tensor,
        topk_ids_TK: Tensor,
        gates_TK: Tensor,
        body: Callable[[Launch[TableT]], Tensor],
    ) -> Tensor:
        """Run `body` over the stable buffers with this peer's T real rows in front; result [T, D], a copy.

        Unused slots are masked before the body runs: their routes name no expert and their gates are 0. Their hidden
        rows are whatever was there. The body returns rows [T, D] or [C_T, D]; of the latter, the first T count.

        Raises `BindingError`: released, other_generation (the cell holds another binding), stable_buffer_unavailable (a
        buffer moved), rank_token_capacity_exceeded (T > C_T; rows are never clipped), stale_validity (the validity
        tensors were not written for this launch, or for another T); `RoutesError` for shapes or dtypes that are not the
        executable's. After a failure the validity must be written again.
        """
        self._require_active()
        executable = self.executable
        if not executable.buffers_ready:
            raise BindingError(FallbackReason.BUFFER_UNAVAILABLE, f"step {step}: a buffer of {self} has moved")
        validity = self._take_validity(step, hidden_TD.shape[0])
        self._load(hidden_TD, topk_ids_TK, gates_TK)
        executable.counters.host_submissions += _ONE
        rows = body(Launch(self, executable.buffers, validity))
        return self._store(rows, hidden_TD.shape[0])

    def _require_active(self) -> None:
        self.require_held()
        active = self.executable.active
        if active is not self:
            raise BindingError("other_generation", f"{self} cannot launch: the cell holds {active or 'no binding'}")

    def _take_validity(self, step: int, num_tokens: int) -> StepValidity:
        executable = self.executable
        if num_tokens > executable.shape.tokens_per_rank:
            raise BindingError(
                FallbackReason.RANK_TOKEN_CAPACITY,
                f"step {step}: {self} holds {executable.shape.tokens_per_rank} tokens, found {num_tokens}",
            )
        # Taken by this launch: a second one on the same counts would be a launch on stale counts.
        validity, executable._validity = executable._validity, None
        if validity is None or validity.step != step:
            written = "not written" if validity is None else f"of step {validity.step}"
            raise BindingError("stale_validity", f"step {step}: the validity of {self} is {written}")
        if validity.rank_tokens[executable.shape.peer] != num_tokens:
            raise BindingError(
                "stale_validity",
                f"step {step}: the validity of {self} says {validity.rank_tokens[executable.shape.peer]} tokens here, "
                f"found {num_tokens}",
            )
        return validity

    def _load(self, hidden_TD: Tensor, topk_ids_TK: Tensor, gates_TK: Tensor) -> None:
        shape, buffers, tokens = self.executable.shape, self.executable.buffers, hidden_TD.shape[0]
        _require_rows("hidden", hidden_TD, (tokens, shape.hidden), (shape.activation,))
        _require_rows("topk_ids", topk_ids_TK, (tokens, shape.top_k), (torch.int32, torch.int64))
        _require_rows("gates", gates_TK, (tokens, shape.top_k), (shape.gate,))
        buffers.route_ids[tokens:].fill_(NO_EXPERT)
        buffers.gates[tokens:].zero_()
        buffers.hidden[:tokens].copy_(hidden_TD)
        buffers.route_ids[:tokens].copy_(topk_ids_TK)
        buffers.gates[:tokens].copy_(gates_TK)

    def _store(self, rows: Tensor, tokens: int) -> Tensor:
        shape, output = self.executable.shape, self.executable.buffers.expert_output
        count = shape.tokens_per_rank if rows.shape[0] == shape.tokens_per_rank else tokens
        _require_rows("the body's rows", rows, (count, shape.hidden), (shape.activation,))
        if rows is not output:
            output[:tokens].copy_(rows[:tokens])
        return output[:tokens].clone()  # the next launch writes the same buffer


@dataclass(frozen=True, eq=False)
class Launch(Generic[TableT]):
    """What a body is given: the binding that the cell holds, the stable buffers, and this step's counts on the host."""

    binding: Binding[TableT]
    buffers: StableBuffers
    validity: StepValidity

    @property
    def table(self) -> TableT:
        return self.binding.table

    @property
    def num_tokens(self) -> int:
        """T: the buffers' first T rows are real."""
        return self.validity.rank_tokens[self.binding.executable.shape.peer]

    def require_routes(self, planned: int) -> None:
        """`BindingError` unmasked_padding unless the body's own counts sum to top-k times the real tokens (0x06I)."""
        valid = self.num_tokens * self.binding.key.top_k
        if planned != valid:
            raise BindingError(
                "unmasked_padding",
                f"step {self.validity.step}: the body plans {planned} routes for {self.num_tokens} tokens of top-k "
                f"{self.binding.key.top_k}; {valid} are valid",
            )


def _require_rows(what: str, rows: Tensor, shape: tuple[int, int], dtypes: tuple[torch.dtype, ...]) -> None:
    if tuple(rows.shape) != shape or rows.dtype not in dtypes:
        names = " or ".join(dtype_name(dtype) for dtype in dtypes)
        raise RoutesError(f"{what} must be {list(shape)} in {names}, found {list(rows.shape)} in {rows.dtype}")
