"""Weights from slot to slot: paced, byte for byte, verified on arrival; a slot that is read is not released."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ray_moe.errors import ConfigError, DigestMismatchError, SlotError
from ray_moe.weights.checkpoint import ExpertLayout, ExpertWeights
from ray_moe.weights.digest import parameter_digest
from ray_moe.weights.slots import SlotPool, SlotState
from ray_moe.weights.transfer import SlotBytes, Throttle, copy_slot, export_slot, import_slot
from tests.layers import untimed

LAYER = 2
LAYOUTS = {
    "bias": ExpertLayout(hidden=8, ffn=6, has_bias=True),
    "plain": ExpertLayout(8, 6),
    "no gate": ExpertLayout(8, 6, has_gate=False),
}


def make_weights(
    seed: int, layout: ExpertLayout = LAYOUTS["bias"], dtype: torch.dtype = torch.float32
) -> ExpertWeights:
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Any] = {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in layout.shapes.items()
    }
    return ExpertWeights(**tensors, has_gate=layout.has_gate)


def make_pool(layout: ExpertLayout = LAYOUTS["bias"], dtype: torch.dtype = torch.float32) -> SlotPool:
    return SlotPool((LAYER,), 3, layout, dtype=dtype)


def through_pickle(sent: SlotBytes) -> SlotBytes:
    """As another process gets it: the tensors lie in memory that cannot be written to."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(sent, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == len(sent.tensors), "weights are passed on by reference, not copied into the pickle"
    received: SlotBytes = pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])
    assert not any(array.flags.writeable for array in received.tensors.values())
    return received


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_slot_arrives_in_another_process_bit_for_bit(layout: ExpertLayout, dtype: torch.dtype) -> None:
    weights = make_weights(1, layout, dtype)
    weights.gate_up[0, 0], weights.gate_up[0, 1] = -0.0, float("nan")
    source, target = make_pool(layout, dtype), make_pool(layout, dtype)
    digest = source.fill(LAYER, 0, weights)
    arrived = through_pickle(export_slot(source, LAYER, 0)).weights()
    assert import_slot(target, LAYER, 2, arrived, digest, expert=5, source="rank 0 slot 0") == digest
    assert parameter_digest(target.weights(LAYER, 2)) == digest
    assert target.inventory() == {(LAYER, 2): digest}


def test_what_was_exported_is_a_copy_of_its_own() -> None:
    pool = make_pool()
    digest = pool.fill(LAYER, 0, make_weights(1))
    sent = export_slot(pool, LAYER, 0)
    pool.release(LAYER, 0)
    pool.fill(LAYER, 0, make_weights(2))
    assert parameter_digest(sent.weights()) == digest


def test_one_flipped_bit_is_refused_by_name_and_the_slot_is_free_again() -> None:
    source, target = make_pool(), make_pool()
    digest = source.fill(LAYER, 0, make_weights(1))
    sent = export_slot(source, LAYER, 0)
    tensors = {name: array.copy() for name, array in sent.tensors.items()}
    tensors["down"][3, 5] ^= 1
    broken = SlotBytes(tensors, sent.dtype, sent.has_gate).weights()
    with pytest.raises(DigestMismatchError, match=f"layer 2 slot 1: expert 7 from rank 4 slot 0: expected .*{digest}"):
        import_slot(target, LAYER, 1, broken, digest, expert=7, source="rank 4 slot 0")
    assert target.state(LAYER, 1) is SlotState.FREE
    assert target.inventory() == {}
    import_slot(target, LAYER, 1, sent.weights(), digest, expert=7, source="rank 5 slot 0")
    assert target.inventory() == {(LAYER, 1): digest}


def test_a_mismatch_is_never_resident_not_even_for_a_moment() -> None:
    pool = make_pool()
    seen = []

    def look(digest: str) -> None:
        seen.append((pool.state(LAYER, 0), pool.inventory()))
        raise DigestMismatchError(LAYER, 0, 0, "somewhere", "wanted", digest)

    with pytest.raises(DigestMismatchError):
        pool.fill(LAYER, 0, make_weights(1), look)
    assert seen == [(SlotState.FILLING, {})]


def test_a_mismatch_error_keeps_its_name_and_fields_between_processes() -> None:
    error = DigestMismatchError(2, 1, 7, "rank 4 slot 0", "aa", "bb")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (DigestMismatchError, str(error))
    assert (again.layer, again.pool_slot, again.expert, again.source) == (2, 1, 7, "rank 4 slot 0")


def test_a_resident_slot_is_not_overwritten_and_a_wrong_layout_leaves_the_slot_free() -> None:
    pool = make_pool()
    digest = pool.fill(LAYER, 0, make_weights(1))
    with pytest.raises(SlotError, match="a resident slot allows release"):
        import_slot(pool, LAYER, 0, make_weights(2), None, expert=0, source="the checkpoint")
    assert pool.digest(LAYER, 0) == digest == parameter_digest(pool.weights(LAYER, 0))
    with pytest.raises(SlotError, match="layer 2 slot 1 holds"):
        import_slot(pool, LAYER, 1, make_weights(2, LAYOUTS["plain"]), None, expert=0, source="the checkpoint")
    assert pool.free_slots(LAYER) == (1, 2)


