"""Set up an application: settings, ledger and decorators."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar, cast, overload
from weakref import WeakSet

from flask import Blueprint, Flask, current_app, request

from ..core.reservation import Reservation
from ..core.tracebacks import hides_arguments
from ..errors import ConfigurationError
from ..events import Observer
from ..ledger import Ledger
from ..store.clients import Client
from ..web.options import Options, check_lease, misused
from ..web.settings import PREFIX, Settings
from ..web.setup import check_given, constant, make_ledger
from ._exchange import current_answer, exchanges, process_response, request_context, watch
from ._request import run_protected
from ._state import EXTENSION, State
from ._views import EXEMPT, OPTIONS

__all__ = ["Idempotency"]

View = TypeVar("View", bound=Callable[..., Any])
Exempt = TypeVar("Exempt", bound=Callable[..., Any] | Blueprint)


class Idempotency:
    """Protect the unsafe methods of a Flask application with the Idempotency-Key header.

    Args:
        app: the application to set up now; or call `init_app` later, for any number of applications.
        principal: whose key it is: a function that is called within the request, after the application's
            `before_request` functions and so after authentication; or a constant for a single-tenant service. If the
            function returns None or a blank string, the response is 401.
        client: a redis-py client to use in place of `IDEMREDIS_URL`.
        ledger: a `Ledger` to use in place of a client and of the settings that belong to a ledger.
        observers: called with each `Event`.
        problem: shapes refusals: `problem(code, status, message, facts)` is called within the request and returns what
            a view might return. `facts` has further numbers, such as `lease_ms`. A Retry-After, and the Link to
            `IDEMREDIS_DOCS_URL`, are added where the refusal has them. If the function raises, the refusal is sent as
            it is without it.

    Raises:
        ConfigurationError: the constant is not a valid principal, `ledger` is not a `Ledger`, both `client` and
            `ledger` are given, `observers` and `ledger` are given, or `problem` is not a function.
    """

    @hides_arguments
    def __init__(
        self,
        app: Flask | None = None,
        *,
        principal: Callable[[], object] | object,
        client: Client | None = None,
        ledger: Ledger | None = None,
        observers: Iterable[Observer] = (),
        problem: Callable[[str, int, str, dict[str, int]], Any] | None = None,
    ) -> None:
        self._observers = tuple(observers)
        check_given(Ledger, client, ledger, self._observers, problem)
        self.problem = problem
        self.protected: WeakSet[Callable[..., Any]] = WeakSet()
        self._retention = math.inf if ledger is None else ledger.policy.retention
        self._principal = principal if callable(principal) else functools.partial(constant, constant(principal))
        self._client = client
        self._ledger = ledger
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Set up an application from its `IDEMREDIS_` settings; calling it again reads them again.

        Args:
            app: the application. Call this before it serves its first request.

        Raises:
            ConfigurationError: a setting is unknown or not supported, or the application already has another
                `Idempotency`.
        """
        settings = Settings.read(app.config.get_namespace(PREFIX, lowercase=False))
        before: State | None = app.extensions.get(EXTENSION)
        if before is not None and before.extension is not self:
            raise ConfigurationError(f"the application {app.name!r} has an Idempotency already; call init_app on that")
        if (app.url_map.host_matching or app.subdomain_matching) and "host" not in map(
            str.lower, settings.fingerprint_headers
        ):
            raise ConfigurationError(
                f"{app.name!r} routes by host, so {PREFIX}FINGERPRINT_HEADERS must have 'host' in it; add it to "
                f"{settings.fingerprint_headers!r}"
            )
        ledger = make_ledger(Ledger, settings, self._client, self._ledger, self._observers)
        state = State(self, ledger, replace(settings, url=None))
        for view in self.protected:
            check_lease(getattr(view, OPTIONS), state.ledger.policy.retention, view.__qualname__)
        self._retention = min(self._retention, state.ledger.policy.retention)
        if before is None:
            # Flask refuses this once the application has served a request, and then nothing is hooked in.
            app.teardown_request(_nothing)
            app.teardown_request_funcs[None].remove(_nothing)
            _hook_in(app)
        app.extensions[EXTENSION] = state

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
        """Decorate a view so that its key is claimed before it runs; use `@protect` or `@protect(...)` with options.

        If a worker dies in the view, the row becomes stale when the lease ends, and the next retry takes it over.

        Args:
            view: a view function, a method of a `MethodView`, or a whole `MethodView` through its `decorators`.
            required: False runs the view unprotected for requests without a key; defaults to `IDEMREDIS_REQUIRED`.
            lease: seconds; defaults to `IDEMREDIS_LEASE_SECONDS`.
            wait: seconds to wait for a running attempt before 409; defaults to `IDEMREDIS_WAIT_SECONDS`.
            operation: third part of the row's identity; the same key in two operations names two rows.
            on_error: "release", "hold" or "store": what an exception or a status of 500 or above does to the row;
                defaults to `IDEMREDIS_ON_ERROR`.
            fingerprint: called within the request; returns a str, or a JSON value to be hashed. By default the
                method, target, some headers and the body are hashed.
            recover: called with the `Reservation` on a takeover, before the view runs again. It returns what the
                earlier attempt's view would have returned, or None to run the view, or raises `HoldForReview`.

        Raises:
            ConfigurationError, TypeError: an option is not supported.
        """
        if view is not None and (isinstance(view, type) or not callable(view)):
            raise ConfigurationError(misused(view))
        chosen = Options(**options)
        check_lease(chosen, self._retention)

        def decorate(view: View) -> View:
            if isinstance(view, type) or not callable(view):
                raise ConfigurationError(misused(view))
            is_async = inspect.iscoroutinefunction(view)

            @functools.wraps(view)
            def protected(*args: Any, **kwargs: Any) -> Any:
                run = current_app.ensure_sync(view) if is_async else view
                return run_protected(chosen, functools.partial(run, *args, **kwargs))

            setattr(protected, OPTIONS, chosen)
            self.protected.add(protected)
            return cast(View, protected)

        return decorate if view is None else decorate(view)

    def exempt(self, view: Exempt) -> Exempt:
        """Exempt a view, a `MethodView`, one of its methods, or a blueprint from `IDEMREDIS_PROTECT_ALL`."""
        setattr(view, EXEMPT, True)
        return view

    def principal(self) -> object:
        """Return the principal of the current request."""
        return self._principal()


