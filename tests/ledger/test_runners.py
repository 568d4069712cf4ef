"""The threads and tasks that run background work: what one flow does to another, and what happens when one dies."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import redis.asyncio

from idemredis import (
    AsyncLedger,
    Event,
    LedgerUnavailable,
    NotDurable,
    Policy,
    Reservation,
    StoredResponse,
)
from idemredis.core import flows
from idemredis.core.flows import Emit, Flow, Sleep
from idemredis.core.keys import identify
from idemredis.core.operations import Call, read
from idemredis.core.reservation import Lease
from idemredis.ledger import agenda
from idemredis.ledger.agenda import Agenda, Batch, Job, Room
from tests.support.proxy import Proxy
from tests.support.servers import Server
from tests.support.subject import MakeSubject, Mode, Subject
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

ANSWER = StoredResponse(201, (("content-type", "text/plain"),), b"done")
BUSY = Policy(lease=3.0)
"""Long enough for a heartbeat to be in time on a machine that is busy with other tests."""


@pytest.fixture
def proxy(valkey_server: Server) -> Iterator[Proxy]:
    with Proxy(valkey_server.port) as made:
        yield made


@pytest.fixture
def events() -> list[Event]:
    return []


def names(events: list[Event]) -> list[str]:
    return [event.name for event in events if event.name not in ("claimed", "unavailable")]


def expiry(subject: Subject, r: Reservation) -> int:
    at: int = subject.client.pexpiretime(r.row)
    return at


def is_renewed(subject: Subject, r: Reservation, by: int) -> Callable[[], bool]:
    """Return a function that tells whether the row expires later than now by so many milliseconds."""
    until = expiry(subject, r) + by
    return lambda: expiry(subject, r) >= until


async def until(predicate: Callable[[], object]) -> None:
    """Wait in an event loop, whose tasks go on meanwhile."""
    async with asyncio.timeout(20.0):
        while not predicate():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def is_past(lease: Lease, ends: float) -> bool:
    return lease.expires_at > ends


def block(seconds: float) -> None:
    """Do what no other task can run beside."""
    time.sleep(seconds)


# Room for each kind


def test_releases_of_refused_claims_take_no_room_from_responses(
    make_subject: MakeSubject,
    mode: Mode,
    valkey_server: Server,
    proxy: Proxy,
    events: list[Event],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for limit in ("MAX_RELEASES", "MAX_COMPLETIONS", "MAX_FLOWS"):
        monkeypatch.setattr(agenda, limit, 2, raising=False)
    subject = make_subject(mode, valkey_server, url=proxy.url, observers=[events.append])
    held = [subject.claimed("acct_1", f"done-{i}", "f") for i in range(2)]
    proxy.hold()
    for call in [subject.begin("claim", "acct_1", f"refused-{i}", "f") for i in range(3)]:
        assert isinstance(call.exception(20.0), LedgerUnavailable)
    for call in [subject.begin("complete", r, ANSWER) for r in held]:
        assert isinstance(call.exception(20.0), LedgerUnavailable)
    assert names(events) == []
    proxy.hold(False)

    wait_until(lambda: names(events) == ["completed"] * 2)


def test_a_claim_that_was_not_sent_leaves_nothing_to_release() -> None:
    identity = identify("idem", "acct_1", "key-1", "")
    claim = flows.claim(
        identity, "a" * 16, "f", lease=30.0, wait=0.0, takeover=True, policy=Policy(), created_at=0.0, route=""
    )
    assert isinstance(claim.send(None), Call)
    assert claim.throw(LedgerUnavailable("refused", unknown=False)) == Emit("unavailable", identity)
    with pytest.raises(LedgerUnavailable):
        claim.send(None)


# A thread or task that dies


class Killed(BaseException):
    """What ends a thread or task from outside, as `GreenletExit` does."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", [SystemExit, Killed])
