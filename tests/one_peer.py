"""One peer's engine in this process, over a group of one: the product's own loop without Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ray_moe.comm.join import transport_named
from ray_moe.comm.solo import SoloGroup
from ray_moe.controlplane.solve import balanced, fills, place, pool_capacity
from ray_moe.dataplane.captured import DecodeBucket, Executables
from ray_moe.dataplane.graphs import dtype_name
from ray_moe.dataplane.handle import HandleABI, HandleHeader
from ray_moe.dataplane.layer import ExpertLayer, LayerCounters
from ray_moe.dataplane.local import LocalLayer, Workspaces
from ray_moe.dataplane.route_counts import DemandReport, RouteCounts
from ray_moe.dataplane.runners import BLOCK_ROWS
from ray_moe.dataplane.strategies import strategy_named
from ray_moe.engine.blocks import overlap_shared, probe_blocks
from ray_moe.engine.generation import Backend, GenerationView, build_view
from ray_moe.engine.kvcache import KVCache
from ray_moe.engine.loop import EngineLoop
from ray_moe.engine.records import Delivery, Refusal, StreamRecord
from ray_moe.engine.scheduler import Scheduler
from ray_moe.engine.trunk import Trunk, load_trunk
from ray_moe.errors import RayMoEError
from ray_moe.identity import CheckpointVersion, GlobalRank, PlacementVersion, ProcessGroupId
from ray_moe.placement import Lease, PlacementSnapshot
from ray_moe.topology import Domain, ProcessGroupSpec, Topology
from ray_moe.weights.checkpoint import Checkpoint
from ray_moe.weights.slots import SlotPool

RANK = GlobalRank(0)
GROUP = ProcessGroupSpec(ProcessGroupId("alone"), 0, (RANK,))


@dataclass
class Collector:
    """An outlet that keeps what comes."""

    records: list[StreamRecord] = field(default_factory=list)
    refusals: dict[str, Exception] = field(default_factory=dict)
    returned: list[int] = field(default_factory=list)
    reports: list[DemandReport] = field(default_factory=list)
    delivered: threading.Condition = field(default_factory=threading.Condition)

    def deliver(self, items: Sequence[Delivery]) -> None:
        with self.delivered:
            for item in items:
                if isinstance(item, Refusal):
                    self.refusals[item.request_id] = item.error
                else:
                    self.records.append(item)
            self.delivered.notify_all()

    def lease_returned(self, view: GenerationView) -> None:
        self.returned.append(view.lease.generation)

    def demand(self, reports: Sequence[DemandReport]) -> None:
        self.reports += reports

    def wake_peers(self) -> None:
        """There are none."""

    def tokens(self, request_id: str) -> list[int]:
        return [token for record in self.records if record.request_id == request_id for token in record.token_ids]

    def reasons(self, request_id: str) -> list[str]:
        own = (record for record in self.records if record.request_id == request_id)
        return [record.finish_reason for record in own if record.finish_reason]

    def until_ended(self, *request_ids: str, seconds: float = 60.0) -> None:
        """Wait until each request has a finish reason or a refusal."""

        def ended() -> bool:
            return all(self.reasons(name) or name in self.refusals for name in request_ids)

        with self.delivered:
            assert self.delivered.wait_for(ended, timeout=seconds), f"{request_ids} did not end in {seconds} s"


class OnePeer:
    """Trunk, slots and loop of one peer for a checkpoint folder."""

    def __init__(
        self,
        folder: Path,
        *,
        device: str = "cpu",
        max_prefill_tokens: int = 128,
        num_blocks: int = 128,
        runner: str = "grouped",
        strategy: str = "bulk",
        payload: str = "native",
        block_rows: int = BLOCK_ROWS,
        buckets: Sequence[DecodeBucket] = (),
        dtype: torch.dtype = torch.float32,
        audit_rate: float = 1.0,
        look_ahead: bool = False,
        graph_sizes: Sequence[int] = (),
        workspaces: Workspaces | None = None,
        local: Callable[[ExpertLayer], LocalLayer] | None = None,
        count_routes: bool = False,
    ) -> None:
        self.checkpoint = Checkpoint(folder)
        self.trunk: Trunk = load_trunk(folder, dtype=dtype, device=device, attn_implementation="ray_moe")
        assignment = balanced(
            dict.fromkeys(self.checkpoint.moe_layers, self.checkpoint.num_experts),
            (RANK,),
            replicas={},
            spare_slots=0,
        )
        self._assignment, self._capacity = assignment, pool_capacity(assignment)
        self.pool = SlotPool(
            self.checkpoint.moe_layers, self._capacity, self.checkpoint.layout, dtype=dtype, device=device
        )
        group = SoloGroup(GROUP, RANK)
        self._payload, self._local, self._dtype = payload, local, dtype
        self.route_counts = (
            RouteCounts(self.checkpoint.moe_layers, self.checkpoint.num_experts, torch.device(device))
            if count_routes
            else None
        )
        self.blocks = probe_blocks(self.trunk)
        self.backend = Backend(
            transport_named("all_to_all_v", group), runner, "token_hash", strategy_named(strategy), self.blocks,
            block_rows=block_rows,
            executables=Executables(buckets, torch.device(device)) if buckets else None, workspaces=workspaces,
        )  # fmt: skip
        self.counters = {layer: LayerCounters() for layer in self.checkpoint.moe_layers}
        self.outlet = Collector()
        self._placed: PlacementSnapshot | None = None
        self.loop = EngineLoop(
            0,
            self.trunk,
            KVCache(num_blocks, 16, device),
            Scheduler(
                num_blocks=num_blocks,
                block_size=16,
                max_prefill_tokens=max_prefill_tokens,
                max_decode_rows=32,
                max_positions=self.trunk.max_positions,
                vocab_size=self.trunk.vocab_size,
                device=device,
            ),
            self.view(1),
            self.outlet,
            self.blocks,
            shared=overlap_shared(self.trunk, self.blocks) if strategy == "shared_path" else None,
            audit_rate=audit_rate,
            route_counts=self.route_counts,
            demand_every_steps=8 if count_routes else 0,
            graph_sizes=graph_sizes,
            look_ahead=look_ahead,
        )
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.raised: BaseException | None = None

    def view(self, generation: int) -> GenerationView:
        """A view of the same slots under another generation."""
        candidate = place(
            self._assignment,
            generation=generation,
            version=PlacementVersion(f"v{generation}"),
            release_id="alone-1",
            checkpoint=CheckpointVersion(self.checkpoint.identity),
            group=GROUP,
            topology=Topology("t1", (Domain("node-0", (RANK,)),)),
            prior=self._placed,
            capacity=self._capacity,
        )
        digests = {
            (item.layer, 0, item.pool_slot): self.pool.fill(
                item.layer, item.pool_slot, self.checkpoint.expert(item.layer, item.expert.value, dtype=self._dtype)
            )
            for item in fills(candidate, self._placed)
        }
        self._placed = candidate.with_digests(digests)
        lease = Lease(generation, "rank-0", generation, 0)
        rows = dtype_name(self._dtype)
        abi = HandleABI(payload_dtype=rows, return_dtype=rows, payload_format=self._payload)
        header = HandleHeader.grant(lease, self._placed, abi)
        parts = (RANK, self.trunk, self.pool, self.backend, self.counters, self.route_counts)
        view = build_view(lease, header, self._placed, *parts)
        for layer in view.layers.values() if self._local is not None else ():
            layer.local = self._local(layer)
        return view

    def _run(self) -> None:
        try:
            self.loop.run()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.raised = error

    def __enter__(self) -> OnePeer:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(RayMoEError):  # it has ended already
            self.loop.stop()
        self.thread.join(timeout=30)
        assert not self.thread.is_alive(), "the loop did not stop"
