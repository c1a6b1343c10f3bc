"""The HTTP API: OpenAI's routes over `TextGeneration`, and OpenAI's error shape for everything that can go wrong.

A request runs top down: body checked -> cluster known -> model known -> prompt tokenized -> generation started -> first
step there -> status line sent. So whatever is refused, and whatever fails before the first token, has an HTTP status of
its own; what fails later arrives as the stream's last event.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ray_moe.errors import ConfigError, DeadlineError, NotServingError, PeerLostError, RayMoEError, RequestError
from ray_moe.serve.generation import Backend, Backends, Step, TextGeneration
from ray_moe.serve.replies import DONE, ChatReply, CompletionReply, Document, Reply, Usage, event
from ray_moe.serve.schema import ChatRequest, CompletionRequest, short, worded
from ray_moe.text import render_chat

_LOG = logging.getLogger(__name__)

# OpenAI's own defaults: 16 tokens for a completion, no bound for a chat. Here a chat without a bound ends at what fits,
# and no later than this, so that a model which never ends does not hold its KV blocks up to the last position.
COMPLETION_MAX_TOKENS = 16
CHAT_MAX_TOKENS = 1024


def openai_api(backends: Backends) -> FastAPI:
    """The ASGI application."""

    @asynccontextmanager
    async def warm_up(_: FastAPI) -> AsyncIterator[None]:
        try:
            await backends.current()
        except RayMoEError as error:
            # The application may come up before its cluster; until then it answers 503 and says why.
            _LOG.warning("not serving yet: %s", error)
        yield

    api = FastAPI(title="ray_moe", lifespan=warm_up, redirect_slashes=False, strict_content_type=False)
    _shape_errors(api)

    @api.post("/v1/completions")
    async def completions(body: CompletionRequest) -> Response:
        backend = await admit(body)
        prompt_ids = await backends.tokenize(backend, lambda: _prompt_ids(backend, body.prompt))
        return await _answer(backends, backend, body, prompt_ids, CompletionReply, COMPLETION_MAX_TOKENS)

    @api.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest) -> Response:
        backend = await admit(body)
        messages = [message.for_template() for message in body.messages]
        prompt_ids = await backends.tokenize(backend, lambda: render_chat(backend.tokenizer, messages))
        fits = max(1, backend.room_after(len(prompt_ids)))
        return await _answer(backends, backend, body, prompt_ids, ChatReply, min(fits, CHAT_MAX_TOKENS))

    @api.get("/v1/models")
    async def models() -> Document:
        return {"object": "list", "data": [_model_card(await backends.current())]}

    @api.get("/v1/models/{model:path}")
    async def model(model: str) -> Document:
        backend = await backends.current()
        _require_model(backend, model)
        return _model_card(backend)

    @api.get("/health")
    async def health() -> Document:
        backend = await backends.check()
        return {"status": "ok", "model": backend.model, "release": backend.release_id}

    async def admit(body: CompletionRequest | ChatRequest) -> Backend:
        body.check()
        backend = await backends.current()
        _require_model(backend, body.model)
        return backend

    return api


def _prompt_ids(backend: Backend, prompt: str | Sequence[int]) -> Sequence[int]:
    return list(backend.tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt


def _require_model(backend: Backend, model: str) -> None:
    if model != backend.model:
        raise ModelNotFoundError(f"model is {short(model)}; this server has {short(backend.model)}", "model")


def _model_card(backend: Backend) -> Document:
    return {
        "id": backend.model,
        "object": "model",
        "created": backend.since,
        "owned_by": "ray_moe",
        "max_model_len": backend.room_after(0),
    }


# -- Answers


async def _answer(
    backends: Backends,
    backend: Backend,
    body: CompletionRequest | ChatRequest,
    prompt_ids: Sequence[int],
    kind: type[Reply],
    default_max_tokens: int,
) -> Response:
    params = body.sampling(default_max_tokens)
    reply = kind.begin(backend.model, backend.release_id)
    generation = TextGeneration(backends, backend, reply.request_id, prompt_ids, params)
    if not body.stream:
        with closing(generation):
            return JSONResponse(await _whole(reply, generation))
    steps = generation.steps()
    try:
        first = await anext(steps)
    except BaseException:
        generation.close()
        raise
    return _EventStream(generation, _events(reply, generation, first, steps, body.include_usage))


async def _whole(reply: Reply, generation: TextGeneration) -> Document:
    text, last = "", None
    async for last in generation.steps():
        text += last.text
    if last is None or last.finish_reason is None:
        raise NotServingError(f"{generation.request_id} ended without a finish reason")
    return reply.whole(text, last.finish_reason, Usage(generation.prompt_tokens, last.completion_tokens))


async def _events(
    reply: Reply, generation: TextGeneration, step: Step, steps: AsyncIterator[Step], include_usage: bool
) -> AsyncIterator[bytes]:
    """One event per step that has text, then how it ended. `step` is the first of `steps`, taken already."""
    nothing = {"usage": None} if include_usage else {}
    try:
        for document in reply.opening():
            yield event({**document, **nothing})
        while True:
            if step.text or step.finish_reason is not None:
                yield event({**reply.chunk(step.text, step.finish_reason), **nothing})
            if step.finish_reason is not None:
                break
            step = await anext(steps)
    except Exception as error:
        # The status line has been sent: all that is left to tell it with is an event.
        yield event(Problem.of(error).document())
        if isinstance(error, RayMoEError):
            return
        raise
    if include_usage:
        yield event(reply.closing(Usage(generation.prompt_tokens, step.completion_tokens)))
    yield DONE


class _EventStream(StreamingResponse):
    """Server-sent events of one generation, which ends when the sending does, however that comes about."""

    def __init__(self, generation: TextGeneration, events: AsyncIterator[bytes]) -> None:
        # Without the header a reverse proxy may hold events back to fill a buffer.
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close()


# -- Errors


class ModelNotFoundError(RequestError):
    """The request names a model that is not served here."""


# Error -> (HTTP status, OpenAI's error type, code); the nearest ancestor counts.
ERRORS: dict[type[BaseException], tuple[HTTPStatus, str, str | None]] = {
    ConfigError: (HTTPStatus.BAD_REQUEST, "invalid_request_error", None),
    ModelNotFoundError: (HTTPStatus.NOT_FOUND, "invalid_request_error", "model_not_found"),
    PeerLostError: (HTTPStatus.SERVICE_UNAVAILABLE, "server_error", "peer_lost"),
    NotServingError: (HTTPStatus.SERVICE_UNAVAILABLE, "server_error", "not_serving"),
    DeadlineError: (HTTPStatus.GATEWAY_TIMEOUT, "server_error", "deadline_exceeded"),
    Exception: (HTTPStatus.INTERNAL_SERVER_ERROR, "server_error", "internal_error"),
}


@dataclass(frozen=True)
class Problem:
    """An error in OpenAI's shape."""

    status: HTTPStatus
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, error: Exception) -> Problem:
        status, kind, code = next(ERRORS[ancestor] for ancestor in type(error).__mro__ if ancestor in ERRORS)
        # Errors that nobody foresaw may hold anything; the log has them.
        message = str(error) if isinstance(error, RayMoEError) else f"internal error ({type(error).__name__})"
        return cls(status, message, kind, getattr(error, "param", None), code)

    def document(self) -> Document:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.document(), self.status)


