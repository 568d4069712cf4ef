"""Plain commands, to each server that a sync client knows: what an operator asks beside the scripts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeAlias

import redis
from redis import RedisCluster

from ..core.tracebacks import hides_arguments
from ..errors import LedgerUnavailable
from . import clients
from .clients import Client
from .cluster import wire
from .errors import ERRORS, is_refusal, map_error
from .wire import Trip, Words, encode

__all__ = [
    "Node",
    "ask",
    "ask_all",
    "connect",
    "holder",
    "one_connection",
    "own_client",
    "own_wire",
    "primaries",
    "send",
    "send_async",
]

Node: TypeAlias = Any
"""A `redis.Redis` of one server; its commands come in too many shapes to be typed."""


@hides_arguments
def connect(url: str, socket_timeout: float = clients.SOCKET_TIMEOUT) -> Client:
    """Make a client for the server at the URL; where that is one of a cluster, for the whole cluster.

    Raises:
        ConfigurationError: the URL cannot be used.
        LedgerUnavailable: no server replied there.
    """
    made = clients.client(url, socket_timeout)
    try:
        ask(made, "CLUSTER SLOTS")
    except LedgerUnavailable as error:
        if is_refusal(error.__cause__):  # no cluster; or this user may not ask, and then it is none
            return made
        raise
    sent = time.monotonic()
    try:
        return RedisCluster.from_url(url, socket_timeout=socket_timeout, socket_connect_timeout=socket_timeout)
    except ERRORS as error:
        raise map_error(error, time.monotonic() - sent) from error


def primaries(client: Client) -> list[Node]:
    """Return a client of each server that may hold rows: the one there is, or every primary of a cluster."""
    if not clients.is_cluster(client):
        return [client]
    cluster: Any = client
    return [cluster.get_redis_connection(node) for node in cluster.get_primaries()]


def holder(client: Client, row: str) -> Node:
    """Return a client of the server that holds the row."""
    if not clients.is_cluster(client):
        return client
    cluster: Any = client
    return cluster.get_redis_connection(cluster.get_node_from_key(row))


def ask(node: Node, *words: str | bytes | int) -> Any:
    """Send one command.

    Raises:
        LedgerUnavailable: the server did not reply, or refused.
        CorruptRow: what it is about is not a hash.
    """
    [reply] = ask_all(node, [words])
    if isinstance(reply, Exception):
        raise reply
    return reply


def ask_all(node: Node, commands: Sequence[Words]) -> list[Any]:
    """Send many in one round trip; where one fails, our error for it stands in the place of its reply."""
    sent = time.monotonic()
    return [
        map_error(reply, time.monotonic() - sent) if isinstance(reply, ERRORS) else reply
        for reply in send(own_wire(node), commands)
    ]


def own_wire(node: Node) -> Any:
    """Return the way to a server with the timeout that its client was made with."""
    return wire(node, clients.options(node).get("socket_timeout") or clients.SOCKET_TIMEOUT)


def send(wire: Any, commands: Sequence[Words]) -> list[Any]:
    """Send plain commands in one round trip; an error is returned in the place of a reply."""
    if not commands:
        return []
    try:
        replies = wire.exchange(_trip(commands), time.monotonic() + wire.timeout)
    except ERRORS as error:
        return [error] * len(commands)
    return _parsed(wire, commands, replies)


async def send_async(wire: Any, commands: Sequence[Words]) -> list[Any]:
    """Send plain commands in one round trip over an asyncio client, or to a cluster's node."""
    if not commands:
        return []
    try:
        replies = await wire.exchange(_trip(commands), time.monotonic() + wire.timeout)
    except ERRORS as error:
        return [error] * len(commands)
    return _parsed(wire, commands, replies)


def _trip(commands: Sequence[Words]) -> Trip:
    [name, *arguments] = commands[0]  # a cluster's have one row
    row = arguments[2 if name == "EVAL" else 0] if arguments else ""
    return str(row), encode(commands), [None] * len(commands)


def _parsed(wire: Any, commands: Sequence[Words], replies: Sequence[Any]) -> list[Any]:
    """Read replies as the client itself reads those to such commands."""
    known = getattr(wire.client, "response_callbacks", {})
    return [
        known[words[0]](reply) if words[0] in known and not isinstance(reply, Exception) else reply
        for words, reply in zip(commands, replies, strict=True)
    ]


def own_client(node: Node) -> Node:
    """Return a client with connections of its own, which end with it, and of the older protocol.

    A connection that speaks RESP2 gets the names of written rows as messages of a channel.
    """
    return clients.own(node, protocol=2)


def one_connection(node: Node) -> Node:
    """Return a client that keeps one of the node's connections for itself."""
    return redis.Redis(connection_pool=node.connection_pool, single_connection_client=True)
