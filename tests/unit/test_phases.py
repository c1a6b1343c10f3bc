"""Units, admission and choice: every row in one unit, and one predicate in one order."""

from __future__ import annotations

from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_moe.dataplane.phases import (
    PHASES,
    Buckets,
    ControlRatio,
    Decision,
    ElementBytes,
    ExecutableKey,
    ExecutableManifest,
    ExecutableScope,
    Fallback,
    FallbackReason,
    PhaseStep,
    PhaseUnit,
    Replay,
    account_for,
    admit,
    joint_rows,
    split_by_phase,
)
from ray_moe.errors import ConfigError, EvidenceError, RoutesError
from tests.layers import untimed

WIDTHS = ElementBytes(hidden=2, route_id=4, gate=4, expert_output=2, metadata=4)


def key(rank_tokens: tuple[int, ...] = (4, 4), slot_routes: tuple[int, ...] = (3, 3, 3), **other: Any) -> ExecutableKey:
    named: dict[str, Any] = {
        "process_group_id": "ep-group-0",
        "placement_version": "placement-v1",
        "checkpoint_version": "checkpoint-1",
        "hidden_width": 8,
        "top_k": 2,
        "activation_dtype": "bfloat16",
        "gate_dtype": "float32",
        "dispatch_backend": "padded_all_to_all",
        "runner_backend": "masked_decode",
    }
    return ExecutableKey(**(named | other), rank_token_capacities=rank_tokens, slot_route_capacities=slot_routes)


def manifest(name: str, of: ExecutableKey) -> ExecutableManifest:
    return ExecutableManifest(name, of, WIDTHS)


# -- Units


@given(st.lists(st.tuples(st.sampled_from(PHASES), st.integers())))
@untimed
def test_every_row_is_in_exactly_one_unit_of_its_phase_in_its_order(rows: list[tuple[Any, int]]) -> None:
    units = split_by_phase(rows, lambda row: row[0])
    assert [unit.phase for unit in units] == [phase for phase in PHASES if any(row[0] == phase for row in rows)]
    for unit in units:
        assert list(unit.rows) == [row for row in rows if row[0] == unit.phase]
    assert sum(len(unit.rows) for unit in units) == len(rows)


def test_prefill_comes_before_decode_and_rows_are_the_same_objects() -> None:
    decode, prefill = {"phase": "decode"}, {"phase": "prefill"}
    units: tuple[PhaseUnit[Any], ...] = split_by_phase([decode, prefill], lambda row: row["phase"])  # type: ignore[arg-type, return-value]
    assert [unit.phase for unit in units] == ["prefill", "decode"]
    assert units[0].rows[0] is prefill
    assert units[1].rows[0] is decode


def test_no_rows_make_no_unit() -> None:
    assert split_by_phase([], lambda row: row) == ()


@pytest.mark.parametrize("phase", ["mixed", "extend", ""])
def test_a_unit_of_no_single_phase_is_refused(phase: Any) -> None:
    with pytest.raises(ConfigError, match=f"found {phase!r}"):
        PhaseUnit(phase, (1, 2))
    with pytest.raises(ConfigError, match=f"found {phase!r}"):
        split_by_phase([1], lambda row: phase)


# -- Counts


@pytest.mark.parametrize(
    ("rank_tokens", "slot_routes", "message"),
    [
        ((3,), (2, 2, 2), "rank_tokens must have 2 entries, found 1"),
        ((3, 0, 0), (2, 2, 2), "rank_tokens must have 2 entries, found 3"),
        ((3, 0), (3, 3), "slot_routes must have 3 entries, found 2"),
        ((3, 0), (2, 2, 1, 1), "slot_routes must have 3 entries, found 4"),
        ((4, -1), (2, 2, 2), "rank_tokens must be >= 0, found -1"),
        ((3, 0), (4, 4, -2), "slot_routes must be >= 0, found -2"),
        ((3, 0), (2, 2, 1), "5 routes for 3 tokens of this invocation; top-k 2 makes 6"),
    ],
)
def test_counts_that_no_invocation_has_are_refused_whatever_the_phase(
    rank_tokens: tuple[int, ...], slot_routes: tuple[int, ...], message: str
) -> None:
    for phase in ("prefill", "decode"):
        with pytest.raises(RoutesError, match=message):
            PhaseStep(phase, key(), rank_tokens, slot_routes)  # type: ignore[arg-type]
        with pytest.raises(RoutesError, match=message):
            Buckets((manifest("a", key()),)).choose(
                phase,  # type: ignore[arg-type]
                key().scope,
                rank_tokens,
                slot_routes,
                lambda name: True,
            )


def test_an_unknown_phase_is_refused() -> None:
    with pytest.raises(ConfigError, match="extend"):
        PhaseStep("extend", key(), (1, 0), (1, 1, 0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [{"hidden_width": 0}, {"top_k": 0}, {"rank_tokens": ()}, {"slot_routes": ()}, {"rank_tokens": (4, 0)}],
    ids=str,
)
def test_a_key_without_room_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=">= 1"):
        key(**wrong)


