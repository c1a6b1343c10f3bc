"""Decode units as CUDA graphs: the whole trunk step, captured once for each of a few numbers of rows.

    graphs.bind(view)                      at a step boundary: the tables of all layers, copied into the graphs' cell
    graphs.admit(view, most_rows)          rows of the smallest graph that takes the unit, or why none does
    graphs.launch(view, rows, batch)       inputs, replay, logits of this peer's rows

A captured launch knows no placement: it reads all slot tables in one cell, so that the next generation needs no
capture. Its inputs lie at stable addresses; rows that a unit does not have are padding: they write their keys and
values into the cache's padding block, see no position, and their routes are nobody's (-1), so that nothing counts them.
Peers of one epoch replay graphs of one size, which follows from what they agreed on.

Letters: C rows of a graph, B requests, W blocks per request, L MoE layers, T tokens, K top-k, V vocabulary.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ray_moe.dataplane.local import DeviceLayer
from ray_moe.dataplane.phases import FallbackReason
from ray_moe.dataplane.route_counts import RouteCounts
from ray_moe.engine.blocks import SharedPath
from ray_moe.engine.generation import GenerationView
from ray_moe.engine.kvcache import KVCache
from ray_moe.engine.sampling import SamplingColumns
from ray_moe.engine.trunk import Binding, Trunk
from ray_moe.engine.units import UnitBatch
from ray_moe.errors import BindingError, ConfigError
from ray_moe.routes import Routes

_SMALL = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_NOBODY = -1

Replay = Callable[[], None]
# Calls the first function as it is, then records the second; the result runs what was recorded.
Recorder = Callable[[Callable[[], None], Callable[[], None]], Replay]


def decode_sizes(max_rows: int) -> tuple[int, ...]:
    """Rows of the graphs for units of up to `max_rows`: dense where a row costs most, then by 64.

    40 -> (1, 2, 4, 8, 16, 24, 32, 40). Raises `ConfigError` below 1.
    """
    if max_rows < 1:
        raise ConfigError(f"decode graphs need at least 1 row, found {max_rows}")
    wanted = (*_SMALL, *range(320, max_rows, 64))
    return (*(rows for rows in wanted if rows < max_rows), max_rows)


class CudaRecorder:
    """Records launches in CUDA graphs that share their memory: they run one at a time, in the order of one stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, rehearse: Callable[[], None], run: Callable[[], None]) -> Replay:
        graph, serving = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self._stream.wait_stream(serving)
        with torch.cuda.stream(self._stream):
            rehearse()  # compiles what is launched, and makes what is allocated once
            # Other threads fill slots meanwhile: only what this one does must be fit for a graph.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with suppress(RuntimeError):  # it would hide why
                    graph.capture_end()
                raise
            graph.capture_end()
        serving.wait_stream(self._stream)
        return graph.replay


def recorder_on(device: torch.device) -> Recorder:
    """Graphs on CUDA; elsewhere what is recorded is called again."""
    if device.type == "cuda":
        return CudaRecorder(device)

    def call_again(rehearse: Callable[[], None], run: Callable[[], None]) -> Replay:
        rehearse()
        return run

    return call_again


