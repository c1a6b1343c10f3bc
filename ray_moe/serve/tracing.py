"""A trace of each request for text: received, prepared, waiting for its turn, until the first token, until the last.

ASGI middleware that stands outside of everything else, where OpenTelemetry's environment variables ask for spans. What
answers a request finds its trace in the request's scope; without one it tells what goes nowhere.
"""

from __future__ import annotations

from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import get_route_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ray_moe.telemetry import Requests, RequestTrace, Untraced

_HERE = "ray_moe.trace"
_UNTRACED = Untraced()
# Path -> OpenTelemetry's name of the operation.
_OPERATIONS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat"}


def trace_of(scope: Scope) -> RequestTrace:
    """The trace of the request that a scope belongs to."""
    found: RequestTrace = scope.get(_HERE, _UNTRACED)
    return found


class Traced:
    """Begins the trace of a request for text and ends it with the answer; tells the caller where it is (`traceparent`).

    Nothing of a request but its route, and nothing of an answer but its status, is in a span.
    """

    def __init__(self, app: ASGIApp, requests: Requests) -> None:
        self._app, self._requests = app, requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = get_route_path(scope) if scope["type"] == "http" and scope["method"] == "POST" else ""
        operation = _OPERATIONS.get(route)
        if operation is None:
            await self._app(scope, receive, send)
            return
        trace = self._requests.begin(f"POST {route}", dict(Headers(scope=scope)))
        trace.tell({"http.request.method": "POST", "http.route": route, "gen_ai.operation.name": operation})
        trace.phase("receive")
        scope[_HERE] = trace

        failed = ""

        async def answer(message: Message) -> None:
            nonlocal failed
            if message["type"] == "http.response.start":
                failed = str(message["status"]) if message["status"] >= HTTPStatus.INTERNAL_SERVER_ERROR else ""
                headers = MutableHeaders(scope=message)
                for name, value in trace.headers.items():
                    headers[name] = value
                trace.tell({"http.response.status_code": message["status"]})
            await send(message)

        try:
            await self._app(scope, receive, answer)
        except BaseException as error:
            trace.end(type(error).__name__)
            raise
        trace.end(failed)
