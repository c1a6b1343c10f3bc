"""The live page in a real browser: it draws a live cluster, follows a rebalance while it happens, says when what it
shows is old, and can be used by keyboard, on a phone and by whoever has the key only.

RAY_MOE_SCREENSHOTS=docs/img keeps pictures of it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray
import uvicorn
from fastapi import FastAPI
from selenium.webdriver.common.keys import Keys as Key

from ray_moe import cluster as clusters
from ray_moe.actors.remote import find_expert
from ray_moe.cluster import Cluster
from ray_moe.config import ClusterConfig
from ray_moe.deadline import join_thread, poll
from ray_moe.engine.sampling import SamplingParams
from ray_moe.models import tiny_moe_path
from ray_moe.sdk import Client
from ray_moe.serve import app
from ray_moe.serve.access import AccessRules
from ray_moe.serve.keys import Keys, digest_of
from ray_moe.serve.ui import ui_routes
from tests.cluster.http.server import free_port
from tests.observe.browser import Browser, browser
from tests.observe.large import LargeCluster
from tests.tools import require_tool

require_tool("chromium")
require_tool("chromedriver")

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NAME, KEY = "page", "key-of-the-tests-0001"


@dataclass(frozen=True)
class Watched:
    """A cluster that serves, and its page."""

    cluster: Cluster
    url: str


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def watched(local_ray: None) -> Iterator[Watched]:
    config = ClusterConfig(
        name=NAME,
        model=str(tiny_moe_path()),
        peers=2,
        spare_slots=3,
        kv_blocks=256,
        demand_every_steps=8,
        fill_bytes_per_s=2e6,  # a rebalance that can be watched
    )
    running = clusters.start(config)
    try:
        port = free_port()
        app.run(NAME, host="127.0.0.1", port=port, seconds=120)
        try:
            yield Watched(running, f"http://127.0.0.1:{port}/ui")
        finally:
            app.shutdown()
    finally:
        running.stop()


@contextmanager
def load(cluster: Cluster) -> Iterator[None]:
    """Two streams, one after the other, for as long as the block lasts."""
    over = threading.Event()

    async def ask() -> None:
        client = Client(cluster.directory())

        async def stream(seed: int) -> None:
            while not over.is_set():
                params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0, seed=seed)
                await client.generate([5 + seed, 9, 11, 40 + seed], params)
                seed += 2

        await asyncio.gather(stream(1), stream(2))

    thread = threading.Thread(target=lambda: asyncio.run(ask()), name="load")
    thread.start()
    try:
        yield
    finally:
        over.set()
        join_thread(thread, 60, "the load")


@contextmanager
def served(cluster: LargeCluster, rules: AccessRules | None = None, port: int = 0) -> Iterator[str]:
    """The page over a cluster that is made up, in this process; its address."""
    api, port = FastAPI(), port or free_port()
    api.include_router(ui_routes(lambda: cluster, rules or AccessRules()))  # type: ignore[arg-type,return-value]
    server = uvicorn.Server(uvicorn.Config(api, port=port, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, name="uvicorn")
    thread.start()
    try:
        assert poll(lambda: server.started, 30)
        yield f"http://127.0.0.1:{port}/ui"
    finally:
        server.should_exit = True
        join_thread(thread, 30, "the server")


def small() -> LargeCluster:
    return LargeCluster(layers=4, experts=16, ranks=3, per_node=1, copies=5, capacity=8, step_s=0.004)


def picture(page: Browser, name: str) -> None:
    if folder := os.environ.get("RAY_MOE_SCREENSHOTS"):
        page.picture(Path(folder) / f"{name}.png")


# -- A live cluster


def test_it_draws_a_live_cluster_and_follows_a_rebalance_while_it_happens(page: Browser, watched: Watched) -> None:
    page.screen(1440, 1800)
    with load(watched.cluster):
        page.open(watched.url)
        page.until(lambda: page.text("#freshness") == "live")
        assert page.text("#name") == NAME
        assert page.text("#state") == "serving"
        page.until(lambda: "4 layers" in page.text("#experts-note"), 60)  # once demand is known
        page.until(lambda: "half of them under" in page.text("#steps-note"))
        assert page.text(".figure.generation b") == "1"
        assert "2 ranks × 11 slots a layer; 24 slots free" in page.text("#slots-note")
        assert drawn(page, "#experts-map canvas") > 8  # colours
        before = drawn_as(page, "#slots-map canvas")

        number = watched.cluster.rebalance(replicas={(layer, 1): 2 for layer in range(4)}, why="a second copy of 1")
        page.until(lambda: page.shown(".change.open"))
        assert "a second copy of 1" in page.text(".change.open")
        assert page.run("return document.querySelectorAll('svg .operation.open').length") == 1
        picture(page, "page-rebalancing")
        page.until(lambda: page.text(".figure.generation b") == "2")
        page.until(lambda: page.text(".change.done b") == f"{number} rebalance")
        assert "20 slots free" in page.text("#slots-note")
        assert drawn_as(page, "#slots-map canvas") != before
        assert page.run("return document.querySelectorAll('svg .needle').length") == 1  # one pause
        picture(page, "page-light")
        page.screen(1440, 1800, dark=True)
        picture(page, "page-dark")
    assert page.complaints() == []


def test_the_document_that_the_page_shows_is_the_clusters_own(page: Browser, watched: Watched) -> None:
    page.screen(1440, 1800)
    page.open(watched.url)
    page.until(lambda: page.text("#freshness") == "live")
    view = watched.cluster.live()
    assert view.placement is not None
    slots = page.run("return window.ray_moe.model.doc.placement.slots_RLC")
    assert slots == [[list(layer) for layer in rank] for rank in view.placement.slots_RLC]
    ranks = page.run("return window.ray_moe.model.doc.ranks.map(({rank, resident_bytes}) => [rank, resident_bytes])")
    assert ranks == [[rank.rank, rank.resident_bytes] for rank in view.ranks]
    failures = page.run("return [...document.querySelectorAll('#board-list li b')].map((each) => each.textContent)")
    assert sorted(failures) == sorted(failure.name for failure in view.survival)


def test_keys_choose_experts_and_panels(page: Browser, watched: Watched) -> None:
    page.screen(1440, 1800)
    page.open(watched.url)
    page.until(lambda: page.text("#experts-line").startswith("Hottest"))
    page.press("1")
    assert page.run("return document.activeElement.parentElement.id") == "experts-map"
    page.press("h")
    hottest = page.text("#experts-line")
    page.press(Key.HOME)
    assert page.text("#experts-line").split(",")[1] == " expert 0"
    page.press(Key.ARROW_RIGHT)
    chosen = page.text("#experts-line")
    assert chosen.split(",")[1] == " expert 1" and chosen != hottest
    assert "2 copies, on ranks 0, 1" in chosen
    page.press(Key.ESCAPE)
    page.until(lambda: page.text("#experts-line").startswith("Hottest"))
    page.press("?")
    assert page.shown("#help")
    page.press(Key.ESCAPE)
    assert not page.shown("#help")
    assert page.complaints() == []


def test_on_a_phone_nothing_is_wider_than_the_screen(page: Browser, watched: Watched) -> None:
    page.screen(390, 844, phone=True)
    page.open(watched.url)
    page.until(lambda: page.text("#freshness") == "live")
    page.until(lambda: page.text("#experts-line"))
    widths = page.run("return [document.documentElement.scrollWidth, innerWidth]")
    assert widths == [390, 390]
    picture(page, "page-phone")


def test_a_rank_that_dies_is_shown_as_lost_and_the_board_is_about_those_that_are_left(
    page: Browser, watched: Watched
) -> None:
    page.screen(1440, 1800)
    page.open(watched.url)
    page.until(lambda: "rank 1" in page.text("#board-list"))
    ray.kill(find_expert(NAME, 1))
    page.until(lambda: page.text("#state") == "degraded", 60)
    assert "rank 1 died" in page.text("#notice")
    page.until(lambda: "lost: rank 1 died" in page.text("#ranks-body"))
    assert "rank 1" not in page.text("#board-list")
    assert page.text("#freshness") == "live"
    assert page.complaints() == []


# -- Clusters that are made up, for what takes no real one


def test_when_the_server_goes_the_page_says_how_old_its_data_is_and_it_comes_back_by_itself(page: Browser) -> None:
    cluster, port = small(), free_port()
    page.screen(1440, 1800)
    with served(cluster, port=port) as url:
        page.open(url)
        page.until(lambda: page.text("#freshness") == "live")
        assert not page.shown("main.stale")
    page.until(lambda: page.shown("main.stale"))
    assert page.text("#freshness").startswith("reconnecting, data is ")
    with served(cluster, port=port):
        page.until(lambda: page.text("#freshness") == "live")
        assert not page.shown("main.stale")
    page.open("about:blank")
    page.complaints()  # that nobody listened for a while


def test_without_the_key_there_is_a_form_and_with_it_the_page(page: Browser) -> None:
    page.screen(1440, 1000)
    with served(small(), AccessRules(api_keys=Keys((digest_of(KEY),)))) as url:
        page.open(url)
        page.until(lambda: page.shown("#login"))
        assert page.text("#wanted") == "an API key"
        assert not page.shown("#page")
        picture(page, "page-sign-in")
        page.press("another-key-of-somebody", Key.ENTER, on="#key")
        page.until(lambda: page.text("#login-problem") == "That key does not open this page.")
        page.press(Key.CONTROL + "a", on="#key")
        page.press(KEY, Key.ENTER, on="#key")
        page.until(lambda: page.text("#freshness") == "live")
        assert page.shown("#page") and not page.shown("#login")
        assert page.run("return document.cookie") == ""  # scripts cannot see it
        page.run("document.getElementById('leave').click()")
        page.until(lambda: page.shown("#login"))
        assert [complaint for complaint in page.complaints() if "401" not in complaint] == []


def test_61_layers_of_256_experts_on_64_ranks_are_drawn_and_every_cell_can_be_read_out(page: Browser) -> None:
    page.screen(1440, 1800)
    with served(LargeCluster()) as url:
        page.open(url)
        page.until(lambda: "256 experts × 61 layers" in page.text("#experts-note"), 60)
        assert drawn(page, "#experts-map canvas") > 100
        page.press(Key.END, on="#experts-map canvas")
        page.press(Key.ARROW_DOWN * 61, on="#experts-map canvas")
        assert page.text("#experts-line").startswith("layer 60, expert 255, ")
        assert page.run("return document.documentElement.scrollWidth") == 1440
        picture(page, "page-61x256")
        page.screen(390, 844, phone=True)
        page.until(lambda: page.run("return innerWidth") == 390)
        assert page.run("return document.documentElement.scrollWidth") == 390
        assert page.complaints() == []


def drawn(page: Browser, canvas: str) -> int:
    """How many colours a canvas has."""
    return int(
        page.run(
            """
            const canvas = document.querySelector(arguments[0]);
            const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return new Set(new Uint32Array(data.buffer)).size;
            """,
            canvas,
        )
    )


def drawn_as(page: Browser, canvas: str) -> str:
    return str(page.run("return document.querySelector(arguments[0]).toDataURL()", canvas))
