"""A whole MoE layer of a few tokens in one launch, bound by the reading of weights and little else (Hopper, Gluon).

    owners -> gate/up of every (expert, 64 columns) -> [all programs] -> down -> [all programs] -> weighted sum

No sort: an expert that any token chose is computed for all TP token columns, since TP columns cost no more memory
traffic than one. Weights are the wgmma's M side. One program per multiprocessor: a producer warp streams weight blocks
through a ring of shared memory and never pauses between the phases, so that the down weights are under way while other
programs still finish gate/up; a warpgroup consumes them. Reduction orders depend on shapes alone.
Letters: T tokens, TP token columns, K top-k, R = T * K routes, A active experts, D hidden, F FFN, P parts of F.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ray_moe.kernels.activation import SwiGLU
from ray_moe.kernels.epilogue import swiglu, weighted
from ray_moe.kernels.launch import multiprocessors

# Triton 3.7 renamed it.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
BLOCK, DEPTH = gl.constexpr(64), gl.constexpr(128)  # rows of a weight block, one warpgroup's; and its columns
_STAGES = 6  # of 32 KiB of weights and at most 4 KiB of rows each, in 227 KiB
MOST_ROUTES = 128  # a thread compares one of them with all


@gluon.jit
def _add(left, right):
    return left + right


@gluon.jit
def _fence_global():
    """Orders this thread's ordinary accesses to global memory and those of the bulk copy engine."""
    lanes = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, $1;", "=r,r", [lanes], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _all_programs(arrivals, PROGRAMS: gl.constexpr):
    """Wait until every program is here. `arrivals` only ever grows, so that no launch has to reset it.

    The launch is cooperative: all programs run at once, or none does, so that none waits for one that cannot begin.
    """
    _fence_global()
    _barrier()
    before = gl.atomic_add(arrivals, gl.to_tensor(1).to(gl.int64), sem="acq_rel", scope="gpu")
    goal = (before // PROGRAMS + 1) * PROGRAMS
    seen = before + 1
    while seen < goal:
        seen = gl.inline_asm_elementwise(
            "ld.acquire.gpu.global.u64 $0, [$1];", "=l,l", [arrivals], dtype=gl.int64, is_pure=False, pack=1
        )
    _barrier()


@gluon.jit
def _find_owners(ids, slots, owner_slot, owner_of, R, RP: gl.constexpr, EP: gl.constexpr, E: gl.constexpr):
    """Number the distinct experts by their first route: owner -> pool slot, and route -> owner. Returns A."""
    square: gl.constexpr = gl.BlockedLayout([1, RP], [32, 1], [4, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    route = gl.arange(0, RP, layout=gl.SliceLayout(1, square))
    other = gl.arange(0, RP, layout=gl.SliceLayout(0, square))
    # All loads before the first use: each may be a miss, and none depends on another.
    mine = gl.load(ids + route, mask=route < R, other=-1).to(gl.int32)
    theirs = gl.load(ids + other, mask=other < R, other=-1).to(gl.int32)
    expert = gl.arange(0, EP, layout=line)
    slot = gl.load(slots + expert, mask=expert < E, other=0)
    same = mine[:, None] == theirs[None, :]
    first = gl.min(gl.where(same, gl.zeros([RP, RP], gl.int32, square) + other[None, :], RP), 1)
    # Scans and gathers want a plain layout.
    route, first, mine = gl.arange(0, RP, layout=line), gl.convert_layout(first, line), gl.convert_layout(mine, line)
    owns = (first == route) & (mine >= 0) & (mine < E)
    rank = gl.associative_scan(owns.to(gl.int32), 0, _add) - 1
    gl.store(owner_slot + rank, gl.gather(slot, gl.where(owns, mine, 0), 0), mask=owns)
    gl.store(owner_of + route, gl.gather(rank, first, 0), mask=route < R)
    return gl.sum(owns.to(gl.int32), 0)


@gluon.jit
def _accumulate(weights, rows, full, empty, step, blocks, TP: gl.constexpr, STAGES: gl.constexpr):
    """Two products [64, TP] of the next `blocks` stages; returns them and the following stage's number."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TP, 16])
    upper = gl.zeros([BLOCK, TP], gl.float32, layout)
    lower = gl.zeros([BLOCK, TP], gl.float32, layout)
    for block in range(blocks):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        columns = rows.index(stage).permute((1, 0))
        upper = warpgroup_mma(weights.index(2 * stage), columns, upper, is_async=True)
        lower = warpgroup_mma(weights.index(2 * stage + 1), columns, lower, is_async=True)
        # This block's products may still run; the last block's have ended.
        upper, lower = warpgroup_mma_wait(num_outstanding=2, deps=(upper, lower))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=block > 0)
        step += 1
    upper, lower = warpgroup_mma_wait(num_outstanding=0, deps=(upper, lower))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    return upper, lower, step


@gluon.jit
def _store_columns(into, column_stride, block, TP: gl.constexpr):
    """Store [64, TP] as TP rows of 64 neighbours."""
    WIDE: gl.constexpr = 8 if TP >= 16 else 4
    layout: gl.constexpr = gl.BlockedLayout([1, WIDE], [WIDE // 2, 64 // WIDE], [4, 1], [1, 0])
    tokens = gl.arange(0, TP, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))
    target = into + tokens[:, None] * column_stride + columns[None, :]
    gl.store(target, gl.convert_layout(block.to(into.dtype.element_ty).permute((1, 0)), layout))


@gluon.jit
def _consume(
    weights,
    rows,
    full,
    empty,
    acted,
    counts,
    pointers,
    E: gl.constexpr,
    shape: gl.constexpr,
    activation: gl.constexpr,
):
    """The default partition: products, epilogues, the two meetings of all programs, and the weighted sum."""
    TP: gl.constexpr = shape[0]
    TOP_K: gl.constexpr = shape[1]
    D: gl.constexpr = shape[2]
    F: gl.constexpr = shape[3]
    PARTS: gl.constexpr = shape[4]
    CAPACITY: gl.constexpr = shape[5]
    STAGES: gl.constexpr = shape[6]
    PROGRAMS: gl.constexpr = shape[7]
    active, num_tokens = counts
    ids, gates, owner_of, acts, outs, out, arrivals = pointers
    step = 0
    TILES_F: gl.constexpr = F // BLOCK
    for tile in range(gl.program_id(0), active * TILES_F, PROGRAMS):
        owner, column = tile // TILES_F, tile % TILES_F * BLOCK
        gate, up, step = _accumulate(weights, rows, full, empty, step, D // DEPTH, TP, STAGES)
        block = swiglu(gate, up, activation[0], activation[1], activation[2])
        _store_columns(acts + owner * TP * F + column, F, block, TP)
    _all_programs(arrivals, PROGRAMS)
    mbarrier.arrive(acted, count=1)

    TILES_D: gl.constexpr = D // (2 * BLOCK)
    for tile in range(gl.program_id(0), active * TILES_D * PARTS, PROGRAMS):
        owner, column, part = tile // (TILES_D * PARTS), tile // PARTS % TILES_D * 2 * BLOCK, tile % PARTS
        upper, lower, step = _accumulate(weights, rows, full, empty, step, F // (PARTS * DEPTH), TP, STAGES)
        into = outs + (part * CAPACITY + owner) * TP * D + column
        _store_columns(into, D, upper, TP)
        _store_columns(into + BLOCK, D, lower, TP)
    _all_programs(arrivals, PROGRAMS)

    WIDTH: gl.constexpr = 128
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    columns = gl.arange(0, WIDTH, layout=flat)
    for unit in range(gl.program_id(0), num_tokens * (D // WIDTH), PROGRAMS):
        token, column = unit // (D // WIDTH), unit % (D // WIDTH) * WIDTH
        total = gl.zeros([WIDTH], gl.float32, flat)
        for k in gl.static_range(TOP_K):
            route = token * TOP_K + k
            expert = gl.load(ids + route)
            valid = (expert >= 0) & (expert < E)
            row = outs + (gl.load(owner_of + route) * TP + token) * D + column + columns
            value = gl.load(row, mask=valid, other=0.0).to(gl.float32)
            for part in gl.static_range(1, PARTS):
                value += gl.load(row + part * CAPACITY * TP * D, mask=valid, other=0.0)
            # An expert's row has the payload's dtype on every path, so it is rounded to it here as well.
            value = value.to(out.dtype.element_ty).to(gl.float32)
            total += weighted(value, gl.load(gates + route), out.dtype.element_ty)
        gl.store(out + token * D + column + columns, total.to(out.dtype.element_ty))


@gluon.jit
def _load_weights(desc, weights, full, empty, step, row, other_row, column, TP: gl.constexpr, STAGES: gl.constexpr):
    stage = step % STAGES
    mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), (2 * BLOCK + TP) * DEPTH * 2)
    tma.async_copy_global_to_shared(desc, [row, column], full.index(stage), weights.index(2 * stage))
    tma.async_copy_global_to_shared(desc, [other_row, column], full.index(stage), weights.index(2 * stage + 1))


@gluon.jit
def _down_block(number, owner_slot, D: gl.constexpr, F: gl.constexpr, PARTS: gl.constexpr, PROGRAMS: gl.constexpr):
    """Where the program's down block with this number begins: weight row, weight column, owner."""
    BLOCKS: gl.constexpr = F // (PARTS * DEPTH)
    TILES_D: gl.constexpr = D // (2 * BLOCK)
    tile = gl.program_id(0) + number // BLOCKS * PROGRAMS
    owner, row, part = tile // (TILES_D * PARTS), tile // PARTS % TILES_D * 2 * BLOCK, tile % PARTS
    return gl.load(owner_slot + owner) * D + row, (part * BLOCKS + number % BLOCKS) * DEPTH, owner


@gluon.jit
def _produce(
    weights,
    rows,
    full,
    empty,
    acted,
    counts,
    descs,
    owner_slot,
    shape: gl.constexpr,
):
    """One warp: blocks of weights and of the rows that they multiply, in the consumer's order."""
    TP: gl.constexpr = shape[0]
    D: gl.constexpr = shape[2]
    F: gl.constexpr = shape[3]
    PARTS: gl.constexpr = shape[4]
    STAGES: gl.constexpr = shape[6]
    PROGRAMS: gl.constexpr = shape[7]
    active, _ = counts
    hidden_desc, gate_up_desc, down_desc, acts_desc = descs
    step = 0
    TILES_F: gl.constexpr = F // BLOCK
    for tile in range(gl.program_id(0), active * TILES_F, PROGRAMS):
        row = gl.load(owner_slot + tile // TILES_F) * 2 * F + tile % TILES_F * BLOCK
        for block in range(D // DEPTH):
            column = block * DEPTH
            _load_weights(gate_up_desc, weights, full, empty, step, row, row + F, column, TP, STAGES)
            stage = step % STAGES
            tma.async_copy_global_to_shared(hidden_desc, [0, column], full.index(stage), rows.index(stage))
            step += 1

    # Down weights wait for nobody; the rows that they multiply wait for all programs.
    TILES: gl.constexpr = D // (2 * BLOCK) * PARTS
    tiles = gl.maximum(active * TILES - gl.program_id(0) + PROGRAMS - 1, 0) // PROGRAMS
    total = tiles * (F // (PARTS * DEPTH))
    ahead = gl.minimum(total, STAGES)
    for number in range(ahead):
        row, column, owner = _down_block(number, owner_slot, D, F, PARTS, PROGRAMS)
        _load_weights(down_desc, weights, full, empty, step + number, row, row + BLOCK, column, TP, STAGES)
    mbarrier.wait(acted, 0)
    _fence_global()
    for number in range(ahead):
        row, column, owner = _down_block(number, owner_slot, D, F, PARTS, PROGRAMS)
        stage = (step + number) % STAGES
        tma.async_copy_global_to_shared(acts_desc, [owner * TP, column], full.index(stage), rows.index(stage))
    for number in range(ahead, total):
        row, column, owner = _down_block(number, owner_slot, D, F, PARTS, PROGRAMS)
        _load_weights(down_desc, weights, full, empty, step + number, row, row + BLOCK, column, TP, STAGES)
        stage = (step + number) % STAGES
        tma.async_copy_global_to_shared(acts_desc, [owner * TP, column], full.index(stage), rows.index(stage))


@gluon.jit
def decode_layer_kernel(
    hidden_desc, gate_up_desc, down_desc, acts_desc, ids, gates, slots, owners, acts, outs,
    out, arrivals, num_tokens, RP: gl.constexpr, EP: gl.constexpr, E: gl.constexpr, shape: gl.constexpr,
    activation: gl.constexpr,
):  # fmt: skip
    """See the module. `shape` is (TP, K, D, F, P, owner capacity, stages, programs); `activation` SwiGLU's numbers."""
    TP: gl.constexpr = shape[0]
    STAGES: gl.constexpr = shape[6]
    block_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, DEPTH], gl.bfloat16)
    rows_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TP, DEPTH], gl.bfloat16)
    weights = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, BLOCK, DEPTH], block_layout)
    rows = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TP, DEPTH], rows_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    acted = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    mbarrier.init(acted, count=1)
    fence_async_shared()
    owner_slot = owners + gl.program_id(0) * 2 * RP  # each program its own copy: nobody else's is awaited
    owner_of = owner_slot + RP
    active = _find_owners(ids, slots, owner_slot, owner_of, num_tokens * shape[1], RP, EP, E)
    _barrier()
    counts = (active, num_tokens)
    pointers = (ids, gates, owner_of, acts, outs, out, arrivals)
    descs = (hidden_desc, gate_up_desc, down_desc, acts_desc)
    gl.warp_specialize(
        [
            (_consume, (weights, rows, full, empty, acted, counts, pointers, E, shape, activation)),
            (_produce, (weights, rows, full, empty, acted, counts, descs, owner_slot, shape)),
        ],
        [1],
        [64],
    )


