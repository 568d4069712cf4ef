"""Python functions entered, counted and not timed: the same on a busy machine, and a hint of where work went."""

from __future__ import annotations

from collections.abc import Iterable

from flask import Flask
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from idemredis import Event, Ledger, Policy
from idemredis.flask import Idempotency
from idemredis.telemetry import Telemetry
from tests.support.counting import count_calls
from tests.support.servers import Server

from .calls import post
from .turns import Figure

__all__ = ["event", "requests"]

REQUESTS: tuple[tuple[str, str, str, bool, int], ...] = (
    ("a GET of a protected view", "GET", "/protected", False, 6),
    ("a GET of a protected view, with a key", "GET", "/protected", True, 8),
    ("an unprotected view", "POST", "/plain", False, 2),
    ("an unprotected view that is sent a key", "POST", "/plain", True, 9),
    ("a protected request", "POST", "/protected", True, 151),
)


def requests(server: Server) -> Iterable[Figure]:
    """What the extension enters in a request, less what an application with a `teardown_request` does, and redis-py."""
    with server.client() as client:
        app, bare = Flask("shop"), Flask("bare")
        ledger = Ledger(client, Policy(heartbeat=False))
        protect = Idempotency(app, principal="acct_1", ledger=ledger).protect
        bare.teardown_request(lambda error: None)
        for each, view in ((app, protect(_made)), (bare, _made)):
            each.add_url_rule("/protected", "protected", view, methods=["GET", "POST"])
            each.add_url_rule("/plain", "plain", _made, methods=["POST"])
        post(app, None, "/protected")()
        for what, method, path, keyed, aim in REQUESTS:
            ours, theirs = (post(each, None, path, method, keyed=keyed) for each in (app, bare))
            ours(), theirs()  # what is found once for each view
            entered = count_calls(ours) - count_calls(theirs)
            yield Figure(f"functions entered: {what}", entered, "", aim)
        ledger.close()


def event(server: Server) -> Iterable[Figure]:
    """What an event enters with metrics and spans on, OpenTelemetry's own included."""
    traces = TracerProvider()
    traces.add_span_processor(SimpleSpanProcessor(InMemorySpanExporter()))
    meters = MeterProvider([InMemoryMetricReader()])
    observer = Telemetry(meters, traces)
    claimed = Event("claimed", "0" * 12, "charge", 1, "", 0.0001)
    observer(claimed)
    yield Figure("functions entered: an event with everything on", count_calls(lambda: observer(claimed)), "", 150)
    meters.shutdown()


def _made() -> tuple[str, int]:
    return "made", 201
