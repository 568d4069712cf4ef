"""Metrics, spans, signals and logs of the ledger's events."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import redis
import redis.asyncio
from flask import Flask, request
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import REGISTRY, generate_latest

from idemredis import CorruptRow, Event, HoldForReview, Ledger, Reservation, StoredResponse
from idemredis.events import EventName, digest
from idemredis.flask import Idempotency, current_reservation
from idemredis.telemetry import Telemetry
from idemredis.telemetry.otel import MOST_NAMES, OTHER_NAME
from idemredis.telemetry.signals import send, signals
from tests.support.clock import TurnedClock
from tests.support.servers import Server
from tests.support.subject import MakeSubject, Mode

ANSWER = StoredResponse(201, (), b"done")


class Collected:
    """A `Telemetry` of its own, and what it gave."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.spans = InMemorySpanExporter()
        traces = TracerProvider()
        traces.add_span_processor(SimpleSpanProcessor(self.spans))
        self.tracer = traces.get_tracer("test")
        self.meters = MeterProvider([self.reader])
        self.observer = Telemetry(self.meters, traces)

    def points(self, name: str) -> dict[tuple[tuple[str, Any], ...], Any]:
        data = self.reader.get_metrics_data()
        found: dict[tuple[tuple[str, Any], ...], Any] = {}
        for resource in data.resource_metrics if data else []:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    if metric.name == name:
                        for point in metric.data.data_points:
                            found[tuple(sorted(dict(point.attributes or {}).items()))] = point
        return found

    def outcomes(self) -> dict[tuple[str, str], int]:
        return {
            (dict(labels)["outcome"], dict(labels)["operation"]): point.value
            for labels, point in self.points("idempotency.outcomes").items()
        }

    def held(self) -> int:
        [point] = self.points("idempotency.reservations.held").values()
        held: int = point.value
        return held


@pytest.fixture
def collected() -> Iterator[Collected]:
    made = Collected()
    yield made
    made.meters.shutdown()


def test_outcomes_are_counted_and_reservations_held_go_up_and_down(
    make_subject: MakeSubject, mode: Mode, valkey_server: Server, clock: TurnedClock, collected: Collected
) -> None:
    subject = make_subject(mode, valkey_server, observers=[collected.observer])
    assert collected.held() == 0
    a, b, c = (subject.claimed("acct_secret", f"key-{name}", "f", "charge") for name in "abc")
    assert collected.held() == 3
    subject.complete(a, ANSWER)
    subject.claim("acct_secret", "key-a", "f", "charge")
    subject.claim("acct_secret", "key-b", "other", "charge")
    subject.release(b)
    assert collected.held() == 1
    clock.turn(60)
    taken = subject.claimed("acct_secret", "key-c", "f", "charge")
    with pytest.raises(Exception, match="no longer"):
        subject.complete(c, ANSWER)
    assert collected.held() == 1
    subject.fail(taken, ANSWER)
    assert collected.held() == 0
    assert collected.outcomes() == {
        ("claimed", "charge"): 3,
        ("completed", "charge"): 1,
        ("replayed", "charge"): 1,
        ("reused", "charge"): 1,
        ("released", "charge"): 1,
        ("taken_over", "charge"): 1,
        ("fenced", "charge"): 1,
        ("failed", "charge"): 1,
    }


def test_a_retry_after_a_release_is_counted_apart_from_a_takeover_after_a_death(
    make_subject: MakeSubject, mode: Mode, valkey_server: Server, clock: TurnedClock, collected: Collected
) -> None:
    subject = make_subject(mode, valkey_server, observers=[collected.observer])
    subject.release(subject.claimed("acct_1", "released", "f", "charge"))
    subject.claimed("acct_1", "died", "f", "charge")
    clock.turn(60)
    for key in ("released", "died"):
        subject.claimed("acct_1", key, "f", "charge")
    assert collected.outcomes() == {
        ("claimed", "charge"): 2,
        ("released", "charge"): 1,
        ("retried", "charge"): 1,
        ("taken_over", "charge"): 1,
    }


