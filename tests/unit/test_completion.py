"""Events in order, buffers until their last reader, staging that is never handed out twice."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ray_moe.dataplane.completion import EVENTS, Completion, Event, StagingPool
from ray_moe.dataplane.ledger import Buffer, live_bytes, peak
from ray_moe.errors import CompletionError, ConfigError, EvidenceError
from ray_moe.evidence import LiveBytes
from tests.layers import CPU, untimed

torch.set_num_threads(1)
EVENT = st.sampled_from(list(Event))


def reached(event: Event | None) -> Completion:
    """An invocation in which `event`, and what it waits for, is complete."""
    completion = Completion("h-7")
    for each in [] if event is None else list(Event)[: list(Event).index(event) + 1]:
        completion.complete(each)
    return completion


# -- Events


@untimed
@given(st.lists(EVENT, max_size=20) | st.permutations(list(Event)))
def test_exactly_the_linear_extensions_of_the_graph_are_accepted(tried: list[Event]) -> None:
    completion, done = Completion("h-7"), set[Event]()
    for event in tried:
        if event not in done and done.issuperset(EVENTS[event].after):
            completion.complete(event)
            done.add(event)
        else:
            with pytest.raises(CompletionError, match="invocation h-7") as error:
                completion.complete(event)
            assert error.value.reason == ("already_complete" if event in done else "missing_dependency")
        assert {each for each in Event if completion.is_complete(each)} == done


def test_the_order_of_the_table_is_accepted() -> None:
    completion = reached(Event.HANDLE_RELEASED)
    assert all(map(completion.is_complete, Event))


@pytest.mark.parametrize("event", list(Event))
def test_a_reader_passes_once_its_event_is_complete_and_never_before(event: Event) -> None:
    completion = Completion("h-7")
    for each in Event:
        with pytest.raises(CompletionError, match=r"^missing_dependency: invocation h-7: the reader came early, "):
            completion.require(event, "the reader")
        completion.complete(each)
        if each is event:
            break
    completion.require(event, "the reader")


# -- Buffers


@pytest.mark.parametrize("until", list(Event))
def test_a_buffer_goes_back_after_its_event_and_only_when_its_owner_says_so(until: Event) -> None:
    completion, returned = Completion("h-7"), list[str]()
    completion.hold("rows", 48, until, lambda: returned.append("rows"))
    for event in Event:
        with pytest.raises(CompletionError, match=f"h-7: buffer 'rows' has readers until {until}") as error:
            completion.release("rows")
        assert error.value.reason == "released_before_last_reader"
        completion.complete(event)
        if event is until:
            break
    assert returned == []
    completion.release("rows")
    assert returned == ["rows"]
    with pytest.raises(CompletionError, match=r"^unknown_buffer: invocation h-7 holds no buffer 'rows'$"):
        completion.release("rows")
    assert returned == ["rows"]


def test_a_buffer_whose_event_is_past_is_refused_for_nothing_would_protect_it() -> None:
    completion = reached(Event.DISPATCH_COMPLETE)
    with pytest.raises(CompletionError, match=r"^already_complete: .*h-7: buffer 'late' .* dispatch_complete is comp"):
        completion.hold("late", 8, Event.DISPATCH_COMPLETE)
    completion.hold("in time", 8, Event.EXPERT_INPUT_READY)


def test_two_live_buffers_have_two_names() -> None:
    completion = Completion("h-7")
    completion.hold("rows", 8, Event.ROUTE_READY)
    with pytest.raises(
        CompletionError, match=r"^live_alias_overlap: invocation h-7: two live buffers are named 'rows'"
    ):
        completion.hold("rows", 8, Event.OUTPUT_READY)
    completion.complete(Event.ROUTE_READY)
    completion.release("rows")
    completion.hold("rows", 8, Event.OUTPUT_READY)
    assert completion.peak_bytes == LiveBytes(8)


def test_a_buffer_of_fewer_than_no_bytes_is_refused() -> None:
    with pytest.raises(EvidenceError, match="'rows' must have >= 0 bytes, found -1"):
        Completion("h-7").hold("rows", -1, Event.ROUTE_READY)


@st.composite
def schedules(draw: st.DrawFn) -> list[Buffer]:
    """Buffers that are held before and released after some event, in epochs of one event each."""
    buffers = []
    for number in range(draw(st.integers(0, 8))):
        start = draw(st.integers(0, len(Event) - 1))
        end = draw(st.integers(start + 1, len(Event)))
        buffers.append(Buffer(f"b{number}", LiveBytes(draw(st.integers(0, 99))), start, end, tuple(Event)[end - 1]))
    return buffers


def brute_force(buffers: list[Buffer]) -> list[int]:
    last = max((buffer.live_until for buffer in buffers), default=0)
    return [
        sum(int(each.size) for each in buffers if each.live_from <= epoch < each.live_until) for epoch in range(last)
    ]


@untimed
@given(schedules())
def test_the_declared_peak_equals_brute_force(buffers: list[Buffer]) -> None:
    by_epoch = brute_force(buffers)
    assert list(map(int, live_bytes(buffers))) == by_epoch
    most = max(by_epoch, default=0)
    assert peak(buffers) == (LiveBytes(most), by_epoch.index(most) if by_epoch else 0)


@untimed
@given(schedules())
def test_the_peak_of_what_was_held_is_the_declared_one(buffers: list[Buffer]) -> None:
    completion = Completion("h-7")
    for epoch, event in enumerate(Event):
        for buffer in buffers:
            if buffer.live_from == epoch:
                assert buffer.released_after is not None
                completion.hold(buffer.name, int(buffer.size), buffer.released_after)
        completion.complete(event)
        for buffer in buffers:
            if buffer.released_after is event:
                completion.release(buffer.name)
    assert completion.peak_bytes == peak(buffers)[0]


# -- A broken epoch


@pytest.mark.parametrize("last", [None, *Event])
def test_abandoning_gives_everything_back_once_whatever_was_complete(last: Event | None) -> None:
    completion, returned = Completion("h-7"), list[str]()
    for event in Event:
        completion.hold(event, 8, event, lambda name=event: returned.append(name))  # type: ignore[misc]
    completion.hold("no owner", 8, Event.OUTPUT_READY)
    for event in [] if last is None else list(Event)[: list(Event).index(last) + 1]:
        completion.complete(event)
    if last is not None:
        completion.release(Event.ROUTE_READY)
    completion.abandon()
    assert sorted(returned) == sorted(Event)
    completion.abandon()
    assert len(returned) == len(Event)
    done = [event for event in Event if completion.is_complete(event)]
    assert done == ([] if last is None else list(Event)[: list(Event).index(last) + 1])
    for event in Event:
        with pytest.raises(CompletionError, match=f"^missing_dependency: invocation h-7: {event} cannot complete"):
            completion.complete(event)
        with pytest.raises(CompletionError, match="the reader came early, the invocation was abandoned"):
            completion.require(event, "the reader")
        with pytest.raises(CompletionError, match=r"^missing_dependency: .* 'new' .* abandoned"):
            completion.hold("new", 8, event)
        with pytest.raises(CompletionError, match=r"^unknown_buffer: "):
            completion.release(event)


def test_abandoning_gives_the_others_back_when_one_owner_fails() -> None:
    completion, returned = Completion("h-7"), list[str]()

    def fail() -> None:
        raise RuntimeError("the owner is gone")

    completion.hold("first", 8, Event.OUTPUT_READY, lambda: returned.append("first"))
    completion.hold("broken", 8, Event.OUTPUT_READY, fail)
    completion.hold("last", 8, Event.OUTPUT_READY, lambda: returned.append("last"))
    with pytest.raises(RuntimeError, match="the owner is gone"):
        completion.abandon()
    assert sorted(returned) == ["first", "last"]


# -- Staging


def span(rows: Tensor) -> tuple[int, int]:
    """The addresses that a contiguous tensor covers."""
    return rows.data_ptr(), rows.data_ptr() + rows.nbytes


TAKE = st.tuples(st.integers(0, 70), st.integers(1, 40), st.sampled_from([torch.float32, torch.bfloat16]))


@untimed
@given(st.lists(TAKE | st.integers(0, 9), max_size=40))
def test_no_two_buffers_that_are_out_overlap_and_nobody_else_writes_into_one(steps: list[Any]) -> None:
    pool, out, written = StagingPool(), list[tuple[Tensor, int]](), 0
    for step in steps:
        if isinstance(step, tuple):
            rows, width, dtype = step
            taken = pool.take(rows, width, dtype, CPU)
            assert (taken.shape, taken.dtype, taken.is_contiguous()) == ((rows, width), dtype, True)
            written += 1
            out.append((taken.fill_(written), written))
        elif out:
            pool.give_back(out.pop(step % len(out))[0])
        for (one, _), (other, _) in combinations(out, 2):
            (start, end), (begin, stop) = span(one), span(other)
            assert end <= begin or stop <= start or start == end or begin == stop
        for kept, value in out:
            assert (kept == value).all()


def test_a_buffer_that_came_back_is_used_again_for_any_shape_that_fits() -> None:
    pool = StagingPool()
    first = pool.take(40, 32, torch.float32, CPU)
    address = first.data_ptr()
    pool.give_back(first)
    for rows, width in ((40, 32), (64, 32), (1, 1), (0, 32), (8, 256)):
        again = pool.take(rows, width, torch.float32, CPU)
        assert again.data_ptr() == address or rows == 0
        pool.give_back(again)


def test_the_smallest_buffer_that_fits_is_taken() -> None:
    pool = StagingPool()
    large, small = (pool.take(rows, 64, torch.float32, CPU) for rows in (200, 20))
    pool.give_back(large)
    pool.give_back(small)
    assert pool.take(16, 64, torch.float32, CPU).data_ptr() == small.data_ptr()
    assert pool.take(16, 64, torch.float32, CPU).data_ptr() == large.data_ptr()


def test_a_pool_grows_by_doubling() -> None:
    pool, sizes = StagingPool(), list[int]()
    for rows in range(1, 200):
        taken = pool.take(rows, 64, torch.float32, CPU)
        sizes.append(taken.untyped_storage().nbytes() // 4)
        pool.give_back(taken)
    assert sorted(set(sizes)) == [1024, 2048, 4096, 8192, 16384]
    assert sizes == sorted(sizes)


def addresses(taken: list[Tensor]) -> set[int]:
    """Of tensors that are all alive, so that no address is used twice."""
    return {rows.data_ptr() for rows in taken}


def test_a_buffer_that_became_too_small_makes_room_for_a_larger_one() -> None:
    pool = StagingPool()
    small = pool.take(16, 64, torch.float32, CPU)
    pool.give_back(small)
    large = pool.take(64, 64, torch.float32, CPU)
    pool.give_back(large)
    taken = [pool.take(16, 64, torch.float32, CPU) for _ in range(3)]
    assert addresses(taken) & addresses([small, large]) == {large.data_ptr()}


def test_a_pool_keeps_the_four_largest_free_buffers() -> None:
    pool = StagingPool()
    many = [pool.take(16 << number, 64, torch.float32, CPU) for number in range(7)]
    for rows in many:
        pool.give_back(rows)
    again = [pool.take(16, 64, torch.float32, CPU) for _ in range(7)]
    assert addresses(again) & addresses(many) == addresses(many[-4:])


def test_a_tensor_that_its_owner_forgot_stays_out() -> None:
    pool = StagingPool()
    pool.take(4, 8, torch.float32, CPU)  # nobody keeps it: its id could be another's by now
    for _ in range(8):
        with pytest.raises(CompletionError, match=r"one of the 1 staging buffers"):
            pool.give_back(torch.zeros(4, 8))


def test_dtypes_do_not_share_buffers() -> None:
    pool = StagingPool()
    wide = pool.take(16, 64, torch.float32, CPU)
    pool.give_back(wide)
    assert pool.take(16, 64, torch.bfloat16, CPU).dtype == torch.bfloat16
    assert pool.take(16, 64, torch.float32, CPU).data_ptr() == wide.data_ptr()


def test_a_foreign_tensor_a_view_and_a_second_return_are_refused() -> None:
    pool, other = StagingPool(), StagingPool()
    taken = pool.take(4, 8, torch.float32, CPU)
    for tensor in (torch.zeros(4, 8), taken[:2], taken.view(32), other.take(4, 8, torch.float32, CPU)):
        with pytest.raises(
            CompletionError, match=r"^unknown_buffer: a tensor of shape .* one of the 1 staging buffers"
        ):
            pool.give_back(tensor)
    pool.give_back(taken)
    with pytest.raises(CompletionError, match=r"^unknown_buffer: a tensor of shape .* one of the 0 staging buffers"):
        pool.give_back(taken)


@pytest.mark.parametrize("shape", [(-1, 4), (4, -1)])
def test_a_negative_size_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=r"rows >= 0 and width >= 0, found -?[14] and -?[14]"):
        StagingPool().take(*shape, torch.float32, CPU)


def test_a_buffer_made_in_inference_mode_can_be_written_outside_of_it() -> None:
    pool = StagingPool()
    with torch.inference_mode():
        pool.give_back(pool.take(4, 8, torch.float32, CPU).fill_(1))
    taken = pool.take(4, 8, torch.float32, CPU)
    assert (taken.fill_(2) == 2).all()
