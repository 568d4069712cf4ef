"""The state of one request: a mutable object in the scope and in a context variable."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from ..core.fingerprint import begin_fingerprint
from ..core.reservation import NOTHING, AsyncReservation, Reservation
from ..core.response import StoredResponse
from ..core.settle import Ending
from ..errors import ConfigurationError
from ..events import observing
from ..ledger.current import look_also_in
from ._body import RequestBody, expected, raw_target
from ._outgoing import Outgoing
from ._types import Message, Receive, Scope, Send, all_headers, header

if TYPE_CHECKING:
    from ._routes import Routes
    from ._setup import Idempotency

__all__ = ["KEY", "SCOPE", "Exchange", "Passing", "check_same", "exchanges"]

SCOPE = "idemredis"
"""Key of the exchange in the scope."""

KEY = b"idempotency-key"

exchanges: ContextVar[Exchange | Passing | None] = ContextVar("idemredis_asgi_exchange", default=None)
"""The exchange of the request that is served in this context, also in a thread of its endpoint."""


class Passing:
    """A request that passes untouched, since its method is safe or not protected."""

    reservation = None

    def __init__(self, idempotency: Idempotency, scope: Scope) -> None:
        self.idempotency = idempotency
        self.scope = scope


class Exchange:
    """One request with an unsafe method.

    Attributes:
        idempotency: what the middleware was given.
        scope: the request's; never a copy.
        loop: the event loop that serves it.
        key_header: the key as the client sent it; None if it has not.
        body: None if nothing is hashed.
        outgoing: the response.
        began: True once the claim is made or refused, or it was decided that none is needed; also while it is made.
        within_protect: True while a protected endpoint runs; one that it calls is a plain function.
        reservation: what `current_reservation` stands for; None if there is none.
        fingerprint: of a request that runs unprotected in an outage; "" otherwise.
        template: the route's template, if it was matched before the application has routed the request.
        endpoint: the name of the function that is protected, if its framework does not give a route.
    """

    def __init__(self, idempotency: Idempotency, routes: Routes, scope: Scope, receive: Receive, send: Send) -> None:
        settings = idempotency.settings
        self.idempotency = idempotency
        self.scope = scope
        self.loop = asyncio.get_running_loop()
        self.key_header = header(scope, KEY)
        self.outgoing = Outgoing(send, settings.storable)
        self.began = False
        self.within_protect = False
        self.reservation: AsyncReservation | None = None
        self.fingerprint = ""
        self.template = ""
        self.endpoint = ""
        self.body: RequestBody | None = None
        self.target = ""
        self._receive = receive
        self._routes = routes
        self._ending: tuple[Reservation, Ending] | None = None
        if self.key_header is not None and settings.mode != "off":
            headers = all_headers(scope)
            self.target = raw_target(scope)
            named = [(name, headers.get(name.lower(), "")) for name in settings.fingerprint_headers]
            digest = begin_fingerprint(scope["method"], self.target, named)
            limit, keep = settings.max_request, idempotency.keeps_bodies
            self.body = RequestBody(receive, digest, expected(headers), limit, keep)

    @property
    def claimed(self) -> bool:
        """True once the request has a claim, whose end has to be seen."""
        return self.outgoing.recorder is not None

    @property
    def route(self) -> str:
        """Method and route template, such as `POST /orders/{id}`; or the endpoint's name, or "" if unknown."""
        path = self.template or self._routes.template(self.scope)
        return f"{self.scope['method']} {path}" if path else self.endpoint

    async def receive(self) -> Message:
        """Return the server's next message for the application.

        Once the request is claimed, a client that goes away does not end the application while its response is still
        collected, for at most the policy's `max_hold`.
        """
        message = await (self._receive() if self.body is None else self.body.receive())
        if message["type"] == "http.disconnect" and self.claimed and not self.outgoing.collected.is_set():
            try:
                async with asyncio.timeout(self.idempotency.ledger.policy.max_hold):
                    await self.outgoing.collected.wait()
            except TimeoutError:
                pass
        return message

    def answer(self, answer: StoredResponse) -> None:
        """Refuse or replay: send this whatever the application makes of the request.

        Raises:
            ConfigurationError: the response has begun, so the claim comes too late.
        """
        if self.outgoing.begun:
            raise ConfigurationError("the response had begun before the request was claimed; claim it first")
        self.outgoing.answer = answer
        self.outgoing.collected.set()

    def settle_by(self, r: Reservation, ending: Ending) -> None:
        """Note how the row is to be settled; `settle` does it."""
        self._ending = (r, ending)

    async def settle(self) -> None:
        """Settle the row, if that is decided and not done."""
        if self._ending is None:
            return
        (r, ending), self._ending = self._ending, None
        token = observing.set(self.idempotency.settings.mode == "observe")
        try:
            await self.idempotency.ledger.settle(r, ending)
        finally:
            observing.reset(token)

    def save(self, r: Reservation, name: str, data: object) -> Any:
        """Save a checkpoint: await it on the event loop; in an endpoint's thread it blocks, and returns None."""
        saving: Coroutine[Any, Any, None] = self.idempotency.ledger.checkpoint(r, name, data)
        if self.on_loop():
            return saving
        return asyncio.run_coroutine_threadsafe(saving, self.loop).result()

    def save_nothing(self, r: Reservation, name: str, data: object) -> Any:
        """Stand in for `save` where the endpoint runs unprotected."""
        return NOTHING if self.on_loop() else None

    def on_loop(self) -> bool:
        """Return True on the event loop, and False in a thread beside it."""
        try:
            return asyncio.get_running_loop() is not None
        except RuntimeError:
            return False

    def close(self) -> None:
        """Free what the request has used."""
        if self.body is not None:
            self.body.close()
        if self.scope.get(SCOPE) is self:
            del self.scope[SCOPE]  # breaks a reference cycle


def _reservation() -> Reservation | None:
    exchange = exchanges.get()
    return None if exchange is None else exchange.reservation


look_also_in(_reservation)


def check_same(idempotency: Idempotency, exchange: Exchange | Passing, name: str) -> None:
    """Check that an endpoint and its middleware have one `Idempotency`, whose ledger and principal are used.

    Raises:
        ConfigurationError: they have two.
    """
    if exchange.idempotency is not idempotency:
        raise ConfigurationError(
            f"{name} is protected by another Idempotency than the IdempotencyMiddleware around it has; use one for both"
        )
