"""The middleware: it runs the application, and watches its requests and responses for the claim."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from ..errors import ConfigurationError
from ..ledger.current import running
from ..web.options import Options
from ._claim import begin
from ._exchange import SCOPE, Exchange, Passing, exchanges
from ._marks import marks_of
from ._routes import Exempt, Routes, exempting
from ._setup import Idempotency
from ._types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["IdempotencyMiddleware"]

_SENDS_FILES = ("http.response.pathsend", "http.response.zerocopysend")
"""Extensions by which a body reaches the server without its bytes passing here."""


class IdempotencyMiddleware:
    """Watch the requests of an ASGI application, so that `protect` and `guard` can claim them; or claim all of them.

    Put it inside the middleware that authenticates, compresses responses, or adds CORS headers.

    Args:
        app: any ASGI application.
        idempotency: settings, ledger and principal.
        protect_all: claim every request with an unsafe method; defaults to `IDEMREDIS_PROTECT_ALL`. In a Starlette or
            FastAPI application, only requests that a route serves are claimed, and endpoints may be exempt or protect
            themselves.
        exempt: requests that `protect_all` does not claim: path templates, such as `/webhooks/{source}`, or functions
            of the scope.

    Raises:
        ConfigurationError: `idempotency` is not an `Idempotency`, or has no principal where all requests are claimed;
            or `exempt` has an entry of another kind.
    """

    def __init__(
        self,
        app: ASGIApp,
        idempotency: Idempotency,
        protect_all: bool | None = None,
        exempt: Iterable[Exempt] = (),
    ) -> None:
        if not isinstance(idempotency, Idempotency):
            raise ConfigurationError(f"idempotency must be an Idempotency, not {type(idempotency).__name__}")
        settings = idempotency.settings
        self.app = app
        self._idempotency = idempotency
        self._methods = settings.methods
        self._protect_all = settings.protect_all if protect_all is None else protect_all
        if self._protect_all:
            idempotency.check_principal("protect_all")
        self._is_exempt = exempting(exempt)
        self._routes = Routes(app, "host" in map(str.lower, settings.fingerprint_headers))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; pass on connections of other kinds."""
        kind = scope["type"]
        if kind == "lifespan":
            await self.app(scope, receive, self._closing(send))
            return
        if kind != "http" or self._is_followed(scope):
            await self.app(scope, receive, send)
            return
        if scope["method"].upper() not in self._methods:
            token = exchanges.set(Passing(self._idempotency, scope))
            try:
                await self.app(scope, receive, send)
            finally:
                exchanges.reset(token)
            return
        self._routes.see(scope)
        exchange = Exchange(self._idempotency, self._routes, scope, receive, send)
        if exchange.body is None:
            token = exchanges.set(exchange)
            try:
                await self._run(exchange)
            finally:
                exchanges.reset(token)
            return
        ended = exchange.loop.create_future()
        task = exchange.loop.create_task(self._run_alone(exchange, ended))
        task.add_done_callback(lambda _: _end(ended))  # a task that is cancelled before its first step runs nothing
        try:
            await ended  # not the task: it would be cancelled with this one
        except asyncio.CancelledError:
            if not task.done():
                if exchange.claimed:
                    exchange.outgoing.abandon()
                    self._idempotency.keep(task)
                else:
                    task.cancel()
                    await asyncio.wait([task])
            raise
        task.result()

    def _is_followed(self, scope: Scope) -> bool:
        """Return True if the middleware is around itself, or within another one that has claimed the request."""
        around = scope.get(SCOPE)
        return isinstance(around, Exchange) and (around.idempotency is self._idempotency or around.began)

    async def _run_alone(self, exchange: Exchange, ended: asyncio.Future[None]) -> None:
        """Run a request in a task of its own, which continues when the server stops waiting for it."""
        exchanges.set(exchange)
        try:
            await self._run(exchange)
        finally:
            _end(ended)

    async def _run(self, exchange: Exchange) -> None:
        scope, outgoing = exchange.scope, exchange.outgoing
        around = scope.get(SCOPE)
        scope[SCOPE] = exchange
        if scope.get("extensions"):
            scope["extensions"] = {
                name: value for name, value in scope["extensions"].items() if name not in _SENDS_FILES
            }
        try:
            with running(None):
                if self._protect_all and self._is_to_be_claimed(exchange):
                    await begin(exchange, Options())
                if outgoing.answer is None:
                    await self.app(scope, exchange.receive, outgoing.send)
        except BaseException as error:
            if not await outgoing.finish(error):
                raise
        else:
            await outgoing.finish(None)
        finally:
            exchange.close()
            if around is not None:
                scope[SCOPE] = around

    def _is_to_be_claimed(self, exchange: Exchange) -> bool:
        """Return True if `protect_all` claims a request: it is not exempt, and its endpoint does not protect itself."""
        scope = exchange.scope
        if self._is_exempt(scope):
            return False
        if not self._routes.known:
            return True
        matched = self._routes.match(scope, self)
        if matched is None:
            return False
        exchange.template = matched.template
        return not any(marks_of(matched.route, scope["method"]))

    def _closing(self, send: Send) -> Send:
        """Close the ledger before the server is told that the application has ended."""

        async def send_and_close(message: Message) -> None:
            if message["type"] in ("lifespan.shutdown.complete", "lifespan.shutdown.failed"):
                await self._idempotency.close()
            await send(message)

        return send_and_close


def _end(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)
