"""Settle a row according to how its work ended; `reserve`, `once` and the framework adapters all use this."""

from __future__ import annotations

import logging
import os
from typing import Literal, NamedTuple, TypeAlias

from ..errors import EffectDone, FencedOut, HoldForReview, IdempotencyError, KeyReused, LedgerUnavailable
from ..events import digest
from ..policy import Policy
from . import flows
from .flows import Flow
from .reservation import Reservation
from .response import StoredResponse

__all__ = ["ON_ERROR", "Ending", "OnError", "of_effect", "of_error", "of_status", "settle"]

logger = logging.getLogger("idemredis")

OnError: TypeAlias = Literal["release", "hold", "store"]
"""What an exception, or over HTTP a status of 500 or above, does to the row."""

ON_ERROR: tuple[OnError, ...] = ("release", "hold", "store")

_RETRY_STATUSES = frozenset({401, 403, 407, 408, 425, 429})
"""Statuses that ask for the same request again: once the client has the right to send it (Unauthorized, Forbidden,
Proxy Authentication Required), or later (Request Timeout, Too Early, Too Many Requests)."""


class Ending(NamedTuple):
    """How to settle a row: complete or fail it with a response, release it, or leave it pending.

    Attributes:
        how: "hold" leaves the row pending until its lease ends; "review" also emits `held_for_review`.
        response: the response to store; only with "complete" and "fail".
    """

    how: Literal["complete", "fail", "release", "hold", "review"]
    response: StoredResponse | None = None


def of_effect(error: BaseException, r: Reservation) -> Ending | None:
    """Return how to settle a row whose effect `Effects` has found in the database; None for any other error.

    The row is completed with the response of the effect, or released if the effect belongs to another request.
    """
    match error:
        case EffectDone() if error.digest in ("", digest(r.row)):
            return Ending("complete", error.response)
        case KeyReused() if error.digest == digest(r.row):
            return Ending("release")
    return None


def of_error(error: BaseException, on_error: OnError) -> Literal["store", "release", "hold", "review"]:
    """Return how to settle the row of work that raised.

    An `IdempotencyError`, or an exception that is not an `Exception` (such as a cancellation), is never stored.
    """
    if isinstance(error, HoldForReview):
        return "review"
    if on_error == "store" and (isinstance(error, IdempotencyError) or not isinstance(error, Exception)):
        return "release"
    return on_error


def of_status(status: int, on_error: OnError, *, retry_after: bool = False) -> OnError:
    """Return what the rules do with a response of this HTTP status.

    A 4xx with a Retry-After header asks for the same request again, whatever its status is: for example the 409 of
    another idempotent service whose response the view has passed on.
    """
    if status >= 500:
        return on_error
    return "release" if status in _RETRY_STATUSES or (retry_after and status >= 400) else "store"


def settle(r: Reservation, ending: Ending, policy: Policy) -> Flow[None]:
    """Settle the row according to how the work ended; errors are logged and emitted, never raised.

    A child that was forked during the work has a copy of the reservation; the end of its copy of the work settles
    nothing.
    """
    if r.lease.ended:  # fenced, which has been emitted, or settled by the caller
        return
    if r.lease.process != os.getpid():
        return
    try:
        how, response = ending
        if response is not None and how == "complete":
            yield from flows.complete(r, _limited(response, policy), policy)
        elif response is not None and how == "fail":
            yield from flows.fail(r, _limited(response, policy), policy)
        elif how == "hold" or how == "review":
            yield from flows.hold(r, for_review=how == "review")
        else:
            yield from flows.release(r, policy)
    except (FencedOut, LedgerUnavailable):
        pass  # the flow has emitted an event, and retries in the background where that is safe
    except Exception:
        logger.exception("cannot settle the row of an attempt that has ended")


def _limited(response: StoredResponse, policy: Policy) -> StoredResponse:
    return response if len(response.body) <= policy.max_body else response.without_body("too_large")
