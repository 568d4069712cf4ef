"""The checker of histories, on histories made by hand: it accepts what can be, and nothing else."""

from __future__ import annotations

import math

import pytest

from .linearizability import Entry, violations

LEASE, RETENTION = 1000, 60_000
ANSWER = (201, "[]", b"done", "")


def claim(owner: str, start: float, end: float, *reply: bytes, now: int = 0, fingerprint: str = "f") -> Entry:
    return Entry("row", "claim", (owner, fingerprint, LEASE, RETENTION), now, start, end, reply or None)


def takeover(seen: int, owner: str, start: float, end: float, *reply: bytes, now: int = 0) -> Entry:
    return Entry("row", "takeover", (seen, owner, "f", LEASE, RETENTION), now, start, end, reply or None)


def complete(generation: int, owner: str, start: float, end: float, *reply: bytes, body: bytes = b"done") -> Entry:
    return Entry("row", "complete", (generation, owner, RETENTION, 201, "[]", body, ""), 0, start, end, reply or None)


def vanish(start: float, end: float, *reply: bytes) -> Entry:
    return Entry("row", "vanish", (), 0, start, end, reply)


REPLAY = (b"replay", b"completed", b"1", b"201", b"[]", b"done", b"")

GOOD = {
    "nothing": [],
    "one after the other": [
        claim("a", 0, 1, b"claimed", b"1"),
        complete(1, "a", 2, 3, b"completed"),
        claim("b", 4, 5, *REPLAY),
    ],
    "two at once, the later one first": [
        claim("a", 0, 3, b"in_progress", b"1000"),
        claim("b", 1, 2, b"claimed", b"1"),
    ],
    "a lost answer that ran": [claim("a", 0, math.inf), claim("b", 2, 3, b"in_progress", b"1000")],
    "a lost request that never ran": [claim("a", 0, math.inf), claim("b", 2, 3, b"claimed", b"1")],
    "a claim that was delivered long after": [
        claim("a", 0, math.inf),
        claim("b", 1, 2, b"claimed", b"1"),
        vanish(3, 4, b"1"),
        claim("c", 5, 6, b"in_progress", b"1000"),
    ],
    "asked again by its owner": [claim("a", 0, 1, b"claimed", b"1"), claim("a", 2, 3, b"claimed", b"1")],
    "a stale row taken over": [
        claim("a", 0, 1, b"claimed", b"1"),
        claim("b", 2, 3, b"stale", b"1", now=LEASE),
        takeover(1, "b", 4, 5, b"claimed", b"2", now=LEASE),
        complete(1, "a", 6, 7, b"fenced"),
    ],
    "two rows": [claim("a", 0, 1, b"claimed", b"1"), claim("b", 0, 1, b"claimed", b"1")._replace(row="other")],
}

BAD = {
    "two owners": [claim("a", 0, 2, b"claimed", b"1"), claim("b", 1, 3, b"claimed", b"1")],
    "an answer from the future": [claim("b", 0, 1, *REPLAY), claim("a", 2, 3, b"claimed", b"1")],
    "a completion that was forgotten": [
        claim("a", 0, 1, b"claimed", b"1"),
        complete(1, "a", 2, 3, b"completed"),
        claim("b", 4, 5, b"in_progress", b"1000"),
    ],
    "a replay that differs by a byte": [
        claim("a", 0, 1, b"claimed", b"1"),
        complete(1, "a", 2, 3, b"completed"),
        claim("b", 4, 5, *REPLAY[:5], b"Done", b""),
    ],
    "a takeover before the lease ended": [
        claim("a", 0, 1, b"claimed", b"1"),
        takeover(1, "b", 2, 3, b"claimed", b"2", now=LEASE - 1),
    ],
    "a takeover at the old generation": [
        claim("a", 0, 1, b"claimed", b"1"),
        takeover(1, "b", 2, 3, b"claimed", b"1", now=LEASE),
    ],
    "a late owner that was let in": [
        claim("a", 0, 1, b"claimed", b"1"),
        takeover(1, "b", 2, 3, b"claimed", b"2", now=LEASE),
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
    "a call that runs before it was sent": [claim("b", 0, 1, b"in_progress", b"1000"), claim("a", 2, math.inf)],
    "another request told that the key is busy": [
        claim("a", 0, 1, b"claimed", b"1"),
        claim("b", 2, 3, b"in_progress", b"1000", fingerprint="g"),
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
    losers = [claim(f"loser{i}", 20 + i, 21 + i, b"in_progress", b"1000") for i in range(60)]
    assert violations([*lost, *losers]) == []
    assert len(violations([*lost, *losers, claim("late", 100, 101, b"claimed", b"1")])) == 1
