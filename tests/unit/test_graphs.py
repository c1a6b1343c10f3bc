"""Executables and bindings: stable addresses, one generation in the cell, and nothing read from unused slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ray_moe.dataplane.graphs import (
    NO_EXPERT,
    Binding,
    Executable,
    ExecutableShape,
    HostCounters,
    Launch,
    StableBuffers,
)
from ray_moe.dataplane.ledger import DeviceLaunches
from ray_moe.dataplane.phases import ExecutableKey, Replay
from ray_moe.errors import BindingError, ConfigError, RoutesError
from tests.layers import untimed

SHAPE = ExecutableShape(
    peer=1,
    num_peers=3,
    num_slots=4,
    tokens_per_rank=4,
    rows_per_slot=8,
    hidden=5,
    top_k=2,
    activation=torch.float32,
    gate=torch.float32,
)
KEY = ExecutableKey(
    process_group_id="ep-group-0",
    placement_version="placement-v17",
    checkpoint_version="checkpoint-1",
    hidden_width=5,
    top_k=2,
    activation_dtype="float32",
    gate_dtype="float32",
    dispatch_backend="padded_all_to_all",
    runner_backend="masked_decode",
    rank_token_capacities=(4, 4, 4),
    slot_route_capacities=(8, 8, 8, 8),
)
EXPERTS = 6
# Sums of two products in fp32, in another order than the oracle's.
TOLERANCE: dict[str, float] = {"atol": 1e-6, "rtol": 1e-6}


def key_of(generation: int) -> ExecutableKey:
    return replace(KEY, placement_version=f"placement-v{generation}")


def table_of(seed: int) -> Tensor:
    """A generation's experts [E, D, D]: what a body finds through the cell."""
    return torch.randn(EXPERTS, SHAPE.hidden, SHAPE.hidden, generator=torch.Generator().manual_seed(seed))


def experts_over_slots(launch: Launch[Tensor]) -> Tensor:
    """A fixed-shape body: every slot whose route names an expert, and no other, adds its row; result [C_T, D]."""
    buffers = launch.buffers
    token_N, slot_N = (buffers.route_ids != NO_EXPERT).nonzero(as_tuple=True)
    launch.require_routes(token_N.numel())
    experts_N = launch.table[buffers.route_ids[token_N, slot_N].long()]
    rows_ND = torch.bmm(buffers.hidden[token_N, None], experts_N)[:, 0] * buffers.gates[token_N, slot_N, None]
    return torch.zeros_like(buffers.expert_output).index_add_(0, token_N, rows_ND)


def by_the_book(hidden_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor, table: Tensor) -> Tensor:
    """Token by token, in fp64."""
    out_TD = torch.zeros(hidden_TD.shape, dtype=torch.float64)
    for token in range(hidden_TD.shape[0]):
        for expert, gate in zip(ids_TK[token].tolist(), gates_TK[token].tolist(), strict=True):
            out_TD[token] += gate * (hidden_TD[token].double() @ table[expert].double())
    return out_TD.float()


def draw(seed: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden [T, D], ids [T, K], gates [T, K])."""
    generator = torch.Generator().manual_seed(seed)
    hidden_TD = torch.randn(tokens, SHAPE.hidden, generator=generator)
    ids_TK = torch.randint(EXPERTS, (tokens, SHAPE.top_k), generator=generator)
    return hidden_TD, ids_TK, torch.rand(tokens, SHAPE.top_k, generator=generator)


def counts_for(tokens: int, others: tuple[int, int] = (1, 2)) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(rank_tokens [P], slot_routes [S]) with so many tokens on this peer; routes spread over the slots."""
    rank_tokens = (others[0], tokens, others[1])
    routes = SHAPE.top_k * sum(rank_tokens)
    return rank_tokens, tuple(len(range(slot, routes, SHAPE.num_slots)) for slot in range(SHAPE.num_slots))


def built() -> Executable[Tensor]:
    return Executable(SHAPE, torch.device("cpu"), HostCounters())


def bound(generation: int = 17) -> Binding[Tensor]:
    """An executable with one generation in its cell."""
    executable = built()
    binding = executable.bind(generation, key_of(generation), table_of(generation))
    executable.activate(binding)
    return binding


def run(binding: Binding[Tensor], step: int, tokens: int, body: Any = experts_over_slots) -> Tensor:
    binding.write_validity(step, *counts_for(tokens))
    return binding.launch(step, *draw(step, tokens), body)


# -- A launch


