"""A cluster whose slots move and whose primaries die; a primary under Sentinel; a replica that lags behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.sentinel
from redis.backoff import NoBackoff
from redis.retry import Retry

from idemredis import Ledger, LedgerUnavailable, NotDurable, Policy, Replay, Reservation, Row, StoredResponse
from idemredis.core import operations
from idemredis.core.outcomes import Renewed
from idemredis.store.cluster import wire
from idemredis.store.evaluate import evaluate
from tests.support.clusters import SETTLED_WITHIN, SLOTS, Cluster, connect_often, keys_in, move_rows, moving
from tests.support.proxy import Proxy
from tests.support.servers import Server, valkey
from tests.support.subject import MakeSubject, Mode, Subject
from tests.support.waiting import wait_until

RETENTION = Policy().retention
ANSWER = StoredResponse(201, (), b"done")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack, tmp_path, replicas=True, node_timeout=1500)


@pytest.fixture
def steady_cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack, tmp_path, replicas=True, node_timeout=15_000)


def test_claims_go_on_while_their_slot_moves_and_no_key_runs_twice(
    steady_cluster: Cluster, make_subject: MakeSubject
) -> None:
    """One cluster for all of it: it takes some seconds to make. `late` has an old map of the slots."""
    modes: tuple[Mode, ...] = ("sync", "async")
    cluster = steady_cluster
    first, second = cluster.nodes[:2]
    empty = cluster.grow(len(modes))
    others = keys_in(SLOTS // 2, "idem")
    for slot, mode in enumerate(modes):
        keys = keys_in(slot, "idem")
        subject, late = (make_subject(mode, cluster, policy=Policy(lease=6.0), namespace="idem") for _ in "12")
        for each in (subject, late):
            connect_often(each, second, list(islice(others, 4)))
        _move(subject, subject, first, second, slot, list(islice(keys, 8)))
        wait_until(partial(_has_learned, subject, next(keys), second))
        _move(subject, late, second, empty[slot], slot, list(islice(keys, 8)))


def _has_learned(subject: Subject, key: str, holder: Server) -> bool:
    """Whether the client knows where the row is: it asks, and in time any server can tell."""
    assert subject.read("acct", key) is None
    return bool(subject.ledger.client.get_node_from_key(subject.row("acct", key)).port == holder.port)


def _move(before: Subject, after: Subject, from_: Server, to: Server, slot: int, keys: list[str]) -> None:
    """Move a slot, with a row in it that was made before, and others that are made meanwhile, all at once."""
    there, *fresh = keys
    old = before.claimed("acct", there, "f")
    with to.client() as target, moving(slot, from_, to):
        claims = [after.begin("claim", "acct", key, "f") for key in fresh]  # ASK: they are made on the target
        new = [claim.result(20) for claim in claims]
        assert [(isinstance(r, Reservation), r.generation) for r in new] == [(True, 1)] * len(fresh)
        assert target.execute_command("CLUSTER", "COUNTKEYSINSLOT", slot) == len(fresh)
        for subject, r in ((before, old), (after, new[0])):
            subject.start_heartbeat(r)
        assert isinstance(evaluate(wire(after.client), [operations.renew(new[1], RETENTION)])[0], Renewed)
        before.complete(old, ANSWER)
        move_rows(slot, from_, to)
        assert after.claim("acct", there, "f") == Replay(ANSWER, 1, False)
        wait_until_renewed(after, fresh[0])
        assert new[0].held
        for r in new:
            after.complete(r, ANSWER)
    for key in keys:
        assert after.claim("acct", key, "f") == Replay(ANSWER, 1, False)
        with to.client() as target:
            assert target.pttl(after.row("acct", key)) > 0


def wait_until_renewed(subject: Subject, key: str) -> None:
    """A row's TTL is longer than it was a moment ago only where somebody started its clock anew."""
    seen = []

    def is_longer() -> bool:
        row = subject.read("acct", key)
        assert row is not None
        assert row.ttl is not None
        seen.append(row.ttl)
        return seen[-1] > min(seen)

    wait_until(is_longer)


