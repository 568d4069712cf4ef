"""The raw target of a request, and its body, which is read once, hashed, and made readable again for the view."""

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
"""Bytes read at a time. Most bodies fit, and need no temporary file."""

SPOOL = 256 * 1024
"""Bytes of a body kept in memory; the rest goes to a temporary file."""

_ORIGIN = re.compile(r"\A[a-z][a-z0-9+\-.]*://[^/?#]*", re.IGNORECASE)

_warned: set[str] = set()


class BodyIncomplete(Exception):
    """The client sent fewer bytes than its Content-Length, or the upload broke off."""


class BodyTooLarge(Exception):
    """The body is larger than the application accepts."""


class LengthRequired(Exception):
    """The body has no length, and the server does not mark its end."""


class _Recorder(io.RawIOBase):
    """A `wsgi.input` that records what is read through it, in case the body is read before the claim."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.recorded: IO[bytes] | None = None
        self._recording = True

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        chunk: bytes = self.source.read(len(buffer))
        if self._recording:
            if self.recorded is None:
                self.recorded = SpooledTemporaryFile(SPOOL)  # noqa: SIM115  # closed when the request is torn down
            self.recorded.write(chunk)
        buffer[: len(chunk)] = chunk
        return len(chunk)

    def close(self) -> None:
        self.stop()
        super().close()

    def stop(self) -> None:
        """Stop recording; the source can still be read, since an unprotected view may stream its request body."""
        self._recording = False
        if self.recorded is not None:
            self.recorded.close()
            self.recorded = None


class RequestBody:
    """The body of one WSGI request, which replaces the server's `wsgi.input`.

    Small bodies stay in memory and larger ones go to a temporary file, so memory does not grow with the body.
    """

    def __init__(self, environ: Environ) -> None:
        self._environ = environ

    def record(self) -> None:
        """Record what is read of the body from now on, so that `buffer` has all of it."""
        self._environ["wsgi.input"] = _Recorder(self._environ["wsgi.input"])

    def buffer(self, update: Callable[[bytes], object], limit: int | None) -> None:
        """Read the body to its end, and make it readable again from its start.

        Args:
            update: called with each piece of the body, including those that were read before.
            limit: maximum size in bytes; None for no limit.

        Raises:
            BodyIncomplete, BodyTooLarge, LengthRequired: refuse the request without a claim.
        """
        source, recorded = self._environ["wsgi.input"], None
        if isinstance(source, _Recorder):
            source, recorded = source.source, source.recorded
        expected = _expected(self._environ)
        if limit is not None and expected is not None and expected > limit:
            raise BodyTooLarge
        pieces = _pieces(source, recorded, expected, limit)
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
        """Make the body readable from its start again, after `buffer`."""
        self._environ["wsgi.input"].seek(0)

    def close(self) -> None:
        """Free the memory or temporary file that `record` or `buffer` uses."""
        body = self._environ.get("wsgi.input")
        if type(body) is _Recorder:
            body.stop()
        elif type(body) is SpooledTemporaryFile:
            body.close()


def raw_target(environ: Environ) -> str:
    """Return path and query as the client sent them.

    `PATH_INFO` is decoded, so it does not tell `/a%2Fb` from `/a/b`. gunicorn sets `RAW_URI`; waitress and uWSGI set
    `REQUEST_URI`; Werkzeug sets both. With another server the decoded path is quoted again, which is logged once. Two
    targets that differ only in quoting then have the same fingerprint.
    """
    target: str = environ.get("RAW_URI") or environ.get("REQUEST_URI") or ""
    query: str = environ.get("QUERY_STRING", "")
    if not target:
        _warn_once(environ.get("SERVER_SOFTWARE") or "this WSGI server")
        path = environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")
        target = quote(path.encode("latin-1"), safe="/!$&'()*+,;=:@-._~")
    elif not target.startswith("/"):  # absolute-form (RFC 9112 §3.2.2) means the same as origin-form
        target = _ORIGIN.sub("", target, count=1)
        if not target.startswith("/"):
            target = f"/{target}"
    if query and "?" not in target:
        target = f"{target}?{query}"
    if target.isascii():
        return target
    return target.encode("latin-1").decode("utf-8", "surrogateescape")


def _expected(environ: Environ) -> int | None:
    """Return the body's length, or None if the server ends the stream itself.

    Raises:
        LengthRequired: the body is chunked, and the server does not end the stream.
    """
    length = environ.get("CONTENT_LENGTH") or ""
    chunked = "HTTP_TRANSFER_ENCODING" in environ
    if length.isdecimal() and not chunked:
        return int(length)
    if environ.get("wsgi.input_terminated"):
        return None
    if chunked:
        raise LengthRequired
    return 0


def _pieces(source: Any, recorded: IO[bytes] | None, expected: int | None, limit: int | None) -> Iterator[bytes]:
    """Yield what was read before, then the rest of the source.

    Raises:
        BodyIncomplete, BodyTooLarge: reading failed, or the body exceeds the limit.
    """
    read = 0
    if recorded is not None:
        recorded.seek(0)
        while piece := recorded.read(CHUNK):
            read += len(piece)
            yield piece
        recorded.close()
    while expected is None or read < expected:
        try:
            piece = source.read(CHUNK if expected is None else min(CHUNK, expected - read))
        except Exception as error:  # servers raise different errors when the client disconnects
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
