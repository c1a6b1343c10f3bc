"""The HTTP API: OpenAI's routes over a cluster, health, metrics and the admin routes.

A request runs top down: key and size (`Doorway`) -> body checked -> cluster known -> model known -> prompt tokenized,
format compiled -> its turn (`Gate`) -> generations started -> first step there -> status line sent. So whatever is
refused, and whatever fails before the first token, has an HTTP status of its own; what fails later arrives as the
stream's last event.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from fastapi import FastAPI
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

_LOG = logging.getLogger(__name__)
_GENERATING = failures(400, 401, 404, 413, 415, 429, 503, 504)
_ASKING = failures(401, 503, 504)


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
) -> FastAPI:
    """The ASGI application; with `cluster`, its admin routes too."""
    limits, rules = limits or Limits(), rules or AccessRules()
    gate = Gate(limits.capacity)
    counters = Counters(lambda: gate.running, lambda: gate.queued)
    desk = _Desk(backends, limits, gate, counters)

    @asynccontextmanager
    async def warm_up(_: FastAPI) -> AsyncIterator[None]:
        try:
            await backends.current()
        except RayMoEError as error:
            # The application may come up before its cluster; until then it answers 503 and says why.
            _LOG.warning("not serving yet: %s", error)
        yield

    api = FastAPI(title="ray_moe", lifespan=warm_up, redirect_slashes=False, strict_content_type=False)
    shape_errors(api)
    api.add_middleware(Doorway, rules=rules, counters=counters)

    @api.post("/v1/completions", responses={**openapi.answers(openapi.COMPLETION, streams=True), **_GENERATING})
    async def completions(body: CompletionRequest) -> Response:
        """Continue a prompt, or several."""
        return await desk.answer(body, CompletionReply)

    @api.post("/v1/chat/completions", responses={**openapi.answers(openapi.CHAT, streams=True), **_GENERATING})
    async def chat_completions(body: ChatRequest) -> Response:
        """The assistant's next turn of a conversation."""
        return await desk.answer(body, ChatReply)

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

    @api.get("/health", responses=openapi.answers(openapi.STATUS))
    async def health() -> Document:
        """This process answers; whether its cluster does is `/ready`'s to say."""
        return {"status": "ok"}

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

    async def answer(self, body: CompletionRequest | ChatRequest, kind: type[Reply]) -> Response:
        seconds = self._limits.request_timeout_s
        deadline = Deadline(seconds) if seconds is not None else None
        try:
            body.check()
            backend = await self._backends.current()
            if body.model != backend.model:
                raise unknown_model(body.model, backend.model)
            work = await prepare(self._backends, backend, body, self._limits.bounds)
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

        if not body.stream:
            try:
                choices = await answer.whole(timing.token)
                answer.complete = True
                return JSONResponse(reply.whole(choices, answer.usage))
            finally:
                close()
        parts = answer.parts()
        try:
            first = await anext(parts)
        except BaseException:
            close()
            raise
        timing.token()
        return _EventStream(_events(reply, answer, first, parts, body.include_usage), close)


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
