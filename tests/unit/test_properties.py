"""Properties of a layer over real peers: whatever the world and the way, no route is lost, doubled or misplaced.

One job runs a list of drawn worlds, each over every transport; what the peers saw is checked here, by brute force.
Letters: T tokens, K top-k, N = T * K routes, E experts, S slots, P peers.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ray_moe.comm.group import ExpertGroup
from ray_moe.comm.transports import Transport, transposed
from ray_moe.dataplane.chunks import in_chunks
from ray_moe.dataplane.handle import DispatchHandle, HandleABI, HandleHeader
from ray_moe.dataplane.layer import Invocation
from ray_moe.dataplane.plan import agree_layouts, layout_record, make_plan
from ray_moe.dataplane.policies import policy_named
from ray_moe.dataplane.precision import codec_named
from ray_moe.dataplane.rows import ExpertRows, MaskedRows, Mode
from ray_moe.dataplane.runners import RUNNERS, LayerWeights, Runner, Work, runner_named
from ray_moe.dataplane.strategies import STRATEGIES, Strategy, strategy_named
from ray_moe.placement import PlacementSnapshot
from ray_moe.routes import Routes
from tests.layers import Experts, World, layer_on, named, placement, random_routes, untimed, worlds
from tests.peers import TRANSPORTS, Peers, peers, transport_over

__all__ = ["peers"]

HIDDEN, FFN = 8, 5
POLICIES = ("token_hash", "locality_first", "least_load", "round_robin", "queue_aware")
# fp32 sums of a dozen products of size one, in another order than the oracle's.
FP32: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}
# bf16 keeps 8 bits: rows, both products, gates and the result are rounded, each by 2^-9 of values around one.
BF16: dict[str, Any] = {"atol": 4e-2, "rtol": 4e-2}
# What an audit sends beside each row, out and back: three 64-bit numbers.
IDENTITY_BYTES = 3 * 8


# The same examples in every run; a failure names its world, and shrinking it would take many jobs.
drawn_jobs = settings(untimed, derandomize=True, database=None, phases=[Phase.generate])


# -- What is drawn


@dataclass(frozen=True)
class Way:
    """How a world is executed, over any transport."""

    runner: str
    strategy: str
    parts: int
    policy: str
    abi: HandleABI

    @property
    def design(self) -> Strategy:
        return strategy_named(self.strategy, self.parts)

    @property
    def exact(self) -> bool:
        return self.abi.payload_dtype == self.abi.return_dtype == "float32"


@dataclass(frozen=True)
class Example:
    """A placement by (expert, rank) homes, each peer's routes in peer-slot order, and a way."""

    homes: tuple[tuple[int, int], ...]
    routes_P: tuple[Routes, ...]
    way: Way

    def under(self, group: ExpertGroup) -> PlacementSnapshot:
        return placement(self.homes, group.spec)

    @property
    def num_experts(self) -> int:
        return max(expert for expert, _ in self.homes) + 1

    def hidden(self, peer: int) -> Tensor:
        generator = torch.Generator().manual_seed(peer)
        rows = torch.randn(self.routes_P[peer].num_tokens, HIDDEN, generator=generator)
        return rows.to(self.way.abi.payload)

    def weights(self) -> Experts:
        return weights_of(self.num_experts, self.way.abi.payload)

    def oracle(self, peer: int) -> Tensor:
        """The dense result for the rows as they are represented on the wire."""
        codec = codec_named(self.way.abi.payload_format, HIDDEN, self.way.abi.payload)
        hidden_TD = self.hidden(peer)
        return self.weights().dense(codec.decode(codec.encode(hidden_TD), hidden_TD.dtype), self.routes_P[peer])


@lru_cache
def weights_of(experts: int, dtype: torch.dtype) -> Experts:
    return Experts.random(experts, HIDDEN, FFN, bias=experts % 2 == 0, dtype=dtype)


@st.composite
def ways(draw: st.DrawFn) -> Way:
    dtypes = st.sampled_from(("float32", "float32", "bfloat16"))
    abi = HandleABI(
        payload_dtype=draw(dtypes),
        return_dtype=draw(dtypes),
        gate_location=draw(st.sampled_from(("origin", "expert"))),
        payload_format=draw(st.sampled_from(("native", "native", "fp8_row", "fp8_block"))),
    )
    return Way(
        runner=draw(st.sampled_from(tuple(RUNNERS))),
        strategy=draw(st.sampled_from(STRATEGIES)),
        parts=draw(st.integers(1, 5)),
        policy=draw(st.sampled_from(POLICIES)),
        abi=abi,
    )


