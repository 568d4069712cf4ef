"""Follow one request through Flask: its body, its content, and how the application finished with it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

from flask import Flask, Request, Response, request
from flask.globals import request_ctx

from ..core.reservation import Reservation
from ..errors import ConfigurationError
from ..web.body import Environ, RequestBody
from ..web.recorder import ResponseRecorder
from ._content import record
from ._state import EXTENSION, State

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication
    from flask.ctx import RequestContext

__all__ = [
    "CLAIMED",
    "FOLLOWED",
    "Exchange",
    "body_limit",
    "current_answer",
    "exchange_of",
    "exchanges",
    "process_response",
    "request_context",
    "watch",
]

CLAIMED = "idemredis.claimed"
"""Environ key of the exchange that has claimed, or was answered, or runs unprotected. A copy of the environ has it too,
so that an application within the view of another runs under the other's claim."""

FOLLOWED = "idemredis.followed"
"""Environ key of the exchange of the request context that was made last for this environ."""

_WATCHED = "idemredis.watched"

_OURS = "idemredis_noticed"
"""Attribute of a context with a key that was made by `request_context`."""

exchanges: ContextVar[Exchange | None] = ContextVar("idemredis_exchange", default=None)
"""The exchange of the protected view that began last; it may be that of a request around the current one."""

# The object behind Flask's proxy: each access through a proxy costs a microsecond.
_request: Callable[[], Request] = request._get_current_object  # type: ignore[attr-defined]


