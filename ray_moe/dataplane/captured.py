"""The fixed-shape decode path of one layer: buckets of executables under one generation (specification 0x05C, 0x05D).

A decode unit whose agreed counts fit a bucket is replayed there: stable buffers, masked padding, uniform exchanges and
the masked runner at fixed capacities. Anything else falls back to the eager path with all of its rows, by a reason that
every peer derives from the same agreed numbers. Letters: T tokens, K top-k, P peers, S physical slots, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ray_moe.comm.transports import PaddedAllToAll, Transport
from ray_moe.dataplane.graphs import (
    NO_EXPERT,
    Binding,
    Executable,
    ExecutableShape,
    HostCounters,
    Launch,
    dtype_name,
)
from ray_moe.dataplane.handle import HandleHeader
from ray_moe.dataplane.layer_weights import LayerWeights
from ray_moe.dataplane.paths import Path
from ray_moe.dataplane.phases import (
    Buckets,
    Decision,
    ExecutableKey,
    ExecutableManifest,
    ExecutableScope,
    Fallback,
    FallbackReason,
    Phase,
    PhaseStep,
    Replay,
    UnitAccount,
    account_for,
)
from ray_moe.dataplane.plan import Layout, SlotMap
from ray_moe.dataplane.runners import MaskedDecode, runner_named
from ray_moe.dataplane.strategies import strategy_named
from ray_moe.errors import ConfigError
from ray_moe.routes import Routes


@dataclass(frozen=True)
class DecodeBucket:
    """Capacities of one executable: token slots of a peer, and rows of a physical slot over all peers."""

    rank_tokens: int
    slot_rows: int


class Executables:
    """Every executable of one peer. They hold no placement and outlive generations: a move builds none anew.

    A generation with another number of slots has executables of its own. Raises `ConfigError` for two buckets with the
    same token slots: executables are named by them.
    """

    def __init__(self, buckets: Sequence[DecodeBucket], device: torch.device) -> None:
        tokens = [bucket.rank_tokens for bucket in buckets]
        if len(set(tokens)) < len(tokens):
            raise ConfigError(f"every decode bucket has its own rank_tokens, found {', '.join(map(str, tokens))}")
        self.buckets, self.counters = tuple(buckets), HostCounters()
        self._device = device
        self._built: dict[tuple[int, ExecutableShape], Executable[Path]] = {}
        self._active: dict[int, list[Executable[Path]]] = {}  # by layer

    def get(self, layer: int, shape: ExecutableShape) -> Executable[Path]:
        """The layer's executable of this shape, built when it is first asked for."""
        key = (layer, shape)
        if key not in self._built:
            self._built[key] = Executable(shape, self._device, self.counters)
        return self._built[key]

    def activate(self, layer: int, bindings: Collection[Binding[Path]]) -> None:
        """Put one generation's bindings into the layer's cells, at a step boundary.

        The cells that the last generation had and this one does not are empty then, so that the last one can be freed.
        """
        past, self._active[layer] = self._active.get(layer, []), [binding.executable for binding in bindings]
        for executable in past:
            if executable not in self._active[layer]:
                executable.deactivate()
        for binding in bindings:
            binding.executable.activate(binding)


