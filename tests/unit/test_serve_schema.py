"""What the HTTP API takes and refuses, and in which words, over the ASGI application itself and without a cluster.

The application here stands before a door that is shut, so a request that is in order is answered 503: whatever gets any
other answer was decided on the request alone.
"""

from __future__ import annotations

import asyncio
import json
from contextvars import ContextVar
from typing import Any

import httpx
import pytest

from ray_moe.engine.sampling import SamplingParams
from ray_moe.errors import ConfigError, DeadlineError, NotServingError, PeerLostError, RequestError
from ray_moe.serve.api import openai_api
from ray_moe.serve.app import build
from ray_moe.serve.generation import Backend, Backends
from ray_moe.serve.problems import Problem
from ray_moe.serve.replies import ChatReply, Choice, CompletionReply, Part, Usage, event
from ray_moe.serve.schema import UNSUPPORTED_IN_CHAT, UNSUPPORTED_IN_COMPLETION, AppArgs, ChatRequest, CompletionRequest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PROMPT: dict[str, Any] = {"model": "m", "prompt": "x"}
MESSAGES: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


class ShutDoor:
    """No cluster behind it. `error` is what looking for one raises."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def find(self) -> Backend:
        raise self.error

    def knock(self) -> None:
        raise self.error


def ask(
    method: str, path: str, *, error: Exception | None = None, content: str | bytes | None = None, **request: Any
) -> httpx.Response:
    async def once() -> httpx.Response:
        api = openai_api(Backends(ShutDoor(error or NotServingError("no cluster here"))))
        # As a server does it: an error that nobody handles is answered, and not raised in the client.
        transport = httpx.ASGITransport(api, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.request(method, path, content=content, **request)

    return asyncio.run(once())


def post(path: str, body: object) -> httpx.Response:
    # Not json=: httpx refuses NaN and half a surrogate pair, and other clients send them.
    content = body if isinstance(body, str | bytes) else json.dumps(body)
    return ask("POST", path, content=content, headers={"content-type": "application/json"})


def error_in(response: httpx.Response) -> dict[str, Any]:
    """The error, which must have OpenAI's shape to the last field."""
    assert list(response.json()) == ["error"]
    error: dict[str, Any] = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    return error


# -- Request bodies


@pytest.mark.parametrize(
    ("extra", "field", "message"),
    [
        ({"model": None}, "model", "model is null; it must be a valid string"),
        ({"temperature": -0.1}, "temperature", "temperature is -0.1; it must be greater than or equal to 0"),
        ({"temperature": 2.5}, "temperature", "temperature is 2.5; it must be less than or equal to 2"),
        ({"temperature": float("nan")}, "temperature", "temperature is NaN; it must be a finite number"),
        ({"temperature": "hot"}, "temperature", 'temperature is "hot"; it must be a valid number'),
        ({"top_p": 0}, "top_p", "top_p is 0.0; it must be a number in (0, 1]"),
        ({"top_p": 1.5}, "top_p", "top_p is 1.5; it must be a number in (0, 1]"),
        ({"top_k": -1}, "top_k", "top_k is -1; it must be a 64-bit integer >= 0 (0 is off)"),
        ({"top_k": True}, "top_k", "top_k is true; it must be a valid integer"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0; it must be an integer >= 1"),
        ({"max_tokens": 1.5}, "max_tokens", "max_tokens is 1.5; it must be a valid integer"),
        ({"max_tokens": "5"}, "max_tokens", 'max_tokens is "5"; it must be a valid integer'),
        (
            {"max_tokens": 5, "max_completion_tokens": 6},
            "max_completion_tokens",
            "max_tokens is 5 and max_completion_tokens is 6; they are two names of one bound, give one of them",
        ),
        ({"seed": 2**63}, "seed", f"seed is {2**63}; it must be a 64-bit signed integer"),
        ({"stop": ""}, "stop", 'stop is ""; it must be a non-empty string or a list of at most 4 of them'),
        ({"stop": ["a", 5]}, "stop", 'stop is ["a", 5]; it must be a non-empty string or a list of at most 4 of them'),
        ({"stop": list("abcde")}, "stop", 'stop is ["a", "b", "c", "d", "e"]; it holds 5 strings; the most is 4'),
        ({"stream": "yes"}, "stream", 'stream is "yes"; it must be a valid boolean'),
        ({"stream_options": 1, "stream": True}, "stream_options", "stream_options is 1; it must be a JSON object"),
        (
            {"stream_options": {"include_usage": True}},
            "stream_options",
            "stream_options is given, but stream is not true; it needs a stream",
        ),
        ({"ignore_eos": 1}, "ignore_eos", "ignore_eos is 1; it must be a valid boolean"),
        ({"n": 9}, "n", "n is 9; it must be less than or equal to 8"),
        ({"n": True}, "n", "n is true; it must be a valid integer"),
        ({"min_p": 1.5}, "min_p", "min_p is 1.5; it must be a number in [0, 1]"),
        ({"presence_penalty": 3}, "presence_penalty", "presence_penalty is 3; it must be less than or equal to 2"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "logit_bias.5 is 101; it must be less than or equal to 100"),
        ({"logit_bias": {"a": 1}}, "logit_bias", 'logit_bias is {"a": 1}; it holds the key "a"; keys are token ids'),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format",
            "response_format.type is json_schema; json_schema is given with json_schema only",
        ),
    ],
)
@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)])
def test_a_value_out_of_bounds_is_400_and_names_field_value_and_bound(
    path: str, body: dict[str, Any], extra: dict[str, Any], field: str, message: str
) -> None:
    response = post(path, body | extra)
    expected = {"message": message, "type": "invalid_request_error", "param": field, "code": None}
    assert (response.status_code, error_in(response)) == (400, expected)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (["a"] * 65, "it holds 65 prompts; the most is 64"),
        ([1, "a"], 'prompt is [1, "a"]; it must be a string, a list of integer token ids, or a list of either'),
        ([True], "prompt is [true]; it must be a string, a list of integer token ids, or a list of either"),
        (5, "prompt is 5; it must be a string, a list of integer token ids, or a list of either"),
        (None, "prompt is null; it must be a string, a list of integer token ids, or a list of either"),
        ("\ud800", 'prompt is "\\ud800"; it must be Unicode text, and has half a surrogate pair at 0'),
    ],
)
def test_a_prompt_of_another_form_is_400(prompt: object, message: str) -> None:
    response = post(COMPLETIONS, {"model": "m", "prompt": prompt})
    assert response.status_code == 400
    assert error_in(response)["message"].endswith(message)
    assert error_in(response)["param"] == "prompt"


