"""Decisions that take more than one call, as generators. Pure: no client, no clock, no thread.

A flow yields a step and is sent its result, or has its exception thrown in:

    Call           run it on Redis; the result is the decoded outcome
    Sleep          wait; the result is the local monotonic clock afterwards
    InBackground   run another flow in the background
    Emit           an event happened

`Ledger` and `AsyncLedger` drive the same flows, so re-asking, giving up and cancellation are decided here once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ..errors import CorruptRow, FencedOut, LedgerUnavailable, NotDurable
from ..events import EventName
from ..policy import Policy
from . import operations
from .keys import Identity
from .operations import Call, MakeReservation
from .outcomes import Done, Fenced, InProgress, Lost, Outcome, Renewed, Replay, Reused, Row, Stale
from .reservation import HEARTBEATS, Reservation
from .response import StoredResponse

__all__ = [
    "Emit",
    "Flow",
    "GivenUp",
    "InBackground",
    "Sleep",
    "Step",
    "checkpoint",
    "claim",
    "complete",
    "fail",
    "heartbeat",
    "hold",
    "read",
    "release",
    "renew",
]

T = TypeVar("T")

ASK_AGAIN_WITHIN = 1.5
"""Seconds a call may have taken and still be asked once more. With the client's own timeout of 1 s the caller knows
after 2 s; a client that retries by itself for longer has asked often enough."""

RACES = 3
"""How often a stale row is raced for. Each lost race means that somebody else won it."""

SHORTEST_GAP, LONGEST_GAP = 0.01, 0.25
"""Seconds between two looks of a waiting duplicate."""

GAP_SHARE = 0.05
"""The gap grows with the time already waited, so a result is found late by a twentieth of that time at most."""

FIRST_RETRY, LONGEST_RETRY = 0.1, 1.0
"""Seconds between two tries in the background, doubling: a lost claim is out of its client's way within 2 s of Redis
being back, and a sick server is not asked more than once a second."""

STORE_WITHIN = 300.0
"""Seconds for which a completion is tried again."""


class Sleep(NamedTuple):
    seconds: float


class Emit(NamedTuple):
    event: EventName
    identity: Identity
    generation: int = 0
    route: str = ""


class InBackground(NamedTuple):
    """`size` bytes are held in memory until the flow ends."""

    flow: Flow[None]
    size: int


class GivenUp(Exception):
    """Thrown into a background flow when there is no more time or room for it."""


Step: TypeAlias = Call[Any] | Sleep | InBackground | Emit
Flow: TypeAlias = Generator[Step, Any, T]


def claim(
    identity: Identity,
    owner: str,
    fingerprint: str,
    *,
    lease: float,
    wait: float,
    takeover: bool,
    policy: Policy,
    created_at: float,
    route: str,
    make: MakeReservation = Reservation,
) -> Flow[Outcome]:
    """Reserve the row, take it over when it is stale, or say what is there, after waiting for it up to `wait`."""
    ask = operations.claim(identity, owner, fingerprint, lease, policy.retention, created_at, route, make)
    races = 0
    began: float | None = None
    asked = 1  # the generation that a lost reply may have given this attempt; 0 while no reply is outstanding
    try:
        while True:
            asked = 1
            outcome: Outcome | Stale | Lost = yield from _ask(ask)
            if isinstance(outcome, Stale) and takeover:
                asked = outcome.generation + 1
                outcome = yield from _ask(
                    operations.takeover(
                        identity, outcome.generation, owner, fingerprint, lease, policy.retention, route, make
                    )
                )
            asked = 0
            if isinstance(outcome, Lost):
                races += 1
                if races < RACES:
                    continue
            if isinstance(outcome, (Stale, Lost)):
                outcome = InProgress(0.0, stale=True)
            if isinstance(outcome, InProgress) and wait > 0 and not (outcome.stale and not takeover):
                now: float = yield Sleep(0.0)
                began = now if began is None else began
                left = began + wait - now
                if left > 0:
                    races = 0
                    yield Sleep(min(_gap(now - began), left, max(outcome.retry_after, SHORTEST_GAP)))
                    continue
            break
    except BaseException as error:
        if asked and _leaves_unknown(error):
            yield _release_later(identity, asked, owner, lease, policy)
        if isinstance(error, LedgerUnavailable):
            yield Emit("unavailable", identity, route=route)
        raise
    yield _claim_event(identity, outcome, route)
    return outcome


def complete(r: Reservation, response: StoredResponse, policy: Policy) -> Flow[None]:
    """Store the response, or have it stored in the background as soon as Redis can be reached."""
    return _finish(r, response, operations.complete(r, response, policy.retention), "completed")


def fail(r: Reservation, response: StoredResponse, policy: Policy) -> Flow[None]:
    """Store a final failure, in the same way."""
    return _finish(r, response, operations.fail(r, response, policy.retention), "failed")


def release(r: Reservation, policy: Policy) -> Flow[None]:
    """Give the row up now, or in the background as soon as Redis can be reached; after the lease it is stale anyway."""
    call = operations.release(r.identity, r.generation, r.owner, policy.retention)
    return _end(
        r, call, "released", lambda: _release_later(r.identity, r.generation, r.owner, r.lease.duration, policy)
    )


def hold(r: Reservation, for_review: bool) -> Flow[None]:
    """Leave the row pending until its lease ends."""
    r.lease.end()
    if for_review:
        yield _emit("held_for_review", r)


def renew(r: Reservation, policy: Policy) -> Flow[None]:
    """Extend the lease."""
    yield from _extend(r, operations.renew(r, policy.retention))


def checkpoint(r: Reservation, name: str, data: str, policy: Policy) -> Flow[None]:
    """Note how far the work got, and extend the lease."""
    yield from _extend(r, operations.checkpoint(r, name, data, policy.retention))


def read(identity: Identity) -> Flow[Row | None]:
    """Look at the row; nothing changes."""
    row: Row | None = yield operations.read(identity)
    return row


def heartbeat(r: Reservation, policy: Policy) -> Flow[None]:
    """Renew the lease now and at each third of it, until the attempt ends or has lasted for `max_hold`."""
    began = r.lease.expires_at - r.lease.duration
    now = yield Sleep(0.0)
    while not r.lease.ended and now - began < policy.max_hold:
        try:
            outcome = yield from _ask(operations.renew(r, policy.retention))
        except LedgerUnavailable:
            pass  # the next beat asks again; meanwhile `held` turns false by itself
        else:
            if r.lease.ended:
                return  # completed while the renewal was under way: what it says is about a finished row
            if isinstance(outcome, Fenced):
                yield from _mark_fenced(r)
                return
            r.lease.expires_at = outcome.expires_at
        now = yield Sleep(r.lease.duration / HEARTBEATS)


def _ask(call: Call[T]) -> Flow[T]:
    """Ask, and ask once more where the reply may have been lost. A script sent twice has the same effect."""
    outcome: T
    try:
        outcome = yield call
        return outcome
    except NotDurable:
        raise
    except LedgerUnavailable as error:
        if not error.unknown or error.seconds > ASK_AGAIN_WITHIN:
            raise
    try:
        outcome = yield call
        return outcome
    except LedgerUnavailable as error:
        error.unknown = True  # the first call may have run, whatever became of the second
        raise


def _finish(r: Reservation, response: StoredResponse, call: Call[Done | Fenced], event: EventName) -> Flow[None]:
    yield from _end(r, call, event, lambda: InBackground(_until_stored(r, call, event), len(response.body)))
    if response.omitted:
        yield _emit("not_stored", r)


def _end(r: Reservation, call: Call[Done | Fenced], event: EventName, later: Callable[[], InBackground]) -> Flow[None]:
    """End the attempt by this call; where there is no reply, run what `later` returns in the background."""
    r.lease.end()
    try:
        outcome = yield from _ask(call)
    except BaseException as error:
        if not isinstance(error, CorruptRow):
            yield later()
        if isinstance(error, LedgerUnavailable):
            yield _emit("unavailable", r)
        raise
    yield from _raise_if_fenced(r, outcome)
    yield _emit(event, r)


def _extend(r: Reservation, call: Call[Renewed | Fenced]) -> Flow[None]:
    outcome = yield from _ask(call)
    yield from _raise_if_fenced(r, outcome)
    assert isinstance(outcome, Renewed)
    r.lease.expires_at = outcome.expires_at


def _raise_if_fenced(r: Reservation, outcome: object) -> Flow[None]:
    if isinstance(outcome, Fenced):
        yield from _mark_fenced(r)
        raise FencedOut(
            f"generation {r.generation} no longer owns its row: it was taken over, has expired, or is finished; "
            "nothing was changed, and what it did elsewhere may have been done twice"
        )


def _leaves_unknown(error: BaseException) -> bool:
    """Whether the call may have run all the same: its reply was lost, or the wait for it was cancelled."""
    return error.unknown if isinstance(error, LedgerUnavailable) else not isinstance(error, CorruptRow)


def _mark_fenced(r: Reservation) -> Flow[None]:
    """Emit it once an attempt, whether the heartbeat or the completion finds out first."""
    known, r.lease.fenced = r.lease.fenced, True
    r.lease.end()
    if not known:
        yield _emit("fenced", r)


def _release_later(identity: Identity, generation: int, owner: str, lease: float, policy: Policy) -> InBackground:
    return InBackground(_until_released(operations.release(identity, generation, owner, policy.retention), lease), 0)


def _until_released(call: Call[Done | Fenced], lease: float) -> Flow[None]:
    """Ask until it is released, or one lease has passed: the claim may still arrive from the server's socket buffer."""
    gap = FIRST_RETRY
    now = began = yield Sleep(0.0)
    while now - began < lease:
        try:
            if isinstance((yield call), Done):
                return
        except LedgerUnavailable:
            pass
        now = yield Sleep(gap)
        gap = min(gap * 2, LONGEST_RETRY)