def _shape_errors(api: FastAPI) -> None:
    @api.exception_handler(RequestValidationError)
    async def bad_body(request: Request, error: RequestValidationError) -> JSONResponse:
        return _bad_body(request, error).response()

    @api.exception_handler(HTTPException)
    async def bad_route(request: Request, error: HTTPException) -> JSONResponse:
        response = _bad_route(request, error).response()
        response.headers.update(error.headers or {})
        return response

    @api.exception_handler(RayMoEError)
    @api.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return Problem.of(error).response()


def _bad_body(request: Request, error: RequestValidationError) -> Problem:
    issue = error.errors()[0]
    if issue["type"] == "json_invalid":
        problem = f"{issue['ctx']['error']} at character {issue['loc'][-1]}"
        return Problem(HTTPStatus.BAD_REQUEST, f"the request body is not JSON: {problem}")
    if isinstance(issue["input"], bytes):
        given = request.headers.get("content-type")
        return Problem(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Content-Type is {given!r}; it must be application/json")
    message, param = worded(error.errors())
    return Problem(HTTPStatus.BAD_REQUEST, message, param=param)


def _bad_route(request: Request, error: HTTPException) -> Problem:
    status, where = HTTPStatus(error.status_code), f"{request.method} {request.url.path}"
    if status is HTTPStatus.NOT_FOUND:
        return Problem(status, f"Invalid URL ({where})", code="not_found")
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "another method")
        return Problem(status, f"{where} is not allowed; {allowed} is", code="method_not_supported")
    if status is HTTPStatus.BAD_REQUEST:  # how FastAPI says that json.loads raised something unusual
        return Problem(status, "the request body cannot be read; it must be JSON in UTF-8, of reasonable depth")
    return Problem(status, str(error.detail))
