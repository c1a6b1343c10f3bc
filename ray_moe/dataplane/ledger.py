"""What an invocation costs by declaration: rows, bytes, lifetimes, descriptors, arithmetic (0x03D, 0x04C, 0x04E).

Everything here follows from counts, shapes and a declared schema. Nothing here is measured and nothing here is a time:
see `ray_moe.evidence`. Letters: R rows, S a peer's slots, P peers, D hidden, F FFN, N routes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from itertools import accumulate, combinations, pairwise

from ray_moe.dataplane.completion import Event
from ray_moe.errors import CompletionError, ConfigError, RunnerError
from ray_moe.evidence import Amount, LiveBytes, LogicalBytes, RowSlots

# -- Logical bytes (0x03D1, 0x03D2). Four accounts of one ledger: they do not add up with one another either.


class StagingBytes(LogicalBytes):
    """Rows in a peer's collective staging layout, local ones too. No network traffic: local rows cross no link."""


class RemoteBytes(LogicalBytes):
    """Rows that change peers and the metadata that travels with them, excluding protocol (`EXCLUDED`)."""


class HandleBytes(LogicalBytes):
    """What the origin keeps per route until its handle is released."""


class ControlBytes(LogicalBytes):
    """Storage of count, split and offset tables. No network claim: they may be exchanged, derived or cached."""


# What `ByteSchema.remote_logical` leaves out, and therefore why it is no measured traffic.
EXCLUDED = (
    "alignment",
    "collective headers",
    "HBM reads and writes",
    "link transactions",
    "retransmission",
    "scales",
    "topology duplication",
)


@dataclass(frozen=True)
class RouteRows:
    """Useful rows by what they cross: `local` stay on their peer, `remote` change peers."""

    local: RowSlots
    remote: RowSlots

    @staticmethod
    def of(counts_PP: Sequence[Sequence[int]]) -> RouteRows:
        """From rows per source (line) and destination (column), in peer-slot order."""
        local = sum(line[peer] for peer, line in enumerate(counts_PP))
        return RouteRows(RowSlots(local), RowSlots(sum(map(sum, counts_PP)) - local))

    @property
    def staged(self) -> RowSlots:
        """All useful rows: the staging layout has them all."""
        return self.local + self.remote


