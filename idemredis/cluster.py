"""Where the rows of a cluster are, also while a slot moves; redis-py's own way there is `execute_command`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import redis
import redis.asyncio
from redis.asyncio.cluster import ClusterNode as AsyncClusterNode
from redis.asyncio.cluster import PipelineCommand
from redis.cluster import ClusterNode
from redis.exceptions import AskError, ClusterDownError, ClusterError, MovedError, ResponseError

from .clients import ERRORS
from .errors import LedgerUnavailable
from .operations import Call

__all__ = ["AsyncRouted", "Routed", "routed", "was_redirected"]

ASKING: Final = "ASKING"
"""Said to a node that a slot is moving to, on the connection of the command that follows. redis-py 8.1 takes any two
connections in asyncio, where the command may never arrive, and cannot send to a node that has no slots yet."""


class Routed:
    """Sends a call to the node that has its row, or that the row's slot is moving to.

    Where that is no answer, `redis.RedisCluster` tries by itself, and learns of moved slots and lost nodes.
    """

    def __init__(self, client: redis.RedisCluster) -> None:
        self._client: Any = client

    def execute_command(self, *words: Any, **options: Any) -> Any:
        try:
            return self._send(words, options)
        except ERRORS as error:
            if _is_answer(error):
                raise
        try:
            return self._client.execute_command(*words, **options)
        except (ClusterError, AttributeError):  # it learned who has the slot, and could not ask where that moves to
            return self._send(words, options)

    def nodes(self, calls: Sequence[Call[Any]]) -> list[tuple[redis.Redis, list[int]]]:
        """Return each node's own client, with the places of those calls whose rows it has; some may be on none."""
        found: dict[redis.Redis, list[int]] = {}
        for i, call in enumerate(calls):
            try:
                node = self._node(call.row)
            except ERRORS:
                continue
            found.setdefault(node, []).append(i)
        return list(found.items())

    def _node(self, row: str) -> redis.Redis:
        node: redis.Redis = self._client.get_redis_connection(self._client.get_node_from_key(row))
        return node

    def _send(self, words: Sequence[Any], options: dict[str, Any]) -> Any:
        try:
            return self._node(_row(words)).execute_command(*words, **options)  # type: ignore[no-untyped-call]
        except MovedError:
            raise
        except AskError as moving:
            host, port = moving.host, moving.port
        known = self._client.get_node(host, port)
        node = self._client.get_redis_connection(known or ClusterNode(host, port))  # type: ignore[no-untyped-call]
        try:
            pipeline = node.pipeline(transaction=False)
            pipeline.execute_command(ASKING)
            pipeline.execute_command(*words, **options)
            return _answer(pipeline.execute(raise_on_error=False)[1])
        finally:
            if not known:
                node.close()


class AsyncRouted:
    """The asyncio twin of `Routed`."""

    def __init__(self, client: redis.asyncio.RedisCluster) -> None:
        self._client: Any = client

    async def execute_command(self, *words: Any, **options: Any) -> Any:
        await self._client.initialize()
        try:
            return await self._send(words, options)
        except ERRORS as error:
            if _is_answer(error):
                raise
        try:
            return await self._client.execute_command(*words, **options)
        except (ClusterError, AttributeError):
            return await self._send(words, options)

    async def _send(self, words: Sequence[Any], options: dict[str, Any]) -> Any:
        try:
            return await self._client.get_node_from_key(_row(words)).execute_command(*words, **options)
        except MovedError:
            raise
        except AskError as moving:
            host, port = moving.host, moving.port
        known = self._client.get_node(host, port)
        node = known or AsyncClusterNode(host, port, **self._client.get_connection_kwargs())
        asking, command = PipelineCommand(0, ASKING), PipelineCommand(1, *words, **options)
        try:
            await node.execute_pipeline([asking, command])
            return _answer(command.result)
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


def _is_answer(error: Exception) -> bool:
    """Whether it is the script's own, and not the cluster's word that another node has the row, or that none has."""
    return isinstance(error, ResponseError) and not isinstance(error, (AskError, ClusterDownError))


def _row(words: Sequence[Any]) -> str:
    row: str = words[3] if words[0] in ("EVALSHA", "EVAL") else words[1]
    return row


def _answer(reply: Any) -> Any:
    if isinstance(reply, Exception):
        raise reply
    return reply
