"""Which single failures a cluster survives, and from where experts come back: counted by hand, then against a walk
through the slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_moe.observe.survival import FailureView, Kind, Outcome, survival
from ray_moe.placement import PlacementSnapshot
from tests.layers import placement, spec_of, untimed

# Three ranks of two slots: experts 0 and 1 have two copies, 2 and 3 only one.
HOMES = [(0, 0), (1, 0), (0, 1), (2, 1), (1, 2), (3, 2)]


def active(homes: Sequence[tuple[int, int]] = HOMES, **kwargs: Any) -> PlacementSnapshot:
    return placement(homes, spec_of(sorted({rank for _, rank in homes})), **kwargs)


def of(failures: Sequence[FailureView], name: str) -> FailureView:
    return next(failure for failure in failures if failure.name == name)


def test_a_rank_whose_experts_all_have_other_copies_loses_no_parameters() -> None:
    failure = of(survival(active(), 2, journal=""), "rank 0")
    assert (failure.copies, failure.elsewhere, failure.only_here) == (2, 2, 0)
    assert (failure.outcome, failure.displaced, failure.slots_missing) == (Outcome.RESTART, 0, 0)
    assert failure.comes_back == "2 copies are held by other ranks too; the ranks that are left have room"


def test_an_only_copy_comes_from_the_checkpoint_and_takes_a_second_copys_slot_where_none_is_free() -> None:
    failure = of(survival(active(), 2, journal=""), "rank 1")
    assert (failure.copies, failure.elsewhere, failure.only_here, failure.displaced) == (2, 1, 1, 1)
    assert failure.comes_back == (
        "1 copy is held by other ranks too, 1 copy is held nowhere else: from the checkpoint; "
        "1 second copy would have to give way"
    )
    assert of(survival(active(), 3, journal=""), "rank 1").displaced == 0  # with a free slot it need not


def test_ranks_that_are_left_with_too_few_slots_are_too_few() -> None:
    failure = of(survival(active([(0, 0), (1, 0), (2, 1), (3, 1)]), 2, journal=""), "rank 0")
    assert (failure.outcome, failure.slots_missing) == (Outcome.TOO_SMALL, 2)
    assert failure.comes_back.endswith("the ranks that are left lack 2 slots")


def test_a_serving_rank_is_said_to_end_its_epoch_however_many_copies_there_are() -> None:
    for failure in survival(active(), 8, journal=""):
        if failure.kind is Kind.RANK:
            assert failure.outcome is Outcome.RESTART
            assert failure.costs.startswith("The epoch ends: open requests fail by name")


def test_both_copies_on_one_node_go_with_the_node() -> None:
    homes = [(0, 0), (0, 1), (1, 1), (2, 2), (1, 2)]
    failures = survival(active(homes, domains={0: "a", 1: "a", 2: "b"}), 4, journal="")
    assert of(failures, "a").only_here == 1
    assert (of(failures, "a").copies, of(failures, "a").elsewhere, of(failures, "a").ranks) == (3, 1, (0, 1))
    assert of(failures, "rank 0").only_here == 0
    assert "b" not in [failure.name for failure in failures]  # one rank: it is that rank's failure


def test_a_node_with_every_rank_leaves_none() -> None:
    failure = of(survival(active(), 2, journal=""), "node-0")
    assert failure.outcome is Outcome.TOO_SMALL
    assert failure.comes_back == "4 copies are held nowhere else: from the checkpoint; no rank is left"


def test_of_a_cluster_that_has_lost_a_rank_the_others_failures_are_told() -> None:
    failures = survival(active(), 2, lost={0}, journal="")
    assert [failure.name for failure in failures if failure.kind is Kind.RANK] == ["rank 1", "rank 2"]
    # Without rank 0 every copy of the others is the only one: 4 experts, and 2 slots are left.
    assert (of(failures, "rank 1").only_here, of(failures, "rank 1").slots_missing) == (2, 2)


def test_a_joining_rank_the_controller_and_the_routing_actor_fail_unnoticed() -> None:
    failures = survival(active(), 2, joining={7}, journal="/state/demo")
    unnoticed = [failure for failure in failures if failure.outcome is Outcome.UNNOTICED]
    assert [failure.name for failure in unnoticed] == ["rank 7 (joining)", "controller", "routing actor"]
    assert of(failures, "controller").comes_back == "from its journal in /state/demo"
    assert (
        of(survival(active(), 2, journal=""), "controller").comes_back == "from its journal in the store of Ray's head"
    )


def test_the_head_of_ray_is_no_failure_that_is_survived() -> None:
    assert of(survival(active(), 2, journal="/state/demo"), "Ray's head").outcome is Outcome.RESTART


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int]:
    """Every expert somewhere, no expert twice on a rank, and slots for all of that."""
    ranks, experts = draw(st.integers(2, 4)), draw(st.integers(1, 6))
    homes = [(expert, draw(st.integers(0, ranks - 1))) for expert in range(experts)]
    more = draw(st.lists(st.tuples(st.integers(0, experts - 1), st.integers(0, ranks - 1)), max_size=8))
    homes = list(dict.fromkeys([*homes, *more]))
    fullest = max(sum(at == rank for _, at in homes) for rank in range(ranks))
    return homes, fullest + draw(st.integers(0, 2))


@given(clusters())
@untimed
def test_what_gives_way_and_what_is_missing_is_what_a_walk_through_the_slots_finds(
    case: tuple[list[tuple[int, int]], int],
) -> None:
    homes, capacity = case
    ranks, experts = sorted({rank for _, rank in homes}), {expert for expert, _ in homes}
    for failure in survival(active(homes), capacity, journal=""):
        if failure.kind is not Kind.RANK:
            continue
        left = [expert for expert, rank in homes if rank not in failure.ranks]
        slots, displaced = (len(ranks) - 1) * capacity, 0
        wanted = experts - set(left)
        while len(left) + len(wanted) > slots and len(set(left)) < len(left):
            left.remove(next(expert for expert in left if left.count(expert) > 1))
            displaced += 1
        missing = max(0, len(left) + len(wanted) - slots)
        found = (failure.displaced, failure.slots_missing, failure.only_here)
        assert found == (displaced, missing, len(wanted))
        assert (failure.outcome is Outcome.TOO_SMALL) == (missing > 0)


@pytest.mark.parametrize("journal", ["", "/state/demo"])
def test_every_failure_says_what_it_costs_and_where_things_come_back_from(journal: str) -> None:
    for failure in survival(active(), 2, joining={3}, journal=journal):
        assert failure.costs.endswith(".")
        assert failure.comes_back