def test_an_observer_that_ends_the_thread_or_task_ends_no_heartbeat(
    make_subject: MakeSubject,
    mode: Mode,
    valkey_server: Server,
    caplog: pytest.LogCaptureFixture,
    kind: type[BaseException],
) -> None:
    told: list[str] = []

    def exits(event: Event) -> None:
        if event.name == "fenced":
            told.append(event.name)
            raise kind(3)

    subject = make_subject(mode, valkey_server, policy=BUSY, observers=[exits])
    rows = [subject.claimed("acct_1", f"k{i}", "f") for i in range(3)]
    for r in rows:
        r.lease.expires_at = rows[0].lease.expires_at  # so that they beat in one batch
        subject.start_heartbeat(r)
    subject.client.delete(rows[1].row)
    wait_until(lambda: told == ["fenced"])
    renewed = [is_renewed(subject, r, 3000) for r in (rows[0], rows[2])]
    wait_until(lambda: all(still() for still in renewed))
    assert rows[0].held
    assert rows[2].held
    assert kind.__name__ in caplog.text or mode == "async"


class Timer:
    """An observer that also measures scripts."""

    def __call__(self, event: Event) -> None:
        """Ignore the event."""

    def timed(self, script: str, seconds: float, outcome: str) -> None:
        if script == "renew":
            raise SystemExit(3)


@pytest.mark.parametrize("mode", ["sync"])
def test_an_observer_that_exits_when_a_renewal_is_timed_ends_no_heartbeat(
    make_subject: MakeSubject, mode: Mode, valkey_server: Server
) -> None:
    subject = make_subject(mode, valkey_server, policy=BUSY, observers=[Timer()])
    r = subject.claimed("acct_1", "k", "f")
    subject.start_heartbeat(r)
    wait_until(is_renewed(subject, r, 3000))


def test_a_task_that_is_cancelled_is_replaced_and_no_lease_is_lost(valkey_server: Server, namespace: str) -> None:
    async def main() -> None:
        ledger = AsyncLedger(valkey_server.async_client(), BUSY, namespace)
        r = await ledger.claim("acct_1", "k", "f")
        assert isinstance(r, Reservation)
        await ledger.start_heartbeat(r)
        await asyncio.sleep(0)
        [task] = [task for task in asyncio.all_tasks() if task.get_name() == f"idemredis {namespace}"]
        task.cancel()
        await asyncio.wait([task])
        ends = r.lease.expires_at
        await until(lambda: r.lease.expires_at >= ends + 3.0)
        assert r.held
        await ledger.complete(r, ANSWER)
        await ledger.close()
        await ledger.client.aclose()

    asyncio.run(main())


# Renewals wait for nothing


def test_no_renewal_waits_for_completions_that_wait_for_replicas(
    make_subject: MakeSubject, mode: Mode, valkey_server: Server
) -> None:
    """Twelve completions wait for 0.5 s each, in each turn; the lease is shorter than that."""
    plain = make_subject(mode, valkey_server, policy=BUSY)
    waiting = [plain.claimed("acct_1", f"done-{i}", "f", lease=100.0) for i in range(12)]
    durable = make_subject(mode, valkey_server, policy=Policy(lease=3.0, min_replicas=1, replica_timeout=0.5))
    for call in [durable.begin("complete", r, ANSWER) for r in waiting]:
        assert isinstance(call.exception(20.0), NotDurable)
    r = plain.claimed("acct_1", "k", "f")
    durable.start_heartbeat(r)
    renewed = is_renewed(durable, r, 6000)

    def renewed_and_held() -> bool:
        assert r.held
        return renewed()

    wait_until(renewed_and_held, 30.0)


# Heartbeats that are late


def test_work_that_starves_its_heartbeat_says_so_once(valkey_server: Server, namespace: str) -> None:
    events: list[str] = []

    async def main() -> None:
        ledger = AsyncLedger(
            valkey_server.async_client(), BUSY, namespace, observers=[lambda event: events.append(event.name)]
        )
        async with ledger.reserve("worker", "k", "f") as r:
            for _ in range(2):
                block(2.2)  # blocks the loop for more than two thirds of the lease
                ends = r.lease.expires_at
                await until(partial(is_past, r.lease, ends))
        await ledger.close()
        await ledger.client.aclose()

    asyncio.run(main())
    assert events == ["claimed", "heartbeat_late", "completed"]