def test_a_corrupt_row_is_an_event_and_a_metric_with_its_digest_and_route(
    make_subject: MakeSubject,
    mode: Mode,
    valkey_server: Server,
    collected: Collected,
    caplog: pytest.LogCaptureFixture,
) -> None:
    subject = make_subject(mode, valkey_server, observers=[collected.observer])
    row = subject.claimed("acct_1", "key-1", "f", "charge").identity.row
    for spoil, why in ((["fingerprint"], "fingerprint is missing"), (["owner", "status"], "status is missing")):
        with valkey_server.client() as client:
            client.hdel(row, *spoil)
        with pytest.raises(CorruptRow):
            subject.claim("acct_1", "key-1", "f", "charge", route="POST /charges")
        assert caplog.messages[-1].startswith(f"corrupt: row {digest(row)} generation 0, POST /charges: ")
        assert caplog.messages[-1].endswith(f"({why})")
    assert collected.outcomes()["corrupt", "charge"] == 2


def test_labels_are_a_closed_set(collected: Collected) -> None:
    for i in range(MOST_NAMES + 50):
        collected.observer(Event("claimed", "0" * 12, f"op-{i}", 1, f"route-{i}", 0.0, "acct", "key"))
    operations = {operation for _, operation in collected.outcomes()}
    assert len(operations) == MOST_NAMES + 1
    assert collected.outcomes()["claimed", OTHER_NAME] == 50
    labels = [dict(labels) for labels in collected.points("idempotency.outcomes")]
    assert {name for each in labels for name in each} == {"outcome", "operation", "route"}
    assert len({each["route"] for each in labels}) == MOST_NAMES + 1


def test_a_reservation_whose_end_is_never_told_is_not_counted_for_ever(
    collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected.observer(Event("claimed", "0" * 12, "", 1, "", 0.0))
    assert collected.held() == 1
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 901)
    assert collected.held() == 0


def test_call_times_are_a_histogram_by_script_and_outcome(collected: Collected) -> None:
    for seconds in (0.0002, 0.0004, 2.0):
        collected.observer.timed("claim", seconds, "Reservation")
    [(labels, point)] = collected.points("idempotency.call.duration").items()
    assert dict(labels) == {"script": "claim", "outcome": "Reservation"}
    assert point.count == 3
    assert point.sum == pytest.approx(2.0006)
    assert point.explicit_bounds[0] == 0.0001


def test_a_claim_and_a_completion_are_spans_within_the_requests_own(
    valkey_server: Server, namespace: str, collected: Collected
) -> None:
    with valkey_server.client() as client:
        ledger = Ledger(client, namespace=namespace, observers=[collected.observer])
        with collected.tracer.start_as_current_span("request") as parent:
            r = ledger.claim("acct_secret", "key-secret", "f", "charge", route="POST /charges/<id>")
            assert isinstance(r, Reservation)
            ledger.complete(r, ANSWER)
            ledger.claim("acct_secret", "key-secret", "f", "charge", route="POST /charges/<id>")
        ledger.close()
    spans = collected.spans.get_finished_spans()
    request = spans[-1]
    claim, completion, replay = (span for span in spans if span.name.startswith("idempotency."))
    assert [span.name for span in spans if span.name.startswith("redis ")] == [
        "redis claim",
        "redis complete",
        "redis claim",
    ]
    assert [span.name for span in (claim, completion, replay)] == [
        "idempotency.claim",
        "idempotency.completion",
        "idempotency.claim",
    ]
    row = digest(f"{namespace}:acct_secret:charge:key-secret")
    for span, outcome in ((claim, "claimed"), (completion, "completed"), (replay, "replayed")):
        assert span.parent is not None
        assert span.parent.span_id == parent.get_span_context().span_id
        assert span.attributes == {
            "idempotency.outcome": outcome,
            "idempotency.digest": row,
            "idempotency.generation": 1,
            "idempotency.operation": "charge",
            "idempotency.route": "POST /charges/<id>",
        }
        times = [request.start_time, span.start_time, span.end_time, request.end_time]
        assert times == sorted(time or 0 for time in times)
        assert span.status.is_unset
        assert "secret" not in span.to_json()


