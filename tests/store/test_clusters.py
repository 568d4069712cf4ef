"""A cluster, a primary found by Sentinel, and writes that replicas must acknowledge."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest
import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.asyncio.sentinel
import redis.sentinel

from idemredis import (
    AsyncLedger,
    ConfigurationError,
    CorruptRow,
    Event,
    FencedOut,
    InProgress,
    Ledger,
    LedgerUnavailable,
    NotDurable,
    Policy,
    Replay,
    Reservation,
    Reused,
    StoredResponse,
)
from idemredis.core import operations
from idemredis.core.keys import identify
from idemredis.core.outcomes import Done, Fenced, Renewed
from idemredis.core.scripts import load
from idemredis.store.cluster import wire
from idemredis.store.evaluate import evaluate
from idemredis.testing import AsyncClock, Clock
from tests.support.clock import SLACK, TurnedClock, in_progress
from tests.support.clusters import SLOTS, Cluster, connect_often, keys_in, moving
from tests.support.servers import Server, valkey
from tests.support.started import Servers
from tests.support.subject import MakeSubject, Mode, Subject
from tests.support.waiting import wait_until
from tests.support.wiretap import Words, tap

ROW = ("acct_1", "key-1")
LEASE = Policy().lease
ANSWER = StoredResponse(201, (("content-type", "text/plain"),), b"\xffdone")


def test_a_ledger_works_on_a_cluster(make_subject: MakeSubject, mode: Mode, cluster: Cluster) -> None:
    subject = make_subject(mode, cluster)
    for i in range(20):
        who = (f"acct_{i}", "key-1")
        a = subject.claimed(*who, "f")
        assert in_progress(subject.claim(*who, "f"), LEASE)
        assert subject.claim(*who, "g") == Reused()
        subject.checkpoint(a, "charged", i)
        subject.renew(a)
        subject.release(a)
        b = subject.claimed(*who, "f")
        assert (b.generation, b.last_checkpoint) == (2, ("charged", i))
        with pytest.raises(FencedOut):
            subject.complete(a, ANSWER)
        subject.complete(b, ANSWER)
        assert subject.claim(*who, "f") == Replay(ANSWER, 2, False)
        row = subject.read(*who)
        assert row is not None
        assert row.response == ANSWER

    used = [node for node in cluster.nodes if dbsize(node)]
    assert len(used) == 3


def test_rows_grow_older_on_every_node_of_a_cluster_and_each_once(
    make_subject: MakeSubject, mode: Mode, cluster: Cluster, clock: TurnedClock
) -> None:
    subject = make_subject(mode, cluster)

    def whole_cluster() -> None:
        with cluster.client() as client:
            Clock(Ledger(client, namespace=subject.namespace)).turn(LEASE)

    async def whole_cluster_in_asyncio() -> None:
        async with cluster.async_client() as client:
            await AsyncClock(AsyncLedger(client, namespace=subject.namespace)).turn(LEASE)

    turns: list[Callable[[], object]] = [
        lambda: clock.turn(LEASE),  # node by node
        whole_cluster,
        lambda: asyncio.run(whole_cluster_in_asyncio()),
    ]
    for generation, turn in enumerate(turns, 1):
        for i in range(40):
            assert subject.claimed(f"acct_{i}", "key-1", "f").generation == generation
        turn()
        rows = [subject.read(f"acct_{i}", "key-1") for i in range(40)]
        assert all(row is not None and row.stale and LEASE <= row.age < LEASE + SLACK for row in rows)
    assert all(map(dbsize, cluster.nodes))


def dbsize(node: Server) -> int:
    with node.client() as client:
        return cast(int, client.dbsize())


def expiry(subject: Subject, r: Reservation) -> int:
    """When the row expires, in milliseconds by its server's clock: later with each renewal."""
    return cast(int, subject.client.pexpiretime(r.identity.row))


