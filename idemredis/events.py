"""Events, and the emitter that sends them to the log and to observers."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from .core.flows import Emit

__all__ = ["Event", "EventEmitter", "EventName", "Observer", "digest", "observing", "serving"]

logger = logging.getLogger("idemredis")

EventName: TypeAlias = Literal[
    "claimed",
    "taken_over",
    "retried",
    "replayed",
    "in_progress",
    "reused",
    "completed",
    "failed",
    "released",
    "fenced",
    "unavailable",
    "not_stored",
    "held_for_review",
    "completion_lost",
    "corrupt",
    "key_missing",
    "heartbeat_late",
]

_LOUD: Mapping[EventName, tuple[int, str]] = {
    "fenced": (logging.ERROR, "an attempt no longer owned its row; its work may have been done twice"),
    "completion_lost": (logging.ERROR, "a response could not be stored in time; a retry will run the operation again"),
    "held_for_review": (logging.ERROR, "an operation waits for a person to decide"),
    "corrupt": (logging.ERROR, "the row was not written by this ledger, or was edited; it is left as it is"),
    "taken_over": (logging.WARNING, "the attempt before died, or lost its lease; a new attempt is running"),
    "heartbeat_late": (logging.WARNING, "a heartbeat ran late: the work starved it, or the process was paused"),
    "unavailable": (logging.WARNING, "Redis was unreachable, refused a call, or was too slow"),
    "not_stored": (
        logging.WARNING,
        "a response was not stored; retries are refused and the operation is not run again",
    ),
}
_QUIET = (logging.DEBUG, "")


@dataclass(frozen=True, slots=True)
class Event:
    """An event in the life of a row.

    Attributes:
        name: `claimed`, `taken_over`, `replayed` and so on; `EventName` lists all names.
        digest: 12 hex digits that identify the row without showing its key or principal; "" if there is no key.
        operation: third part of the row's identity; "" if there is none.
        generation: generation of the attempt; 0 if there is no attempt.
        route: the endpoint or function, such as `POST /orders/<id>`; "" if unknown.
        seconds: duration of the ledger's call so far; 0.0 for an event in the background.
        principal: whose key it is; None unless the ledger was made with `log_keys=True`.
        key: the key; None unless the ledger was made with `log_keys=True`.
        reason: of `unavailable`: why, as in `LedgerUnavailable.reason`; of `corrupt`: what is wrong with the row, as in
            `CorruptRow.why`; "" otherwise.
        observed: True if the application only observes: the view runs, whatever the event says.
    """

    name: EventName
    digest: str
    operation: str
    generation: int
    route: str
    seconds: float
    principal: str | None = None
    key: str | None = None
    reason: str = ""
    observed: bool = False


Observer: TypeAlias = Callable[[Event], object]


observing: ContextVar[bool] = ContextVar("idemredis_observing", default=False)
"""True while a door that only observes calls the ledger; its events then say so."""


serving: ContextVar[object] = ContextVar("idemredis_serving", default=None)
"""The application that a door settles a row for, after its own contexts have ended."""


def digest(row: str) -> str:
    """Return 12 hex digits that identify a row in logs and spans, which never show its key or principal."""
    return hashlib.sha256(row.encode("utf-8", "surrogateescape")).hexdigest()[:12]


class EventEmitter:
    """Send events to the log and to observers; an exception of an observer is logged and never reaches the ledger."""

    def __init__(self, observers: Iterable[Observer], log_keys: bool) -> None:
        self._observers = tuple(observers)
        self._log_keys = log_keys
        self._failed: set[int] = set()
        self.timers: list[Any] = [
            observer for observer in self._observers if callable(getattr(observer, "timed", None))
        ]

    def __call__(self, emit: Emit, began: float | None = None) -> None:
        """Emit an event of a call that began at `began`, by the local monotonic clock."""
        level, meaning = _LOUD.get(emit.event, _QUIET)
        logged = logger.isEnabledFor(level)
        if not logged and not self._observers:
            return
        event = self._event(emit, 0.0 if began is None else time.monotonic() - began)
        if logged:
            route = f", {event.route}" if event.route else ""
            why = f" ({event.reason})" if event.reason else ""
            words = (event.name, event.digest, event.generation, route, meaning, why)
            logger.log(level, "%s: row %s generation %d%s: %s%s", *words, extra={"idempotency": event})
        for observer in self._observers:
            self._notify(observer, observer, event)

    def timed(self, script: str, sent: float, outcome: object) -> None:
        """Report a script's duration and kind of outcome to the observers that have a method `timed`."""
        for timer in self.timers:
            self._notify(
                timer, timer.timed, script, time.monotonic() - sent, type(outcome).__name__.removeprefix("Async")
            )

    def _notify(self, observer: Observer, method: Callable[..., object], *facts: object) -> None:
        try:
            method(*facts)
        except Exception:
            if id(observer) not in self._failed:
                self._failed.add(id(observer))
                logger.exception("observer %r failed; further failures of it are not logged", observer)

    def _event(self, emit: Emit, seconds: float) -> Event:
        who = emit.identity
        principal, key = (who.principal, who.key) if self._log_keys else (None, None)
        row = digest(who.row) if who.row else ""
        about = (row, who.operation, emit.generation, emit.route)
        return Event(emit.event, *about, seconds, principal, key, emit.reason, observing.get())
