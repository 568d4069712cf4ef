"""What an operator reads: every loud thing is there, and no raw key or principal is unless it was asked for."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import redis
from flask import Flask
from redis.backoff import NoBackoff
from redis.retry import Retry

from idemredis import HoldForReview, Reservation
from idemredis.flask import Idempotency, current_reservation
from tests.support.clock import TurnedClock
from tests.support.site import MakeSite, Site
from tests.support.started import Servers

KEY = "key-7f3d9c"
PRINCIPAL = "account-41ab"


def _everything(make_site: MakeSite, clock: TurnedClock, **options: Any) -> Site:
    """Bring about everything that is logged."""
    site = make_site(principal=PRINCIPAL, **options)
    mode: list[Any] = ["done"]

    def view() -> Any:
        match mode[-1]:
            case "fenced":
                mode[-1] = "done"
                clock.turn(31)
                site.send(f"{KEY}-fenced")
            case "raise":
                raise LookupError("an error of the application's own")
            case "hold" | "omit" as outcome:
                current_reservation.outcome = outcome
        return mode[-1]

    def recover(reservation: Reservation) -> None:
        if mode[-1] == "review":
            raise HoldForReview("look")

    site.view(view, recover=recover)
    for each in ("done", "omit", "raise", "fenced"):
        mode[-1] = each
        for _ in range(2):
            site.send(f"{KEY}-{each}")
    mode[-1] = "hold"
    site.send(f"{KEY}-review")
    clock.turn(31)
    mode[-1] = "review"
    site.send(f"{KEY}-review")
    site.send(f"{KEY}-done", json={"amount": 2})
    site.send(f"{KEY}\xe9")
    site.send(None, environ_overrides={"HTTP_IDEMPOTENCY_KEY": f"{KEY}\n"})
    site.send(KEY * 40)
    site.send(f"{KEY}-cut", data=b"1", environ_overrides={"CONTENT_LENGTH": "2"})
    site.store.hset(site.row_name(f"{KEY}-done", PRINCIPAL), "generation", "x")
    site.send(f"{KEY}-done")
    return site


def _outage(make_site: MakeSite, **options: Any) -> None:
    for fail_open in (False, True):
        client = redis.Redis(port=1, retry=Retry(NoBackoff(), 0))
        site = make_site(client=client, principal=PRINCIPAL, FAIL_OPEN=fail_open, **options)
        site.view()
        site.send(KEY)


def test_no_raw_key_or_principal_is_in_any_record_or_event(
    make_site: MakeSite, clock: TurnedClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    site = _everything(make_site, clock)
    _outage(make_site)
    formatter = logging.Formatter("%(message)s")
    texts = [f"{formatter.format(record)} {record.__dict__}" for record in caplog.records]
    assert len({record.getMessage() for record in caplog.records}) > 10
    assert [text for text in texts if KEY in text or PRINCIPAL in text] == []
    assert {"fenced", "not_stored", "held_for_review", "taken_over", "reused", "replayed"} <= set(site.told())
    assert all(event.key is event.principal is None for event in site.events)


@pytest.mark.parametrize(
    ("level", "text"),
    [
        (logging.ERROR, "fenced: row "),
        (logging.ERROR, "held_for_review: row "),
        (logging.WARNING, "taken_over: row "),
        (logging.WARNING, "not_stored: row "),
        (logging.WARNING, "unavailable: row "),
        (logging.ERROR, "corrupt: row "),
        (logging.ERROR, "a request runs unprotected"),
    ],
)
def test_what_an_operator_must_know_is_loud(
    level: int, text: str, make_site: MakeSite, clock: TurnedClock, caplog: pytest.LogCaptureFixture
) -> None:
    _everything(make_site, clock)
    _outage(make_site)
    assert level in {record.levelno for record in caplog.records if record.getMessage().startswith(text)}


def test_ordinary_traffic_is_quiet(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.send("k0")
    caplog.clear()
    for key in ("k1", "k1", None, ""):
        site.send(key)
    site.send(json={"amount": 2})
    ours = [record for record in caplog.records if record.name.startswith("idemredis")]
    assert [record.getMessage() for record in ours if record.levelno >= logging.INFO] == []


@pytest.mark.parametrize("asked", [False, True])
def test_raw_keys_are_in_events_only_where_they_were_asked_for(
    asked: bool, every_key_left_expires: Servers, namespace: str
) -> None:
    events: list[Any] = []
    app = Flask("shop")
    app.config.update(IDEMREDIS_LOG_KEYS=asked, IDEMREDIS_NAMESPACE=namespace)
    client = every_key_left_expires.get("fakeredis").client()
    idempotency = Idempotency(app, principal=PRINCIPAL, client=client, observers=[events.append])
    app.add_url_rule("/", "charge", idempotency.protect(lambda: "done"), methods=["POST"])
    app.test_client().post("/", headers={"Idempotency-Key": KEY})
    assert [event.name for event in events] == ["claimed", "completed"]
    assert {(event.key, event.principal) for event in events} == {(KEY, PRINCIPAL) if asked else (None, None)}


def test_a_principal_that_cannot_be_one_is_not_repeated_in_the_log(
    make_site: MakeSite, caplog: pytest.LogCaptureFixture
) -> None:
    site = make_site(principal=lambda: PRINCIPAL.encode())
    site.view()
    assert site.send(KEY).status_code == 401
    assert "a principal must be a str, int or UUID, not bytes" in caplog.text
    assert KEY not in caplog.text
    assert PRINCIPAL not in caplog.text
