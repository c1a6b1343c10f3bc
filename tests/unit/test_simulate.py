"""Simulation: costs by hand, estimators that see the past only, what policies make of drift and of a hot expert."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from importlib.resources import files

import numpy as np
import pytest

from ray_moe.controlplane.contenders import POLICIES, Contender, Moves, Setting, initial
from ray_moe.controlplane.costs import Constant, CostModel, ExpertShape, Predicted, layer_times, migration_time
from ray_moe.controlplane.placed import Placed, Shape
from ray_moe.controlplane.simulate import Report, Summary, quantile, settling, simulate, summarise
from ray_moe.controlplane.traces import Recipe, Trace
from ray_moe.errors import ConfigError, EvidenceError
from ray_moe.evidence import Elapsed
from ray_moe.plans import CostDocument

DEFAULT = files("ray_moe") / "controlplane" / "data" / "h200.yaml"
EXPERT = ExpertShape(hidden=7168, ffn=2048, weight_bytes=1, row_bytes=2)


def model_of(**figures: float) -> CostModel:
    return CostModel("test", **{name: Constant(value, "", "test") for name, value in figures.items()})


# Round numbers: 1 FLOP and 1 byte a second.
SIMPLE = model_of(
    flops_per_s=1,
    memory_bytes_per_s=1,
    compute_fraction=1,
    memory_fraction=1,
    kernel_fixed_s=1000,
    tile_rows=4,
    exchange_fixed_s=100,
    exchange_bytes_per_s=1,
    inter_node_bytes_per_s=0.5,
    peer_copy_bytes_per_s=2,
)
TOY = ExpertShape(hidden=2, ffn=3, weight_bytes=2, row_bytes=2)  # 36 bytes, 36 FLOPs a row, rows of 4 bytes
H200 = model_of(
    **{
        name: figure["value"]
        for name, figure in CostDocument.from_yaml(DEFAULT.read_text(), "").model_dump().items()
        if name != "name"
    }
)


def setting_of(gpus: int, slots: int, per_node: int = 8) -> Setting:
    return Setting(Shape.even(slots, gpus, max(1, gpus // per_node)), 8, EXPERT, H200)


def outcome(report: Report, name: str) -> Summary:
    return next(summary for summary in summarise(report) if summary.name == name)


# -- The cost model


def test_a_layer_is_as_slow_as_its_slowest_rank_in_kernel_dispatch_and_combine() -> None:
    # Two ranks on two nodes with two slots each.
    shape = Shape((2, 2), (0, 1))
    times = layer_times(np.array([[5.0, 0.0, 1.0, 1.0]]), shape, TOY, SIMPLE)
    # 5 rows are two tiles, 8 x 36; no rows read no weights; 1 row is a tile, 4 x 36, more than the 36 bytes.
    np.testing.assert_array_equal(times.kernel_LG, [[1000 + 288, 1000 + 288]])
    # 7 rows in all: rank 0 receives 5, rank 1 sends 3.5. Half of them cross nodes, at 4 bytes a row and 0.5 bytes/s.
    np.testing.assert_array_equal(times.dispatch_LG, [[100 + 5 * 4 / 2 / 0.5, 100 + 3.5 * 4 / 2 / 0.5]])
    np.testing.assert_array_equal(times.combine_LG, times.dispatch_LG)
    assert times.step == Predicted(1288 + 2 * 120)


def test_a_slot_that_is_used_at_all_reads_its_weights() -> None:
    slow = model_of(
        **{name: getattr(SIMPLE, name).value for name in H200.__dataclass_fields__ if name != "name"}
        | {"flops_per_s": 1e6}
    )
    times = layer_times(np.array([[1.0, 1.0, 2.0, 0.0]]), Shape((2, 2), (0, 0)), TOY, slow)
    np.testing.assert_array_equal(times.kernel_LG, [[1000 + 72, 1000 + 36]])  # equal rows, other times


def test_migration_takes_as_long_as_its_busiest_rank_over_its_slowest_link() -> None:
    assert migration_time(np.array([3, 1]), False, TOY, SIMPLE) == Predicted(3 * 36 / 2)
    assert migration_time(np.array([3, 1]), True, TOY, SIMPLE) == Predicted(3 * 36 / 0.5)


def test_predicted_seconds_are_no_measured_ones_and_never_add_up_with_them() -> None:
    assert not isinstance(Predicted(1.0), Elapsed)
    with pytest.raises(EvidenceError, match="a prediction and float do not add up"):
        Predicted(1.0) + 1.0  # type: ignore[operator]
    with pytest.raises(EvidenceError, match="must be finite and >= 0"):
        Predicted(float("nan"))


def test_every_constant_that_ships_has_its_source() -> None:
    document = CostDocument.from_yaml(DEFAULT.read_text(), "h200.yaml")
    assert all(figure["source"] and figure["unit"] for name, figure in document.model_dump().items() if name != "name")
    assert H200.peer_copy_bytes_per_s.value == 388e9 and H200.flops_per_s.value == 771e12


def test_a_redundant_expert_of_every_layer_has_the_published_size() -> None:
    # 2.4 GB per redundant expert and rank of DeepSeek-V3, one byte a weight, 58 MoE layers.
    assert 58 * EXPERT.expert_bytes / 2**30 == pytest.approx(2.4, abs=0.05)


# -- Summaries


def test_quantiles_are_by_nearest_rank() -> None:
    values = np.array([11.0, 24, 7, 23])
    assert quantile(values, Fraction(1, 2)) == 11
    assert quantile(values, Fraction(95, 100)) == 24
    assert quantile(np.arange(1.0, 101), Fraction(7, 100)) == 7  # in floating point 0.07 * 100 is more than 7


def test_settling_is_the_fewest_steps_to_leave_out() -> None:
    balance = np.array([3.0] * 10 + [1.05] * 90)[:, None]
    # 95 of 100 must be within: of the last 94 steps 4 are not, which is 95.7 %; of the last 95 it would be 94.7 %.
    assert settling(balance, 1.10) == 6
    assert settling(np.full((5, 2), 2.0), 1.10) is None
    assert settling(np.full((5, 2), 1.0), 1.10) == 0


def test_a_copy_that_stays_is_no_arrival_and_counts_once_at_the_peak() -> None:
    shape = Shape((2, 2), (0, 1))
    prior, target = (Placed(shape, 3, np.array([row])) for row in ([0, 1, 2, 0], [1, 0, 2, 1]))
    moves = Moves.between(prior, target)
    assert moves.counts.kept_L.tolist() == [3]  # both of rank 0, whatever their order, and expert 2 of rank 1
    assert moves.counts.cross_node_L.tolist() == [1] and moves.crosses_nodes
    np.testing.assert_array_equal(moves.arrivals_G, [0, 1])
    np.testing.assert_array_equal(moves.peak_G, [2, 3])


# -- Replays


def replay(trace: Trace, setting: Setting, *contenders: Contender, oracle_every: int = 0) -> Report:
    return simulate(trace, setting, contenders, oracle_every)


@pytest.mark.parametrize("estimator", ["window", "ewma", "quantile", "trend"])
@pytest.mark.parametrize("policy", ["reference", "reference_global", "relabelled", "balanced", "migration"])
def test_what_is_decided_does_not_depend_on_the_future(policy: str, estimator: str) -> None:
    past = np.stack(list(Trace.generated(Recipe("drift", 5, 40, 2, 32, 1 << 16, shift_every=15))))
    other = np.stack(list(Trace.generated(Recipe("prompt_mix", 6, 40, 2, 32, 1 << 16, shift_every=15))))
    futures = [Trace.recorded(np.concatenate([past, past])), Trace.recorded(np.concatenate([past, other]))]
    setting = setting_of(8, 40, per_node=4)
    one, two = (replay(trace, setting, Contender(policy, 8, estimator, 8)).courses[0] for trace in futures)
    # The decision before step 40 has seen steps 0 to 39, which are the same.
    before_one, before_two = ([d for d in course.decisions if d.at <= 40] for course in (one, two))
    assert len(before_one) >= 4
    assert [(d.at, d.active) for d in before_one] == [(d.at, d.active) for d in before_two]
    for left, right in zip(before_one, before_two, strict=True):
        np.testing.assert_array_equal(left.placed.phy2log_LS, right.placed.phy2log_LS)
    np.testing.assert_array_equal(one.balance_TL[:40], two.balance_TL[:40])
    assert (one.balance_TL[40:] != two.balance_TL[40:]).any()


def test_the_same_trace_and_setting_give_the_same_report() -> None:
    trace = Trace.generated(Recipe("bursts", 2, 60, 2, 32, 1 << 16, shift_every=20, burst_steps=10))
    contenders = [Contender("static", 10), Contender("migration", 10, "ewma", 10)]
    one, two = (summarise(simulate(trace, setting_of(8, 40), contenders)) for _ in range(2))
    assert one == two


def test_a_decision_takes_effect_when_its_moves_are_over_and_none_is_made_meanwhile() -> None:
    trace = Trace.generated(Recipe("drift", 1, 60, 1, 32, 1 << 12, shift_every=20))
    slow = model_of(
        **{name: getattr(H200, name).value for name in H200.__dataclass_fields__ if name != "name"}
        | {"peer_copy_bytes_per_s": 50e9}
    )
    setting = Setting(Shape.even(40, 8, 1), 8, EXPERT, slow)
    course = replay(trace, setting, Contender("reference_global", 5, "window", 5)).courses[0]
    first, second = course.decisions[:2]
    took = migration_time(first.moves.arrivals_G, False, EXPERT, slow)
    assert first.at == 5
    assert first.active == 5 + int(np.ceil(took.seconds / course.seconds_T[4])) > 10
    assert second.at >= first.active
    static = replay(trace, setting, Contender("static", 5)).courses[0]
    np.testing.assert_array_equal(course.balance_TL[: first.active], static.balance_TL[: first.active])
    assert (course.balance_TL[first.active] < static.balance_TL[first.active]).all()


def test_the_oracle_sees_each_step_before_it_comes_and_nobody_is_faster() -> None:
    trace = Trace.generated(Recipe("drift", 4, 100, 2, 64, 1 << 18, shift_every=40))
    contenders = [Contender(policy, 10, "window", 10) for policy in ("static", "reference_global", "migration")]
    report = simulate(trace, setting_of(8, 72), contenders)
    assert report.oracle is not None
    for course, summary in zip(report.courses, summarise(report), strict=False):
        assert course.seconds_T.sum() > report.oracle.seconds_T.sum()
        assert summary.regret == pytest.approx(course.seconds_T.sum() / report.oracle.seconds_T.sum() - 1)
    assert summarise(report)[-1].regret == 0


def test_on_drifting_zipf_demand_balance_settles_within_200_steps_of_a_shift_with_an_eighth_of_spare_slots() -> None:
    trace = Trace.generated(Recipe("drift", 7, 700, 2, 256, 1 << 20, exponent=1.0, shift_every=300))
    assert trace.shifts == (341, 583)
    setting = setting_of(32, 288)
    contenders = [Contender(policy, 25) for policy in ("static", "reference_global", "relabelled", "migration")]
    report = replay(trace, setting, *contenders)
    static, naive, relabelled, aware = (outcome(report, contender.name) for contender in contenders)
    assert static.p95_settled is not None and static.p95_settled > 4
    for summary in (naive, relabelled, aware):
        assert summary.p95_settled is not None and summary.p95_settled <= 1.10
        assert all(steps is not None and steps <= 200 for _, steps in summary.settled)
    # Equal balance for fewer moves: packs that stay on their rank, and then a search that starts from what is there.
    assert relabelled.mean == pytest.approx(naive.mean, abs=1e-9)
    assert int(relabelled.moved) < int(naive.moved)
    assert int(aware.moved) * 4 < int(naive.moved)
    # Means once settled: what a placement is worth in the first steps after a shift, which nobody foresaw, is luck.
    late = np.r_[200:341, 541:583]
    naive_late, aware_late = (float(report.courses[at].balance_TL[late].mean()) for at in (1, 3))
    assert aware_late < naive_late * 1.01


@pytest.mark.parametrize("gpus", [4, 64, 4096])
def test_clusters_from_four_to_4096_gpus_are_replayed(gpus: int) -> None:
    trace = Trace.generated(Recipe("zipf", 1, 6, 1, 256, 1 << 22))
    slots = -(-288 // gpus) * gpus
    summary = outcome(
        replay(trace, setting_of(gpus, slots), Contender("reference_global", 2, "window", 2)), "reference_global/2"
    )
    assert summary.decisions >= 1
    assert int(summary.resident) == slots * EXPERT.expert_bytes
    assert int(summary.peak_rank) <= 2 * (slots // gpus) * EXPERT.expert_bytes


def test_half_of_all_routes_to_one_expert_is_the_barrier_and_only_a_second_slot_helps() -> None:
    hot = np.array([7, 1, 1, 1, 1, 1, 1, 1]) * 2340
    trace = Trace.recorded(np.tile(hot, (40, 1, 1)))
    policies = [
        Contender(policy, 5, "window", 5) for policy in ("static", "reference", "reference_global", "migration")
    ]

    def ends(slots: int) -> dict[str, float]:
        report = replay(trace, setting_of(8, slots, per_node=4), *policies)
        return {course.policy: float(course.balance_TL[-1, 0]) for course in report.courses}

    # One expert per rank: rank 0 has 4 times the mean whatever one decides, and seven ranks wait for it.
    assert ends(8) == pytest.approx(dict.fromkeys(("static", "reference", "reference_global", "migration"), 4.0))
    with_spare = ends(16)
    assert with_spare["static"] == pytest.approx(16 / 7)  # two copies, each with one other expert
    assert with_spare["reference"] == pytest.approx(1.6)  # the hot group stays on one node
    assert with_spare["reference_global"] == pytest.approx(15 / 14)
    assert with_spare["migration"] <= 15 / 14 + 1e-9


def test_slots_that_do_not_hold_the_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match="slots: found 8, must be >= the 9 experts"):
        initial(1, 9, setting_of(4, 8))
    with pytest.raises(ConfigError, match="policies: found 'best', must be one of static, reference"):
        Contender("best", 1)
    with pytest.raises(ConfigError, match="cadences: found 0, must be >= 1"):
        Contender("static", 0)
    with pytest.raises(ConfigError, match="estimator: found 'guess', must be one of window"):
        Contender("static", 1, "guess")


def test_the_migration_aware_policy_lets_balanced_layers_be_and_moves_only_the_others() -> None:
    setting = setting_of(8, 40)
    start = initial(2, 32, setting)
    even = np.full(32, 10.0)
    even[:8] = 20  # eight experts with two copies each: every rank carries 50
    hot = even.copy()
    hot[0] = 200
    decide = POLICIES["migration"]
    assert decide is not None
    assert decide(np.stack([even, even]), start, setting) is start
    after = decide(np.stack([even, hot]), start, setting)
    np.testing.assert_array_equal(after.phy2log_LS[0], start.phy2log_LS[0])
    assert after.counts_LE[1, 0] > start.counts_LE[1, 0]
    # A layer inside of `act_above` stays, one just outside of it is improved.
    off = even.copy()
    off[8] = 12.5
    worst = float(
        (np.take_along_axis(off[None] / start.counts_LE[:1], start.phy2log_LS[:1], 1).reshape(8, 5)).sum(1).max()
    )
    ratio = worst / (off.sum() / 8)
    assert 1.02 < ratio < 1.10
    for act_above in (ratio - 1e-3, ratio + 1e-3):
        found = decide(np.stack([off, off]), start, dataclasses.replace(setting, act_above=act_above))
        assert (found is start) == (act_above > ratio)
