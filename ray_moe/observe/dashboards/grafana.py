"""Dashboards into a running Grafana, through its HTTP API.

The client is grafana-client, which continues grafana-api. Its 3.x line stands on requests; from 4.0 on it brings an
HTTP stack that puts a fork in urllib3's place for everything in the environment, Ray and model downloads included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from grafana_client import GrafanaApi  # type: ignore[import-untyped]
from grafana_client.client import GrafanaClientError, GrafanaException  # type: ignore[import-untyped]

from ray_moe import __version__
from ray_moe.errors import ConfigError, RayMoEError
from ray_moe.observe.dashboards.model import Json

# The folder that a push makes where it is not there yet.
FOLDER, FOLDER_UID = "ray_moe", "ray-moe"
_TIMEOUT_S = 15.0
_NOT_FOUND, _FORBIDDEN = 404, 403


@dataclass(frozen=True)
class Pushed:
    """A dashboard as Grafana has it now: `version` grows with every push that changed something."""

    uid: str
    title: str
    version: int
    url: str


class Grafana:
    """One Grafana. Everything that goes wrong is one line without the token: `ConfigError` where what was given is at
    fault (address, token, rights, folder), `RayMoEError` where Grafana is."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        address = _address(url)
        self._api = GrafanaApi(auth=_token(token), timeout=_TIMEOUT_S, **address)

    def push(self, dashboards: Sequence[Json], folder: str) -> list[Pushed]:
        """Create the dashboards, or replace those with the same uid wherever they are, in the folder of this uid or
        title. The default folder is made; any other must be there, so that a slip makes none."""
        uid = self._folder(folder)
        return [self._push(document, uid) for document in dashboards]

    def _push(self, document: Json, folder_uid: str) -> Pushed:
        request = {
            "dashboard": {**document, "id": None},
            "folderUid": folder_uid,
            "overwrite": True,
            "message": f"ray-moe {__version__}",
        }
        answer = self._ask(lambda: self._api.dashboard.update_dashboard(request), f"dashboard {document['uid']}")
        if answer.get("status") != "success":
            raise RayMoEError(f"Grafana at {self._url} did not take dashboard {document['uid']}: {answer}")
        path = str(answer.get("url", ""))
        return Pushed(document["uid"], document["title"], int(answer.get("version", 0)), path)

    def _folder(self, wanted: str) -> str:
        folders = self._ask(self._api.folder.get_all_folders, "folders", kind=list)
        for name in ("uid", "title"):
            for folder in folders:
                if folder.get(name) == wanted:
                    return str(folder["uid"])
        inner = self._inner_folder(wanted)
        if inner is not None:
            return inner
        if wanted != FOLDER:
            titles = ", ".join(repr(folder.get("title")) for folder in folders) or "none"
            raise ConfigError(f"Grafana at {self._url} has no folder {wanted!r}; found {titles}")
        if any(folder.get("uid") == FOLDER_UID for folder in folders):  # it has another title now
            return FOLDER_UID
        made = self._ask(lambda: self._api.folder.create_folder(FOLDER, FOLDER_UID), f"folder {FOLDER}")
        return str(made["uid"])

    def _inner_folder(self, wanted: str) -> str | None:
        """A folder inside another, which the list does not show, by its uid. Of a folder that is not there Grafana says
        404 to some tokens, and 403 to those that may not see every folder."""
        if not _may_be_uid(wanted):
            return None
        try:
            found = self._ask(lambda: self._api.folder.get_folder(wanted), "folder")
        except _Unseen:
            return None
        return str(found["uid"])

    def _ask(self, call: Callable[[], Any], what: str, kind: type = dict) -> Any:
        try:
            answer = call()
        except GrafanaClientError as error:
            raise self._refusal(error, what) from None
        except GrafanaException as error:
            raise RayMoEError(f"Grafana at {self._url} failed at {what}: {error}") from None
        except OSError as error:  # requests' errors are
            raise RayMoEError(f"Grafana at {self._url} does not answer: {_cause(error)}") from None
        except ValueError:
            raise RayMoEError(f"{self._url} answers, but not as Grafana's API does (in {what})") from None
        if not isinstance(answer, kind):
            raise RayMoEError(f"{self._url} answers, but not as Grafana's API does (in {what})")
        return answer

    def _refusal(self, error: GrafanaClientError, what: str) -> RayMoEError:
        if error.status_code == 401:
            return ConfigError(f"Grafana at {self._url} does not know this token (401)")
        if error.status_code == _FORBIDDEN:
            return _Unseen(
                f"the token may not write {what} of Grafana at {self._url} (403); a service account needs role Editor"
            )
        if error.status_code == _NOT_FOUND:
            return _Unseen(f"Grafana at {self._url} has no {what} (404); is this its address, sub-path included?")
        return ConfigError(f"Grafana at {self._url} refuses {what}: {error}")


class _Unseen(ConfigError):
    """404, or 403."""


def _address(url: str) -> dict[str, Any]:
    """What the client calls host, port, protocol and url_path_prefix."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--url is no address: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url must be http://HOST[:PORT][/PATH] or https://..., found {_without_user(url)!r}")
    if parts.username or parts.password:
        raise ConfigError("--url must not hold a user or password: give a token by --token or GRAFANA_TOKEN")
    if parts.query or parts.fragment:
        raise ConfigError(f"--url must end with Grafana's path, found {url!r}")
    path = parts.path.strip("/")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return {"protocol": parts.scheme, "host": host, "port": port, "url_path_prefix": f"{path}/" if path else ""}


def _token(token: str) -> str:
    """Without the line end of a file that it was read from. Its text never comes into a message: not even into one of
    the HTTP library, which quotes a header that it cannot send."""
    token = token.strip()
    if not token:
        raise ConfigError("no token: give one by --token or GRAFANA_TOKEN (a Grafana service account's, role Editor)")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError("the token has characters that no token has; it is not shown here")
    return token


def _without_user(url: str) -> str:
    return url.rpartition("@")[2]


def _may_be_uid(name: str) -> bool:
    """Grafana's uids: what else would change the path that is asked."""
    return 0 < len(name) <= 40 and all(each.isascii() and (each.isalnum() or each in "-_") for each in name)


def _cause(error: BaseException) -> str:
    """The innermost reason: what requests says around it is three lines of its own objects."""
    seen: BaseException = error
    while True:
        inner = getattr(seen, "reason", None) or seen.__cause__ or seen.__context__
        if not isinstance(inner, BaseException):
            inner = next((each for each in seen.args if isinstance(each, BaseException)), None)
        if not isinstance(inner, BaseException):
            return str(getattr(seen, "strerror", None) or str(seen).rpartition(": ")[2] or type(seen).__name__)
        seen = inner
