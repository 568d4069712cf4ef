"""One pure function a script: arguments in, a `Call` out, whose `decode` reads the raw reply as an outcome.

Seconds become milliseconds here and nowhere else.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Generic, NamedTuple, TypeVar

from .errors import CorruptRow, FencedOut, LedgerUnavailable, NotDurable
from .keys import Identity
from .responses import StoredResponse

__all__ = [
    "BEATS",
    "Call",
    "Done",
    "Fenced",
    "Hold",
    "InProgress",
    "Lost",
    "Renewed",
    "Replay",
    "Reservation",
    "Reused",
    "Row",
    "Stale",
    "acknowledged",
    "checkpoint",
    "claim",
    "complete",
    "fail",
    "milliseconds",
    "read",
    "release",
    "renew",
    "takeover",
]

T = TypeVar("T")

LONGEST_NUMBER = 15
"""Digits that the scripts, and JSON readers, hold exactly."""

BEATS = 3
"""Renewals a lease: one or two may be late, or lost, before it runs out."""

Reply = Sequence[Any]  # what Redis answered: a word, the call's token, then bytes and integers

_reads = count(1)  # numbers the reads of this process


class Call(NamedTuple, Generic[T]):
    """One script to run on one row. Its reply repeats `token`, so a reply to another call is noticed."""

    script: str
    row: str
    token: str
    args: tuple[str | bytes | int, ...]
    decode: Callable[[Reply, float], T]
    durable: bool = False  # it counts only once `min_replicas` have it

    def outcome(self, reply: Reply, sent: float) -> T:
        """Read the reply to this call, which was sent at `sent` by the local monotonic clock.

        Raises:
            CorruptRow: the row is not one of ours.
            LedgerUnavailable: the reply belongs to another call.
        """
        if reply[1] != self.token.encode():
            raise LedgerUnavailable(
                f"the reply to {self.script} belongs to another call; the connection is out of step"
            )
        return self.decode(reply, sent)


class Hold:
    """What a reservation's attempt knows of its lease, from when it last heard. Shared with its heartbeat."""

    __slots__ = ("ended", "fenced", "kept", "lease", "sequence", "until")

    def __init__(self, lease: float, sent: float, noted: int) -> None:
        self.lease = lease
        self.until = sent + lease
        self.ended = False
        self.fenced = False
        self.sequence = count(noted + 1)
        self.kept: dict[Hold, Any] | None = None

    def beats_at(self) -> float:
        """When the first renewal is due, by the local monotonic clock: when a third of the lease is over."""
        return self.until - self.lease + self.lease / BEATS

    def end(self) -> None:
        """Know that the attempt is over, and leave those that wait for their first beat."""
        self.ended = True
        if self.kept is not None:
            self.kept.pop(self, None)


