"""redis-py's errors in our terms."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from typing import Any

from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterCrossSlotError,
    MasterDownError,
    MaxConnectionsError,
    NoPermissionError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    WatchError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..core.text import escaped
from ..core.tracebacks import without_frames
from ..errors import CorruptRow, IdempotencyError, LedgerUnavailable

__all__ = [
    "CLOSED",
    "ERRORS",
    "OutOfStep",
    "PoolExhausted",
    "WatchError",
    "capture_error",
    "closed",
    "is_cross_slot",
    "is_denied",
    "is_no_primary",
    "is_refusal",
    "is_wrong_password",
    "leaves_unknown",
    "map_error",
    "note_unsent",
    "was_redirected",
]

ERRORS = (RedisError, RedisClusterException, OSError)
"""What a call may raise because of the server or the way to it."""

CLOSED = (AttributeError, ValueError)
"""What redis-py raises where another thread or task has closed its connection in the middle of a call."""

_NEVER_SENT = (MaxConnectionsError, AuthenticationError, AuthorizationError)


class OutOfStep(RedisConnectionError):
    """The connection held a reply to somebody else's command. It is closed; the call may have run."""


class PoolExhausted(RedisConnectionError):
    """All the connections that the client's pool may have are in use; nothing was sent."""

    unsent = True


_REASONS: Mapping[str, tuple[type[Exception], ...]] = {
    "busy_pool": (PoolExhausted, MaxConnectionsError),
    "timeout": (RedisTimeoutError,),
    "credentials": (AuthenticationError, AuthorizationError),
    "moved": (AskError,),
    "refused": (ResponseError,),
}

_DENIED = ("NOPERM", "permissions", "can't run this command")
"""In what servers say of a command that an ACL denies. Of one in a script redis-py makes a plain ResponseError."""


_NO_PRIMARY = (ReadOnlyError, MasterDownError, BusyLoadingError)

_NO_PRIMARY_SIGNS = ("READONLY", "MASTERDOWN", "NOREPLICAS", "UNBLOCKED", "replica instances")
"""In the errors of a server that is a replica, becomes one (UNBLOCKED ends a WAIT), or lost its replicas to another
primary. In Redis 6.2, other words come before the error of a script."""


def is_no_primary(error: BaseException) -> bool:
    """Whether the server may not be the primary any more, so that the same address may now lead to another server.

    A replica that is copying the primary's data says that it is loading, as a server does that was restarted.
    """
    causes = (error, error.__context__)  # Sentinel's connections raise a ConnectionError in place of READONLY
    return any(isinstance(cause, _NO_PRIMARY) for cause in causes) or any(
        sign in str(error) for sign in _NO_PRIMARY_SIGNS
    )


def closed(error: Exception) -> RedisConnectionError:
    """Return the error for a connection that redis-py finds gone: another task or thread saw it fail and closed it."""
    return RedisConnectionError(f"the connection was closed meanwhile: {error}")


def note_unsent(error: BaseException) -> None:
    """Note that there was no connection to send the call over: it did not run."""
    error.unsent = True  # type: ignore[attr-defined]


def leaves_unknown(error: Exception) -> bool:
    """Whether the command may have run all the same. A reply that is an error says that nothing was done."""
    return not (getattr(error, "unsent", False) or isinstance(error, (ResponseError, *_NEVER_SENT)))


def map_error(error: Exception, seconds: float, *, unknown: bool = False) -> IdempotencyError:
    """Return our error for one of `ERRORS`, raised after so many seconds.

    Args:
        unknown: the script may have run, whatever the error says.
    """
    text = escaped(str(error)) or type(error).__name__
    if "WRONGTYPE" in text:  # Redis 6.2 prefixes the errors of scripts, which hides their kind from redis-py's classes
        return CorruptRow("it is not a hash")
    if isinstance(error, AskError):
        text = f"the row's slot is moving to {error.host}:{error.port}"
    unknown = unknown or leaves_unknown(error)
    message = f"Redis did not serve the call ({text})"
    mapped = LedgerUnavailable(message, seconds=seconds, unknown=unknown, reason=_reason(error))
    mapped.__cause__ = without_frames(error)
    return mapped


def _reason(error: BaseException) -> str:
    if is_denied(error):
        return "denied"
    return next((reason for reason, kinds in _REASONS.items() if isinstance(error, kinds)), "") or (
        "tls" if isinstance(error.__context__, ssl.SSLError) or "SSL" in str(error) else "connection"
    )


def was_redirected(outcome: object) -> bool:
    """Whether a cluster's node replied that the row is on another one (MOVED or ASK)."""
    return isinstance(outcome, LedgerUnavailable) and isinstance(outcome.__cause__, AskError)


def is_cross_slot(error: BaseException | None) -> bool:
    """Whether a cluster, or a proxy in front of one, wants rows of different slots in different calls."""
    return isinstance(error, ClusterCrossSlotError) or "CROSSSLOT" in str(error) or "same slot" in str(error)


def is_denied(error: BaseException) -> bool:
    """Whether the server's ACL denies the user a command, in a script or outside."""
    return isinstance(error, NoPermissionError) or any(sign in str(error) for sign in _DENIED)


def is_refusal(error: BaseException | None) -> bool:
    """Whether the server replied, and refused."""
    return isinstance(error, ResponseError) and not is_wrong_password(error)


def is_wrong_password(error: BaseException | None) -> bool:
    """Whether the server does not know the user or the password."""
    return isinstance(error, AuthenticationError)


def capture_error(run: Callable[..., Any], *args: Any) -> Any:
    """Return what `run` returns, or the error of ours that it raises."""
    try:
        return run(*args)
    except IdempotencyError as error:
        return error
