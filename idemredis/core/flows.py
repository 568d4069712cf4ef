"""Operations that take more than one call, as generators. Pure: no client, no clock, no thread.

A flow yields steps. The driver runs each step and sends its result back, or throws its exception into the flow:

    Call           run a script on Redis; the result is the decoded outcome
    Sleep          wait; the result is the local monotonic clock afterwards
    InBackground   run another flow in the background
    Emit           emit an event

`Ledger` and `AsyncLedger` drive the same flows, so retries, giving up and cancellation are defined here only.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

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
    "Room",
    "Sleep",
    "Step",
    "checkpoint",
    "claim",
    "complete",
    "fail",
    "heartbeat",
    "hold",
    "look_again",
    "raise_if_fenced",
    "read",
    "release",
    "renew",
]

T = TypeVar("T")

RETRY_WITHIN = 1.5
"""Seconds. A call that took longer is not retried: with a socket timeout of 1 s the caller then waits 2 s at most, and
a client with its own retries has made enough of them."""

RACES = 3
"""Attempts to take over a stale row. After each lost race another attempt owns the row, so more are rarely needed."""

MIN_GAP, MAX_GAP = 0.01, 0.25
"""Seconds between two polls of a waiting duplicate."""

GAP_SHARE = 0.05
"""The gap between polls is this share of the time waited so far, so a duplicate waits about 5 % too long at most."""

FIRST_RETRY, MAX_RETRY = 0.1, 1.0
"""Seconds between two background retries, doubling. A lost claim is released within 2 s of Redis being back, and a
failing server gets at most one retry a second from each flow."""

STORE_WITHIN = 300.0
"""Seconds for which a completion is retried. It bounds the memory that unstored responses take."""


class Room(Protocol):
    """Decides whether one more duplicate may wait; `leave` follows each `enter` that returned True."""

    def enter(self, identity: Identity) -> bool:
        """Return whether there is room."""

    def leave(self, identity: Identity) -> None:
        """Give the place back."""


class Sleep(NamedTuple):
    """Wait this long; the result is the local monotonic clock afterwards."""

    seconds: float


@dataclass(slots=True)
class Emit:
    """Emit an event."""

    event: EventName
    identity: Identity
    generation: int = 0
    route: str = ""
    reason: str = ""


class InBackground(NamedTuple):
    """Run a flow in the background: it stores a response of `size` bytes in a row, or releases the row."""

    flow: Flow[None]
    kind: Literal["completion", "release"]
    row: str
    size: int = 0


class GivenUp(Exception):
    """Thrown into a background flow that must end, because the process exits or a limit is reached."""


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
    room: Room | None = None,
) -> Flow[Outcome]:
    """Reserve the row, taking it over if it is stale; otherwise return its state, after waiting up to `wait` s.

    Where a `room` is given and has no place, it does not wait.
    """
    call = operations.claim(identity, owner, fingerprint, lease, policy.retention, created_at, route, make)
    races = 0
    released = False
    began: float | None = None
    entered = False
    requested = 1  # generation that this attempt owns if the reply is lost; 0 while no call is outstanding
    try:
        while True:
            requested = 1
            outcome: Outcome | Stale | Lost = yield from _retry_once(call)
            if isinstance(outcome, Stale) and takeover:
                if outcome.refusal is not None:  # a takeover would fence the owner, and then not count
                    requested = 0
                    raise outcome.refusal
                requested, released = outcome.generation + 1, outcome.released
                outcome = yield from _retry_once(
                    operations.takeover(
                        identity, outcome.generation, owner, fingerprint, lease, policy.retention, route, make
                    )
                )
            requested = 0
            if isinstance(outcome, Lost):
                races += 1
                if races < RACES:
                    continue
            if isinstance(outcome, (Stale, Lost)):
                outcome = InProgress(0.0, stale=True)
            if isinstance(outcome, InProgress) and wait > 0 and not (outcome.stale and not takeover):
                if room is not None and not entered:
                    entered = room.enter(identity)
                    if not entered:
                        break
                now: float = yield Sleep(0.0)
                began = now if began is None else began
                left = began + wait - now
                if left > 0:
                    races = 0
                    yield Sleep(min(_gap(now - began), left, max(outcome.retry_after, MIN_GAP)))
                    continue
            break
    except BaseException as error:
        if requested and _may_have_run(error):
            yield _release_later(identity, requested, owner, lease, policy)
        if isinstance(error, LedgerUnavailable):
            yield Emit("unavailable", identity, route=route, reason=error.reason)
        if isinstance(error, CorruptRow):
            yield Emit("corrupt", identity, route=route, reason=error.why)
        raise
    finally:
        if room is not None and entered:
            room.leave(identity)
    yield _claim_event(identity, outcome, route, released)
    return outcome


def complete(r: Reservation, response: StoredResponse, policy: Policy) -> Flow[None]:
    """Store the response; if Redis cannot be reached, retry in the background."""
    return _finish(r, response, operations.complete(r, response, policy.retention), "completed")


def fail(r: Reservation, response: StoredResponse, policy: Policy) -> Flow[None]:
    """Store a final failure; if Redis cannot be reached, retry in the background."""
    return _finish(r, response, operations.fail(r, response, policy.retention), "failed")


def release(r: Reservation, policy: Policy) -> Flow[None]:
    """Give the row up; if Redis cannot be reached, retry in the background until the row is stale anyway."""
    call = operations.release(r.identity, r.generation, r.owner, policy.retention)
    return _end(
        r, call, "released", lambda: _release_later(r.identity, r.generation, r.owner, r.lease.duration, policy)
    )


def hold(r: Reservation, for_review: bool) -> Flow[None]:
    """Stop renewing the lease, and leave the row pending until it ends."""
    r.lease.end()
    if for_review:
        yield _emit("held_for_review", r)


def renew(r: Reservation, policy: Policy) -> Flow[None]:
    """Extend the lease to its full length from now."""
    yield from _extend(r, operations.renew(r, policy.retention))


def checkpoint(r: Reservation, name: str, data: str, policy: Policy) -> Flow[None]:
    """Save how far the work got, and extend the lease."""
    yield from _extend(r, operations.checkpoint(r, name, data, policy.retention))


def read(identity: Identity) -> Flow[Row | None]:
    """Read the row without changing it."""
    row: Row | None = yield operations.read(identity)
    return row


def look_again(r: Reservation) -> Flow[Replay | None]:
    """Return what the attempt that fenced this one has stored for the same request; None if that cannot be told."""
    try:
        row: Row | None = yield from _retry_once(operations.read(r.identity))
    except (LedgerUnavailable, CorruptRow):
        return None
    if row is None or row.response is None or row.fingerprint != r.fingerprint:
        return None
    return Replay(row.response, row.generation, row.status == "failed")


def raise_if_fenced(r: Reservation) -> None:
    """Raise `FencedOut` if another attempt is known to own the row."""
    if r.lease.fenced:
        raise FencedOut(
            f"generation {r.generation} no longer owns its row, which was taken over, has expired, or is finished; "
            "nothing was changed, and work done elsewhere may have been done twice"
        )


def heartbeat(find: Callable[[], Reservation | None], policy: Policy) -> Flow[None]:
    """Renew the lease now and after each third of it, until the attempt ends or has lasted for `max_hold`.

    `find` returns the reservation, or None once nobody has it any more: nobody could settle the row then, so it is left
    to become stale. A flow that sleeps or waits keeps no reservation.
    """
    r = find()
    if r is None:
        return
    lease, call, fenced, late = r.lease, operations.renew(r, policy.retention), _emit("fenced", r), _late(r)
    del r
    began = lease.expires_at - lease.duration
    now = yield Sleep(0.0)
    while not lease.ended and find() is not None:
        if now - began >= policy.max_hold:
            lease.heartbeat_due = None
            return
        if lease.is_late(now):
            yield late
        try:
            outcome = yield from _retry_once(call)
        except LedgerUnavailable:
            lease.heartbeat_due = None  # Redis is late, not the heartbeat
        else:
            if lease.ended:
                return  # settled while the renewal was outstanding, so its outcome no longer matters
            if isinstance(outcome, Fenced):
                lease.fenced = True
                lease.end()
                yield fenced
                return
            lease.renewed(outcome.expires_at)
        now = yield Sleep(lease.duration / HEARTBEATS)


def _retry_once(call: Call[T]) -> Flow[T]:
    """Run a call, and run it again if its reply was lost; every script has the same effect when sent twice."""
    outcome: T
    try:
        outcome = yield call
        return outcome
    except NotDurable:
        raise
    except LedgerUnavailable as error:
        if not error.unknown or error.seconds > RETRY_WITHIN:
            raise
    try:
        outcome = yield call
        return outcome
    except LedgerUnavailable as error:
        error.after_lost_reply()
        raise


def _finish(r: Reservation, response: StoredResponse, call: Call[Done | Fenced], event: EventName) -> Flow[None]:
    yield from _end(
        r, call, event, lambda: InBackground(_until_stored(r, call, event), "completion", call.row, len(response.body))
    )
    if response.omitted:
        yield _emit("not_stored", r)


def _end(r: Reservation, call: Call[Done | Fenced], event: EventName, retry: Callable[[], InBackground]) -> Flow[None]:
    """End the attempt with this call; if it fails, run the flow that `retry` returns in the background."""
    if not r.lease.ended and r.lease.is_late(time.monotonic()):
        yield _late(r)
    r.lease.end()
    try:
        outcome = yield from _retry_once(call)
    except BaseException as error:
        if not isinstance(error, CorruptRow):
            yield retry()
        if isinstance(error, LedgerUnavailable):
            yield Emit("unavailable", r.identity, r.generation, r.route, error.reason)
        if isinstance(error, CorruptRow):
            yield Emit("corrupt", r.identity, r.generation, r.route, error.why)
        raise
    if isinstance(outcome, Fenced):
        yield from _mark_fenced(r)
        raise_if_fenced(r)
    yield _emit(event, r)


def _extend(r: Reservation, call: Call[Renewed | Fenced]) -> Flow[None]:
    outcome = yield from _retry_once(call)
    if isinstance(outcome, Fenced):
        yield from _mark_fenced(r)
        raise_if_fenced(r)
    else:
        r.lease.expires_at = outcome.expires_at


def _may_have_run(error: BaseException) -> bool:
    """Return True if a failed call may have run: its reply was lost, or the caller was cancelled."""
    return error.unknown if isinstance(error, LedgerUnavailable) else not isinstance(error, CorruptRow)


def _mark_fenced(r: Reservation) -> Flow[None]:
    """Mark the attempt as fenced; emit `fenced` once, whether the heartbeat or the completion finds out first."""
    was_fenced, r.lease.fenced = r.lease.fenced, True
    r.lease.end()
    if not was_fenced:
        yield _emit("fenced", r)


def _release_later(identity: Identity, generation: int, owner: str, lease: float, policy: Policy) -> InBackground:
    call = operations.release(identity, generation, owner, policy.retention)
    return InBackground(_until_released(call, lease), "release", call.row)


def _until_released(call: Call[Done | Fenced], lease: float) -> Flow[None]:
    """Send the release until it succeeds or one lease has passed: the claim may still be in the server's buffer."""
    gap = FIRST_RETRY
    now = began = yield Sleep(0.0)
    while now - began < lease:
        try:
            if isinstance((yield call), Done):
                return
        except LedgerUnavailable:
            pass
        now = yield Sleep(gap)
        gap = min(gap * 2, MAX_RETRY)