class Exchange:
    """One request, from when its context is made or its view begins until its row is settled.

    Attributes:
        request: the request that is served.
        body: its body; None if it is not recorded.
        answer: a refusal or replay, which is sent whatever the application makes of it.
        recorder: settles the claim; None if there is none.
        fingerprint: of a request that runs although Redis is down; "" otherwise.
        reservation: what `current_reservation` stands for.
        marked: the response says that the view ran unprotected.
        answer_to: settles the row and makes the answer for an error after the view, if it has one of its own.
        ended: True once Flask has finished with the request.
    """

    def __init__(self, app: Flask, request: Request, context: RequestContext, may_claim: bool) -> None:
        self.app = app
        self.request = request
        self.body: RequestBody | None = None
        self.answer: Response | None = None
        self.recorder: ResponseRecorder | None = None
        self.fingerprint = ""
        self.reservation: Reservation | None = None
        self.marked = False
        self.answer_to: Callable[[BaseException], Response | None] | None = None
        self.ended = False
        self._context = context
        self._began = sys.exc_info()[1]  # an exception that is handled around the request is not one of it
        self._depth = 1
        self._may_claim = may_claim
        self._watch: _Watch | None = None
        self._outer: Exchange | None = None
        self._functions_before = 0
        self._functions_of_view: int | None = None
        self._passing: frozenset[int] | None = None
        self._placed = False
        self._processed = False
        self._status: int | None = None
        self._retry_after = False
        self._streams_body = False
        self._error: BaseException | None = None

    # The request's context

    def follow(self) -> None:
        """Be told when the context, which has been entered, is left: then the teardown functions have run."""
        context = self._context
        self._enter, self._leave = context.push, context.pop
        context.push = self._push  # type: ignore[method-assign]
        context.pop = self._pop  # type: ignore[method-assign, assignment]
        self.request.environ[FOLLOWED] = self

    def record_body(self, limit: int) -> None:
        """Record what is read of the body from now on, up to a limit in bytes."""
        self.body = RequestBody(self.request.environ, limit)
        self.body.record(body_limit(self.app, self.request))

    def _push(self) -> None:
        self._depth += 1
        self._enter()

    def _pop(self, *args: Any) -> None:
        self._depth -= 1
        error = self._raised()
        try:
            self._leave(*args)
        except BaseException as failed:
            error = failed
            raise
        finally:
            # A stream with a context of its own keeps the context until it ends; the row then waits for the stream.
            if self._depth == 0 or self._processed:
                self._end(error)
            if self._depth == 0:  # so that the context is in no circle
                vars(self._context).pop("push", None)
                vars(self._context).pop("pop", None)

    def _raised(self) -> BaseException | None:
        """Return the exception of this request that is being handled, or that is on its way out of it."""
        error = sys.exc_info()[1]
        return None if error is self._began else error

    def begin(self) -> None:
        """Follow the response from now on: the view is about to run, or is refused or replayed."""
        environ = self.request.environ
        self._outer = exchanges.get()
        watch: _Watch | None = environ.get(_WATCHED)
        if self._may_claim and watch is not None and watch.app is self.app:
            self._watch = watch
            watch.exchange = self
        environ[CLAIMED] = self
        exchanges.set(self)
        self._functions_before = len(self._functions)

    def covers(self, other: Request) -> bool:
        """Return True if a protected view of `other` runs under this exchange."""
        return self.request is other or (self._may_claim and not self.ended)

    def view_returned(self) -> None:
        """Note that functions registered from now on come from around the view, and so on a replay, too."""
        self._functions_of_view = len(self._functions)

    # The response

    def process(self, process: Callable[..., Response], *args: Any) -> Response:
        """Run the application's after-request phase; the content is taken before, the final status afterwards."""
        *first, response = args
        functions = self._functions
        try:
            response = self._take(response)
            response = process(*first, response)
        except BaseException:
            if self.recorder is not None:
                self.recorder.failed_afterwards = True
            raise
        finally:
            self._functions = functions
        self._processed = True
        self._status = response.status_code
        self._retry_after = self._status >= 400 and "Retry-After" in response.headers  # it means nothing below that
        if self.recorder is None:
            self._leave_scope()
            if self.body is not None and response.is_streamed:  # an unprotected view may stream its request body
                self._streams_body = True
                response.call_on_close(self.body.close)
        return response

    @property
    def _functions(self) -> list[Any]:
        """What `after_this_request` has registered, in its order."""
        return self._context._after_request_functions

    @_functions.setter
    def _functions(self, functions: list[Any]) -> None:
        self._context._after_request_functions = functions

    def _take(self, response: Response) -> Response:
        """Put a refusal or replay in its place again, or record the response as the content of the row."""
        handled = self._raised()
        if self.recorder is not None and handled is not None:
            self.recorder.failure = handled
            if self.answer_to is not None and (answer := self.answer_to(handled)) is not None:
                self.answer, self.answer_to = answer, None
        if self.answer is not None:
            if self._placed:
                return response  # a function has failed over it
            self._placed = True
            return self.answer
        if self.marked:
            response.headers["Idempotency-Status"] = "unprotected"
        if self.recorder is not None and not self.recorder.settled:
            of_content, passing = self._split()
            for function in of_content:
                response = self.app.ensure_sync(function)(response)
            record(self.recorder, response, self.request.environ)
            self._functions = passing
        return response

    def _split(self) -> tuple[list[Any], list[Any]]:
        """Return the functions that belong to the content, and those that a replay passes through again.

        Those of the view and the error handlers belong to the content. What was registered before the view or around
        it is registered again on a replay.
        """
        functions = self._functions
        if not functions:
            self._passing = self._passing or frozenset()
            return [], []
        if self._passing is None:
            after = len(functions) if self._functions_of_view is None else self._functions_of_view
            self._passing = frozenset([*range(self._functions_before), *range(after, len(functions))])
        of_content = [function for n, function in enumerate(functions) if n not in self._passing]
        return of_content, [function for n, function in enumerate(functions) if n in self._passing]

    # The end

    def decide(self, status: int | None, error: BaseException | None, retry_after: bool) -> None:
        """Settle the row: the application and the layers that are known have finished."""
        if self.recorder is not None:
            self.recorder.finish(status, error or self._error, retry_after=retry_after)

    def close(self) -> None:
        """Settle the row at once: the environ is used for another request."""
        if self.recorder is not None:
            self.decide(self._status, None, self._retry_after)
            self.recorder.abandon()

    def _end(self, error: BaseException | None) -> None:
        if self.ended:
            return
        self.ended = True
        self._leave_scope()
        environ = self.request.environ
        if environ.get(FOLLOWED) is self:
            del environ[FOLLOWED]
        if self.recorder is None:
            self._clear()
            return
        self._error = error
        self.recorder.when_settled(self._clear)  # a streamed response may still read the body
        if self._watch is None:
            self.decide(self._status, None, self._retry_after)

    def _leave_scope(self) -> None:
        if exchanges.get() is self:
            exchanges.set(self._outer)

    def _clear(self) -> None:
        """Remove the claim from the environ, so that a middleware which runs the request again claims again."""
        environ = self.request.environ
        if environ.get(CLAIMED) is self:
            del environ[CLAIMED]
        if self.body is not None and not self._streams_body:
            self.body.close()


class _Watch:
    """What the server receives of one request that passes through WSGI layers inside the extension's."""

    def __init__(self, app: Flask, start_response: StartResponse) -> None:
        self.app = app
        self.exchange: Exchange | None = None
        self.status: int | None = None
        self._start_response = start_response
        self._retry_after = False

    @property
    def over(self) -> bool:
        """True if there is nothing to wait for: the response has begun, and no claim is still in the application."""
        return self.status is not None and (self.exchange is None or self.exchange.ended)

    def start(self, status: str, headers: list[tuple[str, str]], *exc_info: Any) -> Any:
        self.status = int(status[:3])
        self._retry_after = any(name.lower() == "retry-after" for name, _ in headers)
        return self._start_response(status, headers, *exc_info)

    def finish(self, error: BaseException | None = None) -> None:
        if self.exchange is not None:
            self.exchange.decide(self.status, error, self._retry_after)


