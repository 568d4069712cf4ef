"""Fingerprints: digests that tell requests apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hashlib import _Hash

__all__ = [
    "FINGERPRINT_HEADERS",
    "begin_fingerprint",
    "fingerprint_endpoint",
    "fingerprint_request",
    "fingerprint_value",
]

FINGERPRINT_HEADERS = ("content-type", "x-api-version")
"""Headers that are part of the fingerprint. Others (tracing, dates, user agents) change between retries."""


def fingerprint_request(
    method: str,
    target: str,
    headers: Mapping[str, str],
    body: bytes | bytearray | memoryview,
    *,
    allow: Sequence[str] = FINGERPRINT_HEADERS,
) -> str:
    """Return the fingerprint of an HTTP request: a SHA-256 digest, 64 hex digits.

    Args:
        method: the method, in any case.
        target: path and query exactly as received: undecoded, unsorted.
        headers: values by name, in any case; headers not in `allow` are ignored.
        body: the raw bytes.
        allow: the headers to hash, in this order; an absent header is hashed with an empty value.

    Raises:
        TypeError: the body is not bytes.
        ValueError: the value of a hashed header has characters outside latin-1, which HTTP cannot carry.
    """
    if not isinstance(body, (bytes, bytearray, memoryview)):
        raise TypeError(f"body must be bytes, not {type(body).__name__}; encode it as it was sent")
    values = {name.lower(): value for name, value in headers.items()}
    digest = begin_fingerprint(method, target, [(name, values.get(name.lower(), "")) for name in allow])
    digest.update(body)
    return digest.hexdigest()


def begin_fingerprint(method: str, target: str, headers: Iterable[tuple[str, str]]) -> _Hash:
    """Start the fingerprint of a request whose body is hashed piece by piece.

    Args:
        method: the method, in any case.
        target: path and query exactly as received.
        headers: the headers to hash, in this order; an absent header has an empty value.

    Returns:
        The hash of everything before the body; update it with the body's bytes.
    """
    lines = "\n".join([f"{name.lower()}:{value}" for name, value in headers])
    digest = hashlib.sha256(f"{method.upper()}\n{target}\n".encode("utf-8", "surrogateescape"))
    digest.update(f"{lines}\n".encode("latin-1"))
    return digest


def fingerprint_endpoint(method: str, target: str, operation: str, value: object) -> str:
    """Return the fingerprint of a request whose application computes a value of its own from it: 64 hex digits.

    The method, the path and the operation are hashed with the value, so that two endpoints with the same function do
    not take each other's requests for retries. The query is not: what matters of it is in the value.

    Args:
        method: the method, in any case.
        target: path and query exactly as received.
        operation: third part of the row's identity; "" if there is none.
        value: a JSON value.

    Raises:
        TypeError, ValueError: the value is not JSON.
    """
    return fingerprint_value([method.upper(), target.partition("?")[0], operation, value])


def fingerprint_value(value: object) -> str:
    """Return the fingerprint of a JSON value, whatever the order of its object keys: 64 hex digits.

    Raises:
        TypeError: the value is not JSON: a type that JSON does not have, or an object key that is not a str.
        ValueError: the value has NaN or an infinity, refers to itself, or is nested too deeply.
    """
    try:
        _check_object_keys(value)
    except RecursionError:
        raise ValueError("the value refers to itself, or is nested too deeply") from None
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _check_object_keys(value: object) -> None:
    """Raise for an object key that is not a str: json.dumps writes 1 and "1" as the same key."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"an object key must be a str, not {type(key).__name__}; convert it yourself")
            _check_object_keys(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_object_keys(item)
