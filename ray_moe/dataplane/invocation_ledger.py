"""The ledgers of one audited invocation, side by side and never added up (specification 0x03D, 0x04E, 0x05, 0x07).

Row slots, logical bytes and live bytes follow from what the peers agreed on; measured bytes and elapsed time are what
the group's counters and the clock said while this invocation ran, on the peer that says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from fractions import Fraction
from itertools import pairwise
from time import perf_counter
from typing import Any

from ray_moe.comm.transports import CountMatrix, LinkRows, Transport, transposed
from ray_moe.dataplane.audit import check_lifetimes
from ray_moe.dataplane.handle import DispatchHandle
from ray_moe.dataplane.ledger import (
    ByteSchema,
    ControlBytes,
    HandleBytes,
    RemoteBytes,
    RouteRows,
    StagingBytes,
    allocated_bytes,
    check_problems,
    describe_problems,
    reservation_ratio,
    uniform_padded,
)
from ray_moe.dataplane.ledger import SlabStrides as Strides
from ray_moe.dataplane.paths import Path
from ray_moe.dataplane.phases import UnitAccount
from ray_moe.dataplane.plan import Layout, SlotMap
from ray_moe.dataplane.precision import codec_named
from ray_moe.dataplane.runners import LayerWeights, Work
from ray_moe.evidence import (
    Amount,
    Elapsed,
    Instrument,
    LiveBytes,
    LogicalBytes,
    MeasuredBytes,
    Measurement,
    RowSlots,
    Units,
)
from ray_moe.topology_ledger import FanOut, FlatLedger, HierarchicalLedger, LedgerComparison, RouteCounts, compare

# What travels beside our rows: nothing, since both ends derive every row's place from the counts. The origin keeps
# three fields for a route (slot, send position, gate), eight bytes each at most.
SCHEMA = ByteSchema(dispatch_metadata_fields=0, combine_metadata_fields=0, handle_fields=3, handle_field_bytes=8)


@dataclass(frozen=True)
class InvocationLedger:
    """One invocation of one layer as one peer accounts for it.

    `group_rows`, `by_class`, `hierarchy` and `padded_row_slots` are of the whole group; `out` and `back` are of this
    peer's links, `work` is its runner's, by batch or chunk, `fan_out` of its own tokens.
    """

    step: int
    unit: str
    layer: int
    generation: int
    epoch: int
    transport: str
    runner: str
    strategy: str
    payload: str
    replayed: bool
    # Row slots.
    group_rows: RouteRows
    out: LinkRows
    back: LinkRows
    padded_row_slots: RowSlots
    padded_over_useful: Fraction
    by_class: Mapping[str, RowSlots]
    fan_out: FanOut
    work: tuple[Work, ...]
    # Logical bytes.
    dispatch_payload: LogicalBytes
    combine_payload: LogicalBytes
    staging: StagingBytes
    remote: RemoteBytes
    handle: HandleBytes
    control: ControlBytes
    hierarchy: LedgerComparison
    # A model's units, which are no time: the strategy's schedule, and what of it one task after another would add.
    schedule_units: Units
    hidden_units: Units
    # What the unit ran where the layer has executables: token slots, rows, host submissions, control items.
    account: UnitAccount | None
    # Live allocation (all buffers, and the most at once), measured, elapsed.
    allocated: LogicalBytes
    live_peak: LiveBytes
    sent: MeasuredBytes
    received: MeasuredBytes
    elapsed: Elapsed

    def document(self) -> dict[str, Any]:
        """Plain values for JSON: amounts by their number, measured ones with how they were measured."""
        return _fields(self)


class Meter:
    """The group's byte counters and the clock, from now on."""

    def __init__(self, transport: Transport, what: str) -> None:
        self._transport, self._what = transport, what
        self._bytes, self._started = transport.bytes_moved, perf_counter()

    def read(self) -> tuple[MeasuredBytes, MeasuredBytes, Elapsed]:
        """Payload bytes sent and received, and seconds, since the meter was made."""
        seconds = perf_counter() - self._started
        sent, received = (now - then for now, then in zip(self._transport.bytes_moved, self._bytes, strict=True))
        counted = Measurement(Instrument.GROUP_COUNTER, "one invocation, this peer's groups", self._what)
        timed = Measurement(Instrument.CLOCK, "one invocation, this peer's clock", self._what)
        return MeasuredBytes(sent, counted), MeasuredBytes(received, counted), Elapsed(seconds, timed)


