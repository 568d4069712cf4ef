"""Serve one request: claim, then run the view, refuse or replay."""

from __future__ import annotations

import copy
import functools
import io
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from flask import Flask, Request, Response, current_app, has_request_context, request
from werkzeug.datastructures import Headers
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from ..core.fingerprint import begin_fingerprint, fingerprint_endpoint
from ..core.keys import Identity, valid_principal
from ..core.reservation import Reservation, Unprotected, observed
from ..core.response import NULL_BODY_STATUSES, StoredResponse
from ..core.settle import Ending, of_effect
from ..errors import (
    ConfigurationError,
    EffectDone,
    HoldForReview,
    KeyReused,
)
from ..events import observing, serving
from ..ledger.current import look_also_in, running
from ..ledger.waiting import bounded
from ..web.body import BodyTooLarge, RequestBody, raw_target
from ..web.claims import answer_to, identity_of, refusal_for
from ..web.contract import Refusal, parse_key
from ..web.options import Options
from ..web.recorder import ResponseRecorder
from ..web.settings import Settings
from ..web.threads import threads_of
from ._exchange import CLAIMED, Exchange, body_limit, exchange_of
from ._state import EXTENSION, State

__all__ = ["run_protected"]

logger = logging.getLogger("idemredis")

# The objects behind Flask's proxies: each access through a proxy costs a microsecond.
_app: Callable[[], Flask] = current_app._get_current_object  # type: ignore[attr-defined]
_request: Callable[[], Request] = request._get_current_object  # type: ignore[attr-defined]


def run_protected(options: Options, view: Callable[[], Any]) -> Any:
    """Claim the key and run the view, or return a refusal or replay in its place."""
    app = _app()
    state: State | None = app.extensions.get(EXTENSION)
    if state is None:
        raise ConfigurationError(f"{app.name!r} has a protected view; call Idempotency.init_app(app) first")
    returned = _run_view(app, state, options, view)
    return _answer(state, returned) if isinstance(returned, StoredResponse) else returned


def _run_view(app: Flask, state: State, options: Options, view: Callable[[], Any]) -> Any:
    owning_request = _request()
    environ, settings = owning_request.environ, state.settings
    if owning_request.method.upper() not in settings.methods:
        return view()
    running_one: Exchange | None = environ.get(CLAIMED)
    if running_one is not None and running_one.covers(owning_request):
        return view()
    header: str | None = environ.get("HTTP_IDEMPOTENCY_KEY")
    required = settings.required if options.required is None else options.required
    exchange = exchange_of(app, state, owning_request)
    exchange.begin()
    match settings.mode:
        case "off":
            return _run_unprotected(state, options, exchange, header, view)
        case "observe":
            return _observe(state, options, exchange, header, required, view)
    if header is None and not required:
        exchange.marked = True
        return _run_unprotected(state, options, exchange, header, view)
    claimed = _claim(state, options, exchange, header)
    if isinstance(claimed, Response):
        exchange.answer = claimed
        return claimed
    if claimed is None:
        exchange.marked = True
        return _run_unprotected(state, options, exchange, header, view)
    return _run(state, options, exchange, claimed, view)


def _run_unprotected(
    state: State, options: Options, exchange: Exchange, header: str | None, view: Callable[[], Any]
) -> Any:
    """Run the view without a claim; what it does with `current_reservation` still works."""
    find = functools.partial(_identity_of, state, options, header)
    exchange.reservation = Unprotected(find, _route(exchange.request), fingerprint=exchange.fingerprint)
    current = exchange.reservation
    try:
        with running(current):
            return view()
    except (EffectDone, KeyReused) as error:
        if (found := of_effect(error, current)) is None:
            raise
        exchange.answer = _answer(state, state.settings.contract.answer_effect(found))
        return exchange.answer


def _identity_of(state: State, options: Options, header: str | None) -> Identity:
    """Return the identity that the row has or would have; without a key, another one for each request."""
    namespace, principal = state.ledger.namespace, ""
    try:
        principal = valid_principal(state.extension.principal())
        return identity_of(namespace, principal, header, state.settings, options.operation)
    except Exception as error:  # the view runs all the same, and its principal may be nobody
        logger.debug("a request that runs unprotected has no row: %s", error)
    return identity_of(namespace, principal, None, state.settings, options.operation)