def test_a_heartbeat_finds_the_primary_that_took_over(cluster: Cluster, make_subject: MakeSubject) -> None:
    """Nothing but the heartbeats tells the clients under test."""
    modes: tuple[Mode, ...] = ("sync", "async")
    subjects = [make_subject(mode, cluster, policy=Policy(lease=12.0), namespace="idem") for mode in modes]
    keys = list(islice(keys_in(0, "idem"), len(subjects)))
    held = [subject.claimed("acct", key, "f") for subject, key in zip(subjects, keys, strict=True)]
    with cluster.nodes[0].client() as primary:
        wait_until(lambda: primary.set("{06S}", 1, px=60_000) and primary.wait(1, 500) == 1)
    for subject, r in zip(subjects, held, strict=True):
        subject.start_heartbeat(r)
    cluster.nodes[0].kill()
    until = [r.lease.expires_at for r in held]
    wait_until(lambda: all(r.lease.expires_at > then for r, then in zip(held, until, strict=True)), SETTLED_WITHIN)
    assert all(r.held for r in held)


@dataclass
class Load:
    """Threads that claim and complete, a new key each time, and note what was acknowledged."""

    ledger: Ledger | Subject
    claimed: dict[str, Reservation] = field(default_factory=dict)
    completed: set[str] = field(default_factory=set)
    refused: int = 0
    stop: threading.Event = field(default_factory=threading.Event)
    errors: list[BaseException] = field(default_factory=list)

    def run(self, number: int) -> None:
        turn = 0
        while not self.stop.is_set():
            turn += 1
            key = f"{number}-{turn}"
            try:
                outcome = self.ledger.claim("acct", key, "f")
                assert isinstance(outcome, Reservation), outcome
                self.claimed[key] = outcome
                if turn % 3:
                    self.ledger.complete(outcome, StoredResponse(201, (), key.encode()))
                    self.completed.add(key)
            except LedgerUnavailable:
                self.refused += 1
                self.stop.wait(0.02)
            except BaseException as error:
                self.errors.append(error)
                return

    def around(self, fault: Callable[[], object], before: int = 60, after: int = 60) -> None:
        """Run the load, let the fault happen in the middle, and go on until the ledger serves again."""
        threads = [threading.Thread(target=self.run, args=(number,), daemon=True) for number in range(4)]
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: len(self.claimed) >= before or self.errors, SETTLED_WITHIN)
            fault()
            had = len(self.completed)
            wait_until(lambda: len(self.completed) >= had + after or self.errors, SETTLED_WITHIN)
        finally:
            self.stop.set()
            for thread in threads:
                thread.join(SETTLED_WITHIN)
        assert not self.errors, self.errors

    def lost(self) -> tuple[int, int]:
        """Return how many acknowledged claims and completions the server of now does not have."""
        claims = completions = 0
        for key, r in list(self.claimed.items()):
            row = self.read(key)
            claims += row is None or (row.generation, row.owner) != (r.generation, r.owner)
            if key in self.completed:
                completions += row is None or row.response is None or row.response.body != key.encode()
        return claims, completions

    def story(self, claims: int, completions: int) -> str:
        """Say what was acknowledged, and that so many of it were lost."""
        return (
            f"{len(self.claimed)} claims, {len(self.completed)} completions, {self.refused} refused; "
            f"lost {claims} and {completions}"
        )

    def read(self, key: str) -> Row | None:
        """Read the row; a client may still have connections to a node that is gone."""
        found: list[Row | None] = []

        def answered() -> bool:
            with suppress(LedgerUnavailable):
                found.append(self.ledger.read("acct", key))
            return bool(found)

        wait_until(answered, SETTLED_WITHIN)
        return found[0]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_cluster_whose_primary_is_killed_serves_again_and_says_what_was_lost(
    mode: Mode, cluster: Cluster, make_subject: MakeSubject, capsys: pytest.CaptureFixture[str]
) -> None:
    load = Load(make_subject(mode, cluster, socket_timeout=1.0, socket_connect_timeout=1.0))
    load.around(cluster.nodes[0].kill)
    lost = load.lost()
    with capsys.disabled():
        print(f"\ncluster, primary killed, {mode}: {load.story(*lost)} (not promised: no WAIT on a cluster)")


