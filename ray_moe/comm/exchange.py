"""A submitted exchange and its three moments (specification 0x03D4).

An API that returns from "dispatch" may mean that the work is submitted, that the rows have arrived, or that nothing
reads the sent rows any more. An `Exchange` says which: `payload` waits for the second, `complete` for the third.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol, TypeVar

from torch import Tensor

from ray_moe.errors import CompletionError

_T = TypeVar("_T")


class ExchangeState(Enum):
    """What is known to have happened; each of the last three includes those before it."""

    BROKEN = "broken"
    SUBMITTED = "submitted"
    PAYLOAD_AVAILABLE = "payload_available"
    COMPLETE = "complete"


# state -> {event: next}. An exchange may end both sides at once; a broken one ends nothing and stays broken.
EXCHANGE_TABLE: dict[ExchangeState, dict[str, ExchangeState]] = {
    ExchangeState.SUBMITTED: {
        "rows_arrived": ExchangeState.PAYLOAD_AVAILABLE,
        "break": ExchangeState.BROKEN,
    },
    ExchangeState.PAYLOAD_AVAILABLE: {"rows_left": ExchangeState.COMPLETE, "break": ExchangeState.BROKEN},
    ExchangeState.COMPLETE: {},
    ExchangeState.BROKEN: {},
}


class Exchange(Protocol):
    """A payload collective on its way. Used on the thread that owns the step."""

    @property
    def state(self) -> ExchangeState: ...

    def payload(self) -> Tensor:
        """Wait until the received rows are here and return them. The sent rows may still be read.

        May be called again. Raises `CollectiveError` when a peer is lost or the deadline passes.
        """
        ...

    def complete(self) -> None:
        """Wait until the sent rows may be overwritten, too. Raises as `payload`."""
        ...

    def proceed(self) -> bool:
        """Wait for the current stage and submit the next one; False when none is left. Raises as `payload`."""
        ...


class WaitedExchange:
    """The states of an exchange over two waits: `arrive` returns the rows, `leave` when the sent rows have gone."""

    __slots__ = ("_arrive", "_leave", "_rows", "state")

    def __init__(self, arrive: Callable[[], Tensor], leave: Callable[[], None]) -> None:
        self._arrive, self._leave = arrive, leave
        self._rows: Tensor | None = None
        self.state = ExchangeState.SUBMITTED

    def payload(self) -> Tensor:
        if self._rows is None:
            self._rows = self._wait(self._arrive)
            self._advance("rows_arrived")
        return self._rows

    def complete(self) -> None:
        self.payload()
        if self.state is not ExchangeState.COMPLETE:
            self._wait(self._leave)
            self._advance("rows_left")

    def proceed(self) -> bool:
        return False

    def _wait(self, wait: Callable[[], _T]) -> _T:
        try:
            return wait()
        except BaseException:
            self._advance("break")
            raise

    def _advance(self, event: str) -> None:
        following = EXCHANGE_TABLE[self.state].get(event)
        if following is None:
            raise CompletionError(
                "missing_dependency", f"exchange event {event!r} is illegal in state {self.state.value}"
            )
        self.state = following


class Arrived:
    """An exchange that had nothing to wait for: the rows are here, and no link reads them."""

    __slots__ = ("_rows",)

    state = ExchangeState.COMPLETE

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def payload(self) -> Tensor:
        return self._rows

    def complete(self) -> None:
        """Nothing was sent."""

    def proceed(self) -> bool:
        return False


def furthest_behind(exchanges: Sequence[Exchange]) -> ExchangeState:
    """What is known of several exchanges together."""
    order = list(ExchangeState)
    return min((exchange.state for exchange in exchanges), key=order.index)


Stage = Callable[[Tensor], Exchange]
AllToAllV = Callable[[Tensor, Sequence[int], Sequence[int]], Exchange]


class StagedExchange:
    """Stages one after another, each sending what the one before it received; the first is submitted at once.

    `finish` maps the last stage's rows to the payload.
    """

    __slots__ = ("_finish", "_left", "_payload", "_submitted")

    def __init__(self, rows: Tensor, stages: Sequence[Stage], finish: Callable[[Tensor], Tensor]) -> None:
        self._submitted = [stages[0](rows)]
        self._left = list(stages[1:])
        self._finish = finish
        self._payload: Tensor | None = None

    @property
    def state(self) -> ExchangeState:
        behind = furthest_behind(self._submitted)
        if behind is ExchangeState.BROKEN or self._payload is not None:
            return behind
        return ExchangeState.SUBMITTED

    def proceed(self) -> bool:
        if not self._left:
            return False
        arrived = self._submitted[-1].payload()
        self._submitted.append(self._left.pop(0)(arrived))
        return True

    def payload(self) -> Tensor:
        if self._payload is None:
            while self.proceed():
                pass
            self._payload = self._finish(self._submitted[-1].payload())
        return self._payload

    def complete(self) -> None:
        self.payload()
        for exchange in self._submitted:
            exchange.complete()


def exchanged_sums(rows_PND: Tensor, all_to_all_v: AllToAllV) -> Exchange:
    """A reduce-scatter for carriers without one: every peer sums what the others have for it, in peer-slot order."""
    peers, rows, width = rows_PND.shape
    even = [rows] * peers
    return StagedExchange(
        rows_PND.reshape(-1, width),
        [lambda sent: all_to_all_v(sent, even, even)],
        lambda got: got.view(peers, rows, width).sum(dim=0, dtype=rows_PND.dtype),
    )