def _until_stored(r: Reservation, call: Call[Done | Fenced], event: EventName) -> Flow[None]:
    """Ask until the response is stored or fenced; emit `completion_lost` when that takes too long."""
    gap = FIRST_RETRY
    try:
        began = now = yield Sleep(gap)
        while now - began < STORE_WITHIN:
            try:
                outcome = yield call
            except LedgerUnavailable:
                now = yield Sleep(gap)
                gap = min(gap * 2, LONGEST_RETRY)
            else:
                if isinstance(outcome, Fenced):
                    yield from _mark_fenced(r)
                else:
                    yield _emit(event, r)
                return
    except GivenUp:
        pass
    yield _emit("completion_lost", r)


def _gap(waited: float) -> float:
    gap = min(max(waited * GAP_SHARE, SHORTEST_GAP), LONGEST_GAP)
    return gap * random.uniform(0.75, 1.25)


def _emit(event: EventName, r: Reservation) -> Emit:
    return Emit(event, r.identity, r.generation, r.route)


def _claim_event(identity: Identity, outcome: Outcome, route: str) -> Emit:
    match outcome:
        case Reservation():
            return _emit("taken_over" if outcome.taken_over else "claimed", outcome)
        case Replay():
            return Emit("replayed", identity, outcome.generation, route)
        case InProgress():
            return Emit("in_progress", identity, route=route)
        case Reused():
            return Emit("reused", identity, route=route)
