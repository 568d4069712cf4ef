"""Sends a call to where its row is: on a cluster, also while slots move from one node to another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import redis
import redis.asyncio
from redis.asyncio.cluster import ClusterNode as AsyncClusterNode
from redis.cluster import ClusterNode
from redis.exceptions import AskError, MovedError, ResponseError

from ..core.keys import row_bytes
from ..core.tracebacks import without_frames
from . import clients
from .deadline import Attempt, made_of
from .errors import ERRORS, closed, leaves_unknown
from .wire import AsyncWire, Trip, Wire, encode

__all__ = ["REDIRECTS", "AsyncRouted", "Routed", "named", "redirection", "wire"]

ASKING: Final = encode([("ASKING",)])
"""Sent to a node that a slot is moving to, on the connection of the call that follows. redis-py's own cluster clients
send the two on different connections, so they are never left to follow a slot that moves."""

REDIRECTS = 5
"""From one node to the next, for one call: one or two while a slot moves."""

LEARN_GAP = 1.0
"""Seconds between two readings of who has which slot. Until then each call is redirected: thousands of slots may move,
and to read all 16,384 takes some milliseconds."""

LEARN_WITHIN = 10.0
"""Seconds for one reading, which asks one node after the other; each may hang for as long as the client's timeout."""

RETRY_GAP = 0.01
"""Seconds before a call that no node took is sent again."""


class Routed:
    """The way to a cluster: a call goes to the node that has its row, or that the row's slot is moving to."""

    def __init__(self, client: redis.RedisCluster, timeout: float = clients.SOCKET_TIMEOUT) -> None:
        self.client: Any = client
        self.timeout = clients.deadline(client, timeout)
        self._wires: dict[Any, Wire] = {}
        self._learned = 0.0
        self._learning: tuple[object, Attempt] | None = None
        self._doubted: set[str | None] = set()  # nodes that failed: who has their slots now?

    def exchange(self, trip: Trip, until: float) -> list[Any]:
        """Send a call about one row and return its replies, as `Wire.exchange` does."""
        lost: Exception | None = None
        first = True
        while True:
            self._learn_of([trip[0]], until)
            place = self.place(trip[0])
            try:
                replies = self._follow(trip, until)
            except ERRORS as error:
                if leaves_unknown(error):
                    lost = error
                self._doubted.add(place)
                again = type(error) in self.client.ERRORS_ALLOW_RETRY and time.monotonic() + RETRY_GAP < until
                if not again:
                    raise lost or error from None
                if not first:
                    time.sleep(RETRY_GAP)
                first = False
            else:
                self._doubted.discard(place)
                return replies

    def place(self, row: str) -> str | None:
        """Return which node has the row, as far as is known; None if no node is known to."""
        try:
            return str(self.client.get_node_from_key(row_bytes(row)).name)
        except ERRORS:
            return None

    def doubt(self, row: str) -> None:
        """Read anew who has which slot before the next call to the row's node, which did not reply."""
        self._doubted.add(self.place(row))

    def by_node(self, rows: Sequence[str]) -> list[tuple[Wire, list[int]]]:
        """Return the way to each node, with the places of those rows that it has; some may be on none."""
        self._learn_of(rows, time.monotonic() + self.timeout)
        found: dict[Any, list[int]] = {}
        for i, row in enumerate(rows):
            with suppress(*ERRORS):
                found.setdefault(self._node(row), []).append(i)
        return [(self._wire(node), places) for node, places in found.items()]

    def _follow(self, trip: Trip, until: float) -> list[Any]:
        replies = self._wire(self._node(trip[0])).exchange(trip, until)
        for _ in range(REDIRECTS):
            redirect = redirection(replies)
            if redirect is None:
                return replies
            if _is_due(redirect, self._learned):
                self._learn(until)
            with self._named(redirect) as wire:
                replies = _without_asking(redirect, wire.exchange(_asking(redirect, trip), until))
        return replies

    def _learn_of(self, rows: Sequence[str], until: float) -> None:
        """Read anew who has which slot if the node of one of these rows is in doubt."""
        if self._doubted and not self._doubted.isdisjoint(map(self.place, rows)):
            self._learn(until)

    def _learn(self, until: float) -> None:
        """Read anew who has which slot; half of the time is left for the call, should the node that is asked hang.

        The reading goes on by itself then, and serves the calls that follow.
        """
        learning = self._learning
        if learning is None or learning[0] != made_of() or learning[1].wait(0.0):
            self._learned = time.monotonic()
            self._learning = learning = (made_of(), Attempt(self._initialize))
        now = time.monotonic()
        with suppress(RuntimeError):  # no thread can be started: the map stays as it is
            learning[1].start()
            learning[1].wait(now + (until - now) / 2)

    def _initialize(self) -> None:
        with suppress(*ERRORS):
            self.client.nodes_manager.initialize()
            self._doubted.clear()

    def _node(self, row: str) -> Any:
        return self.client.get_redis_connection(self.client.get_node_from_key(row_bytes(row)))

    def _wire(self, node: Any) -> Wire:
        wire = self._wires.get(node)
        if wire is None:
            if len(self._wires) > len(self.client.get_nodes()):
                self._wires.clear()  # nodes that have left the cluster
            wire = self._wires[node] = Wire(node, self.timeout)
        return wire

    @contextmanager
    def _named(self, redirect: AskError) -> Iterator[Wire]:
        with named(self.client, redirect) as (node, known):
            yield self._wire(node) if known else Wire(node, self.timeout)


