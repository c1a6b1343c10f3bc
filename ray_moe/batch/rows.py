"""What a row asks for, and how its answer reads: OpenAI's batch format, or plain prompts with a request's fields.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], "max_tokens": 64}}
    {"id": "b", "prompt": "To be", "temperature": 0}
    {"messages": [{"role": "user", "content": "Who goes there?"}]}

The same request models as over HTTP read them, so a batch takes what HTTP takes. Rows without an id are called by their
number: `row-3`. Whatever is wrong with a row is an error of that row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray_moe.errors import RequestError
from ray_moe.serve.problems import Problem
from ray_moe.serve.schema import ChatRequest, CompletionRequest, read_body
from ray_moe.serve.wording import short

Document = dict[str, Any]

KINDS: dict[str, type[CompletionRequest] | type[ChatRequest]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
}
_ENVELOPE = frozenset({"custom_id", "method", "url", "body"})
_LONGEST_ID = 512


@dataclass(frozen=True)
class Ask:
    """One request: row `number`, its id, what HTTP would take, whether its answer reads as OpenAI's batches do."""

    number: int
    custom_id: str
    body: CompletionRequest | ChatRequest
    in_openai_format: bool


@dataclass(frozen=True)
class Defaults:
    """What rows that do not say get: fields of a request, the served model's name, and a seed for those that draw.

    A row's own seed follows from `seed` and its id, so that the answers do not depend on when, or how often, it ran.
    """

    model: str
    fields: Mapping[str, Any]
    seed: int

    def seed_of(self, custom_id: str) -> int:
        digest = hashlib.blake2b(f"{self.seed}:{custom_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1


def fields_of(value: bytes | Mapping[str, Any]) -> Document | None:
    """A row's fields; None for a blank line. Raises `RequestError` for a line that is no JSON object."""
    if isinstance(value, Mapping):
        # A column holds a value for every row: null is how a row leaves it out.
        return {name: _plain(item) for name, item in value.items() if item is not None}
    if not value.strip():
        return None
    try:
        found = json.loads(value.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise RequestError(f"the line is not UTF-8: {error.reason} at byte {error.start}") from error
    except (json.JSONDecodeError, RecursionError, ValueError) as error:
        raise RequestError(f"the line is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise RequestError(f"the line is {short(found)}; it must be a JSON object")
    return found


def id_of(fields: Mapping[str, Any], number: int) -> str:
    """A row's id: `custom_id`, else `id`, else its number. Raises `RequestError` for what is no id."""
    name = "custom_id" if "custom_id" in fields else "id"
    given = fields.get(name)
    if given is None and name == "custom_id":
        raise RequestError("custom_id is null; it must be a string", name)
    if given is None:
        return f"row-{number}"
    if isinstance(given, bool) or not isinstance(given, str | int) or given == "":
        raise RequestError(f"{name} is {short(given)}; it must be a non-empty string", name)
    if any("\ud800" <= character <= "\udfff" for character in str(given)):
        raise RequestError(f"{name} is {short(given)}; it must be Unicode text, and has half a surrogate pair", name)
    if len(str(given)) > _LONGEST_ID:
        raise RequestError(f"{name} has {len(str(given))} characters; the most is {_LONGEST_ID}", name)
    return str(given)


def ask_of(fields: Mapping[str, Any], number: int, custom_id: str, defaults: Defaults) -> Ask:
    """The request of a row. Raises `RequestError` naming the field, its value and its bound."""
    in_openai_format = "body" in fields
    url, given = _enveloped(fields) if in_openai_format else _unwrapped(fields)
    values = {**defaults.fields, "model": defaults.model, **given}
    if values.get("seed") is None:
        values["seed"] = defaults.seed_of(custom_id)
    body = read_body(KINDS[url], values)
    if body.stream:
        raise RequestError("stream is true; a batch answers when all is there", "stream")
    body.check()
    return Ask(number, custom_id, body, in_openai_format)


def _enveloped(fields: Mapping[str, Any]) -> tuple[str, Document]:
    method, url, body = fields.get("method", "POST"), fields.get("url"), fields["body"]
    if fields.get("custom_id") is None:
        raise RequestError("custom_id is required in OpenAI's batch format", "custom_id")
    if method != "POST":
        raise RequestError(f"method is {short(method)}; it must be POST", "method")
    if url not in KINDS:
        raise RequestError(f"url is {short(url)}; it must be {' or '.join(KINDS)}", "url")
    if isinstance(body, str):  # a column of JSON texts
        try:
            body = json.loads(body)
        except ValueError as error:
            raise RequestError(f"body is not JSON: {error}", "body") from error
    if not isinstance(body, dict):
        raise RequestError(f"body is {short(body)}; it must be a JSON object", "body")
    return url, body


def _unwrapped(fields: Mapping[str, Any]) -> tuple[str, Document]:
    if ("prompt" in fields) == ("messages" in fields):
        raise RequestError("a row has either a prompt, or messages, or a body in OpenAI's batch format", "prompt")
    given = {name: value for name, value in fields.items() if name not in ("id", "custom_id")}
    return ("/v1/completions" if "prompt" in fields else "/v1/chat/completions"), given


def _plain(value: Any) -> Any:
    """A value of a column without the nulls that its type fills other rows' structs with."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, list) else value


# ---- how answers read ----


def answered(ask: Ask, document: Document) -> Document:
    """A line of the output file: OpenAI's for rows in its format, flat for plain ones."""
    if ask.in_openai_format:
        response = {"status_code": 200, "request_id": document["id"], "body": document}
        return {"id": f"batch_req_{ask.number}", "custom_id": ask.custom_id, "response": response, "error": None}
    return {"id": ask.custom_id, **_flat(document)}


def columns(ask: Ask, document: Document) -> Document:
    """A row of a Parquet output: the same columns for every request."""
    flat = _flat(document)
    flat.pop("choices", None)
    return {"id": ask.custom_id, **flat, "response": json.dumps(document, ensure_ascii=False)}


def _flat(document: Document) -> Document:
    choices, usage = document["choices"], document["usage"]
    first = choices[0]
    said = first["message"] if "message" in first else {"content": first["text"]}
    flat = {
        "text": said["content"],
        "finish_reason": first["finish_reason"],
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
    }
    # What does not fit into one text: several answers, calls of tools, log probabilities.
    more = len(choices) > 1 or said.get("tool_calls") or first.get("logprobs")
    return flat | ({"choices": choices} if more else {})


def refused(number: int, custom_id: str | None, error: Exception) -> Document:
    """A line of the errors file: why this row has no answer, as HTTP would say it."""
    problem, called = Problem.of(error), f"batch_req_{number}"
    return {
        "id": called,
        "custom_id": custom_id,
        "row": number,
        "response": {"status_code": int(problem.status), "request_id": called, "body": problem.document()},
        "error": {"code": problem.code or problem.type, "message": problem.message},
    }
