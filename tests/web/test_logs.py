"""What an operator reads: every loud thing is there, and no raw key or principal is unless it was asked for."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from idemredis import HoldForReview, Reservation, current_reservation
from tests.support.clock import TurnedClock
from tests.support.doors import MakeDoor
from tests.support.site import Door

KEY = "key-7f3d9c"
PRINCIPAL = "account-41ab"


def _everything(make_door: MakeDoor, clock: TurnedClock, **options: Any) -> Door:
    """Bring about everything that is logged."""
    door = make_door(principal=PRINCIPAL, **options)
    mode: list[Any] = ["done"]

    def view() -> Any:
        match mode[-1]:
            case "fenced":
                mode[-1] = "done"
                clock.turn(31)
                door.send(f"{KEY}-fenced")
            case "raise":
                raise LookupError("an error of the application's own")
            case "hold" | "omit" as outcome:
                current_reservation.outcome = outcome
        return mode[-1]

    def recover(reservation: Reservation) -> None:
        if mode[-1] == "review":
            raise HoldForReview("look")

    door.view(view, recover=recover)
    for each in ("done", "omit", "raise", "fenced"):
        mode[-1] = each
        for _ in range(2):
            door.send(f"{KEY}-{each}")
    mode[-1] = "hold"
    door.send(f"{KEY}-review")
    clock.turn(31)
    mode[-1] = "review"
    door.send(f"{KEY}-review")
    door.send(f"{KEY}-done", json={"amount": 2})
    door.send(f"{KEY}\xe9")
    door.send(None, raw_key=f"{KEY}\n")
    door.send(KEY * 40)
    door.send(f"{KEY}-cut", data=b"1", announced=2)
    door.store.hset(door.row_name(f"{KEY}-done", PRINCIPAL), "generation", "x")
    door.send(f"{KEY}-done")
    return door


def _outage(make_door: MakeDoor, **options: Any) -> None:
    for fail_open in (False, True):
        door = make_door(port=1, principal=PRINCIPAL, FAIL_OPEN=fail_open, **options)
        door.view()
        door.send(KEY)


def test_no_raw_key_or_principal_is_in_any_record_or_event(
    make_door: MakeDoor, clock: TurnedClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    door = _everything(make_door, clock)
    _outage(make_door)
    formatter = logging.Formatter("%(message)s")
    texts = [f"{formatter.format(record)} {record.__dict__}" for record in caplog.records]
    assert len({record.getMessage() for record in caplog.records}) > 10
    assert [text for text in texts if KEY in text or PRINCIPAL in text] == []
    assert {"fenced", "not_stored", "held_for_review", "taken_over", "reused", "replayed"} <= set(door.told())
    assert all(event.key is event.principal is None for event in door.events)


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
    level: int, text: str, make_door: MakeDoor, clock: TurnedClock, caplog: pytest.LogCaptureFixture
) -> None:
    _everything(make_door, clock)
    _outage(make_door)
    assert level in {record.levelno for record in caplog.records if record.getMessage().startswith(text)}


def test_ordinary_traffic_is_quiet(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    door.send("k0")
    caplog.clear()
    for key in ("k1", "k1", None, ""):
        door.send(key)
    door.send(json={"amount": 2})
    ours = [record for record in caplog.records if record.name.startswith("idemredis")]
    assert [record.getMessage() for record in ours if record.levelno >= logging.INFO] == []


def test_a_principal_that_cannot_be_one_is_not_repeated_in_the_log(
    make_door: MakeDoor, caplog: pytest.LogCaptureFixture
) -> None:
    door = make_door(principal=lambda: PRINCIPAL.encode())
    door.view()
    assert door.send(KEY).status_code == 401
    assert "a principal must be a str, int or UUID, not bytes" in caplog.text
    assert KEY not in caplog.text
    assert PRINCIPAL not in caplog.text