class _Watched:
    """The response of a layer that runs the application only when its response is read."""

    def __init__(self, iterable: Iterable[bytes], watch: _Watch) -> None:
        self._iterable = iterable
        self._pieces = iter(iterable)
        self._watch = watch

    def __iter__(self) -> _Watched:
        return self

    def __next__(self) -> bytes:
        try:
            return next(self._pieces)
        except StopIteration:
            self._watch.finish()
            raise
        except BaseException as error:
            self._watch.finish(error)
            raise

    def close(self) -> None:
        try:
            close: Any = getattr(self._iterable, "close", None)
            if close is not None:
                close()
        except BaseException as error:
            self._watch.finish(error)
            raise
        self._watch.finish()


def watch(app: Flask, wsgi_app: WSGIApplication, environ: Environ, start_response: StartResponse) -> Any:
    """Call an application with WSGI layers around it, and let what they do count as the outcome of the request."""
    if "HTTP_IDEMPOTENCY_KEY" not in environ:
        return wsgi_app(environ, start_response)
    watched = environ[_WATCHED] = _Watch(app, start_response)
    try:
        iterable = wsgi_app(environ, watched.start)
    except BaseException as error:
        watched.finish(error)
        raise
    if not watched.over:
        return _Watched(iterable, watched)
    watched.finish()
    return iterable


def request_context(app: Flask, make: Callable[[Environ], RequestContext], environ: Environ) -> RequestContext:
    """Make a request's context; if it has a key and its view is protected, it is followed from when it is entered."""
    state: State = app.extensions[EXTENSION]
    if not state.views.checked:
        state.views.check(app, state.extension.protected, state.settings.methods)
    context = make(environ)
    if "HTTP_IDEMPOTENCY_KEY" in environ:
        settings = state.settings
        if settings.mode != "off" and environ["REQUEST_METHOD"].upper() in settings.methods:
            before: Exchange | None = environ.get(CLAIMED)
            if before is not None and before.ended:
                before.close()
            setattr(context, _OURS, True)
            context.push = partial(_enter, app, state, context)  # type: ignore[method-assign]
    return context


def _enter(app: Flask, state: State, context: RequestContext) -> None:
    """Enter the context of a request with a key for the first time; its view is known then."""
    del context.push  # so that the context is in no circle
    context.push()
    request, settings = context.request, state.settings
    if state.views.are_protected(app, request, settings.protect_all):
        exchange = Exchange(app, request, context, True)
        exchange.follow()
        if CLAIMED not in request.environ:  # else it is within the view of this very environ; the body is its body
            exchange.record_body(settings.max_request)


def exchange_of(app: Flask, state: State, owning_request: Request) -> Exchange:
    """Return what follows a request whose protected view begins.

    It begins here if the request has no key, or if a decorator hides that the view is protected.

    Raises:
        ConfigurationError: the request has a key, and its context was made in a way that was not noticed.
    """
    exchange: Exchange | None = owning_request.environ.get(FOLLOWED)
    if exchange is not None and exchange.request is owning_request:
        return exchange
    context: RequestContext = request_ctx._get_current_object()  # type: ignore[attr-defined]
    may_claim = "HTTP_IDEMPOTENCY_KEY" in owning_request.environ and state.settings.mode != "off"
    if may_claim and not hasattr(context, _OURS):
        raise ConfigurationError(
            f"{app.name!r} did not make this request's context with app.request_context, so its end cannot be seen"
        )
    exchange = Exchange(app, owning_request, context, may_claim)
    exchange.follow()
    return exchange


def body_limit(app: Flask, request: Request) -> int | None:
    """Return `request.max_content_length`, which Flask finds through two of its proxies where it was not set."""
    if type(request).max_content_length is not Request.max_content_length:
        return request.max_content_length
    own: int | None = getattr(request, "_max_content_length", None)
    return app.config["MAX_CONTENT_LENGTH"] if own is None else own


def process_response(process: Callable[..., Response], *args: Any) -> Response:
    """Run the after-request phase of a request; costs nothing where no protected view ran."""
    exchange = exchanges.get()
    if exchange is None or exchange.request is not _request():
        return process(*args)
    return exchange.process(process, *args)


def current_answer() -> Response | None:
    """Return the refusal or replay of the request that is served, if it is one."""
    exchange = exchanges.get()
    return exchange.answer if exchange is not None and exchange.request is _request() else None
