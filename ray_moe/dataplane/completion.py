"""When an invocation's buffers may be used again: eight events, their order, and last readers (0x03D3 to 0x03D5).

That a call has returned says only that work was submitted. What may be read, and what may be written again, follows
from events: `Completion` holds one invocation's events and the buffers that hang on them, `StagingPool` the buffers
themselves. A buffer given back is written by whoever takes it next, so it is given back through
`Completion.release`, which refuses until its last reader is done.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from ray_moe.errors import CompletionError, ConfigError, EvidenceError
from ray_moe.evidence import LiveBytes


class Stream(StrEnum):
    """Which ordered queue of work an event is recorded on."""

    ROUTE = "route"
    PACK = "pack"
    COMMUNICATION = "communication"
    EXPERT = "expert"
    OUTPUT = "output"


class Event(StrEnum):
    """What completes in one invocation. Each name is a state that holds from then on."""

    ROUTE_READY = "route_ready"
    DISPATCH_PACKED = "dispatch_packed"
    DISPATCH_COMPLETE = "dispatch_complete"
    EXPERT_INPUT_READY = "expert_input_ready"
    EXPERT_COMPLETE = "expert_complete"
    COMBINE_COMPLETE = "combine_complete"
    OUTPUT_READY = "output_ready"
    HANDLE_RELEASED = "handle_released"


@dataclass(frozen=True)
class EventNode:
    """The stream that an event is recorded on, and the events that it waits for."""

    stream: Stream
    after: tuple[Event, ...]


# event -> (stream, events it waits for). The specification's graph, 0x03D4.
EVENTS: dict[Event, EventNode] = {
    # Routes, plan and counts are known: everything that follows may read them.
    Event.ROUTE_READY: EventNode(Stream.ROUTE, ()),
    # Rows lie in send order and may be submitted. The submit call's return is not an event: nothing follows from it.
    Event.DISPATCH_PACKED: EventNode(Stream.PACK, (Event.ROUTE_READY,)),
    # This peer's rows have left and all rows for it are here: the send buffer has no reader any more.
    Event.DISPATCH_COMPLETE: EventNode(Stream.COMMUNICATION, (Event.DISPATCH_PACKED,)),
    # Source-major rows were repacked to expert-major ones: the receive buffer has no reader any more.
    Event.EXPERT_INPUT_READY: EventNode(Stream.EXPERT, (Event.DISPATCH_COMPLETE,)),
    # Expert outputs may be sent; the expert input has no reader any more.
    Event.EXPERT_COMPLETE: EventNode(Stream.EXPERT, (Event.EXPERT_INPUT_READY,)),
    # All rows are back at their origins: expert outputs have no reader any more.
    Event.COMBINE_COMPLETE: EventNode(Stream.COMMUNICATION, (Event.EXPERT_COMPLETE,)),
    # The weighted sums are written: the returned rows have no reader any more.
    Event.OUTPUT_READY: EventNode(Stream.OUTPUT, (Event.COMBINE_COMPLETE,)),
    # Inverse maps, input rows and the generation's slots are no longer needed by this invocation.
    Event.HANDLE_RELEASED: EventNode(Stream.OUTPUT, (Event.OUTPUT_READY,)),
}


def check_events(nodes: Mapping[Event, EventNode], epochs: Mapping[Event, int] | None = None) -> None:
    """Check a schedule's events against `EVENTS`: it may wait for more than the table, never for less.

    `epochs` says when each event happens, if that is planned. Raises `CompletionError`: `missing_dependency` when an
    event, its epoch or one of its required predecessors is absent, `cycle`, and `epoch_before_dependency` when an event
    is not later than each of its predecessors.
    """
    for event, required in EVENTS.items():
        if event not in nodes:
            raise CompletionError("missing_dependency", f"the schedule has no event {event}")
        absent = [before for before in required.after if before not in nodes[event].after]
        if absent:
            raise CompletionError("missing_dependency", f"{event} does not wait for {', '.join(absent)}")
    try:
        TopologicalSorter({event: node.after for event, node in nodes.items()}).prepare()
    except CycleError as error:
        raise CompletionError("cycle", " -> ".join(error.args[1])) from None
    if epochs is None:
        return
    for event, node in nodes.items():
        for scheduled in (event, *node.after):
            if scheduled not in epochs:
                raise CompletionError("missing_dependency", f"{scheduled} has no epoch")
        for before in node.after:
            if epochs[event] <= epochs[before]:
                raise CompletionError(
                    "epoch_before_dependency",
                    f"{event} is at epoch {epochs[event]}, {before} that it waits for at {epochs[before]}",
                )


_BIT = {event: 1 << position for position, event in enumerate(EVENTS)}
_ABANDONED = 1 << len(EVENTS)


def _bits(events: Iterable[Event]) -> int:
    return sum(_BIT[event] for event in events)


# event -> (its bit, the bits it needs, the bits to look at): it may complete when just the second of the last are set.
_MAY_COMPLETE = {
    event: (_BIT[event], _bits(node.after), _BIT[event] | _bits(node.after) | _ABANDONED)
    for event, node in EVENTS.items()
}


class Life(NamedTuple):
    """One buffer of an invocation: its bytes, when it was declared and released, and its last reader's event."""

    name: str
    nbytes: int
    since: int
    until: int
    last_reader: Event


