"""Slots of a cluster: the keys in one, and one on its way to another server; and clients with many connections."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import redis
import redis.asyncio
from redis.crc import key_slot

from idemredis.core.keys import identify
from tests.support.servers import TRIES, Server, free_port, start
from tests.support.subject import Subject
from tests.support.waiting import wait_until

SLOTS = 16384
SETTLED_WITHIN = 30.0

__all__ = ["SETTLED_WITHIN", "SLOTS", "Cluster", "connect_often", "keys_in", "move_rows", "moving", "slot_of"]


class Cluster:
    """Primaries, and a replica of each where they are asked for, made with plain client commands."""

    kind = "cluster"

    def __init__(
        self,
        stack: ExitStack,
        directory: Path,
        *,
        server: str = "valkey",
        primaries: int = 3,
        replicas: bool = False,
        node_timeout: int = 2000,
    ) -> None:
        self._stack = stack
        self._server = server
        self._node_timeout = str(node_timeout)  # milliseconds without an answer, after which a replica takes over
        self._directory = directory
        self.nodes: list[Server] = []
        buses = [self._start() for _ in range(primaries * 2 if replicas else primaries)]
        admins: list[Any] = [stack.enter_context(node.client()) for node in self.nodes]
        for at, admin in enumerate(admins[:primaries]):
            admin.execute_command(
                "CLUSTER", "ADDSLOTSRANGE", SLOTS * at // primaries, SLOTS * (at + 1) // primaries - 1
            )
        for at, admin in enumerate(admins):
            admin.execute_command("CLUSTER", "SET-CONFIG-EPOCH", at + 1)
        for node, bus in zip(self.nodes[1:], buses[1:], strict=True):
            admins[0].execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        self.ids = [admin.execute_command("CLUSTER", "MYID").decode() for admin in admins]
        for admin in admins:
            wait_until(partial(_knows, admin, len(self.nodes)), SETTLED_WITHIN)
        for admin, of in zip(admins[primaries:], self.ids, strict=False):
            wait_until(partial(_replicates, admin, of), SETTLED_WITHIN)
        for admin in admins:
            wait_until(partial(_is_ok, admin), SETTLED_WITHIN)
        for admin in admins[primaries:]:
            wait_until(lambda admin=admin: admin.info("replication")["master_link_status"] == "up", SETTLED_WITHIN)  # type: ignore[misc]

    def _start(self) -> int:
        """Start one more server; return the port of its bus."""
        words = ["--cluster-enabled", "yes", "--cluster-node-timeout", self._node_timeout]
        words += ["--repl-diskless-sync-delay", "0", "--cluster-port"]
        for left in reversed(range(TRIES)):
            bus = free_port()  # another process may take it before the node does
            try:
                self.nodes.append(start(self._server, self._directory / str(len(self.nodes)), *words, str(bus)))
                break
            except RuntimeError:
                if not left:
                    raise
        self._stack.callback(self.nodes[-1].stop)
        return bus

    def grow(self, count: int) -> list[Server]:
        """Let so many primaries join that have no slots, and so are in no client's map of them."""
        before = len(self.nodes)
        with self.nodes[0].client() as admin:
            for _ in range(count):
                bus = self._start()
                admin.execute_command("CLUSTER", "MEET", "127.0.0.1", self.nodes[-1].port, bus)
        for node in self.nodes:
            with node.client() as admin:
                wait_until(partial(_knows, admin, len(self.nodes)), SETTLED_WITHIN)
                wait_until(partial(_is_ok, admin), SETTLED_WITHIN)
        return self.nodes[before:]

    def client(self, **options: Any) -> Any:
        return redis.RedisCluster(host="127.0.0.1", port=self.nodes[1].port, **options)

    def async_client(self, **options: Any) -> Any:
        return redis.asyncio.RedisCluster(host="127.0.0.1", port=self.nodes[1].port, **options)


def _knows(admin: Any, count: int) -> bool:
    return int(admin.cluster("INFO")["cluster_known_nodes"]) == count


def _replicates(admin: Any, primary: str) -> bool:
    try:
        return bool(admin.execute_command("CLUSTER", "REPLICATE", primary))
    except redis.ResponseError:
        return False  # it has not heard of it yet


def _is_ok(admin: Any) -> bool:
    return bool(admin.cluster("INFO")["cluster_state"] == "ok")


def slot_of(namespace: str, key: str) -> int:
    """Return the slot of the row that acct's key has."""
    return key_slot(identify(namespace, "acct", key).row.encode())


def keys_in(slot: int, namespace: str) -> Iterator[str]:
    """Yield keys of acct's whose rows are in the slot."""
    return (key for key in map("key-{}".format, range(10_000_000)) if slot_of(namespace, key) == slot)


@contextmanager
def moving(slot: int, from_: Server, to: Server) -> Iterator[None]:
    """Let the slot be on its way in the block, its rows where they are; then they all go, and the slot is moved."""
    with from_.client() as source, to.client() as target:
        ids = [admin.execute_command("CLUSTER", "MYID").decode() for admin in (source, target)]
        target.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
        source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
        yield
        move_rows(slot, from_, to)
        for admin in (target, source):
            admin.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[1])


def move_rows(slot: int, from_: Server, to: Server) -> None:
    """Move the slot's rows."""
    with from_.client() as source:
        if rows := source.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 1000):
            source.execute_command("MIGRATE", "127.0.0.1", to.port, "", 0, 5000, "KEYS", *rows)


def connect_often(subject: Subject, server: Server, keys: list[str]) -> None:
    """Have so many calls under way at the server at once that the subject holds as many connections to it."""
    with server.client() as admin:
        admin.execute_command("CLIENT", "PAUSE", 10_000, "WRITE")
        claims = [subject.begin("claim", "acct", key, "f") for key in keys]
        wait_until(lambda: admin.info("clients")["blocked_clients"] == len(keys))
        admin.execute_command("CLIENT", "UNPAUSE")
        for claim in claims:
            subject.release(claim.result(5))
