"""One pure function for each script: it makes a `Call`, whose `decode` turns the raw reply into an outcome.

Only this module converts between seconds and milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any, Generic, TypeAlias, TypeVar

from ..errors import CorruptRow, LedgerUnavailable, NotDurable
from .keys import Identity
from .outcomes import Done, Fenced, InProgress, Lost, Renewed, Replay, Reused, Row, Stale, Survey, SurveyedRow
from .reservation import Lease, Reservation
from .response import StoredResponse

__all__ = [
    "Call",
    "MakeReservation",
    "acknowledged",
    "checkpoint",
    "claim",
    "complete",
    "fail",
    "milliseconds",
    "read",
    "release",
    "renew",
    "survey",
    "surveyed",
    "takeover",
]

T = TypeVar("T")

MAX_DIGITS = 15
"""Digits of an integer that a double, and so Lua and JSON, represents exactly."""

PERIODS = 64
"""Leases and retentions in milliseconds that are kept as text."""

MakeReservation: TypeAlias = Callable[..., Reservation]
"""Called with the arguments of `Reservation`; a ledger adds its `save`."""

Reply = Sequence[Any]  # a word, the call's token, then bytes and integers

_reads = count(1)  # tokens of this process's reads, which have no owner


@dataclass(slots=True)
class Call(Generic[T]):
    """One script to run on one row.

    Attributes:
        script: its name.
        row: the row's name.
        token: what the reply repeats, so that the reply to another call is detected.
        args: its arguments.
        decode: turns the reply into the outcome. Its second argument is when the call was sent, by the local monotonic
            clock. It raises `CorruptRow` for a row that was not written by this ledger, or was edited.
        durable: it takes effect only once `min_replicas` replicas have it.
    """

    script: str
    row: str
    token: str
    args: tuple[str | bytes | int, ...]
    decode: Callable[[Reply, float], T]
    durable: bool = False


def claim(
    identity: Identity,
    owner: str,
    fingerprint: str,
    lease: float,
    retention: float,
    created_at: float,
    route: str,
    make: MakeReservation = Reservation,
) -> Call[Reservation | Replay | InProgress | Stale | Reused]:
    def decode(reply: Reply, sent: float) -> Reservation | Replay | InProgress | Stale | Reused:
        match reply[0]:
            case b"claimed":
                return _reservation(make, identity, owner, fingerprint, lease, route, reply, sent)
            case b"replay":
                _, _, generation, code, headers, body, *unusual = reply
                omitted, status = unusual or (b"", b"completed")
                return Replay(StoredResponse.decode(code, headers, body, omitted), int(generation), status == b"failed")
            case b"in_progress":
                return InProgress(int(reply[2]) / 1000)
            case b"stale":
                _checkpoint(reply[4:])  # raise for a corrupt checkpoint before the takeover, not after it
                return Stale(int(reply[2]), bool(reply[3]))
            case b"reused":
                return Reused()
            case _:
                raise CorruptRow(reply[2].decode())

    args = (owner, fingerprint, _period(lease), _period(retention), milliseconds(created_at), route)
    return Call("claim", identity.row, owner, args, decode, True)


def takeover(
    identity: Identity,
    generation: int,
    owner: str,
    fingerprint: str,
    lease: float,
    retention: float,
    route: str,
    make: MakeReservation = Reservation,
) -> Call[Reservation | Lost]:
    def decode(reply: Reply, sent: float) -> Reservation | Lost:
        if reply[0] == b"lost":
            return Lost()
        return _reservation(make, identity, owner, fingerprint, lease, route, reply, sent)

    args = (generation, owner, fingerprint, _period(lease), _period(retention))
    return Call("takeover", identity.row, owner, args, decode, True)


def complete(r: Reservation, response: StoredResponse, retention: float) -> Call[Done | Fenced]:
    return _finish("complete", r, response, retention)


def fail(r: Reservation, response: StoredResponse, retention: float) -> Call[Done | Fenced]:
    return _finish("fail", r, response, retention)


def release(identity: Identity, generation: int, owner: str, retention: float) -> Call[Done | Fenced]:
    return Call("release", identity.row, owner, (generation, owner, _period(retention)), _done)


def renew(r: Reservation, retention: float) -> Call[Renewed | Fenced]:
    lease = r.lease.duration
    args = (r.generation, r.owner, _period(lease), _period(retention))
    return Call("renew", r.identity.row, r.owner, args, _renewed(lease))


def checkpoint(r: Reservation, name: str, data: str, retention: float) -> Call[Renewed | Fenced]:
    lease = r.lease.duration
    args = (r.generation, r.owner, _period(lease), _period(retention), name, data, r.lease.next_checkpoint())
    return Call("checkpoint", r.identity.row, r.owner, args, _renewed(lease))


def read(identity: Identity, *, body: bool = True) -> Call[Row | None]:
    """Read the row; with `body=False` the server sends the body's length in place of the body."""

    def decode(reply: Reply, sent: float) -> Row | None:
        return None if reply[0] == b"none" else _row(identity, reply, body)

    token = str(next(_reads))
    return Call("read", identity.row, token, (token, int(body)), decode)


