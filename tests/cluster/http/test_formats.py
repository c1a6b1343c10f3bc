"""Output in a given format, and calls of tools, through OpenAI's own client. A schema's own validator is the oracle."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.cluster.http.server import CHAT, COMPLETIONS, MESSAGES, MODEL, PROMPT, Server, error_in
from tests.schemas import random_schema

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather somewhere",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
BODY: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 300, "seed": 1}


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Literal["Hamlet", "Horatio"]
    age: Literal[17, 30]
    friends: Annotated[list[Literal["Ros", "Guil"]], Field(max_length=2)]


def test_json_mode_gives_an_object(server: Server) -> None:
    body = BODY | {"response_format": {"type": "json_object"}, "temperature": 0.2, "max_tokens": 600}
    for seed in range(20):  # an object of free texts need not end in time; one that did must be whole
        choice = server.openai.chat.completions.create(**(body | {"seed": seed})).choices[0]
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content or ""), dict)
            return
    pytest.fail("no object ended within its tokens")


def test_openais_client_parses_an_answer_into_a_model(server: Server) -> None:
    answer = server.openai.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Person, seed=4, max_tokens=300
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_a_streamed_answer_in_a_format_is_the_whole_one_in_pieces_and_so_is_each_choice(server: Server) -> None:
    schema = {"name": "s", "schema": Person.model_json_schema(), "strict": True}
    body = BODY | {"response_format": {"type": "json_schema", "json_schema": schema}, "n": 3}
    whole = server.openai.chat.completions.create(**body)
    texts = ["", "", ""]
    for chunk in server.openai.chat.completions.create(**body, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert all(Person.model_validate_json(text) for text in texts)


def test_a_completion_takes_a_format_too(server: Server) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 100, "seed": 2}
    schema = {"schema": {"enum": ["to be", "not to be"]}}
    answer = server.post(COMPLETIONS, body | {"response_format": {"type": "json_schema", "json_schema": schema}}).json()
    assert json.loads(answer["choices"][0]["text"]) in ("to be", "not to be")
    assert answer["choices"][0]["finish_reason"] == "stop"


def _is_valid_on_the_first_pass(server: Server, number: int) -> None:
    schema = random_schema(random.Random(number))
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1500, "seed": number}
    format_ = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    answer = server.post(CHAT, body | {"response_format": format_}).json()
    assert answer["choices"][0]["finish_reason"] == "stop", (schema, answer)
    jsonschema.validate(json.loads(answer["choices"][0]["message"]["content"]), schema)


def test_output_is_valid_on_the_first_pass_for_ten_random_schemas(server: Server) -> None:
    with ThreadPoolExecutor(10) as pool:
        list(pool.map(lambda number: _is_valid_on_the_first_pass(server, number), range(10)))


@pytest.mark.full
def test_output_is_valid_on_the_first_pass_for_200_random_schemas(server: Server) -> None:
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda number: _is_valid_on_the_first_pass(server, number), range(10, 210)))


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "wizard"}, "Invalid type: wizard"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"$ref": "http://127.0.0.1:1/s.json"}, "not present in a registry"),
        ({"type": "object", "unevaluatedProperties": False}, "Unimplemented keys"),
        ({"enum": []}, "Unsatisfiable schema"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_400_and_says_why(server: Server, schema: Any, why: str) -> None:
    format_ = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    answer = server.post(CHAT, BODY | {"response_format": format_, "stream": True})
    assert answer.status_code == 400
    assert why in error_in(answer)["message"]
    assert error_in(answer)["param"] == "response_format"


# -- Tools


def test_a_demanded_tool_is_called_with_arguments_of_its_schema(server: Server) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        answer = server.openai.chat.completions.create(
            **BODY, tools=[WEATHER, CLOCK], tool_choice=choice, parallel_tool_calls=False
        ).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert answer.message.content is None
        (call,) = answer.message.tool_calls or []
        assert call.type == "function" and call.id.startswith("call_")
        arguments = json.loads(call.function.arguments)
        if call.function.name == "weather":
            jsonschema.validate(arguments, WEATHER["function"]["parameters"])
        else:
            assert (choice, arguments) == ("required", {})


def test_streamed_calls_add_up_to_the_whole_ones(server: Server) -> None:
    body = BODY | {"tools": [WEATHER, CLOCK], "tool_choice": "required", "seed": 9}
    whole = server.openai.chat.completions.create(**body).choices[0]
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    reason = None
    for chunk in server.openai.chat.completions.create(**body, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or []:
            assert delta.function is not None
            names.setdefault(delta.index, delta.function.name or "?")
            arguments[delta.index] = arguments.get(delta.index, "") + (delta.function.arguments or "")
        reason = chunk.choices[0].finish_reason or reason
    calls = whole.message.tool_calls or []
    assert len(calls) >= 1
    assert [names[place] for place in sorted(names)] == [call.function.name for call in calls]  # type: ignore[union-attr]
    assert [arguments[place] for place in sorted(names)] == [call.function.arguments for call in calls]  # type: ignore[union-attr]
    assert reason == whole.finish_reason == "tool_calls"


def test_offered_tools_leave_text_as_it_is_and_their_answers_go_through_the_template(server: Server) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    messages: Any = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "midnight"},
    ]
    body: dict[str, Any] = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 12}
    answer = server.openai.chat.completions.create(**body, tools=[CLOCK])
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None
    none = server.openai.chat.completions.create(**body, tools=[CLOCK], tool_choice="none")
    assert none.usage is not None and answer.usage is not None
    assert none.usage.prompt_tokens < answer.usage.prompt_tokens  # it was not offered


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [CLOCK, CLOCK]}, "tools"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "no blanks"}}]}, "tools[0].function.name"),
        ({"ignore_eos": True, "response_format": {"type": "json_object"}}, "ignore_eos"),
    ],
)
def test_tools_and_formats_that_contradict_themselves_are_400(server: Server, changes: Any, param: str) -> None:
    answer = server.post(CHAT, BODY | changes)
    assert answer.status_code == 400
    assert error_in(answer)["param"] == param