def _until_stored(r: Reservation, call: Call[Done | Fenced], event: EventName) -> Flow[None]:
    """Send the completion until it is stored or fenced; emit `completion_lost` after `STORE_WITHIN` seconds."""
    gap = FIRST_RETRY
    try:
        began = now = yield Sleep(gap)
        while now - began < STORE_WITHIN:
            try:
                outcome = yield call
            except LedgerUnavailable:
                now = yield Sleep(gap)
                gap = min(gap * 2, MAX_RETRY)
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
    gap = min(max(waited * GAP_SHARE, MIN_GAP), MAX_GAP)
    return gap * random.uniform(0.75, 1.25)


def _emit(event: EventName, r: Reservation) -> Emit:
    return Emit(event, r.identity, r.generation, r.route)


def _late(r: Reservation) -> Emit:
    return _emit("heartbeat_late", r)


def _claim_event(identity: Identity, outcome: Outcome, route: str, released: bool) -> Emit:
    """Return the event of a claim; `released`: the attempt before gave the row up, if there was one."""
    match outcome:
        case Reservation() if outcome.taken_over:
            return _emit("retried" if released else "taken_over", outcome)
        case Reservation():
            return _emit("claimed", outcome)
        case Replay():
            return Emit("replayed", identity, outcome.generation, route)
        case InProgress():
            return Emit("in_progress", identity, route=route)
        case Reused():
            return Emit("reused", identity, route=route)
