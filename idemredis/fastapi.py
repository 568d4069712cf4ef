"""For FastAPI: a dependency that claims the request, and the refusals for OpenAPI.

`IdempotencyMiddleware` of `idemredis.asgi` must be around the application.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, cast

from fastapi import Depends, Header, HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator

from .asgi import Idempotency
from .asgi._claim import ASK, answer_error, begin, recovered, responded, stored
from .asgi._exchange import SCOPE, Exchange, Passing, check_same, exchanges
from .asgi._marks import mark
from .core.reservation import AsyncReservation, AsyncUnprotected
from .core.response import StoredResponse
from .errors import ConfigurationError
from .web.claims import identity_of
from .web.contract import REFUSALS
from .web.options import Options

__all__ = ["guard", "responses"]

MAX_KEY = 255

_DESCRIPTION = "Names this operation. A retry with the same key gets the response of the first request."


class _Required(BaseModel):
    """Documents the header as required. The guard refuses a request without it, with the ledger's own response."""

    model_config = ConfigDict(extra="ignore")

    key: str = Field(alias="Idempotency-Key", description=_DESCRIPTION, json_schema_extra={"maxLength": MAX_KEY})

    @model_validator(mode="before")
    @classmethod
    def _leave_it_to_the_guard(cls, headers: Any) -> Any:
        return {"Idempotency-Key": ""}


class _Optional(BaseModel):
    """Documents the header as optional."""

    model_config = ConfigDict(extra="ignore")

    key: str = Field("", alias="Idempotency-Key", description=_DESCRIPTION, json_schema_extra={"maxLength": MAX_KEY})

    @model_validator(mode="before")
    @classmethod
    def _leave_it_to_the_guard(cls, headers: Any) -> Any:
        return {}


class _Answered(HTTPException):
    """Ends a request that is refused, replayed or recovered; the middleware sends the response."""

    def __init__(self, answer: StoredResponse) -> None:
        super().__init__(answer.status)


def guard(
    idempotency: Idempotency,
    *,
    principal: Callable[..., object] | None = None,
    required: bool | None = None,
    lease: float | None = None,
    wait: float | None = None,
    operation: str = "",
    on_error: str | None = None,
    fingerprint: Callable[..., object] | None = None,
    recover: Callable[[AsyncReservation], object] | None = None,
) -> Callable[..., Awaitable[AsyncReservation]]:
    """Return a dependency that claims the request before its endpoint runs, and provides the reservation.

    Its own dependencies, such as authentication, run before the claim. Dependencies that follow it among the endpoint's
    parameters run after the claim. Requests with safe methods are not claimed; they get a stand-in that is falsy.

    Args:
        idempotency: settings, ledger, and the principal if no other is given here.
        principal: a dependency that returns the principal as a str, int or UUID.
        required: False runs the endpoint unprotected for requests without a key; defaults to `IDEMREDIS_REQUIRED`.
        lease: seconds; defaults to `IDEMREDIS_LEASE_SECONDS`.
        wait: seconds to wait for a running attempt before 409; defaults to `IDEMREDIS_WAIT_SECONDS`.
        operation: third part of the row's identity; the same key in two operations names two rows.
        on_error: "release", "hold" or "store": what an exception or a status of 500 or above does to the row; defaults
            to `IDEMREDIS_ON_ERROR`.
        fingerprint: a dependency that returns a str, or a JSON value to be hashed. By default the method, target, some
            headers and the body are hashed.
        recover: called with the reservation on a takeover, before the endpoint runs again; sync or async. It returns
            the response of the earlier attempt, as a `StoredResponse`, Starlette's `Response`, a JSON value,
            `(value, status)` or `(value, status, headers)`, or None to run the endpoint, or raises `HoldForReview`.

    Raises:
        ConfigurationError: an option is not supported, or there is no principal.
    """
    if principal is None:
        idempotency.check_principal("guard")
    options = idempotency.chosen(
        Options(required, lease, wait, operation, on_error, None, recover)  # type: ignore[arg-type]  # checked there
    )
    for name, dependency in (("principal", principal), ("fingerprint", fingerprint)):
        if dependency is not None and not callable(dependency):
            raise ConfigurationError(f"{name} must be a dependency, not {dependency!r}; give Idempotency a constant")
    is_required = idempotency.settings.required if required is None else required

    async def claim(
        request: Request,
        key: Any,
        who: Any = ASK,
        value: Any = ASK,
    ) -> AsyncReservation:
        exchange = _exchange(request, idempotency)
        if exchange is None:
            return _passing(idempotency, options)
        await begin(exchange, options, who, value)
        if (answer := exchange.outgoing.answer) is not None:
            raise _Answered(answer)
        try:
            made = await recovered(exchange, options)
        except Exception as error:
            if not await answer_error(exchange, error) or (answer := exchange.outgoing.answer) is None:
                raise
            raise _Answered(answer) from None
        if made is not None:
            status = getattr(request.scope.get("route"), "status_code", None) or 200
            raise _Answered(await stored(exchange, await responded(made, exchange, status)))
        assert exchange.reservation is not None
        return exchange.reservation

    parameters = [
        inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Request),
        inspect.Parameter(
            "key",
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            annotation=Annotated[_Required if is_required else _Optional, Header()],
        ),
    ]
    for name, dependency in (("who", principal), ("value", fingerprint)):
        if dependency is not None:
            annotation = Annotated[Any, Depends(dependency)]
            parameters.append(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation))
    claim.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return cast(Callable[..., Awaitable[AsyncReservation]], mark(claim, options))