@pytest.mark.parametrize(
    ("messages", "field", "message"),
    [
        ([], "messages", "messages is []; it must have at least 1 item"),
        ("hi", "messages", 'messages is "hi"; it must be a valid list'),
        (["hi"], "messages[0]", 'messages[0] is "hi"; it must be a JSON object'),
        ([{"role": "user"}], "messages[0]", "content is required"),
        ([{"role": "user", "content": 5}], "messages[0].content", "it must be a string or a list of text parts"),
        ([{"content": "hi"}], "messages[0].role", "messages[0].role is required"),
        ([{"role": "wizard", "content": "hi"}], "messages[0].role", 'messages[0].role is "wizard"; it must be'),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content",
            'only {"type": "text", "text": "..."} is supported',
        ),
        (
            [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}],
            "messages[1].tool_calls[0].function",
            "messages[1].tool_calls[0].function is required",
        ),
        ([{"role": "assistant", "function_call": {}, "content": ""}], "messages[0]", "function_call is not supported"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages[0]", "belong to an assistant's message"),
        ([{"role": "tool", "content": "x"}], "messages[0]", "tool_call_id is required in a tool's message"),
    ],
)
def test_messages_of_another_form_are_400_and_name_the_place(messages: object, field: str, message: str) -> None:
    response = post(CHAT, {"model": "m", "messages": messages})
    assert response.status_code == 400
    assert message in error_in(response)["message"]
    assert error_in(response)["param"] == field


@pytest.mark.parametrize(
    ("path", "body", "field", "value"),
    [
        *((COMPLETIONS, PROMPT, field, value) for field, value in [("best_of", 2), ("best_of", True), ("suffix", "z")]),
        *(
            (CHAT, MESSAGES, field, value)
            for field, value in [
                ("best_of", 2),
                ("functions", [{}]),
                ("function_call", {"name": "f"}),
                ("modalities", ["text", "audio"]),
                ("audio", {}),
                ("prediction", {}),
                ("moderation", {}),
                ("reasoning_effort", "high"),
                ("verbosity", "low"),
                ("store", True),
                ("web_search_options", {}),
            ]
        ),
    ],
)
def test_a_known_parameter_that_is_not_supported_is_400_by_name(
    path: str, body: dict[str, Any], field: str, value: object
) -> None:
    response = post(path, body | {field: value})
    assert response.status_code == 400
    assert error_in(response)["message"].startswith(f"{field} is {json.dumps(value)}; this server supports only ")
    assert error_in(response)["param"] == field


