"""OpenTelemetry: spans go where its environment variables say, and nowhere without them.

OTEL_EXPORTER_OTLP_ENDPOINT (or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT) turns spans on, OTEL_TRACES_EXPORTER=console too;
OTEL_SDK_DISABLED=true or OTEL_TRACES_EXPORTER=none turns them off. Protocol, headers, sampler, batches, service name
and resource are the SDK's own variables. The provider is ours alone: a program that has set one of its own keeps it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Protocol

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ray_moe.errors import ConfigError

Attribute = str | int | float | bool
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_OTLP = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
_W3C = TraceContextTextMapPropagator()


# -- Where spans go


def exporter_named(environment: Mapping[str, str]) -> str | None:
    """The exporter that the environment asks for, by the name that its package registers; None for no spans.

    Raises `ConfigError` for a protocol that OTLP does not have.
    """
    wanted = environment.get("OTEL_TRACES_EXPORTER", "").strip()
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or wanted == "none":
        return None
    if not wanted and not any(environment.get(name) for name in _ENDPOINTS):
        return None
    if wanted not in ("", "otlp"):
        return wanted
    protocol = next((environment[name] for name in _PROTOCOLS if environment.get(name)), "http/protobuf")
    if protocol not in _OTLP:
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL must be one of {', '.join(_OTLP)}, found {protocol!r}")
    return _OTLP[protocol]


def processor_of(environment: Mapping[str, str]) -> SpanProcessor | None:
    """Sends spans in batches, on a thread of its own; None where nobody wants them.

    Raises `ConfigError` for an exporter that is not installed.
    """
    name = exporter_named(environment)
    if name is None:
        return None
    found = entry_points(group="opentelemetry_traces_exporter", name=name)
    if not found:
        raise ConfigError(f"no package here brings the OpenTelemetry exporter {name!r}")
    return BatchSpanProcessor(next(iter(found)).load()())


def _provider(
    processor: SpanProcessor, service: str, sampler: Sampler | None = None, ids: IdGenerator | None = None
) -> TracerProvider:
    own = {} if SERVICE_NAME in OTELResourceDetector().detect().attributes else {SERVICE_NAME: service}
    provider = TracerProvider(resource=Resource.create(own), sampler=sampler, id_generator=ids)
    provider.add_span_processor(processor)
    return provider


# -- Requests


class RequestTrace(Protocol):
    """One request: phases one after the other, and attributes of the whole."""

    @property
    def headers(self) -> Mapping[str, str]:
        """What tells whoever asked where the trace is (W3C)."""

    def phase(self, name: str) -> None:
        """What went on so far is over, and `name` begins."""

    def tell(self, attributes: Mapping[str, Attribute]) -> None:
        """Attributes of the request."""

    def end(self, error: str = "") -> None:
        """It is over, with an error of this type; a second time is fine."""


class Requests(Protocol):
    """Where a replica's requests are traced."""

    def begin(self, name: str, headers: Mapping[str, str]) -> RequestTrace:
        """A request has come, with these headers."""


class Untraced:
    """Requests, and one of them, where nobody wants spans."""

    headers: Mapping[str, str] = {}

    def begin(self, name: str, headers: Mapping[str, str]) -> Untraced:
        return self

    def phase(self, name: str) -> None:
        """Nobody looks."""

    def tell(self, attributes: Mapping[str, Attribute]) -> None:
        """Nobody looks."""

    def end(self, error: str = "") -> None:
        """Nobody looks."""


class TracedRequests:
    """A server span per request, a child of the one that its `traceparent` names; in it a span per phase."""

    def __init__(self, processor: SpanProcessor, service: str = "ray_moe.http") -> None:
        self._tracer = _provider(processor, service).get_tracer("ray_moe")

    def begin(self, name: str, headers: Mapping[str, str]) -> RequestTrace:
        return _Request(self._tracer, name, _W3C.extract(headers))


class _Request:
    def __init__(self, tracer: trace.Tracer, name: str, caller: Context) -> None:
        self._tracer = tracer
        self._span = tracer.start_span(name, caller, SpanKind.SERVER)
        self._context = trace.set_span_in_context(self._span, Context())
        self._phase: trace.Span | None = None
        self._over = False

    @property
    def headers(self) -> Mapping[str, str]:
        found: dict[str, str] = {}
        _W3C.inject(found, self._context)
        return found

    def phase(self, name: str) -> None:
        self._end_phase()
        self._phase = self._tracer.start_span(name, self._context)

    def tell(self, attributes: Mapping[str, Attribute]) -> None:
        self._span.set_attributes(dict(attributes))

    def end(self, error: str = "") -> None:
        if self._over:
            return
        self._over = True
        self._end_phase()
        if error:  # not its text: what a request was refused for may hold a piece of it
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()

    def _end_phase(self) -> None:
        if self._phase is not None:
            self._phase.end()
            self._phase = None


def requests_of(environment: Mapping[str, str] | None = None) -> Requests:
    """As the environment says. Raises `ConfigError`."""
    processor = processor_of(os.environ if environment is None else environment)
    return Untraced() if processor is None else TracedRequests(processor)


# -- Spans that are over


class _Chosen(RandomIdGenerator):
    """Ids that were chosen for one span, random ones for all others. Belongs to one thread."""

    def __init__(self) -> None:
        self.ids: tuple[int, int] | None = None

    def generate_trace_id(self) -> int:
        return self.ids[0] if self.ids is not None else super().generate_trace_id()

    def generate_span_id(self) -> int:
        return self.ids[1] if self.ids is not None else super().generate_span_id()


class FinishedSpans:
    """Spans whose times are known. Several processes can write into one trace, whose ids all of them know."""

    def __init__(self, processor: SpanProcessor, service: str) -> None:
        self._ids = _Chosen()
        self._provider = _provider(processor, service, ALWAYS_ON, self._ids)
        self._tracer = self._provider.get_tracer("ray_moe")

    @staticmethod
    def inside(trace_id: int, span_id: int) -> Context:
        """Inside a span that another process writes."""
        flags = TraceFlags(TraceFlags.SAMPLED)
        return trace.set_span_in_context(NonRecordingSpan(SpanContext(trace_id, span_id, True, flags)), Context())

    def add(
        self,
        name: str,
        start: int,
        end: int,
        attributes: Mapping[str, Attribute],
        parent: Context | None = None,
        ids: tuple[int, int] | None = None,
    ) -> Context:
        """A span by its wall clock's nanoseconds, inside `parent`; `ids` of trace and span where these were chosen.
        Returns what is inside it."""
        self._ids.ids = ids
        span = self._tracer.start_span(name, parent or Context(), attributes=dict(attributes), start_time=start)
        self._ids.ids = None
        assert isinstance(span, Span)  # the sampler takes all
        span.end(end_time=end)
        return trace.set_span_in_context(span, Context())

    def close(self) -> None:
        """Send what is there."""
        self._provider.shutdown()


def finished_spans_of(service: str, environment: Mapping[str, str] | None = None) -> FinishedSpans | None:
    """As the environment says; None where nobody wants spans. Raises `ConfigError`."""
    processor = processor_of(os.environ if environment is None else environment)
    return None if processor is None else FinishedSpans(processor, service)
