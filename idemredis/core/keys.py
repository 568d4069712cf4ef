"""Validate keys and principals, and name their rows."""

from __future__ import annotations

import string
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
    "row_bytes",
    "row_prefix",
    "row_text",
    "valid_key",
    "valid_principal",
    "valid_route",
]

MAX_KEY_LENGTH = 255
"""Characters. The large payment APIs have the same limit, so keys that fit there fit here."""

MAX_ROUTE_BYTES = 64
"""Bytes of UTF-8. Redis keeps a hash packed only while all values are this short; a row would double in size."""

ROUTE_CACHE = 1024
"""Shortened routes that are cached; more than a service has endpoints."""

_SHORTENED = b"..."
_UNENCODED = "-._~/@+=,"
_PLAIN = f"{string.ascii_letters}{string.digits}{_UNENCODED}".encode()


class Identity(NamedTuple):
    """The parts that identify a row, and the row's name in Redis."""

    principal: str
    operation: str
    key: str
    row: str


def valid_key(key: object) -> str:
    """Return `key` if it is valid.

    Raises:
        InvalidKey: it is not a str of 1 to 255 printable ASCII characters (0x20 to 0x7e). The message has the position
            of the first invalid character, never the key.
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
    """Return `principal` as text if it is valid.

    Raises:
        InvalidPrincipal: it is not a str, int or UUID, or is empty or blank.
    """
    if type(principal) is str:
        text = principal
    elif isinstance(principal, bool) or not isinstance(principal, (str, int, UUID)):
        raise InvalidPrincipal(f"a principal must be a str, int or UUID, not {type(principal).__name__}")
    else:
        text = str(principal)
    if not text or text.isspace():
        raise InvalidPrincipal("the principal is empty or blank; derive it from the authenticated account")
    return text


def valid_route(route: str) -> str:
    """Return a route as rows and events store it: at most 64 bytes, shortened in the middle.

    Raises:
        ConfigurationError: it is not a str.
    """
    if not isinstance(route, str):
        raise ConfigurationError(f"a route must be a str, not {type(route).__name__}")
    return _short(route)


def identify(namespace: str, principal: object, key: object, operation: str = "") -> Identity:
    """Return the identity of the row for (principal, operation, key).

    Raises:
        InvalidKey: `key` is not 1 to 255 printable ASCII characters.
        InvalidPrincipal: `principal` is not a str, int or UUID, or is blank.
        ConfigurationError: `operation` is not a str.
    """
    who = valid_principal(principal)
    what = valid_key(key)
    if not isinstance(operation, str):
        raise ConfigurationError(f"an operation must be a str, not {type(operation).__name__}")
    parts = [namespace, who, operation, what] if operation else [namespace, who, what]
    try:
        if "".join(parts).encode().translate(None, _PLAIN):  # something is left that has to be encoded
            parts = [quote(part, safe=_UNENCODED) for part in parts]
    except UnicodeEncodeError:
        raise InvalidPrincipal("a principal or operation cannot be encoded as UTF-8; remove lone surrogates") from None
    return Identity(who, operation, what, ":".join(parts))


def row_prefix(namespace: str, principal: str = "") -> str:
    """Return the common prefix of a namespace's row names, or of one principal's; it is safe in a SCAN pattern."""
    row = identify(namespace, principal or "x", "x").row
    return row[:-1] if principal else row[:-3]


def row_text(name: bytes) -> str:
    """Return a row's name in Redis as text. Other programs may have made names that are not UTF-8; none is lost."""
    return name.decode("utf-8", "surrogateescape")


def row_bytes(row: str) -> bytes:
    """Return a row's name as it is in Redis; the reverse of `row_text`."""
    return row.encode("utf-8", "surrogateescape")


def parse_row_name(name: str | bytes) -> tuple[str, str, str, str]:
    """Split a row's name into (namespace, principal, operation, key).

    Raises:
        ValueError: the name is not that of a row.
    """
    text = name.decode("ascii", "replace") if isinstance(name, bytes) else name
    parts = text.split(":")
    if len(parts) not in (3, 4):
        raise ValueError(f"not the name of a row: it has {len(parts)} parts, and a row has 3 or 4")
    namespace, principal, *operation, key = (unquote(part, errors="strict") for part in parts)
    return namespace, principal, operation[0] if operation else "", key


@lru_cache(ROUTE_CACHE)
def _short(route: str) -> str:
    data = route.encode("utf-8", "backslashreplace")
    if len(data) > MAX_ROUTE_BYTES:
        half = (MAX_ROUTE_BYTES - len(_SHORTENED)) // 2
        data = data[:half] + _SHORTENED + data[-half:]
    return data.decode("utf-8", "ignore")