class Sentinels:
    """A primary, two replicas and three sentinels that agree within a second."""

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        quick = ("--repl-diskless-sync-delay", "0")
        self.primary = stack.enter_context(valkey(directory / "primary", *quick))
        of = ("--replicaof", "127.0.0.1", str(self.primary.port))
        self.replicas = [stack.enter_context(valkey(directory / f"replica{i}", *quick, *of)) for i in range(2)]
        with self.primary.client() as client:
            wait_until(lambda: client.set("probe", 1, px=60_000) and client.wait(2, 500) == 2, SETTLED_WITHIN)
        self.sentinels = []
        for i in range(3):
            conf = directory / f"sentinel{i}.conf"
            conf.write_text(
                f"sentinel monitor idem 127.0.0.1 {self.primary.port} 2\n"
                "sentinel down-after-milliseconds idem 3000\nsentinel failover-timeout idem 3000\n"
            )
            command = [self.primary.command[0], str(conf), "--sentinel"]
            self.sentinels.append(Server("sentinel", directory / f"sentinel{i}", command))
            stack.callback(self.sentinels[-1].stop)
        for sentinel in self.sentinels:
            with sentinel.client() as admin:
                wait_until(partial(_sees_all, admin), SETTLED_WITHIN)

    def client(self) -> Any:
        made: Any = redis.sentinel.Sentinel
        found = made([("127.0.0.1", sentinel.port) for sentinel in self.sentinels], socket_timeout=1.0)
        return found.master_for("idem", socket_timeout=1.0, retry=Retry(NoBackoff(), 0))

    def fail_over(self) -> None:
        with self.sentinels[0].client() as admin:
            admin.execute_command("SENTINEL", "FAILOVER", "idem")


def _sees_all(admin: Any) -> bool:
    state = admin.sentinel_masters()["idem"]
    return int(state["num-slaves"]) == 2 and int(state["num-other-sentinels"]) == 2


@pytest.fixture
def sentinels(tmp_path: Path) -> Iterator[Sentinels]:
    with ExitStack() as stack:
        yield Sentinels(stack, tmp_path)


@pytest.mark.parametrize("min_replicas", [1, 0])
def test_a_primary_under_sentinel_is_killed_and_nothing_that_a_replica_has_is_lost(
    sentinels: Sentinels, min_replicas: int, capsys: pytest.CaptureFixture[str]
) -> None:
    client = sentinels.client()
    policy = Policy(min_replicas=min_replicas, replica_timeout=0.5)
    with closing(client), closing(Ledger(client, policy)) as ledger:
        load = Load(ledger)
        load.around(sentinels.primary.kill)
        lost = load.lost()
    with capsys.disabled():
        print(f"\nsentinel, primary killed, min_replicas={min_replicas}: {load.story(*lost)}")
    if min_replicas:
        assert lost == (0, 0)


def test_a_planned_failover_serves_again_and_says_what_was_lost(
    sentinels: Sentinels, capsys: pytest.CaptureFixture[str]
) -> None:
    client = sentinels.client()
    with closing(client), closing(Ledger(client, Policy(min_replicas=1, replica_timeout=0.5))) as ledger:
        load = Load(ledger)
        load.around(sentinels.fail_over, after=2000)
    client = sentinels.client()
    with closing(client), closing(Ledger(client, Policy())) as load.ledger:
        lost = load.lost()
    with capsys.disabled():
        print(f"\nsentinel, planned failover, min_replicas=1: {load.story(*lost)} (not promised)")


@pytest.mark.parametrize("min_replicas", [1, 0])
def test_what_a_lagging_replica_does_not_have_was_not_acknowledged(
    tmp_path: Path, min_replicas: int, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = ("--repl-diskless-sync-delay", "0")
    with (
        valkey(tmp_path / "primary", *quick) as primary,
        Proxy(primary.port) as lag,
        valkey(tmp_path / "replica", *quick, "--replicaof", "127.0.0.1", str(lag.port)) as replica,
        replica.client() as survivor,
        ExitStack() as stack,
    ):
        with primary.client() as client:
            wait_until(lambda: client.set("probe", 1, px=60_000) and client.wait(1, 500) == 1, SETTLED_WITHIN)
        patient, hasty = (
            stack.enter_context(closing(Ledger.from_url(primary.url, policy, socket_timeout=20.0)))
            for policy in (Policy(min_replicas=min_replicas, replica_timeout=timeout) for timeout in (10.0, 0.2))
        )
        acknowledged: list[str] = []
        for i in range(20):
            if i == 10:
                lag.hold()
            ledger = patient if i < 10 else hasty
            try:
                outcome = ledger.claim("acct", f"key-{i}", "f")
                assert isinstance(outcome, Reservation)
                acknowledged.append(outcome.identity.row)
                ledger.complete(outcome, ANSWER)
            except NotDurable:
                pass
        primary.kill()
        survivor.replicaof("NO", "ONE")
        lag.hold(False)
        lost = [row for row in acknowledged if not survivor.exists(row)]
        with capsys.disabled():
            print(f"\nlagging replica, min_replicas={min_replicas}: {len(acknowledged)} claims, lost {len(lost)}")
        assert len(acknowledged) == (10 if min_replicas else 20)
        assert (len(lost) == 0) if min_replicas else (len(lost) >= 10)
