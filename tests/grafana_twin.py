"""A stand-in for a Grafana's HTTP API: what the documentation says that folders and dashboards answer, over real HTTP.

It keeps what it is given, counts versions, checks the token, and refuses what Grafana refuses. It is no Grafana: it
does not load a dashboard, and shows nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

TOKEN = "glsa_a-secret-of-the-test_0a1b2c3d"


class Twin:
    """What it holds: folders (title by uid), dashboards by uid, and every request's method and path.

    `failing` is (status, body) that every request gets instead, `html` a login page's text. `inner` are folders inside
    others, which a list does not show; what a token that sees few folders is told of one that is not there is `unseen`.
    """

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix
        self.folders: dict[str, str] = {}
        self.dashboards: dict[str, dict[str, Any]] = {}
        self.requests: list[tuple[str, str]] = []
        self.inner: dict[str, str] = {}
        self.unseen = 404
        self.failing: tuple[int, dict[str, Any]] | None = None
        self.html: str | None = None
        self.url = ""

    def answer(self, method: str, path: str, token: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.requests.append((method, path))
        if self.failing is not None:
            return self.failing
        if not path.startswith(f"{self.prefix}/api/"):
            return 404, {"message": "Not found"}
        if token != f"Bearer {TOKEN}":
            return 401, {"message": "Invalid API key", "messageId": "api-key.invalid", "statusCode": 401}
        match (method, path.removeprefix(f"{self.prefix}/api").strip("/").split("/")):
            case ("GET", ["folders"]):
                return 200, [
                    {"id": at, "uid": uid, "title": title} for at, (uid, title) in enumerate(self.folders.items())
                ]
            case ("GET", ["folders", uid]):
                title = {**self.folders, **self.inner}.get(uid)
                if title is None:
                    return self.unseen, {"message": "folder not found", "status": "not-found"}
                return 200, {"id": 1, "uid": uid, "title": title, "version": 1}
            case ("POST", ["folders"]):
                if body["uid"] in self.folders:
                    return 409, {"message": "a folder with the same uid already exists"}
                self.folders[body["uid"]] = body["title"]
                return 200, {"id": 1, "uid": body["uid"], "title": body["title"], "version": 1}
            case ("POST", ["dashboards", "db"]):
                return self._save(body)
        return 404, {"message": "Not found"}

    def _save(self, body: dict[str, Any]) -> tuple[int, Any]:
        given = body["dashboard"]
        if body.get("folderUid", "") not in {**self.folders, **self.inner}:
            return 400, {"message": "folder not found"}
        if not given.get("title"):
            return 400, {"message": "Dashboard title cannot be empty"}
        known = self.dashboards.get(given["uid"])
        if known is not None and not body.get("overwrite"):
            return 412, {"message": "The dashboard has been changed by someone else", "status": "version-mismatch"}
        # Grafana makes no new version of a dashboard that is as it was.
        version = 1 if known is None else known["version"] + (known["dashboard"] != given)
        self.dashboards[given["uid"]] = {"dashboard": given, "version": version, "folder": body["folderUid"]}
        url = f"{self.prefix}/d/{given['uid']}/{given['uid']}"
        found = {"id": 7, "uid": given["uid"], "slug": given["uid"], "url": url, "version": version}
        return 200, {"status": "success", **found}


@contextmanager
def grafana(prefix: str = "") -> Iterator[Twin]:
    """One on a free port of loopback, while the block lasts."""
    twin = Twin(prefix)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else {}
            status, found = twin.answer(self.command, self.path, self.headers.get("Authorization", ""), body)
            text = (twin.html or json.dumps(found)).encode()
            self.send_response(200 if twin.html else status)
            self.send_header("Content-Type", "text/html" if twin.html else "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PUT = _answer

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    twin.url = f"http://127.0.0.1:{server.server_port}{prefix}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield twin
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
