"""A headless Chromium with an empty profile, and what a test does with it."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from tests.tools import require_tool

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-proxy-server"),
)


class Browser:
    """One page in one browser."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def screen(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        """Another screen, or another theme; the page that is open is told."""
        size = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [theme]})

    def open(self, url: str) -> None:
        self.driver.get(url)

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns that runs in the page."""
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def shown(self, selector: str) -> bool:
        return bool(self.run("return Boolean(document.querySelector(arguments[0])?.checkVisibility())", selector))

    def press(self, *keys: str, on: str = "body") -> None:
        """Keys as a person presses them, with the focus where it is, or on an element."""
        element = self.driver.find_element("css selector", on) if on != "body" else self.driver.switch_to.active_element
        element.send_keys(*keys)

    def until(self, holds: Callable[[], Any], seconds: float = 30) -> Any:
        """What `holds` returns once that is true."""
        end = time.monotonic() + seconds
        while not (found := holds()):
            assert time.monotonic() < end, f"not within {seconds} s; the page says: {self.text('body')[:2000]}"
            time.sleep(0.1)
        return found

    def picture(self, path: Path) -> None:
        """The whole page as a PNG file, also what lies below the screen."""
        width, height = self.run("return [innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        taken = self.driver.execute_cdp_cmd(
            "Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True, "clip": clip}
        )
        path.write_bytes(base64.b64decode(taken["data"]))

    def complaints(self) -> list[str]:
        """What the console has said since it was last asked, warnings and errors."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("WARNING", "SEVERE")]


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser whose profile is the empty folder `profile`; ended with the block."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(require_tool("chromium"))
    for flag in (*FLAGS, f"--user-data-dir={profile}", "--window-size=1440,1800"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(require_tool("chromedriver"))))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
