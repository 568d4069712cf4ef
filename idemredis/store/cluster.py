"""Sends a command to where its row is: on a cluster, also while slots move from one node to another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final

import redis
import redis.asyncio
from redis.asyncio.cluster import ClusterNode as AsyncClusterNode
from redis.asyncio.cluster import PipelineCommand
from redis.cluster import ClusterNode
from redis.exceptions import AskError, MovedError, SlotNotCoveredError

from ..core.operations import Call
from ..errors import LedgerUnavailable
from .errors import ERRORS, leaves_unknown
from .evaluate import evaluate, evaluate_async

__all__ = ["AsyncRouted", "Routed", "routed", "was_redirected"]

ASKING: Final = "ASKING"
"""Said to a node that a slot is moving to, on the connection of the command that follows. redis-py 8.1 says it on any
connection in asyncio, so that the command may never arrive; and where the node has no slots yet, a sync client of its
gives one connection to two threads. So it is never left to follow a slot that moves."""

REDIRECTS = 5
"""From one node to the next, for one command: one or two while a slot moves."""

LEARN_GAP = 1.0
"""Seconds between two readings of who has which slot, where a node has one no more. Until then each call is told where
to go: thousands of slots may move, and to read all 16,384 takes some milliseconds."""


class Routed:
    """Sends a command to the node that has its row, or that the row's slot is moving to.

    What `redis.RedisCluster` would try again is tried again, as often; that it may have run is not forgotten.
    """

    def __init__(self, client: redis.RedisCluster) -> None:
        self._client: Any = client
        self._learned = 0.0

    def execute_command(self, *words: Any, **options: Any) -> Any:
        row = _row(words)
        retries = left = self._client.retry.get_retries()
        lost: Exception | None = None
        while True:
            try:
                return self._send(row, words, options)
            except ERRORS as error:
                if leaves_unknown(error):
                    lost = error
                if type(error) not in self._client.ERRORS_ALLOW_RETRY:
                    raise lost or error from None
                if left == retries:  # once a call: to look again takes longer than to try again
                    self.refresh(row)
                if left <= 0:
                    raise lost or error from None
                left -= 1

    def refresh(self, row: str) -> None:
        """Have redis-py look at the row's node: it drops dead connections, and finds out who has the slot now."""
        with suppress(*ERRORS):
            try:
                node = self._client.get_node_from_key(row)
            except SlotNotCoveredError:
                self._client.nodes_manager.initialize()
            else:
                self._client.execute_command("PING", target_nodes=node)

    def evaluate(self, calls: Sequence[Call[Any]], *how: Any) -> list[Any]:
        """Run scripts, in one round trip to each node; a redirected one is sent again by itself. See `evaluation`."""
        outcomes: dict[int, Any] = {}
        for node, places in self._nodes(calls) if len(calls) > 1 else ():  # a cluster's own pipeline refuses EVALSHA
            found = evaluate(node, [calls[i] for i in places], *how)
            outcomes |= zip(places, found, strict=True)
            if any(isinstance(outcome, LedgerUnavailable) and outcome.unknown for outcome in found):
                self.refresh(calls[places[0]].row)
        return [
            outcomes[i] if i in outcomes and not was_redirected(outcomes[i]) else evaluate(self, [call], *how)[0]
            for i, call in enumerate(calls)
        ]

    def _nodes(self, calls: Sequence[Call[Any]]) -> list[tuple[redis.Redis, list[int]]]:
        """Return each node's own client, with the places of those calls whose rows it has; some may be on none."""
        found: dict[redis.Redis, list[int]] = {}
        for i, call in enumerate(calls):
            try:
                node = self._node(call.row)
            except ERRORS:
                continue
            found.setdefault(node, []).append(i)
        return list(found.items())

    def _send(self, row: str, words: Sequence[Any], options: dict[str, Any]) -> Any:
        try:
            return self._node(row).execute_command(*words, **options)  # type: ignore[no-untyped-call]
        except AskError as error:
            redirect = error
        for _ in range(REDIRECTS):
            if _is_due(redirect, self._learned):
                self._learned = time.monotonic()
                with suppress(*ERRORS):
                    self._client.nodes_manager.initialize()
            with self._named(redirect) as node:
                pipeline = node.pipeline(transaction=False)
                for command in _commands(redirect, words):
                    pipeline.execute_command(*command, **options)  # type: ignore[no-untyped-call]
                try:
                    return _last(pipeline.execute(raise_on_error=False))
                except AskError as error:
                    redirect = error
        raise redirect

    def _node(self, row: str) -> redis.Redis:
        node: redis.Redis = self._client.get_redis_connection(self._client.get_node_from_key(row))
        return node

    @contextmanager
    def _named(self, redirect: AskError) -> Iterator[redis.Redis]:
        host, port = self._client.nodes_manager.remap_host_port(redirect.host, redirect.port)
        known = self._client.get_node(host, port)
        node = self._client.get_redis_connection(known or ClusterNode(host, port))  # type: ignore[no-untyped-call]
        try:
            yield node
        finally:
            if not known:
                node.connection_pool.disconnect()


