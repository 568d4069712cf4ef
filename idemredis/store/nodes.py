"""Plain commands, to each server that a sync client knows: what an operator asks beside the scripts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import redis
from redis import RedisCluster
from redis.exceptions import AskError, ClusterError, MovedError, NoScriptError, WatchError

from ..core.keys import row_bytes
from ..core.scripts import Script
from ..core.tracebacks import hides_arguments
from ..errors import LedgerUnavailable
from . import clients
from .clients import Client
from .cluster import REDIRECTS, named, wire
from .errors import ERRORS, is_refusal, map_error, note_unsent
from .wire import Trip, Words, encode

__all__ = [
    "Node",
    "Watched",
    "ask",
    "ask_all",
    "connect",
    "holder",
    "one_connection",
    "own_client",
    "own_wire",
    "primaries",
    "run_on_many",
    "send",
    "send_async",
    "watching",
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
        note_unsent(error)
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
    return cluster.get_redis_connection(cluster.get_node_from_key(row_bytes(row)))


class Watched:
    """A row on the server that has it, which is deleted only if nobody changes it meanwhile."""

    def __init__(self, transaction: Any, row: bytes, asking: bool) -> None:
        self._transaction = transaction
        self._asking = asking
        self._row = row
        self._ask()
        transaction.watch(row)

    def delete(self) -> None:
        """Delete the row.

        Raises:
            WatchError: the row was changed, or moved to another server of its cluster.
        """
        self._ask()
        self._transaction.multi()
        self._transaction.delete(self._row)
        try:
            self._transaction.execute()
        except AskError as moved:
            raise WatchError(str(moved)) from moved

    def _ask(self) -> None:
        if self._asking:  # while a slot is being moved to this server, it refuses other commands on its rows
            self._transaction.immediate_execute_command("ASKING")


@contextmanager
def watching(client: Client, row: str) -> Iterator[Watched]:
    """Watch a row from now on, on the server that has it, also while its slot is being moved to another.

    Raises:
        redis.RedisError, OSError: the server did not reply, or refused.
    """
    name = row_bytes(row)
    with ExitStack() as opened:
        node, asking = holder(client, row), False
        for _ in range(REDIRECTS):
            try:
                watched = Watched(opened.enter_context(node.pipeline()), name, asking)
                break
            except AskError as redirect:
                if not clients.is_cluster(client):
                    raise
                node, _known = opened.enter_context(named(client, redirect))
                asking = not isinstance(redirect, MovedError)
        else:
            raise ClusterError(f"the row is on none of {REDIRECTS} servers in turn, since its slot is being moved")
        yield watched


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


def run_on_many(
    node: Node, script: Script, groups: Sequence[Sequence[bytes]], args: Sequence[str | bytes | int]
) -> list[Any]:
    """Run a script on each group of rows, in one round trip, or two if the server has not seen it.

    Where one fails, our error for it stands in the place of its reply.
    """
    replies = ask_all(node, [("EVALSHA", script.sha, len(rows), *rows, *args) for rows in groups])
    unseen = [i for i, reply in enumerate(replies) if _is_unseen(reply)]
    by_text = ask_all(node, [("EVAL", script.text, len(groups[i]), *groups[i], *args) for i in unseen])
    for i, reply in zip(unseen, by_text, strict=True):
        replies[i] = reply
    return replies


def _is_unseen(reply: Any) -> bool:
    return isinstance(reply, LedgerUnavailable) and isinstance(reply.__cause__, NoScriptError)


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
