"""Check that a history of calls is linearizable: one row, running one call at a time, could give these replies.

The search is that of Wing and Gong, with Lowe's improvements.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tests.support.model import LOOKS, Reply, Row, transition, ttl
from tests.support.watching import Seen

__all__ = ["Entry", "TooHard", "violations"]

MOST_STEPS = 400_000
"""Limit of search steps; a history of a few hundred calls takes some thousands."""


class TooHard(Exception):
    """The search neither found an order of the calls nor showed that there is none."""


class Entry(NamedTuple):
    """One call of a script on one row.

    Attributes:
        start, end: times by the monotonic clock, which all processes of the machine share.
        reply: None if it was lost; the call may have run at any time after `start`, or not at all.
        seen: the row's TTL before and after the call, which is its clock; None if it was not recorded.
        call: a number of the call, if it may have to be found again.
    """

    row: str
    script: str
    args: tuple[str | bytes | int, ...]
    start: float
    end: float
    reply: Reply | None
    seen: Seen | None
    call: str = ""


def violations(history: Iterable[Entry]) -> list[str]:
    """Return, for each row whose calls no order explains, the call at which the search got stuck.

    Raises:
        TooHard: the search took too many steps.
    """
    rows: dict[str, list[Entry]] = defaultdict(list)
    for entry in history:
        rows[entry.row].append(entry)
    stuck = []
    for row, entries in rows.items():
        if said := _search(sorted(entries, key=lambda entry: entry.start)):
            stuck.append(f"{row}: {said}")
    return stuck


def _search(entries: Sequence[Entry]) -> str:
    """Return "" if an order was found, else the call that no order explains."""
    certain = sum(1 << i for i, entry in enumerate(entries) if entry.reply is not None)
    seen: set[tuple[int, Row | None]] = set()
    if not certain:
        return ""
    stack = [_next(entries, 0, None)]
    steps, furthest, why = 0, 0, _stuck(entries, 0, None)
    while stack:
        move = next(stack[-1], None)
        if move is None:
            stack.pop()
            continue
        steps += 1
        if steps > MOST_STEPS:
            raise TooHard(f"{len(entries)} calls, {steps} steps")
        done, row = move
        if (done, row) in seen:
            continue
        seen.add((done, row))
        if done & certain == certain:
            return ""
        reached = (done & certain).bit_count()
        if reached > furthest:
            furthest, why = reached, _stuck(entries, done, row)
        stack.append(_next(entries, done, row))
    return why


def _next(entries: Sequence[Entry], done: int, row: Row | None) -> Iterator[tuple[int, Row | None]]:
    """Yield each call that can come next: it began before any remaining call ended, and the model gives its reply."""
    for i, after in _candidates(entries, done, row):
        yield done | 1 << i, after


def _candidates(entries: Sequence[Entry], done: int, row: Row | None) -> list[tuple[int, Row | None]]:
    open_until = math.inf
    known: list[tuple[int, Row | None]] = []
    unknown: list[tuple[int, Row | None]] = []
    for i, entry in enumerate(entries):
        if entry.start > open_until:
            break
        if done >> i & 1:
            continue
        if entry.reply is None:
            after, _ = transition(row, entry.script, entry.args, row.lease if row else 0)  # late enough for a takeover
            if _at_rest(after) != row:  # a call that changes nothing need not have run
                unknown.append((i, _at_rest(after)))
        else:
            open_until = min(open_until, entry.end)
            known += {(i, _at_rest(after)) for after, reply in _outcomes(entry, row) if reply == entry.reply}
    within = [(i, after) for i, after in known if entries[i].start <= open_until]
    for i, after in within:
        reply = entries[i].reply
        if reply and reply[0] in LOOKS:
            return [(i, after)]  # it fits and changes nothing, so no other place needs to be tried
    within.sort(key=lambda move: entries[move[0]].end)
    return within + [(i, after) for i, after in unknown if entries[i].start <= open_until]


def _outcomes(entry: Entry, row: Row | None) -> Iterator[tuple[Row | None, Reply]]:
    """Yield the effects of the call on the row, for each millisecond at which it may have read the TTL."""
    if entry.seen is None:
        yield transition(row, entry.script, entry.args, 0)
        return
    before, left, passed = entry.seen
    if (row is None) != (before == ttl(None, 0)):
        return  # another call must have made or removed the row before this one
    for passing in range(passed + 1):
        now = ttl(row, 0) - before + passing
        after, reply = transition(row, entry.script, entry.args, now)
        if 0 <= ttl(after, now) - left <= passed:
            yield after, reply


def _at_rest(row: Row | None) -> Row | None:
    """Return the row with its last transition at 0; the next call gets its age from the TTL."""
    return row and row._replace(since=0)


def _stuck(entries: Sequence[Entry], done: int, row: Row | None) -> str:
    left = [entry for i, entry in enumerate(entries) if not done >> i & 1 and entry.reply is not None]
    first = min(left, key=lambda entry: entry.end)
    would = [reply for _, reply in _outcomes(first, row)] or "another TTL"
    return (
        f"{first.script}{first.args[:2]} answered {first.reply} and saw {first.seen} where {would} is right, on {row}"
    )