def test_work_that_starves_its_heartbeat_to_its_end_says_so(valkey_server: Server, namespace: str) -> None:
    events: list[str] = []

    async def main() -> None:
        ledger = AsyncLedger(
            valkey_server.async_client(), BUSY, namespace, observers=[lambda event: events.append(event.name)]
        )
        async with ledger.reserve("worker", "k", "f"):
            block(2.2)
        await ledger.close()
        await ledger.client.aclose()

    asyncio.run(main())
    assert events == ["claimed", "heartbeat_late", "completed"]


def test_an_outage_is_not_the_fault_of_the_work(
    make_subject: MakeSubject, mode: Mode, valkey_server: Server, proxy: Proxy, events: list[Event]
) -> None:
    subject = make_subject(mode, valkey_server, policy=Policy(lease=0.9), url=proxy.url, observers=[events.append])
    r = subject.claimed("acct_1", "k", "f")
    subject.start_heartbeat(r)
    proxy.refuse()
    wait_until(lambda: not r.held)
    proxy.refuse(False)
    wait_until(lambda: r.held)
    subject.complete(r, ANSWER)
    assert names(events) == ["completed"]


def beats(r: Reservation, *times: float) -> list[str]:
    """Return the events of a heartbeat that wakes at these times, in seconds after the claim; Redis always renews."""
    began = r.lease.expires_at - r.lease.duration
    r.lease.heartbeat_due = r.lease.first_heartbeat_at
    flow = flows.heartbeat(lambda: r, Policy(max_hold=1000))
    seen: list[str] = []
    step: Any = next(flow)
    for now in times:
        assert isinstance(step, Sleep)
        step = flow.send(began + now)
        if isinstance(step, Emit):
            seen.append(step.event)
            step = flow.send(None)
        assert isinstance(step, Call)
        step = flow.send(step.decode([b"renewed"], began + now))
    return seen


@pytest.mark.parametrize(
    ("times", "seen"),
    [
        ((10.0, 20.0, 30.0), []),
        ((19.9, 39.8), []),
        ((20.0, 40.0), ["heartbeat_late"]),
        ((10.0, 45.0, 90.0), ["heartbeat_late"]),
    ],
)
def test_a_heartbeat_is_late_a_third_of_the_lease_after_it_was_due(
    make_subject: MakeSubject, valkey_server: Server, times: tuple[float, ...], seen: list[str]
) -> None:
    r = make_subject("sync", valkey_server).claimed("acct_1", "k", "f", lease=30.0)
    assert beats(r, *times) == seen


# Reservations that nobody has


def test_no_heartbeat_beats_for_a_reservation_that_nobody_has_any_more(
    make_subject: MakeSubject, mode: Mode, valkey_server: Server
) -> None:
    subject = make_subject(mode, valkey_server, policy=Policy(lease=1.5))
    r = subject.claimed("acct_1", "k", "f")
    subject.start_heartbeat(r)
    wait_until(is_renewed(subject, r, 500))  # its flow exists and sleeps
    del r
    gc.collect()
    generation: Any = wait_until(lambda: getattr(subject.claim("acct_1", "k", "f"), "generation", 0))
    assert generation == 2


# Closing


def sleeping_then_calling(log: list[str]) -> Flow[None]:
    try:
        yield Sleep(0.0)
        yield Sleep(60.0)
        log.append("woke")
    except LedgerUnavailable:
        log.append("was thrown into its sleep")
        raise


def asking_twice(log: list[str]) -> Flow[None]:
    yield Sleep(0.0)
    for _ in range(2):
        try:
            yield read(identify("idem", "acct_1", "k", ""))
        except LedgerUnavailable:
            log.append("no reply")
    yield Sleep(60.0)


class Runner:
    def __init__(self) -> None:
        self.agenda = Agenda()


def test_closing_throws_into_no_flow_that_sleeps_while_another_asks_again(caplog: pytest.LogCaptureFixture) -> None:
    log: list[str] = []
    jobs = [Job(sleeping_then_calling(log), "completion"), Job(asking_twice(log), "heartbeat")]
    for job in jobs:
        next(job.flow)
    batch = Batch(jobs)
    batch.wake(lambda emit: None)
    batch.advance([LedgerUnavailable("lost")], lambda emit: None)  # the second one asks again
    assert len(batch.calls) == 1
    batch.interrupt("closing", lambda emit: None)
    assert log == ["no reply", "no reply"]
    runner = Runner()
    batch.put_back(Room(), lambda job: runner)
    assert runner.agenda.clear() == [jobs[0]]
    assert caplog.records == []


