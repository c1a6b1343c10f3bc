"""What the HTTP API answers: OpenAI's documents for completions and chat, whole or as server-sent events.

Both APIs answer with the same parts in different words; each is one `Reply`, chosen where the request comes in.
"""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

Document = dict[str, Any]

DONE = b"data: [DONE]\n\n"
_encoded = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # json.dumps makes an encoder per call


def event(document: Document) -> bytes:
    """One server-sent event."""
    return b"data: " + _encoded(document).encode() + b"\n\n"


@dataclass(frozen=True)
class Usage:
    """Exact counts: `completion_tokens` are all that the engine delivered, an end-of-sequence token included."""

    prompt_tokens: int
    completion_tokens: int

    def document(self) -> Document:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


@dataclass(frozen=True)
class Scored:
    """A token's bytes, which need not be whole characters, with its log probability, and the likeliest tokens'."""

    data: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


@dataclass(frozen=True)
class Part:
    """What is new of one choice: text, calls of tools as OpenAI's deltas, its tokens' log probabilities if they were
    asked for, why it ended."""

    choice: int
    text: str = ""
    calls: tuple[Document, ...] = ()
    scored: tuple[Scored, ...] | None = None
    finish_reason: str | None = None

    @property
    def says_something(self) -> bool:
        return bool(self.text or self.calls or self.scored or self.finish_reason)


@dataclass
class Choice:
    """All parts of one choice put together."""

    text: str = ""
    calls: list[Document] = field(default_factory=list)
    scored: list[Scored] | None = None
    finish_reason: str | None = None

    def add(self, part: Part) -> None:
        self.text += part.text
        for delta in part.calls:
            if "id" in delta:
                self.calls.append({**delta, "function": dict(delta["function"])})
                del self.calls[-1]["index"]
            else:
                self.calls[-1]["function"]["arguments"] += delta["function"]["arguments"]
        if part.scored is not None:
            self.scored = [*(self.scored or ()), *part.scored]
        self.finish_reason = part.finish_reason or self.finish_reason


@dataclass(frozen=True)
class Reply(ABC):
    """One answer in one API's words. `fingerprint` is the release that generates it; `created` is in Unix seconds.

    `leads` are the texts that its choices begin with, before anything is generated.
    """

    request_id: str
    created: int
    model: str
    fingerprint: str
    leads: tuple[str, ...]

    ID_PREFIX: ClassVar[str]
    WHOLE: ClassVar[str]
    CHUNK: ClassVar[str]

    @classmethod
    def begin(cls, model: str, fingerprint: str, leads: Sequence[str] = ("",)) -> Self:
        """A new answer, with an id of its own."""
        return cls(cls.ID_PREFIX + uuid.uuid4().hex, int(time.time()), model, fingerprint, tuple(leads))

    @abstractmethod
    def opening(self) -> tuple[Document, ...]:
        """Events that come before anything is generated."""

    @abstractmethod
    def chunk(self, part: Part, offset: int = 0) -> Document:
        """The event of one part; `offset` is the length of its choice's text before it."""

    @abstractmethod
    def _choice(self, choice: Choice, lead: str) -> Document:
        """A choice of the answer without streaming."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Document:
        """The answer without streaming."""
        worded = [
            {"index": place, **self._choice(choice, lead), "finish_reason": choice.finish_reason}
            for place, (choice, lead) in enumerate(zip(choices, self.leads, strict=True))
        ]
        return {**self._document(self.WHOLE, worded), "usage": usage.document()}

    def closing(self, usage: Usage) -> Document:
        """The event that ends a stream with `include_usage`."""
        return {**self._document(self.CHUNK), "usage": usage.document()}

    def _document(self, kind: str, choices: Sequence[Document] = ()) -> Document:
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": list(choices),
        }

    def _chunk(self, index: int, finish_reason: str | None = None, **content: object) -> Document:
        content.setdefault("logprobs", None)
        return self._document(self.CHUNK, [{"index": index, **content, "finish_reason": finish_reason}])


class CompletionReply(Reply):
    """/v1/completions."""

    ID_PREFIX = "cmpl-"
    WHOLE = CHUNK = "text_completion"

    def opening(self) -> tuple[Document, ...]:
        return tuple(self._chunk(index, text=lead) for index, lead in enumerate(self.leads) if lead)

    def chunk(self, part: Part, offset: int = 0) -> Document:
        logprobs = _columns(part.scored, len(self.leads[part.choice]) + offset)
        return self._chunk(part.choice, part.finish_reason, text=part.text, logprobs=logprobs)

    def _choice(self, choice: Choice, lead: str) -> Document:
        return {"text": lead + choice.text, "logprobs": _columns(choice.scored, len(lead))}


class ChatReply(Reply):
    """/v1/chat/completions."""

    ID_PREFIX = "chatcmpl-"
    WHOLE, CHUNK = "chat.completion", "chat.completion.chunk"

    def opening(self) -> tuple[Document, ...]:
        delta = {"role": "assistant", "content": ""}
        return tuple(self._chunk(index, delta=delta) for index in range(len(self.leads)))

    def chunk(self, part: Part, offset: int = 0) -> Document:
        delta: Document = {"content": part.text} if part.text else {}
        delta |= {"tool_calls": list(part.calls)} if part.calls else {}
        return self._chunk(part.choice, part.finish_reason, delta=delta, logprobs=_rows(part.scored))

    def _choice(self, choice: Choice, lead: str) -> Document:
        message: Document = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            message |= {"content": choice.text or None, "tool_calls": choice.calls}
        return {"message": message, "logprobs": _rows(choice.scored)}


# -- Log probabilities, as each API words them


def _rows(scored: Iterable[Scored] | None) -> Document | None:
    if scored is None:
        return None
    content = [
        {**_row(token.data, token.logprob), "top_logprobs": [_row(*likely) for likely in token.top]} for token in scored
    ]
    return {"content": content, "refusal": None}


def _row(data: bytes, logprob: float) -> Document:
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


def _columns(scored: Sequence[Scored] | None, offset: int) -> Document | None:
    if scored is None:
        return None
    offsets = []
    for token in scored:
        offsets.append(offset)
        offset += len(token.data.decode(errors="replace"))
    return {
        "tokens": [_name(token.data) for token in scored],
        "token_logprobs": [token.logprob for token in scored],
        "top_logprobs": [{_name(data): logprob for data, logprob in token.top} for token in scored],
        "text_offset": offsets,
    }


def _name(data: bytes) -> str:
    """A token as text; by its bytes where these are no text, so that two tokens never have one name."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
