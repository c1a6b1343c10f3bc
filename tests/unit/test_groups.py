"""Groups of real processes: every collective, epochs side by side, what a lost or a stopped peer does to the rest."""

from __future__ import annotations

import os
import pickle
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from ray_moe.comm.group import ExpertGroup, Ticket
from ray_moe.comm.join import join
from ray_moe.comm.rendezvous import RendezvousStore, StoreAddress, connect
from ray_moe.comm.solo import SoloGroup
from ray_moe.errors import CollectiveError, ConfigError, CountMismatchError, DeadlineError, PlacementError
from ray_moe.identity import GlobalRank
from ray_moe.topology import ProcessGroupSpec
from tests.layers import ONE_PEER, spec_of
from tests.peers import Peers, shared_peers
from tests.peers import peers_of_each_kind as peers

__all__ = ["peers"]

KINDS = ("tcp", "gloo")
# Source by destination; a peer that sends nothing, one that receives nothing, pairs without rows.
COUNTS = ((1, 2, 0, 3), (0, 0, 0, 0), (2, 0, 0, 1), (4, 1, 0, 0))


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def rows_of(source: int, counts: tuple[int, ...]) -> Tensor:
    """Rows [N, 3] that say where they come from, where they go, and which of the pair they are."""
    rows = [(source, destination, row) for destination, count in enumerate(counts) for row in range(count)]
    return torch.tensor(rows, dtype=torch.float32).view(-1, 3)


# -- Collectives


def every_collective(group: ExpertGroup) -> dict[str, Tensor]:
    me, size = group.peer_slot, len(group.spec)
    first, second = group.gather(ints(me, 10 * me)), group.gather(ints(-me))
    exchanged = group.all_to_all_v(rows_of(me, COUNTS[me]), COUNTS[me], [line[me] for line in COUNTS]).payload()
    return {
        "first": first.result(),
        "second": second.result(),
        "counts": group.gather_counts(ints(me, 7)),
        "long": group.gather_counts(torch.arange(1300) + me),
        "exactly a frame": group.gather_counts(torch.arange(511) + me),
        "a frame and one": group.gather_counts(torch.arange(512) + me),
        "exchanged": exchanged,
        "nothing": group.all_to_all_v(torch.zeros(0, 2), [0] * size, [0] * size).payload(),
        "gathered": group.all_gather(torch.full((2, 3), float(me))).payload(),
        "summed": group.reduce_scatter(torch.arange(4).repeat_interleave(6).view(4, 2, 3) + 10 * me).payload(),
        "bfloat16": group.all_gather(torch.full((1, 2), float(me), dtype=torch.bfloat16)).payload(),
        "bytes": ints(group.bytes_sent, group.bytes_received),
    }


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (2, 0, 3, 1)], ids=str)
def test_every_collective_delivers_in_peer_slot_order(peers: Peers, ranks: tuple[int, ...]) -> None:
    for me, got in enumerate(peers.run(every_collective, ranks=ranks)):
        assert got["first"].tolist() == [[peer, 10 * peer] for peer in range(4)]
        assert got["second"].tolist() == [[-peer] for peer in range(4)]
        assert got["counts"].tolist() == [[peer, 7] for peer in range(4)]
        for name, length in (("long", 1300), ("exactly a frame", 511), ("a frame and one", 512)):
            assert torch.equal(got[name], torch.arange(length) + torch.arange(4)[:, None])
        arrived = torch.cat([rows_of(peer, COUNTS[peer])[rows_of(peer, COUNTS[peer])[:, 1] == me] for peer in range(4)])
        assert torch.equal(got["exchanged"], arrived)
        assert got["nothing"].shape == (0, 2)
        assert torch.equal(got["gathered"], torch.arange(4.0).view(4, 1, 1).expand(4, 2, 3))
        assert got["summed"].tolist() == [[4 * me + 60] * 3] * 2
        assert got["bfloat16"].dtype == torch.bfloat16
        assert got["bfloat16"].view(-1).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        # Only rows that cross are payload: fp32 rows of 3 in the exchange, then two gathers to three peers each.
        sent, received = sum(COUNTS[me]) - COUNTS[me][me], sum(line[me] for line in COUNTS) - COUNTS[me][me]
        gathers = 3 * (2 * 3 * 4 + 1 * 2 * 2) + 3 * (2 * 3 * 8)
        assert got["bytes"].tolist() == [sent * 12 + gathers, received * 12 + gathers]


# -- Disagreement