def test_a_second_copy_on_the_same_rank_is_verified_too() -> None:
    pool = make_pool()
    digest = pool.fill(LAYER, 0, make_weights(1))
    assert copy_slot(pool, LAYER, 0, 1, digest, expert=3) == digest
    with pytest.raises(DigestMismatchError, match="expert 4 from slot 0 beside it"):
        copy_slot(pool, LAYER, 0, 2, "another digest", expert=4)
    assert pool.inventory() == {(LAYER, 0): digest, (LAYER, 1): digest}
    pool.release(LAYER, 0)  # both copies have ended


def test_fl_08k_11_a_slot_is_not_released_while_a_copy_reads_it() -> None:
    pool = make_pool()
    digest = pool.fill(LAYER, 0, make_weights(1))
    views = pool.begin_read(LAYER, 0)
    pool.begin_read(LAYER, 0)
    with pytest.raises(SlotError, match="layer 2 slot 0: source in use: 2 unfinished copies read it"):
        pool.release(LAYER, 0)
    pool.end_read(LAYER, 0)
    with pytest.raises(SlotError, match="source in use: 1 unfinished"):
        pool.release(LAYER, 0)
    assert parameter_digest(views) == digest, "the copy reads what it came for"
    pool.end_read(LAYER, 0)
    pool.release(LAYER, 0)
    with pytest.raises(SlotError, match="no copy reads it"):
        pool.end_read(LAYER, 0)


def test_the_peak_counts_slots_that_were_resident_together() -> None:
    pool, one = make_pool(), make_weights(1).nbytes
    for slot in (0, 1, 0):
        pool.fill(LAYER, slot, make_weights(slot))
        if slot == 1:
            pool.release(LAYER, 0)
    with pytest.raises(DigestMismatchError):
        import_slot(pool, LAYER, 2, make_weights(2), "another digest", expert=0, source="the checkpoint")
    assert (pool.resident_bytes, pool.peak_resident_bytes) == (2 * one, 2 * one)
    pool.release(LAYER, 0)
    pool.release(LAYER, 1)
    assert (pool.resident_bytes, pool.peak_resident_bytes) == (0, 2 * one)


def test_only_a_resident_slot_is_read_or_exported() -> None:
    pool = make_pool()
    with pytest.raises(SlotError, match="expected a resident slot, found a free one"):
        export_slot(pool, LAYER, 0)
    pool.begin_fill(LAYER, 0)
    with pytest.raises(SlotError, match="expected a resident slot, found a filling one"):
        pool.begin_read(LAYER, 0)
    pool.commit_fill(LAYER, 0)
    pool.release(LAYER, 0)  # a refused reader holds nothing


def test_arrays_that_do_not_fit_together_are_refused() -> None:
    bits = np.zeros((4, 8), np.uint8)
    with pytest.raises(ConfigError, match="do not fit together"):
        SlotBytes({"gate_up": bits, "down": bits}, torch.float32, True).weights()


@given(
    moves=st.lists(st.tuples(st.integers(0, 1000), st.floats(0, 5)), min_size=1, max_size=30),
    cap=st.floats(1, 1000),
)
@untimed
def test_a_throttle_lets_no_more_through_than_its_cap_and_one_transfer(
    moves: list[tuple[int, float]], cap: float
) -> None:
    now = 0.0
    throttle = Throttle(cap, lambda: now)
    passed = []
    for nbytes, idle in moves:
        now += idle
        wait = throttle.reserve(nbytes)
        assert wait >= 0
        now += wait
        passed.append((now, nbytes))
    for first in range(len(passed)):
        for last in range(first, len(passed)):
            elapsed = passed[last][0] - passed[first][0]
            before_last = sum(nbytes for _, nbytes in passed[first:last])
            assert before_last <= cap * elapsed * (1 + 1e-9) + 1e-6  # rounding of sums of float seconds


def test_a_throttle_does_not_save_up_idle_time_and_none_is_no_cap() -> None:
    now = 100.0
    throttle = Throttle(10, lambda: now)
    assert [throttle.reserve(20), throttle.reserve(5), throttle.reserve(5)] == [0, 2, 2.5]
    now = 200.0
    assert [throttle.reserve(20), throttle.reserve(20)] == [0, 2]
    assert (throttle.seconds(20), Throttle(None).seconds(20), Throttle(None).reserve(10**12)) == (2, 0, 0)
    for wrong in (0, -1, float("nan")):
        with pytest.raises(ConfigError, match="bytes_per_second must be > 0"):
            Throttle(wrong)


def test_a_throttle_books_for_all_threads_together() -> None:
    throttle = Throttle(10, lambda: 0.0)
    waits: list[float] = []

    def book() -> None:
        waits.extend([throttle.reserve(10) for _ in range(50)])

    threads = [threading.Thread(target=book) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(waits) == [float(second) for second in range(200)]
