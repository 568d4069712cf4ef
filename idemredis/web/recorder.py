"""Record a response, and settle the row once the application has finished with the request."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from http import HTTPStatus
from typing import Any, NamedTuple

from ..core.reservation import Choice, Reservation, allow, chosen_outcome, freeze
from ..core.response import NULL_BODY_STATUSES, Omission, StoredResponse, filter_headers
from ..core.settle import Ending, OnError, of_effect, of_error, of_status
from ..errors import HoldForReview, InvalidResponse

__all__ = ["ResponseRecorder"]

logger = logging.getLogger("idemredis")

DRAIN_SECONDS = 5.0
"""Seconds for which the rest of a stream is collected after its client went away. Most small responses end earlier. A
slow source occupies its worker for no longer than a slow client would."""


class _End(NamedTuple):
    """How the application finished: the status that the client receives, or the exception that left the application."""

    status: int | None
    error: BaseException | None
    retry_after: bool


class ResponseRecorder:
    """Settle one reservation, once, according to the response that its client receives.

    What is stored is the content: the response as the view and the error handlers made it. Whether it is stored is
    decided when the application has finished and a streamed content has ended, since anything up to then can still
    turn the response into a failure.

    Args:
        reservation: the request's reservation; its `outcome` becomes settable.
        settle: called with the reservation and the ending, such as `Ledger.settle`.
        on_error: what an exception, or a status of 500 or above, does to the row.
        storable: names of the headers to store, in lower case.
        max_body: limit of a stored body, in bytes; a larger body is not stored.

    Attributes:
        settled: True once the row is settled.
        failure: the exception that the application has turned, or may still turn, into a response.
        failed_afterwards: True if it was raised after the view had made its response.
    """

    def __init__(
        self,
        reservation: Reservation,
        settle: Callable[[Reservation, Ending], object],
        on_error: OnError,
        storable: frozenset[str],
        max_body: int,
    ) -> None:
        self.reservation = reservation
        self.max_body = max_body
        self.settled = False
        self.failure: BaseException | None = None
        self.failed_afterwards = False
        self._settle = settle
        self._on_error = on_error
        self._storable = storable
        self._content: StoredResponse | None = None
        self._retry_after = False
        # Only a weak reference: a stream that is dropped unread must be able to notice that.
        self._stream: object = None
        self._open_stream: weakref.ref[_Collected] | None = None
        self._end: _End | None = None
        self._then: Callable[[], object] | None = None
        allow(reservation, "outcome")

    # The content

    def record(self, status: int, headers: Iterable[tuple[str, str]], body: bytes) -> None:
        """Take a response as the content; it replaces one that was recorded before."""
        self._stream = None
        pairs = tuple(headers)
        self._retry_after = status >= 400 and "retry-after" in [name.lower() for name, _ in pairs]
        if len(body) > self.max_body:
            self._content = StoredResponse(status, omitted="too_large")
            return
        if status in NULL_BODY_STATUSES:
            body = b""
        try:
            self._content = StoredResponse(status, filter_headers(pairs, self._storable), body)
        except InvalidResponse as error:
            logger.error("the response %d cannot be replayed and is not stored: %s", status, error)
            self._content = StoredResponse(status, omitted="not_encodable")

    def record_omitted(self, status: int, headers: Iterable[tuple[str, str]], why: Omission) -> None:
        """Take a response whose body cannot be kept; retries are refused, and the view does not run again."""
        self.record(status, headers, b"")
        self._content = StoredResponse(status, omitted=why)

    def collect(self, source: Any, status: int, headers: Iterable[tuple[str, str]]) -> Iterator[Any]:
        """Take a streamed response as the content: yield its pieces, and collect them up to the limit.

        The headers are copied now, before later functions change them. The returned iterator closes the source once.
        """
        pairs = tuple(headers)
        self.record(status, pairs, b"")
        self._content = None
        stream = _Collected(source, self, status, pairs)
        self._stream = stream.token
        self._open_stream = weakref.ref(stream)
        return stream

    # The decision

    def effect_found(self, ending: Ending) -> None:
        """Settle the row now, as `of_effect` says: the effect is already committed, or belongs to another request."""
        response = ending.response
        if response is None:
            self._settle_by(ending)
            return
        if response.omitted:
            self.record_omitted(response.status, response.headers, response.omitted)
        else:
            self.record(response.status, response.headers, response.body)
        assert self._content is not None
        self._settle_by(_stored(self._content))

    def hold_for_review(self) -> None:
        """Leave the row pending and emit `held_for_review`, whatever else happens to the request."""
        self._settle_by(Ending("review"))

    def finish(
        self, status: int | None = None, error: BaseException | None = None, *, retry_after: bool = False
    ) -> None:
        """Settle the row, now or when the stream ends: the application has finished. Later calls do nothing.

        Args:
            status: what the client receives.
            error: the exception that left the application; the client receives a 500 of the server.
            retry_after: the client receives a Retry-After header.
        """
        if self._end is None:
            self._end = _End(status, error, retry_after)
            if self._stream is None or error is not None:  # after an error, nobody reads the stream
                self._decide()

    def when_settled(self, then: Callable[[], object]) -> None:
        """Call `then` once the row is settled: now, or when the stream has ended."""
        if self.settled:
            then()
        else:
            self._then = then

    def abandon(self) -> None:
        """End a stream that nobody will read any more."""
        stream = None if self._stream is None or self._open_stream is None else self._open_stream()
        if stream is not None:
            stream.close()

    def wants_rest_of(self, stream: _Collected) -> bool:
        """Return True if the rest of a stream is worth collecting after its client went away."""
        return stream.token is self._stream and self.would_store(stream.status)

    def would_store(self, status: int) -> bool:
        """Return True if a response of this status would be stored, as far as is known now."""
        return not self.settled and self._choice(status, None) == "store"

    def stream_ended(self, stream: _Collected, body: bytes, omitted: Omission) -> None:
        """Take what was collected of a stream that has ended or broken off."""
        if stream.token is not self._stream:
            return  # another response has replaced it
        if omitted:
            self.record_omitted(stream.status, stream.headers, omitted)
        else:
            self.record(stream.status, stream.headers, body)
        self._decide_at_end()

    def stream_failed(self, stream: _Collected, error: BaseException) -> None:
        """Treat the exception of a stream like one of the view: nothing of the response has been sent."""
        if stream.token is not self._stream:
            return
        self._stream = None
        if self._end is None:  # the exception is on its way through the application
            self.failure = error
            self._content = None
        else:
            self._end = _End(None, error, False)
            self._decide()

    def _decide_at_end(self) -> None:
        if self._end is not None:
            self._decide()

    def _decide(self) -> None:
        assert self._end is not None
        status, error, retry_after = self._end
        content = self._content
        if error is None and content is None:
            error = self.failure
        if error is not None and (found := of_effect(error, self.reservation)) is not None:
            self.effect_found(found)
            return
        if error is not None or content is None:
            self._settle_by(self._after_error(error))
            return
        final = content.status if status is None else status
        match self._choice(content.status, _End(final, None, retry_after)):
            case "store" if final >= 500 > content.status:
                self._settle_by(Ending("fail", _plain(final)))
            case "store":
                self._settle_by(_stored(content))
            case "omit":
                self._settle_by(_stored(StoredResponse(content.status, omitted="not_wanted")))
            case choice:
                self._settle_by(Ending("hold" if choice == "hold" else "release"))

    def _choice(self, status: int, end: _End | None) -> Choice:
        """Return what to do with the content: the view's choice, or else the rules for the statuses.

        The view's choice applies to its own response only. If the request failed after the view, "store" does not make
        that failure final. "omit" leaves out the body of a response that the rules store.
        """
        outcome = chosen_outcome(self.reservation)
        if outcome in ("release", "hold"):
            return outcome
        chosen = outcome == "store" and not self.failed_afterwards
        rule: Choice = "store" if chosen else self._rule(status, self._retry_after)
        if rule == "store" and end is not None and end.status is not None and end.status != status:
            rule = self._rule(end.status, end.retry_after)
        return "omit" if rule == "store" and outcome == "omit" else rule

    def _rule(self, status: int, retry_after: bool) -> OnError:
        if status >= 500 and self.failure is not None:
            how = of_error(self.failure, self._on_error)
            return "hold" if how == "review" else how
        return of_status(status, self._on_error, retry_after=retry_after)

    def _after_error(self, error: BaseException | None) -> Ending:
        how = self._on_error if error is None else of_error(error, self._on_error)
        outcome = chosen_outcome(self.reservation)
        if how != "review" and (outcome == "release" or outcome == "hold"):
            how = outcome
        return Ending("fail", _plain(500)) if how == "store" else Ending(how)

    def _settle_by(self, ending: Ending) -> None:
        if self.settled:
            return
        self.settled = True
        freeze(self.reservation)
        self._settle(self.reservation, ending)
        then, self._then = self._then, None
        if then is not None:
            then()


class _Collected:
    """A response stream that is collected up to a limit, and notifies the recorder when it ends or breaks off."""

    def __init__(
        self, source: Any, recorder: ResponseRecorder, status: int, headers: tuple[tuple[str, str], ...]
    ) -> None:
        self.status = status
        self.headers = headers
        self.token = object()
        self._source = source
        self._pieces = iter(source)
        self._recorder = recorder
        self._body = bytearray()
        self._begun = False
        self._too_large = False
        self._ended = False
        self._closed = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        try:
            piece = next(self._pieces)
        except StopIteration:
            self._end("")
            raise
        except BaseException as error:
            self._break(error)
            raise
        if piece:
            self._begun = True
            if not self._too_large:
                self._body += piece.encode() if isinstance(piece, str) else piece
                if len(self._body) > self._recorder.max_body:
                    self._too_large = True
                    self._body.clear()
        return piece

    def close(self) -> None:
        """Collect the rest of a small stream whose client went away, and close the source once."""
        if self._closed:
            return
        self._closed = True
        try:
            if not self._ended:
                self._collect_rest()
        finally:
            if hasattr(self._source, "close"):
                self._source.close()

    def __del__(self) -> None:
        """Settle the row of a stream that was dropped without being closed, as when another response replaces it."""
        with suppress(Exception):
            self.close()

    def _collect_rest(self) -> None:
        """Read on for a short time, in case the source ends within the limit."""
        until = time.monotonic() + DRAIN_SECONDS
        with suppress(Exception):
            while self._recorder.wants_rest_of(self) and not self._too_large and time.monotonic() < until:
                if next(self, None) is None and self._ended:
                    return
        self._end("broken_off")

    def _break(self, error: BaseException) -> None:
        if isinstance(error, HoldForReview):
            self._recorder.hold_for_review()
        if self._begun or self._ended:
            self._end("broken_off")
            return
        self._ended = True
        self._recorder.stream_failed(self, error)

    def _end(self, why: Omission) -> None:
        if self._ended:
            return
        self._ended = True
        self._recorder.stream_ended(self, bytes(self._body), "too_large" if self._too_large else why)


def _stored(content: StoredResponse) -> Ending:
    return Ending("fail" if content.status >= 500 else "complete", content)


def _plain(status: int) -> StoredResponse:
    """Return the response that is stored for a failure for which the application made no response."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "Server Error"
    return StoredResponse(status, (("Content-Type", "text/plain; charset=utf-8"),), phrase.encode())
