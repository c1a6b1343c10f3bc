"""Everything that can go wrong with a request, in OpenAI's error shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ray_moe.errors import (
    ConfigError,
    DeadlineError,
    GenerationError,
    NotServingError,
    PeerLostError,
    PlacementError,
    RayMoEError,
    RequestError,
)
from ray_moe.serve.replies import Document
from ray_moe.serve.wording import short, worded


class ModelNotFoundError(RequestError):
    """The request names a model that is not served here."""


class OverloadedError(RayMoEError):
    """As many requests run and wait as may; another try makes sense after `seconds`."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message, seconds)
        self.message, self.seconds = message, seconds

    def __str__(self) -> str:
        return self.message


# Error -> (HTTP status, OpenAI's error type, code); the nearest ancestor counts.
ERRORS: dict[type[BaseException], tuple[HTTPStatus, str, str | None]] = {
    ConfigError: (HTTPStatus.BAD_REQUEST, "invalid_request_error", None),
    ModelNotFoundError: (HTTPStatus.NOT_FOUND, "invalid_request_error", "model_not_found"),
    PlacementError: (HTTPStatus.CONFLICT, "invalid_request_error", "placement"),
    GenerationError: (HTTPStatus.CONFLICT, "invalid_request_error", "generation"),
    OverloadedError: (HTTPStatus.TOO_MANY_REQUESTS, "rate_limit_error", "overloaded"),
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
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, error: Exception) -> Problem:
        status, kind, code = next(ERRORS[ancestor] for ancestor in type(error).__mro__ if ancestor in ERRORS)
        # Errors that nobody foresaw may hold anything; the log has them.
        message = str(error) if isinstance(error, RayMoEError) else f"internal error ({type(error).__name__})"
        headers = {"retry-after": str(math.ceil(error.seconds))} if isinstance(error, OverloadedError) else {}
        return cls(status, message, kind, getattr(error, "param", None), code, headers)

    def document(self) -> Document:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.document(), self.status, dict(self.headers))


def shape_errors(api: FastAPI) -> None:
    """Answer every error of an application in this shape."""

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


def unknown_model(model: str, served: str) -> ModelNotFoundError:
    """The refusal of a request for another model than the one served."""
    return ModelNotFoundError(f"model is {short(model)}; this server has {short(served)}", "model")
