"""The live page: `/ui`, its files, and the stream of events that it draws.

The page itself is for everybody and holds nothing; what it draws is for whoever `Watchers` admits. `/ui/events` tells
all of `observe.live.LiveView` twice a second, each part only when it has changed; `/ui/live` is the whole document
once. A replica asks its cluster once, however many watch, and writes each text once, on threads of the page's own: the
event loop also carries the streams of those who generate.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from http import HTTPStatus
from pathlib import Path
from time import monotonic
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, RedirectResponse, StreamingResponse
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ray_moe.cluster import Cluster
from ray_moe.deadline import Deadline, wait_for
from ray_moe.errors import RayMoEError
from ray_moe.observe.live import Known, LiveView, merged, steps_after
from ray_moe.serve.access import AccessRules
from ray_moe.serve.problems import Problem
from ray_moe.serve.replies import Document
from ray_moe.serve.sessions import Watchers

_FILES = Path(__file__).with_suffix("")
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Nothing comes from elsewhere, nothing runs that is not a file of ours, and nobody frames the page.
_POLICY = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_EVERY_S, _CALL_S = 0.5, 3.0
# A stream ends so that a replica that leaves is not kept; browsers come back at once. Each of them has one.
_STREAM_S, _BACK_MS = 60.0, 400
MOST_WATCHERS = 32


def ui_routes(find: Callable[[], Cluster], rules: AccessRules) -> APIRouter:
    """Routes below /ui over the cluster that `find` gives."""
    router = APIRouter(prefix="/ui", include_in_schema=False)
    watchers, feed = Watchers(rules), Feed(find)
    assets = {path.name: _Asset.read(path) for path in sorted(_FILES.iterdir()) if path.suffix in _TYPES}

    @router.get("")
    async def page(request: Request) -> Response:
        return assets["index.html"].answer(request)

    @router.get("/")
    async def page_elsewhere() -> Response:
        return RedirectResponse("../ui", HTTPStatus.PERMANENT_REDIRECT)  # the page's own links begin beside it

    @router.get("/session")
    async def session(request: Request) -> Document:
        """Whether this browser may watch, and what it would need."""
        return {"open": watchers.admits(request), "wanted": watchers.wanted}

    @router.post("/session")
    async def begin(request: Request) -> Response:
        response = Response(status_code=HTTPStatus.NO_CONTENT)
        return response if watchers.open(request, response) else _locked(watchers)

    @router.delete("/session")
    async def end(request: Request) -> Response:
        response = Response(status_code=HTTPStatus.NO_CONTENT)
        watchers.close(request, response)
        return response

    @router.get("/live")
    async def live(request: Request) -> Response:
        if not watchers.admits(request):
            return _locked(watchers)
        return Response(await feed.document(), media_type="application/json", headers=_POLICY)

    @router.get("/events")
    async def events(request: Request) -> Response:
        if not watchers.admits(request):
            return _locked(watchers)
        return _Watching(feed)

    @router.get("/{name}")
    async def file(name: str, request: Request) -> Response:
        asset = assets.get(name)
        if asset is None:
            return Problem(HTTPStatus.NOT_FOUND, f"Invalid URL (GET {request.url.path})", code="not_found").response()
        return asset.answer(request)

    return router


def _locked(watchers: Watchers) -> JSONResponse:
    message = f"the live page wants an {watchers.wanted}: Authorization: Bearer ..., or a session of it"
    return Problem(
        HTTPStatus.UNAUTHORIZED,
        message,
        "authentication_error",
        code="invalid_session",
        headers={"www-authenticate": "Bearer"},
    ).response()


@dataclass(frozen=True)
class _Asset:
    """One of the page's files, as it is answered with."""

    content: bytes
    media_type: str
    tag: str

    @staticmethod
    def read(path: Path) -> _Asset:
        content = path.read_bytes()
        return _Asset(content, _TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')

    def answer(self, request: Request) -> Response:
        headers = {**_POLICY, "etag": self.tag}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


class _Watching(StreamingResponse):
    """One page's stream, or that there is no room for it.

    The place is taken here and not by the route or the stream: nothing may happen between that and what frees it, and
    a stream that is never read from does not even begin.
    """

    def __init__(self, feed: Feed) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(feed.events(), media_type="text/event-stream", headers=headers)
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._feed.place() as there_is:
            if there_is:
                await super().__call__(scope, receive, send)
                return
        full = f"{MOST_WATCHERS} pages watch through this replica already"
        problem = Problem(HTTPStatus.SERVICE_UNAVAILABLE, full, "server_error", code="too_many_watchers")
        await problem.response()(scope, receive, send)


# -- What is told


class Feed:
    """One replica's looks at its cluster, for all who watch through it."""

    def __init__(self, find: Callable[[], Cluster]) -> None:
        self._find = find
        self._cluster: Cluster | None = None
        # Of its own: a call that waits for a controller to come back must not take a thread from the admin routes, nor
        # from what has been looked at and is to be written.
        self._asker, self._writer = ThreadPoolExecutor(1, "live"), ThreadPoolExecutor(1, "live-text")
        self._asking: asyncio.Task[_Look] | None = None
        self._last: _Look | None = None
        self._looked = float("-inf")
        self.watching = 0

    @contextmanager
    def place(self) -> Iterator[bool]:
        """One of `MOST_WATCHERS` places for as long as the block lasts; False where all are taken."""
        there_is = self.watching < MOST_WATCHERS
        self.watching += there_is
        try:
            yield there_is
        finally:
            self.watching -= there_is

    async def document(self) -> bytes:
        """All that is known, half a second old at most, as JSON. Raises what `Cluster.live` does, `DeadlineError`."""
        look = await self._look()
        return await self._written(look, "document", look.document)

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events, for as long as a stream lasts: `view` with what has changed, `problem` with why there is
        none."""
        told, deadline = _NOTHING, Deadline(_STREAM_S)
        yield f"retry: {_BACK_MS}\n\n".encode()
        while not deadline.passed:
            try:
                look = await self._look()
                news = await self._news(look, told)
            except Exception as error:
                yield _event("problem", _json({"message": Problem.of(error).message}))
                if not isinstance(error, RayMoEError):
                    raise
            else:
                yield news
                told = _Told(look.number, look.view.known)
            await asyncio.sleep(_EVERY_S)

    async def _look(self) -> _Look:
        if self._last is not None and monotonic() - self._looked < 0.9 * _EVERY_S:
            return self._last
        if self._asking is None:
            self._asking = asyncio.create_task(self._refresh())
            self._asking.add_done_callback(_hear)  # whoever asked may have gone
        return await wait_for(asyncio.shield(self._asking), _CALL_S, "the controller's answer")

    async def _refresh(self) -> _Look:
        try:
            self._last = await asyncio.get_running_loop().run_in_executor(self._asker, self._ask, self._last)
        finally:
            self._asking = None
        self._looked = monotonic()
        return self._last

    def _ask(self, last: _Look | None) -> _Look:
        try:
            self._cluster = self._cluster or self._find()
            later = self._cluster.live(last.view.known if last is not None else Known())
        except Exception:
            self._cluster = None  # another one of this name may be there by the next time
            raise
        return _Look.after(last, merged(last.view, later) if last is not None else later)

    async def _news(self, look: _Look, told: _Told) -> bytes:
        since = told if told.known.life == look.view.known.life else _NOTHING
        return await self._written(look, since.number, lambda: look.news(since))

    async def _written(self, look: _Look, what: str | int, write: Callable[[], bytes]) -> bytes:
        """One text of a look, written once for all who want it."""
        writing = look.texts.get(what)
        if writing is None:
            writing = asyncio.get_running_loop().run_in_executor(self._writer, write)
            writing.add_done_callback(_hear)
            look.texts[what] = writing
        return await wait_for(asyncio.shield(writing), _CALL_S, "the live document as text")


@dataclass(frozen=True)
class _Told:
    """What a stream has told already: everything up to the look of this number. It keeps no look, nor its texts."""

    number: int
    known: Known


_NOTHING = _Told(-1, Known())


@dataclass(frozen=True)
class _Part:
    """One field of the document and its JSON, which is that of every look from number `since` on."""

    value: Any
    text: str
    since: int


@dataclass(frozen=True)
class _Look:
    """One look, with the texts that were made of it: by the number of the look that streams had told before."""

    number: int
    view: LiveView
    parts: Mapping[str, _Part]
    texts: dict[str | int, asyncio.Future[bytes]] = field(default_factory=dict)

    @staticmethod
    def after(last: _Look | None, view: LiveView) -> _Look:
        """The look that follows `last`. Steps are not written yet: each stream lacks others of them."""
        number, parts = (last.number + 1 if last is not None else 0), dict[str, _Part]()
        for name in (each.name for each in fields(view) if each.name not in ("steps", "known")):
            value, before = getattr(view, name), last.parts[name] if last is not None else None
            if before is None or before.value is not value:
                text = _written(value)
                before = _Part(value, text, before.since if before is not None and before.text == text else number)
            parts[name] = before
        return _Look(number, view, parts)

    def document(self) -> bytes:
        texts = {name: part.text for name, part in self.parts.items()}
        return _joined({**texts, "steps": _written(self.view.steps), "known": _written(self.view.known)}).encode()

    def news(self, told: _Told) -> bytes:
        """The event for streams that have told so much: the parts that have changed, and the steps since."""
        news = {"at": self.parts["at"].text, "life": _json(self.view.known.life)}
        news |= {name: part.text for name, part in self.parts.items() if part.since > told.number}
        steps = (steps_after(each, told.known.steps.get(each.rank, 0)) for each in self.view.steps)
        news["steps"] = _written(tuple(each for each in steps if each.seconds))
        return _event("view", _joined(news))


def _event(name: str, data: str) -> bytes:
    return f"event: {name}\ndata: {data}\n\n".encode()


def _joined(texts: Mapping[str, str]) -> str:
    return "{" + ",".join(f'"{name}":{text}' for name, text in texts.items()) + "}"


def _written(value: Any) -> str:
    """A part as JSON, piece by piece: one call of the encoder lets no other thread run, the event loop's neither."""
    if is_dataclass(value):
        return _joined({each.name: _written(getattr(value, each.name)) for each in fields(value)})
    return f"[{','.join(map(_json, value))}]" if isinstance(value, tuple) else _json(value)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    raise TypeError(f"{type(value).__name__} is no part of a live document")


_json = json.JSONEncoder(default=_plain, separators=(",", ":"), allow_nan=False).encode


def _hear(asked: asyncio.Future[Any]) -> None:
    """Nobody may be left to be told of a failure; those who ask again are told of the next one."""
    if not asked.cancelled():
        asked.exception()
