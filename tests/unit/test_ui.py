"""The live page's routes: files with a policy, sessions instead of headers, a stream that tells what has changed."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import pickle
import re
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from ray import cloudpickle
from starlette.requests import ClientDisconnect

from ray_moe.errors import NotServingError
from ray_moe.observe.live import Known, LiveView, StepsView
from ray_moe.serve import app, sessions, ui
from ray_moe.serve.access import AccessRules
from ray_moe.serve.keys import Keys, digest_of
from ray_moe.serve.ui import Feed, ui_routes
from tests.observe.large import LargeCluster

KEY, ADMIN = "key-of-the-tests-0001", "admin-of-the-tests-01"
OPEN = AccessRules()
KEYED = AccessRules(api_keys=Keys((digest_of(KEY),)))
GUARDED = AccessRules(api_keys=Keys((digest_of(KEY),)), admin_tokens=Keys((digest_of(ADMIN),)))
FILES = sorted((Path(ui.__file__).with_suffix("")).iterdir())


def small() -> LargeCluster:
    sizes = {"layers": 2, "experts": 8, "ranks": 3, "per_node": 1, "copies": 2, "capacity": 5}
    cluster = LargeCluster(**sizes, step_s=0.05, switch_every_s=3600)
    cluster.began -= 5  # it has run a hundred steps
    return cluster


def client(rules: AccessRules = OPEN, cluster: Any = None, root_path: str = "") -> httpx.AsyncClient:
    api, watched = FastAPI(), cluster or small()
    api.include_router(ui_routes(lambda: watched, rules))
    transport = httpx.ASGITransport(api, root_path=root_path)
    return httpx.AsyncClient(transport=transport, base_url="http://here")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# -- Files


async def fetch(path: str, rules: AccessRules = OPEN, **headers: str) -> httpx.Response:
    async with client(rules) as browser:
        return await browser.get(path, headers=headers)


@pytest.mark.parametrize("name", ["", *(f"/{path.name}" for path in FILES if path.suffix != ".html")])
def test_every_file_is_served_to_everybody_under_a_policy_that_lets_nothing_else_in(name: str) -> None:
    answer = asyncio.run(fetch(f"/ui{name}", GUARDED))
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    again = asyncio.run(fetch(f"/ui{name}", **{"if-none-match": answer.headers["etag"]}))
    assert (again.status_code, again.content) == (304, b"")


def test_no_file_names_another_host_or_holds_code_outside_of_scripts() -> None:
    assert {path.suffix for path in FILES} == {".html", ".css", ".js", ".svg"}
    for path in FILES:
        text = path.read_text()
        outside = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]+[^\s\"'`]*", text)) - {"http://www.w3.org/2000/svg"}
        assert outside == set(), path.name
        assert "@import" not in text
    page = (FILES[0].parent / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son[a-z]+=|\sstyle=|javascript:", page)


def test_what_is_no_file_of_the_page_is_not_found_and_a_slash_leads_back() -> None:
    assert asyncio.run(fetch("/ui/secrets.py")).status_code == 404
    assert asyncio.run(fetch("/ui/..%2Fui.py")).status_code == 404
    slash = asyncio.run(fetch("/ui/"))
    assert (slash.status_code, slash.headers["location"]) == (308, "../ui")


# -- Who may watch


async def statuses(rules: AccessRules, *headers: dict[str, str]) -> list[int]:
    async with client(rules) as browser:
        return [(await browser.get("/ui/live", headers=each)).status_code for each in headers]


def test_the_narrowest_key_that_the_server_has_opens_the_page_and_none_is_needed_where_there_is_none() -> None:
    asked: list[dict[str, str]] = [{}, bearer(KEY), bearer(ADMIN), bearer("x" * 20)]
    assert asyncio.run(statuses(OPEN, *asked)) == [200, 200, 200, 200]
    assert asyncio.run(statuses(KEYED, *asked)) == [401, 200, 401, 401]
    assert asyncio.run(statuses(GUARDED, *asked)) == [401, 401, 200, 401]


def test_a_key_gives_a_session_that_opens_the_stream_until_it_is_ended() -> None:
    async def visit() -> None:
        async with client(GUARDED) as browser:
            assert (await browser.get("/ui/session")).json() == {"open": False, "wanted": "admin token"}
            refused = await browser.post("/ui/session", headers=bearer(KEY))
            assert (refused.status_code, "set-cookie" in refused.headers) == (401, False)
            begun = await browser.post("/ui/session", headers=bearer(ADMIN))
            assert begun.status_code == 204
            assert (await browser.get("/ui/session")).json()["open"] is True
            assert (await browser.get("/ui/live")).status_code == 200
            await browser.delete("/ui/session")
            assert (await browser.get("/ui/live")).status_code == 401

    asyncio.run(visit())


async def session_of(rules: AccessRules, key: str, **kwargs: Any) -> tuple[str, str]:
    """The cookie's value, and the whole header."""
    async with client(rules, **kwargs) as browser:
        answer = await browser.post("/ui/session", headers=bearer(key))
        return answer.cookies[sessions.COOKIE], answer.headers["set-cookie"]