def test_heartbeats_on_a_cluster_reach_every_node(make_subject: MakeSubject, mode: Mode, cluster: Cluster) -> None:
    subject = make_subject(mode, cluster, policy=Policy(lease=6.0))
    kept = [subject.claimed(f"acct_{i}", "key-1", "f") for i in range(12)]
    for r in kept:
        subject.start_heartbeat(r)
    ends = {r.principal: expiry(subject, r) for r in kept}
    for r in kept:
        wait_until(lambda r=r: expiry(subject, r) > ends[r.principal])  # type: ignore[misc]
    assert all(r.held for r in kept)
    for r in kept:
        subject.complete(r, ANSWER)


def test_connections_that_a_server_closed_fail_no_call(
    make_subject: MakeSubject, mode: Mode, cluster: Cluster, namespace: str
) -> None:
    subject = make_subject(mode, cluster)
    keys = keys_in(0, namespace)
    connect_often(subject, cluster.nodes[0], list(islice(keys, 20)))
    with cluster.nodes[0].client() as admin:
        admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert subject.read("acct", next(keys)) is None


def test_a_connection_that_another_task_closed_fails_no_call(
    make_subject: MakeSubject, cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As redis-py 8.1 does it to the others when one task sees a node fail."""
    subject = make_subject("async", cluster)
    subject.claimed("acct", "k", "f")
    acquire, closed = redis.asyncio.cluster.ClusterNode.acquire_connection, iter([True])

    def once_closed(node: Any) -> Any:
        if next(closed, False):
            raise AttributeError("'NoneType' object has no attribute 'writelines'")
        return acquire(node)

    monkeypatch.setattr(redis.asyncio.cluster.ClusterNode, "acquire_connection", once_closed)
    assert subject.read("acct", "k") is not None


def test_a_claim_may_have_run_whatever_the_cluster_says_next(
    make_subject: MakeSubject, mode: Mode, cluster: Cluster, namespace: str
) -> None:
    """The node that the slot moves to hangs with the claim in its socket, and soon all that is said is CLUSTERDOWN."""
    subject = make_subject(mode, cluster, socket_timeout=1.0)
    from_, to = cluster.nodes[0], cluster.nodes[2]
    key = next(keys_in(0, namespace))
    subject.claimed("acct", next(keys_in(SLOTS - 1, namespace)), "f")  # connects to the node that will hang
    with moving(0, from_, to):
        to.freeze()
        try:
            with pytest.raises(LedgerUnavailable) as caught:
                subject.claim("acct", key, "f")
        finally:
            to.thaw()
        assert caught.value.unknown  # and so it is released in the background, should it be there
        for node in cluster.nodes:
            with node.client() as admin:
                wait_until(lambda admin=admin: admin.cluster("INFO")["cluster_state"] == "ok", 20.0)  # type: ignore[misc]
    with moving(0, to, from_):
        pass


def test_replicas_cannot_be_required_on_a_cluster(make_subject: MakeSubject, mode: Mode, cluster: Cluster) -> None:
    with pytest.raises(ConfigurationError, match="min_replicas=1 is not supported on a cluster"):
        make_subject(mode, cluster, policy=Policy(min_replicas=1))


def test_a_wait_for_replicas_that_is_not_shorter_than_the_socket_timeout_is_refused(
    make_subject: MakeSubject, mode: Mode, valkey_server: Server
) -> None:
    policy = Policy(min_replicas=1, replica_timeout=0.5)
    with pytest.raises(ConfigurationError, match=r"replica_timeout=0.5 s, socket_timeout=0.5 s"):
        make_subject(mode, valkey_server, policy=policy, socket_timeout=0.5)


# A primary and a replica


class Pair:
    """A primary with one replica, found by a sentinel."""

    kind = "sentinel"

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        self.primary = stack.enter_context(valkey(directory / "primary", "--repl-diskless-sync-delay", "0"))
        self.replica = stack.enter_context(
            valkey(directory / "replica", "--replicaof", "127.0.0.1", str(self.primary.port))
        )
        conf = directory / "sentinel.conf"
        conf.write_text(f"sentinel monitor idem 127.0.0.1 {self.primary.port} 1\n")
        self.sentinel = Server("sentinel", directory / "sentinel", [self.primary.command[0], str(conf), "--sentinel"])
        stack.callback(self.sentinel.stop)
        self.catch_up()

    def catch_up(self) -> None:
        with self.primary.client() as client:
            wait_until(partial(caught_up, client), 20.0)

    def client(self, **options: Any) -> Any:
        sentinel: Any = redis.sentinel.Sentinel([("127.0.0.1", self.sentinel.port)])  # type: ignore[no-untyped-call]
        return sentinel.master_for("idem", **options)

    def async_client(self, **options: Any) -> Any:
        made: Any = redis.asyncio.sentinel.Sentinel
        sentinel = made([("127.0.0.1", self.sentinel.port)])
        primary = sentinel.master_for("idem", **options)
        close = primary.aclose

        async def close_both() -> None:
            await close()
            for client in sentinel.sentinels:
                await client.aclose()

        primary.aclose = close_both
        return primary


def caught_up(primary: redis.Redis) -> bool:
    primary.set("probe", 1, px=60_000)
    return primary.wait(1, 1000) == 1


@pytest.fixture(scope="module")
def started_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack, tmp_path_factory.mktemp("pair"))


@pytest.fixture
def pair(started_pair: Pair, every_key_left_expires: Servers) -> Iterator[Pair]:
    every_key_left_expires.watch(started_pair.primary)
    yield started_pair
    started_pair.replica.thaw()
    started_pair.catch_up()


def test_a_ledger_works_on_a_primary_that_sentinel_found(make_subject: MakeSubject, mode: Mode, pair: Pair) -> None:
    subject = make_subject(mode, pair)
    subject.complete(subject.claimed(*ROW, "f"), ANSWER)

    assert subject.claim(*ROW, "f") == Replay(ANSWER, 1, False)


DURABLE = Policy(min_replicas=1, replica_timeout=2.0)


def test_a_claim_and_a_completion_that_a_replica_has_count(make_subject: MakeSubject, mode: Mode, pair: Pair) -> None:
    subject = make_subject(mode, pair.primary, policy=DURABLE)
    subject.client.script_flush()
    subject.complete(subject.claimed(*ROW, "f"), ANSWER)
    subject.fail(subject.claimed("acct_1", "key-2", "f"), ANSWER)

    with pair.replica.client() as client:
        assert client.hget(subject.row(*ROW), "status") == b"completed"
        assert client.hget(subject.row("acct_1", "key-2"), "status") == b"failed"


def test_a_claim_that_no_replica_has_does_not_count_and_is_released(
    make_subject: MakeSubject, mode: Mode, pair: Pair
) -> None:
    subject = make_subject(mode, pair.primary, policy=DURABLE)
    subject.claimed("acct_1", "warm", "f")
    pair.replica.freeze()
    with pytest.raises(NotDurable) as refused:
        subject.claim(*ROW, "f")
    assert (refused.value.acknowledged, refused.value.required) == (0, 1)
    assert isinstance(refused.value, LedgerUnavailable)
    wait_until(lambda: subject.fields(subject.row(*ROW))[b"owner"] == b"")

    pair.replica.thaw()
    pair.catch_up()
    assert subject.claimed(*ROW, "f").generation == 2


def test_a_takeover_that_would_not_count_is_not_made_and_the_owner_keeps_its_row(
    make_subject: MakeSubject, mode: Mode, pair: Pair, clock: TurnedClock
) -> None:
    """The owner is at work, and only its renewals were late."""
    events: list[Event] = []
    owner = make_subject(mode, pair.primary, policy=DURABLE, observers=[events.append])
    other = make_subject(mode, pair.primary, policy=DURABLE)  # its connection has written nothing
    r = owner.claimed(*ROW, "f")
    clock.turn(LEASE)
    before = owner.fields(r.row)
    pair.replica.freeze()
    with pytest.raises(NotDurable) as refused:
        other.claim(*ROW, "f")
    assert (refused.value.acknowledged, refused.value.required) == (0, 1)
    other.flush()  # would release what it had taken
    assert owner.fields(r.row) == before
    assert owner.pttl(r.row) <= (Policy().retention - LEASE) * 1000

    owner.renew(r)
    assert isinstance(other.claim(*ROW, "f"), InProgress)
    with pytest.raises(NotDurable):
        owner.complete(r, ANSWER)
    pair.replica.thaw()
    wait_until(lambda: [event.name for event in events] == ["claimed", "unavailable", "completed"])
    assert other.claim(*ROW, "f") == Replay(ANSWER, 1, False)


def test_a_claim_that_takes_nothing_over_is_told_that_the_row_is_stale_without_replicas_too(
    make_subject: MakeSubject, mode: Mode, pair: Pair, clock: TurnedClock
) -> None:
    subject = make_subject(mode, pair.primary, policy=DURABLE)
    subject.claimed(*ROW, "f")
    clock.turn(LEASE)
    pair.replica.freeze()
    assert subject.claim(*ROW, "f", takeover=False) == InProgress(0.0, stale=True)


class AtTheTakeover:
    """Runs something between the claim's reply and the takeover."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run
        self._sha = load()["takeover"].sha.encode()

    def sent(self, words: Words) -> Words:
        if self._sha in words:
            self._run()
        return words

    def replied(self, words: Words, reply: Any) -> Any:
        return reply


def test_a_takeover_whose_replica_stops_at_that_moment_does_not_count_and_is_released(
    make_subject: MakeSubject, mode: Mode, pair: Pair, clock: TurnedClock
) -> None:
    """What is left: the generation is not lowered again, and the attempt before is fenced."""
    subject = make_subject(mode, pair.primary, policy=DURABLE)
    r = subject.claimed(*ROW, "f")
    clock.turn(LEASE)
    other = make_subject(mode, pair.primary, policy=DURABLE)
    tap(other.ledger.client, AtTheTakeover(pair.replica.freeze))
    with pytest.raises(NotDurable):
        other.claim(*ROW, "f")
    wait_until(lambda: subject.fields(r.row)[b"owner"] == b"")
    with pytest.raises(FencedOut):
        subject.complete(r, ANSWER)

    pair.replica.thaw()
    pair.catch_up()
    assert subject.claimed(*ROW, "f").generation == 3


def test_thirty_completions_wait_for_a_stopped_replica_together_and_each_counts_once_the_replica_has_it(
    make_subject: MakeSubject, mode: Mode, pair: Pair
) -> None:
    statuses: list[bytes] = []
    with pair.replica.client() as replica:

        def look(event: Event) -> None:
            if event.name == "completed":
                assert event.key is not None
                statuses.append(replica.hget(subject.row("acct_1", event.key), "status"))

        keys = [f"done-{i}" for i in range(30)]
        subject = make_subject(mode, pair.primary, policy=Policy(lease=6.0, min_replicas=1, replica_timeout=0.5))
        durable = make_subject(
            mode,
            pair.primary,
            policy=Policy(lease=100.0, min_replicas=1, replica_timeout=0.5),
            observers=[look],
            log_keys=True,
        )
        waiting = [durable.claimed("acct_1", key, "f") for key in keys]
        r = subject.claimed(*ROW, "f")
        pair.replica.freeze()
        for completion in [durable.begin("complete", each, ANSWER) for each in waiting]:
            with pytest.raises(NotDurable):
                completion.result(20)
        subject.client.config_resetstat()
        durable.start_heartbeat(r)
        ends = expiry(subject, r)

        def renewed_and_held() -> bool:
            assert r.held
            return expiry(subject, r) > ends + 3000

        wait_until(renewed_and_held, 30.0)
        wait_until(lambda: subject.client.info("commandstats")["cmdstat_evalsha"]["calls"] > 60)
        stats = subject.client.info("commandstats")
        assert stats["cmdstat_wait"]["calls"] < stats["cmdstat_evalsha"]["calls"] / 3
        assert statuses == []
        pair.replica.thaw()
        wait_until(lambda: len(statuses) == len(keys))
        assert set(statuses) == {b"completed"}
        assert [durable.claim("acct_1", key, "f") for key in keys] == [Replay(ANSWER, 1, False)] * len(keys)


@pytest.mark.parametrize("known", [True, False], ids=["scripts_known", "scripts_unknown"])
def test_one_wait_covers_a_batch_whatever_became_of_its_other_calls(
    make_subject: MakeSubject, pair: Pair, namespace: str, known: bool
) -> None:
    """In the middle a call that fails, and at the end one that writes nothing."""
    subject = make_subject("sync", pair.primary, policy=DURABLE)
    gone, wrong, renewed, done = (subject.claimed("acct_1", key, "f") for key in ("gone", "wrong", "renewed", "done"))
    subject.client.delete(gone.row, wrong.row)
    subject.client.set(wrong.row, "x", px=60_000)
    policy = Policy(min_replicas=1, replica_timeout=0.3)
    identity = partial(identify, namespace, "acct_1")
    for script in load().values():
        subject.client.script_load(script.text)

    def batch(turn: int) -> list[Any]:
        new = operations.claim(identity(f"new-{turn}", ""), "a" * 16, "f", 30.0, 900.0, 0.0, "")
        calls: list[operations.Call[Any]] = [
            new,
            operations.complete(wrong, ANSWER, 900.0),
            operations.renew(renewed, 900.0),
            operations.complete(done, ANSWER, 900.0),
            operations.complete(gone, ANSWER, 900.0),
        ]
        if not known:
            subject.client.script_flush()
        subject.client.config_resetstat()
        outcomes = evaluate(wire(subject.ledger.client), calls, policy=policy)
        assert subject.client.info("commandstats")["cmdstat_wait"]["calls"] <= (1 if known else 2)
        return [type(outcome) for outcome in outcomes]

    assert batch(1) == [Reservation, CorruptRow, Renewed, Done, Fenced]
    pair.replica.freeze()
    assert batch(2) == [NotDurable, CorruptRow, Renewed, NotDurable, Fenced]


def test_a_completion_that_no_replica_has_is_sent_again_until_one_does(
    make_subject: MakeSubject, mode: Mode, pair: Pair
) -> None:
    events: list[Event] = []
    subject = make_subject(mode, pair.primary, policy=DURABLE, observers=[events.append])
    r = subject.claimed(*ROW, "f")
    pair.replica.freeze()
    with pytest.raises(NotDurable):
        subject.complete(r, ANSWER)
    assert [event.name for event in events] == ["claimed", "unavailable"]
    pair.replica.thaw()

    wait_until(lambda: [event.name for event in events][2:] == ["completed"])
    with pair.replica.client() as client:
        assert client.hget(r.identity.row, "status") == b"completed"


def test_what_writes_nothing_needs_no_replica(make_subject: MakeSubject, mode: Mode, pair: Pair) -> None:
    subject = make_subject(mode, pair.primary, policy=DURABLE)
    r = subject.claimed(*ROW, "f")
    subject.complete(subject.claimed("acct_1", "done", "f"), ANSWER)
    pair.replica.freeze()

    assert isinstance(subject.claim(*ROW, "f"), InProgress)
    assert subject.claim(*ROW, "g") == Reused()
    assert subject.claim("acct_1", "done", "f") == Replay(ANSWER, 1, False)
    subject.renew(r)
    assert isinstance(r, Reservation)


def test_a_replica_refuses_claims_and_writes_nothing(make_subject: MakeSubject, mode: Mode, pair: Pair) -> None:
    subject: Subject = make_subject(mode, pair.replica)
    with pytest.raises(LedgerUnavailable, match="it did not run") as refused:
        subject.claim(*ROW, "f")
    assert not refused.value.unknown
