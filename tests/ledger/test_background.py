"""What goes on beside the caller: heartbeats, completions that are tried again, and who is told."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import redis.asyncio.retry
from redis.backoff import NoBackoff
from redis.retry import Retry

from idemredis import Event, FencedOut, InProgress, LedgerUnavailable, Policy, Replay, Reservation, StoredResponse
from idemredis.core import flows
from idemredis.core.flows import Sleep
from idemredis.core.operations import Call
from idemredis.core.outcomes import Fenced
from idemredis.core.reservation import Lease
from idemredis.ledger import agenda, task, thread
from tests.support.clock import TurnedClock, expires_at
from tests.support.proxy import Proxy
from tests.support.servers import Server
from tests.support.subject import AnyServer, Fields, MakeSubject, Mode, Subject
from tests.support.waiting import wait_until

ROW = ("acct_1", "key-1")
ANSWER = StoredResponse(201, (("content-type", "text/plain"),), b"done")
SHORT = Policy(lease=0.3)
BUSY = Policy(lease=3.0)
"""Long enough for a heartbeat to be in time on a machine that is busy with other tests."""


def expiry(subject: Subject, r: Reservation) -> int:
    """When the row expires, in milliseconds by the server's clock: exact, and later with each renewal."""
    at: int = subject.client.pexpiretime(r.identity.row)
    return at


def state(subject: Subject, r: Reservation) -> tuple[Fields, int]:
    """The row's fields, and when it expires: a renewal may change that alone."""
    return subject.fields(r.identity.row), expiry(subject, r)


def is_taken(subject: Subject, key: str) -> bool:
    return isinstance(subject.claim("acct_1", key, "f"), Reservation)


# Heartbeats


