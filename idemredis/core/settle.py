"""How work ended, and what that does to its row. `reserve`, `once` and every door decide it here."""

from __future__ import annotations

import logging
from typing import Literal, NamedTuple, TypeAlias

from ..errors import FencedOut, HoldForReview, IdempotencyError, LedgerUnavailable
from ..policy import Policy
from . import flows
from .flows import Flow
from .reservation import Choice, Reservation
from .response import StoredResponse

__all__ = ["ON_ERROR", "Ending", "OnError", "of_error", "of_status", "settle"]

logger = logging.getLogger("idemredis")

OnError: TypeAlias = Literal["release", "hold", "store"]
"""What an exception (or, over HTTP, a status of 500 and above) does to the row."""

ON_ERROR: tuple[OnError, ...] = ("release", "hold", "store")

_ASKS_AGAIN = frozenset({408, 425, 429})
"""Request Timeout, Too Early, Too Many Requests: the client is asked to send the same request again."""


class Ending(NamedTuple):
    """What is done with the row: complete or fail it with a response, release it, or leave it pending.

    Attributes:
        how: "review" is "hold", and a person must look.
        response: to be stored, for "complete" and "fail" only.
    """

    how: Literal["complete", "fail", "release", "hold", "review"]
    response: StoredResponse | None = None


def of_error(error: BaseException, on_error: OnError) -> Literal["store", "release", "hold", "review"]:
    """Say what work that ended in an exception does to its row.

    An `IdempotencyError`, and what is not an `Exception` (a cancellation, say), are never stored as final.
    """
    if isinstance(error, HoldForReview):
        return "review"
    if on_error == "store" and (isinstance(error, IdempotencyError) or not isinstance(error, Exception)):
        return "release"
    return on_error


def of_status(status: int, choice: Choice | None, on_error: OnError) -> Choice:
    """Say what a response of this HTTP status does to its row, where the view has made no choice of its own."""
    if choice is not None:
        return choice
    if status >= 500:
        return on_error
    return "release" if status in _ASKS_AGAIN else "store"


def settle(r: Reservation, ending: Ending, policy: Policy) -> Flow[None]:
    """Settle the row according to how the work ended. Nothing that goes wrong here hides the end of the work itself."""
    if r.lease.ended:  # fenced, which was emitted then; or settled by hand
        return
    try:
        match ending:
            case Ending("complete", StoredResponse() as response):
                yield from flows.complete(r, _fitting(response, policy), policy)
            case Ending("fail", StoredResponse() as response):
                yield from flows.fail(r, _fitting(response, policy), policy)
            case Ending("hold"):
                yield from flows.hold(r, for_review=False)
            case Ending("review"):
                yield from flows.hold(r, for_review=True)
            case _:
                yield from flows.release(r, policy)
    except (FencedOut, LedgerUnavailable):
        pass  # the flow has emitted it, and goes on in the background where that helps
    except Exception:
        logger.exception("the row of a finished attempt could not be settled")


def _fitting(response: StoredResponse, policy: Policy) -> StoredResponse:
    return response if len(response.body) <= policy.max_body else response.without_body("too_large")
