"""A layer to test with: placements written as (expert, rank) pairs, experts' weights, and the dense oracle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from ray_moe.comm.transports import Transport
from ray_moe.controlplane.solve import PoolSlot
from ray_moe.dataplane.captured import CapturedDecode, Executables
from ray_moe.dataplane.handle import HandleABI, HandleHeader
from ray_moe.dataplane.layer import ExpertLayer, LayerCounters
from ray_moe.dataplane.paths import Path
from ray_moe.dataplane.plan import SlotMap
from ray_moe.dataplane.policies import ReplicaPolicy
from ray_moe.dataplane.runners import LayerWeights, Runner
from ray_moe.dataplane.strategies import strategy_named
from ray_moe.identity import (
    CheckpointVersion,
    GlobalRank,
    LogicalExpertId,
    PhysicalSlotId,
    PlacementVersion,
    ProcessGroupId,
    ReplicaId,
)
from ray_moe.placement import LayerPlacement, Lease, PlacementSnapshot, Slot
from ray_moe.routes import Routes
from ray_moe.topology import Domain, ProcessGroupSpec, Topology

CPU = torch.device("cpu")
# For property tests: a busy machine makes no example fail.
untimed = settings(max_examples=60, deadline=None)
CHECKPOINT = CheckpointVersion("checkpoint-1")
ONE_PEER = ProcessGroupSpec(ProcessGroupId("ep-group-0"), 0, (GlobalRank(0),))


def spec_of(peers: Sequence[int], epoch: int = 0) -> ProcessGroupSpec:
    return ProcessGroupSpec(ProcessGroupId("ep-group-0"), epoch, tuple(GlobalRank(rank) for rank in peers))


def placement(
    homes: Sequence[tuple[int, int]],
    spec: ProcessGroupSpec,
    *,
    generation: int = 1,
    domains: Mapping[int, str] | None = None,
) -> PlacementSnapshot:
    """A one-layer snapshot; `homes` are (expert, rank) in manifest order, `domains` names each rank's node.

    Pool slots of a rank are numbered against manifest order, so that neither order can pass for the other.
    """
    node = {rank.value: "node-0" for rank in spec.peers} if domains is None else domains
    left = Counter(rank for _, rank in homes)
    slots = []
    for position, (expert, rank) in enumerate(homes):
        left[rank] -= 1
        slots.append(
            Slot(
                physical_slot_id=PhysicalSlotId(f"q{position}"),
                logical_expert_id=LogicalExpertId(expert),
                replica_id=ReplicaId(f"e{expert}-q{position}"),
                destination_rank=GlobalRank(rank),
                topology_domain_id=node[rank],
                checkpoint_version=CHECKPOINT,
                parameter_digest=f"weights-of-{expert}",
                pool_slot=left[rank],
            )
        )
    names = sorted(set(node.values()))
    topology = Topology(
        "topology-1",
        tuple(Domain(name, tuple(GlobalRank(rank) for rank in sorted(node) if node[rank] == name)) for name in names),
    )
    experts = max(expert for expert, _ in homes) + 1
    layer = LayerPlacement(0, experts, tuple(slots))
    version = PlacementVersion(f"placement-v{generation}")
    return PlacementSnapshot(version, generation, "release-1", CHECKPOINT, spec, topology, (layer,))


def slot_map(snapshot: PlacementSnapshot, rank: int) -> SlotMap:
    return SlotMap.compile(snapshot, snapshot.layers[0], GlobalRank(rank), CPU)


def header_of(snapshot: PlacementSnapshot, rank: int = 0, abi: HandleABI | None = None) -> HandleHeader:
    """The header that rank's lease on this placement grants."""
    lease = Lease(100 + rank, f"rank-{rank}", snapshot.generation, snapshot.group.epoch)
    return HandleHeader.grant(lease, snapshot, abi or HandleABI())


def swiglu(inner: Tensor) -> Tensor:
    gate, up = inner.chunk(2, dim=-1)
    return functional.silu(gate) * up


