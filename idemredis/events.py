"""What happened to a row, and who is told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from .flows import EventName, Tell
from .keys import digest

__all__ = ["Event", "Observer", "Teller"]

logger = logging.getLogger("idemredis")

_LOUD: Mapping[EventName, tuple[int, str]] = {
    "fenced": (logging.ERROR, "an attempt no longer owned its row; what it did elsewhere may have been done twice"),
    "completion_lost": (logging.ERROR, "an answer could not be stored in time; a retry will run the operation again"),
    "held_for_review": (logging.ERROR, "an operation waits for a person to decide"),
    "taken_over": (logging.WARNING, "an earlier attempt did not finish; a new one runs"),
    "unavailable": (logging.WARNING, "Redis did not serve the ledger"),
    "not_stored": (logging.WARNING, "an answer was not kept; retries are told so and do not run"),
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


class Teller:
    """Tells the log and the observers; none of them can break what it is told of."""

    def __init__(self, observers: Iterable[Observer], log_keys: bool) -> None:
        self._observers = tuple(observers)
        self._log_keys = log_keys
        self._failed: set[int] = set()
        self._timers: list[Any] = [
            observer for observer in self._observers if callable(getattr(observer, "timed", None))
        ]

    def __call__(self, tell: Tell, began: float | None = None) -> None:
        level, meaning = _LOUD.get(tell.event, _QUIET)
        logged = logger.isEnabledFor(level)
        if not logged and not self._observers:
            return
        event = self._event(tell, 0.0 if began is None else time.monotonic() - began)
        if logged:
            words = (event.name, event.digest, event.generation, meaning)
            logger.log(level, "%s: row %s generation %d %s", *words, extra={"idempotency": event})
        for observer in self._observers:
            self._guarded(observer, observer, event)

    def timed(self, script: str, sent: float, answer: object) -> None:
        """Tell those observers that have a method `timed` how long a script took, and what kind of answer came."""
        for timer in self._timers:
            self._guarded(timer, timer.timed, script, time.monotonic() - sent, type(answer).__name__)

    def _guarded(self, observer: Observer, tell: Callable[..., object], *facts: object) -> None:
        try:
            tell(*facts)
        except Exception:
            if id(observer) not in self._failed:
                self._failed.add(id(observer))
                logger.exception("observer %r failed; this is said once", observer)

    def _event(self, tell: Tell, seconds: float) -> Event:
        who = tell.identity
        names = (who.principal, who.key) if self._log_keys else (None, None)
        return Event(tell.event, digest(who.row), who.operation, tell.generation, tell.route, seconds, *names)
