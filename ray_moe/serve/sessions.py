"""Who may watch, and how a browser shows that it may: a browser's event streams carry cookies and no headers.

The narrowest key that the server has opens the live page: an admin token where there are any, else an API key, else
nothing is needed. `POST /ui/session` with it as a bearer gives a cookie that is good for half a day: it holds the time
when it ends, signed. No replica remembers anything, and the key itself is nowhere kept.

What signs is made of two things. One is a random secret of the application (`Keys.secret`): digests lie in Serve
configurations, which more people read than may watch, so a digest alone must open nothing. `serve.app.build` makes the
secret, once for all replicas, and Serve hands it to each inside the pickled application, not among the arguments that
its status and configurations show; this holds for `serve deploy` of a file too, since Serve builds an application once
and not in every replica. The other is the key's digest, so that a key that is taken away takes its sessions with it.
An application that is built anew has a new secret, and its browsers ask for the key again.
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
SESSION_S = 12 * 3600  # no cookie is good for longer, whoever signed it
_CLOCKS_S = 60  # how far apart the clocks of two replicas may be: what one has just given is good at the other
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
        lasting = SESSION_S - _CLOCKS_S
        ends = str(int(time.time()) + lasting)
        response.set_cookie(
            COOKIE,
            f"{ends}.{_signature(self._keys.secret, digest_of(key), ends)}",
            max_age=lasting,
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
            known |= hmac.compare_digest(signature, _signature(keys.secret, digest, ends))
        return known and 0 < int(ends) - time.time() <= SESSION_S


def _signature(secret: bytes, digest: str, ends: str) -> str:
    return hmac.new(secret, f"ray_moe ui {digest} {ends}".encode(), hashlib.sha256).hexdigest()


def _bearer(request: Request) -> str:
    given = request.headers.get("authorization", "")
    return given[len(_BEARER) :] if given.lower().startswith(_BEARER) else ""


def _path(request: Request) -> str:
    """Nothing but the page gets the cookie, wherever the application is mounted."""
    return f"{request.scope.get('root_path', '').rstrip('/')}/ui"


def _is_secure(request: Request) -> bool:
    """Also behind something that ends TLS."""
    return "https" in (request.url.scheme, request.headers.get("x-forwarded-proto", ""))