def survey(token: str, now: float, period: float, finished: bool, max_bytes: int) -> tuple[str | int, ...]:
    """Return the arguments of `survey`, the one script that takes many rows; `surveyed` reads its reply.

    Args:
        token: which call it is; repeated in the reply.
        now: seconds since the epoch.
        period: rows that were claimed within these seconds count as recent.
        finished: return the finished rows too.
        max_bytes: end the survey after the row with which the bodies exceed this.
    """
    return token, milliseconds(now), milliseconds(period), int(finished), max_bytes


def surveyed(token: str, reply: Reply) -> Survey:
    """Return the survey in a reply.

    Raises:
        LedgerUnavailable: the reply belongs to another call.
    """
    if reply[1] != token.encode():
        raise LedgerUnavailable("the reply to survey belongs to another call; the connection is out of sync")
    _, _, rows, completed, failed, lasting, recent, oldest, *others = reply
    each = iter(others)
    found = [
        SurveyedRow(at - 1, state.decode(), None if ttl < 0 else ttl / 1000, age / 1000, left / 1000, claimed / 1000)
        for at, state, ttl, age, left, claimed in zip(*[each] * 6, strict=True)
    ]
    return Survey(rows, completed, failed, lasting, recent, None if oldest < 0 else oldest / 1000, found)


def acknowledged(outcome: T, replicas: int, required: int) -> T:
    """Return the outcome if enough replicas acknowledged its write, or if it changed nothing.

    Raises:
        NotDurable: fewer than `required` replicas did; a failover can lose the write.
    """
    if replicas >= required or not isinstance(outcome, (Reservation, Done, Stale)):
        return outcome
    refusal = NotDurable(
        f"{replicas} of {required} required replicas acknowledged in time; check them, or lower min_replicas",
        acknowledged=replicas,
        required=required,
    )
    if isinstance(outcome, Stale):
        return outcome._replace(refusal=refusal)
    raise refusal


def milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


@lru_cache(PERIODS)
def _period(seconds: float) -> str:
    """Return a lease or retention as the scripts read it; a service has few."""
    return str(milliseconds(seconds))


def _finish(script: str, r: Reservation, response: StoredResponse, retention: float) -> Call[Done | Fenced]:
    args = (r.generation, r.owner, _period(retention), *response.encode())
    return Call(script, r.identity.row, r.owner, args, _done, True)


def _reservation(
    make: MakeReservation,
    identity: Identity,
    owner: str,
    fingerprint: str,
    lease: float,
    route: str,
    reply: Reply,
    sent: float,
) -> Reservation:
    last, number = _checkpoint(reply[3:])
    return make(identity, fingerprint, int(reply[2]), owner, last, Lease(lease, sent, number), route)


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
        int(created_at) / 1000 if created_at.isdigit() and len(created_at) <= MAX_DIGITS else None,
        _text(route),
        response,
        body_bytes,
        last,
        sequence,
    )


def _checkpoint(fields: Sequence[bytes]) -> tuple[tuple[str, Any] | None, int]:
    """Return the checkpoint and its number, or (None, 0) if there is none."""
    if not fields:
        return None, 0
    name, data, sequence = fields
    try:
        return (name.decode(), json.loads(data)), int(sequence)
    except (ValueError, RecursionError) as error:
        raise CorruptRow(f"the checkpoint cannot be read: {error}") from None


def _text(value: bytes) -> str:
    """Decode text leniently, since another program may have written it."""
    return value.decode("utf-8", "backslashreplace")
