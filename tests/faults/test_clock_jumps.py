"""What happens when the server's clock jumps by an hour while a row is held: the table in docs/reliability.md."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from idemredis import FencedOut, InProgress, Ledger, Policy, Replay, Reservation, StoredResponse
from tests.support.clock import SLACK, expires_at, in_progress
from tests.support.moved_clock import MovedServer, moved_server
from tests.support.servers import start
from tests.support.started import Servers
from tests.support.subject import MakeSubject, Mode, Subject
from tests.support.waiting import wait_until

HOUR = 3600
POLICY = Policy()
FIRST, SECOND = StoredResponse(201, (), b"first"), StoredResponse(201, (), b"second")
ROW = ("acct_1", "key-1", "f")


@pytest.fixture(scope="module", params=["valkey", "redis"])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MovedServer]:
    with moved_server(request.param, tmp_path_factory.mktemp("moved")) as server:
        yield server


@pytest.fixture
def server(started: MovedServer, every_key_left_expires: Servers) -> Iterator[MovedServer]:
    every_key_left_expires.watch(started)
    yield started
    started.jump_to(0)


@pytest.fixture
def subject(make_subject: MakeSubject, mode: Mode, server: MovedServer) -> Subject:
    return make_subject(mode, server)


def test_forward_in_a_lease_the_next_claim_takes_over_and_the_first_result_is_refused(
    subject: Subject, server: MovedServer
) -> None:
    a = subject.claimed(*ROW)
    server.jump_to(HOUR)
    b = subject.claimed(*ROW)
    assert b.generation == 2
    with pytest.raises(FencedOut):
        subject.complete(a, FIRST)
    subject.complete(b, SECOND)

    assert subject.claim(*ROW) == Replay(SECOND, 2, False)


def test_forward_in_a_lease_an_attempt_that_nobody_took_over_still_stores_its_result(
    subject: Subject, server: MovedServer
) -> None:
    a = subject.claimed(*ROW)
    server.jump_to(HOUR)
    subject.complete(a, FIRST)

    assert subject.claim(*ROW) == Replay(FIRST, 1, False)


def test_forward_a_heartbeat_that_comes_before_the_next_claim_keeps_the_row(
    make_subject: MakeSubject, mode: Mode, server: MovedServer
) -> None:
    subject = make_subject(mode, server, policy=Policy(lease=3.0))
    a = subject.claimed(*ROW)
    server.jump_to(HOUR)
    left = expires_at(subject.client, a.identity.row)
    subject.start_heartbeat(a)
    wait_until(lambda: expires_at(subject.client, a.identity.row) > left + HOUR * 1000 / 2)

    assert in_progress(subject.claim(*ROW), 3.0)
    subject.complete(a, FIRST)
    assert subject.claim(*ROW) == Replay(FIRST, 1, False)


def test_back_in_a_lease_the_attempt_keeps_its_row_and_no_lease_is_longer_than_it_was(
    subject: Subject, server: MovedServer
) -> None:
    a = subject.claimed(*ROW)
    server.jump_to(-HOUR)
    assert in_progress(subject.claim(*ROW), POLICY.lease)
    subject.renew(a)
    assert in_progress(subject.claim(*ROW), POLICY.lease)
    subject.complete(a, FIRST)

    assert subject.claim(*ROW) == Replay(FIRST, 1, False)
    assert 0 < POLICY.retention - subject.pttl(a.identity.row) / 1000 + SLACK < 2 * SLACK


def test_back_a_released_row_is_taken_over_at_once(subject: Subject, server: MovedServer) -> None:
    subject.release(subject.claimed(*ROW))
    server.jump_to(-HOUR)
    b = subject.claimed(*ROW)

    assert b.generation == 2
    subject.complete(b, SECOND)
    assert subject.claim(*ROW) == Replay(SECOND, 2, False)


def test_back_a_dead_attempt_blocks_its_key_until_the_clock_is_where_it_was_and_for_its_lease(
    subject: Subject, server: MovedServer
) -> None:
    subject.claimed(*ROW)
    server.jump_to(-HOUR)
    server.jump_to(-HOUR // 2)
    assert in_progress(subject.claim(*ROW), POLICY.lease)
    server.jump_to(int(POLICY.lease) + 1)

    assert subject.claimed(*ROW).generation == 2


def test_back_a_person_can_end_the_lease_of_a_dead_attempt(subject: Subject, server: MovedServer) -> None:
    a = subject.claimed(*ROW)
    server.jump_to(-HOUR)
    subject.release(a)

    assert subject.claimed(*ROW).generation == 2


def test_forward_past_the_retention_the_row_is_gone_and_the_late_result_is_refused(
    make_subject: MakeSubject, mode: Mode, server: MovedServer
) -> None:
    subject = make_subject(mode, server, policy=Policy(retention=HOUR / 2))
    a = subject.claimed(*ROW)
    server.jump_to(HOUR)
    with pytest.raises(FencedOut):
        subject.complete(a, FIRST)

    assert subject.claimed(*ROW).generation == 1


def test_after_a_failover_to_a_replica_5_s_ahead_a_shorter_lease_is_taken_over_at_once_and_the_default_holds(
    make_subject: MakeSubject, server: MovedServer, tmp_path: Path
) -> None:
    """The README's row: `held` goes by the local clock, and the new primary's clock decides."""
    quick = ("--repl-diskless-sync-delay", "0")
    with ExitStack() as stack:
        primary = start(server.kind, tmp_path, *quick)
        stack.callback(primary.stop)
        new = stack.enter_context(server.client())
        new.replicaof("127.0.0.1", primary.port)
        with primary.client() as old:
            wait_until(lambda: old.set("probe", 1, px=60_000) and old.wait(1, 500) == 1)
        server.jump_to(5)
        before = make_subject("sync", primary, policy=Policy(lease=4.5))
        short = before.claimed("acct_1", "short", "f")
        default = before.claimed("acct_1", "default", "f", lease=POLICY.lease)
        wait_until(lambda: new.exists(short.row, default.row) == 2)
        new.replicaof("NO", "ONE")
        after = make_subject("sync", server)
        assert after.claimed("acct_1", "short", "f").generation == 2
        assert short.held
        assert in_progress(after.claim("acct_1", "default", "f"), POLICY.lease - 5.0)
        assert default.held


def test_no_result_is_stored_twice_while_the_clock_jumps(server: MovedServer, namespace: str) -> None:
    """Eight threads race for forty keys; each lets the clock jump between its claim and its completion."""
    stored: Counter[str] = Counter()
    replayed: dict[str, set[bytes]] = {f"key-{i}": set() for i in range(40)}
    lock = threading.Lock()

    def work(seed: int) -> None:
        dice = random.Random(seed)
        with server.client() as client:
            ledger = Ledger(client, Policy(heartbeat=False), namespace)
            for key in dice.sample(sorted(replayed), len(replayed)):
                while not isinstance(outcome := ledger.claim("acct_1", key, "f"), Replay):
                    with lock:  # so that it has jumped before the next one does
                        server.jump_to(dice.choice((-HOUR, 0, HOUR)))
                    if isinstance(outcome, InProgress):
                        continue
                    assert isinstance(outcome, Reservation)
                    try:
                        ledger.complete(outcome, StoredResponse(201, (), b"%d by %d" % (outcome.generation, seed)))
                    except FencedOut:
                        continue
                    with lock:
                        stored[key] += 1
                with lock:
                    replayed[key].add(outcome.response.body)
            ledger.close()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()

    assert set(stored.values()) == {1}
    assert len(stored) == len(replayed)
    assert {len(bodies) for bodies in replayed.values()} == {1}
