"""Limit how many duplicates of web requests wait at once, so that one tenant cannot occupy every thread of a server.

An adapter claims within `bounded`. A duplicate for which there is no room does not wait: it gets the ordinary 409.
Workers that wait through `reserve` and `once` have threads of their own, and are not limited.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from ..core.keys import Identity

__all__ = ["A_KEY", "A_PRINCIPAL", "WaitingRoom", "bounded", "room_of_request"]

A_KEY = 4
"""Waiting duplicates of one key in this process. A client that retries in parallel has two or three."""

A_PRINCIPAL = 8
"""Waiting duplicates of one principal in this process, whatever their keys."""


class WaitingRoom:
    """Counts the duplicates that wait in this process."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        """Start empty, as a forked child must: the waiting threads are its parent's."""
        self._process = os.getpid()
        self._lock = threading.RLock()  # reentrant: the garbage collector may end a claim while it is held
        self._waiting: Counter[object] = Counter()

    def enter(self, identity: Identity, threads: int | None) -> bool:
        """Return True if one more duplicate may wait; the caller must then call `leave`.

        Args:
            identity: the row that it waits for.
            threads: how many requests the server runs at once in this process; None if unknown.
        """
        if self._process != os.getpid():
            self._reset()
        with self._lock:
            counts = self._waiting
            if threads is not None and counts[None] >= max(threads // 2, 1):
                return False
            if counts[identity.row] >= A_KEY or counts[_owner(identity)] >= A_PRINCIPAL:
                return False
            counts.update(_counted(identity))
            return True

    def leave(self, identity: Identity) -> None:
        """Stop counting a duplicate that no longer waits."""
        if self._process != os.getpid():
            return
        with self._lock:
            for name in _counted(identity):
                self._waiting[name] -= 1
                if self._waiting[name] <= 0:
                    del self._waiting[name]


_room = WaitingRoom()


@dataclass(frozen=True, slots=True)
class _Bounded:
    """The waiting room of one request; the number of threads is determined only if the request has to wait."""

    threads: Callable[[], int | None]

    def enter(self, identity: Identity) -> bool:
        return _room.enter(identity, self.threads())

    def leave(self, identity: Identity) -> None:
        _room.leave(identity)


room_of_request: ContextVar[_Bounded | None] = ContextVar("idemredis_room_of_request", default=None)
"""The waiting room of the current claim; None if the number of waiting duplicates is not limited."""


@contextmanager
def bounded(threads: Callable[[], int | None] = lambda: None) -> Iterator[None]:
    """Limit how many of the claims that are made within such blocks wait; for adapters.

    Args:
        threads: returns how many requests the server runs at once in this process; None if unknown.
    """
    token = room_of_request.set(_Bounded(threads))
    try:
        yield
    finally:
        room_of_request.reset(token)


def _owner(identity: Identity) -> tuple[str, str]:
    """Return namespace and principal: equal principals of two namespaces are different ones."""
    return identity.row.partition(":")[0], identity.principal


def _counted(identity: Identity) -> tuple[object, ...]:
    return None, identity.row, _owner(identity)
