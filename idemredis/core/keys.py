"""What a valid key is, who it belongs to, and the name of its row."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote, unquote
from uuid import UUID

from ..errors import ConfigurationError, InvalidKey, InvalidPrincipal

__all__ = [
    "MAX_KEY_LENGTH",
    "MAX_ROUTE_BYTES",
    "Identity",
    "identify",
    "parse_row_name",
    "row_prefix",
    "valid_key",
    "valid_principal",
    "valid_route",
]

MAX_KEY_LENGTH = 255
"""Characters. The limit the large payment APIs publish, so that a client's keys fit everywhere."""

MAX_ROUTE_BYTES = 64
"""Bytes of UTF-8 that a row's hash keeps packed: one longer value would double the memory of a pending row."""

ROUTES_REMEMBERED = 1024
"""Routes whose short form is kept: more than a service has endpoints."""

_SHORTENED = b"..."
_UNENCODED = "-._~/@+=,"
_PLAIN = re.compile(r"[A-Za-z0-9\-._~/@+=,:]*\Z")


class Identity(NamedTuple):
    """Whose operation a row stands for, and the row's name in Redis."""

    principal: str
    operation: str
    key: str
    row: str


def valid_key(key: object) -> str:
    """Return `key`, or refuse it before anything is written.

    Raises:
        InvalidKey: it is not a str of 1 to 255 printable ASCII characters (0x20 to 0x7e). The message names the
            place of the first wrong character and never repeats the key.
    """
    if not isinstance(key, str):
        raise InvalidKey(f"a key must be a str, not {type(key).__name__}")
    if 0 < len(key) <= MAX_KEY_LENGTH and key.isascii() and key.isprintable():
        return key
    if not key:
        raise InvalidKey("the key is empty; send 1 to 255 printable ASCII characters")
    if len(key) > MAX_KEY_LENGTH:
        raise InvalidKey(f"the key has {len(key)} characters; at most {MAX_KEY_LENGTH} are allowed")
    at, wrong = next((i, c) for i, c in enumerate(key) if not " " <= c <= "~")
    raise InvalidKey(f"the key has U+{ord(wrong):04X} at position {at}; only printable ASCII (0x20 to 0x7e) is allowed")


def valid_principal(principal: object) -> str:
    """Return `principal` as text, or refuse it.

    Raises:
        InvalidPrincipal: it is not a str, int or UUID, or is empty or blank.
    """
    if isinstance(principal, bool) or not isinstance(principal, (str, int, UUID)):
        raise InvalidPrincipal(f"a principal must be a str, int or UUID, not {type(principal).__name__}")
    text = str(principal)
    if not text or text.isspace():
        raise InvalidPrincipal("the principal is empty or blank; derive it from the authenticated account")
    return text


def valid_route(route: str) -> str:
    """Return the name of an endpoint or function as rows and events have it: at most 64 bytes, shortened in the middle.

    Raises:
        ConfigurationError: it is not a str.
    """
    if not isinstance(route, str):
        raise ConfigurationError(f"a route must be a str, not {type(route).__name__}")
    return _short(route)


def identify(namespace: str, principal: object, key: object, operation: str = "") -> Identity:
    """Name the row of one (principal, operation, key).

    Raises:
        InvalidKey: see `valid_key`.
        InvalidPrincipal: `principal` is not a str, int or UUID, or is blank.
    """
    who = valid_principal(principal)
    what = valid_key(key)
    if not isinstance(operation, str):
        raise ConfigurationError(f"an operation must be a str, not {type(operation).__name__}")
    parts = [namespace, who, operation, what] if operation else [namespace, who, what]
    row = ":".join(parts)
    if not _PLAIN.match(row) or row.count(":") >= len(parts):
        try:
            row = ":".join([quote(part, safe=_UNENCODED) for part in parts])
        except UnicodeEncodeError:
            raise InvalidPrincipal(
                "a principal or operation must be text that UTF-8 can encode (no lone surrogates)"
            ) from None
    return Identity(who, operation, what, row)


def row_prefix(namespace: str, principal: str = "") -> str:
    """Return what the names of the namespace's rows, or of one principal's, begin with. Safe in a SCAN pattern."""
    row = identify(namespace, principal or "x", "x").row
    return row[:-1] if principal else row[:-3]


def parse_row_name(name: str | bytes) -> tuple[str, str, str, str]:
    """Read a row's name back into (namespace, principal, operation, key).

    Raises:
        ValueError: it is not the name of a row.
    """
    text = name.decode("ascii", "replace") if isinstance(name, bytes) else name
    parts = text.split(":")
    if len(parts) not in (3, 4):
        raise ValueError(f"not the name of a row: {text!r} has {len(parts)} parts, and a row has 3 or 4")
    namespace, principal, *operation, key = (unquote(part, errors="strict") for part in parts)
    return namespace, principal, operation[0] if operation else "", key


@lru_cache(ROUTES_REMEMBERED)
def _short(route: str) -> str:
    data = route.encode("utf-8", "backslashreplace")
    if len(data) > MAX_ROUTE_BYTES:
        half = (MAX_ROUTE_BYTES - len(_SHORTENED)) // 2
        data = data[:half] + _SHORTENED + data[-half:]
    return data.decode("utf-8", "ignore")
