"""Reservations, and the attempt's view of its lease."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from ..errors import ConfigurationError, FencedOut, InvalidResponse
from .keys import Identity
from .response import StoredResponse
from .slots import slot_setters

__all__ = [
    "CHOICES",
    "HEARTBEATS",
    "NOTHING",
    "AsyncReservation",
    "AsyncUnprotected",
    "Choice",
    "Lease",
    "Reservation",
    "Unprotected",
    "allow",
    "chosen_outcome",
    "freeze",
    "observed",
    "save_through",
]

HEARTBEATS = 3
"""Renewals in one lease. If one is late or lost, the next one still comes before the lease ends."""

Choice: TypeAlias = Literal["store", "omit", "release", "hold"]
"""What a view can choose to do with its response."""

CHOICES = ("store", "omit", "release", "hold")


class Lease:
    """The attempt's view of its lease, as of Redis's last reply. Shared with the heartbeat that renews it.

    Attributes:
        duration: seconds.
        expires_at: when the lease ends, by the local monotonic clock.
        ended: True once the attempt has ended or was fenced; the lease is not renewed any more.
        fenced: True once another attempt is known to own the row.
        heartbeat_due: when the next heartbeat is due, by the local monotonic clock; None if there is none.
        process: id of the process that claimed the row. A forked child has a copy, and does not settle the row.
    """

    __slots__ = (
        "_late",
        "_numbers",
        "_on_end",
        "duration",
        "ended",
        "expires_at",
        "fenced",
        "heartbeat_due",
        "process",
    )

    def __init__(self, duration: float, sent: float, last_number: int = 0) -> None:
        """Start a lease that was granted by the reply to a call sent at `sent`."""
        self.duration = duration
        self.expires_at = sent + duration
        self.ended = False
        self.fenced = False
        self._numbers = count(last_number + 1)
        self._on_end: Callable[[Lease], object] | None = None
        self._late = False
        self.heartbeat_due: float | None = None
        self.process = os.getpid()

    @property
    def first_heartbeat_at(self) -> float:
        """When a third of the lease has passed, by the local monotonic clock."""
        return self.expires_at - self.duration + self.duration / HEARTBEATS

    def next_checkpoint(self) -> int:
        """Return the number of the attempt's next checkpoint."""
        return next(self._numbers)

    def when_ended(self, on_end: Callable[[Lease], object]) -> None:
        """Call `on_end` with this lease when the attempt ends."""
        self._on_end = on_end

    def renewed(self, expires_at: float) -> None:
        """Note that a heartbeat has renewed the lease, and when the next one is due."""
        self.expires_at = expires_at
        self.heartbeat_due = self.first_heartbeat_at

    def is_late(self, now: float) -> bool:
        """Return True, once for each attempt, if a heartbeat is a third of the lease late or more.

        Work that keeps the processor, the interpreter's lock or the event loop to itself starves its own heartbeat.
        """
        due = self.heartbeat_due
        if self._late or due is None or now < due + self.duration / HEARTBEATS:
            return False
        self._late = True
        return True

    def end(self) -> None:
        """Mark the attempt as ended."""
        self.ended = True
        if self._on_end is not None:
            self._on_end(self)


def _any_value(value: object) -> object:
    return value


def _stored_response(value: object) -> object:
    if value is None or isinstance(value, StoredResponse):
        return value
    raise InvalidResponse(f"response must be a StoredResponse, not {type(value).__name__}; set `result` for JSON")


def _outcome(value: object) -> object:
    if value is None or value in CHOICES:
        return value
    raise ConfigurationError(f"outcome must be one of {', '.join(CHOICES)}, or None, not {value!r}")


_CHECKS: dict[str, Callable[[object], object]] = {
    "result": _any_value,
    "response": _stored_response,
    "outcome": _outcome,
}


