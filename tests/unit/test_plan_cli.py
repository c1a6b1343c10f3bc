"""`ray-moe plan` and `ray-moe simulate`: the documents they give, the pictures they draw, and how they refuse."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from ray_moe.cli.main import run
from ray_moe.controlplane.eplb import TIE_RULE, rebalance
from ray_moe.observe.png import Canvas, heat
from tests.unit.test_packaging import ROOT

EXAMPLES = ROOT / "cluster_configs" / "plans"
TEACHING: dict[str, Any] = {
    "demand": [[4, 2, 1, 1]],
    "num_slots": 8,
    "num_groups": 2,
    "num_nodes": 2,
    "num_gpus": 4,
    "policy": "auto",
}
Plan = Callable[..., dict[str, Any]]


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Plan:
    """The document for the teaching request with some fields changed."""

    def planned(*options: str, **fields: Any) -> dict[str, Any]:
        file = tmp_path / "demand.json"
        file.write_text(json.dumps(TEACHING | fields))
        assert run(["plan", str(file), "--json", *options]) == 0
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        return document

    return planned


# ---- what a plan says ----


def test_the_teaching_fixture_gives_the_printed_maps_and_loads(plan: Plan) -> None:
    found = plan()
    assert found["policy_used"] == "hierarchical"
    assert found["phy2log"] == [[1, 0, 0, 0, 2, 2, 3, 3]]
    assert found["phyrank"] == [[0, 2, 0, 1, 0, 1, 0, 1]]
    assert found["logcnt"] == [[3, 1, 2, 2]]
    assert found["log2phy"] == [[[2, 3, 1], [0, -1, -1], [4, 5, -1], [6, 7, -1]]]
    assert found["rank_load"][0] == pytest.approx([10 / 3, 8 / 3, 1, 1])
    assert found["imbalance"] == pytest.approx([5 / 3])
    assert found["solve_ms"] > 0 and found["first_solve_ms"] > 0
    assert found["tie_rule"] == TIE_RULE
    assert found["ideal_slot_load"][0] == pytest.approx([2, 4 / 3, 4 / 3, 4 / 3, 0.5, 0.5, 0.5, 0.5])
    # Three groups do not divide over two nodes, so that auto is global.
    assert plan(demand=[[4, 2, 1, 1, 0, 0]], num_groups=3)["policy_used"] == "global"
    counterfactual = plan("--policy", "global")
    assert counterfactual["logcnt"] == [[4, 2, 1, 1]] and counterfactual["imbalance"] == [1.0]


def test_a_bare_file_is_stamped_with_its_name_digest_and_assumed_unit_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "demand.yaml"
    file.write_text(yaml.safe_dump(TEACHING))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert run(["plan", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    origin = found["provenance"]
    assert (origin["file"], origin["sha256"], origin["unit"]) == (str(file), digest, "routes (assumed)")
    assert any("routes are assumed" in note for note in found["notes"])
    assert run(["plan", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "routes (assumed)" in shown and digest[:16] in shown and "3.33333" in shown


@pytest.mark.parametrize(
    "policy", ["auto", "hierarchical", "global", "greedy", "exact", "topology", "migration", "phase"]
)
def test_every_policy_gives_maps_that_invert_one_another_and_loads_that_add_up(plan: Plan, policy: str) -> None:
    found = plan(policy=policy)
    for layer, demand in enumerate(TEACHING["demand"]):
        for expert, slots in enumerate(found["log2phy"][layer]):
            copies = [slot for slot in slots if slot >= 0]
            assert len(copies) == found["logcnt"][layer][expert] >= 1
            assert slots[len(copies) :] == [-1] * (len(slots) - len(copies))
            for number, slot in enumerate(copies):
                assert (found["phy2log"][layer][slot], found["phyrank"][layer][slot]) == (expert, number)
        assert sum(found["logcnt"][layer]) == 8
        assert sum(found["rank_load"][layer]) == pytest.approx(sum(demand))
        loads = found["rank_load"][layer]
        assert found["imbalance"][layer] == pytest.approx(max(loads) / np.mean(loads))


def test_the_exact_policy_is_never_less_balanced_than_the_pinned_solver(plan: Plan) -> None:
    demand = [[9.0, 5, 5, 2, 1, 1], [8, 7, 1, 1, 1, 1]]
    exact = plan(demand=demand, num_groups=1, num_nodes=1, policy="exact")["imbalance"]
    pinned = plan(demand=demand, num_groups=1, num_nodes=1, policy="global")["imbalance"]
    assert all(ours <= theirs + 1e-9 for ours, theirs in zip(exact, pinned, strict=True))


def test_counts_that_do_not_divide_and_ranks_of_different_sizes_are_solved_by_auto(plan: Plan) -> None:
    found = plan(num_slots=7, num_gpus=3, num_nodes=1, num_groups=1)
    assert found["policy_used"] == "greedy" and found["slots_by_rank"] == [3, 2, 2]
    assert any("auto is greedy" in note for note in found["notes"])
    uneven = plan(slots_by_rank=[4, 2, 1, 1])
    assert uneven["policy_used"] == "greedy" and uneven["slots_by_rank"] == [4, 2, 1, 1]
    twice = plan(min_replicas=2, anti_affinity="rank", policy="greedy")
    assert twice["logcnt"] == [[2, 2, 2, 2]]
    for rank in range(4):
        first, second = twice["phy2log"][0][2 * rank : 2 * rank + 2]
        assert first != second


def test_a_prior_gives_a_migration_by_class_with_bytes_and_peak_memory(plan: Plan) -> None:
    prior = [[0, 1, 0, 1, 2, 3, 2, 3]]
    found = plan(prior=prior, expert_bytes=36, policy="hierarchical")
    # Rank 0 keeps both; rank 1 keeps one of expert 0 and duplicates it; ranks 2 and 3 keep one and duplicate it.
    classes = found["migration"]["classes"]
    assert classes["keep"] == {"copies": 5, "bytes": 0}
    assert classes["same_gpu"] == {"copies": 3, "bytes": 108}
    assert sum(kind["copies"] for kind in classes.values()) == 8
    assert found["memory"] == {"unit": "bytes", "prior": 288, "resident": 288, "retained": 180, "peak": 288 + 108}
    assert found["imbalance_before"] == pytest.approx([1.5])
    assert len(found["migration"]["moves"]) == 3
    without_bytes = plan(prior=prior, policy="hierarchical")
    assert without_bytes["migration"]["classes"]["same_gpu"] == {"copies": 3, "bytes": None}
    assert without_bytes["memory"]["unit"] == "experts" and without_bytes["memory"]["peak"] == 11


def test_an_expert_of_known_widths_gives_predicted_times_apart_from_rows(plan: Plan) -> None:
    assert plan()["predicted"] is None
    found = plan(expert={"hidden": 64, "ffn": 32, "weight_bytes": 2}, num_gpus=1, num_nodes=1, num_groups=1)
    assert found["memory"]["resident"] == 8 * 3 * 64 * 32 * 2
    predicted = found["predicted"]
    assert "not measured" in predicted["unit"]
    # One GPU exchanges nothing; its eight slots read their weights, or work on a tile of 128 rows if that takes longer.
    assert predicted["dispatch"] == predicted["combine"] == [[0.0]]
    slot = max(3 * 64 * 32 * 2 / (0.90 * 4.3e12), 128 * 6 * 64 * 32 / (0.54 * 771e12))
    assert predicted["layer"] == pytest.approx([22e-6 + 8 * slot])


def test_the_migration_policy_moves_less_than_the_pinned_solver(plan: Plan) -> None:
    rng = np.random.Generator(np.random.PCG64(8))
    was = rng.gamma(0.5, size=(3, 32)) * 1000
    now = was * rng.uniform(0.7, 1.4, was.shape)
    prior = rebalance(was, 40, 1, 1, 8, "global").phy2log_LS.tolist()
    fields = {"demand": now.tolist(), "prior": prior, "num_slots": 40, "num_gpus": 8, "expert_bytes": 10}
    moved = {}
    for policy in ("global", "migration"):
        found = plan(**fields, policy=policy)
        moved[policy] = sum(kind["bytes"] for kind in found["migration"]["classes"].values())
        assert max(found["imbalance"]) < max(found["imbalance_before"])
    assert moved["migration"] * 2 < moved["global"]


def test_a_weight_on_churn_or_storage_lowers_that_term_and_both_are_told_before_and_after(plan: Plan) -> None:
    demand = np.random.default_rng(2).zipf(1.4, (2, 24)).tolist()
    prior = [[slot % 24 for slot in range(32)]] * 2
    asked = {"demand": demand, "num_slots": 32, "num_groups": 1, "prior": prior, "policy": "migration"}
    free = plan(**asked, weights={"balance": 1.0})["objective"]
    still = plan(**asked, weights={"balance": 1.0, "churn": 1.0})["objective"]
    small = plan(**asked, weights={"balance": 1.0, "resident": 1.0})["objective"]
    assert free["before"]["churn"] == 0 and free["before"]["total"] == free["before"]["balance"]
    assert still["after"]["churn"] < free["after"]["churn"]
    assert small["after"]["resident"] < free["after"]["resident"]
    assert still["after"]["total"] <= still["before"]["total"]


@pytest.mark.parametrize(
    "asked",
    [
        {
            "demand": [[1, 1], [0, 2]],
            "num_slots": 6,
            "num_gpus": 3,
            "policy": "topology",
            "prior": [[1, 0, 0, 0, 1, 1], [0, 1, 0, 1, 0, 1]],
        },
        {
            "demand": [[4, 4.570759476824257, 1, 96], [2, 1, 1, 0]],
            "num_slots": 8,
            "num_nodes": 1,
            "policy": "phase",
            "prior": [[3, 0, 1, 0, 2, 0, 2, 2], [2, 1, 2, 0, 0, 0, 3, 1]],
            "slots_by_rank": [3, 4, 1, 0],
        },
    ],
    ids=["topology", "phase"],
)
def test_a_layer_that_is_better_as_it_is_stays(plan: Plan, asked: dict[str, Any]) -> None:
    found = plan(**asked)["objective"]
    assert found["after"]["total"] <= found["before"]["total"]


def test_several_files_are_several_plans_and_out_writes_the_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(EXAMPLES / name) for name in ("teaching.json", "hot-expert.yaml", "hot-expert-spare.yaml")]
    assert run(["plan", *files, "--json", "--out", str(tmp_path / "all.json")]) == 0
    printed = json.loads(capsys.readouterr().out)
    teaching, barrier, spare = printed["plans"]
    assert teaching["phy2log"] == [[1, 0, 0, 0, 2, 2, 3, 3]]
    assert barrier["imbalance"] == pytest.approx([4.0]) and barrier["migration"]["waves"] == 0
    assert spare["imbalance"][0] < 1.1 < spare["imbalance_before"][0]
    assert json.loads((tmp_path / "all.json").read_text()) == printed


# ---- pictures ----


def pixels_of(file: Path) -> np.ndarray:
    content = file.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(content):
        (length,) = struct.unpack(">I", content[at : at + 4])
        kind, body = content[at + 4 : at + 8], content[at + 8 : at + 8 + length]
        assert struct.unpack(">I", content[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + body)
        chunks[kind] = body
        at += 12 + length
    width, height, depth, colour = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert (depth, colour, at) == (8, 2, len(content))
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, 3)


def test_a_png_holds_the_pixels_of_its_canvas(tmp_path: Path) -> None:
    canvas = Canvas(30, 20)
    canvas.image(4, 5, heat(np.array([[0.0, 1.0]]), 1.0))
    canvas.text(-3, 17, "A1")
    canvas.line(np.array([10.0, 40]), np.array([0.0, 40]), (1, 2, 3))
    (tmp_path / "a.png").write_bytes(canvas.to_png())
    np.testing.assert_array_equal(pixels_of(tmp_path / "a.png"), canvas.pixels)
    assert canvas.pixels[5, 5].tolist() == [103, 0, 13]


def test_the_heat_map_shows_every_expert_on_the_ranks_that_hold_it(tmp_path: Path, plan: Plan) -> None:
    plan("--png", str(tmp_path / "map.png"))
    pixels = pixels_of(tmp_path / "map.png")
    cell, left = 640 // 4, 64 + 640 + 48  # the panel "after"
    centres = 40 + cell // 2 + cell * np.arange(4), left + cell // 2 + cell * np.arange(4)
    drawn = (pixels[np.ix_(*centres)] != 255).any(axis=2)
    # Experts are rows: 0 on ranks 0 and 1, 1 on rank 0, 2 on rank 2, 3 on rank 3.
    assert drawn.tolist() == [
        [True, True, False, False],
        [True, False, False, False],
        [False, False, True, False],
        [False, False, False, True],
    ]


# ---- refusals ----

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"demand": [[1, -2, 3, 4]]}, r"demand[0][1]: found -2, must be a number >= 0"),
    ({"demand": [[1, 2], [3]]}, "demand[1]: found 1 entries, must be 2 as in demand[0]"),
    ({"demand": [[1, "2"]]}, "demand[0][1]: found '2', must be a number >= 0"),
    ({"demand": [[True, 2]]}, "demand[0][0]: found True, must be a number >= 0"),
    ({"demand": [4, 2]}, "demand: found [4, 2], must be a list of rows"),
    ({"demand": []}, "demand: found [], must be a list of rows"),
    ({"num_slots": 3}, "num_slots: found 3, must be >= the 4 experts of demand"),
    ({"num_slots": "8"}, "num_slots: found '8', input should be a valid integer"),
    ({"num_gpus": 0}, "num_gpus: found 0, input should be greater than or equal to 1"),
    ({"num_slots": 10**11}, "num_slots: found 100000000000, input should be less than or equal to 1000000"),
    (
        {"weights": {"balance": 1e308}},
        "weights.balance: found 1e+308, input should be less than or equal to 1000000000",
    ),
    (
        {"expert": {"weight_bytes": 1e308}},
        "expert.weight_bytes: found 1e+308, input should be less than or equal to 16",
    ),
    ({"num_nodes": 5}, "num_nodes: found 5, must be <= num_gpus 4"),
    ({"policy": "best"}, "policy: found 'best', input should be 'auto', 'hierarchical'"),
    ({"polcy": "auto"}, "polcy: no such field (value 'auto'), did you mean policy?"),
    ({"num_gpus": None}, "num_gpus: found None, input should be a valid integer"),
    (
        {"policy": "hierarchical", "num_slots": 6},
        "policy hierarchical is the pinned solver: ranks must hold equally many slots, found 1 to 2",
    ),
    ({"policy": "hierarchical", "num_groups": 3}, "the number of experts must be a multiple of num_groups 3, found 4"),
    ({"policy": "global", "min_replicas": 2}, "policy global is the pinned solver, which knows neither min_replicas"),
    ({"min_replicas": 3, "policy": "greedy"}, "needs 12 slots, found 8"),
    ({"policy": "exact", "num_slots": 40}, "exact solves at most"),
    ({"slots_by_rank": [4, 4]}, "slots_by_rank: found 2 entries, must be num_gpus 4"),
    ({"slots_by_rank": [4, 4, 4, 4]}, "slots_by_rank: found a sum of 16, must be num_slots 8"),
    ({"prior": [[0, 1, 2, 3, 0, 1, 2, 4]]}, "prior[0][7]: found 4, must be < the 4 experts of demand"),
    ({"prior": [[0, 1, 2, 2, 0, 1, 2, 2]]}, "prior[0]: found no slot of expert 3, must be at least one"),
    ({"prior": [[0, 1, 2, 3]]}, "prior: found 4 slots, must be num_slots 8"),
    ({"prior": [[0, 1, 2, 3, 0, 1, 2, 3]], "pool_slots": 1}, "pool slot 1 is in use, capacity is 1"),
]


@pytest.mark.parametrize(("fields", "words"), WRONG, ids=lambda case: str(case)[:50])
def test_bad_input_is_one_line_with_file_field_value_and_bound(
    fields: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps(TEACHING | fields))
    assert run(["plan", str(file)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {file}: ") and printed.err.count("\n") == 1
    assert words in printed.err


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "{", "not valid JSON at line 1"),
        ("a.yaml", "demand: [", "not valid YAML at line 2, column 1"),
        ("a.json", "[1]", "input should be a valid dictionary"),
        (
            "a.json",
            '{"demand": [[NaN]], "num_slots": 1, "num_gpus": 1}',
            "demand[0][0]: found nan, must be a number >= 0",
        ),
        ("a.json", '{"num_slots": 1}', "demand: required, but not given"),
    ],
)
def test_a_file_that_is_no_request_is_refused(
    name: str, text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    assert run(["plan", str(tmp_path / name)]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {tmp_path / name}: ") and words in printed and printed.count("\n") == 1


def test_files_and_layers_that_do_not_exist_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    teaching = str(EXAMPLES / "teaching.json")
    for arguments, words in (
        (["plan", str(tmp_path / "none.json")], "none.json: cannot be read: No such file"),
        (["plan", teaching, "--png", str(tmp_path / "no" / "a.png")], "a.png: cannot be written: No such file"),
        (["plan", teaching, "--png", str(tmp_path / "a.png"), "--layer", "1"], "--layer: found 1, must be in [0, 1)"),
        (["plan", teaching, "--layer", "1"], "--layer: found 1, must be in [0, 1)"),
        (["plan", teaching, teaching, "--png", str(tmp_path / "a.png")], "--png draws one plan, found 2 files"),
    ):
        assert run(arguments) == 2
        assert words in capsys.readouterr().err


# ---- simulate ----

QUICK = "trace={generator: drift, seed: 2, steps: 60, layers: 1, experts: 32, routes: 65536, shift_every: 25}"


def simulated(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert run(["simulate", "--json", *options]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_a_simulation_compares_policies_and_cadences_over_clusters_and_repeats_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--set", QUICK, "--gpus", "4,8", "--policies", "static,reference_global,migration", "--cadences", "5,20"]
    one = simulated(capsys, *options, "--out", str(tmp_path / "a.json"), "--png", str(tmp_path / "a.png"))
    assert one == simulated(capsys, *options) == json.loads((tmp_path / "a.json").read_text())
    assert [cluster["gpus"] for cluster in one["clusters"]] == [4, 8]
    names = [contender["name"] for contender in one["clusters"][0]["contenders"]]
    assert names == ["static", *(f"{p}/{c}" for p in ("reference_global", "migration") for c in (5, 20)), "oracle"]
    for contender in one["clusters"][0]["contenders"]:
        assert len(contender["balance_by_step"]) == 60
        assert contender["predicted_step_s"] > 0 and contender["peak_rank_bytes"] > 0
    assert one["trace"]["recipe"]["seed"] == 2 and one["trace"]["shifts"]
    assert one["costs"]["peer_copy_bytes_per_s"]["source"]
    assert pixels_of(tmp_path / "a.png").shape[2] == 3
    assert simulated(capsys, *options, "--seed", "3") != one


def test_a_saved_trace_replays_as_the_generated_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "drift.npz")
    generated = simulated(capsys, "--set", QUICK, "--gpus", "4", "--save-trace", file)
    recorded = simulated(capsys, "--trace", file, "--gpus", "4")
    assert recorded["trace"] == generated["trace"]
    assert recorded["clusters"] == generated["clusters"]


def test_the_table_names_every_contender_and_says_that_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--set", QUICK, "--gpus", "4", "--trace", "bursts"]) == 0
    shown = capsys.readouterr().out
    assert "bursts seed 2" in shown and "nothing is measured" in shown
    assert all(name in shown for name in ("static", "reference/25", "reference_global/25", "migration/25", "oracle"))


@pytest.mark.parametrize("scenario", sorted(path.name for path in EXAMPLES.glob("*.yaml")))
def test_every_committed_example_is_a_request_or_a_scenario(scenario: str) -> None:
    from ray_moe.plans import PlanRequest, Scenario

    values = yaml.safe_load((EXAMPLES / scenario).read_text())
    assert (PlanRequest if "demand" in values else Scenario).parse(values, scenario)


def wrong_simulations() -> Iterator[tuple[list[str], str]]:
    yield ["--gpus", "12"], "gpus: found 12, must be a multiple of gpus_per_node 8, or less"
    yield ["--gpus", "4,x"], "gpus.1: found 'x'"
    yield ["--policies", "best"], "policies: found 'best', must be one of static"
    yield ["--gpus", "8000000000000"], "gpus.0: found 8000000000000, input should be less than or equal to 65536"
    yield ["--set", "policies=[]"], "policies: found []"
    yield ["--cadences", "0"], "cadences.0: found 0, input should be greater than or equal to 1"
    yield ["--set", "slots_per_gpu=1", "--gpus", "8"], "slots_per_gpu: found 1 on 8 gpus, must hold the 32 experts"
    yield ["--trace", "nowhere.npz"], "nowhere.npz: cannot be read: No such file"
    yield ["--trace", str(EXAMPLES / "teaching.json")], "teaching.json: not a trace"
    yield ["--trace", str(EXAMPLES / "hot-expert.npz"), "--seed", "1"], "--seed: found 1, but"
    yield ["--set", "costs=none.yaml"], "none.yaml: cannot be read: No such file"
    yield ["--set", "estimator=guess"], "estimator: found 'guess', must be one of window"
    yield ["--set", "trace={generator: tide}"], "trace: generator: found 'tide', must be one of bursts"
    yield ["--set", "trace={generator: drift, steps: 900, shifts: [5]}"], "trace: shifts: found [5], the seed gives ["


@pytest.mark.parametrize(("options", "words"), list(wrong_simulations()), ids=lambda case: str(case)[:40])
def test_a_simulation_that_cannot_be_is_refused_on_one_line(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = [] if any(option.startswith("trace=") for option in options) else ["--set", QUICK]
    assert run(["simulate", *base, *options]) == 2
    printed = capsys.readouterr().err
    assert words in printed and printed.count("\n") == 1
