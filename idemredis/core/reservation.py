"""The right to run an operation, and what its attempt knows of its lease."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from ..errors import ConfigurationError, FencedOut, InvalidResponse
from .keys import Identity
from .response import StoredResponse

__all__ = ["CHOICES", "HEARTBEATS", "AsyncReservation", "Choice", "Lease", "Reservation", "allow"]

HEARTBEATS = 3
"""Renewals in one lease: one or two may be late, or lost, before it runs out."""

Choice: TypeAlias = Literal["store", "omit", "release", "hold"]
"""What a view may choose for its response."""

CHOICES = ("store", "omit", "release", "hold")


class Lease:
    """The attempt's view of its lease, as of Redis's last reply. Shared with the heartbeat that renews it.

    Attributes:
        duration: seconds.
        expires_at: when it runs out, by the local monotonic clock.
        ended: the attempt is over, or was fenced; nothing renews the lease any more.
        fenced: another attempt owns the row.
    """

    __slots__ = ("_numbers", "_on_end", "duration", "ended", "expires_at", "fenced")

    def __init__(self, duration: float, sent: float, last_number: int = 0) -> None:
        """Begin a lease that Redis gave in reply to a call sent at `sent`."""
        self.duration = duration
        self.expires_at = sent + duration
        self.ended = False
        self.fenced = False
        self._numbers = count(last_number + 1)
        self._on_end: Callable[[Lease], object] | None = None

    @property
    def first_heartbeat_at(self) -> float:
        """When a third of the lease is over, by the local monotonic clock."""
        return self.expires_at - self.duration + self.duration / HEARTBEATS

    def next_checkpoint(self) -> int:
        """Return the number of the attempt's next checkpoint."""
        return next(self._numbers)

    def when_ended(self, on_end: Callable[[Lease], object]) -> None:
        """Have `on_end` called when the lease ends."""
        self._on_end = on_end

    def end(self) -> None:
        """Note that the attempt is over."""
        self.ended = True
        if self._on_end is not None:
            self._on_end(self)


def _any_value(value: object) -> object:
    return value


