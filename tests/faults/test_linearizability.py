"""The checker of histories, on histories made by hand: it accepts what can be, and nothing else."""

from __future__ import annotations

import math

import pytest

from tests.support.linearizability import Entry, violations
from tests.support.watching import Seen

LEASE, RETENTION = 1000, 60_000
NONE = Seen(-2, -2, 0)
NEW = Seen(-2, RETENTION, 0)
WRITTEN = Seen(RETENTION, RETENTION, 0)


def left(age: int, passed: int = 0) -> Seen:
    """What a call sees that leaves a row of that age alone."""
    return Seen(RETENTION - age, RETENTION - age - passed, passed)


def claim(owner: str, start: float, end: float, *reply: bytes | int, seen: Seen = NEW, fingerprint: str = "f") -> Entry:
    args = (owner, fingerprint, LEASE, RETENTION, 5, "")
    return entry("claim", args, start, end, owner, reply, seen)


def takeover(of: int, owner: str, start: float, end: float, *reply: bytes | int, age: int) -> Entry:
    args = (of, owner, "f", LEASE, RETENTION)
    return entry("takeover", args, start, end, owner, reply, Seen(RETENTION - age, RETENTION, 0))


def renew(generation: int, owner: str, start: float, end: float, *reply: bytes | int, seen: Seen = WRITTEN) -> Entry:
    return entry("renew", (generation, owner, LEASE, RETENTION), start, end, owner, reply, seen)


def complete(generation: int, owner: str, start: float, end: float, *reply: bytes | int, seen: Seen = WRITTEN) -> Entry:
    args = (generation, owner, RETENTION, 201, "[]", b"done", "")
    return entry("complete", args, start, end, owner, reply, seen)


def entry(
    script: str,
    args: tuple[str | bytes | int, ...],
    start: float,
    end: float,
    token: str,
    reply: tuple[bytes | int, ...],
    seen: Seen,
) -> Entry:
    if not reply:
        return Entry("row", script, args, start, end, None, None)
    word, *rest = reply
    return Entry("row", script, args, start, end, (word, token.encode(), *rest), seen)


def vanish(start: float, end: float, *reply: bytes) -> Entry:
    return Entry("row", "vanish", (), start, end, reply, None)


REPLAY = (b"replay", b"1", b"201", b"[]", b"done")
BUSY = (b"in_progress", LEASE)

GOOD = {
    "nothing": [],
    "one after the other": [
        claim("a", 0, 1, b"claimed", b"1"),
        complete(1, "a", 2, 3, b"completed"),
        claim("b", 4, 5, *REPLAY, seen=left(0)),
    ],
    "two at once, the later one first": [
        claim("a", 0, 3, *BUSY, seen=left(0)),
        claim("b", 1, 2, b"claimed", b"1"),
    ],
    "a lost answer that ran": [claim("a", 0, math.inf), claim("b", 2, 3, *BUSY, seen=left(0))],
    "a lost request that never ran": [claim("a", 0, math.inf), claim("b", 2, 3, b"claimed", b"1")],
    "a claim that was delivered long after": [
        claim("a", 0, math.inf),
        claim("b", 1, 2, b"claimed", b"1"),
        vanish(3, 4, b"1"),
        claim("c", 5, 6, *BUSY, seen=left(0)),
    ],
    "asked again by its owner": [
        claim("a", 0, 1, b"claimed", b"1"),
        claim("a", 2, 3, b"claimed", b"1", seen=WRITTEN),
    ],
    "a stale row taken over": [
        claim("a", 0, 1, b"claimed", b"1"),
        claim("b", 2, 3, b"stale", b"1", 0, seen=left(LEASE)),
        takeover(1, "b", 4, 5, b"claimed", b"2", age=LEASE),
        complete(1, "a", 6, 7, b"fenced", seen=left(1)),
    ],
    "a lost takeover that ran": [
        claim("a", 0, 1, b"claimed", b"1"),
        takeover(1, "b", 2, math.inf, age=LEASE),
        complete(2, "b", 4, 5, b"completed"),
    ],
    "a takeover sent twice, and delivered once more to the row that came after": [
        claim("a", 0, 1, b"claimed", b"1"),
        takeover(1, "b", 2, math.inf, b"claimed", b"2", age=LEASE + 7),
        takeover(1, "b", 3, 4, b"claimed", b"2", age=LEASE),
        vanish(5, 6, b"1"),
        claim("c", 7, 8, b"claimed", b"1"),
        complete(2, "b", 9, 10, b"completed"),
    ],
    "a lease that ends while the script looks": [
        claim("a", 0, 1, b"claimed", b"1"),
        claim("b", 2, 3, b"stale", b"1", 0, seen=left(LEASE - 2, passed=3)),
        claim("c", 4, 5, b"in_progress", 1, seen=left(LEASE - 2, passed=3)),
    ],
    "a clock that stepped back": [
        claim("a", 0, 1, b"claimed", b"1"),
        claim("b", 2, 3, *BUSY, seen=left(-500)),
    ],
    "two rows": [claim("a", 0, 1, b"claimed", b"1"), claim("b", 0, 1, b"claimed", b"1")._replace(row="other")],
}