def test_the_cookie_is_hidden_from_scripts_bound_to_the_page_and_holds_no_key() -> None:
    value, header = asyncio.run(session_of(KEYED, KEY, root_path="/guarded"))
    assert {"HttpOnly", "Path=/guarded/ui", "SameSite=strict"} <= {part.strip() for part in header.split(";")}
    assert KEY not in value and digest_of(KEY) not in value


def cookie_opens(rules: AccessRules, value: str) -> bool:
    return asyncio.run(statuses(rules, {"cookie": f"{sessions.COOKIE}={value}"})) == [200]


def test_a_session_ends_in_time_and_with_its_key_and_no_other_can_be_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    value, _ = asyncio.run(session_of(KEYED, KEY))
    ends, signature = value.split(".")
    assert cookie_opens(KEYED, value)
    assert not cookie_opens(KEYED, f"{int(ends) + 1}.{signature}")
    assert not any(
        cookie_opens(KEYED, other) for other in ("", ".", "1", f"{ends}.", f"x{value}", f"{ends}.{'0' * 64}")
    )
    assert not cookie_opens(AccessRules(api_keys=Keys((digest_of("another-key-0123456"),))), value)
    assert not cookie_opens(GUARDED, value)  # an API key's session, where an admin token is wanted now
    later = time.time() + sessions.SESSION_S + 1
    monkeypatch.setattr(sessions.time, "time", lambda: later)
    assert not cookie_opens(KEYED, value)


def test_whoever_knows_the_digests_of_a_configuration_cannot_make_a_session() -> None:
    ends = str(int(time.time()) + 3600)
    for digest in (digest_of(KEY), digest_of(ADMIN)):
        for key in (bytes.fromhex(digest), digest.encode(), b""):
            for message in (f"ray_moe ui {ends}", f"ray_moe ui {digest} {ends}"):
                forged = f"{ends}.{hmac.new(key, message.encode(), hashlib.sha256).hexdigest()}"
                assert not cookie_opens(KEYED, forged) and not cookie_opens(GUARDED, forged)


def test_replicas_take_each_others_sessions_and_another_application_with_the_same_key_takes_none() -> None:
    replica = pickle.loads(pickle.dumps(KEYED))
    value, _ = asyncio.run(session_of(replica, KEY))
    assert cookie_opens(KEYED, value) and cookie_opens(pickle.loads(pickle.dumps(KEYED)), value)
    assert not cookie_opens(AccessRules(api_keys=Keys((digest_of(KEY),))), value)


def test_a_session_that_would_end_later_than_any_ends_is_none_however_well_signed() -> None:
    assert KEYED.api_keys is not None
    for after_s, opens in ((sessions.SESSION_S - 5, True), (sessions.SESSION_S + 60, False), (10**10, False)):
        ends = str(int(time.time()) + after_s)
        signed = sessions._signature(KEYED.api_keys.secret, digest_of(KEY), ends)
        assert cookie_opens(KEYED, f"{ends}.{signed}") is opens