def test_the_scope_is_the_key_without_its_capacities() -> None:
    named = [item.name for item in fields(ExecutableScope)]
    assert [item.name for item in fields(ExecutableKey)] == [*named, "rank_token_capacities", "slot_route_capacities"]
    assert all(getattr(key().scope, name) == getattr(key(), name) for name in named)
    assert key().scope == key((1, 1), (9,)).scope


# -- Admission


@st.composite
def steps(draw: st.DrawFn) -> tuple[str, tuple[int, ...], tuple[int, ...], int]:
    """(phase, rank_tokens [2], slot_routes [3], top-k) that conserve routes, near the capacities that tests use."""
    top_k = draw(st.integers(1, 2))
    tokens = draw(st.tuples(st.integers(0, 5), st.integers(0, 5)))
    routes = top_k * sum(tokens)
    first = draw(st.integers(0, routes))
    second = draw(st.integers(0, routes - first))
    return (
        draw(st.sampled_from(("prefill", "decode", "mixed"))),
        tokens,
        (first, second, routes - first - second),
        top_k,
    )


CAPACITIES = st.tuples(st.tuples(*[st.integers(1, 5)] * 2), st.tuples(*[st.integers(1, 8)] * 3))
OTHER_SCOPES: list[dict[str, Any]] = [{}, {"placement_version": "placement-v2"}, {"checkpoint_version": "checkpoint-2"}]


def by_the_book(
    phase: str,
    same_key: bool,
    rank_tokens: tuple[int, ...],
    slot_routes: tuple[int, ...],
    bucket: ExecutableManifest,
    ready: bool,
) -> Decision:
    """The predicate as a list of facts, each computed by itself; the first that holds is the reason."""
    tokens_over = [peer for peer in range(2) if rank_tokens[peer] > bucket.key.rank_token_capacities[peer]]
    routes_over = [slot for slot in range(3) if slot_routes[slot] > bucket.key.slot_route_capacities[slot]]
    facts = {
        "phase_not_decode": phase != "decode",
        "graph_key_mismatch": not same_key,
        "rank_token_capacity_exceeded": bool(tokens_over),
        "expert_route_capacity_exceeded": bool(routes_over),
        "stable_buffer_unavailable": not ready,
    }
    reasons = [reason for reason, holds in facts.items() if holds]
    return Fallback(FallbackReason(reasons[0])) if reasons else Replay(bucket.executable_id)


@given(steps(), CAPACITIES, st.sampled_from(OTHER_SCOPES), st.booleans())
@untimed
def test_admission_is_the_first_fact_that_holds(step: Any, capacities: Any, other: dict[str, Any], ready: bool) -> None:
    phase, tokens, routes, top_k = step
    bucket = manifest("bucket", key(*capacities, top_k=top_k))
    own_key = replace(bucket.key, **other)
    found = admit(PhaseStep(phase, own_key, tokens, routes), bucket, ready)
    assert found == by_the_book(phase, not other, tokens, routes, bucket, ready)


@given(steps(), st.lists(CAPACITIES, min_size=1, max_size=4), st.sampled_from(OTHER_SCOPES), st.sets(st.integers(0, 3)))
@untimed
def test_the_choice_is_the_smallest_that_admits_else_what_the_largest_says(
    step: Any, sizes: list[Any], other: dict[str, Any], moved: set[int]
) -> None:
    phase, tokens, routes, top_k = step
    manifests = tuple(manifest(str(number), key(*size, top_k=top_k)) for number, size in enumerate(sizes))
    scope = key(top_k=top_k, **other).scope
    found = Buckets(manifests).choose(phase, scope, tokens, routes, lambda name: int(name) not in moved)

    def size_of(bucket: ExecutableManifest) -> tuple[int, int]:
        return sum(bucket.key.rank_token_capacities), sum(bucket.key.slot_route_capacities)

    said = {
        bucket: by_the_book(phase, not other, tokens, routes, bucket, int(bucket.executable_id) not in moved)
        for bucket in manifests
    }
    admitting = [bucket for bucket in manifests if isinstance(said[bucket], Replay)]
    if admitting:
        assert isinstance(found, Replay)
        assert size_of(manifests[int(found.executable_id)]) == min(map(size_of, admitting))
    else:
        largest = max(map(size_of, manifests))
        assert found in [said[bucket] for bucket in manifests if size_of(bucket) == largest]


