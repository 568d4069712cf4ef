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

    def forget(self) -> None:
        """Leave out what it was asked so far."""
        self._before += len(self.asked())

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


NOTHING = "\u2013"
"""What the page shows of a field that is not there."""

SCREENS = [(1280, 800), (390, 844)]
"""A laptop and a phone, each looked at in light and dark."""


@pytest.fixture
def page(browser: Chrome, url: str, screenshots: Path, request: pytest.FixtureRequest) -> Iterator[Page]:
    page = Page(browser, url)
    page.open()
    yield page
    look_at(page, screenshots, request.node.name)


def look_at(page: Page, screenshots: Path, name: str) -> None:
    """Check how the page looks on each screen as it is now, and keep a picture of each."""
    faults: dict[str, list[str]] = {}
    for width, height in SCREENS:
        for scheme in ("light", "dark"):
            page.resize(width, height, scheme)
            picture = f"{name}-{width}-{scheme}"
            faults[picture] = page.layout_faults()
            page.browser.save_screenshot(str(screenshots / f"{picture}.png"))
        if width == 1280:
            assert page.newest_is_in_sight()
    page.reset_size()
    assert {picture: found for picture, found in faults.items() if found} == {}


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
    assert page.shown("fence") == f"(1, {page.row()['owner']})"
    wait_until(lambda: page.summary() == "pressed once, 1 request → 1 charge")


def test_a_second_payment_gets_a_key_of_its_own(page: Page, gateway: Gateway) -> None:
    for _ in range(2):
        page.pay()
        page.outcome()

    wait_until(lambda: len(gateway.asked()) == 2 and page.state == "paid")
    first, second = page.wire()
    assert first.key != second.key
    assert gateway.asked() == [True, True]
    assert page.groups() == [[second.key], [first.key]]  # by payment, the newest first
    wait_until(lambda: page.shown("row").endswith(second.key))

    page.element("clear").click()
    assert page.wire() == []
    assert page.element("no-wire").is_displayed()
    page.pay()
    page.outcome()
    assert page.groups() == [[page.wire()[0].key]]


def test_a_declined_card_is_refused_and_another_card_is_another_payment(page: Page, gateway: Gateway) -> None:
    page.choose_card("tok_declined")
    page.pay()
    assert page.outcome().startswith("Refused: 402 card_declined")

    page.choose_card("tok_visa")
    page.pay()
    wait_until(lambda: page.state == "paid")
    declined, paid = page.wire()
    assert declined.key != paid.key
    assert declined.verdict == "refused"
    assert paid.verdict == "done"


def test_the_lease_ticks_down_while_the_charge_runs(page: Page, gateway: Gateway) -> None:
    page.choose_card("tok_slow")
    page.pay()

    def lease() -> float:
        row = page.row()
        return float(row["lease"].removesuffix(" s")) if row["status"] == "pending" else 0.0

    first = wait_until(lease)
    wait_until(lambda: 0.0 < lease() < first)
    assert page.element("lease-bar").is_displayed()
    for word in ("generation", "owner", "lease", "fence"):  # each is explained where it appears
        assert page.explanation(word)
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
    done, busy, replayed = (next(s for s in page.wire() if s.verdict == v) for v in ("done", "busy", "replayed"))
    assert (done.status, busy.status, replayed.status) == ("201", "409", "201")
    assert len({page.colour(verdict) for verdict in ("done", "busy", "replayed")}) == 3  # and they look different
    assert len({done.badge, busy.badge, replayed.badge}) == 3
    wait_until(lambda: page.summary() == f"pressed twice, {len(page.wire())} requests → 1 charge")


def test_two_clicks_of_an_impatient_hand_charge_once_too(page: Page, gateway: Gateway) -> None:
    before = page.charged()
    page.choose_card("tok_slow")
    ActionChains(page.browser).double_click(page.element("pay")).perform()

    assert page.outcome().startswith("Paid")
    check_charged_once(page, gateway, before)
    assert len(page.wire()) > 2
    wait_until(lambda: page.summary() == f"pressed twice, {len(page.wire())} requests → 1 charge")


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
    wait_until(lambda: page.summary() == "pressed once, 2 requests, 1 answer lost → 1 charge")


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
    wait_until(lambda: page.summary().endswith("a second tab sends it, too → 1 charge"))


