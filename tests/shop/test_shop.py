"""Each trouble of the shop's page, in a real browser: the card is charged once, on the page and in the gateway."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from selenium.webdriver import ActionChains, Chrome, Keys
from selenium.webdriver.common.by import By

from tests.support.browser import CHROMEDRIVER, CHROMIUM, Page, chromium
from tests.support.processes import mortal
from tests.support.waiting import wait_until

SERVE = Path(__file__).parents[2] / "examples" / "serve.py"

LASTING = {"SHOP_SLOW_SECONDS": "8", "SHOP_AWAY_SECONDS": "8"}
"""Longer than for people: what is to happen meanwhile does so on a busy machine too."""

pytestmark = pytest.mark.timeout(90)


class Gateway:
    """What the shop's gateway has noted, read from its file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before = 0
        self._before = len(self.asked())

    def asked(self) -> list[bool]:
        """For each request since this was made: did it charge the card?"""
        with closing(sqlite3.connect(self._path)) as db:
            return [bool(charged) for (charged,) in db.execute("SELECT charged FROM requests")][self._before :]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shop")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """`make serve`, as its users run it."""
    command = mortal([sys.executable, "-u", str(SERVE)])
    with subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": str(folder), **LASTING},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as serve:
        try:
            assert serve.stdout is not None
            found = None
            while found is None:
                line = serve.stdout.readline()
                assert line, "it ended without naming its page"
                found = re.match(r"Open (http://\S+/) in a browser", line)
            yield found[1]
            serve.send_signal(signal.SIGINT)
            serve.communicate(timeout=20)
        finally:
            serve.kill()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    if not (CHROMIUM and CHROMEDRIVER):
        missing = "there is no chromium with its chromedriver on PATH"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("screenshots")


@pytest.fixture
def phone(browser: Chrome) -> Iterator[int]:
    """The width of a small phone, which the browser has now. Ask for it before `page`, for the screenshot's sake."""
    screen = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    yield 360
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.fixture
def page(browser: Chrome, url: str, screenshots: Path, request: pytest.FixtureRequest) -> Iterator[Page]:
    page = Page(browser, url)
    page.open()
    yield page
    browser.save_screenshot(str(screenshots / f"{request.node.name}.png"))


@pytest.fixture
def gateway(page: Page, folder: Path) -> Gateway:
    (path,) = folder.glob("*/gateway.sqlite3")
    return Gateway(path)


def check_charged_once(page: Page, gateway: Gateway, before: int) -> None:
    assert gateway.asked().count(True) == 1
    wait_until(lambda: page.charged() == before + 1)


def test_a_payment_is_shown_with_its_row_its_charge_and_what_went_over_the_wire(page: Page, gateway: Gateway) -> None:
    before = page.charged()
    page.pay()

    assert re.fullmatch(r"Paid 19\.99: order \d+, charge ch_\w+\.", page.outcome())
    check_charged_once(page, gateway, before)
    (sent,) = page.wire()
    assert (sent.status, '"amount":1999' in sent.request) == ("201", True)
    wait_until(lambda: page.shown("row") == f"idem:acct_alice:{sent.key}")
    wait_until(lambda: page.row()["status"] == "completed")
    assert (page.row()["generation"], page.row()["response_status"]) == ("1", "201")


def test_a_second_payment_gets_a_key_of_its_own(page: Page, gateway: Gateway) -> None:
    for _ in range(2):
        page.pay()
        page.outcome()

    wait_until(lambda: len(gateway.asked()) == 2 and page.state == "paid")
    first, second = page.wire()
    assert first.key != second.key
    assert gateway.asked() == [True, True]


def test_a_declined_card_is_refused_and_another_card_is_another_payment(page: Page, gateway: Gateway) -> None:
    page.choose_card("tok_declined")
    page.pay()
    assert page.outcome().startswith("Refused: 402 card_declined")

    page.choose_card("tok_visa")
    page.pay()
    wait_until(lambda: page.state == "paid")
    declined, paid = page.wire()
    assert declined.key != paid.key


def test_the_lease_ticks_down_while_the_charge_runs(page: Page, gateway: Gateway) -> None:
    page.choose_card("tok_slow")
    page.pay()

    def lease() -> float:
        row = page.row()
        return float(row["lease"].removesuffix(" s")) if row["status"] == "pending" else 0.0

    first = wait_until(lease)
    wait_until(lambda: 0.0 < lease() < first)
    assert page.outcome().startswith("Paid")
    wait_until(lambda: page.row()["status"] == "completed" and not page.row()["lease"].endswith("s"))


