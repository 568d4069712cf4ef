"""Record a response while it is sent to the client, and settle the row when it ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from ..core.reservation import Choice, Reservation, allow
from ..core.response import NULL_BODY_STATUSES, Omission, StoredResponse, filter_headers
from ..core.settle import Ending, OnError, of_status
from ..errors import InvalidResponse

__all__ = ["ResponseRecorder"]

logger = logging.getLogger("idemredis")


class ResponseRecorder:
    """Settle one reservation, once, according to the response that its client receives.

    Args:
        reservation: the request's reservation; its `outcome` becomes settable.
        settle: called with the reservation and the ending, such as `Ledger.settle`.
        on_error: what a status of 500 or above does to the row.
        storable: names of the headers to store, in lower case.
        max_body: limit of a stored body, in bytes; a larger body is not stored.

    Attributes:
        settled: True once the row is settled.
        streaming: True while the row will be settled at the end of the response's stream.
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
        self.streaming = False
        self._settle = settle
        self._on_error = on_error
        self._storable = storable
        self._then: Callable[[], object] | None = None
        allow(reservation, "outcome")

    def choice(self, status: int) -> Choice:
        """Return what to do with a response of this status: the view's choice, or else the rules for the status."""
        return of_status(status, self.reservation.outcome, self._on_error)

    def store(self, status: int, headers: Iterable[tuple[str, str]], body: bytes) -> None:
        """Store the response, or a tombstone if a part of it cannot be stored."""
        if status in NULL_BODY_STATUSES:
            body = b""
        try:
            stored = StoredResponse(status, filter_headers(headers, self._storable), body)
        except InvalidResponse as error:
            logger.error("the response %d cannot be replayed and is not stored: %s", status, error)
            self.omit(status, "not_encodable")
        else:
            self._store(stored)

    def omit(self, status: int, why: Omission) -> None:
        """Store the status only; retries are refused, and the view does not run again."""
        self._store(StoredResponse(status, omitted=why))

    def give_up(self, how: Choice) -> None:
        """Release the key, or hold the row until its lease ends, without storing anything."""
        self._end(Ending("hold" if how == "hold" else "release"))

    def hold_for_review(self) -> None:
        """Leave the row pending and emit `held_for_review`."""
        self._end(Ending("review"))

    def collect(self, source: Any, status: int, headers: Iterable[tuple[str, str]]) -> Iterator[Any]:
        """Yield the pieces of a stream and collect them; the row is settled when the stream ends or breaks.

        The headers are copied now, before later functions change them.
        """
        self.streaming = True
        return _Collected(source, self, status, tuple(headers))

    def when_settled(self, then: Callable[[], object]) -> None:
        """Call `then` once the row is settled: now, or when the stream has ended."""
        if self.settled:
            then()
        else:
            self._then = then

    def _store(self, stored: StoredResponse) -> None:
        self._end(Ending("fail" if stored.status >= 500 else "complete", stored))

    def _end(self, ending: Ending) -> None:
        if self.settled:
            return
        self.settled = True
        self._settle(self.reservation, ending)
        if self._then is not None:
            self._then()


class _Collected:
    """A response stream that is collected up to a limit, and settles the row when it ends or breaks."""

    def __init__(
        self, source: Any, recorder: ResponseRecorder, status: int, headers: tuple[tuple[str, str], ...]
    ) -> None:
        self._source = source
        self._pieces = iter(source)
        self._recorder = recorder
        self._status = status
        self._headers = headers
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
            if len(self._body) > self._recorder.max_body:
                self._too_large = True
                self._body.clear()
        return piece

    def close(self) -> None:
        self._end(broken=True)
        if hasattr(self._source, "close"):
            self._source.close()

    def __del__(self) -> None:
        """Settle the row of a stream that was dropped without being closed, as when another response replaces it."""
        with suppress(Exception):
            self.close()

    def _end(self, broken: bool) -> None:
        if self._ended:
            return
        self._ended = True
        if self._too_large:
            self._recorder.omit(self._status, "too_large")
        elif broken:
            self._recorder.omit(self._status, "broken_off")
        else:
            self._recorder.store(self._status, self._headers, bytes(self._body))
