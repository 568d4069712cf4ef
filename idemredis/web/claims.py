"""The response that a client receives for an outcome of the claim, or for an error that the claim raised."""

from __future__ import annotations

import logging
import os

from ..core.keys import Identity, identify
from ..core.outcomes import InProgress, Replay, Reused
from ..core.response import StoredResponse
from ..errors import CorruptRow, InvalidKey, InvalidPrincipal, LedgerUnavailable
from .body import BodyIncomplete, BodyTooLarge, LengthRequired, NoRoom
from .contract import Contract, Refusal, parse_key
from .settings import PREFIX, Settings

__all__ = ["answer_to", "identity_of", "refusal_for"]

logger = logging.getLogger("idemredis")


def answer_to(outcome: Replay | InProgress | Reused, contract: Contract) -> Refusal | StoredResponse:
    """Return the refusal or replay for an outcome of the claim that is not a reservation."""
    match outcome:
        case Replay(response):
            answer = contract.answer(response)
            if isinstance(answer, Refusal):
                return answer
            return StoredResponse(answer.status, (*answer.headers, ("Idempotent-Replayed", "true")), answer.body)
        case InProgress(retry_after, stale):
            return contract.lost_race() if stale else contract.in_progress(retry_after)
        case Reused():
            return contract.key_reused()


def refusal_for(error: Exception, settings: Settings) -> Refusal | None:
    """Return the refusal for an error that was raised before the claim succeeded; None if the view may run unprotected.

    Raises:
        Exception: the error itself, if neither the ledger nor the body raised it.
    """
    contract = settings.contract
    ran = "runs, since it is only observed" if settings.mode == "observe" else "was not run"
    match error:
        case InvalidPrincipal():
            logger.warning("a request has no valid principal, and %s: %s", ran, error)
            return contract.principal_required()
        case InvalidKey():
            return contract.key_invalid(error)
        case BodyIncomplete():
            return contract.body_incomplete()
        case LengthRequired():
            return contract.length_required()
        case BodyTooLarge():
            return contract.body_too_large(settings.max_request)
        case NoRoom():
            logger.error("a request body does not fit into the temporary directory, and its request %s: %s", ran, error)
            return contract.unavailable()
        case CorruptRow():  # its event is logged, with the row's digest
            return contract.row_corrupt()
        case LedgerUnavailable(reason=reason):
            busy = reason == "busy_pool"  # Redis may be up
            if not settings.fail_open or busy or settings.mode == "observe":
                return contract.unavailable()
            logger.error("a request runs unprotected, since %sFAIL_OPEN is set: %s", PREFIX, error)
            return None
        case _:
            raise error


def identity_of(namespace: str, principal: str, header: str | None, settings: Settings, operation: str) -> Identity:
    """Return the identity that an unprotected request's row has or would have; without a key, a new one each time.

    Raises:
        InvalidKey: the header is not a key.
    """
    if header is None:
        return Identity(principal, operation, "", f"{namespace}:{os.urandom(16).hex()}")
    return identify(namespace, principal, parse_key(header, settings.contract.protocol), operation)
