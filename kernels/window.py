"""One-sided exchange of rows between GPUs of one node: every peer maps every peer's window, and counts stay on devices.

    push      each token's row once to every peer that owns one of its routes, and whose routes they are
    wait      until every peer's rows are here, or a deadline passes
    (experts  read rows and write results in the window; the owner's maps say where each route's result lies)
    collect   each token's results from their owners, gate-weighted and summed in route-slot order

Token t of the peer in slot p lies at row `p * C + t` in every window, whether it has routes there or not: no peer needs
another's counts. A launch holds no address and no number of peers: both are read from the cell and the list of windows,
which an epoch change rewrites between two launches. Flags only grow; their upper half is the epoch.
Letters: T tokens, C token slots of a peer in this unit, K top-k, P peers, M most peers, E experts, D hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

from ray_moe.kernels.epilogue import weighted
from ray_moe.kernels.launch import dependent, multiprocessors
from ray_moe.kernels.quantize import fp8_scale
from ray_moe.kernels.regions import Part, Regions

# Words of the cell, int64. Peers and mine are the epoch's, limit is the longest wait in nanoseconds. Each phase counts
# its own launches, so that chunks may be pushed ahead of those that are collected; all peers count alike.
PEERS, MINE, LIMIT, PUSHES, WAITS, COLLECTS, FAILED, _PUSHED, COLLECTED = (tl.constexpr(word) for word in range(9))
CELL_WORDS = 16
EPOCH_SHIFT = 32
# Phases as a failure names them.
PHASES = ("rows", "results")
_BLOCK = 2048  # elements of a row that a program moves at once
_FINE_BLOCK, _PARTIAL_BLOCK = 512, 1024  # or sums
_WAVES = 4  # programs for each multiprocessor


def push(
    hidden_TD: Tensor, ids_TK: Tensor, table_XE: Tensor, windows_M: Tensor, cell: Tensor, regions: Regions, part: Part,
    gates_TK: Tensor | None = None,
) -> None:  # fmt: skip
    """Give T <= C tokens to the peers that own their experts, and tell every peer that they are there.

    `table_XE` int32: row 1 the number of an expert's replicas, row 2 + j the peer slot of replica j; which one a route
    takes is `policies.TokenHash`'s choice. Ids outside [0, E) are nobody's. `gates_TK` travel
    where the regions have a place for them. Example: T = 1, K = 2, ids [[0, 1]],
    expert 0 at peer 1, expert 1 at peer 0 -> both windows get the row; ids at peer 0 [-1, 1], at peer 1 [0, -1].
    """
    chunks = triton.cdiv(regions.hidden, _BLOCK)
    programs = max(1, min(part.capacity * chunks, _WAVES * multiprocessors(cell.device)))
    _push_kernel[(programs,)](
        hidden_TD, ids_TK, gates_TK if regions.partial else None, table_XE, windows_M, cell,
        hidden_TD.shape[0], part.capacity, part.first, table_XE.shape[1], QUANTIZED=regions.quantized,
        ROWS=regions.rows, SCALES=regions.scales, IDS=regions.ids, GATES=regions.gates, FLAGS=regions.arrived,
        D=regions.hidden, BLOCK=min(_BLOCK, triton.next_power_of_2(regions.hidden)), CHUNKS=chunks,
        **_shape(regions),
        num_warps=4, **dependent(cell.device),
    )  # fmt: skip


def wait(window: Tensor, cell: Tensor, failure: Tensor, regions: Regions, part: Part) -> None:
    """Go on when all rows of the push are here. After the limit the cell is failed: this and every later launch on it
    ends at once, and `failure` int64 [3] in host memory names the peer slot + 1, the phase and the flag's value.

    Ids of peers that are not there become -1.
    """
    _wait_kernel[(1,)](
        regions.view(window, regions.arrived, torch.int64, regions.max_peers), cell, failure,
        regions.view(window, regions.ids, torch.int32, regions.max_peers * regions.capacity * regions.top_k),
        part.capacity, part.first, part.peers, K=regions.top_k, BLOCK=1024, num_warps=4, **dependent(cell.device),
    )  # fmt: skip


def collect(
    ids_TK: Tensor, gates_TK: Tensor, table_XE: Tensor, window: Tensor, windows_M: Tensor, cell: Tensor,
    failure: Tensor, regions: Regions, part: Part, out_TD: Tensor, *, pull: bool = True,
) -> None:  # fmt: skip
    """Tell every peer that its results are here, wait for theirs, and sum: out[t] = sum over k of gate * result.

    Products in the promoted dtype of results and gates, sums in fp32 in route-slot order (specification 0x03C3), as
    `combine.combine` has them. A real token without a route becomes zero. Results are pulled from their owners, or are
    `Home` already. Where returns are partial each owner has weighted and summed its own, and their rows are added in
    peer-slot order; gates are not read.
    """
    tokens, most = out_TD.shape[0], _WAVES * multiprocessors(cell.device)
    chunk = _collect_chunk(tokens, regions, most)
    chunks = triton.cdiv(regions.hidden, chunk)
    # Programs that wait must not keep the one that tells the others from running: all of them run at once.
    programs = max(1, min(tokens * chunks, most))
    flags = regions.view(window, regions.ready, torch.int64, regions.max_peers)
    _collect_kernel[(programs,)](
        ids_TK, None if regions.partial else gates_TK, table_XE, windows_M, window, cell, flags, failure, out_TD,
        tokens, part.capacity, part.first, part.start, table_XE.shape[1], PULL=pull, PARTIAL=regions.partial,
        RESULTS=regions.results, POSITIONS=regions.positions, FLAGS=regions.ready, D=regions.hidden,
        BLOCK=min(chunk, triton.next_power_of_2(regions.hidden)), CHUNKS=chunks, **_shape(regions),
        num_warps=4, **dependent(cell.device),
    )  # fmt: skip


def _collect_chunk(tokens: int, regions: Regions, most_programs: int) -> int:
    """Elements of a row that a program sums at once. Fewer are quicker while there are programs for them: of a graph's
    rows most may be padding, and those that are not should not be left to a few programs."""
    if regions.partial:
        return _PARTIAL_BLOCK
    fine = tokens * triton.cdiv(regions.hidden, _FINE_BLOCK)
    return _FINE_BLOCK if tokens < 256 or fine <= 2 * most_programs else _BLOCK


def _shape(regions: Regions) -> dict[str, int]:
    return {"K": regions.top_k, "KP": triton.next_power_of_2(regions.top_k)}


@triton.jit
def owner_of(e, known, n, mine, table, E):
    """The peer slot of the replica that semantic route n of expert e takes: `policies.TokenHash`."""
    key = (mine * 1000003 + n + e.to(tl.int64) * 40503) * -7046029254386353131
    number = (key >> 33) & 0x7FFFFFFF
    replicas = tl.load(table + E + e, mask=known, other=1).to(tl.int64)
    return tl.load(table + (2 + number % replicas) * E + e, mask=known, other=-1)


@triton.jit
def _quantized(row, BLOCK: tl.constexpr):
    """FP8 data [BLOCK] and scales [BLOCK / 128] of fp32 numbers, as `quantize.quantize_rows` has them."""
    values = tl.reshape(row, (BLOCK // 128, 128))
    broken = tl.max((values != values).to(tl.int32), axis=1) > 0
    scale = tl.where(broken, float("nan"), fp8_scale(tl.max(tl.abs(values), axis=1)))
    return tl.reshape(tl.div_rn(values, scale[:, None]).to(tl.float8e4nv), (BLOCK,)), scale


@triton.jit
def tell_all(windows, num_peers, mine, value, FLAGS: tl.constexpr):
    """After all that this program and those it has heard of wrote: raise my flag in every window."""
    for p in range(num_peers):
        flag = (tl.load(windows + p) + FLAGS).to(tl.pointer_type(tl.int64)) + mine
        tl.atomic_max(flag, value, sem="release", scope="sys")


@triton.jit
def hear_from_all(flags, value, cell, failure, num_peers, PHASE: tl.constexpr):
    """Wait for every peer's flag to reach `value`; whether one did not, within the limit."""
    limit = tl.load(cell + LIMIT)
    missing = 0
    for p in range(num_peers):
        seen = tl.atomic_add(flags + p, 0, sem="acquire", scope="sys")
        if seen < value:
            start = globaltimer()
            waited = start - start
            while (seen < value) & (waited < limit):
                seen = tl.atomic_add(flags + p, 0, sem="acquire", scope="sys")
                waited = globaltimer() - start
        if seen < value:
            missing = 1
            if tl.atomic_cas(cell + FAILED, tl.zeros((), tl.int64), tl.cast(p + 1, tl.int64)) == 0:
                tl.store(failure, p + 1)
                tl.store(failure + 1, PHASE)
                tl.store(failure + 2, value)
    return missing


