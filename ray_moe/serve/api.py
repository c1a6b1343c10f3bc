"""The HTTP API: OpenAI's routes over `TextGeneration`, and OpenAI's error shape for everything that can go wrong.

A request runs top down: body checked (schema) -> cluster known -> model known -> prompt tokenized -> generation started
-> first step there -> status line sent. So all that is refused, and all that fails before the first token, has a status
of its own; what fails later arrives as the stream's last event.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
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

# OpenAI's own defaults: 16 tokens for a completion, no bound for a chat. A chat without a bound of its own stops here,
# so that a model which never ends does not hold its KV blocks up to the last position.
COMPLETION_MAX_TOKENS = 16
CHAT_MAX_TOKENS = 1024

# Error -> (HTTP status, OpenAI's error type, code). The nearest ancestor counts.
ERRORS: dict[type[Exception], tuple[HTTPStatus, str, str | None]] = {
    ConfigError: (HTTPStatus.BAD_REQUEST, "invalid_request_error", None),
    PeerLostError: (HTTPStatus.SERVICE_UNAVAILABLE, "server_error", "peer_lost"),
    NotServingError: (HTTPStatus.SERVICE_UNAVAILABLE, "server_error", "not_serving"),
    DeadlineError: (HTTPStatus.GATEWAY_TIMEOUT, "server_error", "deadline_exceeded"),
    Exception: (HTTPStatus.INTERNAL_SERVER_ERROR, "server_error", "internal_error"),
}


class ModelNotFoundError(RequestError):
    """The request names a model that is not served here."""


ERRORS[ModelNotFoundError] = (HTTPStatus.NOT_FOUND, "invalid_request_error", "model_not_found")


def openai_api(backends: Backends) -> FastAPI:
    """The ASGI application."""

    @asynccontextmanager
    async def warm_up(_: FastAPI) -> AsyncIterator[None]:
        try:
            await backends.current()
        except RayMoEError as error:
            # The application may come up before its cluster; until then it answers 503, which says so.
            _LOG.warning("not serving yet: %s", error)
        yield

    api = FastAPI(title="ray_moe", lifespan=warm_up, redirect_slashes=False, strict_content_type=False)
    _shape_errors(api)

    @api.post("/v1/completions")
    async def completions(body: CompletionRequest) -> Response:
        backend = await _backend_for(backends, body)
        prompt = body.prompt
        encode: Callable[[], Sequence[int]] = lambda: backend.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
