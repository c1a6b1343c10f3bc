"""Who may watch, and how a browser shows that it may: a browser's event streams carry cookies and no headers.

The narrowest key that the server has opens the live page: an admin token where there are any, else an API key, else
nothing is needed. `POST /ui/session` with it as a bearer gives a cookie that is good for half a day on every replica:
it holds the time when it ends, signed with the key's digest, so that no replica remembers anything and a key that is
taken away takes its sessions with it. The key itself is nowhere kept.
"""

from __future__ import annotations

import hashlib
import hmac
import time

from starlette.requests import Request
from starlette.responses import Response

from ray_moe.serve.access import AccessRules
from ray_moe.serve.keys import Keys, digest_of

COOKIE = "ray_moe_ui"
SESSION_S = 12 * 3600
_BEARER = "bearer "


class Watchers:
    """Decides by `rules` who may see the live page's data."""

    def __init__(self, rules: AccessRules) -> None:
        tokens = rules.admin_tokens if rules.admin_tokens.digests else None
        self._keys: Keys | None = tokens or rules.api_keys
        self.wanted = "" if self._keys is None else "admin token" if tokens is not None else "API key"

    def admits(self, request: Request) -> bool:
        """By a key in the request, or by a session."""
        if self._keys is None or self._keys.accept(_bearer(request)):
            return True
        return self._is_session(request.cookies.get(COOKIE, ""), self._keys)

    def open(self, request: Request, response: Response) -> bool:
        """Give a session to whoever sends a key; False for one that is none."""
        key = _bearer(request)
        if self._keys is None or not self._keys.accept(key):
            return self._keys is None
        ends = str(int(time.time()) + SESSION_S)
        response.set_cookie(
            COOKIE,
            f"{ends}.{_signature(digest_of(key), ends)}",
            max_age=SESSION_S,
            path=_path(request),
            secure=_is_secure(request),
            httponly=True,
            samesite="strict",
        )
        return True

    @staticmethod
    def close(request: Request, response: Response) -> None:
        """End the session of this browser."""
        response.delete_cookie(COOKIE, path=_path(request), httponly=True, samesite="strict")

    @staticmethod
    def _is_session(cookie: str, keys: Keys) -> bool:
        ends, _, signature = cookie.partition(".")
        if not (ends.isascii() and ends.isdecimal() and len(ends) < 16 and signature.isascii()):
            return False
        known = False
        for digest in keys.digests:
            known |= hmac.compare_digest(signature, _signature(digest, ends))
        return known and time.time() < int(ends)


def _signature(digest: str, ends: str) -> str:
    return hmac.new(bytes.fromhex(digest), f"ray_moe ui {ends}".encode(), hashlib.sha256).hexdigest()


def _bearer(request: Request) -> str:
    given = request.headers.get("authorization", "")
    return given[len(_BEARER) :] if given.lower().startswith(_BEARER) else ""


def _path(request: Request) -> str:
    """Nothing but the page gets the cookie, wherever the application is mounted."""
    return f"{request.scope.get('root_path', '').rstrip('/')}/ui"


def _is_secure(request: Request) -> bool:
    """Also behind something that ends TLS."""
    return "https" in (request.url.scheme, request.headers.get("x-forwarded-proto", ""))
