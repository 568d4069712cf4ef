"""OpenTelemetry metrics and spans for a ledger's events; needs `pip install 'idemredis[otel]'`.

    Ledger.from_url(url, observers=[Telemetry()])

Metric names are the same in every service. No label has a key, a principal or a digest, so the number of series stays
small.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..errors import ConfigurationError
from ..events import Event, EventName

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
    from opentelemetry.trace import TracerProvider

__all__ = ["MOST_NAMES", "OTHER_NAME", "Telemetry"]

MOST_NAMES = 100
"""Distinct operations, and distinct routes, that get their own label; a service has fewer functions and endpoints."""

OTHER_NAME = "other"
"""Label of all further names: each distinct label costs memory here and in the metrics server."""

MAX_HELD = 900.0
"""Seconds after which a reservation whose end was not emitted no longer counts as held; `max_hold`'s default."""

BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Seconds. A call to a nearby server takes 0.1 ms, and a call is given up after 2 s."""

_BEGIN = frozenset[EventName]({"claimed", "taken_over", "retried"})
_END = frozenset[EventName]({"completed", "failed", "released", "fenced", "held_for_review", "completion_lost"})
_CLAIM = frozenset[EventName]({"claimed", "taken_over", "retried", "replayed", "in_progress", "reused"})
_COMPLETION = frozenset[EventName]({"completed", "failed", "released", "fenced", "completion_lost"})
_FAILED = frozenset({"LedgerUnavailable", "NotDurable", "CorruptRow"})
_BAD = frozenset[EventName]({"fenced", "completion_lost", "unavailable", "corrupt"})
_EITHER = frozenset[EventName]({"unavailable", "corrupt"})
"""Ends of a claim, or of an attempt, which has a generation."""


class Telemetry:
    """Record metrics and spans of a ledger's events; pass an instance as an observer.

    - counter `idempotency.outcomes`, by `outcome` (the event's name), `operation`, `route`; `observed` if only so
    - histogram `idempotency.call.duration` in seconds, by `script` and `outcome`
    - gauge `idempotency.reservations.held`: attempts of this process that hold a row
    - a span `idempotency.claim` for each claim and `idempotency.completion` for each end of an attempt, as children of
      the current span, with the row's digest

    Args:
        meters: provider for metrics; defaults to the global one.
        traces: provider for spans; defaults to the global one.

    Raises:
        ConfigurationError: OpenTelemetry's API is not installed.
    """

    def __init__(self, meters: MeterProvider | None = None, traces: TracerProvider | None = None) -> None:
        try:
            from opentelemetry import metrics, trace
        except ImportError:
            raise ConfigurationError("Telemetry needs OpenTelemetry's API; run pip install 'idemredis[otel]'") from None
        self._observation = metrics.Observation
        self._error = trace.Status(trace.StatusCode.ERROR)
        self._client = trace.SpanKind.CLIENT
        self._current_span = trace.get_current_span
        self._tracer = trace.get_tracer("idemredis", tracer_provider=traces)
        meter = metrics.get_meter("idemredis", meter_provider=meters)
        self._outcomes = meter.create_counter("idempotency.outcomes", description="Events of protected operations")
        self._calls = meter.create_histogram(
            "idempotency.call.duration",
            "s",
            "Duration of a script call, including the network",
            explicit_bucket_boundaries_advisory=BUCKETS,
        )
        meter.create_observable_gauge(
            "idempotency.reservations.held", [self._count_held], description="Attempts of this process that hold a row"
        )
        self._lock = threading.RLock()  # reentrant: the garbage collector may emit an event while it is held
        self._held: OrderedDict[tuple[str, int], float] = OrderedDict()
        self._operations: set[str] = set()
        self._routes: set[str] = set()

    def __call__(self, event: Event) -> None:
        """Record one event."""
        operation, route = _label(event.operation, self._operations), _label(event.route, self._routes)
        observed = {"observed": True} if event.observed else {}
        self._outcomes.add(1, {"outcome": event.name, "operation": operation, "route": route, **observed})
        self._hold(event)
        if event.name in _CLAIM or (event.name in _EITHER and not event.generation):
            self._span("idempotency.claim", event)
        elif event.name in _COMPLETION or event.name in _EITHER:
            self._span("idempotency.completion", event)

    def timed(self, script: str, seconds: float, outcome: str) -> None:
        """Record the duration of one script call; a ledger calls this method of every observer that has it."""
        self._calls.record(seconds, {"script": script, "outcome": outcome})
        if self._current_span().is_recording():  # a heartbeat in the background would be a trace of its own
            now = time.time_ns()
            began = now - round(seconds * 1e9)
            about = {"db.system.name": "redis", "db.operation.name": script, "idempotency.outcome": outcome}
            span = self._tracer.start_span(f"redis {script}", start_time=began, kind=self._client, attributes=about)
            if outcome in _FAILED:
                span.set_status(self._error)
            span.end(now)

    def _hold(self, event: Event) -> None:
        attempt = (event.digest, event.generation)
        with self._lock:
            if event.name in _BEGIN:
                self._held[attempt] = time.monotonic()
            elif event.name in _END:
                self._held.pop(attempt, None)

    def _count_held(self, options: CallbackOptions) -> Iterable[Observation]:
        expired = time.monotonic() - MAX_HELD
        with self._lock:
            while self._held and next(iter(self._held.values())) < expired:
                self._held.popitem(last=False)
            held = len(self._held)
        return [self._observation(held)]

    def _span(self, name: str, event: Event) -> None:
        """Make a span that ends now, since an event is emitted at the end of its call."""
        now = time.time_ns()
        span = self._tracer.start_span(
            name,
            start_time=now - round(event.seconds * 1e9),
            attributes={
                "idempotency.outcome": event.name,
                "idempotency.digest": event.digest,
                "idempotency.generation": event.generation,
                "idempotency.operation": event.operation,
                "idempotency.route": event.route,
            },
        )
        if event.name in _BAD:
            span.set_status(self._error)
        span.end(now)


def _label(name: str, known: set[str]) -> str:
    """Return the name, or `OTHER_NAME` once `MOST_NAMES` names are known."""
    if name not in known:
        if len(known) >= MOST_NAMES:
            return OTHER_NAME
        known.add(name)
    return name
