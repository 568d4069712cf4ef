"""The types of ASGI 3 (https://asgi.readthedocs.io/en/latest/specs/main.html)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

__all__ = ["ASGIApp", "Headers", "Message", "Receive", "Scope", "Send", "all_headers", "header"]

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
ASGIApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers: TypeAlias = list[tuple[bytes, bytes]]


def header(scope: Scope, name: bytes) -> str | None:
    """Return a request header, or None; repeated lines are joined by a comma (RFC 9110 §5.3)."""
    found = [value for key, value in scope["headers"] if key == name]
    return b",".join(found).decode("latin-1") if found else None


def all_headers(scope: Scope) -> dict[str, str]:
    """Return the request's headers by lower-case name, joined as by `header`."""
    found: dict[str, str] = {}
    for raw, value in scope["headers"]:
        name, text = raw.decode("latin-1"), value.decode("latin-1")
        found[name] = f"{found[name]},{text}" if name in found else text
    return found
