"""A response as an application gives it: JSON with a status and headers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import InvalidResponse
from .response import StoredResponse, deliverable

__all__ = ["as_response"]

_TYPE = ("content-type", "application/json")


def as_response(given: object) -> StoredResponse:
    """Return a `StoredResponse` for a JSON value, `(value, status)`, `(value, status, headers)` or `StoredResponse`.

    Headers that are meant for one delivery, such as `Set-Cookie`, are left out.

    Raises:
        InvalidResponse: it is none of these.
    """
    if not isinstance(given, StoredResponse):
        given = _json_response(*given) if isinstance(given, tuple) and len(given) in (2, 3) else _json_response(given)
    return StoredResponse(given.status, deliverable(given.headers), given.body, given.omitted)


def _json_response(value: object, status: Any = 200, headers: Any = ()) -> StoredResponse:
    if isinstance(value, tuple):
        raise InvalidResponse("a response must be a JSON value, (value, status) or (value, status, headers)")
    try:
        body = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidResponse(f"the response is not JSON ({error}); pass a StoredResponse for another body") from None
    try:
        items = headers.items() if isinstance(headers, Mapping) else headers
        pairs = tuple((str(name), str(text)) for name, text in items)
    except (TypeError, ValueError):
        raise InvalidResponse("headers must be a mapping, or pairs of name and value") from None
    typed = any(name.lower() == "content-type" for name, _ in pairs)
    return StoredResponse(status, pairs if typed else (_TYPE, *pairs), body)
