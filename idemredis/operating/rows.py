"""What is in the ledger: rows found by SCAN, and what they add up to. Nothing here changes anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, TypeAlias

from .. import clients
from ..clients import Client
from ..cluster import routed, was_redirected
from ..errors import CorruptRow
from ..keys import Identity, digest, identify, parse_row_name
from .nodes import Node, Words, ask, ask_all, primaries

__all__ = [
    "BATCH",
    "FIELDS",
    "STATUSES",
    "Found",
    "Stats",
    "Status",
    "look",
    "look_at",
    "prefix",
    "questions",
    "scan",
    "stats",
]

Status: TypeAlias = Literal["stale", "pending", "failed", "completed", "corrupt"]

STATUSES: tuple[Status, ...] = ("stale", "pending", "failed", "completed", "corrupt")
"""In the order in which they want to be looked at; `corrupt` is what no attempt will ever run or overwrite."""

BATCH = 500
"""Names a SCAN goes over at a time: some tenths of a millisecond of the server."""

SAMPLED = 200
"""Rows whose memory is asked for."""

RATE_OVER = 3600.0
"""Seconds that the present rate is taken from."""

FIELDS = (
    "status",
    "generation",
    "owner",
    "fingerprint",
    "lease_until",
    "created_at",
    "updated_at",
    "response_status",
    "response_omitted",
    "checkpoint",
    "checkpoint_seq",
)
"""What is read of each row; never its body, which may be large and is nobody's business in a list."""

_NUMBERS = ("generation", "lease_until", "created_at", "updated_at")


@dataclass(frozen=True, slots=True)
class Found:
    """A row as a list shows it.

    Attributes:
        identity: whose it is, and its name; the parts are empty when the name is not one that this ledger makes.
        status: as stored; `stale` for pending with no lease left; `corrupt` with `why`.
        generation, owner, checkpoint, checkpoint_seq, response_status, omitted: as stored.
        lease: seconds left on the lease of a pending row; below 0 when it ran out.
        age: seconds since the claim.
        quiet: seconds since the last transition.
        ttl: seconds until the row expires; None for a row that never does.
        body: bytes of the stored answer.
    """

    identity: Identity = field(repr=False)
    status: Status
    generation: int = 0
    owner: str = ""
    lease: float = 0.0
    age: float = 0.0
    quiet: float = 0.0
    ttl: float | None = None
    body: int = 0
    response_status: int = 0
    omitted: str = ""
    checkpoint: str = ""
    checkpoint_seq: int = 0
    why: str = ""

    @property
    def digest(self) -> str:
        """What log lines, events and spans call the row."""
        return digest(self.identity.row)

    @property
    def running(self) -> bool:
        """Whether an attempt holds it."""
        return self.status == "pending"


def prefix(namespace: str, principal: str = "") -> str:
    """Return what the names of the namespace's rows, or of one principal's, begin with. Safe in a SCAN pattern."""
    row = identify(namespace, principal or "x", "x").row
    return row[:-1] if principal else row[:-3]


def questions(row: str) -> list[Words]:
    """Return the commands whose answers `look_at` reads."""
    return [("HMGET", row, *FIELDS), ("HSTRLEN", row, "response_body"), ("PTTL", row)]


def look_at(row: str, answers: Sequence[Any], now: float) -> Found | None:
    """Read the answers to `questions`; None when the row is gone meanwhile. `now` is the server's time, in seconds."""
    try:
        _, principal, operation, key = parse_row_name(row)
        identity = Identity(principal, operation, key, row)
    except (ValueError, UnicodeError):
        identity = Identity("", "", "", row)
    values, body, pttl = answers
    if isinstance(values, CorruptRow):
        return Found(identity, "corrupt", ttl=_ttl(pttl), why=values.why)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    if pttl == -2:
        return None
    stored = dict(zip(FIELDS, (_text(value) for value in values), strict=True))
    why = _fault(stored) if identity.key else "its name is not one of this ledger's"
    if why:
        return Found(identity, "corrupt", ttl=_ttl(pttl), body=body, why=why)
    generation, lease_until, created_at, updated_at = (int(stored[name] or 0) for name in _NUMBERS)
    lease = lease_until / 1000 - now
    status: Any = stored["status"]
    return Found(
        identity,
        "stale" if status == "pending" and lease <= 0 else status,
        generation,
        stored["owner"] or "",
        lease if status == "pending" else 0.0,
        max(now - created_at / 1000, 0.0),
        max(now - updated_at / 1000, 0.0),
        _ttl(pttl),
        body,
        int(stored["response_status"] or 0),
        stored["response_omitted"] or "",
        stored["checkpoint"] or "",
        int(stored["checkpoint_seq"] or 0),
    )