@st.composite
def routes_of_a_peer(draw: st.DrawFn, top_k: int, experts: int) -> Routes:
    """Uniform, skewed towards two experts, all to one expert (every route of a token, too), or none at all."""
    kind = draw(st.sampled_from(("uniform", "skewed", "one expert", "none")))
    tokens = 0 if kind == "none" else draw(st.integers(1, 9))
    gates = draw(st.sampled_from((torch.float32, torch.bfloat16)))
    routes = random_routes(draw(st.integers(0, 9999)), tokens, top_k, experts, dtype=gates)
    ids_TK = routes.topk_ids
    if kind == "one expert":
        ids_TK = torch.full_like(ids_TK, draw(st.integers(0, experts - 1)))
    if kind == "skewed":
        ids_TK[: tokens * 4 // 5] = torch.arange(top_k) % experts
    return dataclasses.replace(routes, topk_ids=ids_TK.to(draw(st.sampled_from((torch.int64, torch.int32)))))


@st.composite
def examples(draw: st.DrawFn, ranks: Sequence[int]) -> Example:
    """Up to three copies of each expert anywhere, manifests in any order; peers may own nothing and bring nothing."""
    experts = draw(st.integers(1, 5))
    copies = [expert for expert in range(experts) for _ in range(draw(st.integers(1, 3)))]
    homes = draw(st.permutations([(expert, draw(st.sampled_from(ranks))) for expert in copies]))
    top_k = draw(st.integers(1, min(3, experts)))
    routes = tuple(draw(routes_of_a_peer(top_k, experts)) for _ in ranks)
    return Example(tuple(homes), routes, draw(ways()))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[int], list[Example]]:
    """One to four peers in any order, and the examples that they run one after another."""
    ranks = draw(st.permutations(range(draw(st.sampled_from((3, 4, 2, 1))))))
    return list(ranks), draw(st.lists(examples(ranks), min_size=3, max_size=6))


# -- What a peer does and reports


class Keeping(HandleHeader):
    """A header that remembers what it bound."""

    def bind(self, *args: Any, **options: Any) -> DispatchHandle:
        handle = super().bind(*args, **options)
        kept.append(handle)
        return handle


kept: list[DispatchHandle] = []


@dataclass
class Counting:
    """A runner that counts the rows that it is given for each local slot."""

    runner: Runner
    rows_S: Counter[int] = field(default_factory=Counter)

    @property
    def name(self) -> str:
        return self.runner.name

    @property
    def mode(self) -> Mode:
        return self.runner.mode

    def run(self, rows: ExpertRows, weights: LayerWeights) -> ExpertRows:
        self.rows_S.update(dict(enumerate(counts_of(rows))))
        return self.runner.run(rows, weights)

    def work(self, counts_S: Sequence[int], hidden: int, ffn: int) -> Work:
        return self.runner.work(counts_S, hidden, ffn)


def counts_of(rows: ExpertRows) -> list[int]:
    if isinstance(rows, MaskedRows):
        return list(rows.counts_S)
    return [end - start for start, end in pairwise(rows.offsets_S1)]


@dataclass(frozen=True)
class Sent:
    """One handle as its peer saw it."""

    physical_N: list[int]
    order_n: list[int]
    send_P: tuple[int, ...]
    recv_P: tuple[int, ...]
    said: tuple[int, int]


@dataclass(frozen=True)
class Ran:
    """One example over one transport at one peer; `fan_in` are the rows that its runner was given, by manifest slot."""

    out: Tensor
    handles: list[Sent]
    fan_in: Counter[int]
    moved: tuple[int, int]
    audited: int
    local_and_sent: int


def run_all(group: ExpertGroup, todo: Sequence[Example]) -> list[list[Ran]]:
    """Each example over every transport, audited."""
    transports = [transport_over(group, name) for name in TRANSPORTS]
    return [[run(group, transport, example, step) for transport in transports] for step, example in enumerate(todo)]


def run(group: ExpertGroup, transport: Transport, example: Example, step: int) -> Ran:
    way, snapshot, me = example.way, example.under(group), group.spec.peers[group.peer_slot].value
    runner = Counting(runner_named(way.runner, block_rows=4))
    layer = layer_on(
        snapshot, me, example.weights(), transport, runner, policy_named(way.policy), way.abi, way.strategy, way.parts
    )
    layer.header = Keeping(**{item.name: getattr(layer.header, item.name) for item in dataclasses.fields(Keeping)})
    kept.clear()
    before = transport.bytes_moved
    out_TD = layer.forward(
        example.hidden(group.peer_slot), example.routes_P[group.peer_slot], Invocation(step, "bare", audit=True)
    )
    moved = tuple(now - then for now, then in zip(transport.bytes_moved, before, strict=True))
    homes = [position for position, (_, rank) in enumerate(example.homes) if rank == me]
    return Ran(
        out=out_TD,
        handles=[
            Sent(
                handle.physical_slot_N.tolist(),
                handle.order_N.tolist(),
                handle.send_counts_P,
                handle.recv_counts_P,
                ledger(handle, transport),
            )
            for handle in kept
        ],
        fan_in=Counter({homes[slot]: rows for slot, rows in runner.rows_S.items()}),
        moved=moved,  # type: ignore[arg-type]
        audited=layer.counters.audited,
        local_and_sent=layer.counters.rows_local + layer.counters.rows_sent,
    )


