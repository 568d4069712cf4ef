"""A model of a row as a pure function: the scripts in Python, without Redis, with time as an argument.

The model stores the time of the last transition and derives the TTL from it; Redis does the reverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

__all__ = ["LOOKS", "VANISH", "Broken", "Reply", "Row", "fields", "transition", "ttl"]

Reply: TypeAlias = tuple[bytes | int, ...]

VANISH = "vanish"
"""Not a script: the row was deleted, or lost in a failover."""


LOOKS = {b"in_progress", b"stale", b"reused", b"replay", b"corrupt", b"lost", b"fenced", b"row", b"none"}
"""Replies of scripts that changed nothing."""


class Broken(NamedTuple):
    """An edit of a field, where None removes it; `why` is the scripts' reason for calling the row corrupt."""

    field: bytes
    value: bytes | None
    why: bytes


class Row(NamedTuple):
    """A row; all times are in ms.

    Attributes:
        since: time of the last transition; it is in the future if the clock stepped back.
        answer: the stored response: (status, headers, body, omitted).
        checkpoint: (name, data, sequence).
        lasting: True if the TTL was removed.
        broken: an edit of another field; the row's owner makes no calls while there is one.
    """

    status: str
    generation: int
    owner: bytes
    fingerprint: bytes
    lease: int
    retention: int
    since: int
    created_at: bytes
    route: bytes
    answer: tuple[bytes, bytes, bytes, bytes] | None = None
    checkpoint: tuple[bytes, bytes, int] | None = None
    lasting: bool = False
    broken: Broken | None = None


def ttl(row: Row | None, now: int) -> int:
    """Return the reply to PTTL: -2 if there is no row, -1 if it has no TTL."""
    if row is None:
        return -2
    return -1 if row.lasting else row.since + row.retention - now


def transition(row: Row | None, script: str, args: Sequence[object], now: int) -> tuple[Row | None, Reply]:
    """Return the row after the script, and the script's reply."""
    words = tuple(arg if isinstance(arg, bytes) else str(arg).encode() for arg in args)
    if row is not None and not row.lasting and ttl(row, now) <= 0:
        row = None
    match script:
        case "claim":
            return _claim(row, *words, now=now)
        case "takeover":
            return _takeover(row, *words, now=now)
        case "complete" | "fail":
            return _finish(row, {"complete": "completed", "fail": "failed"}[script], words, now)
        case "renew" | "release" | "checkpoint":
            return _held(row, script, words, now)
        case "read":
            return row, _read(row, *words, now=now)
        case _:
            assert script == VANISH
            return None, (b"1" if row else b"0",)


def fields(row: Row | None) -> dict[bytes, bytes]:
    """Return the row's fields, as HGETALL does."""
    if row is None:
        return {}
    shown = {
        b"status": row.status.encode(),
        b"generation": b"%d" % row.generation,
        b"owner": row.owner,
        b"fingerprint": row.fingerprint,
        b"lease": b"%d" % row.lease,
        b"retention": b"%d" % row.retention,
        b"created_at": row.created_at,
    }
    if row.route:
        shown[b"route"] = row.route
    if row.answer is not None:
        names = (b"response_status", b"response_headers", b"response_body", b"response_omitted")
        shown |= {name: part for name, part in zip(names, row.answer, strict=True) if part or name != names[3]}
    if row.checkpoint is not None:
        name, data, sequence = row.checkpoint
        shown |= {b"checkpoint": name, b"checkpoint_data": data, b"checkpoint_seq": b"%d" % sequence}
    if row.broken is not None:
        shown.pop(row.broken.field)
        shown |= {row.broken.field: row.broken.value} if row.broken.value is not None else {}
    return shown


def _claim(
    row: Row | None,
    owner: bytes,
    fingerprint: bytes,
    lease: bytes,
    retention: bytes,
    created_at: bytes,
    route: bytes,
    *,
    now: int,
) -> tuple[Row | None, Reply]:
    if row is None:
        new = Row("pending", 1, owner, fingerprint, int(lease), int(retention), now, created_at, route)
        return new, (b"claimed", owner, b"1")
    if why := _fault(row):
        return row, (b"corrupt", owner, why)
    if row.fingerprint != fingerprint:
        return row, (b"reused", owner)
    if row.answer is not None:
        *response, omitted = row.answer
        unusual = (omitted, row.status.encode()) if omitted or row.status == "failed" else ()
        return row, (b"replay", owner, b"%d" % row.generation, *response, *unusual)
    if row.owner == owner:
        again = _restarted(row, now, retention)._replace(lease=int(lease))
        return again, _with_checkpoint(b"claimed", owner, again)
    left = _lease_left(row, now)
    if left > 0:
        return row, (b"in_progress", owner, left)
    return row, _with_checkpoint(b"stale", owner, row, int(row.owner == b""))


