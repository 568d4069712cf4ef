"""Serve one request: claim, run the view, settle."""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from flask import Flask, Request, Response, after_this_request, current_app, has_request_context, request
from werkzeug.datastructures import Headers
from werkzeug.exceptions import InternalServerError, RequestEntityTooLarge

from ..core.fingerprint import begin_fingerprint, fingerprint_value
from ..core.keys import valid_principal
from ..core.outcomes import InProgress, Replay, Reused
from ..core.reservation import Reservation
from ..core.response import NULL_BODY_STATUSES, StoredResponse, filter_headers, storable_names
from ..core.settle import OnError
from ..errors import (
    ConfigurationError,
    CorruptRow,
    HoldForReview,
    InvalidKey,
    InvalidPrincipal,
    LedgerUnavailable,
)
from ..ledger import Ledger
from ..ledger.current import look_also_in, running
from ..web.body import BodyIncomplete, BodyTooLarge, Environ, LengthRequired, RequestBody, raw_target
from ..web.contract import parse_key
from ..web.recorder import ResponseRecorder
from ..web.settings import PREFIX, Settings

if TYPE_CHECKING:
    from ._extension import Idempotency

__all__ = ["EXTENSION", "Options", "State", "run_protected", "tear_down"]

logger = logging.getLogger("idemredis")

EXTENSION = "idemredis"
"""Key of the application's `State` in `app.extensions`."""

_CLAIMED = "idemredis.claimed"
"""Environ key of the request that made the claim, and its recorder; None if the view runs unprotected."""

# The objects behind Flask's proxies: each access through a proxy costs a microsecond.
_app: Callable[[], Flask] = current_app._get_current_object  # type: ignore[attr-defined]
_request: Callable[[], Request] = request._get_current_object  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `protect` for one view; None means the application's setting."""

    required: bool | None = None
    lease: float | None = None
    wait: float | None = None
    operation: str = ""
    on_error: OnError | None = None
    fingerprint: Callable[[], object] | None = None
    recover: Callable[[Reservation], Any] | None = None


@dataclass(frozen=True, slots=True)
class State:
    """What the extension keeps for one application."""

    extension: Idempotency
    ledger: Ledger
    settings: Settings


def run_protected(options: Options, view: Callable[[], Any]) -> Any:
    """Claim the key and run the view, or return a refusal or replay in its place."""
    app, owning_request = _app(), _request()
    state: State | None = app.extensions.get(EXTENSION)
    if state is None:
        raise ConfigurationError(f"{app.name!r} has a protected view; call Idempotency.init_app(app) first")
    environ, settings = owning_request.environ, state.settings
    if owning_request.method not in settings.methods or _CLAIMED in environ:
        return view()
    header: str | None = environ.get("HTTP_IDEMPOTENCY_KEY")
    required = settings.required if options.required is None else options.required
    if header is None and not required:
        return view()
    claimed = _claim(state, options, owning_request, header)
    if isinstance(claimed, Response):
        return claimed
    if claimed is None:
        environ[_CLAIMED] = owning_request, None
        after_this_request(_mark_unprotected)
        return view()
    ledger = state.ledger
    on_error = options.on_error or settings.on_error
    recorder = ResponseRecorder(claimed, ledger.settle, on_error, settings.storable, ledger.policy.max_body)
    environ[_CLAIMED] = owning_request, recorder
    after_this_request(functools.partial(_settle_by, recorder))
    ledger.start_heartbeat(claimed)
    with running(claimed):
        if options.recover is not None and claimed.taken_over:
            try:
                recovered = options.recover(claimed)
            except HoldForReview:
                recorder.hold_for_review()
                left = max(claimed.lease.expires_at - time.monotonic(), 0.0)
                return _respond_as_is(settings.contract.in_progress(left))
            if recovered is not None:
                return recovered
        try:
            return view()
        except Exception:
            raise  # the application's error handlers make the response, which settles the row
        except BaseException:
            _settle_without_response(recorder)
            raise


def tear_down(error: BaseException | None) -> None:
    """Settle the row if no response has done so, and free what the request holds."""
    ended = _request()
    environ = ended.environ
    if "HTTP_IDEMPOTENCY_KEY" not in environ:
        return
    owning_request, recorder = environ.get(_CLAIMED, (None, None))
    if recorder is None:
        _clear(environ)
    elif owning_request is ended:  # otherwise an outer application made the claim
        if error is not None:
            _settle_without_response(recorder)
        recorder.when_settled(functools.partial(_clear, environ))  # a streamed response may still read the body


def _clear(environ: Environ) -> None:
    """Remove the claim from the environ, so that a middleware which runs the request again claims again."""
    environ.pop(_CLAIMED, None)
    RequestBody(environ).close()


