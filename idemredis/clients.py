"""Where a client comes from, and what its errors mean. The one module that knows redis-py's ways."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import redis
import redis.asyncio
import redis.asyncio.retry
from redis.backoff import EqualJitterBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    MaxConnectionsError,
    NoPermissionError,
    NoScriptError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.retry import Retry

from . import operations
from .errors import ConfigurationError, CorruptRow, IdempotencyError, LedgerUnavailable
from .operations import Call
from .policy import Policy
from .scripts import Script

__all__ = [
    "ERRORS",
    "AsyncClient",
    "Batch",
    "Client",
    "async_client",
    "attempt",
    "check_async",
    "check_sync",
    "client",
    "is_cluster",
    "is_denied",
    "leaves_unknown",
    "ours",
    "socket_timeout",
    "twin",
]

logger = logging.getLogger("idemredis")

Client: TypeAlias = "redis.Redis | redis.RedisCluster"
AsyncClient: TypeAlias = "redis.asyncio.Redis | redis.asyncio.RedisCluster"

ERRORS = (RedisError, RedisClusterException, OSError)
"""What a call may raise because of the server or the way to it."""

SOCKET_TIMEOUT = 1.0
"""Seconds for one answer. A claim takes 0.1 ms; a server that needs a second is down for the client who waits."""

RETRIES = 1
"""How often a client of ours reconnects by itself: for a pooled connection that the server has closed since. What is
more, and a timeout, is left to the flows, which ask again and know why."""

_BACKOFF_CAP, _BACKOFF_BASE = 0.1, 0.01  # seconds; within the bound that a 503 is promised in

_NEVER_SENT = (MaxConnectionsError, AuthenticationError, AuthorizationError)

_DENIED = ("NOPERM", "permissions", "can't run this command")
"""In what servers say of a command that an ACL denies. Of one in a script redis-py makes a plain ResponseError."""

_memories: dict[str, Any] = {}


def client(url: str, socket_timeout: float = SOCKET_TIMEOUT) -> Client:
    """Make a client with timeouts and retries of ours for `redis://`, `rediss://`, `unix://` or `memory://`."""
    if url.startswith("memory:"):
        return cast(Client, _fakeredis().FakeRedis(server=_memory(url)))
    retry = Retry(EqualJitterBackoff(_BACKOFF_CAP, _BACKOFF_BASE), RETRIES, (redis.ConnectionError,))
    return cast(Client, _from_url(redis.Redis.from_url, url, socket_timeout, retry))


def async_client(url: str, socket_timeout: float = SOCKET_TIMEOUT) -> AsyncClient:
    """The asyncio twin of `client`."""
    if url.startswith("memory:"):
        return cast(AsyncClient, _fakeredis().FakeAsyncRedis(server=_memory(url)))
    retry = redis.asyncio.retry.Retry(
        EqualJitterBackoff(_BACKOFF_CAP, _BACKOFF_BASE), RETRIES, (redis.ConnectionError,)
    )
    return cast(AsyncClient, _from_url(redis.asyncio.Redis.from_url, url, socket_timeout, retry))


def twin(client: redis.asyncio.Redis) -> redis.asyncio.Redis:
    """Return another client of the same server and settings, with connections of its own."""
    pool = client.connection_pool
    return type(client).from_pool(type(pool)(pool.connection_class, **pool.connection_kwargs))


def check_sync(candidate: object) -> None:
    """Refuse what `Ledger` cannot drive.

    Raises:
        ConfigurationError: it is an asyncio client, or no client at all.
    """
    if isinstance(candidate, (redis.asyncio.Redis, redis.asyncio.RedisCluster)):
        raise ConfigurationError(f"Ledger needs a sync client, not {_path(candidate)}; use AsyncLedger, or redis.Redis")
    _check(candidate)


def check_async(candidate: object) -> None:
    """Refuse what `AsyncLedger` cannot drive.

    Raises:
        ConfigurationError: it is a sync client, or no client at all.
    """
    if isinstance(candidate, (redis.Redis, redis.RedisCluster)):
        raise ConfigurationError(
            f"AsyncLedger needs an asyncio client, not {_path(candidate)}; use redis.asyncio.Redis"
        )
    _check(candidate)


def is_cluster(candidate: object) -> bool:
    return isinstance(candidate, (redis.RedisCluster, redis.asyncio.RedisCluster))


def socket_timeout(candidate: Client | AsyncClient) -> float | None:
    """Return how many seconds the client waits for an answer; None when it waits for ever or does not say."""
    kwargs: dict[str, Any] = candidate.get_connection_kwargs()
    return kwargs.get("socket_timeout")


def leaves_unknown(error: Exception) -> bool:
    """Whether the command may have run all the same. An answer that is an error says that nothing was done."""
    return not isinstance(error, (ResponseError, *_NEVER_SENT))


def is_denied(error: BaseException) -> bool:
    """Whether the server's ACL denies the user a command, in a script or outside."""
    return isinstance(error, NoPermissionError) or any(sign in str(error) for sign in _DENIED)