def _hook_in(app: Flask) -> None:
    """Follow the application's requests, where whoever has taken `app.wsgi_app` before cannot pass by.

    These are methods that `Flask.wsgi_app` looks up on the application. `app.wsgi_app` itself is wrapped only if there
    are WSGI layers around it, whose outcome counts, too.
    """
    if getattr(app.wsgi_app, "__func__", None) is not Flask.wsgi_app:
        app.wsgi_app = functools.partial(watch, app, app.wsgi_app)  # type: ignore[method-assign]
    app.request_context = functools.partial(request_context, app, app.request_context)  # type: ignore[method-assign]
    app.dispatch_request = functools.partial(_dispatch, app, app.dispatch_request)  # type: ignore[method-assign]
    app.process_response = functools.partial(process_response, app.process_response)  # type: ignore[method-assign]


def _nothing(error: BaseException | None) -> None:
    """Do nothing."""


def _dispatch(app: Flask, dispatch: Callable[..., Any], *args: Any) -> Any:
    """Run a view; a refusal or replay comes back as it is, whatever a decorator around it returned or raised."""
    state: State = app.extensions[EXTENSION]
    try:
        if state.settings.protect_all:
            returned = _protect(app, state, functools.partial(dispatch, *args))
        else:
            returned = dispatch(*args)
    except Exception:
        if (answer := current_answer()) is None:
            raise
        return answer
    return returned if exchanges.get() is None else current_answer() or returned


def _protect(app: Flask, state: State, dispatch: Callable[[], Any]) -> Any:
    """Protect a request under `PROTECT_ALL`; runs after the `before_request` functions, so after authentication."""
    method, endpoint = request.method.upper(), request.endpoint
    if method not in state.settings.methods or endpoint is None:
        return dispatch()
    marks = state.views.marks(app, endpoint, method)
    if marks.exempt or marks.protected:  # a decorated view protects itself, with its own options
        return dispatch()
    if marks.hidden_exempt or len(marks.hidden) > 1:
        raise ConfigurationError(
            f"a decorator of {endpoint!r} hides whether it is exempt, or which options protect it; put "
            "@functools.wraps(view) on the wrapper that the decorator returns, or @exempt or @protect above it"
        )
    return run_protected(marks.hidden[0] if marks.hidden else Options(), dispatch)