def test_a_double_click_charges_once(page: Page, gateway: Gateway) -> None:
    before = page.charged()
    page.choose("double-click")
    page.pay()

    assert page.outcome().startswith("Paid")
    check_charged_once(page, gateway, before)
    statuses = [sent.status for sent in page.wire()]
    assert statuses[:2] in (["201", "409"], ["409", "201"])
    assert statuses.count("201") == 2
    assert "Retry-After" in next(sent.answer for sent in page.wire() if sent.status == "409")
    assert "Idempotent-Replayed: true" in page.wire()[-1].answer
    assert len({sent.key for sent in page.wire()}) == 1


def test_two_clicks_of_an_impatient_hand_charge_once_too(page: Page, gateway: Gateway) -> None:
    before = page.charged()
    page.choose_card("tok_slow")
    ActionChains(page.browser).double_click(page.element("pay")).perform()

    assert page.outcome().startswith("Paid")
    check_charged_once(page, gateway, before)
    assert len(page.wire()) > 2


def test_an_answer_lost_after_the_server_finished_is_asked_for_again(page: Page, gateway: Gateway) -> None:
    before = page.charged()
    page.choose("answer-lost")
    page.pay()

    assert page.outcome().startswith("Paid")
    check_charged_once(page, gateway, before)
    lost, again = page.wire()
    assert (lost.status, again.status) == ("lost", "201")
    assert "Idempotent-Replayed: true" in again.answer
    assert again.request == lost.request
    assert gateway.asked() == [True]


def test_two_tabs_at_once_show_the_same_charge(page: Page, gateway: Gateway) -> None:
    browser, before = page.browser, page.charged()
    first = browser.current_window_handle
    page.choose("two-tabs")
    page.pay()
    (second,) = wait_until(lambda: set(browser.window_handles) - {first})

    browser.switch_to.window(second)
    try:
        said, key = page.outcome(), page.wire()[0].key
    finally:
        browser.close()
        browser.switch_to.window(first)
    assert page.outcome() == said
    assert said.startswith("Paid")
    assert page.wire()[0].key == key
    check_charged_once(page, gateway, before)


def test_another_amount_with_the_same_key_is_refused_and_not_sent_again(page: Page, gateway: Gateway) -> None:
    before = page.charged()
    page.choose("changed-amount")
    page.pay()

    assert page.outcome().startswith("Refused: 409 idempotency_key_reused")
    check_charged_once(page, gateway, before)
    assert [sent.status for sent in page.wire()] == ["201", "409"]
    assert gateway.asked() == [True]


def test_a_server_killed_in_mid_charge_is_taken_over_and_the_card_not_charged_again(
    page: Page, gateway: Gateway
) -> None:
    before = page.charged()
    page.choose("server-killed")
    page.pay()

    assert page.outcome().startswith("Paid")
    check_charged_once(page, gateway, before)
    assert gateway.asked() == [True, False]
    wait_until(lambda: page.row()["status"] == "completed")
    assert page.row()["generation"] == "2"
    assert len({sent.key for sent in page.wire()}) == 1


def test_redis_away_is_waited_out_and_nothing_is_charged_meanwhile(page: Page, gateway: Gateway) -> None:
    before = page.charged()
    page.choose("redis-away")
    page.pay()
    wait_until(lambda: page.element("away").is_displayed(), 10)
    assert gateway.asked() == []

    assert page.outcome().startswith("Paid")
    check_charged_once(page, gateway, before)
    first = page.wire()[0]
    assert first.status == "503"
    assert "idempotency_unavailable" in first.answer
    wait_until(lambda: not page.element("away").is_displayed(), 10)


def test_a_page_reloaded_in_mid_charge_goes_on_with_the_same_key(page: Page, gateway: Gateway) -> None:
    before = page.charged()
    page.choose_card("tok_slow")
    page.pay()
    (sent,) = wait_until(page.wire)
    wait_until(gateway.asked)
    page.browser.refresh()

    assert page.outcome().startswith("Paid")
    check_charged_once(page, gateway, before)
    assert {again.key for again in page.wire()} == {sent.key}


def test_the_keyboard_is_enough(page: Page, gateway: Gateway) -> None:
    before = page.charged()
    keys = ActionChains(page.browser)
    keys.send_keys(Keys.TAB * 5)  # the link, two amounts, the card, the troubles
    keys.send_keys(Keys.ARROW_DOWN * 4, Keys.TAB, Keys.ENTER)  # the fifth trouble, the button
    keys.perform()

    assert page.outcome().startswith("Refused: 409 idempotency_key_reused")
    check_charged_once(page, gateway, before)


def test_a_phone_needs_no_scrolling_sideways(phone: int, page: Page) -> None:
    page.pay()
    page.outcome()
    width = page.browser.execute_script("return document.documentElement.scrollWidth")
    touched = page.browser.find_elements(By.CSS_SELECTOR, "label, button")

    assert width <= phone
    assert min(element.size["height"] for element in touched) >= 40  # a thumb hits it