def _observe(
    state: State, options: Options, exchange: Exchange, header: str | None, required: bool, view: Callable[[], Any]
) -> Any:
    """Claim and record as ever, but run the view whatever comes of it."""
    claimed: object = None
    token = observing.set(True)
    try:
        if header is not None:
            claimed = _claim(state, replace(options, wait=0.0), exchange, header)
        elif required:
            state.ledger.report_missing_key(operation=options.operation, route=_route(exchange.request))
    except Exception:
        logger.exception("a request cannot be observed, and runs as it is")
    finally:
        observing.reset(token)
    if isinstance(claimed, Reservation):
        return _run(state, replace(options, recover=None), exchange, claimed, view)
    return _run_unprotected(state, options, exchange, header, view)


def _settle(app: Flask, state: State, r: Reservation, ending: Ending) -> None:
    """Settle a row; the application's contexts may have ended."""
    application, observes = serving.set(app), state.settings.mode == "observe"
    observe = None if observing.get() is observes else observing.set(observes)
    try:
        state.ledger.settle(r, ending)
    finally:
        serving.reset(application)
        if observe is not None:
            observing.reset(observe)


def _run(state: State, options: Options, exchange: Exchange, claimed: Reservation, view: Callable[[], Any]) -> Any:
    """Run the view, or `recover` after a takeover, under its claim."""
    ledger, settings = state.ledger, state.settings
    on_error = options.on_error or settings.on_error
    settle = functools.partial(_settle, exchange.app, state)
    recorder = ResponseRecorder(claimed, settle, on_error, settings.storable, ledger.policy.max_body)
    current = observed(claimed) if settings.mode == "observe" else claimed
    exchange.recorder, exchange.reservation = recorder, current
    exchange.answer_to = functools.partial(_answer_to, state, recorder, claimed)
    ledger.start_heartbeat(claimed)
    try:
        with running(current):
            recovered = None
            if options.recover is not None and claimed.taken_over:
                recovered = exchange.app.ensure_sync(options.recover)(claimed)
            returned = view() if recovered is None else recovered
    except Exception as error:
        if (answer := _answer_to(state, recorder, claimed, error)) is not None:
            exchange.answer = answer
            return answer
        recorder.failure = error
        raise  # the application's error handlers make the response
    exchange.view_returned()
    if isinstance(returned, StoredResponse) and returned.omitted:  # retries get the same refusal
        recorder.effect_found(Ending("complete", returned))
        exchange.answer = _answer(state, returned)
    return returned


def _answer_to(state: State, recorder: ResponseRecorder, claimed: Reservation, error: BaseException) -> Response | None:
    """Settle the row for an error that has an answer of its own, and return it; None if the application makes one."""
    contract = state.settings.contract
    if isinstance(error, HoldForReview):
        recorder.hold_for_review()
        return _refuse(state, contract.in_progress(max(claimed.lease.expires_at - time.monotonic(), 0.0)))
    if (found := of_effect(error, claimed)) is not None:
        recorder.effect_found(found)
        return _answer(state, contract.answer_effect(found))
    return None


def _claim(state: State, options: Options, exchange: Exchange, header: str | None) -> Reservation | Response | None:
    """Return the reservation, or a refusal or replay, or None if the view may run unprotected."""
    settings, contract = state.settings, state.settings.contract
    request = exchange.request
    refuse = functools.partial(_refuse, state)
    try:
        principal = state.extension.principal()
        if principal is None:
            return refuse(contract.principal_required())
        valid_principal(principal)
        if header is None:
            state.ledger.report_missing_key(str(principal), options.operation, _route(request))
            return refuse(contract.key_required())
        key = parse_key(header, contract.protocol)
        fingerprint = _fingerprint(state, options, exchange)
        asked = (principal, key, fingerprint, options.operation, options.lease)
        wait = settings.wait if options.wait is None else options.wait
        with bounded(functools.partial(threads_of, request.environ)) if wait else nullcontext():
            outcome = state.ledger.claim(*asked, wait, route=_route(request))
    except Exception as error:
        refusal = refusal_for(error, settings)
        if refusal is None:
            exchange.fingerprint = fingerprint  # with which `Effects` still makes each effect once
            return None
        return refuse(refusal)
    return outcome if isinstance(outcome, Reservation) else _answer(state, answer_to(outcome, contract))


def _route(request: Request) -> str:
    """Return the method and the matched rule, such as `POST /orders/<id>`; never the concrete path."""
    rule = request.url_rule
    return f"{request.method} {rule.rule}" if rule is not None else ""