def _stored_response(value: object) -> object:
    if value is None or isinstance(value, StoredResponse):
        return value
    raise InvalidResponse(f"response must be a StoredResponse, not {type(value).__name__}; or set `result`")


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
    """The right to run the operation: this attempt owns the row at this generation.

    `claim` returns it, `reserve` yields it, and `current_reservation` stands for it. Within `reserve` and `once` it has
    `result` and `response` too, within a protected view `outcome`; no other attribute can be set.
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
        """Make what a script's reply says; `save` is the ledger's way to note a checkpoint."""
        put = object.__setattr__
        put(self, "identity", identity)
        put(self, "fingerprint", fingerprint)
        put(self, "generation", generation)
        put(self, "owner", owner)
        put(self, "last_checkpoint", last_checkpoint)
        put(self, "lease", lease)
        put(self, "route", route)
        put(self, "_save", save)
        put(self, "_settable", None)

    if TYPE_CHECKING:
        result: object
        """A JSON value to store; `None` (JSON `null`) where nothing is set."""
        response: StoredResponse | None
        """A `StoredResponse` to store instead of `result`."""
        outcome: Choice | None
        """What becomes of this one response; None: by the settings.

        "store" it, "omit" all but its status (for secrets shown once), "release" the key so that a retry runs again, or
        "hold" the row until the lease ends.
        """

        @property
        def identity(self) -> Identity:
            """The row's name, and the parts that it is made of."""

        @property
        def fingerprint(self) -> str:
            """Digest of what was asked."""

        @property
        def generation(self) -> int:
            """The fencing token: 1 at the claim, one more at each takeover."""

        @property
        def owner(self) -> str:
            """The attempt's random token, 16 hex digits."""

        @property
        def last_checkpoint(self) -> tuple[str, Any] | None:
            """(name, data) of the checkpoint that an earlier attempt saved last, or None."""

        @property
        def lease(self) -> Lease:
            """The attempt's view of its lease."""

        @property
        def route(self) -> str:
            """Which endpoint or function it runs, for people and metrics; "" where unknown."""

    else:
        __slots__ = (
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
        """The third part of the row's identity; "" for none."""
        return self.identity.operation

    @property
    def key(self) -> str:
        """What the client sent."""
        return self.identity.key

    @property
    def row(self) -> str:
        """The row's name in Redis."""
        return self.identity.row

    @property
    def taken_over(self) -> bool:
        """True when an earlier attempt ran, or began to run, and may have changed something elsewhere."""
        return self.generation > 1

    @property
    def held(self) -> bool:
        """True while this attempt is not fenced and its last acknowledged lease has not run out, by the local clock."""
        return not self.lease.ended and time.monotonic() < self.lease.expires_at

    def ensure_held(self) -> None:
        """Do nothing while `held`; call it just before a step that cannot be undone.

        It only looks at what is known here. What it cannot see is guarded by the downstream key and the generation.

        Raises:
            FencedOut: the lease ran out, or another attempt owns the row.
        """
        if not self.held:
            raise FencedOut("this attempt no longer holds its row: its lease ran out or was taken over; stop here")

    def downstream_key(self, name: str) -> str:
        """Return a key for the next service downstream: 64 hex digits, the same for every attempt of this operation.

        It differs by `name`, namespace, principal, operation and key, and reveals none of them.
        """
        return hashlib.sha256(f"{self.identity.row}\n{name}".encode()).hexdigest()

    def checkpoint(self, name: str, data: object = None) -> None:
        """Save how far the work got, for whoever takes over, and extend the lease.

        Args:
            name: of the step that is done.
            data: JSON, at most 4096 bytes of it.

        Raises:
            ConfigurationError, TypeError, ValueError: the data does not fit, or is not JSON; nothing was sent.
            FencedOut: another attempt owns the row; nothing was changed.
            LedgerUnavailable: it may or may not have been saved.
        """
        self._saved(name, data)

    def _saved(self, name: str, data: object) -> Any:
        if self._save is None:  # type: ignore[attr-defined]
            raise ConfigurationError("this reservation was not made by a ledger; use Ledger.checkpoint")
        return self._save(self, name, data)  # type: ignore[attr-defined]

    def __eq__(self, other: object) -> bool:
        """Whether both are the same attempt at the same row."""
        if not isinstance(other, Reservation):
            return NotImplemented
        return (self.row, self.generation, self.owner) == (other.row, other.generation, other.owner)

    def __hash__(self) -> int:
        """Hash the attempt."""
        return hash((self.row, self.generation, self.owner))

    def __repr__(self) -> str:
        """Show no key and no principal."""
        return f"{type(self).__name__}(generation={self.generation}, owner={self.owner!r}, route={self.route!r})"


class AsyncReservation(Reservation):
    """A `Reservation` made by an `AsyncLedger`: `checkpoint` is awaited."""

    __slots__ = ()

    def checkpoint(self, name: str, data: object = None) -> Awaitable[None]:  # type: ignore[override]
        """Save how far the work got, for whoever takes over, and extend the lease. Await it.

        Args:
            name: of the step that is done.
            data: JSON, at most 4096 bytes of it.

        Raises:
            ConfigurationError, TypeError, ValueError: the data does not fit, or is not JSON; nothing was sent.
            FencedOut: another attempt owns the row; nothing was changed.
            LedgerUnavailable: it may or may not have been saved.
        """
        return cast(Awaitable[None], self._saved(name, data))


def allow(r: Reservation, *names: Literal["result", "response", "outcome"]) -> None:
    """Let these attributes of a reservation be set from now on; each is None at first."""
    object.__setattr__(r, "_settable", dict.fromkeys(names))
