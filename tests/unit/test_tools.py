"""Calls of tools in the forms that chat templates have: found from the template, written by grammar, read back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ray_moe.guidance import Grammars, lark_grammar
from ray_moe.models import tiny_moe_path
from ray_moe.serve.messages import ChatMessage, Tool
from ray_moe.serve.tools import ToolForm, ToolReader
from ray_moe.text import load_tokenizer

TURNS = "{%- for m in messages %}<|user|>{{ m.content }}{% CALLS %}<|end|>{% endfor %}"
# How several families write calls, shortened to what matters here.
HERMES = TURNS.replace(
    "{% CALLS %}",
    "{% for c in m.tool_calls or [] %}{% if not loop.first %}\n{% endif %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}',
)
LIST = TURNS.replace(
    "{% CALLS %}",
    '{% if m.tool_calls %}<|pad|>[{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}',
)
FENCED = TURNS.replace(
    "{% CALLS %}",
    "{% for c in m.tool_calls or [] %}<call>function<sep>{{ c.function.name }}\n```json\n"
    "{{ c.function.arguments if c.function.arguments is string else raise_exception('a string, please') }}\n```</call>"
    "{% endfor %}",
)
ONE_PER_TURN = (
    "{%- for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}<|assistant|>"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}<|end|>'
    "{% endfor %}{% else %}<|assistant|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
)
WITH_IDS = HERMES.replace('{"name"', '{"id": "{{ c.id }}", "name"')
XML = TURNS.replace(
    "{% CALLS %}",
    "{% for c in m.tool_calls or [] %}<f={{ c.function.name }}>{% for k, v in c.function.arguments.items() %}"
    "<p={{ k }}>{{ v }}</p>{% endfor %}</f>{% endfor %}",
)
NONE = TURNS.replace("{% CALLS %}", "")

TOOLS = [
    Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters}})
    for name, parameters in [
        ("add", {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}),
        ("say", {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}),
    ]
]


def tokenizer(template: str) -> Any:
    loaded = load_tokenizer(tiny_moe_path())
    loaded.chat_template = template
    return loaded


def form_of(template: str) -> ToolForm:
    form = ToolForm.of(tokenizer(template))
    assert form is not None
    return form


def read(form: ToolForm, text: str, size: int = 1, *, several: bool = True) -> tuple[str, list[tuple[str, str]]]:
    """(text, calls as (name, arguments)) of a text that arrives in pieces of `size`."""
    reader = ToolReader(form, TOOLS, several=several)
    pieces: list[Any] = []
    for start in range(0, len(text), size):
        pieces += reader.push(text[start : start + size])
    pieces += reader.finish()
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, dict) and "id" in piece:
            assert piece["index"] == len(calls)
            calls.append((piece["function"]["name"], ""))
        elif isinstance(piece, dict):
            name, arguments = calls[piece["index"]]
            calls[piece["index"]] = (name, arguments + piece["function"]["arguments"])
    return "".join(piece for piece in pieces if isinstance(piece, str)), calls


def rendered(template: str, calls: list[tuple[str, str]]) -> str:
    """The oracle: what the template itself writes for these calls, without what it writes around any turn."""
    turn = ChatMessage.model_validate(
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
                for name, arguments in calls
            ],
        }
    ).for_template()
    if template is FENCED:
        for call, (_, arguments) in zip(turn["tool_calls"], calls, strict=True):
            call["function"]["arguments"] = arguments
    text = str(tokenizer(template).apply_chat_template([turn], tokenize=False))
    return text.removeprefix("<|user|>").removeprefix("<|assistant|>").removesuffix("<|end|>")


CALLS = [("add", '{"x": 5}'), ("say", '{"text": "a } \\" {"}')]


@pytest.mark.parametrize("template", [HERMES, LIST, FENCED])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_what_a_template_writes_is_read_back_in_pieces_of_any_size(template: str, size: int) -> None:
    form = form_of(template)
    for calls in (CALLS[:1], CALLS):
        text, found = read(form, rendered(template, calls), size)
        assert (text.strip(), found) == ("", calls)
    text, found = read(form, "So be it. " + rendered(template, CALLS), size)
    assert (text, found) == ("So be it. ", CALLS)


@pytest.mark.parametrize("template", [HERMES, LIST, FENCED, ONE_PER_TURN])
def test_the_grammar_takes_what_the_template_writes_and_no_arguments_of_another_schema(template: str) -> None:
    loaded, form = tokenizer(template), form_of(template)
    grammar = Grammars(lambda: loaded, 2048, (5, 1)).compile(
        lark_grammar("calls", form.grammar(TOOLS, several=form.repeatable))
    )

    def takes(text: str) -> bool:
        matcher = grammar.begin()
        matcher.take(loaded.encode(text, add_special_tokens=False))
        return matcher.complete and not matcher.failure

    assert takes(rendered(template, CALLS[:1]))
    assert not takes(rendered(template, [("add", '{"x": "5"}')]))
    assert not takes(rendered(template, [("other", '{"x": 5}')]))
    assert not takes("So be it.")
    if form.repeatable:
        assert takes(rendered(template, CALLS))


def test_calls_that_each_end_a_turn_cannot_follow_one_another() -> None:
    assert not form_of(ONE_PER_TURN).repeatable
    assert all(form_of(template).repeatable for template in (HERMES, LIST, FENCED))


def test_a_special_token_in_the_form_is_one_token_to_the_grammar() -> None:
    assert form_of(LIST).specials == (("<|pad|>", 2),)
    assert "<[2]>" in form_of(LIST).grammar(TOOLS, several=False)


@pytest.mark.parametrize("template", [WITH_IDS, XML, NONE, "{{ raise_exception('no') }}"])
def test_a_template_without_a_form_that_can_be_read_has_none(template: str) -> None:
    assert ToolForm.of(tokenizer(template)) is None


def test_models_vary_the_blanks_of_a_form_and_are_understood() -> None:
    assert read(form_of(HERMES), '<tool_call>{"name":"add","arguments":{"x": 1}}</tool_call>') == (
        "",
        [("add", '{"x": 1}')],
    )


@pytest.mark.parametrize(
    "text", ["a < b", "<tool", "<tool_call> is a tag", '<tool_call>\n{"name": "nobody", "arguments": {}}']
)
def test_what_only_looks_like_a_call_stays_text(text: str) -> None:
    assert read(form_of(HERMES), text) == (text, [])


def test_without_parallel_calls_the_first_is_the_only_one() -> None:
    assert read(form_of(HERMES), rendered(HERMES, CALLS), several=False) == ("", CALLS[:1])


def test_arguments_reach_a_template_as_an_object_where_they_are_one() -> None:
    for arguments, expected in [('{"x": 5}', {"x": 5}), ("[5]", "[5]"), ("broken", "broken")]:
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        turn = ChatMessage.model_validate({"role": "assistant", "content": None, "tool_calls": [call]}).for_template()
        assert turn["tool_calls"][0]["function"]["arguments"] == expected
        assert turn["content"] == ""


def test_a_tool_without_parameters_takes_an_empty_object() -> None:
    tool = Tool.model_validate({"type": "function", "function": {"name": "now", "description": None}})
    assert json.loads(json.dumps(tool.for_template()["function"])) == {
        "name": "now",
        "description": "",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    }
