"""Output in a given format: grammars compiled for one model's tokenizer, by llguidance.

A grammar is text (`lark_grammar`) until a process compiles it, and that process keeps what it compiled:
an HTTP replica to refuse what cannot be followed, a peer to generate by it. Compiling takes from a fraction of a
millisecond to a second, holds no lock of the interpreter, and belongs beside an event loop.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ray_moe.errors import RequestError

# Compiled grammars that a process keeps, the latest used.
KEPT = 128
# Between JSON's tokens: a blank, or a new line and its indentation. Without a bound a model can write blanks for ever.
_WHITESPACE = r"( |\n[ \t]{0,32})?"
_JSON_OPTIONS = {"whitespace_pattern": _WHITESPACE, "lenient": False}
# Their messages would quote the request's text, and a parser's state.
_LIMITS = LLParserLimits(verbose_errors=False)
_MESSAGE_CHARS = 300


def json_rule(schema: Mapping[str, Any] | bool) -> str:
    """A Lark rule `json`: JSON text that is valid under a JSON schema.

    Of a schema that asks for what grammars cannot hold, `Grammars.compile` says so.
    """
    return f"json: %json {within_json(schema)}"


def within_json(schema: Mapping[str, Any] | bool) -> str:
    """The schema as it stands in a Lark rule, with our own options. Raises `RequestError` when nested too deeply."""
    document = dict(schema) if isinstance(schema, Mapping) else {} if schema else {"enum": []}
    try:
        return json.dumps({**document, "x-guidance": _JSON_OPTIONS})
    except RecursionError as error:
        raise RequestError("the schema is nested too deeply", "response_format") from error


def lark_grammar(start: str, *rules: str) -> str:
    """Text that Lark rules, in llguidance's dialect, derive from `start`, as one grammar."""
    return str(LLMatcher.grammar_from_lark("\n".join([f"start: {start}", *rules, ""])))


class GrammarMatcher:
    """How far one generation is within a grammar; of one thread at a time."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def take(self, tokens: Sequence[int]) -> None:
        """Go on by these tokens."""
        if tokens:
            self._matcher.consume_tokens(list(tokens))

    def fill(self, words_W: np.ndarray) -> None:
        """Write one bit per token, lowest first: whether it may come next. After a failure, only the end may."""
        self._matcher.unsafe_compute_mask_ptr(words_W.ctypes.data, words_W.nbytes)

    @property
    def complete(self) -> bool:
        """Whether the text may end here."""
        return bool(self._matcher.is_accepting())

    @property
    def failure(self) -> str:
        """Why it cannot go on; empty as long as it can."""
        return _short(self._matcher.get_error()) if self._matcher.is_error() else ""


class CompiledGrammar:
    """A grammar for any number of generations."""

    def __init__(self, template: LLMatcher) -> None:
        self._template = template

    def begin(self) -> GrammarMatcher:
        """A generation before its first token."""
        return GrammarMatcher(self._template.deep_copy())


class Grammars:
    """The grammars of one model in one process. May be used by several threads.

    `load` gives the tokenizer when the first grammar is compiled; `eos_ids` are the tokens that end a generation.
    """

    def __init__(self, load: Callable[[], PreTrainedTokenizerBase], vocab_size: int, eos_ids: Collection[int]) -> None:
        self._load, self._vocab_size, self._eos_ids = load, vocab_size, sorted(eos_ids)
        self._compiled: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: str) -> CompiledGrammar:
        """Raises `RequestError` for what cannot be compiled, or not for this model."""
        with self._lock:
            found = self._compiled.get(grammar)
            if found is None:
                found = self._compiled[grammar] = self._compile(grammar)
                if len(self._compiled) > KEPT:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return found

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for, which need not be whole characters."""
        return bytes(self._tokenizer.decode_bytes([token]))

    def _compile(self, grammar: str) -> CompiledGrammar:
        if not self._eos_ids:
            raise RequestError("this model has no end-of-sequence token: it cannot end in a format", "response_format")
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise RequestError(f"the format cannot be followed: {_short(matcher.get_error())}", "response_format")
        return CompiledGrammar(matcher)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        tokenizer = self._load()
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise RequestError(
                f"this model's tokenizer, {type(tokenizer).__name__}, is no fast one: its tokens' bytes are unknown"
            )
        return from_tokenizer(tokenizer, n_vocab=self._vocab_size, eos_token=list(self._eos_ids) or [0])


def _short(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= _MESSAGE_CHARS else f"{line[: _MESSAGE_CHARS - 3]}..."
