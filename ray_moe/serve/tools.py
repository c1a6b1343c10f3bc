"""Calls of tools, in whatever form the model's own chat template writes them.

Nothing here knows a model family: the template is given a conversation in which an assistant calls a tool, and what it
writes around the name and the arguments is the form (`ToolForm`). It gives the grammar of calls that are demanded, and
tells text from calls in what was generated (`ToolReader`).
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from ray_moe.errors import RequestError
from ray_moe.guidance import within_json
from ray_moe.serve.messages import Tool

# Words that no template writes by itself.
_NAME, _OTHER, _KEY, _VALUE, _TEXT = "qzfunctionqz", "qzotherqz", "qzkeyqz", "qzvalueqz", "qztextqz"
_ARGUMENTS = re.compile(rf'\{{\s*"{_KEY}"\s*:\s*"{_VALUE}"\s*\}}')
_LONGEST_NAME = 64


@dataclass(frozen=True)
class ToolForm:
    """How a template writes calls: `before` NAME `between` ARGUMENTS [`next` NAME `between` ARGUMENTS ...] `after`."""

    before: str
    between: str
    next: str
    after: str
    specials: tuple[tuple[str, int], ...] = ()  # special tokens among these: one token each, and no text to a grammar

    @property
    def repeatable(self) -> bool:
        """Whether several calls fit into one turn: what stands between them does not end it."""
        inside = self.before + self.between + self.after
        return all(token in inside for token, _ in self.specials if token in self.next)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> ToolForm | None:
        """None when the template writes no calls, or none with a name and then its arguments as a JSON object."""
        for as_text in (False, True):  # what templates expect arguments to be
            form = _form_of(tokenizer, as_text)
            if form is not None:
                return form
        return None

    def grammar(self, tools: Sequence[Tool], *, several: bool) -> str:
        """The Lark rules `calls` and below it: calls of these tools, one or `several`."""
        again = f"({self._literal(self.next)} call)*" if several and self.repeatable else ""
        rules = [
            f"calls: {self._literal(self.before)} call {again} {self._literal(self.after)}",
            "call: " + " | ".join(f"call_{place}" for place in range(len(tools))),
        ]
        for place, tool in enumerate(tools):
            name = self._literal(tool.function.name)
            rules.append(f"call_{place}: {name} {self._literal(self.between)} %json {within_json(tool.schema_)}")
        return "\n".join(rules)

    def _literal(self, text: str) -> str:
        """Text as Lark has it, its special tokens by their ids."""
        ids = dict(self.specials)
        parts = re.split("(" + "|".join(map(re.escape, ids)) + ")", text) if ids else [text]
        return " ".join(f"<[{ids[part]}]>" if part in ids else json.dumps(part) for part in parts if part)


def _form_of(tokenizer: PreTrainedTokenizerBase, as_text: bool) -> ToolForm | None:
    try:
        plain = _rendered(tokenizer, {"content": _TEXT})
        one = _rendered(tokenizer, {"content": "", "tool_calls": [_call(_NAME, as_text)]})
        two = _rendered(tokenizer, {"content": "", "tool_calls": [_call(_NAME, as_text), _call(_OTHER, as_text)]})
    except Exception:  # noqa: BLE001 - a template is the model author's program: it may raise anything
        return None
    turn, _, rest = plain.partition(_TEXT)
    head = _common_start(turn, one)
    written = one[len(head) :].removesuffix(_common_start(rest[::-1], one[::-1])[::-1])
    before, name, tail = written.partition(_NAME)
    arguments = _ARGUMENTS.search(tail)
    if not name or arguments is None or not before.strip():
        return None
    between, after = tail[: arguments.start()], tail[arguments.end() :]
    first = two.find(arguments.group(), len(head))
    other = two.find(_OTHER, len(head))
    if not between or not 0 <= first < other or _rendered_id(written):
        return None
    following = two[first + len(arguments.group()) : other]
    special = {
        str(token): ident
        for ident, token in tokenizer.added_tokens_decoder.items()
        if token.special and str(token) in before + between + following + after
    }
    return ToolForm(before, between, following, after, tuple(special.items()))


def _common_start(one: str, other: str) -> str:
    end = next((place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    return min(one, other, key=len) if end is None else one[:end]


def _rendered(tokenizer: PreTrainedTokenizerBase, turn: dict[str, Any]) -> str:
    offered = Tool.model_validate({"type": "function", "function": {"name": _NAME}}).for_template()
    return str(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "x"}, {"role": "assistant", **turn}], tools=[offered], tokenize=False
        )
    )


_CALL_ID = "qzid12345"


def _call(name: str, as_text: bool) -> dict[str, Any]:
    arguments = {_KEY: _VALUE}
    given = json.dumps(arguments) if as_text else arguments
    return {"id": _CALL_ID, "type": "function", "function": {"name": name, "arguments": given}}


def _rendered_id(written: str) -> bool:
    # A form with ids would need a model that makes them up, and a place to keep them.
    return _CALL_ID in written


class ToolReader:
    """Tells text from calls as they arrive; what could still be the beginning of a call is held back.

    `push` and `finish` give OpenAI's deltas in order: text, or a list with one element of `tool_calls`.
    """

    def __init__(self, form: ToolForm, tools: Sequence[Tool], *, several: bool) -> None:
        self._names = {tool.function.name for tool in tools}
        self._several = several
        self._first = _pattern(form.before, form.between)
        self._following = _pattern(form.next, form.between)
        # The first word is how a call is told from text: models vary the blanks that follow it.
        self._mark = form.before.split()[0]
        self._buffer = ""
        self._arguments: _JsonObject | None = None
        self.calls = 0

    def push(self, text: str) -> Iterator[str | dict[str, Any]]:
        """What is certain after this text."""
        self._buffer += text
        yield from self._read(last=False)

    def finish(self) -> Iterator[str | dict[str, Any]]:
        """What was held back, at the end of the generation."""
        yield from self._read(last=True)

    def _read(self, *, last: bool) -> Iterator[str | dict[str, Any]]:
        while self._buffer:
            if self._arguments is not None:
                taken = self._arguments.take(self._buffer)
                arguments, self._buffer = self._buffer[:taken], self._buffer[taken:]
                if arguments:
                    yield {"index": self.calls - 1, "function": {"arguments": arguments}}
                if not self._arguments.complete:
                    return
                self._arguments = None
                continue
            start = self._buffer.find(self._mark) if not self.calls else 0
            if self.calls and not self._several:
                self._buffer = ""  # the first call is all that was asked for
                return
            if start < 0:
                held = 0 if last else _overlap(self._buffer, self._mark)
                text, self._buffer = self._buffer[: len(self._buffer) - held], self._buffer[len(self._buffer) - held :]
                if text:
                    yield text
                return
            if start:
                text, self._buffer = self._buffer[:start], self._buffer[start:]
                if text.strip():
                    yield text
            found = self._match()
            if found is None:
                if not last and len(self._buffer) < self._reach:
                    return
                # No call after all: text before the first, and of no use behind it.
                if not self.calls:
                    yield self._buffer
                self._buffer = ""
                return
            self._buffer = self._buffer[found.end() :]
            self._arguments = _JsonObject()
            self.calls += 1
            call_id = f"call_{uuid.uuid4().hex[:24]}"
            function = {"name": found.group("name"), "arguments": ""}
            yield {"index": self.calls - 1, "id": call_id, "type": "function", "function": function}

    def _match(self) -> re.Match[str] | None:
        patterns = (self._following, self._first) if self.calls else (self._first,)
        found = next((match for pattern in patterns if (match := pattern.match(self._buffer)) is not None), None)
        return found if found is not None and found.group("name") in self._names else None

    @property
    def _reach(self) -> int:
        return len(self._first.pattern) + len(self._following.pattern) + _LONGEST_NAME


def _pattern(before: str, between: str) -> re.Pattern[str]:
    """The literals up to where arguments begin, with any blanks where they have some."""

    def blanks(text: str) -> str:
        return r"\s*".join(map(re.escape, text.split()))

    return re.compile(rf"\s*{blanks(before)}\s*(?P<name>[\w-]{{1,{_LONGEST_NAME}}})\s*{blanks(between)}\s*(?=\{{)")


class _JsonObject:
    """Where an object of JSON ends, found as its text arrives."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = self.complete = False

    def take(self, text: str) -> int:
        """How many characters of this text still belong to the object."""
        for place, letter in enumerate(text):
            if self._in_string:
                self._in_string = letter != '"' or self._escaped
                self._escaped = letter == "\\" and not self._escaped
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.complete = True
                    return place + 1
        return len(text)


def _overlap(text: str, mark: str) -> int:
    """Length of the longest proper prefix of `mark` that `text` ends with."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)


def require_form(form: ToolForm | None) -> ToolForm:
    """Raises `RequestError` for a model whose template writes no calls that can be read."""
    if form is None:
        raise RequestError("this model's chat template has no form of tool calls that can be read here", "tools")
    return form