def _claim(state: State, options: Options, request: Request, header: str | None) -> Reservation | Response | None:
    """Return the reservation, or a refusal or replay, or None if the view may run unprotected."""
    settings, contract = state.settings, state.settings.contract
    try:
        principal = state.extension.principal()
        if principal is None:
            return _respond_as_is(contract.principal_required())
        valid_principal(principal)
        if header is None:
            return _respond_as_is(contract.key_required())
        key = parse_key(header, contract.protocol)
        outcome = state.ledger.claim(
            principal,
            key,
            _fingerprint(settings, options, request),
            options.operation,
            options.lease,
            settings.wait if options.wait is None else options.wait,
            route=_route(request),
        )
    except InvalidPrincipal as error:
        logger.warning("a request has no valid principal and is refused: %s", error)
        return _respond_as_is(contract.principal_required())
    except InvalidKey as error:
        return _respond_as_is(contract.key_invalid(error))
    except BodyIncomplete:
        return _respond_as_is(contract.body_incomplete())
    except LengthRequired:
        return _respond_as_is(contract.length_required())
    except BodyTooLarge:
        raise RequestEntityTooLarge from None
    except CorruptRow as error:
        logger.error("a row is corrupt, and its request was not run: %s", error)
        return _respond_as_is(contract.row_corrupt())
    except LedgerUnavailable as error:
        if not settings.fail_open or error.reason == "busy_pool":  # which says nothing about Redis
            return _respond_as_is(contract.unavailable())
        logger.error("a request runs unprotected, since %sFAIL_OPEN is set: %s", PREFIX, error)
        return None
    match outcome:
        case Reservation():
            return outcome
        case Replay() if outcome.response.omitted:
            return _respond_as_is(contract.not_stored(outcome.response))
        case Replay():
            return _replay(outcome.response)
        case InProgress():
            return _respond_as_is(contract.lost_race() if outcome.stale else contract.in_progress(outcome.retry_after))
        case Reused():
            return _respond_as_is(contract.key_reused())


def _route(request: Request) -> str:
    """Return the method and the matched rule, such as `POST /orders/<id>`; never the concrete path."""
    rule = request.url_rule
    return f"{request.method} {rule.rule}" if rule is not None else ""


def _fingerprint(settings: Settings, options: Options, request: Request) -> str:
    """Return the request's fingerprint; the body is read to its end and can be read again by the view."""
    environ = request.environ
    digest = begin_fingerprint(
        request.method,
        raw_target(environ),
        [(name, environ.get(_wsgi_name(name), "")) for name in settings.fingerprint_headers],
    )
    body = RequestBody(environ)
    body.buffer(digest.update, request.max_content_length)
    _drop_stream(request)
    if options.fingerprint is None:
        return digest.hexdigest()
    value = options.fingerprint()
    body.rewind()
    _drop_stream(request)
    return value if isinstance(value, str) else fingerprint_value(value)


def _drop_stream(request: Request) -> None:
    """Drop Werkzeug's cached stream, which wraps the `wsgi.input` that was replaced."""
    if "stream" in request.__dict__:
        del request.stream


@functools.cache
def _wsgi_name(header: str) -> str:
    name = header.upper().replace("-", "_")
    return name if name in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{name}"


# Refusals and replays


def _replay(stored: StoredResponse) -> Response:
    """Return a stored response without headers that must not be replayed; a worker or person may have stored them."""
    names = storable_names(name for name, _ in stored.headers)
    response = _respond(stored, filter_headers(stored.headers, names))
    response.headers["Idempotent-Replayed"] = "true"
    return response


def _respond_as_is(stored: StoredResponse) -> Response:
    return _respond(stored, stored.headers)


def _respond(stored: StoredResponse, headers: Iterable[tuple[str, str]]) -> Response:
    response = _app().response_class(b"" if stored.status in NULL_BODY_STATUSES else stored.body, stored.status)
    response.headers = Headers(headers)
    return response


def _mark_unprotected(response: Response) -> Response:
    response.headers["Idempotency-Status"] = "unprotected"
    return response


# Settling


def _settle_by(recorder: ResponseRecorder, response: Response) -> Response:
    """Settle the row according to the view's response, and return it; a stream settles the row when it ends."""
    if recorder.settled:
        return response
    match recorder.choice(response.status_code):
        case "store":
            _record(recorder, response)
        case "omit":
            recorder.omit(response.status_code, "not_wanted")
        case choice:
            recorder.give_up(choice)
    return response


def _settle_without_response(recorder: ResponseRecorder) -> None:
    """Settle a request whose exception was not turned into a response, as a 500."""
    if recorder.settled or recorder.streaming:
        return
    _settle_by(recorder, cast(Response, InternalServerError().get_response()))


def _record(recorder: ResponseRecorder, response: Response) -> None:
    status, limit = response.status_code, recorder.max_body
    if status in NULL_BODY_STATUSES:
        recorder.store(status, response.headers, b"")
    elif response.is_sequence:
        pieces = list(response.iter_encoded())
        if sum(map(len, pieces)) <= limit:
            recorder.store(status, response.headers, b"".join(pieces))
        else:
            recorder.omit(status, "too_large")
    elif response.content_length is None:
        response.response = recorder.collect(response.response, status, response.headers)
    elif response.content_length <= limit:
        _record_short(recorder, response, response.content_length)
    else:
        recorder.omit(status, "too_large")


def _record_short(recorder: ResponseRecorder, response: Response, length: int) -> None:
    """Read a short stream to its end, so that it is stored before the client receives it.

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
        recorder.omit(response.status_code, "too_large")
        return
    response.response = pieces
    if close is not None:
        close()
    recorder.store(response.status_code, response.headers, b"".join(pieces))


def _of_request() -> Reservation | None:
    """Return the current request's reservation, also after its view has returned."""
    if not has_request_context():
        return None
    _, recorder = request.environ.get(_CLAIMED, (None, None))
    return None if recorder is None else cast(ResponseRecorder, recorder).reservation


look_also_in(_of_request)
