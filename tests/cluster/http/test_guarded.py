"""A second application before the same cluster, with keys, an admin token and tight limits: who is let in, with what.

And schemathesis over its OpenAPI document: whatever it sends, the answer is one that the document tells of.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from ray import serve
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from ray_moe.serve import app
from ray_moe.serve.api import Limits, openai_api
from ray_moe.serve.generation import Backends, ClusterDoor
from ray_moe.serve.keys import digest_of
from tests.cluster.http.server import COMPLETIONS, ENDLESS, GREEDY, MODEL, NAME, Server, error_in, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

KEY, ADMIN = "key-of-the-tests-0001", "admin-of-the-tests-01"
LIMITS: dict[str, Any] = {"max_concurrent": 2, "max_queued": 1, "max_body_bytes": 4096}
LIMITS |= {"max_prompt_tokens": 64, "max_tokens": 1500, "request_timeout_s": 20.0}


@pytest.fixture(scope="module")
def guarded(server: Server) -> Iterator[Server]:
    keys = {"api_key_digests": [digest_of(KEY)], "admin_token_digests": [digest_of(ADMIN)]}
    serve.run(app.build({"cluster": NAME, **keys, **LIMITS}), name=f"ray_moe.{NAME}.guarded", route_prefix="/guarded")
    try:
        yield replace(server, url=f"{server.url}/guarded")
    finally:
        serve.delete(f"ray_moe.{NAME}.guarded")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def post(server: Server, body: dict[str, Any], path: str = COMPLETIONS, key: str = KEY) -> httpx.Response:
    return httpx.post(server.url + path, json=body, headers=bearer(key), timeout=60, trust_env=False)


# -- Keys


def test_only_who_has_a_key_generates_and_health_is_for_everybody(guarded: Server) -> None:
    refused = [guarded.post(COMPLETIONS, GREEDY)]
    refused += [post(guarded, GREEDY, key=key) for key in ("another-key-of-somebody", ADMIN)]
    assert [answer.status_code for answer in refused] == [401, 401, 401]
    assert {error_in(answer)["code"] for answer in refused} == {"invalid_api_key"}
    assert all(answer.headers["www-authenticate"] == "Bearer" for answer in refused)
    assert post(guarded, GREEDY).status_code == 200
    assert [guarded.get(path).status_code for path in ("/health", "/ready", "/openapi.json")] == [200, 200, 200]


def test_openais_client_with_the_key_works_and_without_it_raises_its_own_error(guarded: Server) -> None:
    good = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=KEY, max_retries=0)
    assert good.completions.create(**GREEDY).choices[0].text
    bad = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="x" * 20, max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        bad.completions.create(**GREEDY)


def test_metrics_count_what_was_answered_and_want_a_key(guarded: Server) -> None:
    before = guarded.metric("ray_moe_http_completion_tokens_total", **bearer(ADMIN))
    delivered = post(guarded, GREEDY).json()["usage"]["completion_tokens"]
    assert guarded.metric("ray_moe_http_completion_tokens_total", **bearer(KEY)) == before + delivered
    assert 'route="/v1/completions",status="200"' in guarded.get("/metrics", **bearer(KEY)).text
    assert guarded.get("/metrics").status_code == 401


# -- Limits


def test_a_body_a_prompt_or_an_answer_that_is_too_large_is_refused(guarded: Server) -> None:
    large = post(guarded, GREEDY | {"prompt": "x" * 5000})
    assert (large.status_code, error_in(large)["code"]) == (413, "body_too_large")
    chunked = httpx.post(
        guarded.url + COMPLETIONS, content=(b"x" * 1000 for _ in range(9)), headers=bearer(KEY), trust_env=False
    )
    assert chunked.status_code == 413
    prompt = post(guarded, GREEDY | {"prompt": [5] * 65})
    assert error_in(prompt)["message"] == "the prompt has 65 tokens; this server takes 64"
    tokens = post(guarded, GREEDY | {"max_tokens": 1501})
    assert error_in(tokens)["message"] == "max_tokens is 1501; this server generates at most 1500"
    assert (prompt.status_code, tokens.status_code) == (400, 400)


def test_more_than_runs_and_waits_is_429_with_a_time_to_try_again(guarded: Server) -> None:
    endless = ENDLESS | {"max_tokens": 1500, "stream": True}
    with (
        httpx.Client(headers=bearer(KEY), timeout=60, trust_env=False) as client,
        client.stream("POST", guarded.url + COMPLETIONS, json=endless) as first,
        client.stream("POST", guarded.url + COMPLETIONS, json=endless) as second,
        ThreadPoolExecutor(1) as pool,
    ):
        assert (first.status_code, second.status_code) == (200, 200)
        waiting = pool.submit(post, guarded, GREEDY | {"max_tokens": 2})
        wait_until(lambda: guarded.metric("ray_moe_http_queued", **bearer(KEY)) == 1)
        refused = post(guarded, GREEDY)
        assert (refused.status_code, error_in(refused)["code"]) == (429, "overloaded")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        first.close()
        assert waiting.result(timeout=60).status_code == 200
    assert post(guarded, GREEDY | {"n": 3}).status_code == 400  # never more than two at a time
    wait_until(lambda: guarded.kv_blocks_used() == 0)


def test_an_answer_that_takes_longer_than_it_may_is_504_and_its_cache_is_free(server: Server) -> None:
    # The application in this process, over the same cluster: Serve takes seconds for one of its own.
    hurried = openai_api(Backends(ClusterDoor(NAME)), limits=Limits(request_timeout_s=0.5))

    async def ask() -> tuple[httpx.Response, httpx.Response]:
        transport = httpx.ASGITransport(hurried, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://here", timeout=60) as client:
            await client.get("/ready")
            whole = await client.post(COMPLETIONS, json=ENDLESS)
            return whole, await client.post(COMPLETIONS, json={**ENDLESS, "stream": True})

    whole, streamed = asyncio.run(ask())
    assert (whole.status_code, error_in(whole)["code"]) == (504, "deadline_exceeded")
    last = streamed.text.rstrip().rpartition("data: ")[2]
    assert json.loads(last)["error"]["code"] == "deadline_exceeded"
    wait_until(lambda: server.kv_blocks_used() == 0)


# -- Request ids


def test_a_request_id_comes_back_once_and_one_that_is_none_is_refused(guarded: Server) -> None:
    answer = guarded.get("/health", **{"x-request-id": "mine-1"})
    assert answer.headers.get_list("x-request-id") == ["mine-1"]
    assert len(guarded.get("/health").headers.get_list("x-request-id")) == 1
    assert guarded.get("/health", **{"x-request-id": "x" * 129}).status_code == 400


# -- The admin routes


def admin(server: Server, method: str, path: str, body: Any = None, key: str = ADMIN) -> httpx.Response:
    url = f"{server.url}/admin{path}"
    return httpx.request(method, url, json=body, headers=bearer(key), timeout=90, trust_env=False)


def test_admin_routes_want_their_own_token_and_are_off_without_one(server: Server, guarded: Server) -> None:
    assert admin(guarded, "GET", "/status", key=KEY).status_code == 401
    off = admin(server, "GET", "/status")
    assert (off.status_code, error_in(off)["code"]) == (403, "admin_disabled")


def test_admin_status_and_placement_are_the_clusters_own(guarded: Server) -> None:
    status, placement = admin(guarded, "GET", "/status").json(), admin(guarded, "GET", "/placement").json()
    found = guarded.cluster.status()
    assert (status["name"], len(status["peers"])) == (NAME, 2)
    assert placement["generation"] == found.generation
    assert len(placement["slots"]) == len(found.slots)


def test_an_operation_is_asked_for_followed_and_shown(guarded: Server) -> None:
    preview = admin(guarded, "POST", "/preview", {"replicas": []})
    assert preview.status_code == 200
    home = [{"layer": layer, "expert": e, "rank": e % 2} for layer in range(4) for e in range(16)]
    asked = admin(guarded, "POST", "/rebalance", {"homes": home, "why": "the test"})
    assert asked.status_code == 202
    number = asked.json()["operation"]
    wait_until(lambda: admin(guarded, "GET", f"/operations/{number}").json()["ended_at"] > 0, seconds=60)
    row = admin(guarded, "GET", f"/operations/{number}").json()
    assert (row["why"], row["kind"]) == ("the test", "rebalance")
    assert row in admin(guarded, "GET", "/operations").json()["operations"]
    assert post(guarded, GREEDY).status_code == 200


def test_scaling_to_what_there_is_asks_for_nothing(guarded: Server) -> None:
    answer = admin(guarded, "POST", "/scale", {"peers": 2})
    assert (answer.status_code, answer.json()) == (202, {"operation": None})


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("POST", "/scale", {"peers": 0}, 400, "peers is 0"),
        ("POST", "/scale", {"peers": 2, "force": True}, 400, "force"),
        ("POST", "/drain", {"ranks": [7]}, 400, "7"),
        ("POST", "/rebalance", {"replicas": [{"layer": 9, "expert": 0, "count": 2}]}, 400, "layer is 9"),
        ("POST", "/rebalance", {"homes": [{"layer": 0, "expert": 0, "rank": 5}]}, 400, "rank is 5"),
        ("GET", "/operations/999", None, 409, "999"),
        ("GET", "/operations/x", None, 400, "it must be a valid integer"),
        ("POST", "/operations/999/cancel", {}, 409, "999"),
    ],
)
def test_what_the_cluster_cannot_do_is_refused_in_its_own_words(
    guarded: Server, method: str, path: str, body: Any, status: int, message: str
) -> None:
    answer = admin(guarded, method, path, body)
    assert answer.status_code == status
    assert message in error_in(answer)["message"]


# -- The OpenAPI document


CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


# Not what would change the cluster.
FUZZED = r"^/(v1|health|ready|metrics|admin/(status|placement|operations|preview))"


def fuzz(server: Server, cases: int) -> int:
    """Send so many cases to each operation that generates or tells; returns how many were sent."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    sent = 0

    def send(case: Any) -> None:
        nonlocal sent
        sent += 1
        if isinstance(case.body, dict) and sent % 4:  # what is made up is no model of this server
            case.body["model"] = MODEL
            if "max_completion_tokens" not in case.body:
                case.body.setdefault("max_tokens", 8)
        key = ADMIN if case.path.startswith("/admin") else KEY
        case.call_and_validate(base_url=server.url, headers=bearer(key), timeout=30, checks=CHECKS)

    bounded = settings(
        max_examples=cases, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    for found in schema.include(path_regex=FUZZED).get_all_operations():
        operation = found.ok()
        bounded(given(case=operation.as_strategy())(send))()
    return sent


def test_fuzzed_requests_get_documented_answers(guarded: Server) -> None:
    assert fuzz(guarded, 12) > 80
    assert post(guarded, GREEDY).status_code == 200
    wait_until(lambda: guarded.kv_blocks_used() == 0)


@pytest.mark.full
def test_many_fuzzed_requests_get_documented_answers(guarded: Server) -> None:
    assert fuzz(guarded, 300) > 2000
    wait_until(lambda: guarded.kv_blocks_used() == 0)
