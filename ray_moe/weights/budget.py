"""What a peer's memory is to hold, in sums, before any of it is taken. Pure: bytes in, bytes or a refusal out.

Letters: T tokens of a unit, K top-k, N = T*K routes, R rows, D hidden, F ffn, V vocabulary, P peers, L MoE layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from ray_moe.errors import ConfigError

GIB = 2**30
# Of a captured step, and what the driver keeps of each launch on the device: 25 graphs of 48 layers took 0.9 GiB of an
# H200, of which inputs, logits and a step's own rows explain 0.66.
LAUNCHES_PER_LAYER, LAUNCH_BYTES = 24, 9216


@dataclass(frozen=True)
class ModelNeeds:
    """What one peer's memory holds of a model, in bytes, and its widths; `itemsize` is of its dtype.

    `slot` is one slot in each of `layers`, `kv_position` one position's keys and values in every layer with attention.
    `attention` is what one layer's attention has of a token, query, key, value and result, in elements; `positions` the
    longest sequence that the model is made for.
    """

    trunk: int
    slot: int
    layers: tuple[int, ...]
    num_experts: int
    kv_position: int
    hidden: int
    ffn: int
    top_k: int
    vocab: int
    itemsize: int
    attention: int
    positions: int


@dataclass(frozen=True)
class Sizes:
    """What a configuration asks of every peer. `held` and `spare` are slots of a layer; `bucket_rows` are rows of a
    slot, the largest of each decode bucket.

    On a CUDA device besides: the rows of each decode graph, and bytes of the window and of what kernels write into
    (`kernels.regions` has their sums).
    """

    peers: int
    held: int
    spare: int
    kv_blocks: int
    block_size: int
    tokens: int
    decode_rows: int
    bucket_rows: Sequence[int] = ()
    graph_rows: Sequence[int] = ()
    window: int = 0
    workspace: int = 0

    @property
    def slots(self) -> int:
        return self.held + self.spare


@dataclass(frozen=True)
class Budget:
    """What a peer may take, and who says so: the bytes, and words such as "memory_bytes"."""

    nbytes: int
    origin: str

    @classmethod
    def of(cls, memory_bytes: int | None, fraction: float, free: int, device: str, sharers: int = 1) -> Budget:
        """Of `free` bytes on a device that so many peers share: `memory_bytes`, or by default a fraction of the share.

        What is given explicitly may use all that is free, and no more.
        """
        each = free // sharers
        of = f"{_size(free)} free on {device}" + (f" for {sharers} peers" if sharers > 1 else "")
        if memory_bytes is None:
            return cls(int(each * fraction), f"memory_fraction {fraction:g} of {of}")
        if memory_bytes > each:
            return cls(each, f"{of}, less than memory_bytes {memory_bytes}")
        return cls(memory_bytes, f"memory_bytes {memory_bytes}")


@dataclass(frozen=True)
class Sums:
    """The terms of one peer, in bytes."""

    trunk: int
    slots: int
    kv: int
    work: int
    graphs: int
    window: int
    workspace: int

    @property
    def total(self) -> int:
        return sum(astuple(self))


def add_up(needs: ModelNeeds, sizes: Sizes) -> Sums:
    """The terms; `work` is a bound for what steps take beside them. What CUDA and its libraries take for themselves is
    not among them: that is what `memory_fraction` leaves."""
    blocks = sizes.kv_blocks + 1 if sizes.kv_blocks else 0  # one more, which padding rows write
    return Sums(
        trunk=needs.trunk,
        slots=needs.slot * sizes.slots,
        kv=needs.kv_position * blocks * sizes.block_size,
        work=_work(needs, sizes),
        graphs=_graphs(needs, sizes),
        window=sizes.window,
        workspace=sizes.workspace,
    )


def _work(needs: ModelNeeds, sizes: Sizes) -> int:
    """Rows of one unit at their worst: every peer's routes arrive here; a peer runs one layer at a time."""
    D, F = needs.hidden, needs.ffn
    tokens = max(sizes.tokens, sizes.decode_rows)
    routes = tokens * needs.top_k
    per_row = 2 * D + 3 * F  # in, gate and up, activated, out
    sent = 2 * D * routes  # there and back
    fixed = sum(rows * sizes.slots * per_row for rows in sizes.bucket_rows)
    rows = sizes.peers * routes * per_row + sent + fixed + _token_elements(needs) * tokens
    logits = 2 * 4 * sizes.decode_rows * needs.vocab  # fp32, once more sorted
    return rows * needs.itemsize + logits


