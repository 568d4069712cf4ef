"""Plain commands, to each server that a sync client knows: what an operator asks beside the scripts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from redis import RedisCluster
from redis.exceptions import NoScriptError, ResponseError

from .. import clients
from ..clients import ERRORS, Client
from ..cluster import routed
from ..errors import IdempotencyError, LedgerUnavailable
from ..operations import Call
from ..policy import Policy
from ..scripts import load

__all__ = ["Node", "Words", "address", "ask", "ask_all", "connect", "holder", "primaries", "run", "run_all"]

T = TypeVar("T")

Node: TypeAlias = Any
"""A `redis.Redis` of one server; its commands come in too many shapes to be typed."""

Words: TypeAlias = Sequence[str | bytes | int]


def connect(url: str, socket_timeout: float = clients.SOCKET_TIMEOUT) -> Client:
    """Make a client for the server at the URL; where that is one of a cluster, for the whole cluster.

    Raises:
        ConfigurationError: the URL cannot be used.
        LedgerUnavailable: no server answered there.
    """
    made = clients.client(url, socket_timeout)
    try:
        ask(made, "CLUSTER SLOTS")
    except LedgerUnavailable as error:
        if isinstance(error.__cause__, ResponseError):  # no cluster; or this user may not ask, and then it is none
            return made
        raise
    sent = time.monotonic()
    try:
        return RedisCluster.from_url(url, socket_timeout=socket_timeout, socket_connect_timeout=socket_timeout)
    except ERRORS as error:
        raise clients.ours(error, time.monotonic() - sent) from error


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


def address(node: Node) -> str:
    """Return host:port, or the path of a socket; never a password."""
    if not hasattr(node, "get_connection_kwargs"):  # a node of an asyncio cluster
        return f"{node.host}:{node.port}"
    options: Mapping[str, Any] = node.get_connection_kwargs()
    return str(options["path"]) if "path" in options else f"{options.get('host', '?')}:{options.get('port', '?')}"


def ask(node: Node, *words: str | bytes | int) -> Any:
    """Send one command.

    Raises:
        LedgerUnavailable: the server did not answer, or refused.
        CorruptRow: what it is about is not a hash.
    """
    sent = time.monotonic()
    try:
        return node.execute_command(*words, NEVER_DECODE=True)
    except ERRORS as error:
        raise clients.ours(error, time.monotonic() - sent) from error


def ask_all(node: Node, commands: Sequence[Words]) -> list[Any]:
    """Send many in one round trip; what one of them raises comes back as its answer.

    Raises:
        LedgerUnavailable: the server did not answer.
    """
    pipeline = node.pipeline(transaction=False)
    for words in commands:
        pipeline.execute_command(*words, NEVER_DECODE=True)
    sent = time.monotonic()
    try:
        answers = pipeline.execute(raise_on_error=False)
    except ERRORS as error:
        raise clients.ours(error, time.monotonic() - sent) from error
    return [_refusal(answer) if isinstance(answer, Exception) else answer for answer in answers]


def _refusal(error: Exception) -> IdempotencyError:
    refused = clients.ours(error, 0.0)
    refused.__cause__ = error
    return refused


def run_all(node: Node, calls: Sequence[Call[Any]]) -> list[Any]:
    """Run scripts on one server in one round trip; errors are returned in the place of results.

    Raises:
        LedgerUnavailable: the server did not answer.
    """
    batch = clients.Batch(calls, load(), Policy())
    while commands := batch.commands():
        pipeline = node.pipeline(transaction=False)
        for words in commands:
            pipeline.execute_command(*words, NEVER_DECODE=True)
        sent = time.monotonic()
        try:
            replies = pipeline.execute(raise_on_error=False)
        except ERRORS as error:
            raise clients.ours(error, time.monotonic() - sent) from error
        batch.receive(replies, sent)
    return batch.answers


def run(client: Node, call: Call[T]) -> T:
    """Run one script, without a ledger and so without its events, retries and waits.

    Raises:
        LedgerUnavailable, CorruptRow: as a ledger's calls do.
    """
    script = load()[call.script]
    execute = routed(client).execute_command
    sent = time.monotonic()
    try:
        try:
            reply = execute("EVALSHA", script.sha, 1, call.row, *call.args, NEVER_DECODE=True)
        except NoScriptError:
            reply = execute("EVAL", script.text, 1, call.row, *call.args, NEVER_DECODE=True)
    except ERRORS as error:
        raise clients.ours(error, time.monotonic() - sent) from error
    return call.outcome(reply, sent)