@dataclass(frozen=True, slots=True)
class Reservation:
    """The right to run the operation: this attempt owns the row at this generation.

    Attributes:
        identity: the row's name and the parts it is made of.
        fingerprint: digest of what was asked.
        generation: the fencing token: 1 at the claim, one more at each takeover.
        owner: the attempt's token.
        checkpoint: (name, data) of the last checkpoint that an attempt saved, or None.
        route: which endpoint or function it runs, for people and metrics; "" where unknown.
    """

    identity: Identity = field(repr=False)
    fingerprint: str
    generation: int
    owner: str
    checkpoint: tuple[str, Any] | None = field(hash=False)
    hold: Hold = field(repr=False, compare=False)
    route: str = field(default="", compare=False)

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
    def taken_over(self) -> bool:
        """True when an earlier attempt ran, or began to run, and may have changed something elsewhere."""
        return self.generation > 1

    @property
    def held(self) -> bool:
        """True while this attempt is not fenced and its last acknowledged lease has not run out, by the local clock."""
        return not self.hold.ended and time.monotonic() < self.hold.until

    def ensure_held(self) -> None:
        """Do nothing while `held`; call it just before a step that cannot be undone.

        Raises:
            FencedOut: the lease ran out, or another attempt owns the row. It is a look at what is known here: the
                downstream key and the generation guard what a look cannot.
        """
        if not self.held:
            raise FencedOut("this attempt no longer holds its row: its lease ran out or was taken over; do not go on")

    def downstream_key(self, name: str) -> str:
        """Return a key for the next service downstream: 64 hex digits, the same for every attempt of this operation.

        It differs by `name`, namespace, principal, operation and key, and reveals none of them.
        """
        return hashlib.sha256(f"{self.identity.row}\n{name}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Replay:
    """The operation is finished: give the stored answer."""

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
    """The lease now ends at `until`, by the local monotonic clock."""

    until: float


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


def claim(
    identity: Identity, owner: str, fingerprint: str, lease: float, retention: float, created_at: float, route: str
) -> Call[Reservation | Replay | InProgress | Stale | Reused]:
    def decode(reply: Reply, sent: float) -> Reservation | Replay | InProgress | Stale | Reused:
        match reply[0]:
            case b"claimed":
                return _reservation(identity, owner, fingerprint, lease, route, reply, sent)
            case b"replay":
                _, _, status, generation, *response = reply
                return Replay(StoredResponse.decode(*response), int(generation), status == b"failed")
            case b"in_progress":
                return InProgress(int(reply[2]) / 1000)
            case b"stale":
                _checkpoint(reply[3:])  # one that cannot be read is found before the takeover, not after it
                return Stale(int(reply[2]))
            case b"reused":
                return Reused()
            case _:
                raise CorruptRow(reply[2].decode())

    times = (milliseconds(lease), milliseconds(retention), milliseconds(created_at))
    return Call("claim", identity.row, owner, (owner, fingerprint, *times, route), decode, durable=True)


def takeover(
    identity: Identity, generation: int, owner: str, fingerprint: str, lease: float, retention: float, route: str
) -> Call[Reservation | Lost]:
    def decode(reply: Reply, sent: float) -> Reservation | Lost:
        if reply[0] == b"lost":
            return Lost()
        return _reservation(identity, owner, fingerprint, lease, route, reply, sent)

    args = (generation, owner, fingerprint, milliseconds(lease), milliseconds(retention))
    return Call("takeover", identity.row, owner, args, decode, durable=True)


def complete(r: Reservation, response: StoredResponse, retention: float) -> Call[Done | Fenced]:
    return _finish("complete", r, response, retention)


def fail(r: Reservation, response: StoredResponse, retention: float) -> Call[Done | Fenced]:
    return _finish("fail", r, response, retention)


def release(identity: Identity, generation: int, owner: str, retention: float) -> Call[Done | Fenced]:
    return Call("release", identity.row, owner, (generation, owner, milliseconds(retention)), _done)


def renew(r: Reservation, retention: float) -> Call[Renewed | Fenced]:
    lease = r.hold.lease
    args = (r.generation, r.owner, milliseconds(lease), milliseconds(retention))
    return Call("renew", r.identity.row, r.owner, args, _renewed(lease))


def checkpoint(r: Reservation, name: str, data: str, retention: float) -> Call[Renewed | Fenced]:
    lease = r.hold.lease
    args = (r.generation, r.owner, milliseconds(lease), milliseconds(retention), name, data, next(r.hold.sequence))
    return Call("checkpoint", r.identity.row, r.owner, args, _renewed(lease))


def read(identity: Identity, *, body: bool = True) -> Call[Row | None]:
    """Read the row; without its body, only the body's length is sent by the server."""

    def decode(reply: Reply, sent: float) -> Row | None:
        return None if reply[0] == b"none" else _row(identity, reply, body)

    token = str(next(_reads))
    return Call("read", identity.row, token, (token, int(body)), decode)


def acknowledged(outcome: T, replicas: int, required: int) -> T:
    """Return the outcome, unless it wrote and fewer replicas than required have the write.

    Raises:
        NotDurable: the write was made here, and may be lost in a failover.
    """
    if isinstance(outcome, (Reservation, Done)) and replicas < required:
        raise NotDurable(
            f"{replicas} of the {required} replicas required acknowledged in time",
            acknowledged=replicas,
            required=required,
        )
    return outcome


def milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _finish(script: str, r: Reservation, response: StoredResponse, retention: float) -> Call[Done | Fenced]:
    args = (r.generation, r.owner, milliseconds(retention), *response.encode())
    return Call(script, r.identity.row, r.owner, args, _done, durable=True)


def _reservation(
    identity: Identity, owner: str, fingerprint: str, lease: float, route: str, reply: Reply, sent: float
) -> Reservation:
    last, noted = _checkpoint(reply[3:])
    return Reservation(identity, fingerprint, int(reply[2]), owner, last, Hold(lease, sent, noted), route)


def _done(reply: Reply, sent: float) -> Done | Fenced:
    return Fenced() if reply[0] == b"fenced" else Done()


def _renewed(lease: float) -> Callable[[Reply, float], Renewed | Fenced]:
    return lambda reply, sent: Fenced() if reply[0] == b"fenced" else Renewed(sent + lease)


def _row(identity: Identity, reply: Reply, body: bool) -> Row:
    word, _, pttl, *fields = reply
    ttl = None if pttl < 0 else pttl / 1000
    if word == b"corrupt":
        raise CorruptRow(fields[0].decode(), ttl)
    status, generation, owner, fingerprint, lease, retention, created_at, route, *rest = fields
    try:
        response_status, response_headers, response_body, response_omitted, *noted = rest
        response, body_bytes = None, 0
        if response_status:
            body_bytes = len(response_body) if body else int(response_body)
            response = StoredResponse.decode(
                response_status, response_headers, response_body if body else b"", response_omitted
            )
        last, sequence = _checkpoint(noted if noted[2] else ())
    except CorruptRow as error:
        raise CorruptRow(error.why, ttl) from None
    return Row(
        identity,
        status.decode(),
        int(generation),
        _text(owner),
        _text(fingerprint),
        int(lease) / 1000,
        int(retention) / 1000,
        ttl,
        int(created_at) / 1000 if created_at.isdigit() and len(created_at) <= LONGEST_NUMBER else None,
        _text(route),
        response,
        body_bytes,
        last,
        sequence,
    )


def _checkpoint(fields: Sequence[bytes]) -> tuple[tuple[str, Any] | None, int]:
    """Return the checkpoint and its number; None and 0 where there are no fields."""
    if not fields:
        return None, 0
    name, data, sequence = fields
    try:
        return (name.decode(), json.loads(data)), int(sequence)
    except (ValueError, RecursionError) as error:
        raise CorruptRow(f"the checkpoint cannot be read: {error}") from None


def _text(value: bytes) -> str:
    """Return what another program may have written, for people to read."""
    return value.decode("utf-8", "backslashreplace")
