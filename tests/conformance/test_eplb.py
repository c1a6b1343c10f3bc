"""The specification's placement of eight copies (0x08C to 0x08E), the reference's own example, its solver's cases."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from ray_moe.controlplane.demand import ACCEPTED_ROWS, Demand, Provenance, ideal_loads, require
from ray_moe.controlplane.eplb import ExpertMaps, imbalance, rank_loads, rebalance, require_reproduced
from ray_moe.controlplane.estimators import Ewma, KernelTime, TrailingWindow
from ray_moe.controlplane.packing import pack, replicate
from ray_moe.errors import ConfigError, EvidenceError
from ray_moe.identity import CheckpointVersion, PlacementVersion

DATA = pathlib.Path(__file__).parent / "data"
FIXTURE = json.loads((DATA / "eplb.json").read_text())
EXAMPLE = json.loads((DATA / "eplb_reference_example.json").read_text())
INPUTS, EXPECTED, DERIVED = FIXTURE["inputs"], FIXTURE["expected"], FIXTURE["derived"]
LOADS = np.array(INPUTS["load_by_layer"], float)
CHECKPOINT = CheckpointVersion(INPUTS["checkpoint_version"])
ROUNDING = 1e-15  # relative: a quotient or a sum of two in float64


def solve(inputs: dict[str, Any]) -> ExpertMaps:
    groups, nodes = inputs["num_expert_groups"], inputs["num_nodes"]
    gpus = inputs.get("num_gpus", inputs.get("num_ranks"))
    return rebalance(inputs["load_by_layer"], inputs["num_physical_slots"], groups, nodes, gpus)


def fractions(pairs: list[list[int]]) -> list[float]:
    return [above / below for above, below in pairs]


HIERARCHICAL = solve(INPUTS)
GLOBAL = solve({**INPUTS, **DERIVED["global"]["inputs_that_select_it"]})


def test_hierarchical_maps_and_both_forms_of_their_inverse() -> None:
    expected, csr = EXPECTED["hierarchical"], DERIVED["csr_inverse_of_hierarchical"]
    assert HIERARCHICAL.phy2log_LS.tolist() == [expected["phy2log"]]
    assert HIERARCHICAL.phyrank_LS.tolist() == [expected["phyrank"]]
    assert HIERARCHICAL.logcnt_LE.tolist() == [expected["logcnt"]]
    assert HIERARCHICAL.padded_log2phy().tolist() == [expected["log2phy"]]
    assert HIERARCHICAL.log2phy_offsets_L_E1.tolist() == [csr["log2phy_offsets"]]
    assert HIERARCHICAL.log2phy_values_LS.tolist() == [csr["log2phy_values"]]


def test_global_maps_where_groups_do_not_divide_over_nodes() -> None:
    assert GLOBAL.logcnt_LE.tolist() == [EXPECTED["global"]["logcnt"]]
    assert GLOBAL.phy2log_LS.reshape(4, 2).tolist() == EXPECTED["global"]["rank_experts"]
    for name, ours in (("phy2log", GLOBAL.phy2log_LS), ("phyrank", GLOBAL.phyrank_LS)):
        assert ours.tolist() == [DERIVED["global"][name]]
    assert GLOBAL.padded_log2phy().tolist() == [DERIVED["global"]["log2phy"]]


@pytest.mark.parametrize(("name", "maps"), [("hierarchical", HIERARCHICAL), ("global", GLOBAL)])
def test_ideal_rank_loads_and_their_ratio(name: str, maps: ExpertMaps) -> None:
    expected = EXPECTED[name]
    ranks = rank_loads(LOADS, maps, INPUTS["num_ranks"])
    assert_allclose(ranks, [fractions(expected["ideal_rank_load"])], rtol=ROUNDING)
    assert_allclose(imbalance(ranks), fractions([expected["rank_load_ratio_gamma"]]), rtol=ROUNDING)


def test_the_stages_groups_to_nodes_then_copies_within_each_node() -> None:
    sums = LOADS.reshape(2, 2).sum(axis=1)
    assert sums.tolist() == EXPECTED["group_loads"]
    assert pack(sums[None].astype(np.float32), 2).tolist() == [EXPECTED["group_to_node"]]
    assert replicate(LOADS.reshape(2, 2).astype(np.float32), 4).logcnt_NE.tolist() == EXPECTED["node_replica_counts"]


def test_every_step_of_node_0s_replication() -> None:
    trace = EXPECTED["node_0_replication_trace"]
    for extra, step in enumerate(trace):
        assert replicate(np.array([[4, 2]], np.float32), 2 + extra).logcnt_NE.tolist() == [step["copies"]]
    assert replicate(np.array([[4, 2]], np.float32), 4).expert_NS[0, 2:].tolist() == [
        step["next_index"] for step in trace[:-1]
    ]


def test_the_references_own_example() -> None:
    assert solve(EXAMPLE["inputs"]).phy2log_LS.tolist() == EXAMPLE["expected"]["phy2log"]


@pytest.mark.parametrize("case", DERIVED["solver_cases"], ids=lambda case: case["case"])
def test_solver_cases_of_the_pinned_source(case: dict[str, Any]) -> None:
    maps = solve(case["inputs"])
    assert maps.phy2log_LS.tolist() == case["phy2log"]
    assert maps.logcnt_LE.tolist() == case["logcnt"]
    assert maps.padded_log2phy().tolist() == case["log2phy"]


# -- Demand


def demand_of(loads: Any, start: int, **origin: Any) -> Demand:
    known = Provenance(
        unit=INPUTS["load_unit"],
        phase="mixed",
        aggregation="count",
        router_version="router-1",
        checkpoint_version=CHECKPOINT,
        topology_version="topology-1",
        placement_version=PlacementVersion("placement-v17"),
        start=start,
        end=start + 1,
    )
    return Demand(np.array(loads, float), dataclasses.replace(known, **origin))


def test_the_moving_estimate() -> None:
    given = DERIVED["moving_estimate"]
    estimator = Ewma(given["beta"][0] / given["beta"][1])
    estimator = estimator.after(demand_of([given["previous"]], 0)).after(demand_of([given["current"]], 1))
    assert_array_equal(estimator.estimate().loads_LE, [fractions(given["result"])])


def test_ideal_loads_say_that_they_are_ideal() -> None:
    ideal = ideal_loads(demand_of(LOADS, 0), HIERARCHICAL, INPUTS["num_ranks"])
    assert ideal.unit == f"ideal {ACCEPTED_ROWS}"
    assert_allclose(ideal.slot_LS[0, [0, 1]], [2, 4 / 3], rtol=ROUNDING)
    assert_allclose(ideal.rank_LG[0], fractions(EXPECTED["hierarchical"]["ideal_rank_load"]), rtol=ROUNDING)


# -- Failure rows


def test_fl_08k_01_a_load_matrix_without_provenance_or_of_another_checkpoint_is_refused() -> None:
    require(demand_of(LOADS, 0), CHECKPOINT)
    for name, lost in (("router_version", ""), ("checkpoint_version", None), ("end", None), ("phase", None)):
        with pytest.raises(ConfigError, match=f"lacks provenance: {name}"):
            require(demand_of(LOADS, 0, **{name: lost}), CHECKPOINT)
    with pytest.raises(ConfigError, match="demand is of checkpoint checkpoint-0042, the model is checkpoint-0043"):
        require(demand_of(LOADS, 0), CheckpointVersion("checkpoint-0043"))
    bare = Demand.stamped(LOADS, "loads.json", "ab" * 32)
    assert bare.provenance.unit == "routes (assumed)"
    with pytest.raises(ConfigError, match=r"demand loads.json sha256:abab\w+ lacks provenance: phase, router_version"):
        require(bare, CHECKPOINT)


def test_fl_08k_02_rows_and_kernel_time_are_not_mixed() -> None:
    with pytest.raises(EvidenceError, match="loads in 'accepted_rows' and in 'kernel_seconds' are two ledgers"):
        TrailingWindow(4).after(demand_of(LOADS, 0)).after(demand_of(LOADS, 1, unit="kernel_seconds"))
    with pytest.raises(EvidenceError, match="a segment's cost is a function of rows, found loads in 'kernel_seconds'"):
        KernelTime(Ewma(0.5), "line", lambda rows: rows).after(demand_of(LOADS, 0, unit="kernel_seconds"))


def test_fl_08k_06_maps_of_another_tie_rule_or_another_order_are_refused() -> None:
    require_reproduced(HIERARCHICAL, solve(INPUTS))
    last_wins = dataclasses.replace(HIERARCHICAL, tie_rule="copies: the last expert among the largest")
    with pytest.raises(ConfigError, match="the maps were solved under the tie rule 'copies: the last"):
        require_reproduced(last_wins, solve(INPUTS))
    for name in ("logcnt_LE", "phy2log_LS", "phyrank_LS"):
        swapped = getattr(HIERARCHICAL, name).copy()
        swapped[0, [1, 2]] = swapped[0, [2, 1]] if name != "phy2log_LS" else [2, 0]
        changed = dataclasses.replace(HIERARCHICAL, **{name: swapped})
        with pytest.raises(ConfigError, match=f"{name}: layer 0 differs from what solving again gives"):
            require_reproduced(changed, solve(INPUTS))
    with pytest.raises(ConfigError, match=r"logcnt_LE: the maps have \[1, 4\], solving again gives \[2, 12\]"):
        require_reproduced(HIERARCHICAL, solve(EXAMPLE["inputs"]))
