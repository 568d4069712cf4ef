"""The types of ASGI 3 (https://asgi.readthedocs.io/en/latest/specs/main.html)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

__all__ = ["ASGIApp", "Headers", "Message", "Receive", "Scope", "Send", "header"]

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
ASGIApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers: TypeAlias = list[tuple[bytes, bytes]]


def header(scope: Scope, name: bytes) -> str | None:
    """Return a request header, or None; repeated lines are joined by a comma (RFC 9110 §5.3)."""
    found = [value for key, value in scope["headers"] if key == name]
    if not found:
        return None
    return (found[0] if len(found) == 1 else b",".join(found)).decode("latin-1")
