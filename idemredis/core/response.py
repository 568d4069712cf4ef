"""`StoredResponse`: the response that is replayed to every retry, and its encoding in the row."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from ..errors import CorruptRow, Finished, InvalidResponse
from .slots import slot_setters

__all__ = [
    "NULL_BODY_STATUSES",
    "OMISSIONS",
    "REPLAY_HEADERS",
    "Omission",
    "StoredResponse",
    "deliverable",
    "filter_headers",
    "storable_names",
]

Omission = Literal["", "too_large", "not_wanted", "not_encodable", "broken_off"]

OMISSIONS = frozenset({"", "too_large", "not_wanted", "not_encodable", "broken_off"})

REPLAY_HEADERS = (
    "content-type",
    "content-encoding",
    "content-language",
    "content-disposition",
    "content-range",
    "accept-ranges",
    "etag",
    "last-modified",
    "location",
    "link",
    "allow",
    "retry-after",
    "cache-control",
    "vary",
    "content-security-policy",
    "x-content-type-options",
    "x-frame-options",
    "referrer-policy",
    "x-accel-redirect",
    "x-sendfile",
)
"""Headers that describe the body, refer to other resources, say how the response may be used, or make a front server
send a file. Others belong to a single delivery of the response."""

NULL_BODY_STATUSES = frozenset({204, 205, 304})
"""Statuses without content (RFC 9110 §15.3.5, §15.3.6, §15.4.5)."""

_NEVER_KEPT = frozenset(
    {
        "connection",
        "content-length",
        "date",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "set-cookie",
        "set-cookie2",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "www-authenticate",
    }
)

HEADER_CACHE = 256
"""Sets of headers whose JSON is cached; most responses of a service have one of a few."""

_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+\Z")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*\Z")


@dataclass(frozen=True, slots=True, init=False)
class StoredResponse:
    """A response as it is stored and replayed.

    Attributes:
        status: 100 to 999.
        headers: (name, value) pairs; repeated headers stay repeated.
        body: the raw bytes.
        omitted: why the body is not stored: `too_large`, `not_wanted`, `not_encodable` or `broken_off`; "" if it is.
            A row without its body is a tombstone: the operation is not run again, and nothing partial is replayed.

    Raises:
        InvalidResponse: a part has the wrong type, or a header that HTTP cannot carry.
    """

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    omitted: Omission = ""

    def __init__(
        self, status: int, headers: tuple[tuple[str, str], ...] = (), body: bytes = b"", omitted: Omission = ""
    ) -> None:
        _put_status(self, status)
        _put_headers(self, headers)
        _put_body(self, body)
        _put_omitted(self, omitted)
        self.__post_init__()

    def __post_init__(self) -> None:
        if type(self.status) is not int or not 100 <= self.status <= 999:
            raise InvalidResponse(f"status must be an int from 100 to 999, not {self.status!r}")
        if not isinstance(self.body, bytes):
            raise InvalidResponse(f"body must be bytes, not {type(self.body).__name__}; encode it first")
        if self.omitted not in OMISSIONS:
            raise InvalidResponse(f"omitted must be one of {sorted(OMISSIONS)}, not {self.omitted!r}")
        if not isinstance(self.headers, tuple):
            raise InvalidResponse(f"headers must be a tuple of (name, value) pairs, not {type(self.headers).__name__}")
        try:
            _check_headers(self.headers)
        except InvalidResponse:
            raise
        except TypeError as unhashable:
            raise InvalidResponse(f"headers must be a tuple of (name, value) pairs of str ({unhashable})") from None

    def without_body(self, why: Omission) -> StoredResponse:
        """Return the tombstone of this response: its status, and why the rest is not stored."""
        return StoredResponse(self.status, omitted=why)

    def encode(self) -> tuple[int, str, bytes, str]:
        """Return the row's fields response_status, response_headers, response_body and response_omitted."""
        return self.status, _write_headers(self.headers), self.body, self.omitted

    def to_plain(self) -> dict[str, Any]:
        """Return the response as JSON values, with the body in base64."""
        headers = [list(pair) for pair in self.headers]
        body = base64.b64encode(self.body).decode()
        return {"status": self.status, "headers": headers, "body": body, "omitted": self.omitted}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> StoredResponse:
        """Return the response that `to_plain` was called on."""
        headers = tuple((name, value) for name, value in plain["headers"])
        return cls(plain["status"], headers, base64.b64decode(plain["body"]), plain["omitted"])

    @classmethod
    def decode(cls, status: bytes, headers: bytes, body: bytes, omitted: bytes) -> StoredResponse:
        """Read a response from a row's fields.

        Raises:
            CorruptRow: a field is not what `encode` writes; this also detects an edited header with a line break.
        """
        try:
            # The constructor checks `omitted`.
            return cls(int(status), _read_headers(headers), body, omitted.decode())  # type: ignore[arg-type]
        except (ValueError, TypeError, RecursionError) as error:
            raise CorruptRow(f"the stored response cannot be read: {error}") from None


_put_status, _put_headers, _put_body, _put_omitted = slot_setters(StoredResponse)

Finished._read = staticmethod(StoredResponse.from_plain)  # this module imports the errors, so they cannot import it


def storable_names(names: Iterable[str]) -> frozenset[str]:
    """Return `names` in lower case, without the headers that are never stored.

    `Set-Cookie` and `WWW-Authenticate` are meant for one client. Hop-by-hop headers (RFC 9110 §7.6.1), `Date` and
    `Content-Length` belong to a single delivery.
    """
    return frozenset(map(str.lower, names)) - _NEVER_KEPT


def filter_headers(headers: Iterable[tuple[str, str]], replayed: frozenset[str]) -> tuple[tuple[str, str], ...]:
    """Return the headers to store, in their order; repeated headers stay repeated."""
    return tuple([pair for pair in headers if pair[0].lower() in replayed])


@lru_cache(HEADER_CACHE)
def deliverable(headers: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Return the headers without those that are never stored; a worker or a person may have stored them."""
    return tuple([pair for pair in headers if pair[0].lower() not in _NEVER_KEPT])


@lru_cache(HEADER_CACHE)
def _check_headers(headers: tuple[object, ...]) -> None:
    for pair in headers:
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
            raise InvalidResponse(f"a header must be a (name, value) pair of str, not {type(pair).__name__}")
        name, value = pair
        if not _HEADER_NAME.match(name):
            raise InvalidResponse(f"a header name must be a token (RFC 9110 §5.1), not {name!r}")
        if not _HEADER_VALUE.match(value):
            raise InvalidResponse(
                f"the value of header {name!r} has a control character, or a character outside latin-1"
            )


@lru_cache(HEADER_CACHE)
def _write_headers(headers: tuple[tuple[str, str], ...]) -> str:
    return json.dumps(headers, separators=(",", ":"))


@lru_cache(HEADER_CACHE)
def _read_headers(text: bytes) -> tuple[tuple[str, str], ...]:
    pairs = json.loads(text)
    if not (isinstance(pairs, list) and all(isinstance(pair, list) for pair in pairs)):
        raise ValueError("response_headers is not a list of pairs")
    return tuple(tuple(pair) for pair in pairs)
