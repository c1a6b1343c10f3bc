"""NCCL groups, a process for each GPU: collectives, layers over every transport, peers that stop, the next epoch."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from ray_moe.bench.gpu_ranks import Seat, ranks_here, run_ranks
from ray_moe.comm.group import ExpertGroup
from ray_moe.comm.join import join, join_transport
from ray_moe.comm.nccl import NcclGroup
from ray_moe.comm.rendezvous import StoreAddress
from ray_moe.comm.transports import Transport
from ray_moe.dataplane.device_codecs import codec_on
from ray_moe.dataplane.handle import HandleABI
from ray_moe.dataplane.layer import ExpertLayer, Invocation, LayerCounters
from ray_moe.dataplane.paths import Path
from ray_moe.dataplane.plan import SlotMap
from ray_moe.dataplane.policies import policy_named
from ray_moe.dataplane.runners import runner_named
from ray_moe.dataplane.strategies import strategy_named
from ray_moe.deadline import pause
from ray_moe.errors import CollectiveError, CountMismatchError
from ray_moe.identity import GlobalRank
from ray_moe.routes import Routes
from ray_moe.topology import ProcessGroupSpec, derive_groups
from tests.layers import Experts, header_of, placement, swiglu
from tests.peers import two_nodes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(ranks_here() < 2, reason="takes two GPUs of one host"),
]

EXPERTS, TOP_K, HIDDEN, FFN = 16, 4, 256, 128
# Three roundings to 8 bits (rows between the products, outputs, sums): 0.004 where it was measured.
BF16 = 8e-3
TOKENS = (0, 1, 37, 1024, 16384)
ROUTINGS = ("random", "zipf", "one_hot")
TRANSPORTS = (
    ("all_to_all_v", 1),
    ("padded_all_to_all", 1),
    ("all_gather_filter", 1),
    ("hierarchical", 1),
    ("all_to_all_v", 2),
)


# -- Layers over every transport


@dataclass(frozen=True)
class Case:
    """What every peer has to route; `uneven`: the first peer alone has tokens."""

    tokens: int
    routing: str
    uneven: bool = False

    def of(self, peer: int, device: torch.device) -> tuple[Tensor, Routes]:
        tokens = 0 if self.uneven and peer else self.tokens
        generator = torch.Generator().manual_seed(1000 * peer + self.tokens)
        hidden = torch.randn(tokens, HIDDEN, generator=generator).to(torch.bfloat16)
        gates = torch.rand(tokens, TOP_K, generator=generator)
        weights = torch.ones(EXPERTS) if self.routing == "random" else 1.0 / torch.arange(1, EXPERTS + 1)
        ids = torch.multinomial(weights.expand(max(tokens, 1), -1), TOP_K, generator=generator)[:tokens]
        if self.routing == "one_hot":  # all routes of a token, too: they stay rows of their own
            ids = torch.full_like(ids, 5)
        return hidden.to(device), Routes(ids.to(device), gates.to(device))


CASES = (*(Case(tokens, routing) for tokens in TOKENS for routing in ROUTINGS), Case(37, "random", uneven=True))


def homes(spec: ProcessGroupSpec) -> list[tuple[int, int]]:
    """Expert e on the rank in seat e % P; every fifth has a replica in the next seat, the first one another at home."""
    ranks, peers = [rank.value for rank in spec.peers], len(spec)
    first = [(expert, ranks[expert % peers]) for expert in range(EXPERTS)]
    return [*first[::-1], *((expert, ranks[(expert + 1) % peers]) for expert in range(0, EXPERTS, 5)), (0, ranks[0])]


def layer_over(transport: Transport, device: torch.device, payload: str) -> ExpertLayer:
    group = transport.group
    rank, experts = group.spec.peers[group.peer_slot], Experts.random(EXPERTS, HIDDEN, FFN, dtype=torch.bfloat16)
    snapshot = placement(homes(group.spec), group.spec)
    slots = SlotMap.compile(snapshot, snapshot.layers[0], rank, device)
    weights = experts.slabs(slots, snapshot, rank.value)
    weights = replace(weights, gate_up=weights.gate_up.to(device), down=weights.down.to(device))
    header = header_of(snapshot, rank.value, HandleABI("bfloat16", "bfloat16", payload_format=payload))
    path = Path(transport, runner_named("grouped"), strategy_named("bulk"))
    return ExpertLayer(header, slots, weights, path, policy_named("token_hash"), LayerCounters())


def oracle(hidden_TD: Tensor, routes: Routes, payload: str) -> Tensor:
    """Every expert on every token in fp32, on the rows that an owner gets."""
    device = hidden_TD.device
    experts = Experts.random(EXPERTS, HIDDEN, FFN, dtype=torch.bfloat16)
    codec = codec_on(payload, HIDDEN, torch.bfloat16, device)
    rows = codec.decode(codec.encode(hidden_TD), torch.bfloat16).float()
    out = torch.zeros_like(rows)
    for expert in range(EXPERTS):
        gate_T = (routes.topk_weights * (routes.topk_ids == expert)).sum(1, keepdim=True)
        gate_up, down = (slab[expert].to(device).float() for slab in (experts.gate_up, experts.down))
        out += gate_T * (swiglu(rows @ gate_up.T) @ down.T)
    return out


@torch.inference_mode()
def every_transport(
    kind: str,
    spec: ProcessGroupSpec,
    rank: GlobalRank,
    store: StoreAddress,
    device: torch.device,
    cases: tuple[Case, ...],
) -> dict[str, float]:
    """The largest relative error by transport and payload, over all cases of this rank."""
    worst: dict[str, float] = {}
    exact: dict[tuple[str, Case], Tensor] = {}
    for number, (name, chunks) in enumerate(TRANSPORTS):
        own = replace(spec, epoch=spec.epoch + number)
        groups = derive_groups(two_nodes(own), own)
        transport = join_transport(kind, name, groups, rank, store, 60.0, chunks=chunks, device=device)
        for payload in ("native", "fp8_block"):
            layer, where = layer_over(transport, device, payload), f"{name}/{chunks} {payload}"
            for step, case in enumerate(cases):
                hidden, routes = case.of(spec.peer_slot(rank), device)
                before = transport.bytes_moved
                out = layer.forward(hidden, routes, Invocation(step, "bare", audit=case.tokens == 37))
                moved = transport.bytes_moved[0] - before[0]
                wanted = oracle(hidden, routes, payload)
                error = float((out.float() - wanted).norm() / wanted.norm()) if len(hidden) else 0.0
                transport.check()
                assert error < BF16, f"rank {rank} {where} {case}: off by {error}"
                worst[where] = max(worst.get(where, 0.0), error)
                # How rows travel changes no bit: the same rows meet in the same order.
                first = exact.setdefault((payload, case), out)
                assert torch.equal(first, out), f"rank {rank} {where} {case}: other bits than {TRANSPORTS[0]}"
                assert moved or case.uneven or case.tokens < 37, f"rank {rank} {where} {case}: nothing was sent"
            audits = sum(case.tokens == 37 for case in cases)
            assert layer.counters.audited == audits, f"rank {rank} {where}: audited {layer.counters.audited}"
        transport.close()
    return worst


# -- Collectives


def ints(*values: int, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def expect(found: object, wanted: object, what: str) -> None:
    assert found == wanted, f"{what}: found {found}, wanted {wanted}"


def check_collectives(group: ExpertGroup, device: torch.device) -> None:
    """Every collective in peer-slot order, and exactly what crossed."""
    me, peers = group.peer_slot, len(group.spec)
    cpu = torch.device("cpu")
    first, second = group.gather(ints(me, 10 * me, device=cpu)), group.gather(ints(-me, device=cpu))
    counts = [[(3 * source + destination) % 4 for destination in range(peers)] for source in range(peers)]
    rows = torch.cat([torch.full((counts[me][peer], 5), 10.0 * me + peer, device=device) for peer in range(peers)])
    got = group.all_to_all_v(rows, counts[me], [line[me] for line in counts]).payload()
    wanted = [10.0 * source + me for source in range(peers) for _ in range(counts[source][me])]
    expect(got[:, 0].tolist(), wanted, "all-to-all-v")
    expect(group.all_to_all_v(rows[:0], [0] * peers, [0] * peers).payload().shape, (0, 5), "nothing at all")
    for dtype in (torch.bfloat16, torch.uint8, torch.int64):
        mine = torch.full((2, 3), me, device=device, dtype=dtype)
        found = group.all_gather(mine).payload()
        expect(found[:, 1, 2].tolist(), list(range(peers)), f"all-gather of {dtype}")
        parts = torch.arange(peers, device=device, dtype=dtype)[:, None, None].expand(-1, 2, 3) + me
        found = group.reduce_scatter(parts.contiguous()).payload()
        expect(found.unique().tolist(), [sum(me + peer for peer in range(peers))], f"reduce-scatter of {dtype}")
    sent, received = sum(counts[me]) - counts[me][me], sum(line[me] for line in counts) - counts[me][me]
    gathers = 2 * (peers - 1) * 6 * (2 + 1 + 8)
    expect((group.bytes_sent, group.bytes_received), (20 * sent + gathers, 20 * received + gathers), "bytes")
    for length in (2, 511, 512, 1300):
        for where in (device, cpu):
            lines = group.gather_counts(torch.arange(length, device=where) + me)
            expect(lines.device, cpu, "the lines' device")
            expect(lines[:, -1].tolist(), [length - 1 + peer for peer in range(peers)], f"{length} counts from {where}")
    with pytest.raises(CountMismatchError, match="differ in length"):
        group.gather_counts(torch.zeros(3 + me, dtype=torch.int64, device=device))
    expect(group.gather_counts(ints(me, device=device)).view(-1).tolist(), list(range(peers)), "counts after a refusal")
    expect(first.result().tolist(), [[peer, 10 * peer] for peer in range(peers)], "the first line")
    expect(second.result().tolist(), [[-peer] for peer in range(peers)], "the second line")
    with pytest.raises(CollectiveError, match="the send counts"):
        group.all_to_all_v(rows, [1] * peers + [99], [1] * peers)


def check_streams(group: ExpertGroup, device: torch.device) -> None:
    """Rows are read behind the work that makes them, and may be overwritten behind the payload."""
    me, peers = group.peer_slot, len(group.spec)
    rows = torch.zeros(peers * 4096, 1024, device=device)
    for turn in range(3):
        torch.cuda._sleep(20_000_000)  # 10 ms in which the rows are not there yet
        rows.fill_(me + 10 * turn)
        exchange = group.all_to_all_v(rows, [4096] * peers, [4096] * peers)
        rows_here = exchange.payload()
        rows.fill_(-1)
        exchange.complete()
        wanted = [peer + 10.0 * turn for peer in range(peers)]
        expect(rows_here.view(peers, -1).amax(1).tolist(), wanted, f"the most of turn {turn}")
        expect(rows_here.view(peers, -1).amin(1).tolist(), wanted, f"the least of turn {turn}")


def check_graph(group: ExpertGroup, device: torch.device) -> None:
    """All-gather and reduce-scatter, captured: replayed on other rows than they were captured with."""
    me, peers = group.peer_slot, len(group.spec)
    rows = torch.zeros(16, 256, device=device, dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gathered = group.all_gather(rows).payload()
        summed = group.reduce_scatter(gathered).payload()
    for turn in range(3):
        rows.fill_(me + turn)
        graph.replay()
        group.settle()
        expect(gathered[:, 0, 0].tolist(), [float(peer + turn) for peer in range(peers)], "gathered by a graph")
        expect(summed.unique().tolist(), [float(peers * (me + turn))], "summed by a graph")


def collectives(seat: Seat) -> None:
    spec = seat.group(7, range(seat.ranks)[::-1])  # a peer's slot is not its rank
    group = join("nccl", spec, seat.global_rank, seat.store, 30.0)
    check_collectives(group, seat.device)
    check_streams(group, seat.device)
    check_graph(group, seat.device)
    # Another epoch beside it, with its lines over the devices as between nodes.
    apart = NcclGroup(seat.group(8), seat.global_rank, seat.store, 30.0, seat.device, on_board=False)
    check_collectives(apart, seat.device)
    apart.close()
    group.close()
    group.close()
    for call in (
        lambda: group.gather(ints(1, device=seat.device)),
        lambda: group.all_gather(torch.ones(1, 1)),
        group.settle,
    ):
        with pytest.raises(CollectiveError, match="the group is closed"):
            call()


def everything(seat: Seat) -> dict[str, float]:
    collectives(seat)
    return every_transport("nccl", seat.group(100), seat.global_rank, seat.store, seat.device, CASES)


def test_collectives_on_streams_and_in_graphs_and_layers_over_every_transport_and_payload() -> None:
    for worst in run_ranks(everything, seconds=150):
        assert len(worst) == 2 * len(TRANSPORTS)
        assert max(worst.values()) < BF16


# -- Peers that stop


@contextmanager
def lost(rank: int, epoch: int, within: float) -> Iterator[None]:
    started = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        yield
    assert (caught.value.rank, caught.value.epoch) == (rank, epoch), str(caught.value)
    assert time.monotonic() - started < within, f"{caught.value} after {time.monotonic() - started:.1f} s"


def exchange_with_all(group: ExpertGroup, device: torch.device) -> Tensor:
    peers = len(group.spec)
    return group.all_to_all_v(torch.ones(peers, 8, device=device), [1] * peers, [1] * peers).payload()


def still_works(seat: Seat, epoch: int, members: list[int]) -> None:
    group = join("nccl", seat.group(epoch, members), seat.global_rank, seat.store, 30.0, seat.device)
    expect(float(exchange_with_all(group, seat.device).sum()), 8.0 * len(members), f"epoch {epoch}")
    line = ints(seat.rank, device=torch.device("cpu"))
    expect(group.gather(line).result().view(-1).tolist(), members, f"lines of epoch {epoch}")
    torch.cuda.synchronize()
    group.check()
    group.close()


def one_is_late(seat: Seat) -> None:
    everyone = list(range(seat.ranks))
    still_works(seat, 0, everyone)  # so that no first use falls into the short deadline
    # Alive, but it does not take part: only the deadline tells.
    group = join("nccl", seat.group(1), seat.global_rank, seat.store, 4.0, seat.device)
    group.gather_counts(ints(1, device=seat.device))
    if seat.rank == 0:
        pause(6.0)
    else:
        exchange_with_all(group, seat.device)
        with lost(seat.rank, 1, 15.0):
            group.settle()
    group.close()
    still_works(seat, 2, everyone)
    # It leaves, with the others in the middle of an exchange.
    group = join("nccl", seat.group(3), seat.global_rank, seat.store, 60.0, seat.device)
    group.gather_counts(ints(1, device=seat.device))
    if seat.rank == 0:
        group.close()
    else:
        exchange_with_all(group, seat.device)
        with lost(seat.rank, 3, 30.0):
            group.settle()
        group.close()
    still_works(seat, 4, everyone)


def the_last_rank_dies(seat: Seat) -> str:
    everyone, victim = list(range(seat.ranks)), seat.ranks - 1
    deadline = 60.0
    group = join("nccl", seat.group(5), seat.global_rank, seat.store, deadline, seat.device)
    exchange_with_all(group, seat.device)
    group.settle()
    early = group.gather(ints(1, device=torch.device("cpu")))
    if seat.rank == victim:
        early.result()
        os.kill(os.getpid(), signal.SIGKILL)
    early.result()
    for _ in range(50):  # a host that runs ahead: all of them end by one abort
        received = exchange_with_all(group, seat.device)
    started = time.monotonic()
    float(received.sum())  # the host is stuck with the device, until the watch frees both
    with lost(seat.rank, 5, deadline / 2):
        group.check()  # what was summed is nobody's result
    expect(time.monotonic() - started < deadline / 2, True, "seen long before the deadline")
    with lost(seat.rank, 5, deadline / 2):
        group.gather(ints(2, device=torch.device("cpu"))).result()
    group.close()
    expect(float(torch.ones(4, device=seat.device).sum()), 4.0, "the device of a survivor")
    still_works(seat, 6, everyone[:-1])
    return "survived"


def peers_stop(seat: Seat) -> str:
    one_is_late(seat)
    return the_last_rank_dies(seat)


def test_a_peer_that_is_late_leaves_or_is_killed_breaks_the_epoch_by_name_and_the_next_one_works() -> None:
    ranks = ranks_here()
    assert run_ranks(peers_stop, seconds=150, dying=(ranks - 1,)) == ["survived"] * (ranks - 1) + [None]