@pytest.mark.parametrize(
    "changed",
    [
        {"process_group_id": "ep-group-1"},
        {"placement_version": "placement-v2"},
        {"checkpoint_version": "checkpoint-2"},
        {"hidden_width": 9},
        {"activation_dtype": "float32"},
        {"gate_dtype": "bfloat16"},
        {"dispatch_backend": "all_to_all_v"},
        {"runner_backend": "grouped"},
        {"rank_token_capacities": (4, 5)},
        {"slot_route_capacities": (3, 3, 4)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_no_coordinate_of_the_key_may_drift(changed: dict[str, Any]) -> None:
    step = PhaseStep("decode", replace(key(), **changed), (2, 1), (2, 2, 2))
    assert admit(step, manifest("a", key()), True) == Fallback(FallbackReason.KEY_MISMATCH)


def test_a_step_of_a_larger_group_is_another_key_and_not_cut_to_the_smaller() -> None:
    step = PhaseStep("decode", key(rank_tokens=(4, 4, 4)), (1, 1, 1), (2, 2, 2))
    assert admit(step, manifest("a", key()), True) == Fallback(FallbackReason.KEY_MISMATCH)


def test_a_step_gets_the_smallest_that_fits_in_whatever_order_buckets_are_given() -> None:
    small, large = manifest("small", key((2, 2), (2, 2, 2))), manifest("large", key((4, 4), (4, 4, 4)))
    for given_order in ((small, large), (large, small)):
        buckets = Buckets(given_order)

        def choose(
            tokens: tuple[int, ...], routes: tuple[int, ...], *moved: str, buckets: Buckets = buckets
        ) -> Decision:
            return buckets.choose("decode", key().scope, tokens, routes, lambda name: name not in moved)

        assert choose((2, 1), (2, 2, 2)) == Replay("small")
        assert choose((2, 1), (2, 2, 2), "small") == Replay("large")
        assert choose((3, 0), (2, 2, 2)) == Replay("large")
        # Too many tokens for the small one, too many routes for the large one: the large one's reason counts.
        assert choose((3, 0), (5, 1, 0)) == Fallback(FallbackReason.SLOT_ROUTE_CAPACITY)


def test_buffers_are_asked_of_executables_that_fit_only() -> None:
    asked: list[str] = []

    def ready(name: str) -> bool:
        asked.append(name)
        return True

    buckets = Buckets((manifest("large", key((4, 4), (6, 6, 6))), manifest("small", key((1, 1), (2, 2, 2)))))
    assert buckets.choose("decode", key().scope, (2, 1), (2, 2, 2), ready) == Replay("large")
    assert asked == ["large"]


@pytest.mark.parametrize(
    ("manifests", "message"),
    [
        ((), "at least one"),
        ((manifest("a", key()), manifest("b", key(top_k=1))), "one scope"),
        ((manifest("a", key()), manifest("b", key((4, 4, 4)))), "one scope, P and S"),
        ((manifest("a", key()), manifest("b", key(slot_routes=(3,)))), "one scope, P and S"),
        ((manifest("a", key()), manifest("a", key((2, 2)))), "its own name, found a, a"),
    ],
    ids=["none", "scopes", "peers", "slots", "names"],
)
def test_buckets_that_cannot_be_told_apart_or_compared_are_refused(
    manifests: tuple[ExecutableManifest, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Buckets(manifests)


# -- Accounts


@given(steps(), CAPACITIES)
@untimed
def test_an_account_adds_padding_and_never_takes_rows_away(step: Any, capacities: Any) -> None:
    phase, tokens, routes, top_k = step
    bucket = manifest("bucket", key(*capacities, top_k=top_k))
    unit = PhaseStep("prefill" if phase == "mixed" else phase, bucket.key, tokens, routes)
    decision = admit(unit, bucket, True)
    account = account_for(unit, bucket, decision, host_submissions=1, control_items=3)
    assert (account.rows.useful_inputs.value, account.rows.useful_routes.value) == (sum(tokens), sum(routes))
    if isinstance(decision, Fallback):
        assert (account.rows.dispatch_padding.value, account.rows.runner_padding.value) == (0, 0)
    else:
        assert account.rows.dispatch_slots.value == sum(bucket.key.rank_token_capacities)
        assert account.rows.runner_rows.value == sum(bucket.key.slot_route_capacities)
    twice = joint_rows([account, account])
    assert twice.runner_rows.value == 2 * account.rows.runner_rows.value
    assert twice.dispatch_padding.value == 2 * account.rows.dispatch_padding.value


def test_an_account_of_another_executable_is_refused() -> None:
    step = PhaseStep("decode", key(), (1, 0), (1, 1, 0))
    with pytest.raises(ConfigError, match="the replay is of other, the manifest of a"):
        account_for(step, manifest("a", key()), Replay("other"), host_submissions=1, control_items=0)


def test_a_control_ratio_is_exact_analytical_and_no_float() -> None:
    ratio = ControlRatio(12, 10)
    assert ratio.value == Fraction(6, 5)
    assert ratio.evidence == "analytical"
    with pytest.raises(TypeError):
        float(ratio)  # type: ignore[arg-type]


def test_items_over_no_route_are_no_ratio() -> None:
    with pytest.raises(EvidenceError, match="found 3 and 0"):
        ControlRatio(3, 0)
