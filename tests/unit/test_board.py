"""The board between real processes, and between seats of one process: lines arrive whole, deaths are seen at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ray_moe.comm import board as module
from ray_moe.comm.board import IN_FLIGHT, LONGEST_LINE, Board
from ray_moe.comm.group import ExpertGroup
from ray_moe.comm.rendezvous import RendezvousStore, StoreAddress, connect
from ray_moe.errors import CollectiveError, CountMismatchError
from ray_moe.topology import ProcessGroupSpec
from tests.layers import spec_of, untimed
from tests.peers import Peers, peers

__all__ = ["peers"]

_EPOCHS = count(1)
INT64 = st.integers(-(2**63), 2**63 - 1)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.fixture(scope="module")
def store() -> RendezvousStore:
    return RendezvousStore("127.0.0.1", 20)


def seats(peers: int, seconds: float = 5.0) -> list[Board]:
    """One board, every seat of it in this process."""
    spec = spec_of(range(peers), next(_EPOCHS))
    path = module._create(spec)
    boards = [module._open(path, spec, slot, seconds) for slot in range(peers)]
    os.unlink(path)
    return [board for board in boards if board is not None]


@pytest.fixture
def pair() -> Iterator[list[Board]]:
    boards = seats(2)
    yield boards
    for board in boards:
        board.close()


# -- Lines


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[int, int, list[list[int]]]]:
    """Rounds of (channel, how many of them are in flight at once, the peers' lines)."""
    rounds = []
    for _ in range(draw(st.integers(1, 12))):
        width = draw(st.sampled_from((1, 14, 300)))
        lines = [draw(st.lists(INT64, min_size=1, max_size=4)) for _ in range(3)]
        rounds.append(
            (draw(st.integers(0, 1)), draw(st.integers(1, IN_FLIGHT)), [(line * width)[:width] for line in lines])
        )
    return rounds


@pytest.fixture(scope="module")
def three() -> Iterator[list[Board]]:
    boards = seats(3)
    yield boards
    for board in boards:
        board.close()


@given(conversations())
@untimed
def test_every_line_arrives_as_it_was_written_however_many_are_in_flight(
    three: list[Board], rounds: list[tuple[int, int, list[list[int]]]]
) -> None:
    for channel, burst, lines in rounds:
        wanted = [[[number ^ turn for number in line] for line in lines] for turn in range(burst)]
        numbers = [
            [board.submit(channel, ints(*line)) for board, line in zip(three, by_peer, strict=True)]
            for by_peer in wanted
        ]
        # Read in another order than they were written, and by peers that are not at the same place.
        for by_peer, expected in reversed(list(zip(numbers, wanted, strict=True))):
            for board, number in zip(three, by_peer, strict=True):
                assert board.collect(channel, number).tolist() == expected


def test_a_line_that_is_not_whole_is_waited_for(pair: list[Board], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = pair
    ticket, theirs = first.gather(ints(1, 2, 3)), second.gather(ints(4, 5, 6))
    at = first._entry(module._CONTROL, 1, 1) + module._NUMBERS
    first._words[at + 1] = 7  # as a writer leaves it between two numbers

    def mend(ready: object, seconds: float, spin: float) -> bool:
        assert callable(ready)
        assert not ready()
        first._words[at + 1] = 5
        return bool(ready())

    monkeypatch.setattr(module, "poll", mend)
    assert ticket.result().tolist() == [[1, 2, 3], [4, 5, 6]]
    assert theirs.result().tolist() == [[1, 2, 3], [4, 5, 6]]


def test_lines_of_two_lengths_are_refused_by_all_and_the_epoch_goes_on(pair: list[Board]) -> None:
    tickets = [board.gather(torch.zeros(length, dtype=torch.int64)) for board, length in zip(pair, (7, 9), strict=True)]
    for ticket in tickets:
        with pytest.raises(CountMismatchError, match=r"differ in length: \[7, 9\]"):
            ticket.result()
    tickets = [board.gather(ints(3)) for board in pair]
    assert [ticket.result().tolist() for ticket in tickets] == [[[3], [3]]] * 2


def test_more_lines_than_the_ring_keeps_and_longer_ones_are_refused(pair: list[Board]) -> None:
    first, second = pair
    for number in range(IN_FLIGHT):
        first.gather(ints(number))
    with pytest.raises(CollectiveError, match=f"at most {IN_FLIGHT} lines may be in flight"):
        first.gather(ints(9))
    with pytest.raises(CollectiveError, match=f"at most {LONGEST_LINE} numbers, found {LONGEST_LINE + 1}"):
        second.gather(torch.zeros(LONGEST_LINE + 1, dtype=torch.int64))
    longest = torch.arange(LONGEST_LINE)
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda board: board.gather_counts(longest), pair))
    assert all(torch.equal(lines, longest.expand(2, -1)) for lines in both)


