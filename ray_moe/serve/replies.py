"""What the HTTP API answers: OpenAI's documents for completions and chat, whole or as server-sent events.

Both APIs answer with the same steps in different words; each is one `Reply`, chosen where the request comes in.
"""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

Document = dict[str, Any]

DONE = b"data: [DONE]\n\n"


def event(document: Document) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


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
class Reply(ABC):
    """One answer in one API's words. `fingerprint` is the release that generates it; `created` is in Unix seconds."""

    request_id: str
    created: int
    model: str
    fingerprint: str

    ID_PREFIX: ClassVar[str]
    WHOLE: ClassVar[str]
    CHUNK: ClassVar[str]

    @classmethod
    def begin(cls, model: str, fingerprint: str) -> Self:
        """A new answer, with an id of its own."""
        return cls(cls.ID_PREFIX + uuid.uuid4().hex, int(time.time()), model, fingerprint)

    @abstractmethod
    def opening(self) -> tuple[Document, ...]:
        """Events that come before any text."""

    @abstractmethod
    def chunk(self, text: str, finish_reason: str | None) -> Document:
        """The event of one step."""

    @abstractmethod
    def whole(self, text: str, finish_reason: str, usage: Usage) -> Document:
        """The answer without streaming."""

    def closing(self, usage: Usage) -> Document:
        """The event that ends a stream with `include_usage`."""
        return {**self._document(self.CHUNK), "usage": usage.document()}

    def _document(self, kind: str, *choices: Document) -> Document:
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": list(choices),
        }


class CompletionReply(Reply):
    """/v1/completions."""

    ID_PREFIX = "cmpl-"
    WHOLE = CHUNK = "text_completion"

    def opening(self) -> tuple[Document, ...]:
        return ()

    def chunk(self, text: str, finish_reason: str | None) -> Document:
        return self._document(self.CHUNK, _choice(finish_reason, text=text))

    def whole(self, text: str, finish_reason: str, usage: Usage) -> Document:
        return {**self._document(self.WHOLE, _choice(finish_reason, text=text)), "usage": usage.document()}


class ChatReply(Reply):
    """/v1/chat/completions."""

    ID_PREFIX = "chatcmpl-"
    WHOLE, CHUNK = "chat.completion", "chat.completion.chunk"

    def opening(self) -> tuple[Document, ...]:
        return (self._document(self.CHUNK, _choice(None, delta={"role": "assistant", "content": ""})),)

    def chunk(self, text: str, finish_reason: str | None) -> Document:
        return self._document(self.CHUNK, _choice(finish_reason, delta={"content": text} if text else {}))

    def whole(self, text: str, finish_reason: str, usage: Usage) -> Document:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {**self._document(self.WHOLE, _choice(finish_reason, message=message)), "usage": usage.document()}


def _choice(finish_reason: str | None, **content: object) -> Document:
    return {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