@dataclass(frozen=True)
class Experts:
    """Weights by logical expert: gate_up [E, 2F, D], down [E, D, F], biases [E, 2F] and [E, D] or None."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @staticmethod
    def random(
        experts: int, hidden: int, ffn: int, *, bias: bool = False, dtype: torch.dtype = torch.float32
    ) -> Experts:
        generator = torch.Generator().manual_seed(7)

        def draw(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=generator) * 0.3).to(dtype)

        return Experts(
            draw(experts, 2 * ffn, hidden),
            draw(experts, hidden, ffn),
            draw(experts, 2 * ffn) if bias else None,
            draw(experts, hidden) if bias else None,
        )

    def slabs(self, slots: SlotMap, snapshot: PlacementSnapshot, rank: int) -> LayerWeights:
        """One peer's slot pool: its experts where the placement says, NaN in every slot that it does not name."""
        here = snapshot.layers[0].slots_of(GlobalRank(rank))
        capacity = max((slot.pool_slot for slot in here), default=-1) + 2
        pool = {slot.pool_slot: slot.logical_expert_id.value for slot in here}

        def slab(weights: Tensor | None) -> Tensor | None:
            if weights is None:
                return None
            out = torch.full((capacity, *weights.shape[1:]), torch.nan, dtype=weights.dtype)
            for pool_slot, expert in pool.items():
                out[pool_slot] = weights[expert]
            return out

        gate_up, down = slab(self.gate_up), slab(self.down)
        assert gate_up is not None
        assert down is not None
        return LayerWeights(
            gate_up, down, slab(self.gate_up_bias), slab(self.down_bias), slots.pool_slots, activation=swiglu
        )

    def dense(self, hidden_TD: Tensor, routes: Routes) -> Tensor:
        """The oracle: every expert on every token in fp32, then the gate-weighted sum in route-slot order."""
        hidden_TD, out_TD = hidden_TD.float(), torch.zeros(hidden_TD.shape)
        every_ETD = torch.stack([self._one(hidden_TD, expert) for expert in range(self.down.shape[0])])
        for token in range(routes.num_tokens):
            for expert, gate in zip(routes.topk_ids[token].tolist(), routes.topk_weights[token].float(), strict=True):
                out_TD[token] += gate * every_ETD[expert, token]
        return out_TD

    def _one(self, rows_RD: Tensor, expert: int) -> Tensor:
        inner = rows_RD @ self.gate_up[expert].float().T
        if self.gate_up_bias is not None:
            inner = inner + self.gate_up_bias[expert].float()
        outer = swiglu(inner) @ self.down[expert].float().T
        return outer if self.down_bias is None else outer + self.down_bias[expert].float()


def layer_on(
    snapshot: PlacementSnapshot,
    rank: int,
    experts: Experts,
    transport: Transport,
    runner: Runner,
    policy: ReplicaPolicy,
    abi: HandleABI | None = None,
    strategy: str = "bulk",
    parts: int = 2,
    executables: Executables | None = None,
    top_k: int = 2,
) -> ExpertLayer:
    """One peer's layer under `snapshot`; with `executables`, decode units that fit are replayed."""
    slots = slot_map(snapshot, rank)
    header, weights = header_of(snapshot, rank, abi), experts.slabs(slots, snapshot, rank)
    captured = None
    if executables is not None:
        hidden = weights.down.shape[1]
        captured = CapturedDecode.bind(executables, header, slots, hidden, top_k, torch.float32, transport)
        captured.activate()
    path = Path(transport, runner, strategy_named(strategy, parts))
    return ExpertLayer(header, slots, weights, path, policy, LayerCounters(), captured)


def named(where: object) -> Callable[[str], str]:
    """For `assert_close`: its own message, and where."""
    return lambda text: f"{where}: {text}"


def random_routes(seed: int, tokens: int, top_k: int, experts: int, *, dtype: torch.dtype = torch.float32) -> Routes:
    """What a router gives: distinct experts per token, gates in (0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    ids_TK = torch.rand(tokens, experts, generator=generator).argsort(dim=1)[:, :top_k].contiguous()
    gates_TK = torch.rand(tokens, top_k, generator=generator).to(dtype)
    return Routes(ids_TK, gates_TK)


@dataclass(frozen=True)
class World:
    """A placement and what each peer (in peer-slot order) has to route."""

    snapshot: PlacementSnapshot
    routes_P: tuple[Routes, ...]

    @property
    def slots_P(self) -> tuple[SlotMap, ...]:
        return tuple(slot_map(self.snapshot, rank.value) for rank in self.snapshot.group.peers)

    def peer_of(self, position: int) -> int:
        """The peer slot that owns the slot at a manifest position."""
        return self.snapshot.group.peer_slot(self.snapshot.layers[0].slots[position].destination_rank)


@st.composite
def worlds(draw: st.DrawFn, *, max_tokens: int = 6) -> World:
    """One to four peers in any order over one or two nodes, up to three replicas an expert, manifests in any order."""
    ranks = draw(st.permutations(range(draw(st.integers(1, 4)))))
    experts = draw(st.integers(1, 5))
    copies = [expert for expert in range(experts) for _ in range(draw(st.integers(1, 3)))]
    homes = draw(st.permutations([(expert, draw(st.sampled_from(ranks))) for expert in copies]))
    domains = {rank: draw(st.sampled_from(("node-0", "node-1"))) for rank in ranks}
    top_k = draw(st.integers(1, min(3, experts)))
    routes = tuple(
        random_routes(draw(st.integers(0, 9999)), draw(st.integers(0, max_tokens)), top_k, experts) for _ in ranks
    )
    return World(placement(homes, spec_of(ranks), domains=domains), routes)


def retired_slots(prior: PlacementSnapshot, live: Iterable[PlacementSnapshot]) -> set[PoolSlot]:
    """Oracle: the pool slots of a retired generation that none of the `live` ones uses."""

    def homes(snapshot: PlacementSnapshot) -> set[PoolSlot]:
        return {
            PoolSlot(slot.destination_rank, layer.layer, slot.pool_slot)
            for layer in snapshot.layers
            for slot in layer.slots
        }

    return homes(prior).difference(*map(homes, live))