@pytest.mark.parametrize(
    ("path", "body", "unsupported"),
    [(COMPLETIONS, PROMPT, UNSUPPORTED_IN_COMPLETION), (CHAT, MESSAGES, UNSUPPORTED_IN_CHAT)],
)
def test_an_unsupported_parameter_may_hold_its_default(
    path: str, body: dict[str, Any], unsupported: dict[str, tuple[object, ...]]
) -> None:
    for extra in [
        {name: default for name, defaults in unsupported.items() for default in defaults},
        dict.fromkeys(unsupported),
    ]:
        assert post(path, body | extra).status_code == 503


@pytest.mark.parametrize(
    "extra",
    [
        {"some_extension": {"deep": [1]}, "metadata": {"a": "b"}, "service_tier": "auto", "user": "me"},
        dict.fromkeys(
            ["max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream", "stream_options", "ignore_eos"]
        ),
        {"temperature": 1, "top_p": 1, "stop": ["a"], "max_tokens": 5, "max_completion_tokens": 5},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
    ],
)
def test_unknown_fields_nulls_and_whole_numbers_are_in_order(extra: dict[str, Any]) -> None:
    assert post(COMPLETIONS, PROMPT | extra).status_code == 503
    assert post(CHAT, MESSAGES | extra).status_code == 503


def test_every_form_of_a_prompt_arrives_as_text_or_token_ids() -> None:
    def prompt_of(form: object) -> object:
        return CompletionRequest.model_validate({"model": "m", "prompt": form}).prompt

    assert prompt_of("a") == prompt_of(["a"]) == ["a"]
    assert prompt_of([1, 2]) == prompt_of([[1, 2]]) == [[1, 2]]
    assert prompt_of(["a", [1]]) == ["a", [1]]
    assert prompt_of([]) == [[]]


def test_text_parts_are_joined_and_names_reach_the_template() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "name": "me", "content": parts}]})
    assert request.messages[0].for_template() == {"role": "user", "name": "me", "content": "ab"}


def test_the_engine_gets_what_was_asked_and_its_own_defaults_for_the_rest() -> None:
    bare = CompletionRequest.model_validate(PROMPT)
    assert bare.sampling(16) == SamplingParams(max_tokens=16)
    asked = {"temperature": 0, "top_p": 0.5, "top_k": 3, "seed": -1, "ignore_eos": True, "min_p": 0.1}
    asked |= {"presence_penalty": 0.5, "frequency_penalty": -1.5, "logprobs": 3}
    given = {**PROMPT, **asked, "stop": "a", "max_completion_tokens": 7, "logit_bias": {"5": -100, "7": 0.5}}
    full = CompletionRequest.model_validate(given)
    assert full.sampling(16) == SamplingParams(**asked, stop=("a",), max_tokens=7, logit_bias=((5, -100.0), (7, 0.5)))
    assert bare.sampling(16, 'start: "x"').grammar == 'start: "x"'
    chat = ChatRequest.model_validate({**MESSAGES, "logprobs": True})
    assert chat.sampling(16).logprobs == 0
    assert ChatRequest.model_validate({**MESSAGES, "logprobs": True, "top_logprobs": 4}).sampling(16).logprobs == 4
    assert ChatRequest.model_validate({**MESSAGES, "logprobs": False}).sampling(16).logprobs is None


# -- The other ways to go wrong


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "the request body is not JSON: Expecting property name enclosed in double quotes at character 1"),
        ("", "the request body is required"),
        ("[]", "the request body is []; it must be a JSON object"),
        ("{}", "model is required. prompt is required"),
        (b'{"prompt": "\xff"}', "the request body cannot be read; it must be JSON in UTF-8, of reasonable depth"),
        ("[" * 100_000, "the request body cannot be read; it must be JSON in UTF-8, of reasonable depth"),
    ],
)
def test_a_body_that_is_no_json_object_is_400(content: str | bytes, message: str) -> None:
    response = post(COMPLETIONS, content)
    assert (response.status_code, error_in(response)["message"]) == (400, message)


@pytest.mark.parametrize("depth", range(900, 1000, 7))
def test_a_prompt_nested_as_deeply_as_json_reads_is_still_400(depth: int) -> None:
    response = post(COMPLETIONS, f'{{"model": "m", "prompt": {"[" * depth}{"]" * depth}}}')
    assert response.status_code == 400
    assert error_in(response)["type"] == "invalid_request_error"