def ledger(handle: DispatchHandle, transport: Transport) -> tuple[int, int]:
    """The bytes (sent, received) of one handle: rows and gates out, rows back, and the audit's identities both ways."""
    abi = handle.header.abi
    gate_bytes = 4 if abi.gate_location == "expert" else 0
    out_bytes = codec_named(abi.payload_format, HIDDEN, abi.payload).row_bytes + gate_bytes + IDENTITY_BYTES
    back_bytes = HIDDEN * abi.returned.itemsize + IDENTITY_BYTES
    out, back = transport.link_rows(handle.counts_PP), transport.link_rows(transposed(handle.counts_PP))
    return (
        int(out.sent) * out_bytes + int(back.sent) * back_bytes,
        int(out.received) * out_bytes + int(back.received) * back_bytes,
    )


# -- What must hold


@settings(drawn_jobs, max_examples=10)
@given(jobs())
def test_no_world_and_no_way_loses_doubles_or_misplaces_a_route(
    peers: Peers, job: tuple[list[int], list[Example]]
) -> None:
    ranks, todo = job
    answers = peers.run(run_all, todo, ranks=ranks)
    for number, example in enumerate(todo):
        by_transport = [[answer[number][index] for answer in answers] for index in range(len(TRANSPORTS))]
        for name, ran_P in zip(TRANSPORTS, by_transport, strict=True):
            where = f"{name} {example.way} {example.homes} on {ranks}"
            check_assignment(example, ran_P, where)
            check_splits(ran_P, where)
            check_conservation(example, ran_P, where)
            check_results(example, ran_P, where)
            for ran in ran_P:
                totals = tuple(map(sum, zip(*(sent.said for sent in ran.handles), strict=True)))
                assert ran.moved == totals, where
            # How rows travel changes no bit: the same rows meet in the same order.
            for ran, usual in zip(ran_P, by_transport[0], strict=True):
                assert torch.equal(ran.out, usual.out), where


def plans_of(ran: Ran, way: Way) -> list[list[Sent]]:
    """The handles of each plan: of a batch its one handle, else the chunks of the whole."""
    design = way.design
    assert len(ran.handles) == design.batches * design.chunks
    return [ran.handles[start : start + design.chunks] for start in range(0, len(ran.handles), design.chunks)]


def check_assignment(example: Example, ran_P: Sequence[Ran], where: str) -> None:
    """Each route has exactly one slot, of its own expert, and its place in exactly one handle."""
    for peer, ran in enumerate(ran_P):
        wanted = example.routes_P[peer].topk_ids.flatten().tolist()
        plans = plans_of(ran, example.way)
        chosen = [position for plan in plans for position in plan[0].physical_N]
        assert [example.homes[position][0] for position in chosen] == wanted, where
        for plan in plans:
            assert all(sent.physical_N == plan[0].physical_N for sent in plan), where
            order_N = [position for sent in plan for position in sent.order_n]
            inverse_N = {position: at for at, position in enumerate(order_N)}
            assert [order_N[inverse_N[position]] for position in range(len(order_N))] == list(range(len(order_N)))
            assert len(order_N) == len(plan[0].physical_N), where


def check_splits(ran_P: Sequence[Ran], where: str) -> None:
    """What peer d receives of peer s is what s sends to d, handle by handle."""
    for handles_P in zip(*(ran.handles for ran in ran_P), strict=True):
        assert transposed([sent.send_P for sent in handles_P]) == tuple(sent.recv_P for sent in handles_P), where
        assert all(sum(sent.send_P) == len(sent.order_n) for sent in handles_P), where


def check_conservation(example: Example, ran_P: Sequence[Ran], where: str) -> None:
    """Routes of all peers = rows that runners were given, in all, by expert and by slot."""
    accepted: Counter[int] = Counter()
    by_slot: Counter[int] = Counter()
    for peer, ran in enumerate(ran_P):
        accepted.update(example.routes_P[peer].topk_ids.flatten().tolist())
        for plan in plans_of(ran, example.way):
            by_slot.update(plan[0].physical_N)
        assert ran.local_and_sent == example.routes_P[peer].num_routes, where
        assert ran.audited == 1, where
    executed: Counter[int] = sum((ran.fan_in for ran in ran_P), Counter())
    assert executed == by_slot, where
    by_expert: Counter[int] = Counter()
    for position, rows in executed.items():
        by_expert[example.homes[position][0]] += rows
    assert by_expert == accepted, where
    assert by_expert.total() == sum(routes.num_tokens * routes.top_k for routes in example.routes_P), where


