"""What a row does, as a pure function: the scripts again, in Python and without Redis. Time is an argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

__all__ = ["VANISH", "Reply", "Row", "fields", "transition"]

Reply: TypeAlias = tuple[bytes, ...]

VANISH = "vanish"
"""Not a script: the row expires, is deleted, or is lost in a failover."""


class Row(NamedTuple):
    """A row; `answer` is (status, headers, body, omitted), `checkpoint` is (name, data, sequence)."""

    status: str
    generation: int
    owner: bytes
    fingerprint: bytes
    lease_until: int
    created_at: int
    updated_at: int
    retention: int
    answer: tuple[bytes, bytes, bytes, bytes] | None = None
    checkpoint: tuple[bytes, bytes, int] | None = None


def transition(row: Row | None, script: str, args: Sequence[object], now: int) -> tuple[Row | None, Reply]:
    """Return the row as the script leaves it, and what the script answers."""
    words = tuple(arg if isinstance(arg, bytes) else str(arg).encode() for arg in args)
    match script:
        case "claim":
            return _claim(row, *words, now=now)
        case "takeover":
            return _takeover(row, *words, now=now)
        case "complete" | "fail":
            return _finish(row, {"complete": "completed", "fail": "failed"}[script], words, now)
        case "renew" | "release" | "checkpoint":
            return _held(row, script, words, now)
        case _:
            assert script == VANISH
            return None, (b"1" if row else b"0",)


def fields(row: Row | None) -> dict[bytes, bytes]:
    """Return the row as HGETALL shows it."""
    if row is None:
        return {}
    shown = {
        b"status": row.status.encode(),
        b"generation": b"%d" % row.generation,
        b"owner": row.owner,
        b"fingerprint": row.fingerprint,
        b"lease_until": b"%d" % row.lease_until,
        b"created_at": b"%d" % row.created_at,
        b"updated_at": b"%d" % row.updated_at,
    }
    if row.answer is not None:
        names = (b"response_status", b"response_headers", b"response_body", b"response_omitted")
        shown |= {name: part for name, part in zip(names, row.answer, strict=True) if part or name != names[3]}
    if row.checkpoint is not None:
        name, data, sequence = row.checkpoint
        shown |= {b"checkpoint": name, b"checkpoint_data": data, b"checkpoint_seq": b"%d" % sequence}
    return shown


def _claim(
    row: Row | None, owner: bytes, fingerprint: bytes, lease: bytes, retention: bytes, *, now: int
) -> tuple[Row | None, Reply]:
    if row is None:
        return Row("pending", 1, owner, fingerprint, now + int(lease), now, now, int(retention)), (b"claimed", b"1")
    if row.fingerprint != fingerprint:
        return row, (b"reused",)
    if row.answer is not None:
        return row, (b"replay", row.status.encode(), b"%d" % row.generation, *row.answer)
    if row.owner == owner:
        again = row._replace(lease_until=now + int(lease), updated_at=now, retention=int(retention))
        return again, _claimed(again)
    left = row.lease_until - now
    return row, (b"in_progress", b"%d" % left) if left > 0 else (b"stale", b"%d" % row.generation)


def _takeover(
    row: Row | None, seen: bytes, owner: bytes, fingerprint: bytes, lease: bytes, retention: bytes, *, now: int
) -> tuple[Row | None, Reply]:
    if row is None or row.status != "pending" or row.fingerprint != fingerprint:
        return row, (b"lost",)
    following = int(seen) + 1
    own = (row.generation, row.owner) == (following, owner)
    stale = row.generation == int(seen) and row.lease_until <= now
    if not own and not stale:
        return row, (b"lost",)
    taken = row._replace(
        generation=following, owner=owner, lease_until=now + int(lease), updated_at=now, retention=int(retention)
    )
    return taken, _claimed(taken)


def _finish(row: Row | None, status: str, words: Reply, now: int) -> tuple[Row | None, Reply]:
    generation, owner, retention, *answer = words
    done = (status.encode(),)
    if row is None or (row.generation, row.owner) != (int(generation), owner):
        return row, (b"fenced",)
    if row.status == status:
        return row._replace(retention=int(retention)), done
    if row.status != "pending":
        return row, (b"fenced",)
    code, headers, body, omitted = answer
    stored = (code, headers, body, omitted)
    return row._replace(status=status, answer=stored, updated_at=now, retention=int(retention)), done


def _held(row: Row | None, script: str, words: Reply, now: int) -> tuple[Row | None, Reply]:
    generation, owner, *rest = words
    if row is None or row.status != "pending" or row.generation != int(generation):
        return row, (b"fenced",)
    if script == "release" and row.owner == b"":
        return row._replace(retention=int(rest[0])), (b"released",)
    if row.owner != owner:
        return row, (b"fenced",)
    if script == "release":
        return row._replace(owner=b"", lease_until=now, updated_at=now, retention=int(rest[0])), (b"released",)
    lease, retention, *noted = rest
    kept = row._replace(lease_until=now + int(lease), updated_at=now, retention=int(retention))
    if script == "renew":
        return kept, (b"renewed", lease)
    name, data, sequence = noted
    if int(sequence) > (row.checkpoint[2] if row.checkpoint else 0):
        kept = kept._replace(checkpoint=(name, data, int(sequence)))
    return kept, (b"saved",)


def _claimed(row: Row) -> Reply:
    generation = b"%d" % row.generation
    if row.checkpoint is None:
        return b"claimed", generation
    name, data, sequence = row.checkpoint
    return b"claimed", generation, name, data, b"%d" % sequence
