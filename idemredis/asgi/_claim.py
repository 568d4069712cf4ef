"""Claim a request's key, or refuse or replay it."""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeAlias

from ..core.as_response import as_response
from ..core.fingerprint import fingerprint_endpoint
from ..core.keys import Identity, valid_principal
from ..core.reservation import AsyncReservation, AsyncUnprotected, observed, save_through
from ..core.response import StoredResponse
from ..core.settle import Ending, of_effect
from ..errors import ConfigurationError, HoldForReview
from ..events import observing
from ..ledger.waiting import bounded
from ..web.claims import answer_to, identity_of, refusal_for
from ..web.contract import Refusal, parse_key
from ..web.options import Options
from ..web.recorder import ResponseRecorder
from ._exchange import Exchange
from ._messages import headers_in
from ._types import Message

__all__ = ["ASK", "answer_error", "begin", "recovered", "responded", "stored", "waited_for"]

logger = logging.getLogger("idemredis")

ASK: Any = object()
"""Stands for a principal or a fingerprint's value that is not known yet: call the application's function for it."""

Ask: TypeAlias = Callable[[], Any]


async def begin(exchange: Exchange, options: Options, principal: Any = ASK, value: Any = ASK) -> None:
    """Claim the request, with the options of the endpoint that is called first; later calls do nothing.

    Afterwards `exchange.reservation` is a reservation or a stand-in, or `exchange.outgoing.answer` is the response that
    the client receives.

    Args:
        exchange: the request.
        options: the endpoint's options.
        principal: whose key it is, if that is known already.
        value: the value that the application's own fingerprint is made of, if that is known already.
    """
    if exchange.began:
        return
    exchange.began = True
    try:
        await _begin(exchange, options, principal, value)
    except BaseException:
        exchange.began = exchange.reservation is not None  # whoever calls the endpoint again must not run it unclaimed
        raise


async def _begin(exchange: Exchange, options: Options, principal: Any, value: Any) -> None:
    exchange.outgoing.answer_error = functools.partial(answer_error, exchange)
    settings = exchange.idempotency.settings
    ask: Ask = functools.partial(exchange.idempotency.ask_principal, exchange.scope)
    if principal is not ASK:
        ask = _knowing(principal)
    required = settings.required if options.required is None else options.required
    claimed: AsyncReservation | StoredResponse | None = None
    if settings.mode == "observe":
        claimed = await _observe(exchange, options, required, ask, value)
    elif settings.mode == "enforce" and (exchange.key_header is not None or required):
        claimed = await _claim(exchange, options, ask, value)
    if isinstance(claimed, AsyncReservation):
        await _hold_claim(exchange, options, claimed)
    elif claimed is not None:
        exchange.answer(claimed)
    else:
        exchange.outgoing.marked = settings.mode == "enforce"
        await _stand_in(exchange, options, ask)


async def answer_error(exchange: Exchange, error: BaseException) -> bool:
    """Settle the row and set the response for `HoldForReview` and errors of `Effects`; return False for all others."""
    outgoing, r = exchange.outgoing, exchange.reservation
    recorder, contract = outgoing.recorder, exchange.idempotency.settings.contract
    if r is None:
        return False
    if isinstance(error, HoldForReview) and recorder is not None:
        recorder.hold_for_review()
        left = max(recorder.reservation.lease.expires_at - time.monotonic(), 0.0)
        answer: StoredResponse = contract.in_progress(left)
    elif (found := of_effect(error, r)) is not None:
        if recorder is not None:
            recorder.effect_found(found)
        answer = contract.answer_effect(found)
    else:
        return False
    await exchange.settle()
    if not outgoing.begun:
        exchange.answer(await _shaped(exchange, answer))
    return True


