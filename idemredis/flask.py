"""The Flask extension: claim before the view, store what the client saw, replay it to every retry."""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from flask import Blueprint, Flask, Request, Response, after_this_request, current_app, request
from werkzeug.datastructures import Headers
from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.local import LocalProxy

from .capture import Attempt, Settlement
from .clients import Client
from .errors import (
    ConfigurationError,
    CorruptRow,
    HoldForReview,
    InvalidKey,
    InvalidPrincipal,
    LedgerUnavailable,
)
from .events import Observer
from .fingerprint import begin_fingerprint, fingerprint_value
from .http import parse_key
from .keys import valid_principal
from .operations import InProgress, Replay, Reservation, Reused
from .policy import check_seconds
from .responses import NULL_BODY_STATUSES, StoredResponse, kept_headers, replayable
from .settings import LEDGER_SETTINGS, ON_ERROR, PREFIX, Settings, in_settings
from .worker import Ledger
from .wsgi import (
    BodyIncomplete,
    BodyTooLarge,
    Environ,
    LengthRequired,
    close_input,
    hand_on_body,
    raw_target,
    record_input,
    rewind_input,
)

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication

__all__ = ["Attempt", "Idempotency", "current_reservation"]

logger = logging.getLogger("idemredis")

View = TypeVar("View", bound=Callable[..., Any])
Exempt = TypeVar("Exempt", bound=Callable[..., Any] | Blueprint)

_EXTENSION = "idemredis"
_SETTLEMENT = "idemredis.settlement"
_OPTIONS = "__idemredis_options__"
_EXEMPT = "__idemredis_exempt__"

# The objects themselves: each look through a proxy costs a microsecond.
_app: Callable[[], Flask] = current_app._get_current_object  # type: ignore[attr-defined]
_request: Callable[[], Request] = request._get_current_object  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class _Options:
    """What `protect` was told for one view; None is the application's setting."""

    required: bool | None = None
    lease: float | None = None
    wait: float | None = None
    operation: str = ""
    on_error: str | None = None
    fingerprint: Callable[[], object] | None = None
    recover: Callable[[Reservation], Any] | None = None


@dataclass(frozen=True, slots=True)
class _State:
    """What one application has."""

    extension: Idempotency
    ledger: Ledger
    settings: Settings


