"""What one HTTP replica counts, and how a Prometheus server reads it: of the replica itself (`GET /metrics`), and of
Ray's endpoint, as `ray_moe_http_...` of the replica's process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter as Totals
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from ray_moe.actors.exporter import Exporter

__all__ = ["CONTENT_TYPE", "Counters", "Timing"]

CONTENT_TYPE = CONTENT_TYPE_LATEST
_LOG = logging.getLogger(__name__)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
# A counter that begins with its first request has no rate until the second.
_COUNTED_FROM_THE_START = ("/v1/completions", "/v1/chat/completions")
# Observations between two exports that are remembered; of more, the latest.
_REMEMBERED = 256


class Seconds:
    """A histogram that also remembers what it was given since it was last exported."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._latest: deque[float] = deque(maxlen=_REMEMBERED)

    def observe(self, seconds: float) -> None:
        self._histogram.observe(seconds)
        self._latest.append(seconds)

    def take(self) -> list[float]:
        """What is remembered; it is forgotten then."""
        latest = list(self._latest)
        self._latest.clear()
        return latest


class Counters:
    """Totals since the replica started; labels are routes and statuses, which are few."""

    def __init__(self, running: Callable[[], float], queued: Callable[[], float]) -> None:
        self._registry = registry = CollectorRegistry()
        self._running, self._queued = running, queued
        self.requests = Counter("ray_moe_http_requests", "Requests answered.", ["route", "status"], registry=registry)
        for route in _COUNTED_FROM_THE_START:
            self.requests.labels(route, "200")
        self.refusals = Counter(
            "ray_moe_http_refusals", "Requests refused before they ran.", ["reason"], registry=registry
        )
        self.prompt_tokens = Counter("ray_moe_http_prompt_tokens", "Prompt tokens taken in.", registry=registry)
        self.completion_tokens = Counter("ray_moe_http_completion_tokens", "Tokens delivered.", registry=registry)
        self.cancelled = Counter(
            "ray_moe_http_cancelled", "Answers that ended before they were complete.", registry=registry
        )
        self.first_token_s = Seconds(
            Histogram(
                "ray_moe_http_first_token_seconds",
                "Until the first token.",
                buckets=_SECONDS,
                registry=registry,
            )
        )
        self.token_s = Seconds(
            Histogram(
                "ray_moe_http_token_seconds", "Per token after the first.", buckets=_TOKEN_SECONDS, registry=registry
            )
        )
        self.request_s = Seconds(
            Histogram("ray_moe_http_request_seconds", "Until the last token.", buckets=_SECONDS, registry=registry)
        )
        Gauge("ray_moe_http_running", "Generations that run.", registry=registry).set_function(running)
        Gauge("ray_moe_http_queued", "Requests that wait for their turn.", registry=registry).set_function(queued)

    def text(self) -> bytes:
        """All of it in Prometheus's text format."""
        return generate_latest(self._registry)

    # ---- to Ray's endpoint ----

    def push(self, export: Exporter, now: float) -> None:
        """One round; `now` on a clock that goes on."""
        export.begin(now)
        requests: Totals[tuple[str, str]] = Totals()
        for labels, total in _totals(self.requests):
            requests[_grouped(labels["route"]), labels["status"]] += int(total)
        for (route, status), total in requests.items():
            export.count("moe_http_requests", total, route=route, status=status)
        for labels, total in _totals(self.refusals):
            export.count("moe_http_refusals", total, **labels)
        for name, counter in (
            ("moe_http_prompt_tokens", self.prompt_tokens),
            ("moe_http_completion_tokens", self.completion_tokens),
            ("moe_http_cancelled", self.cancelled),
        ):
            for labels, total in _totals(counter):
                export.count(name, total, **labels)
        export.set("moe_http_running", self._running())
        export.set("moe_http_queued", self._queued())
        export.observe("moe_http_first_token_seconds", self.first_token_s.take())
        export.observe("moe_http_token_seconds", self.token_s.take())
        export.observe("moe_http_request_seconds", self.request_s.take())
        export.end()

    async def export(self, export: Exporter, every_s: float) -> None:
        """Push every `every_s` seconds until cancelled."""
        while True:
            try:
                self.push(export, time.monotonic())
            except Exception:  # noqa: BLE001 - metrics are wanted most when something unforeseen happens
                _LOG.exception("a round of the HTTP replica's metrics failed")
            await asyncio.sleep(every_s)


def _grouped(route: str) -> str:
    """Routes under /v1 by their templates, others by what they begin with."""
    return route if route.startswith("/v1") or not route.startswith("/") else f"/{route.split('/')[1]}"


def _totals(counter: Counter) -> Iterator[tuple[dict[str, str], float]]:
    for family in counter.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                yield dict(sample.labels), sample.value


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