class LiveMeter:
    """What the completions of one invocation hold together: bytes now, the most at once, and one clock for them all."""

    __slots__ = ("live", "peak", "tick")

    def __init__(self) -> None:
        self.live = self.peak = self.tick = 0


class Completion:
    """One invocation's events, and the buffers that its readers still need.

    Completing an event releases nothing: the owner of a buffer releases it, and is refused while a reader may be
    running. One is made for every invocation of every layer, so its state is one integer and one dict. It belongs to
    the thread that runs the invocation. `handle_id` names the invocation in every error. An invocation in several
    handles gives them one `meter`, so that what they hold side by side is counted together.
    """

    __slots__ = ("_complete", "_held", "_lives", "epochs", "handle_id", "meter")

    def __init__(self, handle_id: str, meter: LiveMeter | None = None) -> None:
        self.handle_id = handle_id
        self._complete = 0
        # name -> (bytes, last reader's event, what gives it back, when it was declared)
        self._held: dict[str, tuple[int, Event, Callable[[], None] | None, int]] = {}
        self.meter = meter if meter is not None else LiveMeter()
        # What has happened, each with a number of its own: for audits.
        self.epochs: dict[Event, int] = {}
        self._lives: list[Life] = []

    def complete(self, event: Event) -> None:
        """Record that `event` has happened.

        Raises `CompletionError`: `missing_dependency` when a predecessor is not complete or the invocation was
        abandoned, `already_complete` the second time.
        """
        bit, needed, looked_at = _MAY_COMPLETE[event]
        if self._complete & looked_at != needed:
            raise self._refusal(event)
        self._complete |= bit
        self.meter.tick += 1
        self.epochs[event] = self.meter.tick

    def is_complete(self, event: Event) -> bool:
        """Whether `event` has happened; abandoning changes nothing about the past."""
        return self._complete & _BIT[event] != 0

    def require(self, event: Event, what: str) -> None:
        """Let `what`, a reader of what `event` completes, pass.

        Raises `CompletionError` `missing_dependency` when it comes early (the return of an asynchronous call is no
        completion), and after `abandon`, when the buffers belong to others.
        """
        bit = _BIT[event]
        if self._complete & (bit | _ABANDONED) != bit:
            state = "the invocation was abandoned" if self._complete & _ABANDONED else f"{event} is not complete"
            raise CompletionError("missing_dependency", f"invocation {self.handle_id}: {what} came early, {state}")

    def hold(self, name: str, nbytes: int, until: Event, give_back: Callable[[], None] | None = None) -> None:
        """Declare a buffer that has readers until `until` completes; `give_back` is what `release` and `abandon` call.

        Raises `CompletionError`: `already_complete` when `until` is past, since then nothing would protect the buffer,
        `live_alias_overlap` when `name` is held already, `missing_dependency` after `abandon`. Raises `EvidenceError`
        for `nbytes` below zero.
        """
        if self._complete & (_BIT[until] | _ABANDONED):
            raise self._refusal(until, f"buffer {name!r} cannot wait for it: ")
        if name in self._held:
            raise CompletionError(
                "live_alias_overlap", f"invocation {self.handle_id}: two live buffers are named {name!r}"
            )
        if nbytes < 0:
            raise EvidenceError(f"invocation {self.handle_id}: buffer {name!r} must have >= 0 bytes, found {nbytes}")
        meter = self.meter
        meter.tick += 1
        meter.live += nbytes
        if meter.live > meter.peak:
            meter.peak = meter.live
        self._held[name] = (nbytes, until, give_back, meter.tick)

    def release(self, name: str) -> None:
        """End the life of a held buffer and give it back.

        Raises `CompletionError`: `released_before_last_reader` until its event is complete, `unknown_buffer` when no
        buffer of that name is held (it never was, or it was released or abandoned).
        """
        held = self._held.get(name)
        if held is None:
            raise CompletionError("unknown_buffer", f"invocation {self.handle_id} holds no buffer {name!r}")
        nbytes, until, give_back, since = held
        if not self._complete & _BIT[until]:
            raise CompletionError(
                "released_before_last_reader",
                f"invocation {self.handle_id}: buffer {name!r} has readers until {until}, which is not complete",
            )
        del self._held[name]
        self.meter.live -= nbytes
        self.meter.tick += 1
        self._lives.append(Life(name, nbytes, since, self.meter.tick, until))
        if give_back is not None:
            give_back()

    def lives(self) -> list[Life]:
        """Every buffer so far; one that is still held lives until now."""
        held = [
            Life(name, size, since, self.meter.tick + 1, until) for name, (size, until, _, since) in self._held.items()
        ]
        return [*self._lives, *held]

    @property
    def peak_bytes(self) -> LiveBytes:
        """The most that was held at once, so far, by all completions of the meter."""
        return LiveBytes(self.meter.peak)

    def abandon(self) -> None:
        """Give everything back whatever was complete, once: of a broken epoch nothing will ever complete it.

        The caller has ended the epoch's transfers before, for no event guards the buffers any more. Every buffer is
        given back even when giving one back raises; the error comes out at the end.
        """
        self._complete |= _ABANDONED
        held, self._held = self._held, {}
        self.meter.live -= sum(nbytes for nbytes, _, _, _ in held.values())
        with ExitStack() as stack:
            for _, _, give_back, _ in held.values():
                if give_back is not None:
                    stack.callback(give_back)

    def _refusal(self, event: Event, what: str = "") -> CompletionError:
        where = f"invocation {self.handle_id}: {what}"
        if self._complete & _ABANDONED:
            return CompletionError("missing_dependency", f"{where}{event} cannot complete, it was abandoned")
        if self._complete & _BIT[event]:
            return CompletionError("already_complete", f"{where}{event} is complete already")
        missing = [before for before in EVENTS[event].after if not self._complete & _BIT[before]]
        return CompletionError("missing_dependency", f"{where}{event} waits for {', '.join(missing)}")


