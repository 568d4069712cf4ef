"""A primary that is demoted behind one address, as behind DNS, a proxy or a virtual IP: the new one is reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import (
    BusyLoadingError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)

from idemredis import LedgerUnavailable, Policy, Replay, Reservation, StoredResponse
from idemredis.store.errors import is_no_primary
from tests.support.proxy import Proxy
from tests.support.servers import Server, free_port, start
from tests.support.subject import MakeSubject, Mode, Subject
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

ANSWER = StoredResponse(201, (), b"done")
CONNECTIONS = 5


class Address:
    """Two servers, and one address that leads to the primary of the two."""

    def __init__(self, stack: ExitStack, directory: Path, kind: str) -> None:
        quick = ("--repl-diskless-sync-delay", "0")
        self.servers = [start(kind, directory / name, *quick) for name in ("first", "second")]
        for server in self.servers:
            stack.callback(server.stop)
        self.primary, self.replica = self.servers
        self.admins: dict[Server, Any] = {
            server: stack.enter_context(server.client(client_name="admin")) for server in self.servers
        }
        self.proxy = stack.enter_context(Proxy(self.primary.port))
        self.follow()

    def follow(self) -> None:
        """Have the replica follow the primary, and wait until it has all."""
        self.admins[self.replica].replicaof("127.0.0.1", self.primary.port)
        primary = self.admins[self.primary]
        wait_until(lambda: primary.set("probe", 1, px=60_000) and primary.wait(1, 500) == 1)

    def promote(self) -> None:
        """Make the replica the primary, and lead new connections to it. The old primary stays as it is."""
        self.primary, self.replica = self.replica, self.primary
        self.admins[self.primary].replicaof("NO", "ONE")
        self.proxy.switch(self.primary.port)

    def reset(self) -> None:
        for admin in self.admins.values():
            admin.replicaof("NO", "ONE")
            admin.config_set("replica-serve-stale-data", "yes")
            admin.config_set("min-replicas-to-write", 0)
            admin.flushall()
        self.proxy.switch(self.primary.port)
        self.follow()

    def connections(self, server: Server) -> int:
        """Return how many connections of ledgers a server has."""
        return sum(each["name"] == "ledger" for each in self.admins[server].client_list())


@pytest.fixture(scope="module", params=["valkey", "redis"])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    with ExitStack() as stack:
        yield Address(stack, tmp_path_factory.mktemp("address"), request.param)


@pytest.fixture
def address(started: Address) -> Address:
    started.reset()
    return started


def connected(make_subject: MakeSubject, mode: Mode, address: Address, **options: Any) -> Subject:
    """Return a ledger that has some connections to the primary, all idle."""
    subject = make_subject(mode, address.primary, port=address.proxy.port, client_name="ledger", **options)
    address.admins[address.primary].execute_command("CLIENT", "PAUSE", 10_000, "WRITE")
    claims = [subject.begin("claim", "acct", f"first-{i}", "f") for i in range(CONNECTIONS)]
    info = address.admins[address.primary].info
    wait_until(lambda: info("clients")["blocked_clients"] == CONNECTIONS)
    address.admins[address.primary].execute_command("CLIENT", "UNPAUSE")
    for claim in claims:
        assert isinstance(claim.result(10), Reservation)
    assert address.connections(address.primary) == CONNECTIONS
    return subject


# Each docstring says what the old primary replies.


@contextmanager
def replica(admin: Any, new: Server) -> Iterator[None]:
    """READONLY"""
    admin.replicaof("127.0.0.1", new.port)
    wait_until(lambda: admin.info("replication")["master_link_status"] == "up")
    yield


@contextmanager
def cut_off_replica(admin: Any, new: Server) -> Iterator[None]:
    """MASTERDOWN"""
    admin.config_set("replica-serve-stale-data", "no")
    admin.replicaof("127.0.0.1", free_port())
    yield


@contextmanager
def left_by_its_replicas(admin: Any, new: Server) -> Iterator[None]:
    """NOREPLICAS"""
    admin.config_set("min-replicas-to-write", 1)
    yield


OLD = [replica, cut_off_replica, left_by_its_replicas]


@pytest.mark.parametrize("old", OLD, ids=lambda old: old.__doc__)
def test_one_refusal_of_a_demoted_primary_and_the_next_call_reaches_the_new_one(
    make_subject: MakeSubject, mode: Mode, address: Address, old: Callable[..., Any]
) -> None:
    subject = connected(make_subject, mode, address)
    demoted = address.primary
    address.promote()
    with old(address.admins[demoted], address.primary):
        with pytest.raises(LedgerUnavailable) as refused:
            subject.claim("acct", "second", "f")
        assert not refused.value.unknown
        wait_until(lambda: address.connections(demoted) == 0)
        r = subject.claimed("acct", "second", "f")
        assert address.admins[address.primary].exists(r.row)
        subject.complete(r, ANSWER)
        assert subject.claim("acct", "second", "f") == Replay(ANSWER, 1, False)


def test_a_connection_that_was_in_use_meanwhile_is_closed_before_it_is_used_again(
    make_subject: MakeSubject, mode: Mode, address: Address
) -> None:
    subject = connected(make_subject, mode, address)
    demoted = address.primary
    pool = subject.ledger.client.connection_pool
    taken = pool.get_connection() if mode == "sync" else pool.get_available_connection()
    address.promote()
    with replica(address.admins[demoted], address.primary):
        with pytest.raises(LedgerUnavailable):
            subject.claim("acct", "second", "f")
        wait_until(lambda: address.connections(demoted) == 1)
        subject.result(pool.release(taken))  # the next call gets it
        assert isinstance(subject.claim("acct", "second", "f"), Reservation)
        wait_until(lambda: address.connections(demoted) == 0)


def test_a_completion_that_a_demoted_primary_refuses_is_stored_on_the_new_one(
    make_subject: MakeSubject, mode: Mode, address: Address
) -> None:
    events: list[str] = []
    subject = connected(make_subject, mode, address, observers=[lambda event: events.append(event.name)])
    r = subject.claimed("acct", "second", "f")
    demoted = address.admins[address.primary]
    wait_until(lambda: demoted.set("probe", 2, px=60_000) and demoted.wait(1, 500) == 1)
    address.promote()
    with replica(demoted, address.primary):
        with pytest.raises(LedgerUnavailable):
            subject.complete(r, ANSWER)
        wait_until(lambda: events[-1] == "completed")
        assert subject.claim("acct", "second", "f") == Replay(ANSWER, 1, False)


def test_heartbeats_go_on_at_the_new_primary(make_subject: MakeSubject, mode: Mode, address: Address) -> None:
    subject = connected(make_subject, mode, address, policy=Policy(lease=6.0))
    r = subject.claimed("acct", "second", "f")
    demoted = address.admins[address.primary]
    wait_until(lambda: demoted.set("probe", 2, px=60_000) and demoted.wait(1, 500) == 1)
    address.promote()
    with replica(demoted, address.primary):
        new = address.admins[address.primary]
        ends = new.pexpiretime(r.row)
        subject.start_heartbeat(r)
        wait_until(lambda: new.pexpiretime(r.row) > ends)
        assert r.held


def test_a_claim_whose_wait_ends_because_the_primary_is_demoted_is_made_on_the_new_one(
    make_subject: MakeSubject, mode: Mode, address: Address
) -> None:
    subject = connected(
        make_subject, mode, address, policy=Policy(min_replicas=1, replica_timeout=20.0), socket_timeout=30.0
    )
    demoted = address.primary
    address.promote()
    old = address.admins[demoted]
    wait_until(lambda: old.info("replication")["connected_slaves"] == 0)
    claim = subject.begin("claim", "acct", "second", "f")
    wait_until(lambda: old.info("clients")["blocked_clients"] == 1)
    old.replicaof("127.0.0.1", address.primary.port)
    r = claim.result(30)  # whether it had run was unknown, so it was sent again
    assert isinstance(r, Reservation)
    assert address.admins[address.primary].hget(r.row, "owner") == r.owner.encode()
    wait_until(lambda: address.connections(demoted) == 0)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ReadOnlyError("You can't write against a read only replica."), True),
        (ResponseError("Error running script: @user_script: 1: -READONLY You can't write against a replica"), True),
        (MasterDownError("Link with MASTER is down"), True),
        (BusyLoadingError("Redis is loading the dataset in memory"), True),
        (ResponseError("NOREPLICAS Not enough good replicas to write."), True),
        (ResponseError("UNBLOCKED force unblock from blocking operation, instance state changed"), True),
        (ResponseError("WAIT cannot be used with replica instances."), True),
        (ResponseError("BUSY Redis is busy running a script."), False),
        (ResponseError("MISCONF Redis is configured to save RDB snapshots"), False),
        (ResponseError("UNKILLABLE Sorry the script already executed write commands"), False),
        (OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), False),
        (NoPermissionError("this user has no permissions to run the 'evalsha' command"), False),
        (redis.TimeoutError("Timeout reading from socket"), False),
    ],
    ids=str,
)
def test_what_says_that_a_server_may_not_be_the_primary(error: Exception, says: bool) -> None:
    assert is_no_primary(error) == says