def _takeover(
    row: Row | None, seen: bytes, owner: bytes, fingerprint: bytes, lease: bytes, retention: bytes, *, now: int
) -> tuple[Row | None, Reply]:
    if row is None or row.status != "pending" or _fault(row) or row.fingerprint != fingerprint:
        return row, (b"lost", owner)
    following = int(seen) + 1
    own = (row.generation, row.owner) == (following, owner)
    stale = row.generation == int(seen) and _lease_left(row, now) <= 0
    if not own and not stale:
        return row, (b"lost", owner)
    taken = _restarted(row, now, retention)._replace(generation=following, owner=owner, lease=int(lease))
    return taken, _with_checkpoint(b"claimed", owner, taken)


def _finish(row: Row | None, status: str, words: tuple[bytes, ...], now: int) -> tuple[Row | None, Reply]:
    generation, owner, retention, code, headers, body, omitted = words
    if row is None or (row.generation, row.owner) != (int(generation), owner):
        return row, (b"fenced", owner)
    if row.status not in ("pending", status):
        return row, (b"fenced", owner)
    done = _restarted(row, now, retention)
    if row.status == "pending":
        done = done._replace(status=status, answer=(code, headers, body, omitted))
    return done, (status.encode(), owner)


def _held(row: Row | None, script: str, words: tuple[bytes, ...], now: int) -> tuple[Row | None, Reply]:
    generation, owner, *rest = words
    if row is None or row.status != "pending" or row.generation != int(generation):
        return row, (b"fenced", owner)
    if script == "release" and row.owner in (owner, b""):
        return _restarted(row, now, rest[0])._replace(owner=b"", lease=0), (b"released", owner)
    if row.owner != owner:
        return row, (b"fenced", owner)
    lease, retention, *noted = rest
    kept = _restarted(row, now, retention)._replace(lease=int(lease))
    if script == "renew":
        return kept, (b"renewed", owner)
    name, data, sequence = noted
    if int(sequence) > (row.checkpoint[2] if row.checkpoint else 0):
        kept = kept._replace(checkpoint=(name, data, int(sequence)))
    return kept, (b"saved", owner)


def _read(row: Row | None, token: bytes, with_body: bytes, *, now: int) -> Reply:
    if row is None:
        return (b"none", token)
    if why := _fault(row):
        return (b"corrupt", token, ttl(row, now), why)
    shown = fields(row)
    if with_body == b"0" and row.answer is not None:
        body: bytes | int = len(row.answer[2])
    else:
        body = shown.get(b"response_body", b"")
    attempt = (b"status", b"generation", b"owner", b"fingerprint", b"lease", b"retention", b"created_at", b"route")
    progress = (b"response_omitted", b"checkpoint", b"checkpoint_data", b"checkpoint_seq")
    return (
        b"row",
        token,
        ttl(row, now),
        *(shown.get(name, b"") for name in attempt),
        shown.get(b"response_status", b""),
        shown.get(b"response_headers", b""),
        body,
        *(shown.get(name, b"") for name in progress),
    )


def _restarted(row: Row, now: int, retention: bytes) -> Row:
    """Return the row with its clock restarted; this also restores a TTL that was removed."""
    return row._replace(since=now, retention=int(retention), lasting=False)


def _lease_left(row: Row, now: int) -> int:
    return row.lease - max(now - row.since, 0)


def _fault(row: Row) -> bytes:
    """Return why the row is corrupt, or b""; a pending row without a TTL is, since its lease's age is unknown."""
    if row.broken is not None:
        return row.broken.why
    return b"it is pending and has no TTL" if row.lasting and row.status == "pending" else b""


def _with_checkpoint(word: bytes, token: bytes, row: Row, *facts: int) -> Reply:
    generation = b"%d" % row.generation
    if row.checkpoint is None:
        return word, token, generation, *facts
    name, data, sequence = row.checkpoint
    return word, token, generation, *facts, name, data, b"%d" % sequence
