"""What the HTTP API takes: OpenAI's request bodies for completions and chat, and the arguments of the Serve app.

This is an edge: pydantic checks types here, `SamplingParams` and the engine check the bounds that they own, and every
refusal is one sentence that names the field, the value and the bound. Fields that OpenAI documents and this server
cannot honour are refused unless they hold their default; fields that nobody documents are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ray_moe.engine.sampling import SamplingParams
from ray_moe.errors import RequestError
from ray_moe.manifest import Manifest

MAX_STOP_STRINGS = 4

# Field -> the values that ask for nothing. None always is one.
_UNSUPPORTED_IN_BOTH: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "logprobs": (False, 0),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
}
UNSUPPORTED_IN_COMPLETION = {**_UNSUPPORTED_IN_BOTH, "best_of": (1,), "echo": (False,), "suffix": ("",)}
UNSUPPORTED_IN_CHAT = {
    **_UNSUPPORTED_IN_BOTH,
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "store": (False,),
    "web_search_options": (),
}
_UNSUPPORTED_IN_MESSAGE: dict[str, tuple[object, ...]] = {"tool_calls": ([],), "function_call": (), "audio": ()}


class AppArgs(Manifest):
    """Arguments of the Serve application, as in a Serve configuration file."""

    cluster: Annotated[str, Field(min_length=1)] = "default"
    model_name: Annotated[str, Field(min_length=1)] | None = None


# -- Fields whose wire form is a union. A validator of our own words the refusal: pydantic's would list every branch.


def _text(given: object) -> object:
    """JSON can hold half of a surrogate pair, which is no text: no tokenizer takes it."""
    if isinstance(given, str):
        try:
            given.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"it must be Unicode text, and has half a surrogate pair at {error.start}") from error
    return given


def _one_prompt(given: object) -> object:
    if isinstance(given, list) and given and isinstance(given[0], str | list):
        if len(given) > 1:
            raise ValueError(f"it holds {len(given)} prompts; one request takes 1")
        given = given[0]
    if isinstance(given, str):
        return _text(given)
    if isinstance(given, list) and all(type(token) is int for token in given):
        return given
    raise ValueError("it must be a string, a list of one string, or a list of integer token ids")


def _stop_list(given: object) -> object:
    stops = [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise ValueError(f"it must be a non-empty string or a list of at most {MAX_STOP_STRINGS} of them")
    if len(stops) > MAX_STOP_STRINGS:
        raise ValueError(f"it holds {len(stops)} strings; the most is {MAX_STOP_STRINGS}")
    return [_text(text) for text in stops]


def _flat_content(given: object) -> object:
    if isinstance(given, str):
        return _text(given)
    if not isinstance(given, list):
        raise ValueError("it must be a string or a list of text parts")
    for part in given:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f'it holds the part {short(part)}; only {{"type": "text", "text": "..."}} is supported')
    return "".join(str(_text(part["text"])) for part in given)


_Text = Annotated[str, BeforeValidator(_text)]
_Prompt = Annotated[
    str | list[int], BeforeValidator(_one_prompt, json_schema_input_type=str | list[str] | list[int] | list[list[int]])
]
_Stop = Annotated[list[str], BeforeValidator(_stop_list, json_schema_input_type=str | list[str])]
_Content = Annotated[str, BeforeValidator(_flat_content, json_schema_input_type=str | list[dict[str, Any]])]


# -- Request bodies


class _Body(BaseModel):
    """Part of a request: values are not converted, unknown fields are kept for `_refuse` to look at."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)


class StreamOptions(_Body):
    include_usage: bool | None = None


