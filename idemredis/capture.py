"""What a view sees of its reservation, and what is kept of its answer."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, Literal, TypeAlias, cast

from flask import Response
from werkzeug.exceptions import InternalServerError

from .errors import ConfigurationError, FencedOut, InvalidResponse, LedgerUnavailable
from .http import stored_by_default
from .ledger import Ledger
from .operations import Reservation
from .responses import NULL_BODY_STATUSES, Omission, StoredResponse, kept_headers

__all__ = ["Attempt", "Outcome", "Settlement"]

logger = logging.getLogger("idemredis")

Outcome: TypeAlias = Literal["store", "omit", "release", "hold"]
OUTCOMES = ("store", "omit", "release", "hold")


class Attempt:
    """The reservation of the request that is running, as its view sees it: `current_reservation`.

    Attributes:
        reservation: the `Reservation` itself.
    """

    def __init__(self, ledger: Ledger, reservation: Reservation) -> None:
        self.reservation = reservation
        self._ledger = ledger
        self._outcome: Outcome | None = None

    @property
    def outcome(self) -> Outcome | None:
        """What becomes of this one answer; None: by the settings.

        "store" it, "omit" all but its status (for secrets shown once), "release" the key so that a retry runs again,
        or "hold" it until the lease ends.
        """
        return self._outcome

    @outcome.setter
    def outcome(self, value: Outcome | None) -> None:
        if value is not None and value not in OUTCOMES:
            raise ConfigurationError(f"outcome must be one of {', '.join(OUTCOMES)}, or None, not {value!r}")
        self._outcome = value

    @property
    def principal(self) -> str:
        """See `Reservation`."""
        return self.reservation.principal

    @property
    def key(self) -> str:
        """See `Reservation`."""
        return self.reservation.key

    @property
    def operation(self) -> str:
        """See `Reservation`."""
        return self.reservation.operation

    @property
    def fingerprint(self) -> str:
        """See `Reservation`."""
        return self.reservation.fingerprint

    @property
    def generation(self) -> int:
        """The fencing token: 1 at the claim, one more at each takeover."""
        return self.reservation.generation

    @property
    def owner(self) -> str:
        """See `Reservation`."""
        return self.reservation.owner

    @property
    def taken_over(self) -> bool:
        """True when an earlier attempt may have changed something already."""
        return self.reservation.taken_over

    @property
    def last_checkpoint(self) -> tuple[str, Any] | None:
        """(name, data) that an earlier attempt saved last, or None."""
        return self.reservation.checkpoint

    @property
    def held(self) -> bool:
        """See `Reservation.held`."""
        return self.reservation.held

    def ensure_held(self) -> None:
        """See `Reservation.ensure_held`."""
        self.reservation.ensure_held()

    def checkpoint(self, name: str, data: object = None) -> None:
        """See `Ledger.checkpoint`."""
        self._ledger.checkpoint(self.reservation, name, data)

    def downstream_key(self, name: str) -> str:
        """See `Reservation.downstream_key`."""
        return self.reservation.downstream_key(name)


class Settlement:
    """Stores, releases or holds a reservation by the answer that the client is about to see. Once."""

    def __init__(self, ledger: Ledger, reservation: Reservation, on_error: str, replayed: frozenset[str]) -> None:
        self.attempt = Attempt(ledger, reservation)
        self.settled = False
        self._streaming = False
        self._then: Callable[[], object] | None = None
        self._ledger = ledger
        self._on_error = on_error
        self._replayed = replayed

    def settle(self, response: Response) -> Response:
        """Settle by this answer and return it; a stream is settled when it ends or breaks."""
        if self.settled:
            return response
        status = response.status_code
        outcome = self.attempt.outcome or (
            self._on_error if status >= 500 else "store" if stored_by_default(status) else "release"
        )
        if outcome == "store":
            self._capture(response)
        elif outcome == "omit":
            self._store(StoredResponse(status, omitted="not_wanted"))
        else:
            self._give_up(outcome)
        return response

    def settle_without_answer(self) -> None:
        """Settle a request that ended in an exception which no answer was made of."""
        if self.settled or self._streaming:
            return
        page = cast(Response, InternalServerError().get_response())
        match self.attempt.outcome or self._on_error:
            case "store":
                self._keep(page.status_code, page.headers, page.get_data())
            case "omit":
                self._store(StoredResponse(page.status_code, omitted="not_wanted"))
            case outcome:
                self._give_up(outcome)

    def when_settled(self, then: Callable[[], object]) -> None:
        """Call `then` once the answer is settled: now, or when its stream has ended."""
        if self.settled:
            then()
        else:
            self._then = then

    def hold_for_review(self) -> None:
        """Leave the row pending, and say that a person must look."""
        self._settle_by(functools.partial(self._ledger.leave, for_review=True))

    def _capture(self, response: Response) -> None:
        status, limit = response.status_code, self._ledger.policy.max_body
        if status in NULL_BODY_STATUSES:
            self._keep(status, response.headers, b"")
        elif response.is_sequence:
            pieces = list(response.iter_encoded())
            if sum(map(len, pieces)) <= limit:
                self._keep(status, response.headers, b"".join(pieces))
            else:
                self._omit(status, "too_large")
        elif response.content_length is None:
            self._collect(response, limit)
        elif response.content_length <= limit:
            self._capture_short(response, response.content_length)
        else:
            self._omit(status, "too_large")

    def _collect(self, response: Response, limit: int) -> None:
        """Collect a stream while it is sent; its headers are those of now, before `after_request` functions."""
        self._streaming = True
        status, headers = response.status_code, tuple(response.headers)
        response.response = _Collected(
            response.response,
            limit,
            keep=lambda body: self._keep(status, headers, body),
            omit=functools.partial(self._omit, status),
        )

    def _capture_short(self, response: Response, length: int) -> None:
        """Read a short stream, as Flask's own error pages are, so that it is stored before the client sees it.

        One that breaks has not been seen by anybody: it is an error like any other of the view.
        """
        close = getattr(response.response, "close", None)
        rest = iter(response.iter_encoded())
        pieces: list[bytes] = []
        try:
            while length >= 0 and (piece := next(rest, None)) is not None:
                pieces.append(piece)
                length -= len(piece)
        except BaseException:
            response.close()
            raise
        response.direct_passthrough = False
        if length < 0:  # longer than it says: it is sent on as it comes
            response.response = itertools.chain(pieces, rest)
            if close is not None:
                response.call_on_close(close)
            self._omit(response.status_code, "too_large")
            return
        response.response = pieces
        if close is not None:
            close()
        self._keep(response.status_code, response.headers, b"".join(pieces))

    def _keep(self, status: int, headers: Iterable[tuple[str, str]], body: bytes) -> None:
        try:
            self._store(StoredResponse(status, kept_headers(headers, self._replayed), body))
        except InvalidResponse as error:
            logger.error("the answer %d cannot be replayed and is not stored: %s", status, error)
            self._omit(status, "not_encodable")

    def _omit(self, status: int, why: Omission) -> None:
        self._store(StoredResponse(status, omitted=why))

    def _store(self, stored: StoredResponse) -> None:
        self._settle_by(self._ledger.fail if stored.status >= 500 else self._ledger.complete, stored)

    def _give_up(self, outcome: str) -> None:
        self._settle_by(self._ledger.leave if outcome == "hold" else self._ledger.release)

    def _settle_by(self, transition: Callable[..., None], *stored: StoredResponse) -> None:
        """Whatever goes wrong here, the client gets the view's answer: what ran, ran."""
        if self.settled:
            return
        self.settled = True
        try:
            transition(self.attempt.reservation, *stored)
        except (FencedOut, LedgerUnavailable):
            pass  # told by the ledger, and stored in the background where that can still be done
        except Exception:
            logger.exception("the answer of generation %d could not be settled", self.attempt.generation)
        if self._then is not None:
            self._then()


class _Collected:
    """A stream on its way to the client, collected up to a limit and settled when it ends or breaks."""

    def __init__(
        self, source: Any, limit: int, keep: Callable[[bytes], None], omit: Callable[[Omission], None]
    ) -> None:
        self._source = source
        self._pieces = iter(source)
        self._limit = limit
        self._keep = keep
        self._omit = omit
        self._body = bytearray()
        self._too_large = False
        self._ended = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            piece = next(self._pieces)
        except StopIteration:
            self._end(broken=False)
            raise
        except BaseException:
            self._end(broken=True)
            raise
        if not self._too_large:
            self._body += piece.encode() if isinstance(piece, str) else piece
            if len(self._body) > self._limit:
                self._too_large = True
                self._body.clear()
        return piece

    def close(self) -> None:
        self._end(broken=True)
        if hasattr(self._source, "close"):
            self._source.close()

    def __del__(self) -> None:
        """An answer that was put in this one's place drops it without closing it."""
        with suppress(Exception):
            self.close()

    def _end(self, broken: bool) -> None:
        if self._ended:
            return
        self._ended = True
        if self._too_large:
            self._omit("too_large")
        elif broken:
            self._omit("broken_off")
        else:
            self._keep(bytes(self._body))