def poison(buffers: StableBuffers, seed: int) -> None:
    """What an earlier step may have left: NaN rows and gates, and routes to real experts, in every slot."""
    buffers.hidden.fill_(torch.nan)
    buffers.gates.fill_(torch.nan)
    buffers.expert_output.fill_(torch.nan)
    buffers.route_ids.random_(EXPERTS, generator=torch.Generator().manual_seed(seed))
    buffers.validity.fill_(99)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9999)), min_size=1, max_size=4))
@untimed
def test_a_launch_is_the_experts_of_its_own_rows_whatever_lay_in_the_buffers(steps: list[tuple[int, int]]) -> None:
    binding = bound()
    for step, (tokens, seed) in enumerate(steps):
        poison(binding.executable.buffers, seed)
        rows = draw(seed, tokens)
        binding.write_validity(step, *counts_for(tokens))
        out_TD = binding.launch(step, *rows, experts_over_slots)
        torch.testing.assert_close(out_TD, by_the_book(*rows, binding.table), **TOLERANCE)


@pytest.mark.parametrize("route_id", [torch.int32, torch.int64])
def test_unused_slots_name_no_expert_before_the_body_runs(route_id: torch.dtype) -> None:
    executable: Executable[Tensor] = Executable(replace(SHAPE, route_id=route_id), torch.device("cpu"), HostCounters())
    binding = executable.bind(17, KEY, table_of(17))
    executable.activate(binding)
    hidden_TD, ids_TK, gates_TK = draw(1, 3)
    seen = []

    def body(launch: Launch[Tensor]) -> Tensor:
        seen.append((launch.buffers.route_ids.tolist(), launch.buffers.gates[3].tolist(), launch.num_tokens))
        return torch.zeros(3, SHAPE.hidden)

    poison(executable.buffers, seed=1)
    binding.write_validity(1, *counts_for(3))
    binding.launch(1, hidden_TD, ids_TK, gates_TK, body)
    assert executable.buffers.route_ids.dtype == route_id
    assert seen == [([*ids_TK.tolist(), [NO_EXPERT] * 2], [0.0, 0.0], 3)]


def test_the_body_may_give_its_real_rows_or_every_slot_or_the_output_buffer() -> None:
    binding, (hidden_TD, _, _) = bound(), draw(5, 2)

    def real(launch: Launch[Tensor]) -> Tensor:
        return launch.buffers.hidden[:2] * 2

    def every_slot(launch: Launch[Tensor]) -> Tensor:
        return launch.buffers.hidden * 2

    def in_place(launch: Launch[Tensor]) -> Tensor:
        return torch.mul(launch.buffers.hidden, 2, out=launch.buffers.expert_output)

    for body in (real, every_slot, in_place):
        assert torch.equal(run(binding, 5, 2, body), hidden_TD * 2)
        assert torch.equal(binding.executable.buffers.expert_output[:2], hidden_TD * 2)


def test_a_result_outlives_the_next_launch() -> None:
    binding = bound()
    first = run(binding, 1, 3)
    kept = first.clone()
    run(binding, 2, 3)
    assert torch.equal(first, kept)


def test_a_peer_without_tokens_launches_with_every_slot_masked() -> None:
    binding = bound()
    assert run(binding, 1, 0).shape == (0, SHAPE.hidden)
    assert (binding.executable.buffers.route_ids == NO_EXPERT).all()


def test_a_launch_is_one_host_submission_and_says_nothing_about_the_device() -> None:
    binding = bound()
    counters = binding.executable.counters
    for step in range(3):
        run(binding, step, 2)
    assert (int(counters.host_submissions), counters.device_launches) == (3, None)
    counters.add_device_launches(DeviceLaunches(40))
    counters.add_device_launches(DeviceLaunches(2))
    assert (int(counters.host_submissions), counters.device_launches) == (3, DeviceLaunches(42))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda hidden, ids, gates: (hidden[:, :4], ids, gates), r"hidden must be \[2, 5\]"),
        (lambda hidden, ids, gates: (hidden.double(), ids, gates), "hidden must be .* in float32, found .*float64"),
        (lambda hidden, ids, gates: (hidden, ids[:1], gates), r"topk_ids must be \[2, 2\]"),
        (lambda hidden, ids, gates: (hidden, ids.float(), gates), "topk_ids must be .* in int32 or int64"),
        (lambda hidden, ids, gates: (hidden, ids, gates[:, :1]), r"gates must be \[2, 2\]"),
        (lambda hidden, ids, gates: (hidden, ids, gates.bfloat16()), "gates must be .* in float32, found .*bfloat16"),
    ],
)
def test_rows_of_another_shape_or_dtype_are_refused_and_never_cast(
    spoil: Callable[..., tuple[Tensor, Tensor, Tensor]], message: str
) -> None:
    binding = bound()
    binding.write_validity(1, *counts_for(2))
    with pytest.raises(RoutesError, match=message):
        binding.launch(1, *spoil(*draw(1, 2)), experts_over_slots)


