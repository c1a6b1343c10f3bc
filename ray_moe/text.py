"""Between tokens and text: load a tokenizer, render a chat, decode a stream without splitting a character.

The engine knows token ids only. Stop strings live here, with whoever holds the tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ray_moe.errors import ConfigError, RequestError

_REPLACEMENT = "\ufffd"


def load_tokenizer(path: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The model's tokenizer; `ConfigError` when the folder has none."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} has no tokenizer that can be loaded: {str(error).splitlines()[0]}") from error
    if not tokenizer.encode("0", add_special_tokens=False):  # transformers makes an empty one where there are no files
        raise ConfigError(f"{path} has no tokenizer: prompts are token ids there, and no text")
    return tokenizer


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[int, ...]:
    """Token ids of a conversation by the model's own chat template, ready for the assistant's turn, which may call
    `tools`.

    Raises `RequestError` when the model has no template or the template refuses the messages.
    """
    if tokenizer.chat_template is None:
        raise RequestError("this model has no chat template; use /v1/completions", "messages")
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            add_generation_prompt=True,
            tokenize=False,
        )
    except Exception as error:  # a template is the model author's program: it may raise anything
        raise RequestError(f"the model's chat template refuses these messages: {error}", "messages") from error
    return tuple(tokenizer.encode(str(text), add_special_tokens=False))


class TextStream:
    """Turns one generation's tokens into text pieces that never split a character and never contain a stop string.

    Text that could be the beginning of a stop string is held back until it is not. `stopped` is set when one was found;
    what comes after it is dropped. Special tokens are no text, unless they are to be kept.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = (), *, keep_special: bool = False
    ) -> None:
        self._stop = tuple(stop)
        self._text = _decoder(tokenizer, skip_special_tokens=not keep_special)
        self._ids: list[int] = []
        self._decoded_from = self._read_from = 0
        self._held = ""
        self.stopped = False

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain after these tokens; may be empty."""
        if self.stopped:
            return ""
        self._ids += token_ids
        self._held += self._decode(last=False)
        return self._release(last=False)

    def finish(self) -> str:
        """What was held back, at the end of the generation."""
        if self.stopped:
            return ""
        self._held += self._decode(last=True)
        return self._release(last=True)

    def _decode(self, last: bool) -> str:
        """New text since the last call. Tokens are decoded with a few before them, whose text is then cut off, because
        many tokenizers decode a token differently at the start of a text."""
        before = self._text(self._ids[self._decoded_from : self._read_from])
        whole = self._text(self._ids[self._decoded_from :])
        if whole.endswith(_REPLACEMENT) and not last:
            return ""
        self._decoded_from, self._read_from = self._read_from, len(self._ids)
        return whole[len(before) :]

    def _release(self, last: bool) -> str:
        found = [position for stop in self._stop if (position := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            text, self._held = self._held[: min(found)], ""
            return text
        keep = 0 if last else max((_overlap(self._held, stop) for stop in self._stop), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


def _decoder(tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """Token ids to text. A stream decodes two short lists per token, and most of what transformers takes for that is
    looking at what it was given: its tokenizers that decode with `tokenizers` alone are asked there."""
    kind = type(tokenizer)
    if isinstance(tokenizer, PreTrainedTokenizerFast) and (kind.decode, kind._decode) == (
        PreTrainedTokenizerFast.decode,
        PreTrainedTokenizerFast._decode,
    ):
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=skip_special_tokens)
    options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
    return lambda ids: str(tokenizer.decode(ids, **options))