@pytest.fixture(autouse=True)
def soon_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not make each test wait for a thread with nothing to do to end."""
    for runner in (thread, task):
        assert runner.IDLE <= 2.0
        monkeypatch.setattr(runner, "IDLE", 0.05)


@pytest.mark.slow
def test_a_kept_reservation_is_not_taken_over_while_it_lasts(
    make_subject: MakeSubject, mode: Mode, server: AnyServer
) -> None:
    subject = make_subject(mode, server, policy=BUSY)
    r = subject.claimed(*ROW, "f")
    ends = expires_at(subject.client, r.identity.row)
    subject.start_heartbeat(r)
    while expires_at(subject.client, r.identity.row) < ends + 1000:
        assert isinstance(subject.claim(*ROW, "f"), InProgress)
        assert r.held
        r.ensure_held()
    subject.complete(r, ANSWER)

    assert subject.claim(*ROW, "f") == Replay(ANSWER, 1, False)


@pytest.mark.slow
def test_a_lease_is_renewed_at_each_third_of_it(make_subject: MakeSubject, mode: Mode, valkey_server: Server) -> None:
    subject = make_subject(mode, valkey_server, policy=Policy(lease=3.0))
    r = subject.claimed(*ROW, "f")
    subject.start_heartbeat(r)
    times = [expiry(subject, r)]
    for _ in range(3):
        wait_until(lambda: expiry(subject, r) > times[-1])
        times.append(expiry(subject, r))

    gaps = [later - earlier for earlier, later in pairwise(times[1:])]
    assert 900 <= min(gaps) < 1400


@pytest.mark.slow
def test_a_reservation_that_is_not_kept_is_taken_over(
    make_subject: MakeSubject, mode: Mode, valkey_server: Server
) -> None:
    for policy, keep in ((SHORT, False), (Policy(lease=0.3, heartbeat=False), True)):
        subject = make_subject(mode, valkey_server, policy=policy)
        r = subject.claimed("acct_1", f"keep-{keep}", "f")
        if keep:
            subject.start_heartbeat(r)
        wait_until(partial(is_taken, subject, r.key))
        assert not r.held
        with pytest.raises(FencedOut):
            r.ensure_held()
        assert subject.at_work() == 0


@pytest.mark.parametrize("ending", ["complete", "fail", "release", "hold"])
def test_a_heartbeat_ends_with_the_attempt_and_never_revives_the_row(
    make_subject: MakeSubject, mode: Mode, valkey_server: Server, ending: str
) -> None:
    events: list[Event] = []
    subject = make_subject(mode, valkey_server, policy=SHORT, observers=[events.append])
    r = subject.claimed(*ROW, "f")
    subject.start_heartbeat(r)
    wait_until(subject.at_work)
    getattr(subject, ending)(*(r, ANSWER)[: 2 if ending in ("complete", "fail") else 1])
    left = state(subject, r)
    assert not r.held
    wait_until(lambda: subject.at_work() == 0)
    subject.start_heartbeat(r)  # too late
    wait_until(lambda: subject.at_work() == 0)

    assert state(subject, r) == left
    assert "fenced" not in [event.name for event in events]


@pytest.mark.slow
def test_a_heartbeat_ends_after_the_longest_hold_so_that_a_hung_handler_can_be_taken_over(
    make_subject: MakeSubject, mode: Mode, valkey_server: Server, clock: TurnedClock
) -> None:
    subject = make_subject(mode, valkey_server, policy=Policy(lease=2.5, max_hold=3.0))
    began = time.monotonic()
    r = subject.claimed(*ROW, "f")
    subject.start_heartbeat(r)
    wait_until(subject.at_work)
    wait_until(lambda: subject.at_work() == 0)
    assert 3.0 <= time.monotonic() - began < 15.0
    clock.turn(2.5)
    assert isinstance(subject.claim(*ROW, "f"), Reservation)

    with pytest.raises(FencedOut):
        subject.complete(r, ANSWER)
    assert not r.held


def test_a_heartbeat_that_is_fenced_says_so_and_leaves_the_successor_alone(
    make_subject: MakeSubject, mode: Mode, valkey_server: Server, clock: TurnedClock
) -> None:
    events: list[Event] = []
    subject = make_subject(mode, valkey_server, policy=SHORT, observers=[events.append])
    other = make_subject(mode, valkey_server, policy=Policy(lease=100))
    a = subject.claimed(*ROW, "f")
    subject.start_heartbeat(a)

    def taken() -> bool:
        clock.turn(1)
        return isinstance(other.claim(*ROW, "f"), Reservation)

    wait_until(taken)
    left = state(subject, a)
    wait_until(lambda: "fenced" in [event.name for event in events])
    assert not a.held
    with pytest.raises(FencedOut, match="no longer holds"):
        a.ensure_held()
    wait_until(lambda: subject.at_work() == 0)
    assert state(subject, a) == left
    with pytest.raises(FencedOut):
        subject.complete(a, ANSWER)  # finds out too, which is no news
    assert [event.name for event in events].count("fenced") == 1


def test_a_row_that_is_gone_ends_its_heartbeat_and_does_not_come_back(
    make_subject: MakeSubject, mode: Mode, valkey_server: Server
) -> None:
    subject = make_subject(mode, valkey_server, policy=SHORT)
    r = subject.claimed(*ROW, "f")
    subject.start_heartbeat(r)
    subject.client.delete(r.identity.row)
    wait_until(lambda: not r.held)
    wait_until(lambda: subject.at_work() == 0)

    assert subject.client.exists(r.identity.row) == 0


def test_a_reservation_is_not_held_during_an_outage_longer_than_its_lease_and_is_again_afterwards(
    make_subject: MakeSubject, mode: Mode, valkey_server: Server
) -> None:
    """Nobody took it over meanwhile, so its owner may renew it."""
    with Proxy(valkey_server.port) as proxy:
        subject = make_subject(mode, valkey_server, policy=SHORT, **through(proxy, mode))
        r = subject.claimed(*ROW, "f")
        subject.start_heartbeat(r)
        proxy.refuse()
        wait_until(lambda: not r.held)
        proxy.refuse(False)
        wait_until(lambda: r.held)
        subject.complete(r, ANSWER)


def renewed(subject: Subject, r: Reservation, end: int) -> bool:
    return expiry(subject, r) > end


@pytest.mark.slow
def test_one_thread_or_task_keeps_all_reservations(
    make_subject: MakeSubject, mode: Mode, valkey_server: Server
) -> None:
    subject = make_subject(mode, valkey_server, policy=Policy(lease=3.0))
    kept = [subject.claimed("acct_1", f"key-{i}", "f") for i in range(200)]
    for r in kept:
        subject.start_heartbeat(r)
    ends = {r.key: expiry(subject, r) for r in kept}
    for r in kept:
        wait_until(partial(renewed, subject, r, ends[r.key]))
    wait_until(lambda: subject.at_work() == 1)
    assert all(r.held for r in kept)
    for r in kept:
        subject.complete(r, ANSWER)
    wait_until(lambda: subject.at_work() == 0)


@pytest.mark.slow
def test_renewals_that_are_due_together_go_out_together(
    make_subject: MakeSubject, mode: Mode, valkey_server: Server
) -> None:
    subject = make_subject(mode, valkey_server, policy=Policy(lease=3.0))
    kept = [subject.claimed("acct_1", f"key-{i}", "f") for i in range(50)]
    for r in kept:
        r.lease.expires_at = kept[-1].lease.expires_at  # as if all had been claimed at the same time
        subject.start_heartbeat(r)
    started = subject.client.info("stats")["total_reads_processed"]
    ends = [expiry(subject, r) for r in kept]
    looks = 0

    def looked() -> bool:
        nonlocal looks
        looks += 1
        return renewed(subject, kept[-1], ends[-1])

    wait_until(looked)
    reads = subject.client.info("stats")["total_reads_processed"] - started - len(kept) - looks
    assert all(expiry(subject, r) > end for r, end in zip(kept, ends, strict=True))
    assert reads < 25


def test_a_beat_that_is_due_before_the_others_does_not_wait_for_them(
    make_subject: MakeSubject, mode: Mode, valkey_server: Server
) -> None:
    subject = make_subject(mode, valkey_server, policy=Policy(lease=60.0))
    subject.start_heartbeat(subject.claimed("acct_1", "long", "f"))
    wait_until(subject.at_work)
    short = subject.claimed("acct_1", "short", "f", lease=1.2)
    end = expiry(subject, short)
    subject.start_heartbeat(short)

    wait_until(lambda: renewed(subject, short, end))
    assert short.held


@pytest.mark.slow
def test_no_lease_is_renewed_when_the_ledger_is_closed_or_after_that(
    make_subject: MakeSubject, mode: Mode, valkey_server: Server
) -> None:
    subject = make_subject(mode, valkey_server, policy=BUSY)
    beating, waiting = subject.claimed("acct_1", "beating", "f"), subject.claimed("acct_1", "waiting", "f", lease=3.0)
    for r in (beating, waiting):
        subject.start_heartbeat(r)
    ends = expiry(subject, beating)
    wait_until(lambda: renewed(subject, beating, ends))
    before = [state(subject, r) for r in (beating, waiting)]
    subject.flush()
    assert subject.at_work() == 0

    another = subject.claimed("acct_1", "another", "f")
    ends = expiry(subject, another)
    subject.start_heartbeat(another)
    wait_until(lambda: renewed(subject, another, ends + 1000))  # by then the others would have been due
    assert [state(subject, r) for r in (beating, waiting)] == before


def test_a_renewal_that_was_under_way_when_the_attempt_ended_has_nothing_to_say(
    make_subject: MakeSubject, valkey_server: Server
) -> None:
    subject = make_subject("sync", valkey_server)
    r = subject.claimed(*ROW, "f")
    flow = flows.heartbeat(lambda: r, BUSY)
    assert next(flow) == Sleep(0.0)
    assert isinstance(flow.send(r.lease.expires_at), Call)
    subject.complete(r, ANSWER)
    with pytest.raises(StopIteration):
        flow.send(Fenced())
    assert not r.lease.fenced


def test_what_the_garbage_collector_settles_while_a_heartbeat_is_started_does_not_lock_it_up(
    make_subject: MakeSubject, valkey_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = make_subject("sync", valkey_server)
    first, second = (subject.claimed("acct_1", key, "f") for key in ("first", "second"))
    first_heartbeat_at = Lease.first_heartbeat_at.fget  # type: ignore[attr-defined]
    collected: list[Lease] = []

    def collecting(lease: Lease) -> float:
        if not collected:
            collected.append(lease)
            subject.start_heartbeat(second)
        return float(first_heartbeat_at(lease))

    monkeypatch.setattr(Lease, "first_heartbeat_at", property(collecting))
    thread = threading.Thread(target=subject.start_heartbeat, args=(first,), daemon=True)
    thread.start()
    thread.join(5.0)
    assert not thread.is_alive()
    assert collected == [first.lease]


def test_nothing_is_kept_in_memory_of_reservations_that_ended(
    make_subject: MakeSubject, mode: Mode, valkey_server: Server
) -> None:
    subject = make_subject(mode, valkey_server)
    for i in range(100):
        r = subject.claimed("acct_1", f"key-{i}", "f")
        subject.start_heartbeat(r)
        subject.complete(r, ANSWER)
    gc.collect()

    ours = f"{subject.namespace}:"
    kept = [thing for thing in gc.get_objects() if isinstance(thing, Reservation)]
    assert [r.key for r in kept if r.identity.row.startswith(ours)] == ["key-99"]


# Completions that are tried again


def through(proxy: Proxy, mode: Mode) -> dict[str, Any]:
    retry = Retry(NoBackoff(), 0) if mode == "sync" else redis.asyncio.retry.Retry(NoBackoff(), 0)
    return {"port": proxy.port, "retry": retry, "socket_timeout": 5.0}


@pytest.fixture
def proxy(valkey_server: Server) -> Iterator[Proxy]:
    with Proxy(valkey_server.port) as made:
        yield made


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def far(make_subject: MakeSubject, mode: Mode, valkey_server: Server, proxy: Proxy, events: list[Event]) -> Subject:
    return make_subject(mode, valkey_server, observers=[events.append], **through(proxy, mode))


def names(events: list[Event]) -> list[str]:
    return [event.name for event in events if event.name not in ("claimed", "unavailable")]


@pytest.mark.parametrize("mode", ["sync"])
@pytest.mark.parametrize("then", ["start_heartbeat", "close"])
def test_an_answer_waits_where_no_thread_can_be_started(
    far: Subject, proxy: Proxy, events: list[Event], caplog: pytest.LogCaptureFixture, then: str
) -> None:
    """By a process that has as many as it may have; or by one that is ending, from Python 3.12 on."""

    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("idemredis"):
            raise RuntimeError("can't start new thread")
        start(thread)

    first, second = (far.claimed("acct_1", key, "f") for key in ("first", "second"))
    with pytest.MonkeyPatch.context() as patch:
        proxy.refuse()
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(LedgerUnavailable):
            far.complete(first, ANSWER)
    assert "can't start new thread" in caplog.text
    proxy.refuse(False)
    far.flush() if then == "close" else far.start_heartbeat(second)

    wait_until(lambda: names(events) == ["completed"])
    assert far.claim("acct_1", "first", "f") == Replay(ANSWER, 1, False)


@pytest.mark.parametrize(("bound", "value", "lost"), [("MAX_COMPLETIONS", 2, 1), ("MAX_BYTES", 9, 1)])
def test_an_answer_for_which_there_is_no_room_is_lost_and_that_is_told(
    far: Subject, proxy: Proxy, events: list[Event], monkeypatch: pytest.MonkeyPatch, bound: str, value: int, lost: int
) -> None:
    monkeypatch.setattr(agenda, bound, value)
    held = [far.claimed("acct_1", f"key-{i}", "f") for i in range(3)]
    proxy.refuse()
    for r in held:
        with pytest.raises(LedgerUnavailable):
            far.complete(r, ANSWER)
    assert names(events) == ["completion_lost"] * lost
    proxy.refuse(False)

    wait_until(lambda: names(events)[lost:] == ["completed"] * (3 - lost))
    assert not isinstance(far.claim("acct_1", "key-2", "f"), Replay)


def test_an_answer_that_cannot_be_stored_when_the_ledger_closes_is_lost_and_that_is_told(
    far: Subject, proxy: Proxy, events: list[Event], caplog: pytest.LogCaptureFixture
) -> None:
    r = far.claimed(*ROW, "f")
    proxy.refuse()
    with pytest.raises(LedgerUnavailable):
        far.complete(r, ANSWER)
    far.flush()

    assert names(events) == ["completion_lost"]
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record.getMessage().partition(":")[0] for record in errors] == ["completion_lost"]


def test_an_answer_is_stored_when_the_ledger_closes(far: Subject, proxy: Proxy, events: list[Event]) -> None:
    r = far.claimed(*ROW, "f")
    proxy.refuse()
    with pytest.raises(LedgerUnavailable):
        far.complete(r, ANSWER)
    proxy.refuse(False)
    far.flush()

    assert names(events) == ["completed"]
    assert far.fields(r.identity.row)[b"response_body"] == b"done"


def test_a_ledger_that_was_closed_goes_on_when_it_is_used_again(
    far: Subject, proxy: Proxy, events: list[Event]
) -> None:
    far.flush()
    far.flush()
    r = far.claimed(*ROW, "f")
    proxy.refuse()
    with pytest.raises(LedgerUnavailable):
        far.complete(r, ANSWER)
    proxy.refuse(False)

    wait_until(lambda: names(events) == ["completed"])


# Who is told


def test_observers_are_told_what_happens_to_a_row(
    make_subject: MakeSubject, mode: Mode, server: AnyServer, clock: TurnedClock
) -> None:
    events: list[Event] = []
    subject = make_subject(mode, server, observers=[events.append])
    a = subject.claimed(*ROW, "f", operation="charge")
    subject.claim(*ROW, "f", operation="charge")
    subject.claim(*ROW, "g", operation="charge")
    clock.turn(Policy().lease)
    b = subject.claimed(*ROW, "f", operation="charge")
    with pytest.raises(FencedOut):
        subject.complete(a, ANSWER)
    subject.complete(b, ANSWER.without_body("too_large"))
    subject.claim(*ROW, "f", operation="charge")
    c = subject.claimed("acct_1", "key-2", "f")
    subject.release(c)
    d = subject.claimed("acct_1", "key-2", "f")
    subject.hold(d, for_review=True)
    subject.fail(d, ANSWER)

    assert [(event.name, event.generation) for event in events] == [
        ("claimed", 1),
        ("in_progress", 0),
        ("reused", 0),
        ("taken_over", 2),
        ("fenced", 1),
        ("completed", 2),
        ("not_stored", 2),
        ("replayed", 2),
        ("claimed", 1),
        ("released", 1),
        ("retried", 2),
        ("held_for_review", 2),
        ("failed", 2),
    ]
    assert {(event.operation, event.principal, event.key) for event in events} == {
        ("charge", None, None),
        ("", None, None),
    }
    assert len({event.digest for event in events}) == 2
    assert all(len(event.digest) == 12 and 0 <= event.seconds < 10 for event in events)


def test_raw_keys_and_principals_are_told_only_when_asked_for(
    make_subject: MakeSubject, mode: Mode, valkey_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "idemredis")
    told: list[Event] = []
    for log_keys in (False, True):
        subject = make_subject(mode, valkey_server, observers=[told.append], log_keys=log_keys)
        subject.claim("principal-secret", "key-secret", "f")
        if not log_keys:
            assert "secret" not in caplog.text
            assert all("secret" not in repr(record.__dict__) for record in caplog.records)

    assert [(event.principal, event.key) for event in told] == [(None, None), ("principal-secret", "key-secret")]


def test_an_observer_that_fails_breaks_nothing_and_is_logged_once(
    make_subject: MakeSubject, mode: Mode, valkey_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Event] = []

    def broken(event: Event) -> None:
        raise RuntimeError("no")

    subject = make_subject(mode, valkey_server, observers=[broken, events.append])
    for i in range(3):
        subject.complete(subject.claimed("acct_1", f"key-{i}", "f"), ANSWER)

    assert [event.name for event in events] == ["claimed", "completed"] * 3
    assert sum("further failures of it are not logged" in record.getMessage() for record in caplog.records) == 1


def test_what_may_have_run_twice_is_one_loud_line(
    make_subject: MakeSubject, mode: Mode, valkey_server: Server, clock: TurnedClock, caplog: pytest.LogCaptureFixture
) -> None:
    subject = make_subject(mode, valkey_server)
    a = subject.claimed(*ROW, "f")
    clock.turn(Policy().lease)
    subject.claimed(*ROW, "f")
    with pytest.raises(FencedOut):
        subject.complete(a, ANSWER)

    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert errors[0].startswith("fenced: row ")
    assert "generation 1" in errors[0]
    assert "twice" in errors[0]
