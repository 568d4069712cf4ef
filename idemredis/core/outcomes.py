"""What a call to a row comes to, as values. No errors: those are raised by adapters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from .keys import Identity
from .reservation import Reservation
from .response import StoredResponse

__all__ = ["Done", "Fenced", "InProgress", "Lost", "Outcome", "Renewed", "Replay", "Reused", "Row", "Stale"]


@dataclass(frozen=True, slots=True)
class Replay:
    """The operation is finished: return the stored response."""

    response: StoredResponse
    generation: int
    failed: bool


@dataclass(frozen=True, slots=True)
class InProgress:
    """Another attempt holds the row.

    Attributes:
        retry_after: seconds left on its lease.
        stale: it has none left, and this caller did not (or could not) take it over.
    """

    retry_after: float
    stale: bool = False


@dataclass(frozen=True, slots=True)
class Reused:
    """The key was claimed for another fingerprint."""


class Stale(NamedTuple):
    """The lease of that generation ran out. Its checkpoint can be read."""

    generation: int


class Lost(NamedTuple):
    """Another attempt was faster to take the row over."""


class Fenced(NamedTuple):
    """The attempt does not own the row; nothing was changed."""


class Renewed(NamedTuple):
    """The lease now ends at `expires_at`, by the local monotonic clock."""

    expires_at: float


class Done(NamedTuple):
    """It is completed, failed or released."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row as it is in Redis: its fields and its TTL, read at once.

    Attributes:
        identity: the row's name and the parts it is made of.
        status: `pending`, `completed` or `failed`.
        generation, owner, fingerprint: of the attempt that owns it, or finished it; `owner` is "" once released.
        lease: seconds a pending row is held from its last transition; 0.0 once released.
        retention: seconds the row lives from its last transition.
        ttl: seconds until it expires; None where somebody removed the TTL of a finished row.
        created_at: seconds since the epoch, by the clock of whoever claimed it first; None where it cannot be read.
            For people: nothing decides by it.
        route: the endpoint or function; "" where unknown. For people.
        response: the stored response; None while the row is pending.
        body_bytes: length of the stored body.
        last_checkpoint: (name, data), or None.
        checkpoint_seq: its number; 0 without one.
    """

    identity: Identity = field(repr=False)
    status: str
    generation: int
    owner: str
    fingerprint: str
    lease: float
    retention: float
    ttl: float | None
    created_at: float | None
    route: str
    response: StoredResponse | None
    body_bytes: int
    last_checkpoint: tuple[str, Any] | None
    checkpoint_seq: int

    @property
    def age(self) -> float:
        """Seconds since the last transition, by the server's clock; 0.0 where the TTL does not tell."""
        return 0.0 if self.ttl is None else max(self.retention - self.ttl, 0.0)

    @property
    def lease_left(self) -> float:
        """Seconds left on the lease of a pending row, below 0 once it has run out; 0.0 for a finished row."""
        return self.lease - self.age if self.status == "pending" else 0.0

    @property
    def stale(self) -> bool:
        """Whether the row is pending and no attempt holds it: the next claim takes it over."""
        return self.status == "pending" and self.lease_left <= 0


Outcome: TypeAlias = Reservation | Replay | InProgress | Reused
"""What `claim` returns."""