@pytest.mark.parametrize("shape", [(1, 5), (3, 5), (2, 4)])
def test_a_body_that_gives_another_number_of_rows_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(RoutesError, match=r"the body's rows must be \[2, 5\]"):
        run(bound(), 1, 2, lambda launch: torch.zeros(shape))


def test_a_launch_after_a_failed_one_needs_its_validity_written_again() -> None:
    binding = bound()

    def failing(launch: Launch[Tensor]) -> Tensor:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        run(binding, 1, 2, failing)
    with pytest.raises(BindingError, match=r"stale_validity: step 1: .* not written"):
        binding.launch(1, *draw(1, 2), experts_over_slots)
    torch.testing.assert_close(run(binding, 1, 2), by_the_book(*draw(1, 2), binding.table), **TOLERANCE)


# -- Validity


def test_validity_is_written_in_place() -> None:
    binding = bound()
    buffers = binding.executable.buffers
    where = buffers.addresses()
    binding.write_validity(1, (1, 3, 2), (4, 4, 3, 1))
    binding.write_validity(2, (0, 4, 1), (0, 8, 1, 1))
    assert buffers.addresses() == where
    assert buffers.real_tokens_by_rank.tolist() == [0, 4, 1]
    assert buffers.valid_tokens.tolist() == [5]
    assert buffers.rank_token_offsets.tolist() == [0, 0, 4, 5]
    assert buffers.valid_routes_by_slot.tolist() == [0, 8, 1, 1]
    assert buffers.step_metadata.tolist() == [[5, 0, 4], [5, 0, 4], [5, 4, 4]]


