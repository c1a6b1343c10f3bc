"""The live page: `/ui`, its files, and the stream of events that it draws.

The page itself is for everybody and holds nothing; what it draws is for whoever `Watchers` admits. `/ui/events` tells
all of `observe.live.LiveView` twice a second, each part only when it has changed; `/ui/live` is the whole document
once. A replica asks its cluster once, however many watch.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, is_dataclass
from http import HTTPStatus
from pathlib import Path
from time import monotonic
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, RedirectResponse, StreamingResponse
from starlette.responses import Response

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
        await feed.look()
        return Response(feed.document(), media_type="application/json", headers=_POLICY)

    @router.get("/events")
    async def events(request: Request) -> Response:
        if not watchers.admits(request):
            return _locked(watchers)
        if feed.watching >= MOST_WATCHERS:
            full = f"{MOST_WATCHERS} pages watch through this replica already"
            return Problem(HTTPStatus.SERVICE_UNAVAILABLE, full, "server_error", code="too_many_watchers").response()
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(feed.events(), media_type="text/event-stream", headers=headers)

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


# -- What is told


class Feed:
    """One replica's looks at its cluster, for all who watch through it."""

    def __init__(self, find: Callable[[], Cluster]) -> None:
        self._find = find
        self._cluster: Cluster | None = None
        # Of its own: a call that waits for a controller to come back must not take a thread from the admin routes.
        self._thread = ThreadPoolExecutor(1, "live")
        self._asking: asyncio.Task[LiveView] | None = None
        self._view: LiveView | None = None
        self._looked = float("-inf")
        self._parts: dict[str, _Part] = {}
        self.watching = 0

    async def look(self) -> LiveView:
        """The whole document, half a second old at most. Raises what `Cluster.live` does, `DeadlineError`."""
        if self._view is not None and monotonic() - self._looked < 0.9 * _EVERY_S:
            return self._view
        if self._asking is None:
            self._asking = asyncio.create_task(self._refresh())
            self._asking.add_done_callback(_hear)  # whoever asked may have gone
        return await wait_for(asyncio.shield(self._asking), _CALL_S, "the controller's answer")

    async def _refresh(self) -> LiveView:
        try:
            self._view = view = await asyncio.get_running_loop().run_in_executor(self._thread, self._ask)
        finally:
            self._asking = None
        self._looked = monotonic()
        for part in fields(view):
            self._tell(part.name, getattr(view, part.name))
        return view

    def _ask(self) -> LiveView:
        known = self._view.known if self._view is not None else Known()
        try:
            self._cluster = self._cluster or self._find()
            later = self._cluster.live(known)
        except Exception:
            self._cluster = None  # another one of this name may be there by the next time
            raise
        return merged(self._view, later) if self._view is not None else later

    def _tell(self, name: str, value: Any) -> None:
        before = self._parts.get(name)
        if before is None or before.value is not value:
            text = _json(value)
            self._parts[name] = _Part(value, text if before is None or before.text != text else before.text)

    def document(self) -> str:
        """The last look as JSON."""
        return _joined({name: part.text for name, part in self._parts.items()})

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events, for as long as a stream lasts: `view` with what has changed, `problem` with why there is
        none."""
        told, deadline = _Told(), Deadline(_STREAM_S)
        self.watching += 1
        try:
            yield f"retry: {_BACK_MS}\n\n".encode()
            while not deadline.passed:
                try:
                    view = await self.look()
                except Exception as error:
                    yield _event("problem", _json({"message": Problem.of(error).message}))
                    if not isinstance(error, RayMoEError):
                        raise
                else:
                    yield _event("view", told.news(view, self._parts))
                await asyncio.sleep(_EVERY_S)
        finally:
            self.watching -= 1


@dataclass(frozen=True)
class _Part:
    """One field of the document, and its JSON; an equal text is the same object."""

    value: Any
    text: str


class _Told:
    """What one stream has told already."""

    def __init__(self) -> None:
        self._life, self._texts, self._steps = "", dict[str, str](), dict[int, int]()

    def news(self, view: LiveView, parts: Mapping[str, _Part]) -> str:
        """The parts that this stream has not told yet, and the steps since its last event, as a JSON object."""
        if view.known.life != self._life:
            self._life, self._texts, self._steps = view.known.life, {}, {}
        news = {"at": parts["at"].text, "life": _json(view.known.life)}
        for name, part in parts.items():
            if name not in ("at", "steps", "known") and self._texts.get(name) is not part.text:
                self._texts[name] = news[name] = part.text
        steps = [steps_after(each, self._steps.get(each.rank, 0)) for each in view.steps]
        news["steps"] = _json([each for each in steps if each.seconds])
        self._steps = dict(view.known.steps)
        return _joined(news)


def _event(name: str, data: str) -> bytes:
    return f"event: {name}\ndata: {data}\n\n".encode()


def _joined(texts: Mapping[str, str]) -> str:
    return "{" + ",".join(f'"{name}":{text}' for name, text in texts.items()) + "}"


def _json(value: Any) -> str:
    return json.dumps(value, default=_plain, separators=(",", ":"), allow_nan=False)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} is no part of a live document")


def _hear(asked: asyncio.Task[LiveView]) -> None:
    """Nobody may be left to be told of a failure; those who ask again are told of the next one."""
    if not asked.cancelled():
        asked.exception()