def take(
    path: Path,
    handles: Sequence[DispatchHandle],
    layouts: Sequence[Layout],
    slots: SlotMap,
    weights: LayerWeights,
    fan_out: FanOut,
    account: UnitAccount | None,
    measured: tuple[MeasuredBytes, MeasuredBytes, Elapsed],
) -> InvocationLedger:
    """Account for an invocation that has run; every weight offset is checked against its slot on the way (0x04C).

    Raises `RunnerError` when a segment's weights are not its slot's, `TopologyError` when a hierarchy would move other
    rows between nodes than the flat exchange.
    """
    first, abi = handles[0], handles[0].header.abi
    hidden, ffn = weights.down.shape[1:]
    counts_PP = _summed([layout.counts_PP for layout in layouts])
    segments = [[end - start for start, end in pairwise(handle.expert_offsets_S1)] for handle in handles]
    strides = Strides.dense(hidden, ffn)
    for handle in handles:
        problems = describe_problems(handle.expert_offsets_S1, weights.pool_slots, strides)
        check_problems(problems, handle.expert_offsets_S1, weights.pool_slots, strides)
    rows = RouteRows.of(counts_PP)
    codec = codec_named(abi.payload_format, hidden, abi.payload)
    schema = replace(SCHEMA, activation_bytes=abi.payload.itemsize, output_bytes=abi.returned.itemsize)
    counts = RouteCounts.from_peers(counts_PP, slots.group)
    flat = FlatLedger(counts, slots.topology, codec.row_bytes)
    mine = slots.my_peer
    out = [path.transport.link_rows(handle.counts_PP) for handle in handles]
    back = [path.transport.link_rows(transposed(handle.counts_PP)) for handle in handles]
    sent, received, elapsed = measured
    return InvocationLedger(
        step=first.step,
        unit=first.unit,
        layer=first.layer,
        generation=first.header.generation,
        epoch=first.header.epoch,
        transport=path.transport.name,
        runner=path.runner.name,
        strategy=path.strategy.name,
        payload=abi.payload_format,
        replayed=path.slot_capacity is not None,
        group_rows=rows,
        out=LinkRows.total(out),
        back=LinkRows.total(back),
        padded_row_slots=uniform_padded(counts_PP),
        padded_over_useful=reservation_ratio(counts_PP),
        by_class={kind.value: traffic.rows for kind, traffic in flat.by_class.items()},
        fan_out=fan_out,
        work=tuple(path.runner.work(counts_S, hidden, ffn) for counts_S in segments),
        dispatch_payload=codec.payload(RowSlots(sum(counts_PP[mine]) - counts_PP[mine][mine])),
        combine_payload=LogicalBytes(
            (sum(line[mine] for line in counts_PP) - counts_PP[mine][mine]) * hidden * abi.returned.itemsize
        ),
        staging=schema.staging_dispatch(rows.staged, hidden) + schema.staging_combine(rows.staged, hidden),
        remote=schema.remote_logical(rows, hidden),
        handle=schema.route_handle(rows.staged),
        control=schema.count_matrix(slots.num_peers)
        + schema.send_offsets(slots.num_peers)
        + schema.receive_splits(slots.num_peers)
        + schema.local_expert_offsets([end - start for start, end in pairwise(slots.peer_bounds_P1)]),
        hierarchy=compare(flat, HierarchicalLedger(counts, slots.topology, codec.row_bytes)),
        schedule_units=path.strategy.schedule.makespan,
        hidden_units=path.strategy.schedule.hidden_units,
        account=account,
        allocated=allocated_bytes(check_lifetimes(handles)),
        live_peak=first.completion.peak_bytes,
        sent=sent,
        received=received,
        elapsed=elapsed,
    )


def _summed(matrices: Sequence[CountMatrix]) -> list[list[int]]:
    lines = zip(*matrices, strict=True)
    return [[sum(column) for column in zip(*by_matrix, strict=True)] for by_matrix in lines]


def _plain(value: Any) -> Any:
    if isinstance(value, Amount):
        return int(value)
    if isinstance(value, Fraction):
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Work):
        return {**_fields(value), "executed": int(value.executed), "matmul_flops": int(value.matmul_flops)}
    return _fields(value) if is_dataclass(value) else value


def _fields(record: Any) -> dict[str, Any]:
    return {item.name: _plain(getattr(record, item.name)) for item in fields(record)}
