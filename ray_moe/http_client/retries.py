"""When a request is sent again: only where the server cannot have begun it, and never once an answer has begun.

no connection came about                 again, after a random part of a time that doubles
429 or 503 that says when (Retry-After)  again, no earlier than that
anything else                            the caller hears of it: it may have been done
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from ray_moe.errors import ConfigError
from ray_moe.http_client.failures import ClientError, RateLimitedError, UnavailableError, UnreachableError


@dataclass(frozen=True)
class Retries:
    """At most `most` times again. `first_s` and `longest_s` bound the waits that the server does not name.

    `chance` gives numbers in [0, 1). Raises `ConfigError` for bounds that make no sense.
    """

    most: int = 2
    first_s: float = 0.25
    longest_s: float = 8.0
    chance: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        if self.most < 0 or not 0 < self.first_s <= self.longest_s:
            raise ConfigError(
                f"retries must have most >= 0 and 0 < first_s <= longest_s, found {self.most}, {self.first_s} and "
                f"{self.longest_s}"
            )

    def delay(self, tried: int, failure: ClientError, left: float) -> float | None:
        """Seconds until the next try after `tried` retries; None where `failure` is the caller's.

        `left` is what remains of the caller's patience: a wait that does not fit is not begun.
        """
        if tried >= self.most:
            return None
        backoff = min(self.longest_s, self.first_s * 2**tried)
        if isinstance(failure, UnreachableError):
            seconds = backoff * self.chance()
        elif isinstance(failure, RateLimitedError | UnavailableError) and failure.retry_after is not None:
            # A little later than asked: others were told the same.
            seconds = failure.retry_after + backoff * self.chance()
        else:
            return None
        return seconds if seconds < left else None
