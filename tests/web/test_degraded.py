"""Views that run unprotected, because the application has chosen so: without a key, in an outage, or to try it out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from idemredis import HoldForReview, Reservation, current_reservation
from idemredis.telemetry import Telemetry
from tests.support.clock import TurnedClock
from tests.support.doors import MakeDoor
from tests.support.site import Door


def _use_everything() -> Any:
    """As a view does that was written for the protected case."""
    current_reservation.ensure_held()
    current_reservation.checkpoint("charged", {"charge": "ch_1"})
    current_reservation.outcome = "omit"
    return {
        "truth": bool(current_reservation),
        "held": current_reservation.held,
        "key": current_reservation.downstream_key("gateway"),
        "again": current_reservation.downstream_key("gateway"),
        "other": current_reservation.downstream_key("bank"),
        "operation": current_reservation.operation,
        "taken_over": current_reservation.taken_over,
        "last": current_reservation.last_checkpoint,
    }


DEGRADED: dict[str, dict[str, Any]] = {
    "no key": {"REQUIRED": False},
    "outage": {"FAIL_OPEN": True, "port": 1},
    "observe": {"MODE": "observe"},
    "observe in an outage": {"MODE": "observe", "port": 1},
    "observe without a key": {"MODE": "observe"},
    "off": {"MODE": "off"},
    "off without a key": {"MODE": "off"},
}


def _degraded(make_door: MakeDoor, case: str, **more: Any) -> Door:
    options = {**DEGRADED[case], **more}
    return make_door(**options)


def _key(case: str) -> str | None:
    return None if "no key" in case or "without a key" in case else "k1"


@pytest.mark.parametrize("case", DEGRADED)
def test_the_code_of_a_view_works_where_it_runs_unprotected(case: str, make_door: MakeDoor) -> None:
    door = _degraded(make_door, case)
    door.view(_use_everything, operation="charge")
    first, again = door.send(_key(case)).get_json(), door.send(_key(case)).get_json()
    assert (first["truth"], first["held"], first["taken_over"], first["last"]) == (False, False, False, None)
    assert first["operation"] == "charge"
    assert len({first["key"], first["again"], first["other"]}) == 2
    assert (first["key"] == again["key"]) == (_key(case) is not None)
    assert len(door.runs) == 2


@pytest.mark.parametrize("case", [case for case in DEGRADED if _key(case)])
def test_downstream_keys_are_the_same_as_in_the_protected_case(case: str, make_door: MakeDoor) -> None:
    keys = []
    for door in (make_door(), _degraded(make_door, case)):
        door.view(lambda: current_reservation.downstream_key("gateway"))
        keys.append(door.send(case.replace(" ", "-")).text)
    assert keys[0] == keys[1]


@pytest.mark.parametrize("case", DEGRADED)
def test_only_what_the_client_should_know_is_in_the_header(case: str, make_door: MakeDoor) -> None:
    door = _degraded(make_door, case)
    door.view()
    answer = door.send(_key(case))
    marked = case in ("no key", "outage")
    assert (answer.headers.get("Idempotency-Status"), answer.status_code) == ("unprotected" if marked else None, 201)


@pytest.mark.parametrize("case", DEGRADED)
def test_an_error_page_of_an_unprotected_view_is_the_applications_own(case: str, make_door: MakeDoor) -> None:
    door = _degraded(make_door, case)
    door.view(lambda: door.abort(418))
    answer = door.send(_key(case))
    assert answer.status_code == 418
    assert ("Idempotency-Status" in answer.headers) == (case in ("no key", "outage"))


def test_the_reservation_of_an_unprotected_request_is_not_that_of_the_request_around_it(make_door: MakeDoor) -> None:
    door = make_door()
    door.view(lambda: str(bool(current_reservation)), "/inner", required=False)

    def outer() -> str:
        return f"{door.send(None, '/inner').text} {bool(current_reservation)}"

    door.view(outer, "/outer")
    assert door.send(path="/outer").text == "False True"


def test_two_requests_without_a_key_are_not_one_for_the_next_service(make_door: MakeDoor) -> None:
    door = make_door(principal=lambda: None, REQUIRED=False)
    door.view(lambda: current_reservation.downstream_key("gateway"))
    assert len({door.send(None).text for _ in range(10)}) == 10
    assert door.sent == []


def test_a_required_key_that_is_missing_is_an_event(door: Door) -> None:
    assert door.send(None).status_code == 400
    (event,) = door.events
    assert (event.name, event.digest, event.route, event.observed) == ("key_missing", "", "POST /charges", False)
    assert event.principal is None


def test_a_key_that_is_not_required_is_not_missing(make_door: MakeDoor) -> None:
    door = make_door(REQUIRED=False)
    door.view()
    door.send(None)
    assert door.events == []


def test_observing_runs_every_request_and_tells_what_would_have_happened(make_door: MakeDoor) -> None:
    door = make_door(MODE="observe")
    door.view()
    answers = [
        door.send(),
        door.send(),
        door.send(json={"amount": 2}),
        door.send(None),
        door.send("\t"),
    ]
    assert [answer.text for answer in answers] == [f"charge {n}" for n in range(1, 6)]
    assert not any("Idempotent-Replayed" in answer.headers for answer in answers)
    assert door.told() == ["claimed", "completed", "replayed", "reused", "key_missing"]
    assert all(event.observed for event in door.events)
    assert (door.row()["status"], door.row()["response_body"]) == (b"completed", b"charge 1")


def test_metrics_tell_what_was_only_observed_from_what_was_done(make_door: MakeDoor) -> None:
    reader = InMemoryMetricReader()
    door = make_door(MODE="observe")
    door.view()
    door.send()
    telemetry = Telemetry(MeterProvider([reader]))
    for event in door.events:
        telemetry(event)
        telemetry(replace(event, observed=False))
    data: Any = reader.get_metrics_data()
    (counter,) = [
        metric
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == "idempotency.outcomes"
    ]
    told = [(point.attributes["outcome"], point.attributes.get("observed")) for point in counter.data.data_points]
    assert sorted(told, key=str) == [(name, seen) for name in ("claimed", "completed") for seen in (None, True)]


def test_observing_tells_of_a_request_in_progress_and_does_not_wait(make_door: MakeDoor) -> None:
    door = make_door(MODE="observe", WAIT_SECONDS=30)

    def view() -> str:
        return door.send().text if len(door.runs) == 1 else f"run {len(door.runs)}"

    door.view(view, wait=20)
    assert door.send().text == "run 2"
    assert door.told() == ["claimed", "in_progress", "completed"]


def test_observing_does_not_recover(make_door: MakeDoor, clock: TurnedClock) -> None:
    door = make_door(MODE="observe")

    def view() -> str:
        current_reservation.outcome = "hold" if len(door.runs) == 1 else None
        return f"run {len(door.runs)}"

    door.view(view, recover=lambda reservation: pytest.fail("it only observes"))
    door.send()
    clock.turn(31)
    assert (door.send().text, door.row()["generation"]) == ("run 2", b"2")
    assert door.told()[-2:] == ["taken_over", "completed"]


def test_observing_keeps_a_secret_out_of_redis_as_ever(make_door: MakeDoor) -> None:
    door = make_door(MODE="observe")

    def view() -> str:
        current_reservation.outcome = "omit"
        return "SECRET"

    door.view(view)
    assert door.send().text == "SECRET"
    assert not any(b"SECRET" in value for value in door.row().values())


@pytest.mark.parametrize("broken", ["principal", "no principal", "fingerprint"])
def test_a_principal_or_a_fingerprint_that_fails_is_no_trouble_while_observing(
    broken: str, make_door: MakeDoor
) -> None:
    options: dict[str, Any] = {"principal": (lambda: 1 / 0) if broken == "principal" else (lambda: None)}
    door = make_door(MODE="observe", **(options if "principal" in broken else {}))
    door.view(fingerprint=(lambda: 1 / 0) if broken == "fingerprint" else None)
    # A guard's fingerprint is a dependency of the application, which fails before the guard.
    assert door.send().status_code == (500 if (door.kind, broken) == ("guard", "fingerprint") else 201)


@pytest.mark.parametrize("terminated", [False, True])
def test_observing_changes_nothing_about_a_body_that_would_be_refused(terminated: bool, make_door: MakeDoor) -> None:
    door = make_door(MODE="observe", MAX_REQUEST_BYTES=100_000)
    door.view(lambda: door.body())
    body = bytes(range(256)) * 2000
    assert door.send(data=body, chunked=terminated).data == body
    assert door.rows() == {}


def test_a_corrupt_row_is_no_trouble_while_observing(make_door: MakeDoor, caplog: pytest.LogCaptureFixture) -> None:
    door = make_door(MODE="observe")
    door.view()
    door.send()
    door.store.hset(door.row_name(), "status", "other")
    before = door.rows()
    assert (door.send().text, door.rows()) == ("charge 2", before)
    assert f"corrupt: row {door.events[-1].digest} generation 0, POST /charges: " in caplog.text
    assert door.events[-1].observed


def test_a_view_that_holds_for_review_is_held_while_observing(make_door: MakeDoor) -> None:
    door = make_door(MODE="observe")

    def view() -> str:
        raise HoldForReview

    door.view(view)
    assert door.send().status_code == 409
    assert door.events[-1].name == "held_for_review"
    assert door.events[-1].observed


def test_a_reservation_of_an_unprotected_view_is_still_one_to_isinstance(make_door: MakeDoor) -> None:
    door = make_door(MODE="off")
    door.view(lambda: f"{isinstance(current_reservation, Reservation)} {'Unprotected' in repr(current_reservation)}")
    assert door.send().text == "True True"