class Reservation:
    """The right of one attempt to run an operation.

    `claim` returns a reservation, `reserve` yields one, and `current_reservation` is a proxy for one. In `reserve` and
    `once`, `result` and `response` can be set; in a protected view, `outcome`. No other attribute can be set.
    """

    def __init__(
        self,
        identity: Identity,
        fingerprint: str,
        generation: int,
        owner: str,
        last_checkpoint: tuple[str, Any] | None,
        lease: Lease,
        route: str = "",
        *,
        save: Callable[[Reservation, str, object], Any] | None = None,
    ) -> None:
        """Make a reservation from a script's reply; `save` is called by `checkpoint`."""
        _put_save(self, save)
        _put_settable(self, None)
        _put_fingerprint(self, fingerprint)
        _put_generation(self, generation)
        _put_identity(self, identity)
        _put_last_checkpoint(self, last_checkpoint)
        _put_lease(self, lease)
        _put_owner(self, owner)
        _put_route(self, route)

    if TYPE_CHECKING:
        result: object
        """A JSON value to store; None by default, which is stored as `null`."""
        response: StoredResponse | None
        """A `StoredResponse` to store instead of `result`."""
        outcome: Choice | None
        """What to do with this response; None follows the settings.

        "store" stores the response. "omit" stores its status only, for secrets that are shown once. "release" gives the
        key up, so that a retry runs the view again. "hold" leaves the row pending until its lease ends.
        """

        @property
        def identity(self) -> Identity:
            """The row's name and the parts it consists of."""

        @property
        def fingerprint(self) -> str:
            """Digest of the request."""

        @property
        def generation(self) -> int:
            """The fencing token: 1 after a claim, one higher after each takeover."""

        @property
        def owner(self) -> str:
            """The attempt's random token, 16 hex digits."""

        @property
        def last_checkpoint(self) -> tuple[str, Any] | None:
            """(name, data) of the last checkpoint that an earlier attempt saved, or None."""

        @property
        def lease(self) -> Lease:
            """The attempt's view of its lease."""

        @property
        def route(self) -> str:
            """The endpoint or function, for people and metrics; "" if unknown."""

    else:
        __slots__ = (
            "__weakref__",
            "_save",
            "_settable",
            "fingerprint",
            "generation",
            "identity",
            "last_checkpoint",
            "lease",
            "owner",
            "route",
        )

        def __getattr__(self, name):
            settable = object.__getattribute__(self, "_settable")
            if settable is not None and name in settable:
                return settable[name]
            raise AttributeError(f"this reservation has no attribute {name!r}")

        def __setattr__(self, name, value):
            if isinstance(self._settable, MappingProxyType) and name in self._settable:
                raise RuntimeError(f"{name} was set after the response was settled; set it before the response ends")
            if self._settable is None or name not in self._settable:
                allowed = f"only {' and '.join(self._settable)} can" if self._settable else "nothing can"
                raise AttributeError(f"{name} cannot be set on this reservation; {allowed}")
            self._settable[name] = _CHECKS[name](value)

    @property
    def principal(self) -> str:
        """Whose key it is."""
        return self.identity.principal

    @property
    def operation(self) -> str:
        """The optional third part of the row's identity; "" if there is none."""
        return self.identity.operation

    @property
    def key(self) -> str:
        """The key that the client sent."""
        return self.identity.key

    @property
    def row(self) -> str:
        """The row's name in Redis."""
        return self.identity.row

    @property
    def taken_over(self) -> bool:
        """True if an earlier attempt claimed the row and may have changed something elsewhere."""
        return self.generation > 1

    @property
    def held(self) -> bool:
        """True while the attempt has not ended, is not fenced, and its last acknowledged lease has time left.

        Time is measured by the local monotonic clock.
        """
        return not self.lease.ended and time.monotonic() < self.lease.expires_at

    def ensure_held(self) -> None:
        """Raise unless this attempt still holds its row; call it just before a step that cannot be undone.

        The check is local and sends nothing, so another attempt may take over right after it. Use `downstream_key` and
        `generation` to guard the step itself.

        Raises:
            FencedOut: the lease has ended, or another attempt owns the row.
        """
        if not self.held:
            raise FencedOut("this attempt no longer holds its row, whose lease ended or was taken over; stop the work")

    def downstream_key(self, name: str) -> str:
        """Return a key to send to another service: 64 hex digits, the same for every attempt of this operation.

        The key depends on `name`, namespace, principal, operation and key, and reveals none of them.

        Args:
            name: any name for the step or service, such as "stripe"; another name gives another key.
        """
        return hashlib.sha256(f"{self.identity.row}\n{name}".encode()).hexdigest()

    def checkpoint(self, name: str, data: object = None) -> None:
        """Save how far the work got, for the attempt that takes over after a crash, and extend the lease.

        A row keeps its latest checkpoint only; the next attempt reads it as `last_checkpoint`.

        Args:
            name: name of the step that is done.
            data: a JSON value of at most 4096 bytes.

        Raises:
            ConfigurationError, TypeError, ValueError: the data is too large or not JSON; nothing was sent.
            FencedOut: another attempt owns the row, or the row is gone or finished; nothing was changed.
            LedgerUnavailable: the checkpoint may or may not have been saved.
        """
        self._save_checkpoint(name, data)

    def _save_checkpoint(self, name: str, data: object) -> Any:
        if self._save is None:  # type: ignore[attr-defined]
            raise ConfigurationError("this reservation was not made by a ledger; use Ledger.checkpoint")
        return self._save(self, name, data)  # type: ignore[attr-defined]

    def __eq__(self, other: object) -> bool:
        """Return True if both are the same attempt at the same row."""
        if not isinstance(other, Reservation):
            return NotImplemented
        return (self.row, self.generation, self.owner) == (other.row, other.generation, other.owner)

    def __hash__(self) -> int:
        """Hash the attempt."""
        return hash((self.row, self.generation, self.owner))

    def __repr__(self) -> str:
        """Return the generation, owner and route; never the key or principal."""
        return f"{type(self).__name__}(generation={self.generation}, owner={self.owner!r}, route={self.route!r})"


