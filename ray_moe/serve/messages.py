"""The turns of a conversation and the tools that it offers, as OpenAI's chat API takes them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ray_moe.serve.wording import asks_for_something, short

_TOOL_NAME = r"^[a-zA-Z0-9_-]{1,64}$"
_UNSUPPORTED_IN_MESSAGE: dict[str, tuple[object, ...]] = {"function_call": (), "audio": ()}


def unicode_text(given: object) -> object:
    """JSON can hold half of a surrogate pair, which is no text: no tokenizer takes it."""
    if isinstance(given, str):
        try:
            given.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"it must be Unicode text, and has half a surrogate pair at {error.start}") from error
    return given


def _flat_content(given: object) -> object:
    if isinstance(given, str):
        return unicode_text(given)
    if not isinstance(given, list):
        raise ValueError("it must be a string or a list of text parts")
    for part in given:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f'it holds the part {short(part)}; only {{"type": "text", "text": "..."}} is supported')
    return "".join(str(unicode_text(part["text"])) for part in given)


Text = Annotated[str, BeforeValidator(unicode_text)]
_Content = Annotated[str, BeforeValidator(_flat_content, json_schema_input_type=str | list[dict[str, Any]])]


class Body(BaseModel):
    """Part of a request: values are not converted; unknown fields are kept, and looked at by `refuse_unsupported`."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)


class ToolFunction(Body):
    name: Annotated[str, Field(pattern=_TOOL_NAME)]
    description: Text | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    type: Literal["function"]
    function: ToolFunction

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it; a function without parameters takes an empty object."""
        given = self.function.model_dump(exclude_none=True)
        return {"type": "function", "function": {"description": "", "parameters": self.schema_, **given}}

    @property
    def schema_(self) -> dict[str, Any]:
        """The JSON schema of its arguments."""
        return self.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Body):
    name: Text
    arguments: Text


class ToolCall(Body):
    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Body):
    """One turn of a conversation; `content` arrives as a string or as text parts, which are joined. An assistant's turn
    that calls tools may have none, and a tool's turn says which call it answers."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Content | None = None
    name: Text | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Text | None = None

    @model_validator(mode="after")
    def _has_what_its_role_needs(self) -> Self:
        for field, neutral in _UNSUPPORTED_IN_MESSAGE.items():
            if asks_for_something((self.model_extra or {}).get(field), neutral):
                raise ValueError(f"{field} is not supported by this server")
        if self.content is None and not self.tool_calls:
            raise ValueError("content is required")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls belong to an assistant's message")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("tool_call_id is required in a tool's message")
        return self

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: arguments as an object, where they are one."""
        turn: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        turn |= {"name": self.name} if self.name else {}
        turn |= {"tool_call_id": self.tool_call_id} if self.tool_call_id is not None else {}
        if self.tool_calls:
            turn["tool_calls"] = [_for_template(call) for call in self.tool_calls]
        return turn


def _for_template(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": _parsed(call)}}


def _parsed(call: ToolCall) -> object:
    try:
        found = json.loads(call.function.arguments)
    except (ValueError, RecursionError):  # what a model wrote need not be JSON
        return call.function.arguments
    return found if isinstance(found, dict) else call.function.arguments
