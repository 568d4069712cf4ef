"""The raw target of a request, and its body, which is hashed as it passes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..web.body import CHUNK, SPOOL, BodyIncomplete, BodyTooLarge, Spool, origin_form, quoted
from ._types import Message, Receive, Scope

if TYPE_CHECKING:
    from hashlib import _Hash

__all__ = ["RequestBody", "expected", "raw_target"]


class RequestBody:
    """The body of one request: hashed as the application reads it, or drained by the claim and then handed on.

    Only what the claim drains is kept, in memory or in a temporary file, until the application has read it.

    Args:
        receive: the server's.
        digest: the fingerprint so far; the body is added to it.
        expected: bytes that the client has announced; None if it has not.
        limit: maximum size in bytes.
        keep: keep a copy of everything, for `content`.

    Attributes:
        disconnected: the client has gone away.
    """

    def __init__(self, receive: Receive, digest: _Hash, expected: int | None, limit: int, keep: bool) -> None:
        self.digest = digest
        self.disconnected = False
        self._receive = receive
        self._expected = expected
        self._limit = limit
        self._over = False
        self._size = 0
        self._lock = asyncio.Lock()
        self._drained: Spool | None = None
        self._handed_on = 0
        self._rest: list[bytes] = []
        self._copy = Spool() if keep else None

    async def receive(self) -> Message:
        """Return the next message for the application."""
        if self._over and self._drained is None:
            return await self._receive()
        async with self._lock:  # the claim may be draining the body for an endpoint of the same application
            if self._drained is not None:
                return self._hand_on(self._drained)
            return await self._take()

    async def drain(self) -> None:
        """Read the body to its end. The application can still read all of it, also if this fails.

        Raises:
            BodyIncomplete, BodyTooLarge, NoRoom: the caller must refuse the request without a claim.
        """
        if self._expected is not None and self._expected > self._limit:
            raise BodyTooLarge
        async with self._lock:
            if not self._over and self._drained is None:
                self._drained = Spool()
                try:
                    await self._drain(self._drained)
                finally:
                    self._drained.rewind()
        if self._size > self._limit:
            raise BodyTooLarge
        if self._expected is not None and self._size < self._expected:
            raise BodyIncomplete

    def content(self) -> bytes:
        """Return the whole body, after `drain`, if it is kept."""
        assert self._copy is not None
        self._copy.rewind()
        return self._copy.file.read()

    def close(self) -> None:
        """Free the memory or temporary files that are used."""
        for spool in (self._drained, self._copy):
            if spool is not None:
                spool.close()
        self._drained = None
        self._rest = []

    async def _drain(self, spool: Spool) -> None:
        while not self._over:
            message = await self._take()
            if message["type"] != "http.request":
                raise BodyIncomplete
            body = message.get("body", b"")
            if self._size > self._limit:
                self._rest.append(body)
                raise BodyTooLarge
            try:
                await _write(spool, body)
            except BaseException:
                self._rest.append(body)
                raise

    async def _take(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            body: bytes = message.get("body", b"")
            self._size += len(body)
            self._over = not message.get("more_body", False)
            if self._size <= self._limit:
                self.digest.update(body)
                if self._copy is not None:
                    await _write(self._copy, body)
        elif message["type"] == "http.disconnect":
            self.disconnected = True
        return message

    def _hand_on(self, drained: Spool) -> Message:
        piece = drained.file.read(CHUNK) if self._handed_on < drained.size else b""
        self._handed_on += len(piece)
        if not piece and self._rest:
            piece = self._rest.pop(0)
        ended = self._handed_on >= drained.size and not self._rest
        if ended:
            drained.close()
            self._drained = None
        if ended and self.disconnected and not piece:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": piece, "more_body": not (ended and self._over)}


async def _write(spool: Spool, data: bytes) -> None:
    if spool.size + len(data) > SPOOL:
        await asyncio.to_thread(spool.write, data)
    else:
        spool.write(data)


def raw_target(scope: Scope) -> str:
    """Return path and query as the client sent them.

    A server that does not give `raw_path` has the decoded path quoted again: two targets that differ only in quoting
    then have the same fingerprint. ASGI does not tell an empty query from none.
    """
    raw: bytes | None = scope.get("raw_path")
    query: bytes = scope.get("query_string", b"")
    if raw:
        target = raw.decode("utf-8", "surrogateescape")
        if not target.startswith("/"):
            target = origin_form(target)
    else:
        root, path = scope.get("root_path", ""), scope["path"]
        target = quoted((path if path.startswith(root) else root + path).encode("utf-8", "surrogateescape"))
    if query and "?" not in target:
        return f"{target}?{query.decode('utf-8', 'surrogateescape')}"
    return target


def expected(headers: Mapping[str, str]) -> int | None:
    """Return the length of the body that the client has announced; None if it has not, or the body is chunked."""
    length = headers.get("content-length", "")
    return int(length) if length.isdecimal() and "transfer-encoding" not in headers else None
