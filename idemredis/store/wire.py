"""One round trip: commands out over a connection of the client's own pool, their replies back.

A connection goes back to its pool only after every reply was read; whatever happens in between closes it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import redis
import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MaxConnectionsError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..core.tracebacks import without_frames
from . import clients
from .deadline import CallOfTask, bound, connect_by, overdue
from .errors import CLOSED, ERRORS, OutOfStep, PoolExhausted, closed, is_no_primary, note_unsent

__all__ = ["AsyncWire", "Trip", "Wire", "Words", "bulk", "encode"]

Words: TypeAlias = Sequence[str | bytes | int]
"""A command and its arguments."""

Trip: TypeAlias = tuple[str, bytes, Sequence[bytes | None]]
"""What one round trip asks: which row it is about ("" for none), its commands, encoded, and for each command what its
reply repeats in its second place, unless it is an error; None for one that repeats nothing."""

FULL_POOL_GAP = 0.005
"""Seconds between two looks at a full pool. Calls take 0.1 ms, so a connection is free soon, or the server hangs."""


def encode(commands: Sequence[Words]) -> bytes:
    """Return the commands as Redis reads them. A command's name may have several words."""
    parts = []
    for name, *arguments in commands:
        words = [*str(name).split(), *arguments]
        parts.append(b"*%d\r\n" % len(words))
        parts += map(bulk, words)
    return b"".join(parts)


def bulk(word: str | bytes | int) -> bytes:
    """Return one word of a command as Redis reads it."""
    data = word if isinstance(word, bytes) else str(word).encode("utf-8", "surrogateescape")
    return b"$%d\r\n%b\r\n" % (len(data), data)


class Wire:
    """The way to one server, over the pool of a sync client."""

    def __init__(self, client: Any, timeout: float = clients.SOCKET_TIMEOUT) -> None:
        self.client = client = clients.uncached(client)
        self.timeout = clients.deadline(client, timeout)
        self._blocking = isinstance(client.connection_pool, redis.BlockingConnectionPool)
        self._left_at = 0.0  # when a reply said that the server is no primary; older connections are closed
        bound(client.connection_pool)

    def place(self, row: str) -> None:
        """Return None: there is one server, which has every row."""

    def exchange(self, trip: Trip, until: float) -> list[Any]:
        """Send commands and return their replies; one that is an error is returned, not raised.

        Args:
            trip: the commands.
            until: when to give up, by the local monotonic clock.

        Raises:
            redis.RedisError, OSError: there are not all replies. The connection is closed.
        """
        _, packed, tokens = trip
        pool = self.client.connection_pool
        connection = self._take(pool, until)
        try:
            overdue.add(connection, until)
            try:
                connection.send_packed_command([packed])
                replies, in_step = [], True
                for token in tokens:
                    reply = _read(connection)
                    in_step = _in_step(reply, token) and in_step
                    replies.append(reply)
                if not in_step:
                    nonce = secrets.token_hex(8)
                    connection.send_packed_command([encode([("PING", nonce)])])
                    _verify(replies, _read(connection), nonce.encode())
                if (not in_step or isinstance(replies[-1], ResponseError)) and _is_left(replies):
                    connection.disconnect()
                    self._leave()
            except BaseException as error:
                connection.disconnect()
                if is_no_primary(error):
                    self._leave()
                if not overdue.remove(connection) and isinstance(error, Exception):
                    raise RedisTimeoutError(f"Timeout reading from {clients.address(self.client)}") from error
                if isinstance(error, CLOSED):
                    raise closed(error) from error
                without_frames(error)
                raise
            if not overdue.remove(connection):
                connection.disconnect()
        finally:
            pool.release(connection)
        return replies

    def _take(self, pool: Any, until: float) -> Any:
        by = connect_by.set(until)
        try:
            while True:
                try:
                    if not (self._blocking and pool.pool.empty()):
                        connection = pool.get_connection()
                        if getattr(connection, "connected_at", 0.0) < self._left_at:
                            connection.disconnect()
                            self._connect(pool, connection)
                        return connection
                except MaxConnectionsError:
                    pass
                except ERRORS as error:
                    note_unsent(error)
                    raise
                if time.monotonic() + FULL_POOL_GAP > until:
                    raise _exhausted(pool)
                time.sleep(FULL_POOL_GAP)
        finally:
            connect_by.reset(by)

    def _connect(self, pool: Any, connection: Any) -> None:
        try:
            connection.connect()
        except BaseException:
            pool.release(connection)
            raise

    def _leave(self) -> None:
        """Close the pool's idle connections; those that are in use are closed before they are used again."""
        self._left_at = time.monotonic()
        with suppress(TypeError):  # redis-py 6's blocking pool can only close those in use with them
            self.client.connection_pool.disconnect(inuse_connections=False)


