"""Refusals in words: one sentence that names the field, the value and the bound."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ray_moe.errors import RequestError


def refuse_unsupported(extra: Mapping[str, object] | None, unsupported: Mapping[str, tuple[object, ...]]) -> None:
    """Raise `RequestError` for a field that cannot be honoured here, unless it holds a value that asks for nothing."""
    for field, value in (extra or {}).items():
        if field in unsupported and asks_for_something(value, unsupported[field]):
            accepted = " or ".join(short(neutral) for neutral in (*unsupported[field], None))
            raise RequestError(f"{field} is {short(value)}; this server supports only {accepted}", field)


def asks_for_something(value: object, neutral: Sequence[object]) -> bool:
    """Whether a field's value is none of the neutral ones; null always is one."""
    # Types count: True equals 1, and n: true is no n: 1.
    same = (value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)
    return value is not None and not any(same)


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
