"""Random JSON schemas of the kinds that people ask for, each bounded so that any text under it ends."""

from __future__ import annotations

import random
from typing import Any

_NAMES = ("name", "age", "tags", "speaker", "lines", "place", "is_king", "act", "scene", "note")


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of an object; below it any type, three levels deep at most."""
    if depth == 0:
        return _object(rng, depth)
    kinds = [_string, _integer, _number, _boolean, _enum, _null_or]
    kinds += [_object, _array] if depth < 3 else []
    return rng.choice(kinds)(rng, depth)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randint(1, 4))
    properties = {name: random_schema(rng, depth + 1) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": least, "maxItems": least + 2}


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {"type": "string", "pattern": rng.choice(["^[A-Z][a-z]{1,6}$", "^[0-9]{3}-[0-9]{4}$", "^(yes|no)$"])}
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 12)}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    # An enumeration: a number may have any number of digits, and a model that likes them never ends.
    return {"enum": [rng.randint(-99, 99) / 4 for _ in range(3)]}


def _boolean(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample(["Hamlet", "Ophelia", 17, None, True, "\u00e9t\u00e9"], 3)}


def _null_or(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [{"type": "null"}, _string(rng, depth)]}