def lines_of_two_lengths(group: ExpertGroup, lengths: tuple[int, ...]) -> tuple[str, list[list[int]]]:
    with pytest.raises(CountMismatchError) as refused:
        group.gather_counts(torch.ones(lengths[group.peer_slot], dtype=torch.int64))
    return str(refused.value), group.gather_counts(ints(group.peer_slot)).tolist()


@pytest.mark.parametrize("lengths", [(7, 7, 9), (3, 600, 3), (1200, 600, 1200)], ids=str)
def test_count_lines_of_two_lengths_are_refused_by_all_and_the_epoch_goes_on(
    peers: Peers, lengths: tuple[int, ...]
) -> None:
    for message, afterwards in peers.run(lines_of_two_lengths, lengths, ranks=(0, 1, 2)):
        assert f"differ in length: {list(lengths)}" in message
        assert afterwards == [[0], [1], [2]]


# -- Lost and stopped peers


def others_lose_peer(group: ExpertGroup, victim: int, number: int) -> list[str]:
    """The victim signals itself after the group has been used; the others wait for it in every way there is."""
    group.gather(ints(1)).result()
    early = group.gather(ints(2))
    if group.peer_slot == victim:
        os.kill(os.getpid(), number)
    names = []
    for collective in (
        lambda: group.all_to_all_v(torch.ones(3, 2), [1, 1, 1], [1, 1, 1]).payload(),
        lambda: (early.result(), group.gather(ints(3)).result()),
        lambda: group.gather_counts(ints(4)),
        lambda: group.all_gather(torch.ones(1, 1)).payload(),
    ):
        with pytest.raises(CollectiveError, match=r"\(rank \d, epoch \d+\)") as lost:
            collective()
        names.append(type(lost.value).__name__)
    return names


def test_survivors_of_a_killed_peer_get_an_error_long_before_the_groups_deadline(peers: Peers) -> None:
    # The group's own deadline is beyond the job's: a survivor that sat it out would fail the job.
    job = peers.start(others_lose_peer, 2, signal.SIGKILL, ranks=(0, 1, 2), seconds=600.0)
    assert job.results(0, 1) == [["CollectiveError"] * 4] * 2
    with pytest.raises(RuntimeError, match="the process died"):
        job.results(2)
    again = peers.run(every_collective, ranks=(0, 1, 2, 3))
    assert [got["counts"].tolist() for got in again] == [[[peer, 7] for peer in range(4)]] * 4


def waits_for_stopped_peer(group: ExpertGroup, victim: int) -> str:
    group.gather(ints(1)).result()
    if group.peer_slot == victim:
        os.kill(os.getpid(), signal.SIGSTOP)

    def two_steps() -> None:
        # What the others sent before they gave up may still arrive at the stopped peer: it learns of it one call later.
        group.all_to_all_v(torch.ones(3, 2), [1, 1, 1], [1, 1, 1]).payload()
        group.gather_counts(ints(1))

    with pytest.raises(CollectiveError) as late:
        two_steps()
    return str(late.value)


def test_a_stopped_peer_costs_the_others_the_groups_deadline_and_no_more(peers: Peers) -> None:
    peers.run(every_collective, ranks=(0, 1, 2, 3))  # so that no process starts within the two seconds
    job = peers.start(waits_for_stopped_peer, 2, ranks=(0, 1, 2), seconds=2.0)
    said = {"tcp": "peer slot 2 of ep-group-0 did not answer within 2 s", "gloo": "imed out"}[peers.kind]
    for message in job.results(0, 1):
        assert said in message
    peers.signal(2, signal.SIGCONT)
    (message,) = job.results(2)
    assert "(rank 2, epoch" in message


def closes_with_a_gather_in_flight(group: ExpertGroup) -> str:
    if group.peer_slot == 0:
        pending = group.gather(ints(1))
        group.close()
        with pytest.raises(CollectiveError, match="the group is closed"):
            pending.result()
        return "closed"
    group.gather(ints(1)).result()
    with pytest.raises(CollectiveError) as lost:
        group.gather(ints(2)).result()
    return type(lost.value).__name__


def test_closing_frees_waiting_peers_even_while_a_gather_is_in_flight(peers: Peers) -> None:
    assert peers.run(closes_with_a_gather_in_flight, ranks=(0, 1), seconds=600.0) == ["closed", "CollectiveError"]


def closes_twice(group: ExpertGroup) -> list[str]:
    group.gather_counts(ints(1))
    group.close()
    group.close()
    rows = torch.ones(1, 1)
    refusals = []
    for call in (
        lambda: group.gather(ints(1)),
        lambda: group.gather_counts(ints(1)),
        lambda: group.all_to_all_v(rows, [1, 0][: len(group.spec)], [1, 0][: len(group.spec)]).payload(),
        lambda: group.all_gather(rows).payload(),
        lambda: group.reduce_scatter(rows[None].repeat(len(group.spec), 1, 1)).payload(),
    ):
        with pytest.raises(CollectiveError) as refused:
            call()
        refusals.append(refused.value.detail)
    return refusals


