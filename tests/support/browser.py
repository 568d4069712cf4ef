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


_LAYOUT = """
const faults = [], wide = document.documentElement.clientWidth;
const isShown = (one) => one.checkVisibility() && one.getClientRects().length > 0;
if (document.documentElement.scrollWidth > wide) faults.push("it scrolls sideways");
for (const one of document.querySelectorAll("main *")) {
  if (!isShown(one)) continue;
  const box = one.getBoundingClientRect();
  if (box.right > wide + 1 || box.left < -1) faults.push(`out of the page: ${one.tagName}#${one.id}`);
  if (one.scrollWidth > one.clientWidth + 1 && one.clientWidth && getComputedStyle(one).display !== "inline")
    faults.push(`cut off: ${one.tagName}#${one.id} ${one.className}`);
}
const controls = [...document.querySelectorAll(".basket input, .basket select")];
const inputs = controls.map((one) => one.getBoundingClientRect());
if (new Set(inputs.map(({ left, right, height }) => [left, right, height].map(Math.round).join())).size !== 1)
  faults.push("the inputs do not line up");
const paint = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const rgb = (colour, over) => {  // over what is behind it
  paint.fillStyle = over; paint.fillRect(0, 0, 1, 1);
  paint.fillStyle = colour; paint.fillRect(0, 0, 1, 1);
  const [red, green, blue] = paint.getImageData(0, 0, 1, 1).data;
  return `rgb(${red}, ${green}, ${blue})`;
};
const luminance = (colour) => {
  const [red, green, blue] = colour.match(/\\d+/g).map((part) => part / 255)
    .map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
};
const contrast = (one, two) => {
  const [low, high] = [luminance(one), luminance(two)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
};
const background = (one) => {
  if (!one) return "rgb(255, 255, 255)";
  return rgb(getComputedStyle(one).backgroundColor, background(one.parentElement));
};
const read = "button, .badge, #outcome, #summary, small, dt, pre, label, summary, h1, h2, header p, main p";
for (const one of document.querySelectorAll(read)) {
  if (!isShown(one) || one.disabled) continue;
  const behind = background(one), seen = contrast(rgb(getComputedStyle(one).color, behind), behind);
  if (seen < 4.5) faults.push(`hard to read (${seen.toFixed(1)}): ${one.tagName} ${one.textContent.slice(0, 30)}`);
}
const pay = document.getElementById("pay");
if (!pay.disabled && contrast(background(pay), background(pay.parentElement)) < 3) faults.push("Pay looks disabled");
return faults;
"""


class Exchange(NamedTuple):
    """One request of the page and its response, as the page shows them; `status` is "lost" if there was none.

    `badge` is what the page says of the answer, and `verdict` its kind, which has a colour of its own.
    """

    status: str
    request: str
    answer: str
    badge: str
    verdict: str

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
        """The requests of all payments in the order in which they were sent; the page has the newest at its top."""
        script = """return [...document.querySelectorAll("#wire li.exchange")].map((entry) =>
            [entry.dataset.status ?? "", ...[...entry.querySelectorAll("pre")].map((part) => part.textContent),
             entry.querySelector(".badge").textContent, entry.dataset.verdict])"""
        return [Exchange(*entry) for entry in reversed(self.browser.execute_script(script))]

    def groups(self) -> list[list[str]]:
        """The keys of the requests in each payment's group on the wire, from the top of the page."""
        script = """const groups = [...document.querySelectorAll("#wire > details")].filter((group) => !group.hidden);
            return groups.map((group) =>
                [...group.querySelectorAll("li.exchange details pre")].map((part) => part.textContent))"""
        return [
            sorted({text.split("Idempotency-Key: ")[1].splitlines()[0] for text in group})
            for group in self.browser.execute_script(script)
        ]

    def newest_is_in_sight(self) -> bool:
        """Whether the newest request is on the screen of a page that was not scrolled; True if there is none."""
        script = """window.scrollTo(0, 0); const one = document.querySelector("#wire li");
            return !one || one.getBoundingClientRect().bottom <= window.innerHeight"""
        seen: bool = self.browser.execute_script(script)
        return seen

    def colour(self, verdict: str) -> str:
        """The colour of the answers of a kind."""
        script = "return getComputedStyle(document.querySelector(`[data-verdict=${arguments[0]}] .badge`)).color"
        colour: str = self.browser.execute_script(script, verdict)
        return colour

    def explanation(self, field: str) -> str:
        """What the page says of a field of the row, beside it."""
        return self.element(field).find_element(By.XPATH, "..//small").text

    def happened(self) -> list[str]:
        """What the wire says of the server: that a worker was killed, or that Redis hangs."""
        script = "return [...document.querySelectorAll('#wire li.event .badge')].map((badge) => badge.textContent)"
        told: list[str] = self.browser.execute_script(script)
        return told

    def summary(self) -> str:
        """The line of what was done and how often the card was charged; "" while there is none."""
        return self.shown("summary")

    def resize(self, width: int, height: int, scheme: str = "light") -> None:
        """Look at the page on another screen, and in another colour scheme, without loading it again."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        wanted = [{"name": "prefers-color-scheme", "value": scheme}]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wanted})

    def reset_size(self) -> None:
        self.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})

    def layout_faults(self) -> list[str]:
        """What is wrong with how the page looks now, as far as it can be measured."""
        faults: list[str] = self.browser.execute_script(_LAYOUT)
        return faults
