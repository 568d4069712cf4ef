"""Slots of a cluster: the keys in one, and one on its way to another server; and clients with many connections."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from redis.crc import key_slot

from idemredis.keys import identify

from .servers import Server
from .subject import Subject
from .waiting import wait_until

__all__ = ["connect_often", "keys_in", "move_rows", "moving", "slot_of"]


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
