"""What one HTTP replica counts, and how a Prometheus server reads it (`GET /metrics`)."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = ["CONTENT_TYPE", "Counters", "Timing"]

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class Counters:
    """Totals since the replica started; labels are routes and statuses, which are few."""

    def __init__(self, running: Callable[[], float], queued: Callable[[], float]) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter("ray_moe_http_requests", "Requests answered.", ["route", "status"], registry=registry)
        self.refusals = Counter(
            "ray_moe_http_refusals", "Requests refused before they ran.", ["reason"], registry=registry
        )
        self.prompt_tokens = Counter("ray_moe_http_prompt_tokens", "Prompt tokens taken in.", registry=registry)
        self.completion_tokens = Counter("ray_moe_http_completion_tokens", "Tokens delivered.", registry=registry)
        self.cancelled = Counter(
            "ray_moe_http_cancelled", "Answers that ended before they were complete.", registry=registry
        )
        self.first_token_s = Histogram(
            "ray_moe_http_first_token_seconds",
            "Until the first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.token_s = Histogram(
            "ray_moe_http_token_seconds", "Per token after the first.", buckets=_TOKEN_SECONDS, registry=registry
        )
        self.request_s = Histogram(
            "ray_moe_http_request_seconds", "Until the last token.", buckets=_SECONDS, registry=registry
        )
        Gauge("ray_moe_http_running", "Generations that run.", registry=registry).set_function(running)
        Gauge("ray_moe_http_queued", "Requests that wait for their turn.", registry=registry).set_function(queued)

    def text(self) -> bytes:
        """All of it in Prometheus's text format."""
        return generate_latest(self._registry)


class Timing:
    """One answer's tokens and times."""

    def __init__(self, counters: Counters, prompt_tokens: int) -> None:
        self._counters = counters
        self._began = time.monotonic()
        self._first = 0.0
        counters.prompt_tokens.inc(prompt_tokens)

    def token(self) -> None:
        """The first token has come, unless it had before."""
        if not self._first:
            self._first = time.monotonic()
            self._counters.first_token_s.observe(self._first - self._began)

    def end(self, tokens: int, *, complete: bool) -> None:
        """The answer is over."""
        now = time.monotonic()
        self._counters.completion_tokens.inc(tokens)
        if not complete:
            self._counters.cancelled.inc()
            return
        self._counters.request_s.observe(now - self._began)
        if tokens > 1:
            self._counters.token_s.observe((now - self._first) / (tokens - 1))