def look(client: Client, node: Node, names: Sequence[str]) -> list[Found | None]:
    """Look at rows of one server; None for each that is gone. One whose slot moves away or here is looked for anew.

    Raises:
        LedgerUnavailable: the server did not answer, or refused.
    """
    if not names:
        return []
    now, *answers = ask_all(node, [("TIME",), *(words for name in names for words in questions(name))])
    if isinstance(now, Exception):
        raise now
    found = []
    for i, name in enumerate(names):
        told = answers[3 * i : 3 * i + 3]
        if any(map(was_redirected, told)):
            told = [clients.attempt(ask, routed(client), *words) for words in questions(name)]
        found.append(look_at(name, told, now[0] + now[1] / 1e6))
    return found


def scan(
    client: Client, namespace: str, principal: str = "", passed: Callable[[int], object] = lambda names: None
) -> Iterator[Found]:
    """Go through the rows by SCAN, on every primary of a cluster; `passed` is told how many names it went over.

    A row that is there all the time is found at least once (twice where the server's table grows meanwhile); one that
    comes or goes may be missed.

    Raises:
        LedgerUnavailable: a server did not answer, or refused.
    """
    pattern = f"{prefix(namespace, principal)}*"
    for node in primaries(client):
        cursor = 0
        while True:
            cursor, names = ask(node, "SCAN", cursor, "MATCH", pattern, "COUNT", BATCH)
            found = look(client, node, [name.decode("ascii", "replace") for name in names])
            yield from (row for row in found if row is not None)
            passed(BATCH)
            if not int(cursor):
                break


@dataclass(frozen=True, slots=True)
class Stats:
    """What the rows add up to.

    Attributes:
        counts: rows by status.
        oldest_pending: age in seconds of the oldest row that is pending or stale; None without one.
        row_bytes: mean bytes of a row, sampled; None where the server does not tell.
        rate: rows claimed a second, over the last hour or as long as there are rows.
        day_bytes: what a day's rows need at that rate.
        lasting: rows without a TTL.
    """

    counts: dict[Status, int]
    oldest_pending: float | None
    row_bytes: float | None
    rate: float
    day_bytes: float | None
    lasting: int


def stats(client: Client, namespace: str, passed: Callable[[int], object] = lambda names: None) -> Stats:
    """Count all rows of the namespace."""
    counts = dict.fromkeys(STATUSES, 0)
    ages: list[float] = []
    oldest_pending: float | None = None
    lasting = 0
    names: list[str] = []
    for found in scan(client, namespace, passed=passed):
        counts[found.status] += 1
        lasting += found.ttl is None
        if found.status == "corrupt":
            continue
        ages.append(found.age)
        if found.status in ("stale", "pending"):
            oldest_pending = max(oldest_pending or 0.0, found.age)
        if len(names) < SAMPLED:
            names.append(found.identity.row)
    span = min(max(ages, default=0.0), RATE_OVER)
    recent = sum(age <= span for age in ages)
    rate = recent / max(span, 60.0)  # a ledger of a few seconds says little about a day
    sizes = _sizes(client, names)
    mean = sum(sizes) / len(sizes) if sizes else None
    return Stats(counts, oldest_pending, mean, rate, None if mean is None else mean * rate * 86400, lasting)


def _sizes(client: Client, names: list[str]) -> list[int]:
    """Sampled by name on each node, which answers for its own rows and refuses the others."""
    sizes: list[int] = []
    for node in primaries(client):
        answers = ask_all(node, [("MEMORY USAGE", name) for name in islice(names, SAMPLED)])
        sizes += [answer for answer in answers if isinstance(answer, int)]
    return sizes


def _ttl(pttl: Any) -> float | None:
    return None if not isinstance(pttl, int) or pttl < 0 else pttl / 1000


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")


def _fault(stored: dict[str, str | None]) -> str:
    """Say why these fields cannot be a row's, as the scripts would."""
    if stored["status"] not in ("pending", "completed", "failed"):
        return "status is missing" if stored["status"] is None else "status is unknown"
    for name in ("owner", "fingerprint"):
        if stored[name] is None:
            return f"{name} is missing"
    for name in _NUMBERS:
        if not (stored[name] or "").isdecimal():
            return f"{name} is not a whole number"
    if stored["status"] != "pending" and not (stored["response_status"] or "").isdecimal():
        return "response_status is not a whole number"
    return ""