def _token_elements(needs: ModelNeeds) -> int:
    """What one layer of the trunk has of a token at once: residual, norm and results, attention before and after
    rotation."""
    return 4 * needs.hidden + 2 * needs.attention


def _graphs(needs: ModelNeeds, sizes: Sizes) -> int:
    """What decode graphs hold while none of them runs: inputs and logits, which all share; what the largest one's step
    writes, which the others reuse; and the launches of each."""
    if not sizes.graph_rows:
        return 0
    C, L, size = max(sizes.graph_rows), len(needs.layers), needs.itemsize
    table_width = min(sizes.kv_blocks, -(-needs.positions // sizes.block_size))
    inputs = 8 * C * (4 + table_width + 2 + L * needs.top_k)
    logits = 2 * C * needs.vocab * size  # the head's, and the copy that is read
    # Routed results; a router's logits and probabilities in fp32.
    step = C * (_token_elements(needs) + needs.hidden) * size + 8 * C * needs.num_experts
    return inputs + logits + step + len(sizes.graph_rows) * L * LAUNCHES_PER_LAYER * LAUNCH_BYTES


def spare_that_fits(needs: ModelNeeds, sizes: Sizes, budget: Budget) -> int:
    """Spare slots of a layer for what the other terms leave of the budget: at most as many as are held, so that a whole
    other placement can be loaded beside the one that serves. 0 also where not even the others fit."""
    left = budget.nbytes - add_up(needs, replace(sizes, spare=0)).total
    fixed = add_up(needs, replace(sizes, spare=1)).total - add_up(needs, replace(sizes, spare=0)).total
    return min(sizes.held, max(0, left // fixed))


def require_fit(needs: ModelNeeds, sizes: Sizes, budget: Budget, who: str) -> Sums:
    """The terms, when they are within the budget.

    Raises `ConfigError` that names every term, the sum, the budget and its origin, and what would make it fit.
    """
    sums = add_up(needs, sizes)
    over = sums.total - budget.nbytes
    if over <= 0:
        return sums
    spare = f", {sizes.spare} of them spare" if sizes.spare else ""
    on_device = (
        (sums.graphs, f"{len(sizes.graph_rows)} decode graphs of up to {max(sizes.graph_rows, default=0)} rows"),
        (sums.window, f"its window for {sizes.peers} peers"),
        (sums.workspace, "kernel workspace"),
    )
    more = "".join(f" + {name} {_size(nbytes)}" for nbytes, name in on_device if nbytes)
    raise ConfigError(
        f"{who} needs {_size(sums.total)} of memory, {_size(over)} more than its {_size(budget.nbytes)} "
        f"({budget.origin}): trunk {_size(sums.trunk)} + expert slots {_size(sums.slots)} ({sizes.slots} per "
        f"layer{spare}) + KV cache {_size(sums.kv)} ({sizes.kv_blocks} blocks of {sizes.block_size}) + "
        f"work buffers {_size(sums.work)}{more}; {_advice(needs, sizes, over)}"
    )


def _advice(needs: ModelNeeds, sizes: Sizes, over: int) -> str:
    """Each single change that is enough; where there is none, what takes the most."""
    block = needs.kv_position * sizes.block_size
    enough = []
    if needs.slot * sizes.spare >= over:
        enough.append(f"spare_slots to {sizes.spare - -(-over // needs.slot)}")
    if block * (sizes.kv_blocks - 1) >= over:
        enough.append(f"kv_blocks to {sizes.kv_blocks - -(-over // block)}")
    if enough:
        return f"lower {' or '.join(enough)}"
    narrower = ", a dtype of 2 bytes" if needs.itemsize > 2 else ""
    tokens = "max_prefill_tokens and max_decode_rows" if sizes.graph_rows else "max_prefill_tokens"
    return f"more peers (or min_peers){narrower}, fewer spare_slots and kv_blocks, or a smaller {tokens}"


def _size(nbytes: int) -> str:
    """Three digits: 141 GiB, 4.81 GiB; what is far less, 0.213 MiB."""
    size, unit = (nbytes / GIB, "GiB") if nbytes >= GIB / 100 else (nbytes / 2**20, "MiB")
    return f"{size:.0f} {unit}" if size >= 100 else f"{size:.3g} {unit}"