def ours(error: Exception, seconds: float, *, unknown: bool = False) -> IdempotencyError:
    """Say in our words what a client's error means; `unknown` where the script may have run whatever the error says."""
    text = str(error) or type(error).__name__
    if "WRONGTYPE" in text:  # Redis 6.2 prefixes the errors of scripts, which hides their kind from redis-py's classes
        return CorruptRow("it is not a hash")
    if isinstance(error, AskError):
        text = f"the row's slot is moving to {error.host}:{error.port}"
    unknown = unknown or leaves_unknown(error)
    verdict = "it is not known whether it ran" if unknown else "it did not run"
    return LedgerUnavailable(f"Redis did not serve the call ({text}); {verdict}", seconds=seconds, unknown=unknown)


def _from_url(make: Any, url: str, socket_timeout: float, retry: object) -> Any:
    try:
        return make(url, socket_timeout=socket_timeout, socket_connect_timeout=socket_timeout, retry=retry)
    except ValueError as error:
        raise ConfigurationError(
            f"the URL cannot be used: {error} (it may also be memory://, for one process)"
        ) from None


def _check(candidate: object) -> None:
    if isinstance(candidate, type) or not callable(getattr(candidate, "execute_command", None)):
        raise ConfigurationError(f"a ledger needs a redis-py client, not {_path(candidate)}; Ledger.from_url makes one")


def _path(candidate: object) -> str:
    return f"{type(candidate).__module__}.{type(candidate).__qualname__}"


def _fakeredis() -> Any:
    try:
        import fakeredis
        import lupa  # noqa: F401  # without it fakeredis has no scripts
    except ImportError as missing:
        raise ConfigurationError(f"memory:// needs {missing.name}; pip install 'idemredis[memory]'") from None
    return fakeredis


def _memory(url: str) -> Any:
    """One store a name; `memory://` alone is a new one each time."""
    logger.warning(
        "%s keeps the ledger in this process alone: nothing is shared with other processes, all is lost at exit", url
    )
    name = url.removeprefix("memory:").strip("/")
    if not name:
        return _fakeredis().FakeServer()
    return _memories.setdefault(name, _fakeredis().FakeServer())


class Batch:
    """Calls that go out together, each followed by WAIT where it must be durable: EVALSHA, then EVAL where unknown."""

    def __init__(self, calls: Sequence[Call[Any]], scripts: Mapping[str, Script], policy: Policy) -> None:
        self.answers: list[Any] = [None] * len(calls)
        self._calls = calls
        self._scripts = scripts
        self._policy = policy
        self._left = list(range(len(calls)))
        self._command = "EVALSHA"

    def commands(self) -> list[tuple[Any, ...]]:
        commands: list[tuple[Any, ...]] = []
        for call in (self._calls[i] for i in self._left):
            script = self._scripts[call.script]
            commands.append(
                (self._command, script.sha if self._command == "EVALSHA" else script.text, 1, call.row, *call.args)
            )
            if self._waits(call):
                timeout = operations.milliseconds(self._policy.replica_timeout)
                commands.append(("WAIT", self._policy.min_replicas, timeout))
        return commands

    def receive(self, replies: Sequence[Any], sent: float) -> None:
        """Decode what came; what the server has no script for is left for EVAL."""
        rest = iter(replies)
        left, self._left = self._left, []
        for i in left:
            call, reply = self._calls[i], next(rest)
            replicas = next(rest) if self._waits(call) else self._policy.min_replicas
            if isinstance(reply, NoScriptError) and self._command == "EVALSHA":
                self._left.append(i)
            else:
                self.answers[i] = attempt(self._decode, call, reply, replicas, sent)
        self._command = "EVAL"

    def _decode(self, call: Call[Any], reply: Any, replicas: Any, sent: float) -> Any:
        if isinstance(reply, Exception):
            raise ours(reply, time.monotonic() - sent) from reply
        outcome = call.outcome(reply, sent)
        if isinstance(replicas, Exception):  # the server refuses WAIT, but the script has run
            unserved = ours(replicas, time.monotonic() - sent, unknown=True)
            raise unserved from replicas
        return operations.acknowledged(outcome, replicas, self._policy.min_replicas)

    def _waits(self, call: Call[Any]) -> bool:
        return bool(call.durable and self._policy.min_replicas)


def attempt(run: Callable[..., Any], *args: Any) -> Any:
    """Return what `run` returns, or the error of ours that it raises."""
    try:
        return run(*args)
    except IdempotencyError as error:
        return error
