"""Views that run unprotected, because the application has chosen so: without a key, in an outage, or to try it out."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
import redis
from flask import Response, abort, jsonify, request
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from redis.backoff import NoBackoff
from redis.retry import Retry

from idemredis import HoldForReview, NoReservation, Reservation
from idemredis.flask import current_reservation
from idemredis.telemetry import Telemetry
from tests.support.clock import TurnedClock
from tests.support.site import MakeSite, Site


def _unreachable() -> redis.Redis:
    return redis.Redis(port=1, retry=Retry(NoBackoff(), 0))


def _use_everything() -> Any:
    """As a view does that was written for the protected case."""
    current_reservation.ensure_held()
    current_reservation.checkpoint("charged", {"charge": "ch_1"})
    current_reservation.outcome = "omit"
    return jsonify(
        truth=bool(current_reservation),
        held=current_reservation.held,
        key=current_reservation.downstream_key("gateway"),
        again=current_reservation.downstream_key("gateway"),
        other=current_reservation.downstream_key("bank"),
        operation=current_reservation.operation,
        taken_over=current_reservation.taken_over,
        last=current_reservation.last_checkpoint,
    )


DEGRADED: dict[str, dict[str, Any]] = {
    "no key": {"REQUIRED": False},
    "outage": {"FAIL_OPEN": True, "client": "unreachable"},
    "observe": {"MODE": "observe"},
    "observe in an outage": {"MODE": "observe", "client": "unreachable"},
    "observe without a key": {"MODE": "observe"},
    "off": {"MODE": "off"},
    "off without a key": {"MODE": "off"},
}


def _degraded(make_site: MakeSite, case: str, **more: Any) -> Site:
    options = {**DEGRADED[case], **more}
    if options.get("client"):
        options["client"] = _unreachable()
    return make_site(**options)


def _key(case: str) -> str | None:
    return None if "no key" in case or "without a key" in case else "k1"


@pytest.mark.parametrize("case", DEGRADED)
def test_the_code_of_a_view_works_where_it_runs_unprotected(case: str, make_site: MakeSite) -> None:
    site = _degraded(make_site, case)
    site.view(_use_everything, operation="charge")
    first, again = site.send(_key(case)).get_json(), site.send(_key(case)).get_json()
    assert (first["truth"], first["held"], first["taken_over"], first["last"]) == (False, False, False, None)
    assert first["operation"] == "charge"
    assert len({first["key"], first["again"], first["other"]}) == 2
    assert (first["key"] == again["key"]) == (_key(case) is not None)
    assert len(site.runs) == 2


@pytest.mark.parametrize("case", [case for case in DEGRADED if _key(case)])
def test_downstream_keys_are_the_same_as_in_the_protected_case(case: str, make_site: MakeSite) -> None:
    keys = []
    for site in (make_site(), _degraded(make_site, case)):
        site.view(lambda: current_reservation.downstream_key("gateway"))
        keys.append(site.send(case.replace(" ", "-")).text)
    assert keys[0] == keys[1]


@pytest.mark.parametrize("case", DEGRADED)
def test_only_what_the_client_should_know_is_in_the_header(case: str, make_site: MakeSite) -> None:
    site = _degraded(make_site, case)
    site.view()
    answer = site.send(_key(case))
    marked = case in ("no key", "outage")
    assert (answer.headers.get("Idempotency-Status"), answer.status_code) == ("unprotected" if marked else None, 201)


@pytest.mark.parametrize("case", DEGRADED)
def test_an_error_page_of_an_unprotected_view_is_the_applications_own(case: str, make_site: MakeSite) -> None:
    site = _degraded(make_site, case)
    site.view(lambda: abort(418))
    answer = site.send(_key(case))
    assert answer.status_code == 418
    assert ("Idempotency-Status" in answer.headers) == (case in ("no key", "outage"))


@pytest.mark.parametrize("case", DEGRADED)
def test_teardown_functions_of_an_unprotected_view_can_ask_for_the_reservation(case: str, make_site: MakeSite) -> None:
    site = _degraded(make_site, case)
    seen: list[bool] = []
    site.app.teardown_request(lambda error: seen.append(bool(current_reservation) or current_reservation.held))
    site.view()
    site.send(_key(case))
    assert seen == [False]
    assert not current_reservation
    with pytest.raises(NoReservation):
        current_reservation.ensure_held()


@pytest.mark.parametrize("case", DEGRADED)
@pytest.mark.parametrize("size", [10, 300_000])
def test_the_body_reaches_an_unprotected_view_and_its_streamed_answer(
    case: str, size: int, make_site: MakeSite
) -> None:
    site = _degraded(make_site, case)
    stream = lambda: Response(iter(lambda: request.stream.read(1000), b""))  # noqa: E731
    site.view(lambda: Response(iter(request.stream), 201))
    site.view(stream, "/context")
    body = b"0123456789" * (size // 10)
    assert site.send(_key(case), data=body).data == body


def test_the_reservation_of_an_unprotected_request_is_not_that_of_the_request_around_it(make_site: MakeSite) -> None:
    site = make_site()
    site.view(lambda: str(bool(current_reservation)), "/inner", required=False)

    def outer() -> str:
        return f"{site.send(None, '/inner').text} {bool(current_reservation)}"

    site.view(outer, "/outer")
    assert site.send(path="/outer").text == "False True"


def test_two_requests_without_a_key_are_not_one_for_the_next_service(make_site: MakeSite) -> None:
    site = make_site(principal=lambda: None, REQUIRED=False)
    site.view(lambda: current_reservation.downstream_key("gateway"))
    assert len({site.send(None).text for _ in range(10)}) == 10
    assert site.sent == []


# Events


def test_a_required_key_that_is_missing_is_an_event(site: Site) -> None:
    assert site.send(None).status_code == 400
    (event,) = site.events
    assert (event.name, event.digest, event.route, event.observed) == ("key_missing", "", "POST /charges", False)
    assert event.principal is None


def test_a_key_that_is_not_required_is_not_missing(make_site: MakeSite) -> None:
    site = make_site(REQUIRED=False)
    site.view()
    site.send(None)
    assert site.events == []


# MODE = "observe"


def test_observing_runs_every_request_and_tells_what_would_have_happened(make_site: MakeSite) -> None:
    site = make_site(MODE="observe")
    site.view()
    answers = [
        site.send(),
        site.send(),
        site.send(json={"amount": 2}),
        site.send(None),
        site.send("\t"),
    ]
    assert [answer.text for answer in answers] == [f"charge {n}" for n in range(1, 6)]
    assert not any("Idempotent-Replayed" in answer.headers for answer in answers)
    assert site.told() == ["claimed", "completed", "replayed", "reused", "key_missing"]
    assert all(event.observed for event in site.events)
    assert (site.row()["status"], site.row()["response_body"]) == (b"completed", b"charge 1")


def test_metrics_tell_what_was_only_observed_from_what_was_done(make_site: MakeSite) -> None:
    reader = InMemoryMetricReader()
    site = make_site(MODE="observe")
    site.view()
    site.send()
    telemetry = Telemetry(MeterProvider([reader]))
    for event in site.events:
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


def test_observing_tells_of_a_request_in_progress_and_does_not_wait(make_site: MakeSite) -> None:
    site = make_site(MODE="observe", WAIT_SECONDS=30)

    def view() -> str:
        return site.send().text if len(site.runs) == 1 else f"run {len(site.runs)}"

    site.view(view, wait=20)
    assert site.send().text == "run 2"
    assert site.told() == ["claimed", "in_progress", "completed"]


def test_observing_does_not_recover(make_site: MakeSite, clock: TurnedClock) -> None:
    site = make_site(MODE="observe")

    def view() -> str:
        current_reservation.outcome = "hold" if len(site.runs) == 1 else None
        return f"run {len(site.runs)}"

    site.view(view, recover=lambda reservation: pytest.fail("it only observes"))
    site.send()
    clock.turn(31)
    assert (site.send().text, site.row()["generation"]) == ("run 2", b"2")
    assert site.told()[-2:] == ["taken_over", "completed"]


def test_observing_keeps_a_secret_out_of_redis_as_ever(make_site: MakeSite) -> None:
    site = make_site(MODE="observe")

    def view() -> str:
        current_reservation.outcome = "omit"
        return "SECRET"

    site.view(view)
    assert site.send().text == "SECRET"
    assert not any(b"SECRET" in value for value in site.row().values())


def test_a_principal_or_a_fingerprint_that_fails_is_no_trouble_while_observing(make_site: MakeSite) -> None:
    for broken in ({"principal": lambda: 1 / 0}, {"principal": lambda: None}, {}):
        site = make_site(MODE="observe", **broken)
        site.view(fingerprint=None if broken else lambda: 1 / 0)
        assert site.send().status_code == 201


@pytest.mark.parametrize("terminated", [False, True])
def test_observing_changes_nothing_about_a_body_that_would_be_refused(terminated: bool, make_site: MakeSite) -> None:
    site = make_site(MODE="observe", MAX_REQUEST_BYTES=100_000)
    site.view(lambda: request.get_data())
    body = bytes(range(256)) * 2000
    overrides = {"wsgi.input_terminated": True, "HTTP_TRANSFER_ENCODING": "chunked"} if terminated else {}
    assert site.send(data=body, environ_overrides=overrides).data == body
    assert site.rows() == {}


def test_an_incomplete_body_is_read_as_without_the_extension_while_observing(make_site: MakeSite) -> None:
    site = make_site(MODE="observe")
    site.view(lambda: request.get_data())
    overrides = {"CONTENT_LENGTH": "100", "wsgi.input": io.BytesIO(b"12345")}
    assert site.send(data=b"", environ_overrides=overrides).status_code == 400  # Werkzeug's ClientDisconnected
    assert (len(site.runs), site.rows()) == (1, {})


def test_a_corrupt_row_is_no_trouble_while_observing(make_site: MakeSite, caplog: pytest.LogCaptureFixture) -> None:
    site = make_site(MODE="observe")
    site.view()
    site.send()
    site.store.hset(site.row_name(), "status", "other")
    before = site.rows()
    assert (site.send().text, site.rows()) == ("charge 2", before)
    assert f"corrupt: row {site.events[-1].digest} generation 0, POST /charges: " in caplog.text
    assert site.events[-1].observed


def test_a_view_that_holds_for_review_is_held_while_observing(make_site: MakeSite) -> None:
    site = make_site(MODE="observe")

    def view() -> str:
        raise HoldForReview

    site.view(view)
    assert site.send().status_code == 409
    assert site.events[-1].name == "held_for_review"
    assert site.events[-1].observed


# MODE = "off"


@pytest.mark.parametrize("protect_all", [False, True])
def test_turned_off_nothing_is_asked_recorded_or_sent(protect_all: bool, make_site: MakeSite) -> None:
    site = make_site(MODE="off", PROTECT_ALL=protect_all, principal=lambda: abort(500))
    inputs: list[Any] = []
    site.app.before_request(lambda: inputs.append(type(request.environ["wsgi.input"])))
    site.view()
    site.app.add_url_rule("/plain", "plain", lambda: "done", methods=["POST"])
    assert [site.send(path=path).status_code for path in ("/charges", "/charges", "/plain")] == [201, 201, 200]
    assert (site.sent, site.events, set(inputs)) == ([], [], {io.BytesIO})


def test_a_reservation_of_an_unprotected_view_is_still_one_to_isinstance(make_site: MakeSite) -> None:
    site = make_site(MODE="off")
    site.view(lambda: f"{isinstance(current_reservation, Reservation)} {repr(current_reservation)[:11]}")
    assert site.send().text == "True Unprotected"