@dataclass(frozen=True)
class DecodeTile:
    """`columns`: token columns, 8 or 16. `parts`: programs that share the depth of one down block.

    D must be a multiple of 128, F of 128 * parts; `columns` * K at most `MOST_ROUTES`.
    """

    columns: int
    parts: int = 1


@dataclass(frozen=True, eq=False)
class DecodeBuffers:
    """What a launch writes beside its result; `arrivals` must begin at zero and belongs to this kernel alone."""

    owners: Tensor
    acts: Tensor
    outs: Tensor
    arrivals: Tensor

    @staticmethod
    def allocate(tile: DecodeTile, most_owners: int, hidden: int, ffn: int, device: torch.device) -> DecodeBuffers:
        rows = most_owners * tile.columns
        outs_dtype = torch.bfloat16 if tile.parts == 1 else torch.float32
        return DecodeBuffers(
            owners=torch.empty(multiprocessors(device) * 2 * MOST_ROUTES, dtype=torch.int32, device=device),
            acts=torch.empty(rows, ffn, dtype=torch.bfloat16, device=device),
            outs=torch.empty(tile.parts * rows, hidden, dtype=outs_dtype, device=device),
            arrivals=torch.zeros(1, dtype=torch.int64, device=device),
        )


def weights_descriptor(slab: Tensor) -> TensorDescriptor:
    """Reads [64, 128] of a slab [pool, rows, columns]."""
    return _descriptor(slab.view(-1, slab.shape[-1]), 64)