def test_a_silent_peer_costs_the_deadline_and_is_named() -> None:
    first, second = seats(2, seconds=0.05)
    with pytest.raises(
        CollectiveError, match=r"peer slot 1 of ep-group-0 did not answer within 0.05 s \(rank 0, epoch"
    ):
        first.gather(ints(1)).result()
    first.close()
    second.close()


def test_what_was_written_before_its_writer_left_is_still_read(pair: list[Board]) -> None:
    first, second = pair
    ticket = first.gather(ints(1))
    second.gather(ints(2))
    second.close()
    second.close()
    assert ticket.result().tolist() == [[1], [2]]
    with pytest.raises(CollectiveError, match="peer slot 1 of ep-group-0 has closed the epoch"):
        first.gather(ints(3)).result()
    with pytest.raises(CollectiveError, match="the group is closed"):
        second.gather(ints(3))


# -- Joining


def board_of(group: ExpertGroup, store: StoreAddress, epoch: int, seconds: float) -> Board | None:
    spec: ProcessGroupSpec = spec_of([rank.value for rank in group.spec.peers], epoch)
    return Board.join(spec, group.peer_slot, connect(store, f"boards/epoch-{epoch}", seconds), seconds)


def one_is_elsewhere(group: ExpertGroup, store: StoreAddress, epoch: int) -> bool:
    if group.peer_slot == 2:  # as on a node where the file is not
        module._open = lambda *_: None
    return board_of(group, store, epoch, 20) is None


def test_peers_of_two_nodes_have_no_board_and_all_know_it(peers: Peers, store: RendezvousStore) -> None:
    assert peers.run(one_is_elsewhere, store.address, next(_EPOCHS), ranks=(0, 1, 2)) == [True] * 3
    peers.signal(2, signal.SIGKILL)  # the process was changed
    peers.bury(2)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("ray_moe-ep-group-0-")]


@pytest.mark.parametrize("slot", [0, 1])
def test_a_member_that_does_not_come_is_an_error_at_the_deadline(slot: int) -> None:
    impatient = RendezvousStore("127.0.0.1", 0.5)
    with pytest.raises(CollectiveError, match=r"joining the board: .*\(rank \d, epoch 3\)"):
        Board.join(spec_of((0, 1), 3), slot, connect(impatient.address, "epoch-3", 0.5), 0.5)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("ray_moe-ep-group-0-3-")]


# -- Real processes


def talks(group: ExpertGroup, store: StoreAddress, epoch: int, steps: int) -> list[list[int]]:
    board = board_of(group, store, epoch, 20)
    assert board is not None
    totals = []
    for step in range(steps):
        ticket = board.gather(ints(step, group.peer_slot))
        counts = board.gather_counts(torch.full((1 + step % 50,), group.peer_slot))
        lines = ticket.result()
        totals.append([int(lines[:, 0].sum()), int(lines[:, 1].sum()), int(counts.sum())])
    board.close()
    return totals


def test_processes_agree_step_after_step(peers: Peers, store: RendezvousStore) -> None:
    steps = 60
    wanted = [[3 * step, 3, 3 * (1 + step % 50)] for step in range(steps)]
    assert peers.run(talks, store.address, next(_EPOCHS), steps, ranks=(2, 0, 1)) == [wanted] * 3


def waits_for_the_dead(group: ExpertGroup, store: StoreAddress, epoch: int) -> tuple[str, float]:
    board = board_of(group, store, epoch, 600.0)
    assert board is not None
    board.gather(ints(1)).result()
    if group.peer_slot == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(CollectiveError) as lost:
        board.gather(ints(2)).result()
    return str(lost.value), time.monotonic() - started


def test_a_killed_peer_is_noticed_long_before_the_deadline(peers: Peers, store: RendezvousStore) -> None:
    epoch = next(_EPOCHS)
    job = peers.start(waits_for_the_dead, store.address, epoch, ranks=(0, 1, 2))
    for message, seconds in job.results(0, 2):
        # The other survivor may have given up first: then that is what is seen.
        assert f"epoch {epoch}" in message
        assert "the process of peer slot 1 of ep-group-0 has ended" in message
        assert seconds < 300