class AsyncRouted:
    """The asyncio twin of `Routed`."""

    def __init__(self, client: redis.asyncio.RedisCluster) -> None:
        self._client: Any = client
        self._learned = 0.0

    async def execute_command(self, *words: Any, **options: Any) -> Any:
        row = _row(words)
        retries = left = self._client.retry.get_retries()
        lost: Exception | None = None
        while True:
            try:
                return await self._send(row, words, options)
            except (*ERRORS, AttributeError) as caught:
                error = caught if isinstance(caught, ERRORS) else _closed(caught)
                if leaves_unknown(error):
                    lost = error
                if type(error) not in self._client.ERRORS_ALLOW_RETRY:
                    raise lost or error from None
                if left == retries:
                    await self._refresh(row)
                if left <= 0:
                    raise lost or error from None
                left -= 1

    async def evaluate(self, calls: Sequence[Call[Any]], *how: Any) -> list[Any]:
        """Run scripts side by side."""
        found = await asyncio.gather(*(evaluate_async(self, [call], *how) for call in calls))
        return [outcome for [outcome] in found]

    async def _refresh(self, row: str) -> None:
        with suppress(*ERRORS):
            try:
                node = self._client.get_node_from_key(row)
            except SlotNotCoveredError:
                await self._client.nodes_manager.initialize()
            else:
                with suppress(*ERRORS):
                    await self._client.execute_command("PING", target_nodes=node)
                await self._client.initialize()

    async def _send(self, row: str, words: Sequence[Any], options: dict[str, Any]) -> Any:
        await self._client.initialize()
        try:
            return await self._client.get_node_from_key(row).execute_command(*words, **options)
        except AskError as error:
            redirect = error
        for _ in range(REDIRECTS):
            if _is_due(redirect, self._learned):
                self._learned = time.monotonic()
                with suppress(*ERRORS):
                    await self._client.nodes_manager.initialize()
            async with self._named(redirect) as node:
                queued = [PipelineCommand(i, *each, **options) for i, each in enumerate(_commands(redirect, words))]
                await node.execute_pipeline(queued)
                try:
                    return _last([command.result for command in queued])
                except AskError as error:
                    redirect = error
        raise redirect

    @asynccontextmanager
    async def _named(self, redirect: AskError) -> AsyncIterator[Any]:
        host, port = self._client.nodes_manager.remap_host_port(redirect.host, redirect.port)
        known = self._client.get_node(host, port)
        node = known or AsyncClusterNode(host, port, **self._client.get_connection_kwargs())
        try:
            yield node
        finally:
            if not known:
                await node.disconnect()


def routed(client: object) -> Any:
    """Return what sends a command to the server of its row: the client itself where there is but one."""
    if isinstance(client, redis.RedisCluster):
        return Routed(client)
    if isinstance(client, redis.asyncio.RedisCluster):
        return AsyncRouted(client)
    return client


def was_redirected(answer: object) -> bool:
    """Whether a cluster's node said that the row is on another one (MOVED or ASK)."""
    return isinstance(answer, LedgerUnavailable) and isinstance(answer.__cause__, AskError)


def _row(words: Sequence[Any]) -> str:
    row: str = words[3] if words[0] in ("EVALSHA", "EVAL") else words[1]
    return row


def _closed(error: AttributeError) -> Exception:
    """Say what it means that redis-py 8.1 finds its connection gone: another task saw the node fail, and closed it."""
    closed = redis.ConnectionError(f"the connection was closed meanwhile: {error}")
    closed.__cause__ = error
    return closed


def _is_due(redirect: AskError, learned: float) -> bool:
    return isinstance(redirect, MovedError) and time.monotonic() - learned > LEARN_GAP


def _commands(redirect: AskError, words: Sequence[Any]) -> list[Sequence[Any]]:
    return [words] if isinstance(redirect, MovedError) else [(ASKING,), words]


def _last(replies: Sequence[Any]) -> Any:
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies[-1]
