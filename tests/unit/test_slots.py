"""SlotPool: fixed storage, filled and released; weights in use are never overwritten."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_moe.errors import ConfigError, SlotError
from ray_moe.weights.checkpoint import ExpertLayout, ExpertWeights
from ray_moe.weights.digest import parameter_digest
from ray_moe.weights.slots import TRANSITIONS, SlotEvent, SlotPool, SlotState, advance

LAYOUT = ExpertLayout(hidden=8, ffn=6, has_bias=True)
LAYERS = (1, 4)


def make_weights(seed: int, layout: ExpertLayout = LAYOUT, dtype: torch.dtype = torch.float32) -> ExpertWeights:
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Any] = {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in layout.shapes.items()
    }
    return ExpertWeights(**tensors, has_gate=layout.has_gate)


def make_pool(capacity: int = 3, layout: ExpertLayout = LAYOUT, dtype: torch.dtype = torch.float32) -> SlotPool:
    return SlotPool(LAYERS, capacity, layout, dtype=dtype)


def addresses(pool: SlotPool) -> list[int]:
    return [tensor.data_ptr() for layer in pool.layers for tensor in pool.slab(layer).tensors().values()]


def assert_equal_weights(found: ExpertWeights, expected: ExpertWeights) -> None:
    assert found.layout == expected.layout
    for (name, left), (_, right) in zip(found.named_tensors(), expected.named_tensors(), strict=True):
        assert torch.equal(left, right), name


@pytest.mark.parametrize(("state", "event"), list(itertools.product(SlotState, SlotEvent)))
def test_a_slot_moves_along_the_table_and_along_no_other_edge(state: SlotState, event: SlotEvent) -> None:
    expected = {
        ("free", "begin"): "filling",
        ("filling", "commit"): "resident",
        ("filling", "abandon"): "free",
        ("resident", "release"): "free",
    }.get((str(state), str(event)))
    if expected is None:
        assert (state, event) not in TRANSITIONS
        with pytest.raises(SlotError, match=f"a {state} slot allows .* asked to {event}"):
            advance(state, event)
    else:
        assert advance(state, event) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "layout", [LAYOUT, ExpertLayout(8, 6), ExpertLayout(8, 6, has_gate=False)], ids=["bias", "plain", "no gate"]
)
def test_fill_then_release_gives_back_a_free_slot(layout: ExpertLayout, dtype: torch.dtype) -> None:
    pool, weights = make_pool(layout=layout, dtype=dtype), make_weights(7, layout, dtype)
    digest = pool.fill(4, 1, weights)
    assert digest == parameter_digest(weights) == pool.digest(4, 1)
    assert_equal_weights(pool.weights(4, 1), weights)
    assert (pool.free_slots(4), pool.free_slots(1)) == ((0, 2), (0, 1, 2))
    assert pool.resident_bytes == weights.nbytes == layout.nbytes(dtype)
    assert pool.allocated_bytes == 6 * weights.nbytes
    pool.release(4, 1)
    assert pool.free_slots(4) == (0, 1, 2)
    assert pool.resident_bytes == 0


def test_addresses_never_change_and_views_lie_inside_the_slab() -> None:
    pool = make_pool()
    before = addresses(pool)
    for round_ in range(5):
        for layer, slot in itertools.product(LAYERS, range(3)):
            pool.fill(layer, slot, make_weights(100 * round_ + 10 * layer + slot))
            view, slab = pool.weights(layer, slot), pool.slab(layer)
            assert view.gate_up.data_ptr() == slab.gate_up[slot].data_ptr()
            assert view.down.data_ptr() == slab.down[slot].data_ptr()
        for layer, slot in itertools.product(LAYERS, range(3)):
            pool.release(layer, slot)
    assert addresses(pool) == before
    assert pool.slab(1).gate_up.shape == (3, 12, 8)
    assert pool.slab(1).down.shape == (3, 8, 6)


def test_filling_a_resident_slot_is_refused_and_leaves_its_bytes() -> None:
    pool, weights = make_pool(), make_weights(1)
    digest = pool.fill(1, 0, weights)
    with pytest.raises(SlotError, match="layer 1 slot 0: a resident slot allows release"):
        pool.fill(1, 0, make_weights(2))
    assert_equal_weights(pool.weights(1, 0), weights)
    assert pool.digest(1, 0) == digest


def test_a_slot_keeps_its_own_copy() -> None:
    pool, weights = make_pool(), make_weights(1)
    digest = pool.fill(1, 0, weights)
    weights.gate_up.zero_()
    assert parameter_digest(pool.weights(1, 0)) == digest


@pytest.mark.parametrize(
    "wrong",
    [
        make_weights(1, ExpertLayout(8, 6)),
        make_weights(1, ExpertLayout(8, 7, has_bias=True)),
        make_weights(1, ExpertLayout(4, 6, has_bias=True)),
        make_weights(1, ExpertLayout(8, 12, has_gate=False, has_bias=True)),
        make_weights(1).to(dtype=torch.bfloat16),
    ],
    ids=["no bias", "other F", "other D", "no gate", "other dtype"],
)
def test_weights_of_another_layout_or_dtype_are_refused_and_the_slot_stays_free(wrong: ExpertWeights) -> None:
    pool = make_pool()
    with pytest.raises(SlotError, match="layer 1 slot 2 holds"):
        pool.fill(1, 2, wrong)
    assert pool.free_slots(1) == (0, 1, 2)
    pool.fill(1, 2, make_weights(1))


def test_a_copy_of_ones_own_is_committed_or_abandoned() -> None:
    pool, weights = make_pool(), make_weights(3)
    views = pool.begin_fill(1, 0)
    assert pool.state(1, 0) is SlotState.FILLING
    assert pool.free_slots(1) == (1, 2)
    for refused in (pool.weights, pool.digest, pool.release, pool.begin_fill):
        with pytest.raises(SlotError, match="layer 1 slot 0"):
            refused(1, 0)
    for (_, into), (_, source) in zip(views.named_tensors(), weights.named_tensors(), strict=True):
        into.copy_(source)
    assert pool.commit_fill(1, 0) == parameter_digest(weights)
    assert_equal_weights(pool.weights(1, 0), weights)
    pool.begin_fill(1, 1)
    pool.abandon_fill(1, 1)
    assert pool.free_slots(1) == (1, 2)


def test_the_digest_is_of_the_bytes_that_arrived() -> None:
    pool, weights = make_pool(), make_weights(3)
    views = pool.begin_fill(1, 0)
    for (_, into), (_, source) in zip(views.named_tensors(), weights.named_tensors(), strict=True):
        into.copy_(source)
    views.down.view(torch.int32)[3, 2] ^= 1  # one bit lost on the way
    assert pool.commit_fill(1, 0) != parameter_digest(weights)


def test_a_free_slot_has_no_weights_no_digest_and_cannot_be_released() -> None:
    pool = make_pool()
    for refused in (pool.weights, pool.digest, pool.release, pool.commit_fill, pool.abandon_fill):
        with pytest.raises(SlotError, match="layer 4 slot 0"):
            refused(4, 0)


def test_layers_and_slots_out_of_range_are_named_with_their_bounds() -> None:
    pool = make_pool()
    with pytest.raises(SlotError, match=r"layer 2 has no slots; the pool has layers \(1, 4\)"):
        pool.fill(2, 0, make_weights(0))
    for slot in (-1, 3):
        with pytest.raises(SlotError, match=f"slot {slot}: the pool has slots 0 to 2"):
            pool.fill(1, slot, make_weights(0))
    for layers, capacity in (((), 1), ((1, 1), 1), ((1,), 0)):
        with pytest.raises(ConfigError, match="a slot pool needs"):
            SlotPool(layers, capacity, LAYOUT, dtype=torch.float32)


def test_layers_may_differ_in_shape() -> None:
    layouts = {1: ExpertLayout(8, 6), 4: ExpertLayout(8, 10)}
    pool = SlotPool(LAYERS, 2, layouts.__getitem__, dtype=torch.float32)
    pool.fill(1, 0, make_weights(0, layouts[1]))
    pool.fill(4, 0, make_weights(0, layouts[4]))
    assert pool.resident_bytes == sum(layout.nbytes(torch.float32) for layout in layouts.values())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(LAYERS), st.integers(0, 2), st.booleans()), max_size=25))
def test_any_sequence_of_fills_and_releases_agrees_with_a_dictionary(steps: list[tuple[int, int, bool]]) -> None:
    pool, resident = make_pool(), dict[tuple[int, int], ExpertWeights]()
    for number, (layer, slot, fill) in enumerate(steps):
        allowed = ((layer, slot) not in resident) if fill else ((layer, slot) in resident)
        if not allowed:
            with pytest.raises(SlotError):
                pool.fill(layer, slot, make_weights(number)) if fill else pool.release(layer, slot)
        elif fill:
            resident[layer, slot] = make_weights(number)
            pool.fill(layer, slot, resident[layer, slot])
        else:
            pool.release(layer, slot)
            del resident[layer, slot]
    for layer in LAYERS:
        assert pool.free_slots(layer) == tuple(slot for slot in range(3) if (layer, slot) not in resident)
    for (layer, slot), weights in resident.items():
        assert_equal_weights(pool.weights(layer, slot), weights)
    assert pool.resident_bytes == len(resident) * LAYOUT.nbytes(torch.float32)


def test_a_filler_beside_a_reader_never_disturbs_resident_slots() -> None:
    pool, kept = make_pool(), make_weights(0)
    digest = pool.fill(1, 0, kept)

    def fill_and_release() -> None:
        for number in range(150):
            weights = make_weights(number)
            assert pool.fill(1, 1, weights) == parameter_digest(weights)
            pool.release(1, 1)

    with ThreadPoolExecutor(1) as executor:
        filler = executor.submit(fill_and_release)
        reads = 0
        while not filler.done() or reads == 0:
            assert parameter_digest(pool.weights(1, 0)) == digest == pool.digest(1, 0)
            reads += 1
        filler.result(timeout=30)
    assert pool.free_slots(1) == (1, 2)


def test_of_two_fillers_of_one_slot_exactly_one_succeeds() -> None:
    for round_ in range(20):
        pool, start = make_pool(), threading.Barrier(2)

        def fill(seed: int, pool: SlotPool = pool, start: threading.Barrier = start) -> int | None:
            start.wait(timeout=10)
            try:
                pool.fill(1, 0, make_weights(seed))
            except SlotError:
                return None
            return seed

        with ThreadPoolExecutor(2) as executor:
            outcomes = list(executor.map(fill, (2 * round_, 2 * round_ + 1), timeout=10))
        (winner,) = [seed for seed in outcomes if seed is not None]
        assert_equal_weights(pool.weights(1, 0), make_weights(winner))
