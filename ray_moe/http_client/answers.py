"""What the server says, as values: whole answers, chunks of streams, and the events that carry them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ray_moe.http_client.failures import BrokenAnswerError, stream_error

Document = Mapping[str, Any]
_DONE = "[DONE]"


@dataclass(frozen=True)
class Choice:
    """One of an answer's choices. `message` is a chat's, with its tool calls; `logprobs` as the server gives them."""

    index: int
    text: str
    finish_reason: str
    message: Document | None = None
    logprobs: Document | None = None


@dataclass(frozen=True)
class Answer:
    """A whole answer; `raw` is the document that it came as."""

    id: str
    model: str
    choices: tuple[Choice, ...]
    usage: Mapping[str, int]
    raw: Document

    @property
    def text(self) -> str:
        """The first choice's."""
        return self.choices[0].text


@dataclass(frozen=True)
class Chunk:
    """A part of a stream: new text of choice `index`, and why that choice ended, if it did.

    `delta` is a chat's, with its tool calls. The last one has the `usage` and no text, where it was asked for.
    """

    index: int
    text: str
    finish_reason: str | None
    raw: Document
    delta: Document | None = None
    usage: Mapping[str, int] | None = None


def answer_of(document: Any) -> Answer:
    """Raises `BrokenAnswerError` for a document that is no answer."""
    try:
        choices = tuple(
            Choice(
                one["index"],
                (one["message"]["content"] or "") if "message" in one else one["text"],
                one["finish_reason"],
                one.get("message"),
                one.get("logprobs"),
            )
            for one in document["choices"]
        )
        return Answer(document["id"], document["model"], choices, document.get("usage") or {}, document)
    except (KeyError, TypeError, IndexError) as error:
        raise BrokenAnswerError(f"the answer is no completion: {error!r}") from error


class Events:
    """Server-sent events of one stream, line by line. `ended` once the server has said that it is complete."""

    def __init__(self, request_id: str = "") -> None:
        self.ended = False
        self._request_id = request_id

    def chunks(self, line: str) -> Iterator[Chunk]:
        """What a line adds: mostly one chunk, or none.

        Raises the error that the stream ended with, and `BrokenAnswerError` for what cannot be read.
        """
        if not line.startswith("data:"):
            return
        data = line[len("data:") :].strip()
        if data == _DONE:
            self.ended = True
            return
        try:
            document = json.loads(data)
            failed = document.get("error")
            chunks = [] if failed else list(_chunks(document))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BrokenAnswerError(f"an event of the stream cannot be read: {data[:80]!r}") from error
        if failed:
            raise stream_error(failed, self._request_id)
        yield from chunks

    def require_end(self) -> None:
        """Raise `BrokenAnswerError` when the connection was closed before the stream was complete."""
        if not self.ended:
            raise BrokenAnswerError("the stream ended before it was complete")


def _chunks(document: Document) -> Iterator[Chunk]:
    usage = document.get("usage")
    for one in document["choices"]:
        delta = one.get("delta")
        text = (delta.get("content") or "") if delta is not None else one["text"]
        yield Chunk(one["index"], text, one.get("finish_reason"), document, delta, usage)
    if not document["choices"] and usage is not None:
        yield Chunk(0, "", None, document, None, usage)
