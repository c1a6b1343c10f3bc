"""What can go wrong between a client and a server, by name. Each is also the error that the same mistake has inside a
cluster, where there is one: code that catches `ConfigError` or `NotServingError` works for both doors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from ray_moe.errors import ConfigError, NotServingError, RayMoEError


class ClientError(RayMoEError):
    """Root of the errors of the HTTP clients."""


class UnreachableError(ClientError, NotServingError):
    """No connection came about: nothing was sent."""


class BrokenAnswerError(ClientError):
    """The connection ended before the answer did, or the answer cannot be read. The server may have done the work."""


class AnswerTimeoutError(ClientError):
    """The answer, or its next part, did not come in time. The server may still be at it."""


class StatusError(ClientError):
    """The server answered with an error: its HTTP `status`, what it says, and the request's id to look for in logs.

    `param` is the field that is refused, `retry_after` how many seconds to wait, where the server says so.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "",
        param: str | None = None,
        code: str | None = None,
        request_id: str = "",
        retry_after: float | None = None,
    ) -> None:
        super().__init__(status, message, kind, param, code, request_id, retry_after)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.request_id, self.retry_after = request_id, retry_after

    def __str__(self) -> str:
        return f"{self.status}: {self.message}" + (f" (request {self.request_id})" if self.request_id else "")


class BadRequestError(StatusError, ConfigError):
    """The request cannot be honoured as it is."""


class AuthenticationError(StatusError):
    """No API key, or one that is not valid here."""


class NotFoundError(BadRequestError):
    """No such model, or no such route."""


class RateLimitedError(StatusError):
    """As many requests run and wait as the server takes."""


class UnavailableError(StatusError, NotServingError):
    """The cluster does not serve now."""


class DeadlineExceededError(StatusError):
    """A deadline of the server's passed."""


class ServerFailedError(StatusError):
    """The server failed in a way that nobody foresaw."""


_BY_STATUS: dict[int, type[StatusError]] = {
    401: AuthenticationError,
    403: AuthenticationError,
    404: NotFoundError,
    429: RateLimitedError,
    503: UnavailableError,
    504: DeadlineExceededError,
}
# What a stream says that failed after its status line had been sent.
_BY_CODE = {"peer_lost": 503, "not_serving": 503, "overloaded": 429, "deadline_exceeded": 504}


def status_error(status: int, body: bytes, headers: Mapping[str, str]) -> StatusError:
    """The error that an answer means, whoever gave it: our server, or a proxy before it."""
    kind = _BY_STATUS.get(status, BadRequestError if status < 500 else ServerFailedError)
    told = _told(body)
    return kind(
        status,
        str(told.get("message") or body[:200].decode(errors="replace").strip() or "no reason given"),
        str(told.get("type") or ""),
        told.get("param"),
        told.get("code"),
        headers.get("x-request-id", ""),
        retry_after(headers.get("retry-after")),
    )


def stream_error(error: Mapping[str, Any], request_id: str) -> StatusError:
    """The error that a stream ended with."""
    status = _BY_CODE.get(str(error.get("code")), 400 if error.get("type") == "invalid_request_error" else 500)
    kind = _BY_STATUS.get(status, BadRequestError if status < 500 else ServerFailedError)
    return kind(
        status, str(error.get("message")), str(error.get("type")), error.get("param"), error.get("code"), request_id
    )


def retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header, which holds a number or a date; None without one, or with nonsense in it.

    >>> retry_after("3"), retry_after(None), retry_after("soon")
    (3.0, None, None)
    """
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            until = parsedate_to_datetime(value)
        except ValueError:
            return None
        seconds = (until.astimezone(UTC) - datetime.now(UTC)).total_seconds()
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _told(body: bytes) -> Mapping[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    error = document.get("error") if isinstance(document, dict) else None
    return error if isinstance(error, dict) else {}
