"""Sees, and may change, what a client sends over its connections and what comes back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol, TypeAlias

import redis.asyncio
from redis.exceptions import ResponseError

__all__ = ["Tap", "Words", "tap", "words_in"]

Words: TypeAlias = tuple[bytes, ...]


class Tap(Protocol):
    """What listens."""

    def sent(self, words: Words) -> Words:
        """Return the command that goes out instead of this one."""

    def replied(self, words: Words, reply: Any) -> Any:
        """Return the reply that the client gets instead; an exception where there is none, which is raised anyway."""


def words_in(packed: bytes) -> Iterator[Words]:
    """Yield the commands in what is sent to a server."""
    at = 0

    def number() -> int:
        nonlocal at
        end = packed.index(b"\r\n", at)
        value, at = int(packed[at + 1 : end]), end + 2
        return value

    while at < len(packed):
        words = []
        for _ in range(number()):
            size = number()
            words.append(packed[at : at + size])
            at += size + 2
        yield tuple(words)


def _pack(words: Words) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


class _Tapped:
    _tap: Tap

    def _waiting(self) -> deque[Words]:
        waiting: deque[Words] = self.__dict__.setdefault("_waiting_for", deque())
        return waiting

    def _changed(self, packed: Any) -> bytes:
        changed = []
        for words in words_in(packed if isinstance(packed, bytes) else b"".join(map(bytes, packed))):
            words = self._tap.sent(words)
            self._waiting().append(words)
            changed.append(_pack(words))
        return b"".join(changed)

    def _failed(self, error: BaseException) -> None:
        waiting = self._waiting()
        if isinstance(error, ResponseError):
            self._tap.replied(waiting.popleft(), error)
            return
        while waiting:
            self._tap.replied(waiting.popleft(), error)


class _Sync(_Tapped):
    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        packed = self._changed(command)
        try:
            super().send_packed_command([packed], check_health)  # type: ignore[misc]
        except BaseException as error:
            self._failed(error)
            raise

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            reply = super().read_response(*args, **options)  # type: ignore[misc]
        except BaseException as error:
            self._failed(error)
            raise
        return self._tap.replied(self._waiting().popleft(), reply)


class _Async(_Tapped):
    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        packed = self._changed(command)
        try:
            await super().send_packed_command(packed, check_health)  # type: ignore[misc]
        except BaseException as error:
            self._failed(error)
            raise

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            reply = await super().read_response(*args, **options)  # type: ignore[misc]
        except BaseException as error:
            self._failed(error)
            raise
        return self._tap.replied(self._waiting().popleft(), reply)


def tap(client: Any, listener: Tap) -> None:
    """Have the client's connections, from now on, go past the listener."""
    pool = client.connection_pool
    is_async = isinstance(client, redis.asyncio.Redis)
    kind: type = _Async if is_async else _Sync
    pool.connection_class = type("Tapped", (kind, pool.connection_class), {"_tap": listener})