@triton.jit(do_not_specialize=["T", "C", "first"])
def _push_kernel(
    hidden, ids, gates, table, windows, cell, T, C, first, E, QUANTIZED: tl.constexpr, ROWS: tl.constexpr,
    SCALES: tl.constexpr, IDS: tl.constexpr, GATES: tl.constexpr, FLAGS: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if tl.load(cell + FAILED) != 0:
        return
    num_peers, mine = tl.load(cell + PEERS), tl.load(cell + MINE)
    value = tl.load(cell + PUSHES) + 1
    k = tl.arange(0, KP)
    for item in range(tl.program_id(0), C * CHUNKS, tl.num_programs(0)):
        t = item // CHUNKS
        d = (item % CHUNKS) * BLOCK + tl.arange(0, BLOCK)
        n = t * K + k
        e = tl.load(ids + n, mask=(t < T) & (k < K), other=-1).to(tl.int32)
        known = (e >= 0) & (e < E)
        owner = owner_of(e, known, n, mine, table, E)
        row = tl.load(hidden + t.to(tl.int64) * D + d, mask=(t < T) & (d < D), other=0.0)
        if QUANTIZED:
            row, scale = _quantized(row.to(tl.float32), BLOCK)
        at = first + mine * C + t
        for p in range(num_peers):
            base = tl.load(windows + p)
            theirs = owner == p
            if tl.sum(theirs.to(tl.int32)) > 0:
                rows = tl.multiple_of((base + ROWS).to(tl.pointer_type(row.dtype)), 16)
                tl.store(rows + at * D + d, row, mask=d < D)
                if QUANTIZED:
                    b = (item % CHUNKS) * (BLOCK // 128) + tl.arange(0, BLOCK // 128)
                    scales = (base + SCALES).to(tl.pointer_type(tl.float32)) + at * (D // 128)
                    tl.store(scales + b, scale, mask=b < D // 128)
            if item % CHUNKS == 0:
                tl.store((base + IDS).to(tl.pointer_type(tl.int32)) + at * K + k, tl.where(theirs, e, -1), mask=k < K)
                if gates is not None:
                    gate = tl.load(gates + n, mask=theirs & (k < K), other=0.0).to(tl.float32)
                    tl.store((base + GATES).to(tl.pointer_type(tl.float32)) + at * K + k, gate, mask=k < K)
    # All threads' stores first; who is last has heard of every program's.
    tl.debug_barrier()
    if tl.atomic_add(cell + _PUSHED, 1, sem="acq_rel", scope="sys") == tl.num_programs(0) - 1:
        tl.atomic_xchg(cell + _PUSHED, tl.zeros((), tl.int64))
        tell_all(windows, num_peers, mine, value, FLAGS)
        tl.store(cell + PUSHES, value)


@triton.jit(do_not_specialize=["C", "first", "M"])
def _wait_kernel(flags, cell, failure, ids, C, first, M, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
    if tl.load(cell + FAILED) != 0:
        return
    num_peers = tl.load(cell + PEERS)
    value = tl.load(cell + WAITS) + 1
    i = tl.arange(0, BLOCK)
    absent = first + num_peers * C
    for start in range(absent * K, (first + M * C) * K, BLOCK):
        tl.store(ids + start + i, tl.full((BLOCK,), -1, tl.int32), mask=start + i < (first + M * C) * K)
    hear_from_all(flags, value, cell, failure, num_peers, 0)
    if PDL:
        # No earlier: launches that only wait for this one would take the room of pushes that it waits for.
        gdc_launch_dependents()
    tl.store(cell + WAITS, value)


@triton.jit(do_not_specialize=["T", "C", "first", "begin"])
def _collect_kernel(
    ids, gates, table, windows, window, cell, flags, failure, out, T, C, first, begin, E, PULL: tl.constexpr,
    PARTIAL: tl.constexpr, RESULTS: tl.constexpr, POSITIONS: tl.constexpr, FLAGS: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if tl.load(cell + FAILED) != 0:
        return
    num_peers, mine = tl.load(cell + PEERS), tl.load(cell + MINE)
    value = tl.load(cell + COLLECTS) + 1
    if tl.program_id(0) == 0:
        # The experts' launches have ended: what they wrote is here for everybody.
        tell_all(windows, num_peers, mine, value, FLAGS)
    missing = hear_from_all(flags, value, cell, failure, num_peers, 1)
    # One thread has heard; now the others know too.
    tl.debug_barrier()
    if missing == 0:
        for item in range(tl.program_id(0), T * CHUNKS, tl.num_programs(0)):
            t = item // CHUNKS
            d = (item % CHUNKS) * BLOCK + tl.arange(0, BLOCK)
            if PARTIAL:
                total = _of_owners(
                    ids, table, window, out, t, d, C, first, E, num_peers, mine, RESULTS, D, K, KP, BLOCK
                )
            else:
                total = _of_routes(ids, gates, table, windows, window, out, t, d, C, first, begin, E, mine, PULL,
                                   RESULTS, POSITIONS, D, K, BLOCK)  # fmt: skip
            tl.store(out + t.to(tl.int64) * D + d, total.to(out.dtype.element_ty), mask=d < D)
    if tl.atomic_add(cell + COLLECTED, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.atomic_xchg(cell + COLLECTED, tl.zeros((), tl.int64))
        tl.store(cell + COLLECTS, value)


@triton.jit
def _of_routes(
    ids, gates, table, windows, window, out, t, d, C, first, begin, E, mine, PULL: tl.constexpr,
    RESULTS: tl.constexpr, POSITIONS: tl.constexpr, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Elements `d` of token `t`: its routes' results, gate-weighted, in route-slot order."""
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        n = t * K + k
        e = tl.load(ids + n).to(tl.int32)
        known = (e >= 0) & (e < E)
        if PULL:
            p = owner_of(e, known, n, mine, table, E)
            base = tl.load(windows + p, mask=known, other=0)
            where = (base + POSITIONS).to(tl.pointer_type(tl.int32)) + (first + mine * C + t) * K + k
            r = first * K + tl.load(where, mask=known, other=0).to(tl.int64)
            rows = tl.multiple_of((base + RESULTS).to(tl.pointer_type(out.dtype.element_ty)), 16)
        else:
            r = begin * K + n.to(tl.int64)
            rows = (window + RESULTS).to(tl.pointer_type(out.dtype.element_ty))
        result = tl.load(rows + r * D + d, mask=(d < D) & known, other=0.0).to(tl.float32)
        total += weighted(result, tl.load(gates + n), out.dtype.element_ty)
    return total


@triton.jit
def _of_owners(
    ids, table, window, out, t, d, C, first, E, num_peers, mine, RESULTS: tl.constexpr, D: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Elements `d` of token `t`: the sums of the peers that own one of its routes, in peer-slot order."""
    rows = tl.multiple_of((window + RESULTS).to(tl.pointer_type(out.dtype.element_ty)), 16)
    k = tl.arange(0, KP)
    n = t * K + k
    e = tl.load(ids + n, mask=k < K, other=-1).to(tl.int32)
    owner = owner_of(e, (e >= 0) & (e < E), n, mine, table, E)
    total = tl.zeros((BLOCK,), tl.float32)
    for p in range(num_peers):
        theirs = tl.sum((owner == p).to(tl.int32)) > 0
        at = (first + p * C + t).to(tl.int64) * D
        total += tl.load(rows + at + d, mask=(d < D) & theirs, other=0.0).to(tl.float32)
    return total