@pytest.mark.parametrize(
    ("rank_tokens", "slot_routes", "error", "message"),
    [
        ((1, 5, 0), (3, 3, 3, 3), BindingError, "rank_token_capacity_exceeded: step 1: .* holds 4, found 5"),
        ((4, 2, 0), (9, 1, 1, 1), BindingError, "expert_route_capacity_exceeded: step 1: .* holds 8, found 9"),
        ((1, 2), (2, 2, 1, 1), RoutesError, "rank_tokens must have 3 entries, found 2"),
        ((1, 2, 0), (2, 2, 2), RoutesError, "slot_routes must have 4 entries, found 3"),
        ((1, 2, 0), (2, 2, 2, 1), RoutesError, "7 routes for 3 tokens"),
    ],
)
def test_counts_that_do_not_fit_are_refused(
    rank_tokens: tuple[int, ...], slot_routes: tuple[int, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        bound().write_validity(1, rank_tokens, slot_routes)


# -- Generations


@given(st.lists(st.sampled_from((17, 18)), min_size=1, max_size=6))
@untimed
def test_generations_take_turns_in_one_executable_at_the_same_addresses(turns: list[int]) -> None:
    executable = built()
    bindings = {
        generation: executable.bind(generation, key_of(generation), table_of(generation)) for generation in (17, 18)
    }
    where, seen = executable.buffers.addresses(), set()

    def body(launch: Launch[Tensor]) -> Tensor:
        seen.add(launch.buffers.addresses())
        return experts_over_slots(launch)

    for step, generation in enumerate(turns):
        binding = bindings[generation]
        executable.activate(binding)
        assert executable.active is binding
        expected = by_the_book(*draw(step, 3), table_of(generation))
        torch.testing.assert_close(run(binding, step, 3, body), expected, **TOLERANCE)
    assert seen == {where}


def test_a_binding_launches_only_while_the_cell_holds_it() -> None:
    executable = built()
    prior, candidate = (
        executable.bind(generation, key_of(generation), table_of(generation)) for generation in (17, 18)
    )
    with pytest.raises(BindingError, match=r"other_generation: .* holds no binding"):
        run(prior, 1, 1)
    executable.activate(prior)
    for attempt in (
        lambda: candidate.write_validity(1, *counts_for(1)),
        lambda: candidate.launch(1, *draw(1, 1), experts_over_slots),
    ):
        with pytest.raises(
            BindingError, match=r"other_generation: .*v18 of generation 18 .* holds .*v17 of generation 17"
        ):
            attempt()
    assert run(prior, 1, 1).shape == (1, SHAPE.hidden)


def test_validity_written_before_a_switch_does_not_survive_it() -> None:
    executable = built()
    prior, candidate = (
        executable.bind(generation, key_of(generation), table_of(generation)) for generation in (17, 18)
    )
    executable.activate(prior)
    prior.write_validity(1, *counts_for(2))
    executable.activate(candidate)
    with pytest.raises(BindingError, match="stale_validity"):
        candidate.launch(1, *draw(1, 2), experts_over_slots)


def test_a_rollback_frees_the_candidates_binding_and_the_prior_goes_on() -> None:
    executable = built()
    prior, candidate = (
        executable.bind(generation, key_of(generation), table_of(generation)) for generation in (17, 18)
    )
    executable.activate(candidate)
    candidate.acquire()
    with pytest.raises(BindingError, match=r"referenced: .* 1 references"):
        candidate.free()
    executable.activate(prior)
    with pytest.raises(BindingError, match="referenced"):
        candidate.free()
    candidate.release()
    candidate.free()
    assert dict(executable.bindings) == {17: prior}
    torch.testing.assert_close(run(prior, 1, 2), by_the_book(*draw(1, 2), prior.table), **TOLERANCE)
    # The generation's number may come back with another table; the freed binding does not come back with it.
    again = executable.bind(18, key_of(18), table_of(3))
    executable.activate(again)
    with pytest.raises(BindingError, match="released"):
        candidate.launch(2, *draw(2, 1), experts_over_slots)


def test_the_binding_in_the_cell_is_not_freed() -> None:
    binding = bound()
    with pytest.raises(BindingError, match="active"):
        binding.free()


def test_nothing_is_done_with_a_freed_binding() -> None:
    executable = bound().executable
    freed = executable.bind(18, key_of(18), table_of(18))
    freed.free()
    for attempt in (
        freed.acquire,
        freed.free,
        lambda: executable.activate(freed),
        lambda: freed.write_validity(1, *counts_for(1)),
        lambda: freed.launch(1, *draw(1, 1), experts_over_slots),
    ):
        with pytest.raises(BindingError, match="released"):
            attempt()


def test_a_reference_that_nobody_took_is_not_given_back() -> None:
    with pytest.raises(BindingError, match="not_acquired"):
        bound().release()


def test_a_binding_of_another_executable_is_not_activated() -> None:
    with pytest.raises(BindingError, match="other_executable"):
        built().activate(bound())


def test_a_generation_has_one_binding_and_no_two_share_a_key() -> None:
    executable = bound().executable
    with pytest.raises(BindingError, match="already_bound"):
        executable.bind(17, key_of(19), table_of(19))
    with pytest.raises(BindingError, match=r"key_mismatch: generation 18 has the key of .*generation 17"):
        executable.bind(18, key_of(17), table_of(18))


@pytest.mark.parametrize(
    "changed",
    [
        {"hidden_width": 6},
        {"top_k": 1},
        {"activation_dtype": "bfloat16"},
        {"gate_dtype": "bfloat16"},
        {"rank_token_capacities": (4, 4, 8)},
        {"rank_token_capacities": (4, 4)},
        {"slot_route_capacities": (8, 8, 8, 4)},
    ],
    ids=str,
)
def test_a_key_of_other_sizes_is_not_bound(changed: dict[str, Any]) -> None:
    with pytest.raises(BindingError, match="key_mismatch"):
        built().bind(17, replace(KEY, **changed), table_of(17))


def test_a_bindings_manifest_is_what_admission_replays() -> None:
    binding = bound()
    assert binding.manifest.key == key_of(17)
    assert Replay(binding.manifest.executable_id) == Replay("decode.bucket4.v17")
    assert binding.manifest.payload_bytes["graph.hidden"].value == 3 * 4 * 5 * 4


# -- Construction


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens_per_rank": 0}, "tokens_per_rank must be >= 1, found 0"),
        ({"rows_per_slot": 0}, "rows_per_slot must be >= 1, found 0"),
        ({"num_slots": -1}, "num_slots must be >= 1, found -1"),
        ({"peer": 3}, r"peer must be in \[0, 3\), found 3"),
        ({"route_id": torch.int16}, "found torch.int16"),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SHAPE, **changed)