def test_another_content_type_is_415_and_no_content_type_is_taken_for_json() -> None:
    body = json.dumps(PROMPT)
    response = ask("POST", COMPLETIONS, content=body, headers={"content-type": "application/x-www-form-urlencoded"})
    assert response.status_code == 415
    assert error_in(response)["message"] == (
        "Content-Type is 'application/x-www-form-urlencoded'; it must be application/json"
    )
    assert ask("POST", COMPLETIONS, content=body).status_code == 503


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/engines", "/v1/completions/x"])
def test_an_unknown_route_is_404(path: str) -> None:
    response = ask("GET", path)
    assert response.status_code == 404
    assert error_in(response) == {
        "message": f"Invalid URL (GET {path})",
        "type": "invalid_request_error",
        "param": None,
        "code": "not_found",
    }


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", COMPLETIONS, "POST"), ("PUT", CHAT, "POST"), ("DELETE", "/v1/models", "GET")],
)
def test_a_wrong_method_is_405_and_says_which_is_right(method: str, path: str, allowed: str) -> None:
    response = ask(method, path)
    assert (response.status_code, response.headers["allow"]) == (405, allowed)
    assert error_in(response)["message"] == f"{method} {path} is not allowed; {allowed} is"
    assert error_in(response)["code"] == "method_not_supported"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (NotServingError("no cluster here"), 503, "not_serving"),
        (PeerLostError("rank 1 died", 1, 2, 3), 503, "peer_lost"),
        (DeadlineError("looking up the cluster", 60), 504, "deadline_exceeded"),
        (ConfigError("no tokenizer"), 503, "not_serving"),  # the cluster's configuration, not the request
    ],
)
@pytest.mark.parametrize("path", ["/ready", "/v1/models", "/v1/models/m"])
def test_a_cluster_that_cannot_serve_is_5xx_and_says_why(path: str, error: Exception, status: int, code: str) -> None:
    response = ask("GET", path, error=error)
    assert response.status_code == status
    assert error_in(response)["type"] == "server_error"
    assert error_in(response)["code"] == code
    assert str(error) in error_in(response)["message"]


def test_an_error_that_nobody_foresaw_is_500_in_the_same_shape_and_tells_nothing() -> None:
    response = ask("GET", "/ready", error=RuntimeError("secret"))
    assert response.status_code == 500
    assert error_in(response) == {
        "message": "internal error (RuntimeError)",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }


def test_a_request_error_keeps_its_parameter() -> None:
    problem = Problem.of(RequestError("the prompt has 0 tokens", "prompt"))
    assert (problem.status, problem.param, problem.message) == (400, "prompt", "the prompt has 0 tokens")


def test_a_cluster_is_looked_up_again_after_a_lookup_that_failed() -> None:
    async def look_twice() -> None:
        door = ShutDoor(NotServingError("first"))
        backends = Backends(door)
        with pytest.raises(NotServingError, match="first"):
            await backends.current()
        door.error = PeerLostError("second", 0, 0, 0)
        with pytest.raises(PeerLostError, match="second"):
            await backends.current()

    asyncio.run(look_twice())


def test_what_outlives_a_request_does_not_run_in_its_name() -> None:
    # Ray keeps the running request in a context variable, and cancels with it every call that was made under it.
    running_request: ContextVar[str] = ContextVar("running_request", default="nobody")

    async def in_whose_name() -> str:
        return running_request.get()

    async def serve_one() -> str:
        running_request.set("a request")
        return await Backends(ShutDoor(NotServingError("no cluster here"))).spawn(in_whose_name())

    assert asyncio.run(serve_one()) == "nobody"


# -- Arguments of the Serve application


def test_the_serve_application_has_defaults_and_refuses_other_arguments() -> None:
    assert AppArgs.parse({}) == AppArgs(cluster="default", model_name=None)
    with pytest.raises(ConfigError, match=r"build: clutser: no such field \(value 'x'\), did you mean cluster\?"):
        build({"clutser": "x"})
    with pytest.raises(ConfigError, match="cluster: found 5, input should be a valid string"):
        build({"cluster": 5})
    with pytest.raises(ConfigError, match=r"no API key .*; set no_auth"):
        build({})


# -- Answers


def test_the_two_apis_word_one_answer_alike() -> None:
    usage = Usage(3, 2)
    counts = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    for kind, prefix in ((CompletionReply, "cmpl-"), (ChatReply, "chatcmpl-")):
        reply = kind.begin("m", "release-1")
        assert reply.request_id.startswith(prefix)
        whole = reply.whole([Choice("t", finish_reason="stop")], usage)
        documents = [whole, reply.chunk(Part(0, "t")), reply.closing(usage)]
        for document in documents:
            assert document["id"] == reply.request_id
            assert (document["model"], document["system_fingerprint"]) == ("m", "release-1")
        assert documents[0]["usage"] == documents[2]["usage"] == counts
        assert documents[2]["choices"] == []


def test_an_event_is_one_line_whatever_the_text() -> None:
    encoded = event({"text": "a\nb\r\n\u2028 é"})
    assert encoded.count(b"\n") == 2
    assert encoded.endswith(b"\n\n")
    assert json.loads(encoded.removeprefix(b"data: ")) == {"text": "a\nb\r\n\u2028 é"}
