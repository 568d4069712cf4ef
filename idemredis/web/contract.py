"""The HTTP contract: how the Idempotency-Key header is parsed, and the response for each refusal."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ..core.keys import valid_key
from ..core.response import StoredResponse, deliverable
from ..core.settle import Ending
from ..errors import InvalidKey

__all__ = ["REFUSALS", "SAFE_METHODS", "Contract", "Protocol", "Refusal", "parse_key"]

Protocol: TypeAlias = Literal["default", "ietf"]

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
"""Safe methods (RFC 9110 §9.2.1); a key on them is ignored."""

_QUOTED = re.compile(
    r'"(?P<text>(?:[\x20-\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"'
    r'(?: *; *[a-z*][a-z0-9_\-.*]*(?:=(?:"(?:[\x20-\x21\x23-\x5b\x5d-\x7e]|\\["\\])*"|[!#-+\--:<-\[\]-~]+))?)*\Z'
)
"""An sf-string (RFC 8941 §3.3.3) with parameters, which are ignored."""

_BARE = re.compile(r"[!#-+\--:<-\[\]-~]+\Z")
"""A key without quotes: printable ASCII except space, quote, comma, semicolon and backslash."""

REFUSALS = {
    "idempotency_key_required": (400, "An idempotency key is required"),
    "idempotency_key_invalid": (400, "The idempotency key is not valid"),
    "idempotency_body_incomplete": (400, "The request body is incomplete"),
    "idempotency_principal_required": (401, "Authentication is required"),
    "idempotency_key_reused": (409, "The idempotency key was used for another request"),
    "idempotency_key_in_progress": (409, "A request with this idempotency key is in progress"),
    "idempotency_key_retry": (409, "Another retry took the request over"),
    "idempotency_length_required": (411, "The request needs a Content-Length"),
    "idempotency_body_too_large": (413, "The request body is too large"),
    "idempotency_row_corrupt": (500, "The stored record cannot be read"),
    "idempotency_response_not_stored": (500, "The original response was not stored"),
    "idempotency_unavailable": (503, "The idempotency store is unavailable"),
}
"""Status and title of each refusal; under "ietf", reuse is 422."""


@dataclass(frozen=True, slots=True)
class Refusal(StoredResponse):
    """A refusal as a response, and the parts for an application that shapes its own.

    Attributes:
        code: one of `REFUSALS`.
        message: what the client should do.
        facts: further members of the body, such as `lease_ms`.
    """

    code: str = ""
    message: str = ""
    facts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Contract:
    """Build the response for each refusal, in the protocol that the service has chosen.

    Attributes:
        protocol: "default", or "ietf" (draft-ietf-httpapi-idempotency-key-header-07).
        docs_url: where the service documents its keys; used in a problem's `type` and `Link`.
        retry_after: upper limit of Retry-After, in seconds.
    """

    protocol: Protocol = "default"
    docs_url: str | None = None
    retry_after: float = 2.0

    def key_required(self) -> Refusal:
        return self.refuse("idempotency_key_required", "send an Idempotency-Key header that names this operation")

    def key_invalid(self, error: InvalidKey) -> Refusal:
        return self.refuse("idempotency_key_invalid", str(error))

    def principal_required(self) -> Refusal:
        return self.refuse(
            "idempotency_principal_required", "an idempotency key belongs to an account; authenticate first"
        )

    def body_incomplete(self) -> Refusal:
        return self.refuse(
            "idempotency_body_incomplete", "the request body did not arrive completely; send the request again"
        )

    def length_required(self) -> Refusal:
        return self.refuse(
            "idempotency_length_required", "this server does not support chunked request bodies; send a Content-Length"
        )

    def body_too_large(self, limit: int) -> Refusal:
        return self.refuse(
            "idempotency_body_too_large", f"a request with an idempotency key may have a body of {limit} bytes at most"
        )

    def key_reused(self) -> Refusal:
        return self.refuse(
            "idempotency_key_reused", "this key was used for another request; use a new key for a new operation"
        )

    def in_progress(self, lease: float) -> Refusal:
        """Return the refusal for a request whose key is in use; `lease` is the seconds left on the lease."""
        wait = min(lease, self.retry_after)
        return self.refuse(
            "idempotency_key_in_progress",
            "a request with this key is still running; retry later",
            retry_after=wait,
            lease_ms=round(lease * 1000),
            retry_after_ms=round(wait * 1000),
        )

    def lost_race(self) -> Refusal:
        return self.refuse("idempotency_key_retry", "another retry took the request over; retry later", retry_after=0.0)

    def row_corrupt(self) -> Refusal:
        return self.refuse(
            "idempotency_row_corrupt",
            "the stored record of this key cannot be read, and the request was not run; contact support",
        )

    def unavailable(self) -> Refusal:
        return self.refuse(
            "idempotency_unavailable", "the request was not run; send it again", retry_after=self.retry_after
        )

    def not_stored(self, original: StoredResponse) -> Refusal:
        return self.refuse(
            "idempotency_response_not_stored",
            f"the request was completed before with status {original.status}; "
            f"its response was not stored ({original.omitted})",
            original_status=original.status,
        )

    def answer(self, response: StoredResponse) -> StoredResponse:
        """Return what a client gets for a response that was stored, recorded, or returned as a `StoredResponse`.

        Headers that are meant for one delivery are left out. If the body was not stored, this is the refusal that says
        so.
        """
        if response.omitted:
            return self.not_stored(response)
        headers = deliverable(response.headers)
        return response if headers == response.headers else StoredResponse(response.status, headers, response.body)

    def answer_effect(self, ending: Ending) -> StoredResponse:
        """Return what a client gets for an ending of `of_effect`: the effect's response, or that the key is reused."""
        return self.key_reused() if ending.response is None else self.answer(ending.response)

    def refuse(self, code: str, message: str, *, retry_after: float | None = None, **facts: int) -> Refusal:
        """Return the response for one of `REFUSALS`, with `facts` as further members of its body."""
        status, title = REFUSALS[code]
        headers: list[tuple[str, str]] = []
        if self.protocol == "ietf":
            if code == "idempotency_key_reused":
                status = 422
            body = {"type": self.docs_url or "about:blank", "title": title, "status": status, "detail": message}
            body |= {"error": code, **facts}
            headers.append(("Content-Type", "application/problem+json"))
            if self.docs_url:
                headers.append(("Link", f'<{self.docs_url}>; rel="describedby"'))
        else:
            body = {"error": code, "message": message, **facts}
            headers.append(("Content-Type", "application/json"))
        if retry_after is not None:
            headers.append(("Retry-After", str(max(1, math.ceil(retry_after)))))
        return Refusal(status, tuple(headers), json.dumps(body).encode(), "", code, message, facts)


def parse_key(header: str, protocol: Protocol) -> str:
    """Return the key in an `Idempotency-Key` header.

    Under "ietf", `"abc"` and `abc` are the same key; under "default", quotes are part of the key. Spaces and tabs
    around the header's value are removed (RFC 9110 §5.5).

    Raises:
        InvalidKey: the key is empty, too long or not printable ASCII; or, under "ietf", neither one quoted string nor a
            bare key.
    """
    value = header.strip(" \t")
    if protocol == "default" or not value:
        return valid_key(value)
    if quoted := _QUOTED.match(value):
        return valid_key(re.sub(r"\\(.)", r"\1", quoted["text"]))
    if _BARE.match(value):
        return valid_key(value)
    raise InvalidKey(
        'the header must be one quoted string, such as "8e03978e-40d5", or a bare key without , ; " or space'
    )
