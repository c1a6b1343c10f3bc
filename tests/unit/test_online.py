"""Demand on line: no route counted twice whatever becomes of the reports, and what is missing is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_moe.controlplane.demand import require
from ray_moe.controlplane.estimators import Ewma, TrailingWindow
from ray_moe.controlplane.online import DemandLog, Drop, Estimates, Missing, Window
from ray_moe.dataplane.route_counts import DemandReport
from ray_moe.errors import ConfigError
from ray_moe.identity import CheckpointVersion
from ray_moe.placement import PlacementSnapshot
from tests.layers import CHECKPOINT, placement, spec_of, untimed

LAYERS, EXPERTS = 1, 3


def snapshot(ranks: Sequence[int], generation: int = 1, epoch: int = 0) -> PlacementSnapshot:
    return placement(
        [(expert, ranks[expert % len(ranks)]) for expert in range(EXPERTS)],
        spec_of(ranks, epoch),
        generation=generation,
    )


def report(
    rank: int,
    sequence: int,
    first: int,
    last: int,
    counts: Sequence[int] = (1, 0, 2),
    generation: int = 1,
    epoch: int = 0,
) -> DemandReport:
    """Of `counts` decode routes for each expert, and one prefill route for expert 0."""
    counts_PLE = np.array([[[1, 0, 0]], [list(counts)]], np.int64)
    return DemandReport(rank, sequence, generation, epoch, first, last, (1, sum(counts)), counts_PLE)


def log(*snapshots: PlacementSnapshot, window: int = 4, grace: int = 4, keep: int = 64) -> DemandLog:
    made = DemandLog(LAYERS, EXPERTS, "router-1", window_steps=window, grace_steps=grace, keep=keep)
    for each in snapshots or (snapshot((0, 1)),):
        made.serve(each)
    return made


# -- Windows


def test_a_window_closes_when_every_rank_has_reported_on_all_of_it() -> None:
    demand = log(grace=100)
    for item in (report(0, 0, 0, 3), report(1, 0, 0, 1), report(0, 1, 4, 7)):
        assert demand.fold(item) is None
    assert demand.take() == ()
    demand.fold(report(1, 1, 2, 3, (5, 0, 0)))
    (window,) = demand.take()
    assert (window.start, window.end, window.ranks, window.missing) == (0, 4, (0, 1), ())
    assert window.counts_PLE.tolist() == [[[3, 0, 0]], [[7, 0, 4]]]
    assert window.tokens == (3, 11)
    assert demand.take() == ()


def test_a_window_is_an_observation_with_complete_provenance() -> None:
    demand = log()
    demand.serve(snapshot((0, 1), generation=2))
    for item in (report(0, 0, 0, 2), report(0, 1, 3, 3, generation=2), report(1, 0, 0, 3)):
        demand.fold(item)
    (window,) = demand.take()
    loads = {phase: window.demand(phase) for phase in ("prefill", "decode", "mixed")}
    assert loads["mixed"].loads_LE.tolist() == (loads["prefill"].loads_LE + loads["decode"].loads_LE).tolist()
    for phase, seen in loads.items():
        origin = seen.provenance
        require(seen, CHECKPOINT)  # nothing is missing
        assert (origin.unit, origin.phase, origin.start, origin.end) == ("accepted_rows", phase, 0, 4)
        assert (origin.router_version, origin.topology_version) == ("router-1", "topology-1")
        assert origin.placement_version == snapshot((0, 1), generation=2).version  # the newest in it
        assert (origin.window, origin.cadence, origin.aggregation) == (1, 4, "sum over 2 ranks")
        assert origin.source == "route counts of ranks 0, 1"


def test_what_is_missing_is_waited_for_and_then_named() -> None:
    demand = log(grace=6)
    for item in (report(0, 0, 0, 3), report(1, 0, 0, 0), report(1, 2, 3, 3), report(0, 1, 4, 8)):
        demand.fold(item)
    assert demand.take() == ()  # rank 1's second report may still come
    demand.fold(report(0, 2, 9, 9))
    first, *_ = demand.take()
    assert first.missing == (Missing(1, 1, 2),)
    assert first.demand("mixed").provenance.source == "route counts of ranks 0, 1, without rank 1 in [1, 2]"
    assert demand.fold(report(1, 1, 1, 2)) is Drop.LATE
    assert demand.dropped == Counter({Drop.LATE: 1})


def test_a_log_that_begins_in_the_middle_says_that_it_does_not_know_what_was_before() -> None:
    demand = log(snapshot((0,)))  # the controller came back; the ranks went on
    for sequence in range(57, 61):
        demand.fold(report(0, sequence, 4 * sequence, 4 * sequence + 3))
    before, *windows = demand.take()
    assert (before.start, before.end, before.ranks) == (0, 228, ())
    assert before.missing == (Missing(0, 0, 227),)
    assert [window.missing for window in windows] == [()] * 4
    with pytest.raises(ConfigError, match=r"no rank reported on steps \[0, 228\)"):
        before.demand()


def test_a_log_from_the_start_waits_for_nothing() -> None:
    demand = log(snapshot((0,)), grace=1000)
    demand.fold(report(0, 0, 100, 103))  # the first report begins with the first step
    assert [(window.start, window.missing) for window in demand.take()] == [(100, ())]


# -- Ranks come and go


def test_a_rank_that_left_is_not_waited_for_and_one_that_joined_is_from_its_first_step_on() -> None:
    demand = log(snapshot((0, 1)), snapshot((1, 5), generation=2, epoch=1), grace=1000)
    for item in (report(0, 0, 0, 3), report(1, 0, 0, 3), report(0, 1, 4, 5), report(1, 1, 4, 5)):
        demand.fold(item)
    assert len(demand.take()) == 1
    demand.fold(report(1, 2, 6, 7, generation=2, epoch=1))
    assert demand.take() == ()
    demand.fold(report(5, 0, 6, 7, generation=2, epoch=1))
    (window,) = demand.take()
    assert (window.start, window.ranks, window.missing) == (4, (0, 1, 5), ())
    assert window.versions is not None and window.versions.epoch == 1
    demand.fold(report(1, 3, 8, 11, generation=2, epoch=1))
    demand.fold(report(5, 1, 8, 11, generation=2, epoch=1))
    assert [window.ranks for window in demand.take()] == [(1, 5)]


def test_two_checkpoints_side_by_side_are_two_observations() -> None:
    old = snapshot((0,))
    new = PlacementSnapshot(
        *(old.version, 2, "release-2", CheckpointVersion("checkpoint-2"), old.group, old.topology),
        tuple(
            type(layer)(
                layer.layer,
                layer.num_logical_experts,
                tuple(
                    type(slot)(**{**vars(slot), "checkpoint_version": CheckpointVersion("checkpoint-2")})
                    for slot in layer.slots
                ),
            )
            for layer in old.layers
        ),
    )
    demand, estimates = log(old, new), Estimates(TrailingWindow(1))
    demand.fold(report(0, 0, 0, 1, (4, 0, 0)))
    demand.fold(report(0, 1, 2, 3, (0, 6, 0), generation=2))
    for window in demand.take():
        estimates.observe(window)
    by_checkpoint = {
        name: estimates.estimate(CheckpointVersion(name), "decode")
        for name in ("checkpoint-1", "checkpoint-2", "checkpoint-3")
    }
    assert [None if found is None else found.loads_LE.tolist() for found in by_checkpoint.values()] == [
        [[4.0, 0.0, 0.0]],
        [[0.0, 6.0, 0.0]],
        None,
    ]


def test_a_stranger_is_refused_and_a_generation_that_nobody_knows_is_dropped() -> None:
    demand = log()
    with pytest.raises(
        ConfigError, match="rank 7 reports on generation 1 in epoch 0; that is in epoch 0 with ranks 0, 1"
    ):
        demand.fold(report(7, 0, 0, 3))
    with pytest.raises(ConfigError, match="generation 1 in epoch 3"):
        demand.fold(report(0, 0, 0, 3, epoch=3))
    with pytest.raises(ConfigError, match=r"counts \[2, 2, 3\], must be \[2, 1, 3\]"):
        demand.fold(DemandReport(0, 0, 1, 0, 0, 3, (0, 0), np.zeros((2, 2, 3), np.int64)))
    assert demand.fold(report(0, 0, 0, 3, generation=9)) is Drop.UNKNOWN_GENERATION


# -- Whatever becomes of the reports


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[PlacementSnapshot], list[DemandReport], list[DemandReport]]:
    """Epochs with members that come and go, what each of them reports, and what arrives of it and when."""
    steps, epochs, sequence, sent = 0, [], Counter[int](), []
    serial = 0
    for epoch in range(draw(st.integers(1, 3))):
        ranks = tuple(sorted(draw(st.sets(st.integers(0, 4), min_size=1, max_size=3))))
        ranks = tuple(rank + (10 * epoch if rank > 2 else 0) for rank in ranks)  # some are new for good
        epochs.append(snapshot(ranks, generation=epoch + 1, epoch=epoch))
        length = draw(st.integers(1, 14))
        for rank in ranks:
            cuts = sorted(draw(st.sets(st.integers(1, length), max_size=4)) | {length})
            for begin, end in pairwise((0, *cuts)):
                serial += 1
                counts = (serial, 1, 0)
                sent.append(report(rank, sequence[rank], steps + begin, steps + end - 1, counts, epoch + 1, epoch))
                sequence[rank] += 1
        steps += length
    arriving = draw(st.lists(st.sampled_from(sent), max_size=2 * len(sent))) if draw(st.booleans()) else sent
    return epochs, sent, draw(st.permutations(arriving))


@given(histories(), st.integers(1, 9), st.integers(0, 30), st.data())
@untimed
def test_in_any_order_with_any_loss_every_route_counts_at_most_once_and_every_step_without_is_named(
    history: tuple[list[PlacementSnapshot], list[DemandReport], list[DemandReport]],
    window: int,
    grace: int,
    data: st.DataObject,
) -> None:
    epochs, sent, arriving = history
    demand = log(*epochs, window=window, grace=grace)
    windows: list[Window] = []
    counted: set[tuple[int, int]] = set()
    total, open_total = Counter[Drop](), np.zeros((2, LAYERS, EXPERTS), np.int64)
    for item in arriving:
        reason = demand.fold(item)
        if reason is None:
            assert (item.rank, item.sequence) not in counted
            counted.add((item.rank, item.sequence))
            open_total += item.phase_counts_PLE
        else:
            total[reason] += 1
        if data.draw(st.booleans()):
            windows += demand.take()
    assert demand.folded == len(counted) and demand.dropped == total
    # Two more, far ahead, so that all that was sent is out of grace.
    last = max(item.last_step for item in sent)
    far = ((last + grace) // window + 2) * window
    final = epochs[-1]
    rank = final.group.peers[0].value
    nothing = np.zeros_like(open_total)
    for number, step in enumerate((far, far + grace + 1)):
        where = (final.generation, final.group.epoch, step, step)
        demand.fold(DemandReport(rank, 10**6 + number, *where, (0, 0), nothing.copy()))
    windows += demand.take()

    # 1. The windows hold exactly what was counted.
    assert (sum((each.counts_PLE for each in windows), nothing) == open_total).all()
    # 2. They are in order, and apart.
    assert all(earlier.end <= later.start for earlier, later in pairwise(windows))
    # 3. All steps of a report that did not count are named as missing.
    missing = {(each.rank, step) for w in windows for each in w.missing for step in range(each.first, each.last + 1)}
    for item in sent:
        if (item.rank, item.sequence) not in counted:
            assert {(item.rank, step) for step in range(item.first_step, item.last_step + 1)} <= missing


@given(histories(), st.integers(1, 9))
@untimed
def test_where_nothing_is_lost_nothing_is_missing_and_no_grace_is_needed(
    history: tuple[list[PlacementSnapshot], list[DemandReport], list[DemandReport]], window: int
) -> None:
    epochs, sent, _ = history
    demand = log(*epochs, window=window, grace=10**9)
    in_time = sorted(sent, key=lambda item: item.last_step)
    windows: list[Window] = []
    for item in in_time:
        assert demand.fold(item) is None
        windows += demand.take()
    assert all(each.missing == () for each in windows)
    # All whose window is over are told; a rank that joined in the last steps may be all that is waited for.
    end = max(item.last_step for item in sent) + 1
    over = sum(int(item.phase_counts_PLE.sum()) for item in sent if item.last_step // window < end // window)
    assert len(epochs) > 1 or sum(int(each.counts_PLE.sum()) for each in windows) == over


# -- Memory


def test_memory_does_not_grow_with_time() -> None:
    demand = log(snapshot((0, 1)), keep=3)
    for epoch in range(200):
        ranks = (epoch, epoch + 1)
        demand.serve(snapshot(ranks, generation=epoch + 1, epoch=epoch))
        for rank in ranks:
            sequence = int(rank == epoch and epoch > 0)
            demand.fold(report(rank, sequence, 4 * epoch, 4 * epoch + 3, (1, 1, 1), epoch + 1, epoch))
    assert [window.start for window in demand.take()] == [788, 792, 796]
    assert len(demand._ranks) <= 3 and len(demand._epochs) <= 2 and len(demand._generations) <= 2
    assert sum(len(rank.steps) for rank in demand._ranks.values()) <= 4


# -- Estimates


def test_estimates_leave_out_windows_without_routes_and_know_no_phase_that_was_not_seen() -> None:
    demand, estimates = log(snapshot((0,))), Estimates(Ewma(0.5))
    loads = ((4, 0, 0), (0, 0, 0), (0, 0, 8))
    for sequence, counts in enumerate(loads):
        demand.fold(report(0, sequence, 4 * sequence, 4 * sequence + 3, counts))
    assert estimates.estimate(CHECKPOINT, "decode") is None
    for window in demand.take():
        estimates.observe(window)
    decode, mixed = (estimates.estimate(CHECKPOINT, phase) for phase in ("decode", "mixed"))
    assert decode is not None and mixed is not None
    assert decode.loads_LE.tolist() == [[2.0, 0.0, 4.0]]
    assert mixed.loads_LE.tolist() == [[2.0, 0.0, 4.0]]  # of (5, 0, 0), (1, 0, 0) and (1, 0, 8)
    assert (decode.provenance.start, decode.provenance.end) == (0, 12)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 4, 1), "window_steps must be >= 1, found 0"),
        ((4, -1, 1), "grace_steps must be >= 0, found -1"),
        ((4, 4, 0), "keep"),
    ],
)
def test_sizes_outside_their_bounds_are_refused(sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        log(window=sizes[0], grace=sizes[1], keep=sizes[2])
