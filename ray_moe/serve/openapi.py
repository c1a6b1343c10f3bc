"""The OpenAPI document: what each route answers, so that it can be checked against what it says."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI

_NULLABLE_TEXT: dict[str, Any] = {"type": ["string", "null"]}


def _object(required: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}


def _list(items: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": dict(items)}


_TEXT, _COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
ERROR = _object({"error": _object({"message": _TEXT, "type": _TEXT, "param": _NULLABLE_TEXT, "code": _NULLABLE_TEXT})})
_USAGE = _object({"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT})
_HEAD = {"id": _TEXT, "object": _TEXT, "created": _COUNT, "model": _TEXT, "system_fingerprint": _TEXT}
_LOGPROBS = {"type": ["object", "null"]}
_TOOL_CALL = _object(
    {"id": _TEXT, "type": {"const": "function"}, "function": _object({"name": _TEXT, "arguments": _TEXT})}
)
_MESSAGE = _object(
    {"role": {"const": "assistant"}, "content": _NULLABLE_TEXT, "refusal": _NULLABLE_TEXT},
    {"tool_calls": _list(_TOOL_CALL)},
)
_ENDED = {"index": _COUNT, "finish_reason": {"enum": ["stop", "length", "tool_calls"]}, "logprobs": _LOGPROBS}
COMPLETION = _object({**_HEAD, "choices": _list(_object({**_ENDED, "text": _TEXT})), "usage": _USAGE})
CHAT = _object({**_HEAD, "choices": _list(_object({**_ENDED, "message": _MESSAGE})), "usage": _USAGE})
MODEL = _object({"id": _TEXT, "object": _TEXT, "created": _COUNT, "owned_by": _TEXT, "max_model_len": _COUNT})
MODELS = _object({"object": _TEXT, "data": _list(MODEL)})
STATUS = _object({"status": _TEXT}, {"model": _TEXT, "release": _TEXT})

_WHY: dict[int, str] = {
    400: "The request cannot be honoured as it is: the message names the field, the value and the bound.",
    401: "No key, or one that is not valid here.",
    403: "Admin routes are off.",
    404: "No such model, or no such thing.",
    409: "The cluster's state does not allow it.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    429: "As many requests run and wait as may; Retry-After says when to try again.",
    500: "An error that nobody foresaw.",
    503: "The cluster does not serve now; the message says why.",
    504: "A deadline passed.",
}


def failures(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """These statuses with the shape of errors, for a route's `responses`."""
    return {
        status: {"description": _WHY[status], "content": {"application/json": {"schema": ERROR}}} for status in statuses
    }


def answers(schema: Mapping[str, Any], *, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """A 200 of this shape, as JSON or also as server-sent events."""
    content: dict[str, Any] = {"application/json": {"schema": dict(schema)}}
    if streams:
        content["text/event-stream"] = {"schema": _TEXT}
    return {200: {"description": HTTPStatus.OK.phrase, "content": content}}


def describe(api: FastAPI, *, keys: bool) -> None:
    """Make the document say what the application does: bad bodies are 400, and with `keys` routes want one."""
    made = api.openapi

    def openapi() -> dict[str, Any]:
        if api.openapi_schema is None:
            document = made()
            schemes = {"key": {"type": "http", "scheme": "bearer"}, "admin": {"type": "http", "scheme": "bearer"}}
            document.setdefault("components", {})["securitySchemes"] = schemes
            for path, operations in document["paths"].items():
                scheme = "admin" if path.startswith("/admin") else "key" if keys and _is_locked(path) else None
                for operation in operations.values():
                    operation["responses"].pop("422", None)
                    if scheme is not None:
                        operation["security"] = [{scheme: []}]
            for unused in ("HTTPValidationError", "ValidationError"):
                document["components"].get("schemas", {}).pop(unused, None)
        return api.openapi_schema or {}

    api.openapi = openapi  # type: ignore[method-assign]


def _is_locked(path: str) -> bool:
    return path.startswith("/v1") or path == "/metrics"
