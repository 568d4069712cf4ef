"""A request as it was sent: its raw target, and its body, which is read once, hashed, and given to the view again."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Iterator
from tempfile import SpooledTemporaryFile
from typing import IO, Any, TypeAlias
from urllib.parse import quote

__all__ = ["BodyIncomplete", "BodyTooLarge", "Environ", "LengthRequired", "RequestBody", "raw_target"]

logger = logging.getLogger("idemredis")

Environ: TypeAlias = dict[str, Any]

CHUNK = 64 * 1024
"""Bytes read at a time; a body that comes in one piece stays as it is."""

SPOOL = 256 * 1024
"""Bytes of a body kept in memory; a larger one goes through a temporary file."""

_ORIGIN = re.compile(r"\A[a-z][a-z0-9+\-.]*://[^/?#]*", re.IGNORECASE)

_warned: set[str] = set()


class BodyIncomplete(Exception):
    """The client sent fewer bytes than it announced, or the upload broke off."""


class BodyTooLarge(Exception):
    """The body is larger than the application takes."""


class LengthRequired(Exception):
    """The body has no length and the server does not say where it ends."""


class _Recorder(io.RawIOBase):
    """A `wsgi.input` that keeps what is read through it, in case something reads the body before the claim."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.seen: IO[bytes] | None = None
        self._recording = True

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        chunk: bytes = self.source.read(len(buffer))
        if self._recording:
            if self.seen is None:
                self.seen = SpooledTemporaryFile(SPOOL)  # noqa: SIM115  # closed when the request is torn down
            self.seen.write(chunk)
        buffer[: len(chunk)] = chunk
        return len(chunk)

    def close(self) -> None:
        self.stop()
        super().close()

    def stop(self) -> None:
        """Keep no more. It can still be read: an unprotected view may send what it reads of the body."""
        self._recording = False
        if self.seen is not None:
            self.seen.close()
            self.seen = None


class RequestBody:
    """The body of one WSGI request, in the place of the server's `wsgi.input`.

    Small bodies stay in memory, larger ones go through a temporary file: memory does not grow with the body.
    """

    def __init__(self, environ: Environ) -> None:
        self._environ = environ

    def record(self) -> None:
        """Keep what is read of the body from now on, so that `buffer` can give all of it again."""
        self._environ["wsgi.input"] = _Recorder(self._environ["wsgi.input"])

    def buffer(self, update: Callable[[bytes], object], limit: int | None) -> None:
        """Read the body to its end, and let it be read again from its start.

        Args:
            update: of a hash; called with each piece, also with those that something has read before.
            limit: bytes that the application takes; None for any.

        Raises:
            BodyIncomplete, BodyTooLarge, LengthRequired: the request must not be claimed.
        """
        source, seen = self._environ["wsgi.input"], None
        if isinstance(source, _Recorder):
            source, seen = source.source, source.seen
        expected = _expected(self._environ)
        if limit is not None and expected is not None and expected > limit:
            raise BodyTooLarge
        pieces = _pieces(source, seen, expected, limit)
        first = next(pieces, b"")
        update(first)
        body: IO[bytes] = io.BytesIO(first)
        if len(first) != expected:
            body = SpooledTemporaryFile(SPOOL)  # noqa: SIM115  # closed when the request is torn down
            try:
                body.write(first)
                for piece in pieces:
                    update(piece)
                    body.write(piece)
                if expected is not None and body.tell() < expected:
                    raise BodyIncomplete
            except BaseException:
                body.close()
                raise
            body.seek(0)
        self._environ["wsgi.input"] = body

    def rewind(self) -> None:
        """Let the body be read from its start again, after `buffer`."""
        self._environ["wsgi.input"].seek(0)

    def close(self) -> None:
        """Free what `record` or `buffer` put in the place of the server's own."""
        body = self._environ.get("wsgi.input")
        if type(body) is _Recorder:
            body.stop()
        elif type(body) is SpooledTemporaryFile:
            body.close()


def raw_target(environ: Environ) -> str:
    """Return path and query as the client sent them; `PATH_INFO` is decoded, and `/a%2Fb` is not `/a/b`.

    gunicorn and Werkzeug give `RAW_URI`, Werkzeug, waitress and uWSGI `REQUEST_URI`. Where a server gives neither, the
    path is quoted again, which is logged once: two targets that differ only in quoting are then one.
    """
    target: str = environ.get("RAW_URI") or environ.get("REQUEST_URI") or ""
    query: str = environ.get("QUERY_STRING", "")
    if not target:
        _warn_once(environ.get("SERVER_SOFTWARE") or "this WSGI server")
        path = environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")
        target = quote(path.encode("latin-1"), safe="/!$&'()*+,;=:@-._~")
    elif not target.startswith("/"):  # absolute-form (RFC 9112 §3.2.2): the same target by another name
        target = _ORIGIN.sub("", target, count=1)
        if not target.startswith("/"):
            target = f"/{target}"
    if query and "?" not in target:
        target = f"{target}?{query}"
    if target.isascii():
        return target
    return target.encode("latin-1").decode("utf-8", "surrogateescape")


def _expected(environ: Environ) -> int | None:
    """The body's length; None where the server ends the stream itself."""
    length = environ.get("CONTENT_LENGTH") or ""
    chunked = "HTTP_TRANSFER_ENCODING" in environ
    if length.isdecimal() and not chunked:
        return int(length)
    if environ.get("wsgi.input_terminated"):
        return None
    if chunked:
        raise LengthRequired
    return 0


def _pieces(source: Any, seen: IO[bytes] | None, expected: int | None, limit: int | None) -> Iterator[bytes]:
    """First what was read before, then the rest of the source."""
    read = 0
    if seen is not None:
        seen.seek(0)
        while piece := seen.read(CHUNK):
            read += len(piece)
            yield piece
        seen.close()
    while expected is None or read < expected:
        try:
            piece = source.read(CHUNK if expected is None else min(CHUNK, expected - read))
        except Exception as error:  # each server has its own for a client that went away
            raise BodyIncomplete from error
        if not piece:
            return
        read += len(piece)
        if limit is not None and read > limit:
            raise BodyTooLarge
        yield piece


def _warn_once(server: str) -> None:
    if server not in _warned:
        _warned.add(server)
        logger.warning(
            "%s does not give the raw request target; fingerprints use the decoded path, quoted again", server
        )