def responses(idempotency: Idempotency) -> dict[int | str, dict[str, Any]]:
    """Return the refusals, for the `responses` of a route, a router or an application: OpenAPI then documents them."""
    ietf = idempotency.settings.contract.protocol == "ietf"
    by_status: dict[int, list[str]] = {}
    for code, (status, _) in REFUSALS.items():
        if code == "idempotency_length_required":  # ASGI servers mark the end of a chunked body
            continue
        by_status.setdefault(422 if ietf and code == "idempotency_key_reused" else status, []).append(code)
    media_type = "application/problem+json" if ietf else "application/json"
    documented: dict[int | str, dict[str, Any]] = {}
    for status, codes in sorted(by_status.items()):
        documented[status] = {
            "description": "; ".join(REFUSALS[code][1] for code in codes),
            "content": {media_type: {"schema": _schema(codes, ietf)}},
        }
        if status in (409, 503):
            documented[status]["headers"] = {
                "Retry-After": {"description": "Seconds until a retry is worth it.", "schema": {"type": "integer"}}
            }
    return documented


def _schema(codes: list[str], ietf: bool) -> dict[str, Any]:
    properties: dict[str, Any] = {"error": {"type": "string", "enum": codes}}
    if ietf:
        properties |= {
            "type": {"type": "string"},
            "title": {"type": "string"},
            "status": {"type": "integer"},
            "detail": {"type": "string"},
        }
    else:
        properties["message"] = {"type": "string"}
    if "idempotency_key_in_progress" in codes:
        properties |= {
            "lease_ms": {"type": "integer", "description": "Milliseconds left on the running request's lease."},
            "retry_after_ms": {"type": "integer", "description": "Retry-After in milliseconds."},
        }
    if "idempotency_response_not_stored" in codes:
        properties["original_status"] = {"type": "integer", "description": "Status of the original response."}
    needed = ["error", "type", "title", "status", "detail"] if ietf else ["error", "message"]
    return {"type": "object", "required": needed, "properties": properties}


def _exchange(request: Request, idempotency: Idempotency) -> Exchange | None:
    """Return the request's exchange; None if its method is not protected.

    Raises:
        ConfigurationError: there is no middleware, or it has another `Idempotency`.
    """
    exchange = request.scope.get(SCOPE, exchanges.get())
    if not isinstance(exchange, Exchange | Passing):
        raise ConfigurationError(
            "an endpoint has a guard, but no IdempotencyMiddleware is around it; add the middleware to the application"
        )
    check_same(idempotency, exchange, "an endpoint with a guard")
    return exchange if isinstance(exchange, Exchange) else None


def _passing(idempotency: Idempotency, options: Options) -> AsyncReservation:
    """Return the stand-in for a request whose method is not protected."""
    identity = identity_of(idempotency.ledger.namespace, "", None, idempotency.settings, options.operation)
    return AsyncUnprotected(lambda: identity)
