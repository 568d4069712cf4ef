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

from .errors import CorruptRow, FencedOut, NotDurable
from .keys import Identity
from .responses import StoredResponse

__all__ = [
    "BEATS",
    "Call",
    "Command",
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

BEATS = 3
"""Renewals a lease: one or two may be late, or lost, before it runs out."""

Reply = Sequence[Any]  # what Redis answered: a word, then bytes and integers


class Call(NamedTuple, Generic[T]):
    """One script to run on one row. `decode(reply, sent)` is told when it was sent, by the local monotonic clock."""

    script: str
    row: str
    args: tuple[str | bytes | int, ...]
    decode: Callable[[Reply, float], T]
    durable: bool = False  # it counts only once `min_replicas` have it


class Command(NamedTuple, Generic[T]):
    """One plain command that changes nothing."""

    words: tuple[str, ...]
    decode: Callable[[dict[bytes, bytes]], T]


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
    """

    identity: Identity = field(repr=False)
    fingerprint: str
    generation: int
    owner: str
    checkpoint: tuple[str, Any] | None = field(hash=False)
    hold: Hold = field(repr=False, compare=False)

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
    """The lease of that generation ran out."""

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
    """A row as it is in Redis; `response` is None while it is pending. Times are seconds since the epoch."""

    identity: Identity = field(repr=False)
    status: str
    generation: int
    owner: str
    fingerprint: str
    lease_until: float
    created_at: float
    updated_at: float
    response: StoredResponse | None
    checkpoint: tuple[str, Any] | None


def claim(
    identity: Identity, owner: str, fingerprint: str, lease: float, retention: float
) -> Call[Reservation | Replay | InProgress | Stale | Reused]:
    def decode(reply: Reply, sent: float) -> Reservation | Replay | InProgress | Stale | Reused:
        match reply[0]:
            case b"claimed":
                return _reservation(identity, owner, fingerprint, lease, reply, sent)
            case b"replay":
                _, status, generation, *answer = reply
                return Replay(StoredResponse.decode(*answer), int(generation), status == b"failed")
            case b"in_progress":
                return InProgress(int(reply[1]) / 1000)
            case b"stale":
                return Stale(int(reply[1]))
            case b"reused":
                return Reused()
            case _:
                raise CorruptRow(reply[1].decode())

    return Call(
        "claim", identity.row, (owner, fingerprint, milliseconds(lease), milliseconds(retention)), decode, durable=True
    )


def takeover(
    identity: Identity, generation: int, owner: str, fingerprint: str, lease: float, retention: float
) -> Call[Reservation | Lost]:
    def decode(reply: Reply, sent: float) -> Reservation | Lost:
        if reply[0] == b"lost":
            return Lost()
        return _reservation(identity, owner, fingerprint, lease, reply, sent)

    args = (generation, owner, fingerprint, milliseconds(lease), milliseconds(retention))
    return Call("takeover", identity.row, args, decode, durable=True)


def complete(r: Reservation, response: StoredResponse, retention: float) -> Call[Done | Fenced]:
    return _finish("complete", r, response, retention)


def fail(r: Reservation, response: StoredResponse, retention: float) -> Call[Done | Fenced]:
    return _finish("fail", r, response, retention)


def release(identity: Identity, generation: int, owner: str, retention: float) -> Call[Done | Fenced]:
    return Call("release", identity.row, (generation, owner, milliseconds(retention)), _done)


def renew(r: Reservation, retention: float) -> Call[Renewed | Fenced]:
    lease = r.hold.lease
    return Call(
        "renew", r.identity.row, (r.generation, r.owner, milliseconds(lease), milliseconds(retention)), _renewed(lease)
    )


def checkpoint(r: Reservation, name: str, data: str, retention: float) -> Call[Renewed | Fenced]:
    lease = r.hold.lease
    args = (r.generation, r.owner, milliseconds(lease), milliseconds(retention), name, data, next(r.hold.sequence))
    return Call("checkpoint", r.identity.row, args, _renewed(lease))


def read(identity: Identity) -> Command[Row | None]:
    def decode(fields: dict[bytes, bytes]) -> Row | None:
        return _row(identity, fields) if fields else None

    return Command(("HGETALL", identity.row), decode)


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
    return Call(script, r.identity.row, args, _done, durable=True)


def _reservation(
    identity: Identity, owner: str, fingerprint: str, lease: float, reply: Reply, sent: float
) -> Reservation:
    noted, last = 0, None
    if len(reply) > 2:
        last, noted = _checkpoint(*reply[2:5])
    return Reservation(identity, fingerprint, int(reply[1]), owner, last, Hold(lease, sent, noted))


def _done(reply: Reply, sent: float) -> Done | Fenced:
    return Fenced() if reply[0] == b"fenced" else Done()


def _renewed(lease: float) -> Callable[[Reply, float], Renewed | Fenced]:
    return lambda reply, sent: Fenced() if reply[0] == b"fenced" else Renewed(sent + lease)


def _row(identity: Identity, fields: dict[bytes, bytes]) -> Row:
    try:
        status = fields[b"status"].decode()
        if status not in ("pending", "completed", "failed"):
            raise CorruptRow("status is unknown")
        response, last = None, None
        if status != "pending":
            response = StoredResponse.decode(
                fields[b"response_status"],
                fields[b"response_headers"],
                fields[b"response_body"],
                fields.get(b"response_omitted", b""),
            )
        if b"checkpoint" in fields:
            last, _ = _checkpoint(fields[b"checkpoint"], fields[b"checkpoint_data"], fields[b"checkpoint_seq"])
        lease_until, created_at, updated_at = (
            int(fields[name]) / 1000 for name in (b"lease_until", b"created_at", b"updated_at")
        )
        return Row(
            identity,
            status,
            int(fields[b"generation"]),
            fields[b"owner"].decode(),
            fields[b"fingerprint"].decode(),
            lease_until,
            created_at,
            updated_at,
            response,
            last,
        )
    except KeyError as missing:
        raise CorruptRow(f"{missing.args[0].decode()} is missing") from None
    except ValueError as error:
        raise CorruptRow(str(error)) from None


def _checkpoint(name: bytes, data: bytes, sequence: bytes) -> tuple[tuple[str, Any], int]:
    try:
        return (name.decode(), json.loads(data)), int(sequence)
    except (ValueError, RecursionError) as error:
        raise CorruptRow(f"the checkpoint cannot be read: {error}") from None