def test_another_amount_with_the_same_key_is_refused_and_not_sent_again(page: Page, gateway: Gateway) -> None:
    before = page.charged()
    page.choose("changed-amount")
    page.pay()

    assert page.outcome().startswith("Refused: 409 idempotency_key_reused")
    check_charged_once(page, gateway, before)
    assert [sent.status for sent in page.wire()] == ["201", "409"]
    assert [sent.verdict for sent in page.wire()] == ["done", "refused"]
    assert gateway.asked() == [True]
    wait_until(lambda: page.summary() == "pressed once, 2 requests → 1 charge")


def test_a_server_killed_in_mid_charge_is_taken_over_and_the_card_not_charged_again(
    page: Page, gateway: Gateway
) -> None:
    before = page.charged()
    page.choose("server-killed")
    page.pay()
    wait_until(lambda: "was killed in mid-charge" in page.shown("outcome"))
    (told,) = page.happened()
    assert re.fullmatch(r"worker \d+ was killed", told)

    assert page.outcome().startswith("Paid")
    check_charged_once(page, gateway, before)
    assert gateway.asked() == [True, False]
    wait_until(lambda: page.row()["status"] == "completed")
    assert page.row()["generation"] == "2"
    assert len({sent.key for sent in page.wire()}) == 1
    requests = len(page.wire())
    wait_until(lambda: page.summary() == f"pressed once, {requests} requests, 1 worker killed → 1 charge")
    assert "what generation 1 still writes is refused" in page.explanation("fence")


def test_redis_away_is_waited_out_and_nothing_is_charged_meanwhile(page: Page, gateway: Gateway) -> None:
    page.pay()  # its row is on the page when Redis goes away
    page.outcome()
    wait_until(lambda: page.row()["status"] == "completed")
    earlier = len(page.wire())
    gateway.forget()
    before = page.charged()
    page.choose("redis-away")
    page.pay()
    wait_until(lambda: page.element("away").is_displayed(), 10)
    sent = wait_until(lambda: page.wire()[earlier:])[0]
    wait_until(lambda: page.shown("row") == f"idem:acct_alice:{sent.key}")  # this payment's row, not the one before
    assert set(page.row().values()) == {NOTHING}
    assert gateway.asked() == []
    assert page.happened() == ["Redis hangs"]

    assert page.outcome().startswith("Paid")
    check_charged_once(page, gateway, before)
    first, *_, last = page.wire()[earlier:]
    assert (first.status, first.verdict, last.verdict) == ("503", "away", "done")
    wait_until(lambda: page.summary().endswith("Redis away → 1 charge"))
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


def test_another_login_before_the_retry_sends_nothing_for_that_account(page: Page, gateway: Gateway) -> None:
    before = page.charged()
    page.choose("another-login")
    page.pay()

    assert page.outcome().startswith("This payment was begun by alice. Log in as alice to finish it.")
    assert page.shown("account") == "bob"
    page.choose("none")
    page.pay()  # as bob
    assert page.outcome().endswith("For bob nothing was sent.")
    page.browser.refresh()  # a reload does not send it for bob either
    page.wait_until_looked()
    assert page.outcome().endswith("For bob nothing was sent.")
    assert gateway.asked() == [True]

    page.element("log-in").click()
    page.pay()
    wait_until(lambda: page.state == "paid")
    check_charged_once(page, gateway, before)
    (replayed,) = page.wire()
    assert replayed.verdict == "replayed"


def test_the_keyboard_is_enough(page: Page, gateway: Gateway) -> None:
    before = page.charged()
    keys = ActionChains(page.browser)
    keys.send_keys(Keys.TAB * 5)  # the link, two amounts, the card, the troubles
    keys.send_keys(Keys.ARROW_DOWN * 4, Keys.TAB, Keys.ENTER)  # the fifth trouble, the button
    keys.perform()

    assert page.outcome().startswith("Refused: 409 idempotency_key_reused")
    check_charged_once(page, gateway, before)


def test_on_a_phone_a_thumb_hits_everything(page: Page) -> None:
    page.resize(360, 740)
    page.pay()
    page.outcome()
    assert page.layout_faults() == []
    touched = page.browser.find_elements(By.CSS_SELECTOR, "label, button")

    assert min(element.size["height"] for element in touched) >= 40


def test_pay_looks_disabled_only_where_there_is_nothing_to_pay(page: Page) -> None:
    assert page.layout_faults() == []
    for name in ("coffee", "mug"):
        amount = page.browser.find_element(By.NAME, name)
        amount.send_keys(Keys.CONTROL, "a")
        amount.send_keys("0")
    assert not page.element("pay").is_enabled()
    page.browser.refresh()
    wait_until(lambda: page.element("pay").is_enabled())