class _GenerationRequest(_Body):
    """What both APIs take. None stands for a field's default, as in OpenAI's own schema."""

    model: _Text
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: _Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    ignore_eos: bool | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def token_limit(self) -> int | None:
        """The most tokens to generate, by either of its names."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    def sampling(self, default_max_tokens: int) -> SamplingParams:
        """The engine's parameters. Raises `RequestError` naming the field, its value and its bound."""
        given: dict[str, Any] = {
            "max_tokens": default_max_tokens if self.token_limit is None else self.token_limit,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "stop": tuple(self.stop) if self.stop else None,
            "ignore_eos": self.ignore_eos,
        }
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})

    def check(self) -> None:
        """Refuse what is of the right type and still cannot be done. Raises `RequestError` naming the field."""
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise RequestError(
                f"max_tokens is {self.max_tokens} and max_completion_tokens is {self.max_completion_tokens}; "
                "they are two names of one bound, give one of them",
                "max_completion_tokens",
            )
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is given, but stream is not true; it needs a stream", "stream_options")
        self.sampling(1)  # the bounds that need no knowledge of the prompt


class CompletionRequest(_GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: _Prompt

    def check(self) -> None:
        super().check()
        _refuse(self.model_extra, UNSUPPORTED_IN_COMPLETION)


class ChatMessage(_Body):
    """One turn of a conversation; `content` arrives as a string or as text parts, which are joined."""

    role: Literal["system", "developer", "user", "assistant"]
    content: _Content
    name: _Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _say_that_tools_are_unsupported(cls, given: object) -> object:
        # An assistant's tool call comes without content: the refusal should name the call, not the missing content.
        if isinstance(given, dict):
            for field, neutral in _UNSUPPORTED_IN_MESSAGE.items():
                if _asks_for_something(given.get(field), neutral):
                    raise ValueError(f"{field} is not supported by this server")
        return given

    def for_template(self) -> dict[str, str]:
        return {"role": self.role, "content": self.content} | ({"name": self.name} if self.name else {})


class ChatRequest(_GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]

    def check(self) -> None:
        super().check()
        _refuse(self.model_extra, UNSUPPORTED_IN_CHAT)


def _refuse(extra: Mapping[str, object] | None, unsupported: Mapping[str, tuple[object, ...]]) -> None:
    for field, value in (extra or {}).items():
        if field in unsupported and _asks_for_something(value, unsupported[field]):
            accepted = " or ".join(short(neutral) for neutral in (*unsupported[field], None))
            raise RequestError(f"{field} is {short(value)}; this server supports only {accepted}", field)


def _asks_for_something(value: object, neutral: Sequence[object]) -> bool:
    # Types count: True equals 1, and n: true is no n: 1.
    same = (value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)
    return value is not None and not any(same)


# -- Wording refusals


def worded(issues: Iterable[Mapping[str, Any]]) -> tuple[str, str | None]:
    """(message, field) of pydantic's issues with a request body; the field is that of the first.

    >>> worded([{"type": "int_type", "loc": ("body", "seed"), "msg": "Input should be a valid integer", "input": "x"}])
    ('seed is "x"; it must be a valid integer', 'seed')
    """
    sentences, fields = [], []
    for issue in issues:
        # FastAPI puts the part of the request in front: body, path, query.
        field = _path(issue["loc"][1:])
        fields.append(field)
        sentences.append(_sentence(issue, field))
    return ". ".join(dict.fromkeys(sentences)), next(iter(fields), None) or None


def _sentence(issue: Mapping[str, Any], field: str) -> str:
    if issue["type"] == "missing":
        return f"{field or 'the request body'} is required"
    if issue["type"] == "value_error":
        bound = str(issue["ctx"]["error"])
    elif issue["type"] in ("model_type", "model_attributes_type"):
        bound = "it must be a JSON object"
    else:
        bound = str(issue["msg"]).replace("Input should", "it must").replace("List should", "it must")
    return f"{field or 'the request body'} is {short(issue['input'])}; {bound}"


def _path(location: Sequence[object]) -> str:
    """`messages[0].content`"""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".")


def short(value: object) -> str:
    """One line of JSON that stands for a value of any size."""
    try:
        text = json.dumps(value, default=repr)
    except RecursionError:  # json can read what is nested just deeply enough that it cannot write it
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
