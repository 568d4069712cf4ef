"""A stored response as the messages of ASGI, and as what an endpoint of a known framework returns."""

from __future__ import annotations

import sys
from typing import Any

from ..core.response import NULL_BODY_STATUSES, REPLAY_HEADERS, StoredResponse, storable_names
from ._types import Headers, Message, Scope

__all__ = ["Answered", "body_of", "headers_in", "headers_of", "native", "own_headers", "start_of"]

_WITHOUT_LENGTH = frozenset({204, 304})
"""Statuses whose responses have no Content-Length (RFC 9110 §8.6), as servers send them."""


class Answered(Exception):
    """Leaves an endpoint whose request is refused or replayed; the middleware sends the response."""


def headers_of(stored: StoredResponse) -> Headers:
    """Return the headers as bytes, with lower-case names and a length."""
    headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in stored.headers]
    if stored.status not in _WITHOUT_LENGTH and stored.status >= 200:
        headers = [(name, value) for name, value in headers if name != b"content-length"]
        headers.append((b"content-length", str(len(_sent(stored))).encode()))
    return headers


def headers_in(start: Message) -> Headers:
    """Return the headers of an application's first message, in which ASGI has them optional, and any iterable."""
    return [(bytes(name), bytes(value)) for name, value in start.get("headers", ())]


def start_of(stored: StoredResponse, further: Headers) -> Message:
    """Return the first message of a response, with further headers."""
    return {"type": "http.response.start", "status": stored.status, "headers": [*headers_of(stored), *further]}


def body_of(stored: StoredResponse) -> Message:
    """Return the second and last message of a response."""
    return {"type": "http.response.body", "body": _sent(stored), "more_body": False}


def _sent(stored: StoredResponse) -> bytes:
    return b"" if stored.status in NULL_BODY_STATUSES else stored.body


def own_headers(start: Message, answer: StoredResponse, storable: frozenset[str]) -> Headers:
    """Return the headers of an application's response to a refusal or replay that belong to this delivery of it.

    Middleware inside ours has added them, such as those of CORS or a session's cookie. Headers that describe a body, or
    are stored with one, are left out: that body is not sent.
    """
    kept = []
    known = {name.lower() for name, _ in answer.headers}
    for name, value in headers_in(start):
        text = name.lower().decode("latin-1")
        describes_body = text in storable or text in REPLAY_HEADERS or not storable_names([text])
        if text not in known and (text == "set-cookie" or not describes_body):
            kept.append((name, value))
    return kept


def native(stored: StoredResponse, scope: Scope, args: tuple[Any, ...]) -> Any:
    """Return a response as an object of the endpoint's framework, so that layers around the endpoint can handle it.

    The framework is one that is loaded and serves this request. The middleware sends a refusal or replay itself, so
    this need not be exact.

    Raises:
        Answered: the framework is another one.
    """
    headers = headers_of(stored)
    of_starlette: Any = sys.modules.get("starlette.responses")
    if of_starlette is not None and _is_of(scope.get("router"), "starlette"):
        response = of_starlette.Response(stored.body, stored.status)
        response.raw_headers = headers
        return response
    text = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
    litestar: Any = sys.modules.get("litestar")
    if litestar is not None and _is_of(scope.get("litestar_app"), "litestar"):
        media_type = next((value for name, value in text if name == "content-type"), "")
        others = {name: value for name, value in text if name not in ("content-type", "content-length")}
        return litestar.Response(stored.body, status_code=stored.status, media_type=media_type, headers=others)
    of_django: Any = sys.modules.get("django.http")
    if of_django is not None and any(isinstance(arg, of_django.HttpRequest) for arg in args):
        response = of_django.HttpResponse(stored.body, status=stored.status)
        for name, value in text:
            response[name] = value
        return response
    quart: Any = sys.modules.get("quart")
    if quart is not None and quart.has_request_context():
        response = quart.Response(stored.body, stored.status)
        response.headers.clear()
        response.headers.extend(text)
        return response
    raise Answered


def _is_of(thing: object, package: str) -> bool:
    return any(base.__module__.partition(".")[0] == package for base in type(thing).__mro__)