BAD = {
    "two owners": [claim("a", 0, 2, b"claimed", b"1"), claim("b", 1, 3, b"claimed", b"1")],
    "two owners, and both saw a row": [
        claim("a", 0, 2, b"claimed", b"1"),
        claim("b", 1, 3, b"claimed", b"1", seen=WRITTEN),
    ],
    "an answer from the future": [
        claim("b", 0, 1, *REPLAY, seen=left(0)),
        claim("a", 2, 3, b"claimed", b"1"),
    ],
    "a completion that was forgotten": [
        claim("a", 0, 1, b"claimed", b"1"),
        complete(1, "a", 2, 3, b"completed"),
        claim("b", 4, 5, *BUSY, seen=left(0)),
    ],
    "a replay that differs by a byte": [
        claim("a", 0, 1, b"claimed", b"1"),
        complete(1, "a", 2, 3, b"completed"),
        claim("b", 4, 5, *REPLAY[:4], b"Done", seen=left(0)),
    ],
    "a reply to somebody else": [
        claim("a", 0, 1, b"claimed", b"1"),
        complete(1, "a", 2, 3, b"completed")._replace(reply=(b"completed", b"b")),
    ],
    "a takeover before the lease ended": [
        claim("a", 0, 1, b"claimed", b"1"),
        takeover(1, "b", 2, 3, b"claimed", b"2", age=LEASE - 1),
    ],
    "a takeover at the old generation": [
        claim("a", 0, 1, b"claimed", b"1"),
        takeover(1, "b", 2, 3, b"claimed", b"1", age=LEASE),
    ],
    "a late owner that was let in": [
        claim("a", 0, 1, b"claimed", b"1"),
        takeover(1, "b", 2, 3, b"claimed", b"2", age=LEASE),
        complete(1, "a", 4, 5, b"completed"),
    ],
    "the owner of a row that is gone": [
        claim("a", 0, 1, b"claimed", b"1"),
        vanish(2, 3, b"1"),
        claim("b", 4, 5, b"claimed", b"1"),
        complete(1, "a", 6, 7, b"completed"),
    ],
    "a lost answer explains one owner, not two": [
        claim("a", 0, math.inf),
        claim("b", 1, 2, b"claimed", b"1"),
        claim("c", 3, 4, b"claimed", b"1"),
    ],
    "a call that runs before it was sent": [claim("b", 0, 1, *BUSY, seen=left(0)), claim("a", 2, math.inf)],
    "another request told that the key is busy": [
        claim("a", 0, 1, b"claimed", b"1"),
        claim("b", 2, 3, *BUSY, seen=left(0), fingerprint="g"),
    ],
    "a lease that is longer by a millisecond": [
        claim("a", 0, 1, b"claimed", b"1"),
        claim("b", 2, 3, b"in_progress", LEASE - 9, seen=left(10)),
    ],
    "a clock that stepped back, and with it the lease": [
        claim("a", 0, 1, b"claimed", b"1"),
        claim("b", 2, 3, b"in_progress", LEASE + 500, seen=left(-500)),
    ],
    "a row that never expires": [claim("a", 0, 1, b"claimed", b"1", seen=Seen(-2, -1, 0))],
    "a renewal that left the TTL alone": [
        claim("a", 0, 1, b"claimed", b"1"),
        renew(1, "a", 2, 3, b"renewed", seen=left(5)),
    ],
    "a refusal that made the row younger": [
        claim("a", 0, 1, b"claimed", b"1"),
        renew(1, "b", 2, 3, b"fenced", seen=Seen(RETENTION - 5, RETENTION, 0)),
    ],
    "a refusal that saw no row where there is one": [
        claim("a", 0, 1, b"claimed", b"1"),
        renew(1, "b", 2, 3, b"fenced", seen=NONE),
    ],
}


@pytest.mark.parametrize("name", GOOD)
def test_a_history_that_can_be_is_accepted(name: str) -> None:
    assert violations(GOOD[name]) == []


@pytest.mark.parametrize("name", BAD)
def test_a_history_that_cannot_be_is_found_out(name: str) -> None:
    assert len(violations(BAD[name])) == 1


def test_many_lost_answers_do_not_make_the_search_long() -> None:
    lost = [claim(f"lost{i}", i, math.inf) for i in range(12)]
    losers = [claim(f"loser{i}", 20 + i, 21 + i, *BUSY, seen=left(0)) for i in range(60)]
    assert violations([*lost, *losers]) == []
    assert len(violations([*lost, *losers, claim("late", 100, 101, b"claimed", b"1")])) == 1