class CapturedDecode:
    """One layer's bindings of one generation."""

    def __init__(
        self, executables: Executables, layer: int, scope: ExecutableScope, bindings: Mapping[str, Binding[Path]]
    ) -> None:
        self._executables, self._layer = executables, layer
        self._scope, self._bindings = scope, bindings
        self._buckets = Buckets(tuple(binding.manifest for binding in bindings.values()))

    @staticmethod
    def bind(
        executables: Executables,
        header: HandleHeader,
        slots: SlotMap,
        hidden: int,
        top_k: int,
        gate: torch.dtype,
        transport: Transport,
        weights: LayerWeights | None = None,
    ) -> CapturedDecode:
        """Bind every bucket to `header`'s generation; `weights` None leaves the experts to torch on any device.

        Raises `BindingError` when the generation is bound already.
        """
        scope = ExecutableScope(
            process_group_id=f"{header.process_group_id}/epoch-{header.epoch}",
            placement_version=header.placement_version,
            checkpoint_version=header.checkpoint_version,
            hidden_width=hidden,
            top_k=top_k,
            activation_dtype=dtype_name(header.abi.payload),
            gate_dtype=dtype_name(gate),
            dispatch_backend=PaddedAllToAll.name,
            runner_backend=MaskedDecode.name,
        )
        bindings: dict[str, Binding[Path]] = {}
        for bucket in executables.buckets:
            shape = ExecutableShape(
                peer=slots.my_peer,
                num_peers=slots.num_peers,
                num_slots=slots.num_slots,
                tokens_per_rank=bucket.rank_tokens,
                rows_per_slot=bucket.slot_rows,
                hidden=hidden,
                top_k=top_k,
                activation=header.abi.payload,
                gate=gate,
            )
            key = ExecutableKey(
                **vars(scope),
                rank_token_capacities=(bucket.rank_tokens,) * slots.num_peers,
                slot_route_capacities=(bucket.slot_rows,) * slots.num_slots,
            )
            # No pair of peers can exchange more rows in a unit that the bucket admits.
            pair_rows = min(bucket.rank_tokens * top_k, bucket.slot_rows * slots.most_slots)
            path = Path(
                PaddedAllToAll(transport.group, pair_rows),
                runner_named(MaskedDecode.name, weights=weights, capacity=bucket.slot_rows),
                strategy_named("shared_path"),  # bulk, where there is no shared expert
                slot_capacity=bucket.slot_rows,
            )
            binding = executables.get(slots.layer, shape).bind(header.generation, key, path)
            bindings[binding.manifest.executable_id] = binding
        return CapturedDecode(executables, slots.layer, scope, bindings)

    def activate(self) -> None:
        """Put this generation into the executables' cells, at a step boundary."""
        self._executables.activate(self._layer, self._bindings.values())

    def deactivate(self) -> None:
        """Empty the layer's cells: this generation is the last of its release here."""
        self._executables.activate(self._layer, ())

    def free(self) -> None:
        """Give the generation's tables up. Raises `BindingError` while one is in use."""
        for binding in self._bindings.values():
            binding.free()

    def admit(self, phase: Phase, layouts: Sequence[Layout], top_k: int) -> Decision:
        """Replay or fallback, the same on every peer. Raises `RoutesError` for counts that no unit can have.

        A unit in several batches falls back: an executable is built for one plan and one sum. Whether a buffer has
        moved is one peer's own affair: alone it falls back; with others, which replay all the same, its launch refuses.
        """
        if len(layouts) > 1:
            return Fallback(FallbackReason.KEY_MISMATCH)
        layout = layouts[0]
        return self._buckets.choose(
            phase,
            self._scope,
            [routes // top_k for routes in layout.routes_P],
            layout.slot_rows_S,
            lambda executable_id: len(layout.routes_P) > 1 or self._bindings[executable_id].executable.buffers_ready,
        )

    def account(self, phase: Phase, layouts: Sequence[Layout], host_submissions: int) -> UnitAccount:
        """What a unit with these counts runs, admitted or not. Control items are the numbers of the count exchange."""
        top_k = self._scope.top_k
        decision = self.admit(phase, layouts, top_k)
        manifest = self._bindings[decision.executable_id].manifest if isinstance(decision, Replay) else self._largest
        rank_tokens = [
            sum(layout.routes_P[peer] for layout in layouts) // top_k for peer in range(len(layouts[0].routes_P))
        ]
        slot_routes = [sum(rows) for rows in zip(*(layout.slot_rows_S for layout in layouts), strict=True)]
        step = PhaseStep(phase, manifest.key, tuple(rank_tokens), tuple(slot_routes))
        items = len(rank_tokens) * (2 + len(layouts) * (1 + len(slot_routes)))
        return account_for(step, manifest, decision, host_submissions=host_submissions, control_items=items)

    @property
    def _largest(self) -> ExecutableManifest:
        return self._buckets.manifests[-1]

    def replay(
        self,
        decision: Replay,
        number: int,
        hidden_TD: Tensor,
        routes: Routes,
        layout: Layout,
        run: Callable[[Path, Tensor], Tensor],
    ) -> Tensor:
        """Launch the admitted executable for invocation `number`; `run(path, hidden_TD)` is the layer over its buffers.

        Raises `BindingError` when the cell holds another generation, the validity is not this invocation's, or a buffer
        has moved.
        """
        binding = self._bindings[decision.executable_id]
        binding.write_validity(number, [count // routes.top_k for count in layout.routes_P], layout.slot_rows_S)

        def body(launch: Launch[Path]) -> Tensor:
            launch.require_routes(int((launch.buffers.route_ids != NO_EXPERT).sum()))
            return run(launch.table, launch.buffers.hidden[: launch.num_tokens])

        binding.acquire()
        try:
            return binding.launch(number, hidden_TD, routes.topk_ids, routes.topk_weights, body)
        finally:
            binding.release()