def test_a_fenced_completion_is_a_span_with_an_error(collected: Collected) -> None:
    collected.observer(Event("fenced", "0" * 12, "", 1, "", 0.01))
    [span] = collected.spans.get_finished_spans()
    assert span.name == "idempotency.completion"
    assert not span.status.is_ok
    assert not span.status.is_unset


def test_prometheus_sees_the_names_that_the_page_alerts_on(valkey_server: Server, namespace: str) -> None:
    reader = PrometheusMetricReader()
    meters = MeterProvider([reader])
    telemetry = Telemetry(meters)
    with valkey_server.client() as client:
        ledger = Ledger(client, namespace=namespace, observers=[telemetry])
        ledger.claim("a", "k", "f", "charge")
        ledger.close()
    telemetry.timed("claim", 0.001, "Reservation")
    text = generate_latest(REGISTRY).decode()
    meters.shutdown()
    lines = [line for line in text.splitlines() if line.startswith("idempotency")]
    assert any(
        line.startswith("idempotency_outcomes_total{") and 'outcome="claimed"' in line and 'operation="charge"' in line
        for line in lines
    )
    assert any(line.startswith("idempotency_reservations_held") and line.endswith(" 1.0") for line in lines)
    assert any(
        line.startswith("idempotency_call_duration_seconds_bucket{") and 'script="claim"' in line for line in lines
    )


def test_without_opentelemetry_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "import idemredis, idemredis.telemetry as t\n"
        "try: t.Telemetry()\n"
        "except idemredis.ConfigurationError as error: print(error)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "idemredis[otel]" in ran.stdout


# Signals, and what reaches the log


def make_app(url: str, namespace: str, **settings: Any) -> Flask:
    app = Flask("shop")
    app.config.update(IDEMREDIS_URL=url, IDEMREDIS_NAMESPACE=namespace, **settings)
    idempotency = Idempotency(app, principal=lambda: request.headers.get("X-Account"), observers=[send])

    def recover(reservation: Any) -> None:
        raise HoldForReview

    @app.post("/charges")
    @idempotency.protect
    def charge() -> Any:
        current_reservation.checkpoint("charged", {})
        return {"paid": True}, 201

    @app.post("/broken")
    @idempotency.protect(recover=recover)
    def broken() -> Any:
        return {"error": "oops"}, 500

    return app


def post(app: Flask, path: str, key: str, **json: Any) -> int:
    headers = {"X-Account": "acct_secret", "Idempotency-Key": key}
    return app.test_client().post(path, json=json, headers=headers).status_code


def test_a_signal_is_sent_for_each_event_with_the_application_as_its_sender(
    valkey_server: Server, namespace: str
) -> None:
    app = make_app(valkey_server.url, namespace)
    told: list[tuple[Any, str]] = []

    def note(sender: Any, event: Event) -> None:
        told.append((sender, event.name))

    for signal in signals.values():
        signal.connect(note)
    try:
        assert post(app, "/charges", "key-1") == 201
        assert post(app, "/charges", "key-1") == 201
        assert post(app, "/charges", "key-1", amount=2) == 409
    finally:
        for signal in signals.values():
            signal.disconnect(note)
    assert post(app, "/charges", "key-2") == 201
    assert told == [(app, "claimed"), (app, "completed"), (app, "replayed"), (app, "reused")]
    assert set(signals) == set(get_args(EventName))
    app.extensions["idemredis"].ledger.client.close()


