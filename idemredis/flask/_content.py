"""Record a Flask response as the content of a row."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from flask import Response

from ..core.response import NULL_BODY_STATUSES
from ..web.body import Environ
from ..web.recorder import ResponseRecorder

__all__ = ["record"]


def record(recorder: ResponseRecorder, response: Response, environ: Environ) -> None:
    """Record a response as the content of the row; a stream is collected while it is sent."""
    status, limit = response.status_code, recorder.max_body
    headers: Iterable[tuple[str, str]] = response.headers.to_wsgi_list()
    if not "".join([value for _, value in headers]).isascii():
        headers = response.get_wsgi_headers(environ)  # as Werkzeug sends them: a Location is encoded
    if status in NULL_BODY_STATUSES:
        recorder.record(status, headers, b"")
    elif response.is_sequence:
        pieces = list(response.iter_encoded())
        if sum(map(len, pieces)) <= limit:
            recorder.record(status, headers, b"".join(pieces))
        else:
            recorder.record_omitted(status, headers, "too_large")
    elif response.content_length is None:
        response.response = recorder.collect(response.response, status, headers)
    elif response.content_length <= limit:
        _record_short(recorder, response, response.content_length, headers)
    else:
        recorder.record_omitted(status, headers, "too_large")


def _record_short(
    recorder: ResponseRecorder, response: Response, length: int, headers: Iterable[tuple[str, str]]
) -> None:
    """Read a short stream to its end, so that it is recorded before the client receives it.

    If the stream breaks, the client has received nothing yet, so the exception counts as one of the view.
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
    if length < 0:  # longer than its Content-Length, so it is streamed and not stored
        response.response = itertools.chain(pieces, rest)
        if close is not None:
            response.call_on_close(close)
        recorder.record_omitted(response.status_code, headers, "too_large")
        return
    response.response = pieces
    if close is not None:
        close()
    recorder.record(response.status_code, headers, b"".join(pieces))