def test_what_signs_sessions_is_in_no_text_of_the_rules() -> None:
    keys = Keys((digest_of(KEY),))
    assert len(keys.secret) >= 32 and keys.secret != Keys(keys.digests).secret
    assert "secret" not in repr(AccessRules(api_keys=keys)) and keys == Keys(keys.digests)


def test_an_application_is_built_with_a_secret_that_travels_inside_its_code_and_not_among_its_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[AccessRules] = []

    def rules(**fields: Any) -> AccessRules:
        made.append(AccessRules(**fields))
        return made[-1]

    monkeypatch.setattr(app, "AccessRules", rules)
    args = {"api_key_digests": [digest_of(KEY)], "admin_token_digests": [digest_of(ADMIN)]}
    pickled = [cloudpickle.dumps(app.build(args)) for _ in range(2)]
    first, second = (each.admin_tokens.secret for each in made)
    assert [first in each for each in pickled] == [True, False]
    assert [second in each for each in pickled] == [False, True]
    assert args == {"api_key_digests": [digest_of(KEY)], "admin_token_digests": [digest_of(ADMIN)]}


# -- The stream


def parsed(event: bytes) -> tuple[str, Any]:
    name, data = event.decode().removesuffix("\n\n").split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def taken(events: AsyncIterator[bytes], count: int) -> list[tuple[str, Any]]:
    assert (await anext(events)).startswith(b"retry: ")
    return [parsed(await anext(events)) for _ in range(count)]


class Watched:
    """A cluster that counts its questions, and does not answer for a while in between."""

    def __init__(self, silent: range = range(0)) -> None:
        self.asked, self.silent, self.cluster = 0, silent, small()

    def live(self, known: Known) -> LiveView:
        self.asked += 1
        if self.asked in self.silent:
            raise NotServingError("the controller of cluster 'large' is gone")
        return self.cluster.live(known)


def test_the_first_event_tells_everything_and_later_ones_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui, "_EVERY_S", 0.05)
    cluster = small()

    async def watch() -> list[tuple[str, Any]]:
        return await taken(Feed(lambda: cluster).events(), 3)  # type: ignore[arg-type,return-value]

    (_, first), (_, second), (_, third) = asyncio.run(watch())
    assert {"headline", "ranks", "placement", "survival", "generations", "loads", "balance"} <= set(first)
    assert "placement" not in second and "survival" not in second and "headline" not in second
    assert first["life"] == second["life"]
    # Every rank's steps go on where the last event ended.
    counts = {each["rank"]: each["first"] + len(each["seconds"]) for each in first["steps"]}
    later = [*second["steps"], *third["steps"]]
    assert {each["rank"] for each in later} == {0, 1, 2}
    for each in later:
        assert each["first"] == counts[each["rank"]]
        counts[each["rank"]] += len(each["seconds"])


def test_a_controller_that_does_not_answer_is_a_problem_that_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui, "_EVERY_S", 0.05)
    watched = Watched(silent=range(2, 4))

    async def watch() -> list[tuple[str, Any]]:
        return await taken(Feed(lambda: watched).events(), 4)  # type: ignore[arg-type,return-value]

    events = asyncio.run(watch())
    assert [name for name, _ in events] == ["view", "problem", "problem", "view"]
    assert events[1][1] == {"message": "the controller of cluster 'large' is gone"}


def test_however_many_watch_the_cluster_is_asked_once_and_a_text_is_written_once() -> None:
    watched = Watched()

    async def watch() -> list[bytes]:
        feed = Feed(lambda: watched)  # type: ignore[arg-type,return-value]
        streams = [feed.events() for _ in range(8)]
        for stream in streams:
            await anext(stream)
        return await asyncio.gather(*map(anext, streams))

    events = asyncio.run(watch())
    assert watched.asked == 1
    assert all(event is events[0] for event in events)