(
    _put_save,
    _put_settable,
    _put_fingerprint,
    _put_generation,
    _put_identity,
    _put_last_checkpoint,
    _put_lease,
    _put_owner,
    _put_route,
) = slot_setters(Reservation)


class AsyncReservation(Reservation):
    """A `Reservation` made by an `AsyncLedger`: `checkpoint` is awaited."""

    __slots__ = ()

    def checkpoint(self, name: str, data: object = None) -> Awaitable[None]:  # type: ignore[override]
        """Save how far the work got, for the attempt that takes over after a crash, and extend the lease; await it.

        A row keeps its latest checkpoint only; the next attempt reads it as `last_checkpoint`.

        Args:
            name: name of the step that is done.
            data: a JSON value of at most 4096 bytes.

        Raises:
            ConfigurationError, TypeError, ValueError: the data is too large or not JSON; nothing was sent.
            FencedOut: another attempt owns the row, or the row is gone or finished; nothing was changed.
            LedgerUnavailable: the checkpoint may or may not have been saved.
        """
        return cast(Awaitable[None], self._save_checkpoint(name, data))


class Unprotected(Reservation):
    """Stands for the reservation of a view that runs unprotected, so that its code still works. It is falsy.

    `downstream_key` returns the same keys as ever where principal and key are known. Nothing is held, and
    `ensure_held`, `checkpoint` and `outcome` do nothing.
    """

    __slots__ = ("_find", "_identity")

    def __init__(
        self,
        find: Callable[[], Identity],
        route: str = "",
        settable: dict[str, object] | None = None,
        fingerprint: str = "",
    ) -> None:
        """Make one whose identity is found when it is first asked for; `fingerprint` is "" if it is not known."""
        put = object.__setattr__
        put(self, "_find", find)
        put(self, "_identity", None)
        put(self, "fingerprint", fingerprint)
        put(self, "generation", 0)
        put(self, "owner", "")
        put(self, "last_checkpoint", None)
        put(self, "lease", Lease(0.0, time.monotonic()))
        put(self, "route", route)
        put(self, "_save", None)
        put(self, "_settable", {"outcome": None} if settable is None else settable)
        self.lease.end()

    @property
    def identity(self) -> Identity:
        """The row's name and the parts it consists of."""
        identity: Identity | None = self._identity  # type: ignore[attr-defined]
        if identity is None:
            identity = self._find()  # type: ignore[attr-defined]
            object.__setattr__(self, "_identity", identity)
        return identity

    @property
    def held(self) -> bool:
        """False."""
        return False

    def __bool__(self) -> bool:
        """Return False."""
        return False

    def ensure_held(self) -> None:
        """Do nothing: the application has chosen to run without protection."""

    def _save_checkpoint(self, name: str, data: object) -> None:
        """Save nothing."""

    def __repr__(self) -> str:
        """Return the route; never the key or principal."""
        return f"{type(self).__name__}(route={self.route!r})"


class AsyncUnprotected(Unprotected, AsyncReservation):
    """An `Unprotected` for views on an event loop: `checkpoint` is awaited, and does nothing."""

    __slots__ = ()

    def _save_checkpoint(self, name: str, data: object) -> Any:
        """Save nothing."""
        return NOTHING if self._save is None else self._save(self, name, data)  # type: ignore[attr-defined]


class _Nothing:
    """Can be awaited, and need not be."""

    def __await__(self) -> Iterator[None]:
        return iter(())


NOTHING = _Nothing()
"""What a stand-in's `checkpoint` returns on an event loop."""


def observed(r: Reservation) -> Unprotected:
    """Return what a view that is only observed sees of its claim; its `outcome` decides what is recorded."""
    kind = AsyncUnprotected if isinstance(r, AsyncReservation) else Unprotected
    return kind(lambda: r.identity, r.route, r._settable)  # type: ignore[attr-defined]


def save_through(r: Reservation, save: Callable[[Reservation, str, object], Any]) -> None:
    """Have `checkpoint` call `save`: a view may run in a thread beside the event loop of its ledger."""
    object.__setattr__(r, "_save", save)


def freeze(r: Reservation) -> None:
    """Make setting an attribute that `allow` made settable an error, since what it decides has been decided."""
    _put_settable(r, MappingProxyType(r._settable))  # type: ignore[attr-defined]


def allow(r: Reservation, *names: Literal["result", "response", "outcome"]) -> None:
    """Make these attributes of a reservation settable; each is None at first."""
    _put_settable(r, dict.fromkeys(names))


def chosen_outcome(r: Reservation) -> Choice | None:
    """Return `outcome`, which `allow` has made settable; without the detour that a missing attribute takes."""
    outcome: Choice | None = r._settable["outcome"]  # type: ignore[attr-defined]
    return outcome
