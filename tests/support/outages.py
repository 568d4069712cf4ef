"""Context managers in whose blocks a server refuses commands."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import pytest
import redis

from tests.support.servers import free_port
from tests.support.waiting import wait_until

__all__ = ["OUTAGES", "Outage"]

# Each docstring is a pattern for the server's error message, without the prefix that redis-py removes.


@contextmanager
def no_password(admin: Any) -> Iterator[None]:
    """Authentication required|must be called with the client already authenticated"""
    admin.config_set("requirepass", "secret")
    try:
        yield
    finally:
        admin.config_set("requirepass", "")


@contextmanager
def too_few_replicas(admin: Any) -> Iterator[None]:
    """NOREPLICAS|Not enough good replicas"""
    admin.config_set("min-replicas-to-write", 1)
    try:
        yield
    finally:
        admin.config_set("min-replicas-to-write", 0)


@contextmanager
def primary_down(admin: Any) -> Iterator[None]:
    """Link with MASTER is down"""
    admin.config_set("replica-serve-stale-data", "no")
    admin.replicaof("127.0.0.1", free_port())
    try:
        yield
    finally:
        admin.replicaof("NO", "ONE")
        admin.config_set("replica-serve-stale-data", "yes")


@contextmanager
def read_only(admin: Any) -> Iterator[None]:
    """against a read only replica"""
    admin.replicaof("127.0.0.1", free_port())
    try:
        yield
    finally:
        admin.replicaof("NO", "ONE")


@contextmanager
def busy(admin: Any) -> Iterator[None]:
    """BUSY|busy running a script"""
    admin.config_set("lua-time-limit", 10)
    runner = redis.Redis(connection_pool=redis.ConnectionPool(**admin.connection_pool.connection_kwargs))

    def run() -> None:
        with runner, pytest.raises(redis.ResponseError, match=r"[Kk]illed"):
            runner.eval("while true do end", 0)

    thread = threading.Thread(target=run)
    thread.start()

    def is_busy() -> bool:
        try:
            admin.ping()
        except redis.ResponseError as refused:
            return "BUSY" in str(refused)
        return False

    try:
        wait_until(is_busy)
        yield
    finally:
        admin.script_kill()
        thread.join(5.0)
        runner.connection_pool.disconnect()
        admin.config_set("lua-time-limit", 5000)


Outage: TypeAlias = Callable[[Any], AbstractContextManager[None]]
OUTAGES: list[Outage] = [no_password, too_few_replicas, primary_down, read_only, busy]