@dataclass(frozen=True)
class ByteSchema:
    """One selectable representation; the defaults are the specification's (0x03D2), each field with its home.

    What is staged counts any rows; what is remote is only had from `RouteRows`, so that local rows never reach a link.

    Raises `ConfigError` for a field that is not a whole number >= 0.
    """

    # In the rows that dispatch sends: bf16.
    activation_bytes: int = 2
    # In the rows that experts return: bf16.
    output_bytes: int = 2
    # In count, split and offset tables on every peer: int64.
    coordinate_bytes: int = 8
    # On the wire beside each remote row: int32.
    metadata_field_bytes: int = 4
    # Beside a remote row on its way out.
    dispatch_metadata_fields: int = 2
    # Beside a remote row on its way back: its index in the origin's handle.
    combine_metadata_fields: int = 1
    # In the origin's handle, per route; one of them is its fp32 gate, which travels nowhere.
    handle_fields: int = 8
    handle_field_bytes: int = 4

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 0:
                raise ConfigError(f"{field.name} must be a whole number >= 0, found {value!r}")

    def staging_dispatch(self, rows: RowSlots, hidden: int) -> StagingBytes:
        """R * D elements on their way to experts; R counts padded slots where those are reserved."""
        return StagingBytes(int(rows) * hidden * self.activation_bytes)

    def staging_combine(self, rows: RowSlots, hidden: int) -> StagingBytes:
        """R * D elements on their way back."""
        return StagingBytes(int(rows) * hidden * self.output_bytes)

    def remote_dispatch(self, rows: RouteRows, hidden: int) -> RemoteBytes:
        """The remote rows' share of `staging_dispatch`."""
        return RemoteBytes(int(rows.remote) * hidden * self.activation_bytes)

    def remote_combine(self, rows: RouteRows, hidden: int) -> RemoteBytes:
        """The remote rows' share of `staging_combine`."""
        return RemoteBytes(int(rows.remote) * hidden * self.output_bytes)

    def dispatch_metadata(self, rows: RouteRows) -> RemoteBytes:
        """Metadata beside the remote rows on their way out."""
        return RemoteBytes(int(rows.remote) * self.dispatch_metadata_fields * self.metadata_field_bytes)

    def combine_metadata(self, rows: RouteRows) -> RemoteBytes:
        """Metadata beside the remote rows on their way back."""
        return RemoteBytes(int(rows.remote) * self.combine_metadata_fields * self.metadata_field_bytes)

    def remote_logical(self, rows: RouteRows, hidden: int) -> RemoteBytes:
        """Logical remote bytes excluding protocol (`EXCLUDED`): payload and metadata, both ways."""
        payload = self.remote_dispatch(rows, hidden) + self.remote_combine(rows, hidden)
        return payload + self.dispatch_metadata(rows) + self.combine_metadata(rows)

    def route_handle(self, rows: RowSlots) -> HandleBytes:
        """What origins keep to bring R useful routes back."""
        return HandleBytes(int(rows) * self.handle_fields * self.handle_field_bytes)

    def count_matrix(self, num_peers: int) -> ControlBytes:
        """P * P counts."""
        return ControlBytes(num_peers * num_peers * self.coordinate_bytes)

    def send_offsets(self, num_peers: int) -> ControlBytes:
        """P sources with P + 1 offsets each: the sentinel counts."""
        return ControlBytes(num_peers * (num_peers + 1) * self.coordinate_bytes)

    def receive_splits(self, num_peers: int) -> ControlBytes:
        """P destinations with P splits each."""
        return ControlBytes(num_peers * num_peers * self.coordinate_bytes)

    def local_expert_offsets(self, local_slots_P: Sequence[int]) -> ControlBytes:
        """S + 1 offsets on each peer, by its own S."""
        return ControlBytes((sum(local_slots_P) + len(local_slots_P)) * self.coordinate_bytes)


# -- Rows that are no route's (0x03D6, 0x04E)


_NO_ROWS = RowSlots(0)


@dataclass(frozen=True, kw_only=True)
class Padding:
    """Row slots of one representation. Three paddings answer three questions, and a drop is none of them."""

    # Rows of accepted routes.
    useful: RowSlots
    # Rows that a policy lets a slot admit and this call did not fill.
    capacity_unused: RowSlots = _NO_ROWS
    # Rows that only round a slot's capacity up to what a dense kernel can take.
    alignment_only: RowSlots = _NO_ROWS
    # Rows that complete the last block of each slot's segment.
    block_fringe: RowSlots = _NO_ROWS
    # Routes that were not executed at all. They occupy no row, so they are in no sum here.
    dropped: RowSlots = _NO_ROWS

    @property
    def executed(self) -> RowSlots:
        """Rows that the runner computes."""
        return self.useful + self.capacity_unused + self.alignment_only + self.block_fringe


def uniform_padded(counts_PP: Sequence[Sequence[int]]) -> RowSlots:
    """Row slots when each of the P * P splits is reserved at the size of the largest (0x03C1)."""
    return RowSlots(sum(map(len, counts_PP)) * max(map(max, counts_PP)))


def reservation_ratio(counts_PP: Sequence[Sequence[int]]) -> Fraction:
    """`uniform_padded` over useful rows; 1 when there are none. A ratio of allocations, not of times (0x03D6)."""
    useful = sum(map(sum, counts_PP))
    return Fraction(int(uniform_padded(counts_PP)), useful) if useful else Fraction(1)


# -- Analytical work and submissions (0x04A, 0x05)


class MatmulFlops(Amount):
    """Arithmetic of matrix products by formula, a multiply-add as two. Fewer of them are no lower latency."""


def swiglu_matmul_flops(rows: RowSlots, hidden: int, ffn: int) -> MatmulFlops:
    """6 * R * D * F: gate, up and down; SiLU and the product of the two are not in it."""
    return MatmulFlops(6 * int(rows) * hidden * ffn)


