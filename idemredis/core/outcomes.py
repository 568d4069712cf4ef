"""The outcomes of calls, as values; only adapters turn them into errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from ..errors import NotDurable
from .keys import Identity
from .reservation import Reservation
from .response import StoredResponse

__all__ = [
    "Done",
    "Fenced",
    "InProgress",
    "Lost",
    "Outcome",
    "Renewed",
    "Replay",
    "Reused",
    "Row",
    "Stale",
    "Survey",
    "SurveyedRow",
]


@dataclass(frozen=True, slots=True)
class Replay:
    """The operation is finished; return the stored response.

    Attributes:
        response: the stored response.
        generation: generation of the attempt that finished.
        failed: True if the attempt stored a final failure.
    """

    response: StoredResponse
    generation: int
    failed: bool


@dataclass(frozen=True, slots=True)
class InProgress:
    """Another attempt holds the row.

    Attributes:
        retry_after: seconds left on its lease.
        stale: True if the lease has ended and this call did not take the row over.
    """

    retry_after: float
    stale: bool = False


@dataclass(frozen=True, slots=True)
class Reused:
    """The key was claimed before with another fingerprint."""


class Stale(NamedTuple):
    """The lease of this generation has ended; a takeover of it may succeed.

    Attributes:
        generation: of the attempt before.
        released: True if that attempt gave the row up; False if it died, or if its lease ran out.
        refusal: why a takeover would not be durable, if too few replicas keep up; None otherwise.
    """

    generation: int
    released: bool = False
    refusal: NotDurable | None = None


class Lost(NamedTuple):
    """Another attempt took the row over first."""


class Fenced(NamedTuple):
    """The attempt does not own the row; nothing was changed."""


class Renewed(NamedTuple):
    """The lease now ends at `expires_at`, by the local monotonic clock."""

    expires_at: float


class Done(NamedTuple):
    """The row is completed, failed or released."""


class SurveyedRow(NamedTuple):
    """One row of a survey; times are in seconds.

    Attributes:
        position: which of the surveyed rows it is, from 0.
        state: `running`, `stale`, `released`, `completed`, `failed`, `corrupt`; `unread` if it must be read first.
        ttl: time until the row expires; None if it has no TTL.
        age: time since the last transition.
        lease_left: time left on the lease of a pending row; negative once it has ended.
        since_claim: time since the claim, by the clocks of its caller and of this host.
    """

    position: int
    state: str
    ttl: float | None
    age: float
    lease_left: float
    since_claim: float


class Survey(NamedTuple):
    """The state of many rows.

    Attributes:
        rows: how many rows were surveyed; the first ones of those asked for.
        completed, failed: how many of them are finished, without those in `others` as `unread`.
        lasting: how many finished ones have no TTL.
        recent: how many rows were claimed within the period asked for.
        oldest: seconds since the earliest claim; None if no row was readable.
        others: the rows that are not finished; also the finished ones if they were asked for.
    """

    rows: int
    completed: int
    failed: int
    lasting: int
    recent: int
    oldest: float | None
    others: list[SurveyedRow]


@dataclass(frozen=True, slots=True)
class Row:
    """A row as stored in Redis: its fields and its TTL, read in one step.

    Attributes:
        identity: the row's name and the parts it consists of.
        status: `pending`, `completed` or `failed`.
        generation, owner, fingerprint: of the attempt that owns or finished the row; `owner` is "" once released.
        lease: length of the lease in seconds, counted from the last transition; 0.0 once released.
        retention: seconds that the row lives after its last transition.
        ttl: seconds until the row expires; None for a finished row whose TTL somebody removed.
        created_at: seconds since the epoch by the first caller's clock; None if it cannot be read. Informational.
        route: the endpoint or function, "" if unknown. Informational.
        response: the stored response; None while the row is pending.
        body_bytes: length of the stored body.
        last_checkpoint: (name, data), or None.
        checkpoint_seq: number of the last checkpoint; 0 if there is none.
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
        """Seconds since the last transition, by the server's clock; 0.0 for a row without a TTL."""
        return 0.0 if self.ttl is None else max(self.retention - self.ttl, 0.0)

    @property
    def lease_left(self) -> float:
        """Seconds left on the lease of a pending row, negative once it has ended; 0.0 for a finished row."""
        return self.lease - self.age if self.status == "pending" else 0.0

    @property
    def stale(self) -> bool:
        """True if the row is pending and its lease has ended; the next claim takes it over."""
        return self.status == "pending" and self.lease_left <= 0


Outcome: TypeAlias = Reservation | Replay | InProgress | Reused
"""What `claim` returns."""