# Free buffers kept per dtype and device: send, receive and expert rows of one invocation, and one more in between.
_KEPT = 4
_SMALLEST = 1024  # elements


class StagingPool:
    """Reusable staging buffers of one peer, per dtype and device; several may be out at once.

    A buffer is out from `take` until `give_back` and is never handed out twice in that time (0x03D5). It belongs to
    one thread. Buffers grow by doubling: when none is large enough, the largest free one makes room for one of the
    next power of two, so a peer soon allocates nothing. At most four free buffers are kept per dtype and device.
    """

    def __init__(self) -> None:
        # (elements, buffer), smallest first.
        self._free: dict[tuple[torch.dtype, torch.device], list[tuple[int, Tensor]]] = {}
        # id of the view that is out -> (the view, so that its id stays its own; the buffer; where it goes back to).
        self._out: dict[int, tuple[Tensor, Tensor, list[tuple[int, Tensor]]]] = {}

    def take(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised rows [rows, width], contiguous, until the same tensor is given back.

        Raises `ConfigError` for a negative size.
        """
        if rows < 0 or width < 0:
            raise ConfigError(f"a staging buffer has rows >= 0 and width >= 0, found {rows} and {width}")
        free = self._free.setdefault((dtype, device), [])
        buffer = self._fitting(free, rows * width, dtype, device)
        view = buffer.as_strided((rows, width), (width, 1))
        self._out[id(view)] = (view, buffer, free)
        return view

    def give_back(self, tensor: Tensor) -> None:
        """Make the buffer behind `tensor`, the very tensor that `take` returned, free for the next `take`.

        Nothing here knows its readers: release it through `Completion.release`. Raises `CompletionError`
        `unknown_buffer` for a tensor that is not out: another's, a view of one that is, or one given back before.
        """
        taken = self._out.pop(id(tensor), None)
        if taken is None:
            raise CompletionError(
                "unknown_buffer",
                f"a tensor of shape {list(tensor.shape)} is not one of the {len(self._out)} staging buffers that are "
                f"out: it was never taken here, or given back before",
            )
        _, buffer, free = taken
        insort(free, (buffer.numel(), buffer), key=itemgetter(0))
        if len(free) > _KEPT:
            free.pop(0)

    @staticmethod
    def _fitting(free: list[tuple[int, Tensor]], elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The smallest free buffer that is large enough, taken out of `free`, or a new one."""
        for index, (size, buffer) in enumerate(free):
            if size >= elements:
                del free[index]
                return buffer
        if free:
            free.pop()
        size = max(_SMALLEST, 1 << (elements - 1).bit_length())
        # A buffer made inside inference mode could never be written outside of it.
        with torch.inference_mode(False):
            return torch.empty(size, dtype=dtype, device=device)
