"""A request's raw target, and its body: read once, hashed, and made readable again for the view."""

from __future__ import annotations

import io
import logging
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeAlias
from urllib.parse import quote

__all__ = [
    "CHUNK",
    "SPOOL",
    "BodyIncomplete",
    "BodyTooLarge",
    "Environ",
    "LengthRequired",
    "NoRoom",
    "RequestBody",
    "Spool",
    "origin_form",
    "quoted",
    "raw_target",
]

logger = logging.getLogger("idemredis")

Environ: TypeAlias = dict[str, Any]

CHUNK = 64 * 1024
"""Bytes read at a time. Most bodies fit, and need no temporary file."""

SPOOL = 256 * 1024
"""Bytes of a body kept in memory; a larger body goes to a temporary file."""

_ORIGIN = re.compile(r"\A[a-z][a-z0-9+\-.]*://[^/?#]*", re.IGNORECASE)

_warned: set[str] = set()


class BodyIncomplete(Exception):
    """The client sent fewer bytes than its Content-Length, or the upload broke off."""


class BodyTooLarge(Exception):
    """The body is larger than the limit."""


class LengthRequired(Exception):
    """The body has no length, and the server does not mark its end."""


class NoRoom(Exception):
    """There is no room on the disk for the body."""


class Spool:
    """Bytes that are kept in memory, or in a temporary file if there are many; `file` reads them after `rewind`.

    `tempfile.SpooledTemporaryFile` is not used, since reading it line by line is slow.
    """

    def __init__(self) -> None:
        self.file: IO[bytes] = io.BytesIO()
        self.size = 0
        self._disk: io.FileIO | None = None  # without a buffer, so that a write that does not fit fails at once
        self._in_memory = True

    def write(self, data: bytes) -> None:
        """Append bytes.

        Raises:
            NoRoom: the disk is full or cannot be written. The bytes before these can still be read.
        """
        if self._in_memory and self.size + len(data) > SPOOL:
            self._move_to_disk()
        if self._disk is None:
            self.file.write(data)
        else:
            _write_all(self._disk, data)
        self.size += len(data)

    def rewind(self) -> None:
        """Go to the start for reading; do not write afterwards."""
        if self._disk is not None:
            self._disk.truncate(self.size)  # drops the rest of a failed write
            self.file = io.BufferedReader(self._disk, CHUNK)
            self._disk = None
        self.file.seek(0)

    def close(self) -> None:
        if self._disk is not None:
            self._disk.close()
        self.file.close()

    def _move_to_disk(self) -> None:
        self._in_memory = False
        try:
            folder = tempfile.gettempdir()
        except FileNotFoundError:  # no temporary directory at all: the body stays in memory, up to its limit
            return
        try:
            disk = tempfile.TemporaryFile(buffering=0, dir=folder)  # noqa: SIM115  # closed by `close`
        except OSError as error:
            raise NoRoom(str(error)) from error
        try:
            self.file.seek(0)
            _write_all(disk, self.file.read())
        except NoRoom:
            disk.close()
            raise
        self._disk = disk


def _write_all(disk: io.FileIO, data: bytes) -> None:
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[disk.write(rest) :]
    except OSError as error:
        raise NoRoom(str(error)) from error


class _Recorder(io.RawIOBase):
    """A source that records what is read through it, in case the body is read before the claim.

    Attributes:
        source: the server's `wsgi.input`.
        spool: the bytes that were read; None if there are none, or if they could not be recorded.
        refused: why they could not be recorded; None if they were.
    """

    def __init__(self, source: Any, expected: int | None, limit: int) -> None:
        self.source = source
        self.spool: Spool | None = None
        self.refused: Exception | None = None
        self._left = expected
        self._limit = limit
        self._recording = True

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size = len(buffer) if self._left is None else min(len(buffer), self._left)
        chunk: bytes = self.source.read(size) if size else b""
        if self._left is not None:
            self._left -= len(chunk)
        if self._recording and chunk:
            self._record(chunk)
        buffer[: len(chunk)] = chunk
        return len(chunk)

    def stop(self) -> None:
        """Stop recording; the source can still be read, since an unprotected view may stream its request body."""
        self._recording = False
        if self.spool is not None:
            self.spool.close()
            self.spool = None

    def _record(self, chunk: bytes) -> None:
        if self.spool is None:
            self.spool = Spool()
        try:
            if self.spool.size + len(chunk) > self._limit:
                raise BodyTooLarge
            self.spool.write(chunk)
        except (BodyTooLarge, NoRoom) as error:
            self.refused = error
            self.stop()


class _Unread:
    """Stands for a source until something reads it, which most requests do only after the claim.

    Attributes:
        source: the server's `wsgi.input`.
        recorder: records what is read; None while nothing has used the source.
    """

    def __init__(self, source: Any, expected: int | None, limit: int) -> None:
        self.source = source
        self.recorder: _Recorder | None = None
        self._expected, self._limit = expected, limit
        self._stream: io.BufferedReader | None = None
        self._recording = True

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._open(), name)
        if callable(found):
            setattr(self, name, found)  # saves the next look-up: a body may be read byte by byte
        return found

    def __iter__(self) -> Iterator[bytes]:
        return self._open()

    def stop(self) -> None:
        """Stop recording; the source can still be read, since an unprotected view may stream its request body."""
        self._recording = False
        if self.recorder is not None:
            self.recorder.stop()

    def _open(self) -> io.BufferedReader:
        if self._stream is None:
            self.recorder = _Recorder(self.source, self._expected, self._limit)
            self._stream = io.BufferedReader(self.recorder, CHUNK)
            if not self._recording:
                self.recorder.stop()
        return self._stream