def test_a_signals_receiver_that_fails_breaks_no_request(
    valkey_server: Server, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(valkey_server.url, namespace)

    def fail(sender: Any, event: Event) -> None:
        raise RuntimeError("no")

    signals["claimed"].connect(fail)
    try:
        assert [post(app, "/charges", f"key-{i}") for i in range(3)] == [201, 201, 201]
    finally:
        signals["claimed"].disconnect(fail)
    assert (
        len(
            [
                record
                for record in caplog.records
                if "failed; further failures of it are not logged" in record.getMessage()
            ]
        )
        == 1
    )
    app.extensions["idemredis"].ledger.client.close()


def run_everything(app: Flask) -> None:
    assert post(app, "/charges", "key-secret-1") == 201
    assert post(app, "/charges", "key-secret-1") == 201
    assert post(app, "/charges", "key-secret-1", amount=2) == 409
    assert post(app, "/broken", "key-secret-2") == 500
    assert post(app, "/broken", "key-secret-2") == 409
    assert post(app, "/charges", "key-secret-\x7f") == 400
    state = app.extensions["idemredis"]
    r = state.ledger.claim("acct_secret", "key-secret-3", "f")
    state.ledger.client.delete(r.identity.row)
    with pytest.raises(Exception, match="no longer"):
        state.ledger.complete(r, ANSWER)
    state.ledger.claim("acct_secret", "key-secret-4", "f", lease=0.01)
    state.ledger.claim("acct_secret", "key-secret-4", "f", wait=5.0)
    state.ledger.client.hset(r.identity.row, "status", "perhaps")
    state.ledger.client.pexpire(r.identity.row, 60_000)
    with pytest.raises(CorruptRow):
        state.ledger.claim("acct_secret", "key-secret-3", "f")
    state.ledger.client.close()


@pytest.mark.parametrize("log_keys", [False, True])
def test_no_log_line_has_a_raw_key_or_principal_unless_asked(
    valkey_server: Server, namespace: str, caplog: pytest.LogCaptureFixture, log_keys: bool
) -> None:
    with caplog.at_level(logging.DEBUG):
        run_everything(make_app(valkey_server.url, namespace, IDEMREDIS_LOG_KEYS=log_keys))
    said = "\n".join(f"{record.getMessage()} {vars(record)}" for record in caplog.records)
    assert ("key-secret" in said) == log_keys
    assert ("acct_secret" in said) == log_keys


def test_levels_are_those_that_a_person_on_call_would_choose(
    valkey_server: Server, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "idemredis"):
        run_everything(make_app(valkey_server.url, namespace))
    levels = {
        record.__dict__["idempotency"].name: record.levelname
        for record in caplog.records
        if "idempotency" in record.__dict__
    }
    assert levels == {
        "claimed": "DEBUG",
        "completed": "DEBUG",
        "replayed": "DEBUG",
        "reused": "DEBUG",
        "released": "DEBUG",
        "retried": "DEBUG",
        "taken_over": "WARNING",
        "corrupt": "ERROR",
        "held_for_review": "ERROR",
        "fenced": "ERROR",
    }


def test_tracers_that_wrap_redis_pys_commands_see_no_row(
    mode: Mode, make_subject: MakeSubject, valkey_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ddtrace, Sentry and OpenTelemetry wrap these methods, and record their arguments."""
    seen: list[object] = []

    def wrap(owner: Any, method: str) -> None:
        inner = getattr(owner, method)

        def recorded(self: Any, *args: Any, **options: Any) -> Any:
            seen.append((method, args))
            return inner(self, *args, **options)

        monkeypatch.setattr(owner, method, recorded)

    subject = make_subject(mode, valkey_server)
    for library in (redis, redis.asyncio):
        wrap(library.Redis, "execute_command")
        wrap(library.RedisCluster, "execute_command")
        for pipeline in (library.client.Pipeline, library.cluster.ClusterPipeline):
            wrap(pipeline, "execute")
        wrap(library.client.Pipeline, "immediate_execute_command")
    r = subject.claimed("secret-principal", "secret-key", "f")
    subject.checkpoint(r, "charged", {"charge": "secret-charge"})
    subject.renew(r)
    subject.complete(r, StoredResponse(201, (), b"secret-body"))
    assert subject.read("secret-principal", "secret-key") is not None
    subject.claim("secret-principal", "secret-key", "f")
    assert seen == []
    subject.client.hgetall(r.row)  # the application's own
    assert seen == [("execute_command", ("HGETALL", r.row))]