def _descriptor(matrix: Tensor, rows: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for([rows, 128], gl.bfloat16)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, 128], layout)


def decode_layer(
    hidden_TD: Tensor,
    ids_TK: Tensor,
    gates_TK: Tensor,
    slots_E: Tensor,
    gate_up: TensorDescriptor,
    down: TensorDescriptor,
    activation: SwiGLU,
    tile: DecodeTile,
    buffers: DecodeBuffers,
    out_TD: Tensor,
) -> None:
    """`out_TD` [T, D] = the gate-weighted sum of each token's experts; T at most `tile.columns`, bf16.

    An id outside [0, E) is nobody's route; `slots_E` int32 gives each expert's pool slot. Experts have no biases.
    """
    num_tokens, hidden = hidden_TD.shape
    top_k, ffn = ids_TK.shape[1], buffers.acts.shape[1]
    routes = max(16, triton.next_power_of_2(tile.columns * top_k))
    programs, num_experts = multiprocessors(hidden_TD.device), slots_E.numel()
    shape = (tile.columns, top_k, hidden, ffn, tile.parts, buffers.acts.shape[0] // tile.columns)
    decode_layer_kernel[(programs,)](
        _descriptor(hidden_TD, tile.columns), gate_up, down, _descriptor(buffers.acts, tile.columns),
        ids_TK, gates_TK, slots_E, buffers.owners, buffers.acts, buffers.outs, out_TD,
        buffers.arrivals, num_tokens, RP=routes, EP=max(128, triton.next_power_of_2(num_experts)), E=num_experts,
        shape=(*shape, _STAGES, programs),
        activation=(activation.limit, activation.alpha, activation.up_shift), num_warps=4, launch_cooperative_grid=True,
    )  # fmt: skip