class _Joined(io.RawIOBase):
    """What was taken out of a source, followed by the rest of the source."""

    def __init__(self, taken: Spool, piece: bytes, source: Any) -> None:
        taken.rewind()
        self._parts: list[Any] = [taken.file, io.BytesIO(piece), source]
        self._taken = taken

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while self._parts:
            chunk: bytes = self._parts[0].read(len(buffer))
            if chunk:
                buffer[: len(chunk)] = chunk
                return len(chunk)
            del self._parts[0]
        return 0

    def close(self) -> None:
        self._taken.close()
        super().close()


class RequestBody:
    """The body of one WSGI request, which replaces the server's `wsgi.input`.

    Small bodies stay in memory and larger ones go to a temporary file, so memory does not grow with the body.

    Args:
        environ: the request's environ.
        limit: maximum size in bytes of a body that is recorded.
    """

    def __init__(self, environ: Environ, limit: int) -> None:
        self._environ = environ
        self._limit = limit
        self._unread: _Unread | None = None
        self._whole: Spool | None = None
        self._joined: io.BufferedReader | None = None

    def record(self, limit: int | None) -> None:
        """Record the parts of the body that are read from now on, so that `buffer` has all of it.

        A body whose Content-Length exceeds a limit is not recorded.

        Args:
            limit: a further limit in bytes, of the application; None for none.
        """
        most = self._limit if limit is None else min(limit, self._limit)
        try:
            expected = _expected(self._environ)
        except LengthRequired:
            return
        if expected is None or 0 < expected <= most:
            self._unread = self._environ["wsgi.input"] = _Unread(self._environ["wsgi.input"], expected, most)

    def buffer(self, update: Callable[[bytes], object], limit: int | None) -> None:
        """Read the body to its end, and make it readable again from its start.

        If that fails, the part of the body that has arrived can still be read.

        Args:
            update: called with each piece of the body, including those that were read before.
            limit: a further limit in bytes, of the application; None for none.

        Raises:
            BodyIncomplete, BodyTooLarge, LengthRequired, NoRoom: the caller must refuse the request without a claim.
        """
        unread, source, taken = self._unread, self._environ["wsgi.input"], None
        recorder = None if unread is None else unread.recorder
        if recorder is not None and recorder.refused is not None:
            raise recorder.refused
        if unread is not None and unread is source:  # otherwise the application has set a body of its own
            source, taken = unread.source, None if recorder is None else recorder.spool
        expected = _expected(self._environ)
        most = self._limit if limit is None else min(limit, self._limit)
        if expected is not None and expected > most:
            raise BodyTooLarge
        whole, piece = Spool(), b""
        try:
            for piece in _pieces(source, taken, expected):
                if whole.size + len(piece) > most:
                    raise BodyTooLarge
                whole.write(piece)
                update(piece)
                piece = b""  # it is part of `whole` now
            if expected is not None and whole.size < expected:
                raise BodyIncomplete
            whole.rewind()
        except BaseException:
            self._joined = io.BufferedReader(_Joined(whole, piece, source), CHUNK)
            self._environ["wsgi.input"] = self._joined
            raise
        finally:
            if unread is not None:
                unread.stop()
        self._whole = whole
        self._environ["wsgi.input"] = whole.file

    def rewind(self) -> None:
        """Make the body readable from its start again, after `buffer`."""
        self._environ["wsgi.input"].seek(0)

    def close(self) -> None:
        """Free the memory or temporary file that `record` or `buffer` uses."""
        if self._unread is not None:
            self._unread.stop()
        if self._whole is not None:
            self._whole.close()
        if self._joined is not None:
            self._joined.close()


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
        target = quoted(path.encode("latin-1"))
    elif not target.startswith("/"):
        target = origin_form(target)
    if query and "?" not in target:
        target = f"{target}?{query}"
    if target.isascii():
        return target
    return target.encode("latin-1").decode("utf-8", "surrogateescape")


def origin_form(target: str) -> str:
    """Return the path and query of an absolute-form target, which means the same (RFC 9112 §3.2.2)."""
    target = _ORIGIN.sub("", target, count=1)
    return target if target.startswith("/") else f"/{target}"


def quoted(path: bytes) -> str:
    """Return a decoded path as a client might have sent it."""
    return quote(path, safe="/!$&'()*+,;=:@-._~")


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


def _pieces(source: Any, taken: Spool | None, expected: int | None) -> Iterator[bytes]:
    """Yield what was read before, then the rest of the source.

    Raises:
        BodyIncomplete: reading failed.
    """
    read = 0
    if taken is not None:
        taken.rewind()
        while piece := taken.file.read(CHUNK):
            read += len(piece)
            yield piece
    while expected is None or read < expected:
        try:
            piece = source.read(CHUNK if expected is None else min(CHUNK, expected - read))
        except Exception as error:  # servers raise different errors when the client disconnects
            raise BodyIncomplete from error
        if not piece:
            return
        read += len(piece)
        yield piece


def _warn_once(server: str) -> None:
    if server not in _warned:
        _warned.add(server)
        logger.warning(
            "%s does not give the raw request target; fingerprints use the decoded path, quoted again", server
        )