async def stored(exchange: Exchange, response: StoredResponse) -> StoredResponse:
    """Return the response that the client gets for a `StoredResponse` that an endpoint or `recover` has returned.

    A response without its body completes the row, and the client gets the same refusal as every retry.
    """
    answer = exchange.idempotency.settings.contract.answer(response)
    if isinstance(answer, Refusal):
        if exchange.outgoing.recorder is not None:
            exchange.outgoing.recorder.effect_found(Ending("complete", response))
            await exchange.settle()
        answer = await _shaped(exchange, answer)
        exchange.answer(answer)
    else:
        exchange.outgoing.made = answer
    return answer


async def recovered(exchange: Exchange, options: Options) -> Any:
    """Return what `recover` returns after a takeover; None if the endpoint is to run."""
    r = exchange.reservation
    if options.recover is None or not r or not r.taken_over:
        return None
    return await waited_for(options.recover(r))


async def waited_for(value: Any) -> Any:
    """Return a value, or the result of an awaitable."""
    return await value if inspect.isawaitable(value) else value


def _knowing(principal: object) -> Ask:
    return lambda: principal


async def _claim(
    exchange: Exchange, options: Options, ask: Ask, value: Any
) -> AsyncReservation | StoredResponse | None:
    """Return the reservation, or a refusal or replay, or None if the endpoint may run unprotected."""
    idempotency = exchange.idempotency
    settings, contract, ledger = idempotency.settings, idempotency.settings.contract, idempotency.ledger
    header = exchange.key_header
    try:
        principal = await waited_for(ask())
        if principal is None:
            return await _shaped(exchange, contract.principal_required())
        valid_principal(principal)
        if header is None:
            ledger.report_missing_key(str(principal), options.operation, exchange.route)
            return await _shaped(exchange, contract.key_required())
        key, fingerprint = parse_key(header, contract.protocol), await _fingerprint(exchange, options, value)
        asked = (principal, key, fingerprint, options.operation, options.lease)
        wait = settings.wait if options.wait is None else options.wait
        with bounded() if wait else nullcontext():
            outcome = await ledger.claim(*asked, wait, route=exchange.route)
    except Exception as error:
        refusal = refusal_for(error, settings)
        if refusal is None:
            exchange.fingerprint = fingerprint  # `Effects` needs it to make each effect once
            return None
        return await _shaped(exchange, refusal)
    if isinstance(outcome, AsyncReservation):
        return outcome
    return await _shaped(exchange, answer_to(outcome, contract))


async def _observe(
    exchange: Exchange, options: Options, required: bool, ask: Ask, value: Any
) -> AsyncReservation | None:
    """Claim without waiting, and return the reservation if there is one; the endpoint runs in any case."""
    claimed: object = None
    token = observing.set(True)
    try:
        if exchange.key_header is not None:
            claimed = await _claim(exchange, replace(options, wait=0.0), ask, value)
        elif required:
            exchange.idempotency.ledger.report_missing_key(operation=options.operation, route=exchange.route)
    except Exception:
        logger.exception("a request cannot be observed; its endpoint runs without a claim")
    finally:
        observing.reset(token)
    return claimed if isinstance(claimed, AsyncReservation) else None


async def _hold_claim(exchange: Exchange, options: Options, claimed: AsyncReservation) -> None:
    """Record the response of the endpoint that is about to run, and keep the lease."""
    idempotency = exchange.idempotency
    settings, ledger = idempotency.settings, idempotency.ledger
    on_error = options.on_error or settings.on_error
    outgoing = exchange.outgoing
    if outgoing.begun:
        await ledger.release(claimed)
        raise ConfigurationError("the response had begun before the request was claimed; claim it first")
    outgoing.recorder = ResponseRecorder(
        claimed, exchange.settle_by, on_error, settings.storable, ledger.policy.max_body
    )
    outgoing.settle = exchange.settle

    save_through(claimed, exchange.save)
    exchange.reservation = claimed
    if settings.mode == "observe":
        stand_in = observed(claimed)
        assert isinstance(stand_in, AsyncUnprotected)
        save_through(stand_in, exchange.save_nothing)
        exchange.reservation = stand_in
    await ledger.start_heartbeat(claimed)