@dataclass(frozen=True, eq=False)
class _Inputs:
    """What graphs read, at stable addresses, for at most C rows; a smaller graph reads the first of them."""

    columns: Tensor  # int64 [4, C]: token ids, positions, write slots, lengths
    block_table: Tensor  # int64 [C, W]
    padding: Tensor  # int64 [4, 1], a padding row's columns
    first: Tensor  # int64 [C + 1]: row c is packed token c
    mask_C1: Tensor  # int64 [C, 1], 0 for a row that is real and -1, all bits set, for padding
    ids_LTK: Tensor  # int64 [L, C, K], this unit's routes, padding rows' masked

    @staticmethod
    def allocate(rows: int, layers: int, trunk: Trunk, cache: KVCache) -> _Inputs:
        device = cache.device
        width = min(cache.num_blocks, -(-trunk.max_positions // cache.block_size))
        padding = torch.tensor([0, 0, cache.padding_block * cache.block_size, 0], device=device)[:, None]
        return _Inputs(
            columns=padding.expand(4, rows).contiguous(),
            block_table=torch.zeros(rows, width, dtype=torch.int64, device=device),
            padding=padding,
            first=torch.arange(rows + 1, device=device),
            mask_C1=torch.full((rows, 1), _NOBODY, device=device),
            ids_LTK=torch.full((layers, rows, trunk.top_k), _NOBODY, device=device),
        )

    def batch(self, rows: int) -> UnitBatch:
        """The first rows as the unit that a forward takes."""
        ids, positions, slots, lengths = self.columns[:, :rows]
        none = torch.empty(0, dtype=torch.int64, device=ids.device)
        return UnitBatch(
            kind="decode",
            rows=(),
            input_ids=ids[None],
            position_ids=positions[None],
            write_slots=slots,
            cu_q=self.first[: rows + 1],
            kv_len=lengths,
            block_table=self.block_table[:rows],
            sample_rows=self.first[:rows],
            sampling=SamplingColumns(none.double(), none.double(), none, none, none, all_greedy=True),
        )

    def load(self, batch: UnitBatch | None, rows: int) -> None:
        """This unit's rows in front, padding behind them."""
        count = 0
        if batch is not None:
            count, width = batch.block_table.shape
            self.columns[0, :count].copy_(batch.input_ids[0])
            self.columns[1, :count].copy_(batch.position_ids[0])
            self.columns[2, :count].copy_(batch.write_slots)
            self.columns[3, :count].copy_(batch.kv_len)
            self.block_table[:count, :width].copy_(batch.block_table)
        if count < rows:
            self.columns[:, count:rows].copy_(self.padding.expand(4, rows - count))


class DecodeGraphs:
    """The graphs of one trunk over one cache. On the loop's thread, or before the loop runs.

    `sizes` are the rows of the graphs that there may be; `captures` counts what was captured. A trunk that cannot be
    captured has none: whoever tried says why in `failure`.
    """

    def __init__(
        self, trunk: Trunk, cache: KVCache, sizes: Sequence[int], shared: Mapping[int, SharedPath], recorder: Recorder
    ) -> None:
        self.sizes, self.captures = tuple(sorted(sizes)), 0
        self.failure: str | None = None
        self._model = weakref.ref(trunk.model)  # graphs of a trunk that is gone keep nothing of it
        self._cache, self._shared, self._recorder = cache, shared, recorder
        self._replays: dict[int, Replay] = {}
        self._inputs: _Inputs | None = None
        self._logits: Tensor | None = None  # [C, V], all graphs'
        self._cell: Tensor | None = None  # [L, ...], the tables that launches read
        self._memory: tuple[tuple[int, ...], ...] | None = None
        self._bound: tuple[int, int] | None = None  # generation and epoch in the cell

    @property
    def captured(self) -> Collection[int]:
        """The rows of the graphs that there are."""
        return self._replays.keys()

    @property
    def forgotten(self) -> bool:
        """Its trunk is gone."""
        return self._model() is None

    def is_bound(self, view: GenerationView) -> bool:
        """Whether the cell holds this generation's tables."""
        return self._bound == (view.generation, view.epoch)

    def admit(self, view: GenerationView, most_rows: int) -> int | FallbackReason:
        """The rows of the smallest graph for a unit of which no peer has more than `most_rows`; else why it runs
        uncaptured. The same on every peer."""
        if self.failure is not None or not (self.is_bound(view) or self._fits(view)):
            return FallbackReason.KEY_MISMATCH
        fitting = (rows for rows in self.sizes if rows >= most_rows)
        return next(fitting, FallbackReason.RANK_TOKEN_CAPACITY)

    def bind(self, view: GenerationView) -> None:
        """Put the generation's tables into the cell, in the order of the stream: at a step boundary.

        Raises `BindingError` key_mismatch for layers that are not those which launches hold.
        """
        if not self._fits(view):
            raise BindingError("key_mismatch", f"generation {view.generation} has other layers than the graphs")
        tables = torch.stack([layer.table for layer in _layers(view)])
        if self._cell is None:
            with torch.inference_mode(False):
                self._cell = torch.empty_like(tables)
            self._memory = _memory(view)
        self._cell.copy_(tables)
        for layer in _layers(view):
            layer.enter()
        self._bound = (view.generation, view.epoch)

    def capture(self, view: GenerationView, rows: int) -> None:
        """Capture the graph of so many rows under `view`, which is bound. What it writes nobody reads.

        Raises `BindingError` other_generation; `RuntimeError` where the trunk does what a graph cannot hold.
        """
        self._require_bound(view)
        if self._inputs is None:
            with torch.inference_mode(False):
                self._inputs = _Inputs.allocate(self.sizes[-1], len(view.layers), view.trunk, self._cache)
        inputs = self._inputs
        inputs.load(None, rows)
        batch = inputs.batch(rows)
        # A launch that waits for other peers cannot be tried alone.
        alone = len(view.transport.group.spec) == 1
        tried, captured = (self._experts(view, inputs, rows, runs=runs) for runs in (alone, True))
        self._replays[rows] = self._recorder(
            lambda: self._run(view, batch, inputs, tried), lambda: self._run(view, batch, inputs, captured)
        )
        self.captures += 1

    def launch(self, view: GenerationView, rows: int, batch: UnitBatch | None) -> Tensor | None:
        """Logits [B, V] of this peer's rows, which the next launch overwrites; None without rows.

        `rows` is of a captured graph. Raises `BindingError` other_generation when the cell holds another generation's
        tables.
        """
        self._require_bound(view)
        assert self._inputs is not None and self._logits is not None
        self._inputs.load(batch, rows)
        self._replays[rows]()
        count = 0 if batch is None else batch.num_tokens
        _count(view, count, f"decode-{rows}")
        return self._logits[:count] if count else None

    # ---- what is captured ----

    def _run(
        self, view: GenerationView, batch: UnitBatch, inputs: _Inputs, experts: Callable[[int, nn.Module], Binding]
    ) -> None:
        trunk, rows = view.trunk, batch.num_tokens
        before: dict[int, Binding] = {layer: module.ray_moe for layer, module in trunk.experts.items()}  # type: ignore[misc]
        trunk.bind(experts)
        inputs.mask_C1[:rows].copy_((batch.kv_len.sign() - 1)[:, None])
        try:
            logits_CV = trunk.model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                ray_moe=self._cache.bind(batch),
            ).logits[0]
        finally:
            trunk.bind(lambda layer, _: before[layer])
        if self._logits is None:
            with torch.inference_mode(False):
                self._logits = torch.empty(
                    self.sizes[-1], *logits_CV.shape[1:], dtype=logits_CV.dtype, device=logits_CV.device
                )
        self._logits[:rows].copy_(logits_CV)
        counts = _route_counts(view)
        if counts is not None:
            counts.add_unit("decode", inputs.ids_LTK[:, :rows])

    def _experts(
        self, view: GenerationView, inputs: _Inputs, rows: int, *, runs: bool
    ) -> Callable[[int, nn.Module], Binding]:
        """What MoE blocks call: real rows' routes as they are, padding rows' masked. Not `runs`: no routed experts."""
        cell = self._cell
        assert cell is not None

        def bound(layer: int, _module: nn.Module) -> Binding:
            index, shared = list(view.layers).index(layer), self._shared.get(layer)
            experts = _layers(view)[index]

            def run(hidden_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
                masked_TK = inputs.ids_LTK[index, :rows]
                torch.bitwise_or(topk_ids_TK, inputs.mask_C1[:rows], out=masked_TK)
                if shared is not None:
                    shared.begin(hidden_TD)
                routes = Routes(masked_TK, topk_weights_TK)
                beside = None if shared is None else shared.run
                if runs:
                    out_TD = experts.run(hidden_TD, routes, capacity=rows, table=cell[index], shared=beside)
                else:
                    out_TD = torch.zeros_like(hidden_TD)
                if shared is not None:
                    shared.end()
                return out_TD

            return run

        return bound

    # ---- details ----

    def _fits(self, view: GenerationView) -> bool:
        """Whether launches that hold what ours do are the view's own."""
        memory = _memory(view)
        return memory is not None and self._memory in (None, memory)

    def _require_bound(self, view: GenerationView) -> None:
        if not self.is_bound(view):
            raise BindingError(
                "other_generation",
                f"graphs cannot run generation {view.generation} of epoch {view.epoch}: the cell holds {self._bound}",
            )


def _layers(view: GenerationView) -> list[DeviceLayer]:
    """In execution order; only of a view that has a memory."""
    return [layer.local for layer in view.layers.values()]  # type: ignore[misc]


def _route_counts(view: GenerationView) -> RouteCounts | None:
    """The rank's, which all layers share."""
    return next(iter(view.layers.values())).route_counts


def _count(view: GenerationView, tokens: int, graph: str) -> None:
    """A replay in the counters of its layers, and its tokens beside the routes that the device counts."""
    for layer in view.layers.values():
        layer.count_on_device("decode", tokens * view.trunk.top_k)
        layer.counters.replays += 1
        layer.counters.routes.replays[graph] += 1
    counts = _route_counts(view)
    if counts is not None:
        counts.add_tokens("decode", tokens)


def _memory(view: GenerationView) -> tuple[tuple[int, ...], ...] | None:
    """What launches of the view's layers hold; None where one of them needs the host."""
    found: list[tuple[int, ...]] = []
    for layer in view.layers.values():
        if layer.local is None:
            return None
        found.append((*layer.local.memory, id(layer.route_counts)))
    return tuple(found)
