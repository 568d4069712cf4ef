"""What identifies a request: bytes in, hex out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hashlib import _Hash

__all__ = ["FINGERPRINT_HEADERS", "begin_fingerprint", "fingerprint_request", "fingerprint_value"]

FINGERPRINT_HEADERS = ("content-type", "x-api-version")
"""The headers that make two requests different. Others (tracing, dates, user agents) change between retries."""


def fingerprint_request(
    method: str,
    target: str,
    headers: Mapping[str, str],
    body: bytes | bytearray | memoryview,
    *,
    allow: Sequence[str] = FINGERPRINT_HEADERS,
) -> str:
    """Return the SHA-256 (64 hex digits) of what a request asks for.

    Args:
        method: in any case.
        target: path and query exactly as received: undecoded, unsorted.
        headers: by name in any case; those not in `allow` do not count.
        body: the raw bytes.
        allow: the headers that count, in the order in which they are hashed; an absent one counts as empty.

    Raises:
        TypeError: the body is not bytes.
        ValueError: a header value that counts has characters outside latin-1, so it never was a header on the wire.
    """
    if not isinstance(body, (bytes, bytearray, memoryview)):
        raise TypeError(f"a body must be bytes, not {type(body).__name__}; encode it as it was sent")
    values = {name.lower(): value for name, value in headers.items()}
    digest = begin_fingerprint(method, target, [(name, values.get(name.lower(), "")) for name in allow])
    digest.update(body)
    return digest.hexdigest()


def begin_fingerprint(method: str, target: str, headers: Iterable[tuple[str, str]]) -> _Hash:
    """Return the hash of everything before the body, so that a large body can be hashed as it passes.

    `headers` are all that count, in their order, an absent one with an empty value.
    """
    lines = "\n".join([f"{name.lower()}:{value}" for name, value in headers])
    digest = hashlib.sha256(f"{method.upper()}\n{target}\n".encode("utf-8", "surrogateescape"))
    digest.update(f"{lines}\n".encode("latin-1"))
    return digest


def fingerprint_value(value: object) -> str:
    """Return the SHA-256 (64 hex digits) of any JSON value, the same for every order of its keys.

    Raises:
        TypeError: it is not JSON: a type that JSON has not, or an object key that is not a str.
        ValueError: it has NaN or an infinity, refers to itself, or is nested too deeply.
    """
    try:
        _refuse_other_keys(value)
    except RecursionError:
        raise ValueError("the value refers to itself, or is nested too deeply") from None
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _refuse_other_keys(value: object) -> None:
    """json.dumps would write 1 and "1" as the same key."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"an object key must be a str, not {type(key).__name__}; convert it yourself")
            _refuse_other_keys(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _refuse_other_keys(item)
