"""What the HTTP API takes: OpenAI's request bodies for completions and chat, and the arguments of the Serve app.

This is an edge: pydantic checks types here, `SamplingParams` and the engine check the bounds that they own, and every
refusal is one sentence that names the field, the value and the bound. Fields that OpenAI documents and this server
cannot honour are refused unless they hold their default; fields that nobody documents are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from ray_moe.engine.sampling import MOST_LOGPROBS, SamplingParams
from ray_moe.errors import RequestError
from ray_moe.manifest import AsTuple, Manifest, Natural, Positive
from ray_moe.serve.messages import Body, ChatMessage, NamedTool, Text, Tool, unicode_text
from ray_moe.serve.wording import refuse_unsupported, short, worded

MAX_STOP_STRINGS = 4

MOST_CHOICES = 8  # of one prompt
MOST_PROMPTS = 64
MOST_TOOLS = 128

# Field -> the values that ask for nothing. None always is one.
UNSUPPORTED_IN_COMPLETION: dict[str, tuple[object, ...]] = {"best_of": (1,), "suffix": ("",)}
UNSUPPORTED_IN_CHAT: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "store": (False,),
    "web_search_options": (),
}


_Seconds = Annotated[float, Field(gt=0)]


class AppArgs(Manifest):
    """Arguments of the Serve application, as in a Serve configuration file.

    Every replica works on `max_concurrent` generations at a time, keeps `max_queued` requests waiting for up to
    `queue_timeout_s` and refuses those that come on top. A request may have `max_body_bytes`, `max_prompt_tokens`,
    `max_tokens` to generate, and `request_timeout_s` (default: as long as tokens keep coming).

    Keys are read, one per line, from the files named here or from the environment variables RAY_MOE_API_KEYS and
    RAY_MOE_ADMIN_TOKENS; without an API key the application does not start unless `no_auth` says so. What is kept of
    them are their SHA-256 digests.

    A replica logs to its stderr, with `log_json` a document a line.
    """

    cluster: Annotated[str, Field(min_length=1)] = "default"
    model_name: Annotated[str, Field(min_length=1)] | None = None

    max_concurrent: Positive = 256
    max_queued: Natural = 256
    queue_timeout_s: _Seconds = 60.0
    request_timeout_s: _Seconds | None = None
    max_body_bytes: Positive = 8 * 2**20
    max_prompt_tokens: Positive | None = None
    max_tokens: Positive | None = None

    api_keys_file: Annotated[str, Field(min_length=1)] | None = None
    admin_tokens_file: Annotated[str, Field(min_length=1)] | None = None
    no_auth: bool = False
    api_key_digests: AsTuple[str] = ()
    admin_token_digests: AsTuple[str] = ()

    log_json: bool = False


# -- Fields whose wire form is a union. A validator of our own words the refusal: pydantic's would list every branch.


def _prompts(given: object) -> object:
    """One prompt or several: a string, token ids, or a list of either."""
    several = given if isinstance(given, list) and given and isinstance(given[0], str | list) else [given]
    if len(several) > MOST_PROMPTS:
        raise ValueError(f"it holds {len(several)} prompts; the most is {MOST_PROMPTS}")
    for prompt in several:
        if isinstance(prompt, list) and all(type(token) is int for token in prompt):
            continue
        if not isinstance(prompt, str):
            raise ValueError("it must be a string, a list of integer token ids, or a list of either")
        unicode_text(prompt)
    return several


def _stop_list(given: object) -> object:
    stops = [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise ValueError(f"it must be a non-empty string or a list of at most {MAX_STOP_STRINGS} of them")
    if len(stops) > MAX_STOP_STRINGS:
        raise ValueError(f"it holds {len(stops)} strings; the most is {MAX_STOP_STRINGS}")
    return [unicode_text(text) for text in stops]


def _token_ids(given: dict[str, float]) -> dict[str, float]:
    for token in given:
        if not token.isascii() or not token.isdecimal() or len(token) > 10:
            raise ValueError(f"it holds the key {short(token)}; keys are token ids")
    return given


_Prompts = Annotated[
    list[str | list[int]],
    BeforeValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]
_Stop = Annotated[list[str], BeforeValidator(_stop_list, json_schema_input_type=str | list[str])]
_Biases = Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], AfterValidator(_token_ids)]
_Penalty = Annotated[float | None, Field(ge=-2, le=2)]
_N = Annotated[int | None, Field(ge=1, le=MOST_CHOICES)]


# -- Request bodies


_B = TypeVar("_B", bound=Body)


def read_body(kind: type[_B], values: object) -> _B:
    """A request body that did not come over HTTP, such as a batch file's. Raises `RequestError` naming the field."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise RequestError(*worded({**issue, "loc": ("body", *issue["loc"])} for issue in error.errors())) from error