def _fingerprint(state: State, options: Options, exchange: Exchange) -> str:
    """Return the request's fingerprint; the body is read to its end and can be read again by the view."""
    settings, request = state.settings, exchange.request
    environ = request.environ
    target = raw_target(environ)
    digest = begin_fingerprint(
        request.method,
        target,
        [(name, environ.get(_wsgi_name(name), "")) for name in settings.fingerprint_headers],
    )
    body = exchange.body
    if body is None:
        state.views.learn(request.endpoint)
        body = exchange.body = _unrecorded_body(request, settings)
    limit = body_limit(exchange.app, request)
    try:
        body.buffer(digest.update, limit)
    except BodyTooLarge:
        if limit is not None and (limit <= settings.max_request or (request.content_length or 0) > limit):
            raise RequestEntityTooLarge from None  # by the application's own limit
        raise
    finally:
        _drop_stream(request)
    if options.fingerprint is None:
        return digest.hexdigest()
    with _parsed_anew(request, body):
        value = options.fingerprint()
    if value == "":
        raise ConfigurationError("fingerprint must return a non-empty str, or a JSON value; it returned ''")
    if exchange.app.url_map.host_matching or exchange.app.subdomain_matching:
        target = f"{environ.get('HTTP_HOST', '')}{target}"
    return fingerprint_endpoint(request.method, target, options.operation, value)


def _unrecorded_body(request: Request, settings: Settings) -> RequestBody:
    """Return the body of a request whose view could not be seen to be protected, as behind some decorators."""
    read: bytes | None = request.__dict__.get("_cached_data")
    if read is not None:
        request.environ["wsgi.input"] = io.BytesIO(read)
    elif request.__dict__.keys() & {"form", "stream"}:
        raise ConfigurationError(
            f"the body of {request.endpoint!r} was read before its view, which a decorator hides; put "
            "@functools.wraps(view) on the wrapper that the decorator returns"
        )
    return RequestBody(request.environ, settings.max_request)


@contextmanager
def _parsed_anew(request: Request, body: RequestBody) -> Iterator[None]:
    """Undo in the end what the block does to the parsed body, so that the view finds it as it was."""
    before = {name: request.__dict__[name] for name in _PARSED if name in request.__dict__}
    if "_cached_json" in before:
        request._cached_json = copy.deepcopy(request._cached_json)
    files = [(file, file.tell()) for file in _files(before.get("files"))]
    try:
        yield
    finally:
        if (parsed := request.__dict__.get("files")) is not before.get("files"):
            for file in _files(parsed):
                file.close()
        for name in _PARSED:
            request.__dict__.pop(name, None)
        request.__dict__.update(before)
        for file, position in files:
            file.seek(position)
        body.rewind()
        _drop_stream(request)


_PARSED = ("_cached_data", "_cached_json", "form", "files", "values", "data")
"""What Werkzeug keeps of a parsed body, in the request's `__dict__`."""


def _files(files: Any) -> Iterable[Any]:
    return [] if files is None else [file for name in files for file in files.getlist(name)]


def _drop_stream(request: Request) -> None:
    """Drop Werkzeug's cached stream, which wraps the `wsgi.input` that was replaced."""
    if "stream" in request.__dict__:
        del request.stream


@functools.cache
def _wsgi_name(header: str) -> str:
    name = header.upper().replace("-", "_")
    return name if name in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{name}"


# Refusals and replays


def _answer(state: State, response: StoredResponse) -> Response:
    """Return a response of the contract, or one that a view has returned as a `StoredResponse`."""
    answer = response if isinstance(response, Refusal) else state.settings.contract.answer(response)
    return _refuse(state, answer) if isinstance(answer, Refusal) else _respond(answer, answer.headers)


def _refuse(state: State, refusal: Refusal) -> Response:
    """Return a refusal, in the application's own shape if it has one."""
    problem = state.extension.problem
    if problem is None or state.settings.mode == "observe":
        return _respond(refusal, refusal.headers)
    app = _app()
    try:
        shaped = app.ensure_sync(problem)(refusal.code, refusal.status, refusal.message, dict(refusal.facts))
        response = app.make_response(shaped)
    except HTTPException as error:
        response = app.make_response(error.get_response())
    except Exception:
        logger.exception("problem= failed for %s, which is sent as it is", refusal.code)
        return _respond(refusal, refusal.headers)
    for name, value in refusal.headers:
        if name == "Retry-After":
            response.headers.setdefault(name, value)
        elif name == "Link":
            response.headers.add(name, value)
    return response


def _respond(stored: StoredResponse, headers: Iterable[tuple[str, str]]) -> Response:
    response = _app().response_class(b"" if stored.status in NULL_BODY_STATUSES else stored.body, stored.status)
    response.headers = Headers(headers)
    return response


def _of_request() -> Reservation | None:
    """Return the current request's reservation, also after its view has returned."""
    if not has_request_context():
        return None
    exchange: Exchange | None = request.environ.get(CLAIMED)
    return None if exchange is None else exchange.reservation


look_also_in(_of_request)
