"""Spans: where they go by the environment alone, and what those of a request say."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ray_moe.errors import ConfigError, NotServingError
from ray_moe.serve.api import openai_api
from ray_moe.serve.generation import Backend, Backends
from ray_moe.telemetry import (
    FinishedSpans,
    TracedRequests,
    Untraced,
    exporter_named,
    finished_spans_of,
    processor_of,
    requests_of,
)

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.mark.parametrize(
    ("environment", "exporter"),
    [
        ({}, None),
        ({"OTEL_SERVICE_NAME": "x"}, None),
        ({ENDPOINT: "http://collector:4318"}, "otlp_proto_http"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector/v1/traces"}, "otlp_proto_http"),
        ({ENDPOINT: "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "otlp_proto_grpc"),
        (
            {
                ENDPOINT: "http://c:4318",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            },
            "otlp_proto_http",
        ),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "otlp_proto_http"),
        ({"OTEL_TRACES_EXPORTER": "console"}, "console"),
        ({ENDPOINT: "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, None),
        ({ENDPOINT: "http://c:4318", "OTEL_SDK_DISABLED": "TRUE"}, None),
    ],
)
def test_the_standard_variables_say_where_spans_go(environment: dict[str, str], exporter: str | None) -> None:
    assert exporter_named(environment) == exporter


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({ENDPOINT: "http://c", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "found 'http/json'"),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "no package here brings the OpenTelemetry exporter 'zipkin'"),
        ({ENDPOINT: "http://c", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "exporter 'otlp_proto_grpc'"),
    ],
)
def test_what_cannot_be_exported_to_is_refused_by_name(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        processor_of(environment)


def test_without_variables_nothing_is_made() -> None:
    assert isinstance(requests_of({}), Untraced)
    assert finished_spans_of("x", {}) is None


class Receiver:
    """An OTLP collector on this machine: what it was sent, parsed by the protocol's own messages."""

    def __init__(self) -> None:
        received: list[tuple[str, ExportTraceServiceRequest]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                received.append((self.path, ExportTraceServiceRequest.FromString(body)))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """The test says what it saw."""

        self.received, self.server = received, HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    made.thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_an_otlp_collector_gets_the_spans_with_the_service_they_are_of(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{receiver.server.server_port}")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    spans = finished_spans_of("ray_moe.expert")
    assert spans is not None
    inside = spans.add("step 3", 1_000, 9_000, {"ray_moe.step": 3}, ids=(7, 5))
    spans.add("experts", 2_000, 4_000, {"ray_moe.layer": 1}, inside)
    spans.close()
    ((path, sent),) = receiver.received
    assert path == "/v1/traces"
    (resource,) = sent.resource_spans
    about = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert (about["service.name"], about["deployment.environment"]) == ("ray_moe.expert", "test")
    step, experts = resource.scope_spans[0].spans
    assert (step.name, step.start_time_unix_nano, step.end_time_unix_nano) == ("step 3", 1_000, 9_000)
    assert (int.from_bytes(step.trace_id, "big"), int.from_bytes(step.span_id, "big")) == (7, 5)
    assert (experts.trace_id, experts.parent_span_id) == (step.trace_id, step.span_id)
    assert experts.span_id != step.span_id


def test_a_service_that_was_named_keeps_its_name(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"http://127.0.0.1:{receiver.server.server_port}/mine")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "llm-gateway")
    spans = finished_spans_of("ray_moe.expert")
    assert spans is not None
    spans.add("step 1", 1, 2, {})
    spans.close()
    ((path, sent),) = receiver.received
    assert path == "/mine"
    about = {one.key: one.value.string_value for one in sent.resource_spans[0].resource.attributes}
    assert about["service.name"] == "llm-gateway"


def test_spans_of_another_process_are_inside_the_same_one() -> None:
    memory = InMemorySpanExporter()
    spans = FinishedSpans(SimpleSpanProcessor(memory), "x")
    spans.add("rank 1", 1, 2, {}, spans.inside(7, 5))
    (found,) = memory.get_finished_spans()
    assert (found.context.trace_id, found.parent.span_id, found.parent.is_remote) == (7, 5, True)


class ShutDoor:
    """A cluster that does not serve."""

    def find(self) -> Backend:
        raise NotServingError("no cluster here")

    def knock(self) -> None:
        raise NotServingError("no cluster here")


def asked(requests: TracedRequests | Untraced, **headers: str) -> httpx.Response:
    api = openai_api(Backends(ShutDoor()), requests=requests)

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://here") as client:
            await client.get("/health")
            body = {"model": "m", "prompt": "a secret"}
            return await client.post("/v1/completions", json=body, headers=headers)

    return asyncio.run(ask())


def test_a_request_that_fails_says_where_and_nothing_of_what_it_asked() -> None:
    memory = InMemorySpanExporter()
    caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    answer = asked(TracedRequests(SimpleSpanProcessor(memory)), traceparent=caller, authorization="Bearer sk-1")
    assert answer.status_code == 503
    receive, prepare, root = memory.get_finished_spans()
    assert (receive.name, prepare.name, root.name) == ("receive", "prepare", "POST /v1/completions")
    assert f"{root.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert dict(root.attributes) == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "gen_ai.operation.name": "text_completion",
        "http.response.status_code": 503,
        "error.type": "503",
    }
    assert not root.status.is_ok
    assert answer.headers["traceparent"] == f"00-{root.context.trace_id:032x}-{root.context.span_id:016x}-01"
    for span in memory.get_finished_spans():
        assert "secret" not in span.to_json()
        assert "sk-1" not in span.to_json()


def test_what_a_caller_does_not_want_sampled_is_not() -> None:
    memory = InMemorySpanExporter()
    caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
    answer = asked(TracedRequests(SimpleSpanProcessor(memory)), traceparent=caller)
    assert memory.get_finished_spans() == ()
    assert answer.headers["traceparent"].endswith("-00")


def test_untraced_requests_are_answered_without_a_trace() -> None:
    assert "traceparent" not in asked(Untraced()).headers
