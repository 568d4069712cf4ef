"""The response on its way to the server: held, collected up to the cap, and settled before its last message."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable

from ..core.response import StoredResponse
from ..web.recorder import ResponseRecorder
from ._messages import body_of, headers_in, own_headers, start_of
from ._types import Message, Send

__all__ = ["Outgoing"]


class Outgoing:
    """The response of one request.

    Args:
        send: the server's.
        storable: names of the headers that are stored.

    Attributes:
        recorder: decides how the row is settled; None if there is no claim.
        settle: settles the row as the recorder has decided.
        answer: a refusal or replay; it is sent instead of what the application sends.
        made: a `StoredResponse` of the application; it is sent and stored instead of what the application sends.
        answer_error: settles the row and sets `answer` for an error that has a response of its own; returns True then.
        marked: the response says that the endpoint ran unprotected.
        begun: True once the server has received the first message.
        ended: True once the application has sent its last message, or is answered.
        collected: set once nothing more is collected of the response.
    """

    def __init__(self, send: Send, storable: frozenset[str]) -> None:
        self.recorder: ResponseRecorder | None = None
        self.settle: Callable[[], Awaitable[None]] | None = None
        self.answer: StoredResponse | None = None
        self.made: StoredResponse | None = None
        self.answer_error: Callable[[BaseException], Awaitable[bool]] | None = None
        self.marked = False
        self.begun = False
        self.ended = False
        self.collected = asyncio.Event()
        self._server_send = send
        self._storable = storable
        self._gone = False
        self._start: Message | None = None
        self._status = 0
        self._headers: tuple[tuple[str, str], ...] = ()
        self._announced: int | None = None
        self._body = bytearray()
        self._omitted = False
        self._last: Message | None = None

    def abandon(self) -> None:
        """Send nothing more: the server no longer waits for the response."""
        self._gone = True

    async def send(self, message: Message) -> None:
        """Take a message of the application."""
        kind = message["type"]
        if self.made is not None:
            if kind == "http.response.start":
                await self._send_made(message)
        elif self.answer is not None:
            if kind == "http.response.start":
                await self._send_answer(message)
        elif kind == "http.response.start":
            await self._take_start(message)
        elif kind == "http.response.body" and self._start is not None:
            await self._take_body(message)
        else:
            self.begun |= kind == "http.response.body"
            await self._forward(message)

    async def finish(self, error: BaseException | None) -> bool:
        """Settle the row, if it is not settled, when the application has ended; return True if its error is handled."""
        recorder = self.recorder
        if self.made is not None:
            await self._send_made(None)
            return error is None or isinstance(error, Exception)
        if self.answer is None and error is not None and self.answer_error is not None:
            await self.answer_error(error)
        if self.answer is None and recorder is not None and not (recorder.settled and self.ended):
            await self._finish(recorder, error)
        if self.answer is None:
            return False
        await self._send_answer(None)
        return error is None or isinstance(error, Exception)

    # The application's response

    async def _send_made(self, start: Message | None) -> None:
        if self.made is None or self.ended:
            return
        made, self.ended = self.made, True
        further = [] if start is None else own_headers(start, made, self._storable)
        if self.recorder is not None:
            self._status, self._headers, self._body = made.status, made.headers, bytearray(made.body)
            await self._settle(self.recorder)
        self._start = start_of(made, further)
        await self._forward_body(body_of(made))

    async def _take_start(self, message: Message) -> None:
        if self.recorder is None:
            self.begun = True
            await self._forward(self._signed(message))
            return
        if not self.begun:  # else the server refuses this message
            self._body.clear()
            self._omitted = False
        headers = headers_in(message)
        self._start = {**message, "headers": headers}
        self._status = message["status"]
        self._headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers)
        length = next((value for name, value in self._headers if name.lower() == "content-length"), "")
        self._announced = int(length) if length.isdecimal() else None
        self.recorder.failure = sys.exc_info()[1]  # the exception, if an error handler makes this response
        if self.recorder.failure is not None and self.answer_error is not None:
            await self.answer_error(self.recorder.failure)
            if self.answer is not None:
                await self._send_answer(message)
                return
        if not self.recorder.would_store(self._status):
            self.collected.set()

    async def _take_body(self, message: Message) -> None:
        body, more = message.get("body", b""), message.get("more_body", False)
        recorder = self.recorder
        assert recorder is not None
        if not self._omitted and not self.ended:
            if max(len(self._body) + len(body), self._announced or 0) > recorder.max_body:
                self._omitted = True
                self.collected.set()
            else:
                self._body += body
        if more and not self.ended:
            if not self.begun and self._is_held():
                return
            await self._forward_body(message)
            return
        if not self.ended:
            if self._is_made_of_an_error(recorder):
                self._last = message
                return
            await self._settle(recorder)
        await self._forward_body(message)

    def _is_held(self) -> bool:
        """Return True while there is no body to send, or while a short response of known length is not complete."""
        if self._omitted:
            return False
        return not self._body or (self._announced is not None and len(self._body) <= self._announced)

    def _is_made_of_an_error(self, recorder: ResponseRecorder) -> bool:
        """Return True for a 5xx that would be stored, and whose exception may still leave the application.

        A page with a traceback, such as Starlette's in debug mode, is sent before its exception is raised again.
        """
        return self._status >= 500 and recorder.failure is not None and recorder.would_store(self._status)

    async def _settle(self, recorder: ResponseRecorder, omitted: bool = False) -> None:
        """Take the response as the content of the row, and settle the row."""
        self.ended = True
        if self._omitted:
            recorder.record_omitted(self._status, self._headers, "too_large")
        elif omitted:
            recorder.record_omitted(self._status, self._headers, "broken_off")
        else:
            recorder.record(self._status, self._headers, bytes(self._body))
        recorder.finish()
        await self._settled()

    async def _finish(self, recorder: ResponseRecorder, error: BaseException | None) -> None:
        last = self._last
        if last is not None and error is None:
            await self._settle(recorder)
        elif self.begun:  # the stream has broken off
            await self._settle(recorder, omitted=True)
        else:
            self.ended = True
            recorder.finish(None, error)
            await self._settled()
        if last is not None:
            await self._forward_body(last)

    async def _settled(self) -> None:
        self.collected.set()
        if self.settle is not None:
            await self.settle()

    # To the server

    async def _send_answer(self, start: Message | None) -> None:
        """Send the answer, with the headers that inner middleware added to the application's own response."""
        if self.ended and self.begun:
            return
        assert self.answer is not None
        self.begun = self.ended = True
        self.collected.set()
        further = [] if start is None else own_headers(start, self.answer, self._storable)
        await self._forward(start_of(self.answer, further))
        await self._forward(body_of(self.answer))

    async def _forward_body(self, message: Message) -> None:
        if not self.begun:
            assert self._start is not None
            self.begun = True
            await self._forward(self._signed(self._start))
            if self._omitted and self._body:  # what was held before
                message = {**message, "body": bytes(self._body) + message.get("body", b"")}
                self._body.clear()
            elif len(self._body) > len(message.get("body", b"")):
                message = {**message, "body": bytes(self._body)}
        await self._forward(message)

    def _signed(self, start: Message) -> Message:
        if not self.marked:
            return start
        return {**start, "headers": [*start.get("headers", ()), (b"idempotency-status", b"unprotected")]}

    async def _forward(self, message: Message) -> None:
        if self._gone:
            return
        try:
            await self._server_send(message)
        except Exception as error:
            if self.recorder is None or not (self._gone or isinstance(error, OSError)):
                raise
            self._gone = True  # the client went away; the response is still stored
