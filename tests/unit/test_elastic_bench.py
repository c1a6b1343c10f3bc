"""The elastic benchmark's judges: each sees the fault that it is for, and gaps go to the window in which they end."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace

import pytest

from ray_moe.bench.elastic import FEWEST, next_homes
from ray_moe.bench.elastic_load import Script, Stream, scripts
from ray_moe.bench.elastic_resident import Change
from ray_moe.bench.elastic_seen import Window, across, disorders, failures, gaps_of, inexact, switch_gaps
from ray_moe.controlplane.operations import ByHomes, Kind, Operation, Stage
from ray_moe.controlplane.publication import Storage, candidate_of, plan_waves
from ray_moe.controlplane.solve import balanced, place
from ray_moe.engine.records import StreamRecord
from ray_moe.engine.sampling import SamplingParams
from ray_moe.identity import CheckpointVersion, GlobalRank, PlacementVersion, ProcessGroupId
from ray_moe.placement import PlacementSnapshot
from ray_moe.topology import Domain, ProcessGroupSpec, Topology

SCRIPT = Script((1, 2), SamplingParams(max_tokens=8), tuple(range(100, 108)))
LAYERS, EXPERTS, CAPACITY = 4, 16, 16


def stream(*deliveries: tuple[float, int, int, int], tokens: tuple[int, ...] = (), reason: str = "length") -> Stream:
    """Deliveries are (time, step, generation, epoch), one token each."""
    found = Stream(0, len(deliveries), 0.0)
    for at, (now, step, generation, epoch) in enumerate(deliveries):
        token = tokens[at] if tokens else SCRIPT.token_ids[at]
        last = reason if at == len(deliveries) - 1 else None
        found.take(StreamRecord("", at, (token,), step, generation, epoch, last), now)
    return found


STEADY = stream((1.0, 5, 1, 0), (1.5, 6, 1, 0), (2.5, 7, 2, 0), (2.75, 8, 3, 1))


def test_a_stream_that_came_through_has_nothing_wrong_with_it() -> None:
    assert failures([STEADY]) == []
    assert inexact([STEADY], [SCRIPT]) == []
    assert disorders([STEADY], {1: 0, 2: 0, 3: 1}) == []


def test_a_request_that_ends_early_or_with_an_error_or_another_reason_has_failed() -> None:
    short = replace(STEADY, length=5)
    broken = replace(STEADY, failure="PeerLostError: rank 1 died")
    cancelled = stream((1.0, 5, 1, 0), reason="cancelled")
    unended = stream((1.0, 5, 1, 0), reason="")
    assert len(failures([short, broken, cancelled, unended, STEADY])) == 4


def test_a_gap_in_the_tokens_is_a_failure() -> None:
    skipping = Stream(0, 2, 0.0)
    skipping.take(StreamRecord("", 0, (100,), 5, 1, 0), 1.0)
    skipping.take(StreamRecord("", 2, (102,), 6, 1, 0, "length"), 2.0)
    assert "index 2 came after 1 tokens" in failures([skipping])[0]


def test_one_other_token_makes_a_stream_inexact() -> None:
    other = stream((1.0, 5, 1, 0), (1.5, 6, 1, 0), tokens=(100, 111))
    assert inexact([STEADY, other], [SCRIPT]) == ["script 0, token 1: 111 instead of 101"]


@pytest.mark.parametrize(
    ("streams", "message"),
    [
        ([stream((1.0, 5, 2, 0), (1.5, 6, 1, 0))], r"\(6, 0, 1\) after \(5, 0, 2\)"),
        ([stream((1.0, 5, 3, 1), (1.5, 6, 4, 0))], r"\(6, 0, 4\) after \(5, 1, 3\)"),
        ([stream((1.0, 5, 1, 0), (1.5, 5, 1, 0))], r"\(5, 0, 1\) after \(5, 0, 1\)"),
        ([stream((1.0, 5, 1, 0)), stream((1.0, 5, 2, 0))], r"step 5: \(epoch, generation\) \(0, 2\) and \(0, 1\)"),
        ([stream((1.0, 5, 1, 1))], "generation 1 ran in epoch 1, it is of epoch 0"),
    ],
    ids=["generation back", "epoch back", "a step twice", "two generations in one step", "another epoch"],
)
def test_a_switch_out_of_order_is_seen(streams: list[Stream], message: str) -> None:
    found = disorders(streams, {1: 0, 2: 0})
    assert len(found) == 1
    assert re.search(message, found[0])


def test_a_gap_belongs_to_the_window_in_which_it_ends() -> None:
    gaps = gaps_of([STEADY], [Window("rebalance", 2.0, 2.6, 2), Window("rebalance", 0.5, 1.2, 2)])
    assert gaps is not None
    assert (gaps.gaps, gaps.longest, gaps.first_token) == (1, 1.0, 1.0)
    assert gaps.seconds == pytest.approx(1.3)
    both = gaps_of([STEADY], [Window("control", 1.2, 2.8, 2)])
    assert both is not None
    assert (both.gaps, both.median, both.longest, both.first_token) == (3, 0.5, 1.0, 0.0)
    assert gaps_of([STEADY], [Window("control", 3.0, 4.0, 2)]) is None


def test_streams_across_a_switch_are_those_with_a_token_on_either_side() -> None:
    late = stream((2.6, 7, 2, 0), (2.75, 8, 3, 1))
    assert [across([STEADY, late], generation) for generation in (2, 3, 4)] == [1, 2, 0]
    assert switch_gaps([STEADY]) == [1.0, 0.25]


def test_timestamps_can_be_read_back_from_the_document() -> None:
    document = STEADY.document(0.5)
    assert document["times_us"] == [500000, 500000, 1000000, 250000]
    assert document["steps"] == [[5, 1], [1, 3]]
    assert document["generations"] == [[1, 2], [2, 1], [3, 1]]


def test_scripts_are_greedy_and_seeded_by_turns_and_equal_for_a_seed() -> None:
    asked = scripts(4, 20, 1000, 7)
    assert [script.params.greedy for script in asked] == [True, False, True, False]
    assert asked == scripts(4, 20, 1000, 7) != scripts(4, 20, 1000, 8)


# -- Plans of the rebalances


def first_placement() -> PlacementSnapshot:
    peers = tuple(map(GlobalRank, range(FEWEST)))
    return place(
        balanced(dict.fromkeys(range(LAYERS), EXPERTS), peers, replicas={}, spare_slots=8),
        generation=1,
        version=PlacementVersion("placement-v1"),
        release_id="r",
        checkpoint=CheckpointVersion("c"),
        group=ProcessGroupSpec(ProcessGroupId("g"), 0, peers),
        topology=Topology("topology-v1", (Domain("node-0", peers),)),
        prior=None,
        capacity=CAPACITY,
    )


def test_every_rebalance_is_one_wave_that_moves_a_tenth_of_every_layer_and_all_of_one() -> None:
    draw, active, storage = random.Random(3), first_placement(), Storage(CAPACITY, 8, 10)
    peaks = []
    for number in range(12):
        target = ByHomes(next_homes(active, number, draw))
        operation = Operation(1, Kind.REBALANCE, "", "", 0.0, Stage.QUEUED, target=target)
        waves = plan_waves(operation, active, storage, active.topology)
        assert len(waves) == 1
        after = candidate_of(waves[0], active, ranks=(0, 1), epoch=0, topology=active.topology)
        change = Change.between(active, after, storage.expert_bytes)
        assert min(change.moved.values()) >= 0.1
        assert change.replaced == (number % LAYERS,)
        for layer in after.layers:
            held = Counter(layer.physical_rank)
            assert max(held.values()) - min(held.values()) == 0
        peaks.append(sum(change.peak_bytes.values()))
        active = after
    assert len(set(peaks[4:])) == 1, "every plan needs as much, so that no excess hides behind an earlier one"
    assert max(peaks) == peaks[-1]


def test_a_change_counts_what_moved_what_was_replaced_and_what_both_placements_need() -> None:
    before = first_placement()
    layers = list(before.layers)
    first = layers[0]
    kept, moved = first.slots[0], replace(first.slots[1], pool_slot=12)
    layers[0] = replace(first, slots=(kept, moved, *first.slots[2:]))
    layers[1] = replace(layers[1], slots=tuple(replace(slot, pool_slot=slot.pool_slot + 8) for slot in layers[1].slots))
    change = Change.between(before, replace(before, generation=2, layers=tuple(layers)), 10)
    assert change.moved == {0: 1 / 16, 1: 1.0, 2: 0.0, 3: 0.0}
    assert change.replaced == (1,)
    assert sum(change.peak_bytes.values()) == (17 + 32 + 16 + 16) * 10