class AsyncWire:
    """The way to one server, over the pool of an asyncio client, or the node of a cluster's."""

    def __init__(self, client: Any, timeout: float = clients.SOCKET_TIMEOUT) -> None:
        self.client = client
        self.timeout = clients.deadline(client, timeout)
        self._left_at = 0.0

    def place(self, row: str) -> None:
        """Return None, as `Wire.place` does."""

    async def exchange(self, trip: Trip, until: float) -> list[Any]:
        """Send commands and return their replies, as `Wire.exchange` does."""
        call = CallOfTask(until)
        try:
            replies = await self._exchange(trip, call)
        except BaseException as error:
            if call.end() and isinstance(error, asyncio.CancelledError):
                raise RedisTimeoutError(f"Timeout reading from {clients.address(self.client)}") from error
            raise
        call.end()
        return replies

    async def _exchange(self, trip: Trip, call: CallOfTask) -> list[Any]:
        _, packed, tokens = trip
        connection = await self._take(call.until)
        own_timeout = connection.socket_timeout
        is_relaxed = own_timeout != getattr(connection, "orig_socket_timeout", own_timeout)  # until a notice resets it
        try:
            try:
                await self._ready(connection, call)
                if not is_relaxed:
                    connection.socket_timeout = None  # else redis-py makes a task and a timer of its own for each call
                await connection.send_packed_command(packed)
                replies, in_step = [], True
                for token in tokens:
                    reply = await _read_async(connection)
                    in_step = _in_step(reply, token) and in_step
                    replies.append(reply)
                if not in_step:
                    nonce = secrets.token_hex(8)
                    await connection.send_packed_command(encode([("PING", nonce)]))
                    _verify(replies, await _read_async(connection), nonce.encode())
                if (not in_step or isinstance(replies[-1], ResponseError)) and _is_left(replies):
                    await connection.disconnect(nowait=True)
                    await self._leave()
            except BaseException as error:
                await connection.disconnect(nowait=True)
                if is_no_primary(error):
                    await self._leave()
                if isinstance(error, CLOSED):
                    raise closed(error) from error
                without_frames(error)
                raise
        finally:
            if not is_relaxed and connection.socket_timeout is None:  # unless a notice of the server has set another
                connection.socket_timeout = own_timeout
            await self._release(connection)
        return replies

    async def _take(self, until: float) -> Any:
        where = self.client
        is_node = not hasattr(where, "connection_pool")
        pool = where if is_node else where.connection_pool
        while True:
            try:
                if is_node:
                    return pool.acquire_connection()
                if not isinstance(pool, redis.asyncio.BlockingConnectionPool) or pool.can_get_connection():
                    return pool.get_available_connection()
            except (MaxConnectionsError, RedisConnectionError):  # redis-py 6 has the second for a full pool
                pass
            if time.monotonic() + FULL_POOL_GAP > until:
                raise _exhausted(pool)
            await asyncio.sleep(FULL_POOL_GAP)

    async def _ready(self, connection: Any, call: CallOfTask) -> None:
        try:
            if self._left_at and getattr(connection, "connected_at", 0.0) < self._left_at:
                await connection.disconnect(nowait=True)
            if not connection.is_connected:
                connection.connected_at = time.monotonic()
            if hasattr(self.client, "connection_pool"):
                await self.client.connection_pool.ensure_connection(connection)
            else:
                await connection.connect()
            if call.is_over:  # the cancellation may be lost on the way, as in `asyncio.wait_for` of Python 3.11
                raise RedisTimeoutError(f"Timeout connecting to {clients.address(self.client)}")
        except BaseException as error:
            if isinstance(error, ERRORS):
                note_unsent(error)
            without_frames(error)
            raise

    async def _leave(self) -> None:
        """Close the pool's idle connections; those that are in use are closed before they are used again."""
        self._left_at = time.monotonic()
        pool = getattr(self.client, "connection_pool", None)
        idle: list[Any] = []
        with suppress(MaxConnectionsError, RedisConnectionError):
            while pool is not None:
                idle.append(pool.get_available_connection())
                if not idle[-1].is_connected:
                    break
                await idle[-1].disconnect(nowait=True)
        for connection in idle:
            await self._release(connection)

    async def _release(self, connection: Any) -> None:
        if hasattr(self.client, "connection_pool"):
            await self.client.connection_pool.release(connection)
        else:
            self.client.release(connection)


def _exhausted(pool: Any) -> PoolExhausted:
    return PoolExhausted(f"all {pool.max_connections} connections of the client's pool are busy")


def _read(connection: Any) -> Any:
    try:
        return connection.read_response(disable_decoding=True)
    except ResponseError as error:
        return error


async def _read_async(connection: Any) -> Any:
    try:
        return await connection.read_response(disable_decoding=True)
    except ResponseError as error:
        return error


def _is_left(replies: Sequence[Any]) -> bool:
    return any(isinstance(reply, ResponseError) and is_no_primary(reply) for reply in replies)


def _in_step(reply: Any, token: bytes | None) -> bool:
    """Whether the reply is this call's own. An error repeats no token, so it proves nothing.

    Raises:
        OutOfStep: it is not.
    """
    if token is None or (type(reply) is list and len(reply) > 1 and reply[1] == token):
        return True
    if isinstance(reply, ResponseError):
        return False
    raise OutOfStep("the connection held a reply to another call")


def _verify(replies: Sequence[Any], echo: Any, nonce: bytes) -> None:
    """Accept the errors among the replies where what was asked after them comes after them.

    A server that refuses everything (it loads, or wants a password) refuses that too, in the same words.
    """
    if echo == nonce or (isinstance(echo, ResponseError) and "'ping'" in str(echo)):  # denied to this user
        return
    refused = [(type(reply), str(reply)) for reply in replies if isinstance(reply, ResponseError)]
    if any(type(echo) is kind and (kind is not ResponseError or str(echo) == text) for kind, text in refused):
        return
    raise OutOfStep("the connection held a reply to another call")