class AsyncRouted:
    """The same for an asyncio client."""

    def __init__(self, client: redis.asyncio.RedisCluster, timeout: float = clients.SOCKET_TIMEOUT) -> None:
        self.client: Any = client
        self.timeout = clients.deadline(client, timeout)
        self._learned = 0.0
        self._learning: asyncio.Task[None] | None = None
        self._doubted: set[str | None] = set()

    async def exchange(self, trip: Trip, until: float) -> list[Any]:
        """Send a call about one row and return its replies, as `Wire.exchange` does."""
        lost: Exception | None = None
        first = True
        while True:
            place = self.place(trip[0])
            try:
                await self._within(until, self.client.initialize)
                if place in self._doubted:
                    await self._learn(until)
                place = self.place(trip[0])
                replies = await self._follow(trip, until)
            except (*ERRORS, AttributeError) as caught:
                error = caught if isinstance(caught, ERRORS) else closed(caught)
                if leaves_unknown(error):
                    lost = error
                self._doubted.add(place)
                again = type(error) in self.client.ERRORS_ALLOW_RETRY and time.monotonic() + RETRY_GAP < until
                if not again:
                    raise lost or error from None
                if not first:
                    await asyncio.sleep(RETRY_GAP)
                first = False
            else:
                self._doubted.discard(place)
                return replies

    def place(self, row: str) -> str | None:
        """Return which node has the row, as `Routed.place` does."""
        try:
            return str(self.client.get_node_from_key(row).name)
        except ERRORS:
            return None

    async def _follow(self, trip: Trip, until: float) -> list[Any]:
        replies = await self._ask(self.client.get_node_from_key(trip[0]), trip, until)
        for _ in range(REDIRECTS):
            redirect = redirection(replies)
            if redirect is None:
                return replies
            if _is_due(redirect, self._learned):
                await self._learn(until)
            host, port = self.client.nodes_manager.remap_host_port(redirect.host, redirect.port)
            node = self.client.get_node(host, port) or AsyncClusterNode(
                host, port, **self.client.get_connection_kwargs()
            )
            replies = _without_asking(redirect, await self._ask(node, _asking(redirect, trip), until))
        return replies

    async def _ask(self, node: Any, trip: Trip, until: float) -> list[Any]:
        try:
            return await AsyncWire(node, self.timeout).exchange(trip, until)
        finally:
            if self.client.get_node(node_name=node.name) is not node:
                await node.disconnect()  # nobody else closes what this call opened on a node that is not in the map

    async def _learn(self, until: float) -> None:
        """Read anew who has which slot, as `Routed` does; a call that is cancelled does not end the reading."""
        learning = self._learning
        if learning is None or learning.done() or learning.get_loop() is not asyncio.get_running_loop():
            self._learned = time.monotonic()
            self._learning = learning = asyncio.create_task(self._initialize(), name="idemredis slots")
        await asyncio.wait([learning], timeout=max(until - time.monotonic(), 0.0) / 2)

    async def _initialize(self) -> None:
        with suppress(*ERRORS, AttributeError, TimeoutError):
            async with asyncio.timeout(LEARN_WITHIN):
                await self.client.nodes_manager.initialize()
            self._doubted.clear()

    async def _within(self, until: float, run: Any) -> None:
        try:
            async with asyncio.timeout(max(until - time.monotonic(), 0.0)):
                await run()
        except TimeoutError as error:
            raise redis.TimeoutError("Timeout waiting for the cluster") from error
        except BaseException as error:
            without_frames(error)
            raise


@contextmanager
def named(client: Any, redirect: AskError) -> Iterator[tuple[Any, bool]]:
    """Give a client of the node that a redirection names, and whether the cluster's client knows that node."""
    host, port = client.nodes_manager.remap_host_port(redirect.host, redirect.port)
    known = client.get_node(host, port)
    node = client.get_redis_connection(known or ClusterNode(host, port))  # type: ignore[no-untyped-call]
    try:
        yield node, bool(known)
    finally:
        if not known:
            node.connection_pool.disconnect()


def redirection(replies: Sequence[Any]) -> AskError | None:
    """Return where a node says that the row is (MOVED or ASK), or None where it has it."""
    return next((reply for reply in replies if isinstance(reply, AskError)), None)


def _asking(redirect: AskError, trip: Trip) -> Trip:
    if isinstance(redirect, MovedError):
        return trip
    row, packed, tokens = trip
    return row, ASKING + packed, (None, *tokens)


def _without_asking(redirect: AskError, replies: list[Any]) -> list[Any]:
    if isinstance(redirect, MovedError):
        return replies
    if isinstance(replies[0], ResponseError):
        return [replies[0]] * (len(replies) - 1)
    return replies[1:]


def _is_due(redirect: AskError, learned: float) -> bool:
    return isinstance(redirect, MovedError) and time.monotonic() - learned > LEARN_GAP


def wire(client: Any, timeout: float = clients.SOCKET_TIMEOUT) -> Any:
    """Return the way to the server of the client, or to the nodes of its cluster: a `Wire`, or an asyncio one."""
    match client:
        case redis.RedisCluster():
            return Routed(client, timeout)
        case redis.asyncio.RedisCluster():
            return AsyncRouted(client, timeout)
        case redis.asyncio.Redis() | AsyncClusterNode():
            return AsyncWire(client, timeout)
        case _:
            return Wire(client, timeout)
