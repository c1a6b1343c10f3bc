"""Grammars over a real tokenizer: what they allow, refuse, and keep."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from ray_moe.errors import RequestError
from ray_moe.guidance import KEPT, CompiledGrammar, Grammars, json_rule, lark_grammar
from ray_moe.models import tiny_moe_path
from ray_moe.text import load_tokenizer

TOKENIZER = load_tokenizer(tiny_moe_path())
END = 5
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


def grammars(eos_ids: tuple[int, ...] = (END, 1)) -> Grammars:
    return Grammars(lambda: TOKENIZER, 2048, eos_ids)


def compiled(schema: Any) -> CompiledGrammar:
    return grammars().compile(lark_grammar("json", json_rule(schema)))


def accepts(grammar: CompiledGrammar, text: str) -> bool:
    matcher = grammar.begin()
    matcher.take(TOKENIZER.encode(text, add_special_tokens=False))
    return not matcher.failure and matcher.complete


def allowed(matcher: Any) -> set[int]:
    words_W = np.zeros(64, dtype=np.int32)
    matcher.fill(words_W)
    return set(np.flatnonzero(np.unpackbits(words_W.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"a": 5}', True),
        ('{"a":-17}', True),
        ('{\n  "a": 5\n}', True),
        ('{"a": "5"}', False),
        ('{"b": 5}', False),
        ('{"a": 5', False),
        ('{"a": 5}{"a": 5}', False),
        ("{" + " " * 100 + '"a": 5}', False),  # blanks have a bound, or a model could write them for ever
    ],
)
def test_a_schemas_grammar_takes_what_is_valid_under_it(text: str, fits: bool) -> None:
    assert accepts(compiled(SCHEMA), text) == fits


def test_a_text_that_is_complete_can_only_end() -> None:
    matcher = compiled(SCHEMA).begin()
    matcher.take(TOKENIZER.encode('{"a": 5}', add_special_tokens=False))
    assert allowed(matcher) == {END, 1}


def test_generations_of_one_grammar_do_not_see_one_another() -> None:
    grammar = compiled(SCHEMA)
    one, other = grammar.begin(), grammar.begin()
    one.take(TOKENIZER.encode('{"a"', add_special_tokens=False))
    assert allowed(other) == allowed(grammar.begin()) != allowed(one)


def test_after_a_token_that_does_not_fit_only_the_end_is_left_and_why_is_said() -> None:
    matcher = compiled(SCHEMA).begin()
    matcher.take(TOKENIZER.encode("no", add_special_tokens=False))
    assert matcher.failure
    assert "\n" not in matcher.failure and len(matcher.failure) <= 300
    assert allowed(matcher) == {END, 1}


def test_a_schemas_own_options_do_not_replace_ours() -> None:
    loose = {**SCHEMA, "x-guidance": {"whitespace_pattern": "[ ]*", "lenient": True}}
    assert not accepts(compiled(loose), "{" + " " * 100 + '"a": 5}')


def test_true_is_any_json_and_false_is_refused() -> None:
    assert accepts(compiled(True), '[1, "x"]')
    with pytest.raises(RequestError, match="cannot be followed"):
        compiled(False)


@pytest.mark.parametrize("schema", [{"type": "wizard"}, {"not": {"type": "string"}}, {"$ref": "file:///etc/passwd"}])
def test_what_cannot_be_followed_is_refused_in_one_line_that_names_the_field(schema: Any) -> None:
    with pytest.raises(RequestError, match="the format cannot be followed") as refused:
        compiled(schema)
    assert refused.value.param == "response_format"
    assert "\n" not in str(refused.value)


def test_a_schema_too_deep_for_json_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    try:
        with pytest.raises(RequestError, match="nested too deeply"):
            json_rule(deep)
    finally:
        while deep:  # or Python's own destructor would recurse
            deep = deep.pop("items", {})


def test_a_grammar_is_compiled_once_as_long_as_it_is_kept() -> None:
    made = grammars()
    texts = [lark_grammar(json.dumps(f"text {number}")) for number in range(KEPT + 1)]
    first = made.compile(texts[0])
    assert made.compile(texts[0]) is first
    for text in texts[1:]:
        made.compile(text)
    assert made.compile(texts[0]) is not first


def test_a_model_that_cannot_end_can_have_no_format_but_its_tokens_have_bytes() -> None:
    made = grammars(eos_ids=())
    with pytest.raises(RequestError, match="no end-of-sequence token"):
        made.compile(lark_grammar('"x"'))
    ids = TOKENIZER.encode("été, où?")
    assert b"".join(map(made.token_bytes, ids)).decode() == "été, où?"
