"""What happened to a row, and who hears of it: the log, and observers."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from .core.flows import Emit

__all__ = ["Event", "EventEmitter", "EventName", "Observer", "digest"]

logger = logging.getLogger("idemredis")

EventName: TypeAlias = Literal[
    "claimed",
    "taken_over",
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
]

_LOUD: Mapping[EventName, tuple[int, str]] = {
    "fenced": (logging.ERROR, "an attempt no longer owned its row; what it did elsewhere may have been done twice"),
    "completion_lost": (logging.ERROR, "a response could not be stored in time; a retry will run the operation again"),
    "held_for_review": (logging.ERROR, "an operation waits for a person to decide"),
    "taken_over": (logging.WARNING, "an earlier attempt did not finish; a new one runs"),
    "unavailable": (logging.WARNING, "Redis did not serve the ledger"),
    "not_stored": (logging.WARNING, "a response was not stored; retries are refused and do not run"),
}
_QUIET = (logging.DEBUG, "")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a row.

    Attributes:
        name: `claimed`, `taken_over`, `replayed` and so on; `EventName` has them all.
        digest: 12 hex digits that stand for the row's identity.
        operation: of the row; "" for none.
        generation: of the attempt; 0 where there is none.
        route: which endpoint or function it was, such as `POST /orders/<id>`; "" where unknown.
        seconds: from the start of the ledger's operation; 0.0 for what happened in the background.
        principal: only from a ledger made with `log_keys=True`.
        key: likewise.
    """

    name: EventName
    digest: str
    operation: str
    generation: int
    route: str
    seconds: float
    principal: str | None = None
    key: str | None = None


Observer: TypeAlias = Callable[[Event], object]


def digest(row: str) -> str:
    """Return 12 hex digits that stand for a row in logs and metrics, which never show its key or principal."""
    return hashlib.sha256(row.encode()).hexdigest()[:12]


class EventEmitter:
    """Gives events to the log and to observers. An observer that raises cannot break the ledger."""

    def __init__(self, observers: Iterable[Observer], log_keys: bool) -> None:
        self._observers = tuple(observers)
        self._log_keys = log_keys
        self._failed: set[int] = set()
        self._timers: list[Any] = [
            observer for observer in self._observers if callable(getattr(observer, "timed", None))
        ]

    def __call__(self, emit: Emit, began: float | None = None) -> None:
        """Emit an event of an operation that began at `began`, by the local monotonic clock."""
        level, meaning = _LOUD.get(emit.event, _QUIET)
        logged = logger.isEnabledFor(level)
        if not logged and not self._observers:
            return
        event = self._event(emit, 0.0 if began is None else time.monotonic() - began)
        if logged:
            words = (event.name, event.digest, event.generation, meaning)
            logger.log(level, "%s: row %s generation %d %s", *words, extra={"idempotency": event})
        for observer in self._observers:
            self._guarded(observer, observer, event)

    def timed(self, script: str, sent: float, outcome: object) -> None:
        """Give the time that a script took, and the kind of its outcome, to observers that have a method `timed`."""
        for timer in self._timers:
            self._guarded(
                timer, timer.timed, script, time.monotonic() - sent, type(outcome).__name__.removeprefix("Async")
            )

    def _guarded(self, observer: Observer, notify: Callable[..., object], *facts: object) -> None:
        try:
            notify(*facts)
        except Exception:
            if id(observer) not in self._failed:
                self._failed.add(id(observer))
                logger.exception("observer %r failed; further failures of it are not logged", observer)

    def _event(self, emit: Emit, seconds: float) -> Event:
        who = emit.identity
        names = (who.principal, who.key) if self._log_keys else (None, None)
        return Event(emit.event, digest(who.row), who.operation, emit.generation, emit.route, seconds, *names)