class Idempotency:
    """Protects the unsafe methods of an application with Idempotency-Key.

    Args:
        app: to set up now; or call `init_app` later, for as many applications as there are.
        principal: whose key it is: a function, called within the request after authentication (the application's
            `before_request` functions), or a constant for a service with a single tenant. Where it returns None or
            nothing, the answer is 401.
        client: a redis-py client of the caller's, in place of `IDEMREDIS_URL`.
        ledger: a `Ledger` of the caller's, in place of that and of the settings that a ledger has.
        observers: called with each `Event`.

    Raises:
        ConfigurationError: the principal is a constant that cannot be one, or both a client and a ledger are given.
    """

    def __init__(
        self,
        app: Flask | None = None,
        *,
        principal: Callable[[], object] | object,
        client: Client | None = None,
        ledger: Ledger | None = None,
        observers: Iterable[Observer] = (),
    ) -> None:
        if client is not None and ledger is not None:
            raise ConfigurationError("give a client or a ledger, not both: the ledger has its client")
        if ledger is not None and not isinstance(ledger, Ledger):
            raise ConfigurationError(f"ledger must be a Ledger (not an AsyncLedger), not {type(ledger).__name__}")
        self._principal = principal if callable(principal) else _constant(principal)
        self._client = client
        self._ledger = ledger
        self._observers = tuple(observers)
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Read the application's settings, make its ledger, and hook in. Doing it again reads the settings anew.

        Raises:
            ConfigurationError: a setting is unknown or cannot work, or the application has another `Idempotency`.
        """
        settings = Settings.read(app.config)
        before: _State | None = app.extensions.get(_EXTENSION)
        if before is not None and before.extension is not self:
            raise ConfigurationError(f"the application {app.name!r} has an Idempotency already; use one for each")
        state = _State(self, self._make_ledger(settings), settings)
        if before is None:
            app.teardown_request(_tear_down)  # refused by Flask once the application has served a request
            app.wsgi_app = functools.partial(_record_body, app, app.wsgi_app)  # type: ignore[method-assign]
        app.extensions[_EXTENSION] = state
        if settings.protect_all and not (before and before.settings.protect_all):
            app.dispatch_request = functools.partial(_dispatch, app.dispatch_request)  # type: ignore[method-assign]

    @overload
    def protect(self, view: View) -> View: ...

    @overload
    def protect(
        self,
        *,
        required: bool | None = None,
        lease: float | None = None,
        wait: float | None = None,
        operation: str = "",
        on_error: str | None = None,
        fingerprint: Callable[[], object] | None = None,
        recover: Callable[[Reservation], Any] | None = None,
    ) -> Callable[[View], View]: ...

    def protect(self, view: View | None = None, **options: Any) -> View | Callable[[View], View]:
        """Claim the key before the view runs; `@protect`, or `@protect(...)` with options for this view.

        Args:
            view: a view, a `MethodView`'s method, or (as one of its `decorators`) a whole `MethodView`.
            **options: `required` (False: without a key the view runs unprotected), `lease` and `wait` in seconds,
                `operation` (keys of different operations do not meet), `on_error` ("release", "hold", "store"),
                `fingerprint` (called within the request; returns a str, or any JSON value to be hashed) and `recover`
                (called on a takeover with the `Reservation`; returns what the view would return, or None to run it, or
                raises `HoldForReview`).

        Raises:
            ConfigurationError, TypeError: an option cannot work.
        """
        chosen = _checked(_Options(**options))

        def decorate(view: View) -> View:
            is_async = inspect.iscoroutinefunction(view)

            @functools.wraps(view)
            def protected(*args: Any, **kwargs: Any) -> Any:
                run = current_app.ensure_sync(view) if is_async else view
                return _protected(chosen, functools.partial(run, *args, **kwargs))

            setattr(protected, _OPTIONS, chosen)
            return cast(View, protected)

        return decorate if view is None else decorate(view)

    def exempt(self, view: Exempt) -> Exempt:
        """Leave a view, a `MethodView` (or a method of one) or a blueprint out of `IDEMREDIS_PROTECT_ALL`."""
        setattr(view, _EXEMPT, True)
        return view

    def principal(self) -> object:
        """Return whose request this is, as the application says."""
        return self._principal()

    def _make_ledger(self, settings: Settings) -> Ledger:
        if self._ledger is not None:
            if doubled := sorted(settings.given & LEDGER_SETTINGS):
                raise ConfigurationError(
                    f"{PREFIX}{doubled[0]} is the ledger's own setting; set it where the ledger is made, or give none"
                )
            return self._ledger
        make: Callable[..., Ledger]
        if self._client is not None:
            if settings.url is not None:
                raise ConfigurationError(f"{PREFIX}URL and a client are both given; remove one")
            make = functools.partial(Ledger, self._client)
        elif settings.url is None:
            raise ConfigurationError(f"{PREFIX}URL is not set; set it to a redis:// URL, or memory:// for a first try")
        else:
            make = functools.partial(Ledger.from_url, settings.url, socket_timeout=settings.socket_timeout)
        try:
            return make(settings.policy, settings.namespace, self._observers, log_keys=settings.log_keys)
        except ConfigurationError as error:
            raise in_settings(error) from None


def _protected(options: _Options, view: Callable[[], Any]) -> Any:
    """Run the view behind a claim, or answer in its place."""
    app, claimant = _app(), _request()
    state: _State | None = app.extensions.get(_EXTENSION)
    if state is None:
        raise ConfigurationError(f"a view of {app.name!r} is protected; call Idempotency.init_app(app) first")
    environ, settings = claimant.environ, state.settings
    if claimant.method not in settings.methods or _SETTLEMENT in environ:
        return view()
    header: str | None = environ.get("HTTP_IDEMPOTENCY_KEY")
    required = settings.required if options.required is None else options.required
    if header is None and not required:
        return view()
    claimed = _claim(state, options, claimant, header)
    if isinstance(claimed, Response):
        return claimed
    if claimed is None:
        environ[_SETTLEMENT] = claimant, None
        after_this_request(_mark_unprotected)
        return view()
    settlement = Settlement(state.ledger, claimed, options.on_error or settings.on_error, settings.replayed)
    environ[_SETTLEMENT] = claimant, settlement
    after_this_request(settlement.settle)
    state.ledger.keep(claimed)
    if options.recover is not None and claimed.taken_over:
        try:
            recovered = options.recover(claimed)
        except HoldForReview:
            settlement.hold_for_review()
            return _answer(settings.contract.in_progress(max(claimed.hold.until - time.monotonic(), 0.0)))
        if recovered is not None:
            return recovered
    try:
        return view()
    except Exception:
        raise  # the application's error handlers make an answer of it
    except BaseException:
        settlement.settle_without_answer()
        raise


def _claim(state: _State, options: _Options, request: Request, header: str | None) -> Reservation | Response | None:
    """Return the reservation, or the answer in its place, or None where the view may run unprotected."""
    settings, contract = state.settings, state.settings.contract
    try:
        principal = state.extension.principal()
        if principal is None:
            return _answer(contract.principal_required())
        valid_principal(principal)
        if header is None:
            return _answer(contract.key_required())
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
        logger.warning("a request has no usable principal: %s", error)
        return _answer(contract.principal_required())
    except InvalidKey as error:
        return _answer(contract.key_invalid(error))
    except BodyIncomplete:
        return _answer(contract.body_incomplete())
    except LengthRequired:
        return _answer(contract.length_required())
    except BodyTooLarge:
        raise RequestEntityTooLarge from None
    except CorruptRow as error:
        logger.error("a row is corrupt, and its request was not run: %s", error)
        return _answer(contract.row_corrupt())
    except LedgerUnavailable as error:
        if not settings.fail_open:
            return _answer(contract.unavailable())
        logger.error("a request runs unprotected, since %sFAIL_OPEN is set: %s", PREFIX, error)
        return None
    match outcome:
        case Reservation():
            return outcome
        case Replay() if outcome.response.omitted:
            return _answer(contract.not_stored(outcome.response))
        case Replay():
            return _replay(outcome.response)
        case InProgress():
            return _answer(contract.lost_race() if outcome.stale else contract.in_progress(outcome.retry_after))
        case Reused():
            return _answer(contract.key_reused())


def _route(request: Request) -> str:
    """Return the method and the rule that matched, such as `POST /orders/<id>`; never the path itself."""
    rule = request.url_rule
    return f"{request.method} {rule.rule}" if rule is not None else ""


def _fingerprint(settings: Settings, options: _Options, request: Request) -> str:
    """Read the body to its end, hash the request, and let the view read the body as if nobody had."""
    environ = request.environ
    digest = begin_fingerprint(
        request.method,
        raw_target(environ),
        [(name, environ.get(_wsgi_name(name), "")) for name in settings.fingerprint_headers],
    )
    hand_on_body(environ, digest.update, request.max_content_length)
    _forget_stream(request)
    if options.fingerprint is None:
        return digest.hexdigest()
    value = options.fingerprint()
    rewind_input(environ)
    _forget_stream(request)
    return value if isinstance(value, str) else fingerprint_value(value)


def _forget_stream(request: Request) -> None:
    """Werkzeug keeps the stream that it made of the old `wsgi.input`."""
    if "stream" in request.__dict__:
        del request.stream


@functools.cache
def _wsgi_name(header: str) -> str:
    name = header.upper().replace("-", "_")
    return name if name in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{name}"


def _replay(stored: StoredResponse) -> Response:
    """Give it again, less what no answer may repeat: a worker, or a person, may have written the row."""
    names = replayable(name for name, _ in stored.headers)
    response = _respond(stored, kept_headers(stored.headers, names))
    response.headers["Idempotent-Replayed"] = "true"
    return response


def _answer(stored: StoredResponse) -> Response:
    return _respond(stored, stored.headers)


def _respond(stored: StoredResponse, headers: Iterable[tuple[str, str]]) -> Response:
    response = _app().response_class(b"" if stored.status in NULL_BODY_STATUSES else stored.body, stored.status)
    response.headers = Headers(headers)
    return response


def _mark_unprotected(response: Response) -> Response:
    response.headers["Idempotency-Status"] = "unprotected"
    return response


def _record_body(app: Flask, wsgi_app: WSGIApplication, environ: Environ, start_response: StartResponse) -> Any:
    """Before anything of the application: something may read the body before the claim."""
    if "HTTP_IDEMPOTENCY_KEY" in environ:
        state: _State = app.extensions[_EXTENSION]
        if environ["REQUEST_METHOD"].upper() in state.settings.methods:
            record_input(environ)
    return wsgi_app(environ, start_response)


def _tear_down(error: BaseException | None) -> None:
    ended = _request()
    environ = ended.environ
    if "HTTP_IDEMPOTENCY_KEY" not in environ:
        return
    claimant, settlement = environ.get(_SETTLEMENT, (None, None))
    if settlement is None:
        _forget(environ)
    elif claimant is ended:  # else an application around this one has the claim
        if error is not None:
            settlement.settle_without_answer()
        settlement.when_settled(functools.partial(_forget, environ))  # a stream may read on


def _forget(environ: Environ) -> None:
    """Leave nothing behind: a middleware that runs the same request again has it claimed again."""
    environ.pop(_SETTLEMENT, None)
    close_input(environ)


def _dispatch(dispatch: Callable[..., Any], *args: Any) -> Any:
    """`PROTECT_ALL`: after the `before_request` functions, so after authentication."""
    state: _State = current_app.extensions[_EXTENSION]
    if not state.settings.protect_all or request.method not in state.settings.methods or request.endpoint is None:
        return dispatch(*args)
    view = current_app.view_functions[request.endpoint]
    if any(hasattr(current_app.blueprints[name], _EXEMPT) for name in request.blueprints):
        return dispatch(*args)
    if _marked(view, _EXEMPT) or _marked(view, _OPTIONS):  # a decorated view has options of its own
        return dispatch(*args)
    return _protected(_Options(), functools.partial(dispatch, *args))


def _marked(view: Any, mark: str) -> bool:
    """A mark is on the view, on its `MethodView` class, or on the method that serves this request."""
    view_class = getattr(view, "view_class", None)
    method = getattr(view_class, request.method.lower(), None)
    return any(hasattr(place, mark) for place in (view, view_class, method) if place is not None)


def _constant(principal: object) -> Callable[[], object]:
    try:
        valid_principal(principal)
    except InvalidPrincipal as error:
        raise ConfigurationError(f"{error}; give Idempotency a function, or a constant for a single tenant") from None
    return lambda: principal


def _checked(options: _Options) -> _Options:
    if not isinstance(options.operation, str):
        raise ConfigurationError(f"operation must be a str, not {options.operation!r}")
    if not isinstance(options.required, bool | None):
        raise ConfigurationError(f"required must be True or False, not {options.required!r}")
    for name, function in (("fingerprint", options.fingerprint), ("recover", options.recover)):
        if function is not None and not callable(function):
            raise ConfigurationError(f"{name} must be a function, not {function!r}")
    if options.lease is not None:
        check_seconds("lease", options.lease)
    if options.wait:
        check_seconds("wait", options.wait)
    if options.on_error is not None and options.on_error not in ON_ERROR:
        raise ConfigurationError(f"on_error must be one of {', '.join(ON_ERROR)}, not {options.on_error!r}")
    return options


def _current() -> Attempt:
    settlement: Settlement | None
    _, settlement = request.environ.get(_SETTLEMENT, (None, None))
    if settlement is None:
        raise RuntimeError("this request has no reservation: it is not protected, or runs without a key")
    return settlement.attempt


current_reservation: Attempt = LocalProxy(_current)  # type: ignore[assignment]
"""The reservation of the request that is running; falsy where there is none. See `Attempt`."""