class HostSubmissions(Amount):
    """Calls by which the host hands over work: a graph replay is one, however many kernels it launches."""


class DeviceLaunches(Amount):
    """Kernels that the device starts. Known only where somebody counts them."""


# -- Grouped GEMM problems (0x04C)


@dataclass(frozen=True)
class SlabStrides:
    """Where a pool slot's weights start, in elements: gate_up [pool, 2F, D] with gate rows first, down [pool, D, F].

    Rows of D (F) elements are dense within a slot; `gate_up` and `down` are the slabs' strides from slot to slot.
    """

    hidden: int
    ffn: int
    gate_up: int
    down: int

    @staticmethod
    def dense(hidden: int, ffn: int) -> SlabStrides:
        """Slots that follow each other without a gap."""
        return SlabStrides(hidden, ffn, 2 * ffn * hidden, hidden * ffn)

    def offsets(self, pool_slot: int) -> tuple[int, int, int]:
        """Gate, up and down offsets of one pool slot."""
        gate = pool_slot * self.gate_up
        return gate, gate + self.ffn * self.hidden, pool_slot * self.down


@dataclass(frozen=True, slots=True)
class ProblemDescriptor:
    """One active slot's problem: eight int64 words, and beside them the local slot whose problem it is.

    Gate and up are [m, k] @ [n, k]^T with n = F and k = D, down is [m, n] @ [k, n]^T. Offsets count elements.
    """

    slot: int
    m: int
    n: int
    k: int
    input_offset: int
    gate_weight_offset: int
    up_weight_offset: int
    down_weight_offset: int
    output_offset: int

    @property
    def words(self) -> tuple[int, ...]:
        """The eight words in the order of `DESCRIPTOR_FIELDS`, for a device table."""
        return tuple(getattr(self, name) for name in DESCRIPTOR_FIELDS)


DESCRIPTOR_FIELDS = tuple(field.name for field in fields(ProblemDescriptor) if field.name != "slot")
DESCRIPTOR_BYTES = len(DESCRIPTOR_FIELDS) * 8


def describe_problems(
    offsets_S1: Sequence[int], pool_slots_S: Sequence[int], strides: SlabStrides
) -> tuple[ProblemDescriptor, ...]:
    """One descriptor per active slot, in slot order. An empty slot has none, and every other keeps its own slot.

    Raises `RunnerError` `offsets_not_full_length` unless there is an offset for every slot and the sentinel.
    """
    _require_full_length(offsets_S1, pool_slots_S)
    return tuple(
        _problem(slot, start, end, pool_slot, strides)
        for slot, ((start, end), pool_slot) in enumerate(zip(pairwise(offsets_S1), pool_slots_S, strict=True))
        if end > start
    )


def check_problems(
    problems: Sequence[ProblemDescriptor],
    offsets_S1: Sequence[int],
    pool_slots_S: Sequence[int],
    strides: SlabStrides,
) -> None:
    """Check a descriptor table, wherever it was built, against the segments and slots that it is for.

    Raises `RunnerError`: `offsets_not_full_length`; `segment_without_descriptor` unless exactly the active slots have
    one each, in slot order; `descriptor_of_another_slot` when weight offsets are not its slot's;
    `descriptor_of_another_segment` when its rows or dimensions are not.
    """
    _require_full_length(offsets_S1, pool_slots_S)
    active = [slot for slot, (start, end) in enumerate(pairwise(offsets_S1)) if end > start]
    if [problem.slot for problem in problems] != active:
        raise RunnerError(
            "segment_without_descriptor",
            f"slots {active} have rows, descriptors are for slots {[problem.slot for problem in problems]}",
        )
    for found in problems:
        slot, pool_slot = found.slot, pool_slots_S[found.slot]
        own = _problem(slot, offsets_S1[slot], offsets_S1[slot + 1], pool_slot, strides)
        wrong = [name for name in DESCRIPTOR_FIELDS if getattr(found, name) != getattr(own, name)]
        if wrong:
            weights = any(name.endswith("weight_offset") for name in wrong)
            values = ", ".join(f"{name} {getattr(found, name)} for {getattr(own, name)}" for name in wrong)
            raise RunnerError(
                "descriptor_of_another_slot" if weights else "descriptor_of_another_segment",
                f"slot {slot} (pool slot {pool_slot}) has {values}",
            )


