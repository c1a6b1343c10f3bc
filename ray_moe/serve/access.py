"""What stands before every route: request ids, keys, the size of bodies, and the count of what was answered."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.routing import get_route_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ray_moe.serve.counters import Counters
from ray_moe.serve.keys import Keys
from ray_moe.serve.problems import Problem

REQUEST_ID = "x-request-id"
_REQUEST_ID_FORM = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_BEARER = "bearer "


@dataclass(frozen=True)
class AccessRules:
    """Who may come in, and with how large a body.

    Without `api_keys` everybody may; without `admin_tokens` nobody may administrate. Request ids are echoed here, or,
    behind Ray Serve, by its proxy.
    """

    api_keys: Keys | None = None
    admin_tokens: Keys = field(default_factory=Keys)
    max_body_bytes: int = 8 * 2**20
    echo_request_ids: bool = True


class Doorway:
    """ASGI middleware that applies the rules."""

    def __init__(self, app: ASGIApp, rules: AccessRules, counters: Counters) -> None:
        self._app, self._rules, self._counters = app, rules, counters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID)
        valid = given is not None and _REQUEST_ID_FORM.fullmatch(given) is not None
        request_id = given if given is not None and valid else f"req-{uuid.uuid4().hex}"

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                if self._rules.echo_request_ids:
                    MutableHeaders(scope=message)[REQUEST_ID] = request_id
                self._count(scope, message["status"])
            await send(message)

        problem = self._problem(get_route_path(scope), headers)
        if given is not None and not valid:
            problem = Problem(
                HTTPStatus.BAD_REQUEST,
                f"X-Request-Id has {len(given)} characters; it must be 1 to 128 of A-Z, a-z, 0-9 and ._:/+=@-",
            )
        if problem is None:
            await self._app(scope, self._bounded(receive), answer)
        else:
            self._counters.refusals.labels(problem.code or problem.status.phrase).inc()
            await problem.response()(scope, receive, answer)

    def _problem(self, path: str, headers: Headers) -> Problem | None:
        problem = self._locked(path, headers.get("authorization", ""))
        if problem is not None:
            return problem
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._rules.max_body_bytes:
            return _too_large(self._rules.max_body_bytes)
        return None

    def _locked(self, path: str, authorization: str) -> Problem | None:
        """Why these credentials do not open this path; None when they do."""
        key = authorization[len(_BEARER) :] if authorization.lower().startswith(_BEARER) else ""
        admin, api_keys = self._rules.admin_tokens, self._rules.api_keys
        if _is_below(path, "/admin"):
            if not admin.digests:
                message = "admin routes are off: this server has no admin token"
                return Problem(HTTPStatus.FORBIDDEN, message, "permission_error", code="admin_disabled")
            return None if admin.accept(key) else _unauthorized(bool(key), "admin token", "invalid_admin_token")
        if api_keys is None or not (_is_below(path, "/v1") or path == "/metrics"):
            return None
        if api_keys.accept(key) or (path == "/metrics" and admin.accept(key)):
            return None
        return _unauthorized(bool(key), "API key", "invalid_api_key")

    def _bounded(self, receive: Receive) -> Receive:
        """A body without a length, or with a false one, ends where it becomes too large."""
        taken = 0

        async def bounded() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._rules.max_body_bytes:
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, _too_large(self._rules.max_body_bytes).message)
            return message

        return bounded

    def _count(self, scope: Scope, status: int) -> None:
        route = getattr(scope.get("route"), "path", "none")
        self._counters.requests.labels(route, status).inc()


def _is_below(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}/")


def _unauthorized(given: bool, what: str, code: str) -> Problem:
    message = f"the {what} is not valid here" if given else f"an {what} is required: Authorization: Bearer ..."
    headers = {"www-authenticate": "Bearer"}
    return Problem(HTTPStatus.UNAUTHORIZED, message, "authentication_error", code=code, headers=headers)


def _too_large(most: int) -> Problem:
    message = f"the request body is too large; this server takes {most} bytes"
    return Problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="body_too_large")
