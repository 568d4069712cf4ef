"""Where a client comes from, and which clients a ledger can use."""

from __future__ import annotations

import logging
import re
from typing import Any, TypeAlias, cast
from urllib.parse import parse_qsl, quote, urlsplit

import redis
import redis.asyncio
import redis.asyncio.retry
from redis.backoff import EqualJitterBackoff
from redis.retry import Retry

from ..core.tracebacks import hides_arguments
from ..errors import ConfigurationError

__all__ = [
    "SOCKET_TIMEOUT",
    "AsyncClient",
    "Client",
    "address",
    "async_client",
    "check_async",
    "check_sync",
    "client",
    "clone",
    "deadline",
    "is_cluster",
    "options",
    "own",
    "public_url",
    "uncached",
]

logger = logging.getLogger("idemredis")

Client: TypeAlias = "redis.Redis | redis.RedisCluster"
AsyncClient: TypeAlias = "redis.asyncio.Redis | redis.asyncio.RedisCluster"

SOCKET_TIMEOUT = 1.0
"""Seconds for one reply. A claim takes 0.1 ms; a server that needs a second is down for the client who waits."""

RETRIES = 1
"""How often a client of ours reconnects by itself: for a pooled connection that the server has closed since. Timeouts
and further retries belong to the flows, which know whether a retry is safe."""

_BACKOFF_CAP, _BACKOFF_BASE = 0.1, 0.01  # seconds; within the bound that a 503 is promised in

_POOL_OWN = ("maint_", "orig_", "himport_")  # what redis-py's own pool adds to the options that it was given
_SAFE = ("Redis URL must specify one of the following schemes", "Invalid value for ")
"""How redis-py's own messages about a URL begin. They name a scheme or an option that it knows."""

_memories: dict[str, Any] = {}


@hides_arguments
def client(url: str, socket_timeout: float = SOCKET_TIMEOUT) -> Client:
    """Make a client with timeouts and retries of ours for `redis://`, `rediss://`, `unix://` or `memory://`."""
    if url.startswith("memory:"):
        return cast(Client, _fakeredis().FakeRedis(server=_memory(url)))
    retry = Retry(EqualJitterBackoff(_BACKOFF_CAP, _BACKOFF_BASE), RETRIES, (redis.ConnectionError,))
    return cast(Client, _from_url(redis.Redis.from_url, url, socket_timeout, retry))


@hides_arguments
def async_client(url: str, socket_timeout: float = SOCKET_TIMEOUT) -> AsyncClient:
    """Make an asyncio client with timeouts and retries of ours; see `client` for the URLs."""
    if url.startswith("memory:"):
        return cast(AsyncClient, _fakeredis().FakeAsyncRedis(server=_memory(url)))
    retry = redis.asyncio.retry.Retry(
        EqualJitterBackoff(_BACKOFF_CAP, _BACKOFF_BASE), RETRIES, (redis.ConnectionError,)
    )
    return cast(AsyncClient, _from_url(redis.asyncio.Redis.from_url, url, socket_timeout, retry))


def clone(client: redis.asyncio.Redis) -> redis.asyncio.Redis:
    """Return another client of the same server and settings, with connections of its own."""
    pool = client.connection_pool
    kind, most = pool.connection_class, pool.max_connections
    return type(client).from_pool(type(pool)(connection_class=kind, max_connections=most, **pool.connection_kwargs))


def uncached(client: Any) -> Any:
    """Return the client, or one of the same server with a pool of its own if the client caches replies.

    A cached entry belongs to a connection. redis-py looks for its invalidation there also while another thread waits
    for a reply on that connection, and so takes the reply away.
    """
    pool = client.connection_pool
    if getattr(pool, "cache", None) is None or not isinstance(pool, redis.ConnectionPool):
        return client
    return own(client)


def own(client: Any, **changes: Any) -> redis.Redis:
    """Return a client of the same server that does not cache, with a pool of its own; `changes` are options."""
    pool = client.connection_pool
    kept = {name: value for name, value in options(client).items() if not name.startswith(_POOL_OWN)}
    made = redis.BlockingConnectionPool if isinstance(pool, redis.BlockingConnectionPool) else redis.ConnectionPool
    return redis.Redis(
        connection_pool=made(
            connection_class=pool.connection_class, max_connections=pool.max_connections, **{**kept, **changes}
        )
    )


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


def options(client: Any) -> dict[str, Any]:
    """Return what the client's connections are made of; also of an asyncio cluster's node."""
    made: dict[str, Any] = (
        client.get_connection_kwargs() if hasattr(client, "get_connection_kwargs") else client.connection_kwargs
    )
    return made


def address(client: Any) -> str:
    """Return host:port, or the path of a socket; never a password."""
    known = options(client)
    return str(known["path"]) if "path" in known else f"{known.get('host', 'localhost')}:{known.get('port', 6379)}"


def public_url(client: Any) -> str | None:
    """Return the URL of the client's server; None if it would have a password in it."""
    known = options(client)
    if known.get("password") or known.get("credential_provider"):
        return None
    user = f"{quote(str(known['username']))}@" if known.get("username") else ""
    database = known.get("db") or 0
    if "path" in known:
        return f"unix://{user}{known['path']}?db={database}"
    pool = getattr(client, "connection_pool", None)
    kind = getattr(pool, "connection_class", None)
    tls = known.get("ssl") or (isinstance(kind, type) and issubclass(kind, redis.SSLConnection))
    return f"{'rediss' if tls else 'redis'}://{user}{address(client)}/{database}"


def deadline(client: Any, seconds: float) -> float:
    """Return how long a call may take: so many seconds, or less where the client's own timeout is shorter."""
    own = options(client).get("socket_timeout")
    return seconds if own is None else min(seconds, own)


def _from_url(make: Any, url: str, socket_timeout: float, retry: object) -> Any:
    try:
        parts = urlsplit(url)
        if parts.scheme in ("redis", "rediss") and not re.fullmatch(r"/?|/\d+/?", parts.path):
            raise ConfigurationError(
                "the URL cannot be used: its path must be the number of a database, such as /0; a password with / or ? "
                "in it must be percent-encoded"
            )
        if parts.fragment or (parts.query and not parse_qsl(parts.query, strict_parsing=True)):
            raise ValueError("redis-py would ignore what follows")
        made = make(url, socket_timeout=socket_timeout, socket_connect_timeout=socket_timeout, retry=retry)
        pool = made.connection_pool
        pool.connection_class(**pool.connection_kwargs)  # only here redis-py looks at the options
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(f"the URL cannot be used: {_fault(str(error))}") from None
    except TypeError as error:
        named = re.search(r"argument '([a-z_]+)'", str(error))
        quotable = named and not re.search(r"[?#].*@", url)  # else it may be a part of the password
        option = f"the option {named[1]!r}" if named and quotable else "an option"
        raise ConfigurationError(
            f"the URL cannot be used: it has {option}, which is unknown; remove it, and percent-encode special "
            "characters of the password"
        ) from None
    return made


def _fault(message: str) -> str:
    """Return why a URL cannot be used; what urllib says of one that cannot be parsed quotes it."""
    if message.startswith(_SAFE):
        return f"{message} (it may also be memory://, for one process)"
    return (
        "it cannot be parsed; its form is redis://USER:PASSWORD@HOST:PORT/DATABASE, and special characters of the "
        "password must be percent-encoded"
    )


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