def test_nothing_of_a_document_is_written_on_the_event_loop_and_steps_whole_only_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ui, "_EVERY_S", 0.05)
    written: list[tuple[str, Any]] = []
    encode = ui._json

    def spy(value: Any) -> str:
        written.append((threading.current_thread().name, value))
        return encode(value)

    monkeypatch.setattr(ui, "_json", spy)
    cluster = small()

    def steps() -> list[int]:
        """How many of each rank were written since the last time that this was asked."""
        parts = [each for _, value in written for each in (value if isinstance(value, list | tuple) else [value])]
        written.clear()
        return [len(each.seconds) for each in parts if isinstance(each, StepsView)]

    async def watch() -> None:
        here = threading.current_thread().name
        async with client(cluster=cluster) as browser:
            assert (await browser.get("/ui/live")).status_code == 200
        assert here not in {thread for thread, _ in written}
        assert steps() == [100] * 3
        stream = Feed(lambda: cluster).events()  # type: ignore[arg-type,return-value]
        await taken(stream, 1)
        assert steps() == [100] * 3
        for _ in range(4):
            await anext(stream)
        assert here not in {thread for thread, _ in written}
        assert sum(steps()) < 100  # what the clock made since

    asyncio.run(watch())


def test_of_many_that_come_at_once_no_more_are_let_in_than_there_are_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui, "_EVERY_S", 0.05)
    monkeypatch.setattr(ui, "_STREAM_S", 0.5)

    async def come(browser: httpx.AsyncClient, count: int) -> list[int]:
        answers = await asyncio.gather(*(browser.get("/ui/events") for _ in range(count)))
        return sorted(each.status_code for each in answers)

    async def visit() -> None:
        async with client() as browser:
            assert await come(browser, 60) == [200] * ui.MOST_WATCHERS + [503] * (60 - ui.MOST_WATCHERS)
            assert await come(browser, ui.MOST_WATCHERS) == [200] * ui.MOST_WATCHERS  # every place is free again

    asyncio.run(visit())


@pytest.mark.parametrize("at", ["before it begins", "while it runs"])
def test_a_stream_that_breaks_gives_its_place_back(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui, "MOST_WATCHERS", 1)
    cluster, sent = small(), list[Any]()

    async def send(message: Any) -> None:
        sent.append(message)
        if at == "before it begins" or len(sent) > 2:
            raise OSError("the browser has gone")

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def visit() -> None:
        feed = Feed(lambda: cluster)  # type: ignore[arg-type,return-value]
        for _ in range(3):  # there is one place: one that is lost refuses the next
            sent.clear()
            scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
            with pytest.raises(ClientDisconnect):
                await ui._Watching(feed)(scope, receive, send)
            assert sent[0]["status"] == 200
            assert feed.watching == 0

    asyncio.run(visit())


def test_a_stream_that_is_cancelled_gives_its_place_back() -> None:
    cluster = small()

    async def forever(_: Any = None) -> Any:
        await asyncio.sleep(60)

    async def visit() -> Feed:
        feed = Feed(lambda: cluster)  # type: ignore[arg-type,return-value]
        scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
        watching = [asyncio.create_task(ui._Watching(feed)(scope, forever, forever)) for _ in range(3)]
        await asyncio.sleep(0)
        assert feed.watching == 3
        for each in watching:
            each.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        return feed

    assert asyncio.run(visit()).watching == 0


def test_a_stream_ends_by_itself_so_that_a_replica_can_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui, "_EVERY_S", 0.02)
    monkeypatch.setattr(ui, "_STREAM_S", 0.1)
    cluster = small()

    async def watch() -> list[bytes]:
        return [event async for event in Feed(lambda: cluster).events()]  # type: ignore[arg-type,return-value]

    assert len(asyncio.run(watch())) >= 2


def test_more_than_a_replica_has_room_for_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui, "MOST_WATCHERS", 0)
    answer = asyncio.run(fetch("/ui/events"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "too_many_watchers")
