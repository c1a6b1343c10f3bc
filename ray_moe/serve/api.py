"""The HTTP API: OpenAI's routes over a cluster, health, metrics and the admin routes.

A request runs top down: key and size (`Doorway`) -> body checked -> cluster known -> model known -> prompt tokenized,
format compiled -> its turn (`Gate`) -> generations started -> first step there -> status line sent. So whatever is
refused, and whatever fails before the first token, has an HTTP status of its own; what fails later arrives as the
stream's last event.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ray_moe.cluster import Cluster
from ray_moe.deadline import Deadline
from ray_moe.errors import RayMoEError, RequestError
from ray_moe.serve import openapi
from ray_moe.serve.access import AccessRules, Doorway
from ray_moe.serve.admin import admin_routes
from ray_moe.serve.admission import Capacity, Gate
from ray_moe.serve.answers import Answer, prepare
from ray_moe.serve.asking import Bounds
from ray_moe.serve.counters import CONTENT_TYPE, Counters, Timing
from ray_moe.serve.experts import experts_routes
from ray_moe.serve.generation import Backend, Backends
from ray_moe.serve.openapi import failures
from ray_moe.serve.problems import Problem, shape_errors, unknown_model
from ray_moe.serve.replies import DONE, ChatReply, CompletionReply, Document, Part, Reply, event
from ray_moe.serve.schema import ChatRequest, CompletionRequest
from ray_moe.serve.tracing import Traced, trace_of
from ray_moe.serve.ui import ui_routes
from ray_moe.telemetry import Requests, RequestTrace, Untraced

if TYPE_CHECKING:
    from ray_moe.actors.exporter import Exporter

_LOG = logging.getLogger(__name__)
_GENERATING = failures(400, 401, 404, 413, 415, 429, 503, 504)
_ASKING = failures(401, 503, 504)
# Where the application comes up before its cluster does, which would say how often.
_EXPORT_S = 5.0
_LEFT = 499  # what access logs and counters show for a client that left before its answer; nobody is there to see it
_T = TypeVar("_T")


@dataclass(frozen=True)
class Limits:
    """What one replica takes on, and what one request may ask for; seconds bound a whole answer, None for as long as
    tokens keep coming."""

    capacity: Capacity = field(default_factory=Capacity)
    bounds: Bounds = field(default_factory=Bounds)
    request_timeout_s: float | None = None


def openai_api(
    backends: Backends,
    *,
    limits: Limits | None = None,
    rules: AccessRules | None = None,
    cluster: Callable[[], Cluster] | None = None,
    requests: Requests | None = None,
    export: Exporter | None = None,
) -> FastAPI:
    """The ASGI application; with `cluster`, its admin routes too. `requests` traces those for text.

    What is counted also goes to `export`, as often as the cluster's own metrics do.
    """
    limits, rules = limits or Limits(), rules or AccessRules()
    gate = Gate(limits.capacity)
    counters = Counters(lambda: gate.running, lambda: gate.queued)
    desk = _Desk(backends, limits, gate, counters)

    @asynccontextmanager
    async def warm_up(_: FastAPI) -> AsyncIterator[None]:
        every_s = _EXPORT_S
        try:
            backend = await backends.current()
            every_s = backend.metrics_every_s
        except RayMoEError as error:
            # The application may come up before its cluster; until then it answers 503 and says why.
            _LOG.warning("not serving yet: %s", error)
        exporting = asyncio.create_task(counters.export(export, every_s)) if export is not None and every_s else None
        yield
        if exporting is not None:
            exporting.cancel()

    api = FastAPI(title="ray_moe", lifespan=warm_up, redirect_slashes=False, strict_content_type=False)
    shape_errors(api)
    api.add_middleware(Doorway, rules=rules, counters=counters)
    if requests is not None and not isinstance(requests, Untraced):
        api.add_middleware(Traced, requests=requests)

    @api.post("/v1/completions", responses={**openapi.answers(openapi.COMPLETION, streams=True), **_GENERATING})
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a prompt, or several."""
        return await desk.answer(body, CompletionReply, request.receive, trace_of(request.scope))

    @api.post("/v1/chat/completions", responses={**openapi.answers(openapi.CHAT, streams=True), **_GENERATING})
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """The assistant's next turn of a conversation."""
        return await desk.answer(body, ChatReply, request.receive, trace_of(request.scope))

    @api.post("/v1/embeddings", responses=failures(400, 401, 413), status_code=400, response_model=None)
    async def embeddings() -> Response:
        """Refused: the models that are served here generate text."""
        raise RequestError("this server generates text; it has no embeddings", "model")

    @api.get("/v1/models", responses={**openapi.answers(openapi.MODELS), **_ASKING})
    async def models() -> Document:
        return {"object": "list", "data": [_model_card(await backends.current())]}

    @api.get("/v1/models/{model:path}", responses={**openapi.answers(openapi.MODEL), **_ASKING, **failures(404)})
    async def model(model: str) -> Document:
        backend = await backends.current()
        if model != backend.model:
            raise unknown_model(model, backend.model)
        return _model_card(backend)

    @api.head("/health", include_in_schema=False)
    @api.get("/health", responses=openapi.answers(openapi.STATUS))
    async def health() -> Document:
        """This process answers; whether its cluster does is `/ready`'s to say."""
        return {"status": "ok"}

    @api.head("/ready", include_in_schema=False)
    @api.get("/ready", responses={**openapi.answers(openapi.STATUS), **failures(503, 504)})
    async def ready() -> Document:
        """The cluster says that it serves."""
        backend = await backends.check()
        return {"status": "ok", "model": backend.model, "release": backend.release_id}

    @api.get("/metrics", responses={200: {"content": {"text/plain": {}}}, **failures(401)}, response_model=None)
    async def metrics() -> Response:
        """What this replica has counted, for Prometheus."""
        return Response(counters.text(), media_type=CONTENT_TYPE)

    api.include_router(experts_routes(backends, gate))
    if cluster is not None:
        api.include_router(admin_routes(cluster))
        api.include_router(ui_routes(cluster, rules))
    openapi.describe(api, keys=rules.api_keys is not None)
    return api