@pytest.mark.parametrize("ranks", [(0, 1), (0,)], ids=["two peers", "one peer"])
def test_a_group_closes_twice_and_then_refuses_every_call(peers: Peers, ranks: tuple[int, ...]) -> None:
    assert peers.run(closes_twice, ranks=ranks) == [["the group is closed"] * 5] * len(ranks)


# -- Epochs


def epochs_side_by_side(group: ExpertGroup, store: StoreAddress) -> list[list[list[int]]]:
    """Epoch 1001 has the peers in another order, 1002 leaves one out, and 1001 is built again as 1003 when closed."""
    me, got = group.spec.peers[group.peer_slot], []
    kind = type(group)
    turned = kind(spec_of((2, 0, 1), 1001), me, store, 60)
    pair = kind(spec_of((2, 1), 1002), me, store, 60) if me.value else None
    waiting: list[Ticket] = [each.gather(ints(me.value)) for each in (turned, group, pair) if each is not None]
    got += [ticket.result().tolist() for ticket in reversed(waiting)]
    turned.close()
    rebuilt = kind(spec_of((0, 1, 2), 1003), me, store, 60)
    got += [each.gather_counts(ints(me.value)).tolist() for each in (rebuilt, group)]
    rebuilt.close()
    if pair is not None:
        got.append(pair.gather_counts(ints(me.value)).tolist())
        pair.close()
    return got


def test_several_epochs_live_side_by_side_and_can_be_rebuilt(peers: Peers) -> None:
    store = RendezvousStore("127.0.0.1", 60)
    plain, turned, pair = [[0], [1], [2]], [[2], [0], [1]], [[2], [1]]
    got = peers.run(epochs_side_by_side, store.address, ranks=(0, 1, 2))
    assert got[0] == [plain, turned, plain, plain]
    assert got[1] == got[2] == [pair, plain, turned, plain, plain, pair]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_epoch_that_a_peer_never_joins_is_an_error_at_the_deadline(kind: str, rank: int) -> None:
    store = RendezvousStore("127.0.0.1", 5)
    with pytest.raises(CollectiveError, match=rf"joining the group: .*\(rank {rank}, epoch 3\)"):
        join(kind, spec_of((0, 1), 3), GlobalRank(rank), store.address, 2.0)


