"""The sessions that are passed to `Effects`: open the one that is meant, and end its transaction in every case."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from ..errors import ConfigurationError

__all__ = ["abandon", "is_async", "makes_async", "opened", "session_of"]


def session_of(given: Any) -> Any:
    """Return a session, or the current one of a `scoped_session`.

    Raises:
        ConfigurationError: it is neither.
    """
    session = given() if hasattr(given, "registry") else given
    if isinstance(session, Session) or is_async(session):
        return session
    raise ConfigurationError(f"a Session or AsyncSession is needed, not {type(session).__name__}")


def opened(given: Any) -> tuple[Any, bool]:
    """Return a session, and True if it was made here, so that the caller must close it.

    Args:
        given: a function that makes a session, such as a `sessionmaker`; or a session, or a `scoped_session`.

    Raises:
        ConfigurationError: it is none of these.
    """
    if hasattr(given, "registry") or isinstance(given, Session) or is_async(given):
        return session_of(given), False
    if not callable(given):
        raise ConfigurationError(f"pass what makes a session, such as a sessionmaker, not {type(given).__name__}")
    return session_of(given()), True


def is_async(session: object) -> bool:
    """Return True for an `AsyncSession`, whose module needs greenlet and so is not imported here."""
    return hasattr(session, "run_sync")


def makes_async(given: Any) -> bool:
    """Return True if this makes an `AsyncSession`, as far as can be seen without calling it."""
    factory = getattr(given, "session_factory", given)  # of a scoped session
    return is_async(getattr(factory, "class_", factory))


def abandon(session: Session) -> None:
    """Roll the session's transaction back; if that fails, close its connections, and the database rolls it back."""
    try:
        session.rollback()
    except Exception:
        session.invalidate()