def _model_card(backend: Backend) -> Document:
    return {
        "id": backend.model,
        "object": "model",
        "created": backend.since,
        "owned_by": "ray_moe",
        "max_model_len": backend.room_after(0),
    }


# -- Answers


class _Desk:
    """Where requests for text are prepared, wait for their turn, and are answered."""

    def __init__(self, backends: Backends, limits: Limits, gate: Gate, counters: Counters) -> None:
        self._backends, self._limits, self._gate, self._counters = backends, limits, gate, counters

    async def answer(
        self, body: CompletionRequest | ChatRequest, kind: type[Reply], receive: Receive, trace: RequestTrace
    ) -> Response:
        seconds = self._limits.request_timeout_s
        deadline = Deadline(seconds) if seconds is not None else None
        try:
            trace.phase("prepare")
            body.check()
            backend = await self._backends.current()
            if body.model != backend.model:
                raise unknown_model(body.model, backend.model)
            work = await prepare(self._backends, backend, body, self._limits.bounds)
            trace.phase("queue")
            place = await self._gate.enter(len(work.prompts))
        except RayMoEError as error:
            self._counters.refusals.labels(type(error).__name__).inc()
            raise
        reply = kind.begin(backend.model, backend.release_id, work.leads)
        timing = Timing(self._counters, work.prompt_tokens)
        answer = Answer(self._backends, backend, work, reply.request_id, deadline)

        def close() -> None:
            answer.close()
            place.leave()
            timing.end(answer.usage.completion_tokens, complete=answer.complete)
            trace.tell(_told(reply, answer, backend))

        def token() -> None:
            timing.token()
            if not answer.begun:
                answer.begun = True
                trace.phase("generate")

        trace.phase("first token")
        if not body.stream:
            try:
                choices = await _while_there(answer.whole(token), receive)
                if choices is None:
                    return Response(status_code=_LEFT)
                answer.complete = True
                return JSONResponse(reply.whole(choices, answer.usage))
            finally:
                close()
        parts = answer.parts()
        try:
            first = await _while_there(anext(parts), receive)
        except BaseException:
            close()
            raise
        if first is None:
            close()
            return Response(status_code=_LEFT)
        token()
        return _EventStream(_events(reply, answer, first, parts, body.include_usage), close)


async def _while_there(work: Awaitable[_T], receive: Receive) -> _T | None:
    """None, and no more `work`, where the client leaves first. Serve's proxy cancels what is asked of it then; a server
    that listens itself says so by a message, and by nothing else while there is nothing to send. `work` has deadlines
    of its own, for each token and for the whole."""
    asked, left = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((asked, left), return_when=asyncio.FIRST_COMPLETED)
        return await asked if asked.done() else None
    finally:
        for task in (asked, left):
            task.cancel()
            task.add_done_callback(lambda done: done.cancelled() or done.exception())


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


def _told(reply: Reply, answer: Answer, backend: Backend) -> dict[str, str | int | bool]:
    """What a trace says about an answer: which model's and release's, how many tokens, what its last one ran under."""
    usage, latest = answer.usage, answer.latest
    told: dict[str, str | int | bool] = {
        "gen_ai.request.model": backend.model,
        "gen_ai.response.id": reply.request_id,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "ray_moe.release": backend.release_id,
        "ray_moe.complete": answer.complete,
    }
    if latest is not None:
        told |= {"ray_moe.generation": latest.generation, "ray_moe.epoch": latest.epoch, "ray_moe.step": latest.step}
    return told


async def _events(
    reply: Reply, answer: Answer, part: Part, parts: AsyncIterator[Part], include_usage: bool
) -> AsyncIterator[bytes]:
    """One event per part that says something. `part` is the first of `parts`, taken already."""
    nothing = {"usage": None} if include_usage else {}
    said = [0] * len(reply.leads)
    following: Part | None = part
    try:
        for document in reply.opening():
            yield event({**document, **nothing})
        while following is not None:
            part = following
            if part.says_something:
                yield event({**reply.chunk(part, said[part.choice]), **nothing})
                said[part.choice] += len(part.text)
            following = await anext(parts, None)
    except Exception as error:
        # The status line has been sent: all that is left to tell it with is an event.
        yield event(Problem.of(error).document())
        if isinstance(error, RayMoEError):
            return
        raise
    answer.complete = True
    if include_usage:
        yield event(reply.closing(answer.usage))
    yield DONE


class _EventStream(StreamingResponse):
    """Server-sent events of one answer, which ends when the sending does, however that comes about."""

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        # Without the header a reverse proxy may hold events back to fill a buffer.
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()