@pytest.mark.parametrize(("kind", "device"), [("tcp", "cuda"), ("gloo", "cuda"), ("nccl", "cpu")])
def test_a_group_carries_rows_of_its_own_devices_alone(kind: str, device: str) -> None:
    with pytest.raises(ConfigError, match=f"group {kind} carries rows between peers on .*, found peers on {device}"):
        join(kind, spec_of((0, 1), 3), GlobalRank(0), StoreAddress("127.0.0.1", 9), 0.5, torch.device(device))


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is refused is a machine without CUDA")
def test_nccl_is_refused_without_a_cuda_device() -> None:
    with pytest.raises(ConfigError, match="group nccl needs a CUDA device, found none"):
        join("nccl", spec_of((0, 1), 3), GlobalRank(0), StoreAddress("127.0.0.1", 9), 0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_that_does_not_answer_is_named(kind: str) -> None:
    with pytest.raises(DeadlineError, match=r"rendezvous store 127\.0\.0\.1:9 .*ep-group-0/epoch-3"):
        join(kind, spec_of((0, 1), 3), GlobalRank(0), StoreAddress("127.0.0.1", 9), 0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_a_seat_cannot_join(kind: str) -> None:
    with pytest.raises(PlacementError, match="rank 5 has no seat"):
        join(kind, spec_of((0, 1), 3), GlobalRank(5), StoreAddress("127.0.0.1", 9), 0.5)
    with pytest.raises(PlacementError, match="rank 5 has no seat"):
        SoloGroup(ONE_PEER, GlobalRank(5))


# -- One peer


def test_for_one_peer_every_collective_is_the_identity() -> None:
    group = SoloGroup(ONE_PEER, GlobalRank(0))
    line, rows = ints(1, 2, 3), torch.randn(4, 2)
    assert torch.equal(group.gather(line).result(), line[None])
    assert torch.equal(group.gather_counts(line), line[None])
    assert group.all_to_all_v(rows, [4], [4]).payload() is rows
    assert torch.equal(group.all_gather(rows).payload(), rows[None])
    assert torch.equal(group.reduce_scatter(rows[None]).payload(), rows)
    group.check()
    assert (group.bytes_sent, group.bytes_received) == (0, 0)


@pytest.mark.parametrize(("sent", "received"), [([3], [4]), ([4], [3]), ([5], [5])])
def test_one_peer_refuses_splits_that_do_not_fit_its_rows(sent: list[int], received: list[int]) -> None:
    with pytest.raises(CollectiveError, match="all-to-all-v of 4 rows: counts are"):
        SoloGroup(ONE_PEER, GlobalRank(0)).all_to_all_v(torch.ones(4, 1), sent, received)


def splits_that_do_not_fit(group: ExpertGroup) -> tuple[list[str], list[list[float]]]:
    rows, refusals = torch.full((4, 1), float(group.peer_slot)), []
    for sent in ([1, 1], [3, 2]):
        with pytest.raises(CollectiveError) as refused:
            group.all_to_all_v(rows, sent, [2, 2]).payload()
        refusals.append(refused.value.detail)
    return refusals, group.all_to_all_v(rows, [2, 2], [2, 2]).payload().tolist()


def test_splits_that_do_not_fit_the_rows_are_refused_before_anything_is_sent(peers: Peers) -> None:
    refusals = [f"all-to-all-v of 4 rows: the send counts {sent} sum to {sum(sent)}" for sent in ([1, 1], [3, 2])]
    assert peers.run(splits_that_do_not_fit, ranks=(0, 1)) == [(refusals, [[0.0], [0.0], [1.0], [1.0]])] * 2


def test_a_group_of_several_is_no_solo_group() -> None:
    with pytest.raises(PlacementError, match="a solo group has one peer, ep-group-0 has 2"):
        SoloGroup(spec_of((0, 1)), GlobalRank(0))


def test_the_records_that_travel_survive_pickling() -> None:
    spec: ProcessGroupSpec = pickle.loads(pickle.dumps(spec_of((2, 0), 5)))
    assert spec == spec_of((2, 0), 5)
    assert pickle.loads(pickle.dumps(StoreAddress("h", 1))) == StoreAddress("h", 1)


# -- TCP alone


def more_than_the_connections_hold(group: ExpertGroup) -> bool:
    """32 MiB to each peer at once, from both sides: nobody reads before everybody has begun to send."""
    me, size = group.peer_slot, len(group.spec)
    rows = torch.arange(size, dtype=torch.float32).repeat_interleave(2048)[:, None].expand(-1, 4096) + 10 * me
    exchange = group.all_to_all_v(rows.contiguous(), [2048] * size, [2048] * size)
    got = exchange.payload()
    exchange.complete()  # leaving now would take back what the others have not read yet
    expected = (torch.arange(size, dtype=torch.float32) * 10 + me).repeat_interleave(2048)
    return bool((got == expected[:, None]).all())


def test_large_exchanges_do_not_wait_for_one_another(peers: Peers) -> None:
    assert peers.run(more_than_the_connections_hold, ranks=(0, 1, 2)) == [True] * 3


def other_sizes(group: ExpertGroup) -> str:
    mine = 1 + group.peer_slot
    with pytest.raises(CollectiveError) as refused:
        group.all_to_all_v(torch.ones(2 * mine, 2), [mine, mine], [mine, mine]).payload()
    return refused.value.detail


def test_peers_that_expect_other_sizes_are_told_so_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_peers(), "kind", "tcp")
    first, second = shared_peers().run(other_sizes, ranks=(0, 1))
    assert first == "peer slot 1 of ep-group-0 is at collective 1 with 16 bytes, this peer at 1 with 8"
    assert second == "peer slot 0 of ep-group-0 is at collective 1 with 8 bytes, this peer at 1 with 16"


def test_a_stranger_at_the_door_is_turned_away_and_the_epoch_forms() -> None:
    store = RendezvousStore("127.0.0.1", 20)
    spec = spec_of((0, 1), 9)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(join, "tcp", spec, GlobalRank(0), store.address, 20)
        members = connect(store.address, "ep-group-0/epoch-9", 20)
        host, port = members.get("address-0").decode().split()
        with socket.create_connection((host, int(port)), timeout=20) as stranger:
            stranger.sendall(b"x" * 48)
            assert stranger.recv(1) == b"", "the connection was closed on it"
        second = pool.submit(join, "tcp", spec, GlobalRank(1), store.address, 20)
        groups = [first.result(timeout=20), second.result(timeout=20)]
    tickets = [group.gather(ints(group.peer_slot)) for group in groups]
    assert [ticket.result().tolist() for ticket in tickets] == [[[0], [1]]] * 2
    for group in groups:
        group.close()