def test_what_a_hung_server_keeps_from_being_stored_is_told_when_the_ledger_closes(
    make_subject: MakeSubject, mode: Mode, valkey_server: Server, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Event] = []
    policy = Policy(lease=0.6)
    subject = make_subject(mode, valkey_server, policy=policy, url=proxy.url, observers=[events.append])
    beating, done = subject.claimed("acct_1", "beating", "f"), subject.claimed("acct_1", "done", "f")
    subject.start_heartbeat(beating)
    proxy.hold()
    with pytest.raises(LedgerUnavailable):
        subject.complete(done, ANSWER)
    subject.flush()
    proxy.hold(False)
    assert names(events) == ["completion_lost"]
    assert [r for r in caplog.records if r.levelno >= logging.ERROR and "completion_lost" not in r.getMessage()] == []


# Cancelled tasks


class Swallowing(redis.asyncio.Connection):
    """A connection that goes on when its task is cancelled, as `asyncio.wait_for` does on Python 3.11."""

    async def read_response(self, *args: Any, **options: Any) -> Any:
        reading = asyncio.ensure_future(super().read_response(*args, **options))
        try:
            return await asyncio.shield(reading)
        except asyncio.CancelledError:
            return await reading


@pytest.mark.parametrize("call", ["claim", "complete"])
def test_a_cancellation_that_the_client_swallows_is_a_cancellation_all_the_same(
    valkey_server: Server, namespace: str, proxy: Proxy, call: str
) -> None:
    async def main() -> None:
        pool = redis.asyncio.ConnectionPool(connection_class=Swallowing, port=proxy.port)
        ledger = AsyncLedger(redis.asyncio.Redis(connection_pool=pool), BUSY, namespace, socket_timeout=20.0)
        with valkey_server.client() as look:

            def field(name: str) -> bytes | None:
                value: bytes | None = look.hget(f"{namespace}:acct_1:k", name)
                return value

            warm = await ledger.claim("acct_1", "warm", "f")  # connects, and the server knows the scripts
            assert isinstance(warm, Reservation)
            await ledger.complete(warm, ANSWER)
            r: Reservation | None = None
            if call == "complete":
                outcome = await ledger.claim("acct_1", "k", "f")
                assert isinstance(outcome, Reservation)
                r = outcome
            proxy.hold()
            task = asyncio.create_task(ledger.claim("acct_1", "k", "f") if r is None else ledger.complete(r, ANSWER))
            await until(lambda: field("status") == (b"pending" if r is None else b"completed"))
            task.cancel()
            await asyncio.sleep(0)
            proxy.hold(False)
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: r is not None or field("owner") == b"")
        await ledger.close()
        await pool.disconnect()

    asyncio.run(asyncio.wait_for(main(), 60.0))


def test_of_hundreds_of_cancelled_tasks_none_goes_on_and_no_row_stays_held(
    valkey_server: Server, namespace: str
) -> None:
    dice = random.Random(1)

    async def main() -> None:
        ledger = AsyncLedger.from_url(valkey_server.url, Policy(lease=60.0), namespace, socket_timeout=20.0)
        await ledger.read("acct_1", "k")
        cancelled: list[str] = []
        for turn in range(60):
            keys = [f"k{turn}-{i}" for i in range(10)]
            tasks = {key: asyncio.create_task(ledger.claim("acct_1", key, "f")) for key in keys}
            for _ in range(dice.randrange(20)):  # turns of the loop
                await asyncio.sleep(0)
            cancelled += [key for key, task in tasks.items() if task.cancel()]
            ends = await asyncio.gather(*tasks.values(), return_exceptions=True)
            for key, end in zip(keys, ends, strict=True):
                assert isinstance(end, asyncio.CancelledError if key in cancelled else Reservation), (key, end)
        assert len(cancelled) > 100
        with valkey_server.client() as look:
            await until(lambda: not any(look.hget(f"{namespace}:acct_1:{key}", "owner") for key in cancelled))
        await ledger.close()

    asyncio.run(asyncio.wait_for(main(), 100.0))
