"""Handing requests over: one engine gives a request up at a step boundary, another goes on with exactly its tokens.

A request is its prompt, its committed tokens and its parameters; with the seed among them, any engine draws the tokens
that would have come. The KV of its committed positions can go along; where it does not, it is computed again.

Both functions run on their engine's thread, between two steps. A step that is planned and has not run may hold rows of
the request: they never run, and the adopting engine plans them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from ray_moe.engine.kvcache import KVCache
from ray_moe.engine.request import Request
from ray_moe.engine.scheduler import Residence, Scheduler
from ray_moe.errors import ConfigError, RequestError

# (committed positions, bytes of their KV) -> whether the KV goes along; `worth_moving` with its rates bound is one.
Decide = Callable[[int, int], bool]


@dataclass(frozen=True)
class Departing:
    """A request between two engines.

    `request` has all committed tokens as its prefix. `kv` holds by attention layer the KV of its first `positions`, on
    the host, [positions, KV heads, 2 * head_dim]; None, with 0 positions, when it is to be computed again. Raises
    RequestError when these contradict one another.
    """

    request: Request
    positions: int = 0
    kv: Mapping[int, Tensor] | None = None

    def __post_init__(self) -> None:
        lengths = {len(entry_NHD) for entry_NHD in (self.kv or {}).values()} or {0}
        if lengths != {self.positions}:
            raise RequestError(
                f"request {self.request_id!r} has KV of {sorted(lengths)} positions and says {self.positions}", "kv"
            )

    @property
    def request_id(self) -> str:
        """The id under which both engines deliver."""
        return self.request.request_id

    @property
    def nbytes(self) -> int:
        return sum(entry_NHD.nbytes for entry_NHD in (self.kv or {}).values())


def take_out(
    scheduler: Scheduler, cache: KVCache, request_ids: Iterable[str] | None, decide: Decide
) -> tuple[Departing, ...]:
    """Ends requests here for another engine to adopt; None means all. Ids that are not open are passed over."""
    wanted = scheduler.request_ids if request_ids is None else request_ids
    residences = (scheduler.hand_over(request_id) for request_id in wanted)
    return tuple(_packed(cache, residence, decide) for residence in residences if residence is not None)


def take_in(scheduler: Scheduler, cache: KVCache, departing: Departing) -> bool:
    """Goes on with a request; tells whether its KV is used. Where there is no room it waits, and computes it again.

    Raises RequestError, and takes nothing, when the request runs here already or can never be served here, or its KV is
    another model's.
    """
    kv = departing.kv or {}
    if kv:
        cache.check(kv)
    blocks = scheduler.adopt(departing.request, departing.positions)
    if blocks:
        cache.restore(blocks, kv)
    return bool(blocks)


def worth_moving(positions: int, kv_bytes: int, *, bytes_per_second: float, prefill_tokens_per_second: float) -> bool:
    """Whether moving the KV of so many positions takes less time than computing it again at these measured rates.

    Raises ConfigError for a rate that is not positive.
    """
    if not (bytes_per_second > 0 and prefill_tokens_per_second > 0):
        raise ConfigError(
            f"bytes_per_second is {bytes_per_second} and prefill_tokens_per_second {prefill_tokens_per_second}; "
            "both must be > 0"
        )
    return kv_bytes / bytes_per_second < positions / prefill_tokens_per_second


def _packed(cache: KVCache, residence: Residence, decide: Decide) -> Departing:
    positions = residence.positions
    if positions == 0 or not decide(positions, positions * cache.position_bytes):
        return Departing(residence.request)
    return Departing(residence.request, positions, cache.read(residence.blocks, positions))
