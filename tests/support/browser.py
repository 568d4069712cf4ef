"""A headless Chromium, and the shop's page in it."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from tests.support.processes import die_with
from tests.support.waiting import wait_until

__all__ = ["CHROMEDRIVER", "CHROMIUM", "Exchange", "Page", "chromium"]

CHROMIUM, CHROMEDRIVER = shutil.which("chromium"), shutil.which("chromedriver")

WORDS = [
    "--headless=new",
    "--no-sandbox",  # CI is root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",  # it ends with its driver, which ends with this process
    "--window-size=1280,1400",
]


@contextmanager
def chromium(profile: Path) -> Iterator[Chrome]:
    """Run a browser with a fresh profile."""
    assert CHROMIUM
    options = ChromeOptions()
    options.binary_location = CHROMIUM
    for word in [*WORDS, f"--user-data-dir={profile}"]:
        options.add_argument(word)
    service = Service(CHROMEDRIVER, popen_kw={"preexec_fn": functools.partial(die_with, os.getpid())})
    driver = Chrome(options, service)
    try:
        yield driver
    finally:
        driver.quit()


class Exchange(NamedTuple):
    """One request of the page and its response, as the page shows them; `status` is "lost" if there was none."""

    status: str
    request: str
    answer: str

    @property
    def key(self) -> str:
        return self.request.split("Idempotency-Key: ")[1].splitlines()[0]


class Page:
    """The shop's page in the browser's current tab."""

    def __init__(self, browser: Chrome, url: str) -> None:
        self.browser = browser
        self.url = url

    def open(self) -> None:
        """Load the page without earlier payments, and wait until it shows the ledger."""
        self.browser.get(self.url)
        self.browser.execute_script("sessionStorage.clear()")
        self.browser.refresh()
        self.wait_until_looked()

    def wait_until_looked(self) -> None:
        wait_until(lambda: self.shown("charged") != "?", 10)

    def shown(self, name: str) -> str:
        return self.element(name).text

    def element(self, name: str) -> WebElement:
        return self.browser.find_element(By.ID, name)

    def choose(self, trouble: str) -> None:
        self.browser.find_element(By.CSS_SELECTOR, f"[name=trouble][value={trouble}]").click()

    def choose_card(self, card: str) -> None:
        self.browser.find_element(By.CSS_SELECTOR, f"option[value={card}]").click()

    def pay(self) -> None:
        self.element("pay").click()

    @property
    def state(self) -> str:
        return self.element("outcome").get_attribute("data-state") or ""

    def outcome(self) -> str:
        """Wait until the payment has ended; return the page's message."""
        wait_until(lambda: self.state not in ("idle", "paying"), 30)
        return self.shown("outcome")

    def row(self) -> dict[str, str]:
        """The fields of the ledger's row that the page shows, read in one step."""
        fields = ["status", "generation", "owner", "lease", "response_status"]
        script = "return arguments[0].map((name) => document.getElementById(name).textContent)"
        return dict(zip(fields, self.browser.execute_script(script, fields), strict=True))

    def charged(self) -> int:
        return int(self.shown("charged"))

    def wire(self) -> list[Exchange]:
        script = """return [...document.querySelectorAll("#wire > li")].map(
            (entry) => [entry.dataset.status ?? "", ...[...entry.children].map((part) => part.textContent)])"""
        return [Exchange(*entry) for entry in self.browser.execute_script(script)]
