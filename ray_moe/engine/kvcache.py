"""The paged KV cache: whose keys and values each block holds, and what a unit reads and writes of it.

Flow: the scheduler takes blocks from a `BlockAllocator` and packs rows into a `UnitBatch`; `KVCache.bind` joins it with
the pools and computes, once per unit, what every layer shares; the model is called with `ray_moe=<bound unit>`, and
each attention layer calls `attention.paged_attention`, which writes the unit's keys and values into its pool and
attends over it.

Writes go to the positions that the unit names, so the same unit can be forwarded again after a failure. Units run in
the order of their plans: a block freed while a unit that reads it is still to run is overwritten only by a later unit.

Letters: T packed tokens, B requests, W blocks per request, N gathered positions, H heads, D head dim. Sizes are in
tokens; a write slot is block * block_size + offset.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from ray_moe.engine.attention import Attention, TorchAttention
from ray_moe.engine.units import UnitBatch
from ray_moe.errors import ConfigError, RequestError, SlotError

ViewT = TypeVar("ViewT")


class BlockAllocator:
    """Hands out KV blocks 0 .. num_blocks - 1; a block has one owner at a time."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ConfigError(f"num_blocks is {num_blocks}; it must be >= 1")
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._is_free = [True] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Takes `count` blocks, least recently used first. Raises SlotError, and takes none, when fewer are free."""
        if not 0 <= count <= len(self._free):
            raise SlotError(f"asked for {count} KV blocks; {len(self._free)} of {self.num_blocks} are free")
        blocks = tuple(self._free.popleft() for _ in range(count))
        for block in blocks:
            self._is_free[block] = False
        return blocks

    def deallocate(self, blocks: Iterable[int]) -> None:
        """Gives blocks back. Raises SlotError on a block that is free already."""
        for block in blocks:
            if self._is_free[block]:
                raise SlotError(f"KV block {block} is given back but has no owner ({self.num_blocks} blocks)")
            self._is_free[block] = True
            self._free.append(block)


class KVCache:
    """One pool per layer: [positions, KV heads, 2 * head_dim], a position's key beside its value.

    Beyond the blocks of requests it has one more, `padding_block`, which nobody reads: padding rows write there.

    A pool takes its heads, head_dim and dtype from the first key and value that the layer writes. Where key and value
    head dims differ (expanded MLA) the narrower is stored padded with zeros, which changes no dot product and lets one
    gather and one fused kernel serve every model.
    """

    def __init__(self, num_blocks: int, block_size: int, device: torch.device | str = "cpu") -> None:
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(f"num_blocks is {num_blocks} and block_size {block_size}; both must be >= 1")
        self.num_blocks, self.block_size, self.device = num_blocks, block_size, torch.device(device)
        self.padding_block = num_blocks
        self.attention = attention_on(self.device)
        self.pools: dict[int, Tensor] = {}

    def bind(self, batch: UnitBatch) -> BoundUnit:
        """The unit as the attention layers take it (`ray_moe=`). Bind once, forward any number of times."""
        return BoundUnit(batch, self)

    def write(self, layer: int, slots_T: Tensor, key_HTD: Tensor, value_HTD: Tensor) -> Tensor:
        """Stores the unit's keys and values and returns the layer's pool. Writing the same again changes nothing."""
        pool = self.pools.get(layer)
        if pool is None:
            head_dim = max(key_HTD.shape[-1], value_HTD.shape[-1])
            pool = self._make_pool(layer, (key_HTD.shape[0], 2 * head_dim), key_HTD.dtype)
        self.attention.write(pool, slots_T, key_HTD, value_HTD)
        return pool

    # ---- hand-over ----

    @property
    def position_bytes(self) -> int:
        """Bytes of one position's KV over all layers that have written; 0 before the first unit."""
        return sum(pool[0].numel() * pool.element_size() for pool in self.pools.values())

    def read(self, blocks: Sequence[int], positions: int) -> dict[int, Tensor]:
        """A copy on the host of what `blocks` hold: by layer, [positions, KV heads, 2 * head_dim]."""
        slots_N = self._slots(blocks, positions)
        return {layer: pool.index_select(0, slots_N).cpu() for layer, pool in self.pools.items()}

    def restore(self, blocks: Sequence[int], kv: Mapping[int, Tensor]) -> None:
        """The inverse of `read`, into any blocks of any cache of the same model. `check` first: nothing is checked."""
        for layer, entry_NHD in kv.items():
            slots_N = self._slots(blocks, len(entry_NHD))
            pool = self.pools.get(layer)
            if pool is None:
                pool = self._make_pool(layer, tuple(entry_NHD.shape[1:]), entry_NHD.dtype)
            pool.index_copy_(0, slots_N, entry_NHD.to(self.device))

    def check(self, kv: Mapping[int, Tensor]) -> None:
        """RequestError unless `kv` has the layers, KV heads, head_dim and dtype of this cache, once it has any."""
        if self.pools and set(kv) != set(self.pools):
            raise RequestError(f"KV came for layers {sorted(kv)}; this cache has {sorted(self.pools)}", "kv")
        for layer, pool in self.pools.items():
            entry = kv[layer]
            if entry.shape[1:] != pool.shape[1:] or entry.dtype != pool.dtype:
                raise RequestError(
                    f"layer {layer}: KV of {tuple(entry.shape[1:])} {entry.dtype} came; "
                    f"this cache has {tuple(pool.shape[1:])} {pool.dtype}",
                    "kv",
                )

    def _slots(self, blocks: Sequence[int], positions: int) -> Tensor:
        first_W1 = torch.tensor(blocks, dtype=torch.int64)[:, None] * self.block_size
        return (first_W1 + torch.arange(self.block_size)).flatten()[:positions].to(self.device)

    def _make_pool(self, layer: int, entry_shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):  # else only code in inference mode could write to it
            pool = torch.zeros((self.num_blocks + 1) * self.block_size, *entry_shape, dtype=dtype, device=self.device)
        self.pools[layer] = pool
        return pool


def attention_on(device: torch.device) -> Attention:
    """Our kernels where they run, torch's operations elsewhere."""
    if device.type != "cuda":
        return TorchAttention()
    try:
        from ray_moe.engine.cuda_attention import CudaAttention
    except ModuleNotFoundError as missing:
        if missing.name != "triton":
            raise
        return TorchAttention()
    return CudaAttention()


@dataclass(frozen=True)
class BoundUnit:
    """A unit and its cache. Views are computed once per sliding window, not once per layer."""

    batch: UnitBatch
    cache: KVCache
    _views: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def view(self, window: int | None, make: Callable[[BoundUnit, int | None], ViewT]) -> ViewT:
        """`make(self, window)`, made once."""
        key = (make, window)
        if key not in self._views:
            self._views[key] = make(self, window)
        found: ViewT = self._views[key]
        return found