def check_results(example: Example, ran_P: Sequence[Ran], where: str) -> None:
    tolerance = FP32 if example.way.exact else BF16
    for peer, ran in enumerate(ran_P):
        assert ran.out.dtype == example.way.abi.payload, where
        torch.testing.assert_close(ran.out.float(), example.oracle(peer), **tolerance, msg=named(where))


# -- The world may change, the result may not


@settings(drawn_jobs, max_examples=6)
@given(st.permutations(range(4)), st.integers(0, 9999), st.data())
def test_peers_replicas_and_their_order_change_no_result(
    peers: Peers, ranks: list[int], seed: int, data: st.DataObject
) -> None:
    """The same tokens at the first peer, in four worlds of one to four peers: equal within fp32 rounding."""
    experts, top_k = 4, 2
    mine = random_routes(seed, 5, top_k, experts)
    outs = []
    for size in (1, 2, 3, 4):
        group = ranks[:size]
        spread = data.draw(st.lists(st.sampled_from(group), min_size=experts, max_size=3 * experts))
        homes = [(position % experts, rank) for position, rank in enumerate(spread)]
        others = tuple(random_routes(seed + peer, peer, top_k, experts) for peer in range(1, size))
        way = Way("grouped", "bulk", 1, data.draw(st.sampled_from(POLICIES)), HandleABI())
        outs.append(peers.run(run_usually, Example(tuple(homes), (mine, *others), way), ranks=group)[0])
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], **FP32)


def run_usually(group: ExpertGroup, example: Example) -> Tensor:
    return run(group, transport_over(group, "all_to_all_v"), example, 0).out


# -- Chunks of a plan, without any wire


@settings(untimed, derandomize=True)
@given(worlds(max_tokens=12), st.integers(1, 7))
def test_chunks_cover_each_row_once_and_their_local_counts_are_those_of_their_rows(world: World, chunks: int) -> None:
    slots_P = world.slots_P
    policy = policy_named("round_robin")
    plans = [make_plan(routes, slots, policy) for routes, slots in zip(world.routes_P, slots_P, strict=True)]
    records = torch.stack([layout_record([plan], 0, 0) for plan in plans])
    layouts = [agree_layouts(records, slots)[0] for slots in slots_P]
    parts_P = [
        in_chunks(plan, layout, chunks, peer) for peer, (plan, layout) in enumerate(zip(plans, layouts, strict=True))
    ]
    peers = range(len(plans))
    for peer in peers:
        assert len(parts_P[peer]) == chunks
        covered = torch.cat([part.order_N for part in parts_P[peer]]).tolist()
        assert sorted(covered) == list(range(plans[peer].routes.num_routes))
        send_position = {route: at for at, route in enumerate(plans[peer].order_N.tolist())}
        for part in parts_P[peer]:
            positions = [send_position[route] for route in part.order_N.tolist()]
            assert positions == sorted(positions), "a chunk keeps the plan's order"
    for index in range(chunks):
        # Every row of the chunk, by hand: (source, destination, slot in dispatch order).
        rows = [
            (source, int(slots_P[0].peer_S[position]), int(slots_P[0].dispatch_S[position]))
            for source in peers
            for position in plans[source].physical_slot_N[parts_P[source][index].order_N].tolist()
        ]
        counts_PP = tuple(tuple(sum(row[:2] == (s, d) for row in rows) for d in peers) for s in peers)
        for peer in peers:
            layout, bounds = parts_P[peer][index].layout, slots_P[peer].peer_bounds_P1
            assert layout.counts_PP == counts_PP
            assert layout.send_counts_P == counts_PP[peer]
            assert layout.send_offsets_P1 == tuple(accumulate(counts_PP[peer], initial=0))
            assert layout.recv_counts_P == tuple(line[peer] for line in counts_PP)
            mine = range(bounds[peer], bounds[peer + 1])
            local_PS = tuple(tuple(sum(row[0] == s and row[2] == slot for row in rows) for slot in mine) for s in peers)
            assert layout.recv_counts_PS == local_PS
            segments = [sum(column) for column in zip(*local_PS, strict=True)]
            assert layout.expert_offsets_S1 == tuple(accumulate(segments, initial=0))
            # The whole invocation's numbers are every chunk's own.
            assert (layout.routes_P, layout.slot_rows_S) == (layouts[peer].routes_P, layouts[peer].slot_rows_S)
    for line in zip(*(part.layout.counts_PP for part in parts_P[0]), strict=True):
        for sizes in zip(*line, strict=True):
            assert max(sizes) - min(sizes) <= 1, "a pair's rows are shared out evenly"