def _problem(slot: int, start: int, end: int, pool_slot: int, strides: SlabStrides) -> ProblemDescriptor:
    rows_at = start * strides.hidden
    return ProblemDescriptor(
        slot, end - start, strides.ffn, strides.hidden, rows_at, *strides.offsets(pool_slot), rows_at
    )


def _require_full_length(offsets_S1: Sequence[int], pool_slots_S: Sequence[int]) -> None:
    if len(offsets_S1) != len(pool_slots_S) + 1:
        raise RunnerError(
            "offsets_not_full_length",
            f"{len(pool_slots_S)} slots have {len(pool_slots_S) + 1} offsets, empty slots too; found {len(offsets_S1)}",
        )


# -- Lifetimes (0x03D3, 0x03D5)


@dataclass(frozen=True)
class Buffer:
    """A declared buffer, live on the half-open interval [`live_from`, `live_until`).

    `released_after` is the event that its last reader completes, or None when readers come after the invocation: then
    its declared end stands. Buffers of one `alias_group` are one allocation. Raises `ConfigError` for an interval that
    is empty or starts before epoch 0.
    """

    name: str
    size: LiveBytes
    live_from: int
    live_until: int
    released_after: Event | None
    alias_group: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.live_from < self.live_until:
            raise ConfigError(
                f"buffer {self.name!r} must have 0 <= live_from < live_until, "
                f"found [{self.live_from}, {self.live_until})"
            )


def live_bytes(buffers: Iterable[Buffer]) -> tuple[LiveBytes, ...]:
    """What coexists in each epoch, from epoch 0 to the last end."""
    buffers = tuple(buffers)
    changes = [0] * (max((buffer.live_until for buffer in buffers), default=0) + 1)
    for buffer in buffers:
        changes[buffer.live_from] += int(buffer.size)
        changes[buffer.live_until] -= int(buffer.size)
    return tuple(LiveBytes(live) for live in accumulate(changes[:-1]))


def peak(buffers: Iterable[Buffer]) -> tuple[LiveBytes, int]:
    """The most that coexists, and the first epoch in which it does; nothing at epoch 0 for no buffers."""
    by_epoch = live_bytes(buffers)
    most = max(by_epoch, default=LiveBytes(0))
    return most, by_epoch.index(most) if by_epoch else 0


def allocated_bytes(buffers: Iterable[Buffer]) -> LogicalBytes:
    """The sum of all allocations. No peak: buffers whose lives do not meet never coexist."""
    return LogicalBytes(sum(int(buffer.size) for buffer in buffers))


def check_buffers(buffers: Sequence[Buffer], event_epochs: Mapping[Event, int]) -> None:
    """Check a lifetime schedule against the epochs in which events complete (0x03D5).

    Raises `CompletionError`: `released_before_last_reader` when a buffer ends before its event's epoch,
    `live_alias_overlap` when two buffers of one alias group are live at once, `missing_dependency` when a buffer waits
    for an event without an epoch.
    """
    for buffer in buffers:
        event = buffer.released_after
        if event is None:
            continue
        if event not in event_epochs:
            raise CompletionError("missing_dependency", f"buffer {buffer.name!r} waits for {event}, which has no epoch")
        if buffer.live_until < event_epochs[event]:
            raise CompletionError(
                "released_before_last_reader",
                f"buffer {buffer.name!r} ends at epoch {buffer.live_until}, {event} is at {event_epochs[event]}",
            )
    for one, other in combinations(buffers, 2):
        if one.alias_group is None or one.alias_group != other.alias_group:
            continue
        if one.live_from < other.live_until and other.live_from < one.live_until:
            raise CompletionError(
                "live_alias_overlap",
                f"buffers {one.name!r} [{one.live_from}, {one.live_until}) and {other.name!r} [{other.live_from}, "
                f"{other.live_until}) are both live in alias group {one.alias_group!r}",
            )