class StreamOptions(Body):
    include_usage: bool | None = None


class JsonSchema(Body):
    name: Text | None = None
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")] = True
    strict: bool | None = None


class ResponseFormat(Body):
    """What the output must be: any text, any JSON object, or JSON that is valid under a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def schema_asked_for(self) -> Mapping[str, Any] | bool | None:
        """The JSON schema of the output; None for any text."""
        if self.type == "text":
            return None
        return self.json_schema.schema_ if self.json_schema is not None else {"type": "object"}

    def check(self) -> None:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise RequestError(
                f"response_format.type is {self.type}; json_schema is given with json_schema only", "response_format"
            )


class _GenerationRequest(Body):
    """What both APIs take. None stands for a field's default, as in OpenAI's own schema."""

    model: Text
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: _N = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: _Penalty = None
    frequency_penalty: _Penalty = None
    logit_bias: _Biases | None = None
    seed: int | None = None
    stop: _Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None
    ignore_eos: bool | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def token_limit(self) -> int | None:
        """The most tokens to generate, by either of its names."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens to show with each token; None for no log probabilities at all."""
        raise RequestError("logprobs belongs to a completion or a chat", "logprobs")

    @property
    def output_schema(self) -> Mapping[str, Any] | bool | None:
        """The JSON schema of the output; None for any text."""
        return self.response_format.schema_asked_for if self.response_format is not None else None

    def sampling(self, default_max_tokens: int, grammar: str | None = None) -> SamplingParams:
        """The engine's parameters of the first choice. Raises `RequestError` naming the field, its value and its bound.

        `grammar` is what the output's format comes to, for whoever knows the model (`serve.asking`).
        """
        given: dict[str, Any] = {
            "max_tokens": default_max_tokens if self.token_limit is None else self.token_limit,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": tuple((int(token), bias) for token, bias in (self.logit_bias or {}).items()),
            "seed": self.seed,
            "stop": tuple(self.stop) if self.stop else None,
            "ignore_eos": self.ignore_eos,
            "logprobs": self.likeliest,
            "grammar": grammar,
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
        if self.response_format is not None:
            self.response_format.check()
        self.sampling(1)  # the bounds that need no knowledge of the prompt


class CompletionRequest(_GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: _Prompts
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    def check(self) -> None:
        super().check()
        refuse_unsupported(self.model_extra, UNSUPPORTED_IN_COMPLETION)
        if self.echo and self.logprobs is not None:
            raise RequestError("echo is true and logprobs is given; the prompt's tokens have none here", "echo")


class ChatRequest(_GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MOST_LOGPROBS)] = None
    tools: Annotated[list[Tool] | None, Field(max_length=MOST_TOOLS)] = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @property
    def likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """The tools that the model may call here."""
        return tuple(self.tools or ()) if self.tool_choice != "none" else ()

    @property
    def demanded_tools(self) -> tuple[Tool, ...]:
        """Those of which it must call one; none where it may also answer in text."""
        if isinstance(self.tool_choice, NamedTool):
            return tuple(tool for tool in self.tools or () if tool.function.name == self.tool_choice.function.name)
        return self.offered_tools if self.tool_choice == "required" else ()

    def check(self) -> None:
        super().check()
        refuse_unsupported(self.model_extra, UNSUPPORTED_IN_CHAT)
        if self.top_logprobs and not self.logprobs:
            raise RequestError(f"top_logprobs is {self.top_logprobs}, but logprobs is not true", "top_logprobs")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise RequestError(f"tools are {short(names)}; their names must be distinct", "tools")
        forced = isinstance(self.tool_choice, NamedTool) or self.tool_choice == "required"
        if forced and not self.demanded_tools:
            raise RequestError("tool_choice demands a tool that is not among tools", "tool_choice")