async def _stand_in(exchange: Exchange, options: Options, ask: Ask) -> None:
    """Provide a reservation for an endpoint that runs without a claim; its methods work and write nothing."""
    idempotency, header = exchange.idempotency, exchange.key_header
    if header is not None and idempotency.principal_is_awaited:
        try:
            known = await waited_for(ask())
        except Exception as error:
            logger.debug("a request that runs unprotected has no principal: %s", error)
            known = None
        ask = _knowing(known)

    def find() -> Identity:
        identity = functools.partial(identity_of, idempotency.ledger.namespace)
        principal = ""
        try:
            principal = valid_principal(ask())
            return identity(principal, header, idempotency.settings, options.operation)
        except Exception as error:  # the endpoint runs all the same, and its principal may be nobody
            logger.debug("a request that runs unprotected has no row: %s", error)
        return identity(principal, None, idempotency.settings, options.operation)

    stand_in = AsyncUnprotected(find, exchange.route, fingerprint=exchange.fingerprint)
    save_through(stand_in, exchange.save_nothing)
    exchange.reservation = stand_in


async def _fingerprint(exchange: Exchange, options: Options, value: Any) -> str:
    """Return the request's fingerprint; its body is read to its end first."""
    body = exchange.body
    assert body is not None
    await body.drain()
    if options.fingerprint is not None and value is ASK:
        value = await waited_for(options.fingerprint(exchange.scope, body.content()))
    if value is ASK:
        return body.digest.hexdigest()
    if value == "":
        raise ConfigurationError("fingerprint must return a non-empty str, or a JSON value; it returned ''")
    return fingerprint_endpoint(exchange.scope["method"], exchange.target, options.operation, value)


# Refusals in the application's own shape


async def _shaped(exchange: Exchange, refusal: StoredResponse) -> StoredResponse:
    """Return a refusal in the application's own shape, if it has one; return any other response unchanged."""
    idempotency = exchange.idempotency
    problem = idempotency.problem
    if not isinstance(refusal, Refusal) or problem is None or idempotency.settings.mode == "observe":
        return refusal
    try:
        made = await waited_for(problem(refusal.code, refusal.status, refusal.message, dict(refusal.facts)))
        content_type = next(value for name, value in refusal.headers if name == "Content-Type")
        shaped = await responded(made, exchange, refusal.status, content_type)
    except Exception:
        logger.exception("problem= failed for %s, which is sent as it is", refusal.code)
        return refusal
    named = {name.lower() for name, _ in shaped.headers}
    further = tuple((name, value) for name, value in refusal.headers if name == "Retry-After")
    if "retry-after" in named or not further:
        return shaped
    return StoredResponse(shaped.status, (*shaped.headers, *further), shaped.body)


async def responded(made: Any, exchange: Exchange, status: int, content_type: str = "") -> StoredResponse:
    """Return what an application made as a response.

    Args:
        made: a `StoredResponse`, an ASGI response, a JSON value, `(value, status)` or `(value, status, headers)`.
        exchange: the request.
        status: of a JSON value alone.
        content_type: of a value without one; a str is then its text. By default it is JSON.

    Raises:
        InvalidResponse: it is none of these.
    """
    if isinstance(made, StoredResponse):
        return made
    if not callable(made):
        value, status, *given = made if isinstance(made, tuple) and len(made) in (2, 3) else (made, status)
        named: dict[str, str] = dict(*given)
        if content_type and "content-type" not in {name.lower() for name in named}:
            named["Content-Type"] = content_type
        if content_type and isinstance(value, str):
            return StoredResponse(status, tuple(named.items()), value.encode())
        return as_response((value, status, named))
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    async def receive() -> Message:
        await exchange.outgoing.collected.wait()
        return {"type": "http.disconnect"}

    await made(dict(exchange.scope), receive, send)
    start, *pieces = [message for message in messages if message["type"].startswith("http.response.")]
    headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers_in(start))
    return StoredResponse(start["status"], headers, b"".join(piece.get("body", b"") for piece in pieces))
