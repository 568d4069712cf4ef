"""What an application sets up: settings, ledger and decorators."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar, cast, overload

from ..core.tracebacks import hides_arguments
from ..errors import ConfigurationError
from ..events import Observer
from ..ledger import AsyncLedger
from ..store.clients import AsyncClient
from ..web.options import Options, check_lease, misused
from ..web.settings import Settings
from ..web.setup import check_given, constant, make_ledger
from ._endpoint import is_async, protected
from ._marks import EXEMPT, mark
from ._types import Scope

__all__ = ["Idempotency"]

logger = logging.getLogger("idemredis")

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])
Exempt = TypeVar("Exempt", bound=Callable[..., Any])

LEFT_OUT: Any = object()
"""Stands for a principal that is not given; None may be given by mistake."""

CLOSE_WITHIN = 2.0
"""Seconds for which closing waits for requests whose clients have gone away; as long as the ledger flushes."""


class Idempotency:
    """What `IdempotencyMiddleware`, `protect` and `guard` need: settings, the ledger, and whose keys they are.

    Args:
        principal: whose key it is: a function of the scope, sync or async, that is called when the endpoint is claimed
            and so after the authentication around it; or a constant for a single-tenant service. If the function
            returns None or a blank string, the response is 401. It may be left out if each `guard` has its own.
        settings: the `IDEMREDIS_` settings by name; other names are ignored.
        client: a redis-py asyncio client to use in place of `IDEMREDIS_URL`, in one event loop.
        ledger: an `AsyncLedger` to use in place of a client and of the settings that belong to a ledger.
        observers: called with each `Event`.
        problem: shapes refusals: `problem(code, status, message, facts)`, sync or async, returns a `StoredResponse`, an
            ASGI response such as Starlette's, a JSON value, `(value, status)` or `(value, status, headers)`. A
            Retry-After is added where the refusal has one. If it raises, the refusal is sent as it is without it.

    Raises:
        ConfigurationError: a setting is unknown or not supported, the constant is not a valid principal, `ledger` is
            not an `AsyncLedger`, both `client` and `ledger` are given, `observers` and `ledger` are given, or `problem`
            is not a function.

    Attributes:
        settings: the checked settings.
        ledger: the ledger; it is shared between event loops if a URL made its client.
        problem: the function that shapes refusals.
        keeps_bodies: True if an endpoint has a fingerprint of its own, which needs the body.
    """

    @hides_arguments
    def __init__(
        self,
        *,
        principal: Callable[[Scope], object] | object = LEFT_OUT,
        settings: Mapping[str, Any] | None = None,
        client: AsyncClient | None = None,
        ledger: AsyncLedger | None = None,
        observers: Iterable[Observer] = (),
        problem: Callable[[str, int, str, dict[str, int]], Any] | None = None,
    ) -> None:
        observers = tuple(observers)
        check_given(AsyncLedger, client, ledger, observers, problem)
        if principal is not LEFT_OUT and not callable(principal):
            constant(principal)
        checked = Settings.from_mapping({} if settings is None else settings)
        self.ledger: AsyncLedger = make_ledger(AsyncLedger, checked, client, ledger, observers)
        self.settings = replace(checked, url=None)  # it may have a password in it
        self.problem = problem
        self.keeps_bodies = False
        self._principal = principal
        self._kept: set[asyncio.Task[None]] = set()

    @overload
    def protect(self, endpoint: Endpoint) -> Endpoint: ...

    @overload
    def protect(
        self,
        *,
        required: bool | None = None,
        lease: float | None = None,
        wait: float | None = None,
        operation: str = "",
        on_error: str | None = None,
        fingerprint: Callable[[Scope, bytes], object] | None = None,
        recover: Callable[[Any], Any] | None = None,
    ) -> Callable[[Endpoint], Endpoint]: ...

    def protect(self, endpoint: Endpoint | None = None, **options: Any) -> Endpoint | Callable[[Endpoint], Endpoint]:
        """Decorate an endpoint so that its key is claimed before it runs; use `@protect` or `@protect(...)`.

        The endpoint is any `def` or `async def` function that a framework calls for a request under
        `IdempotencyMiddleware`. A `def` function must run in a thread, as the frameworks run it. If a worker dies in
        the endpoint, the row becomes stale when the lease ends, and the next retry takes it over.

        Args:
            endpoint: the function; it returns what its framework takes, or a `StoredResponse`.
            required: False runs the endpoint unprotected for requests without a key; defaults to `IDEMREDIS_REQUIRED`.
            lease: seconds; defaults to `IDEMREDIS_LEASE_SECONDS`.
            wait: seconds to wait for a running attempt before 409; defaults to `IDEMREDIS_WAIT_SECONDS`.
            operation: third part of the row's identity; the same key in two operations names two rows.
            on_error: "release", "hold" or "store": what an exception or a status of 500 or above does to the row;
                defaults to `IDEMREDIS_ON_ERROR`.
            fingerprint: `fingerprint(scope, body)`, sync or async, returns a str, or a JSON value to be hashed. By
                default the method, target, some headers and the body are hashed.
            recover: called with the `AsyncReservation` on a takeover, before the endpoint runs again. It returns what
                the earlier attempt's endpoint would have returned, or None to run the endpoint, or raises
                `HoldForReview`. It may be async if the endpoint is.

        Raises:
            ConfigurationError, TypeError: an option is not supported, the endpoint is a generator, or there is no
                principal.
        """
        self.check_principal("protect")
        if endpoint is not None and (isinstance(endpoint, type) or not callable(endpoint)):
            raise ConfigurationError(_misused(endpoint))
        chosen = self.chosen(Options(**options))

        def decorate(endpoint: Endpoint) -> Endpoint:
            if isinstance(endpoint, type) or not callable(endpoint):
                raise ConfigurationError(_misused(endpoint))
            return cast(Endpoint, mark(protected(self, chosen, endpoint), chosen))

        return decorate if endpoint is None else decorate(endpoint)

    def exempt(self, endpoint: Exempt) -> Exempt:
        """Exempt an endpoint, or a class of them, from `protect_all`."""
        setattr(endpoint, EXEMPT, True)
        return endpoint

    @asynccontextmanager
    async def lifespan(self, app: object = None) -> AsyncIterator[None]:
        """Close the ledger when the application ends; for the `lifespan` argument of an application, or within it.

        If neither this nor the server's lifespan closes the ledger, pending work is flushed when the event loop ends.
        """
        try:
            yield
        finally:
            await self.close()

    async def close(self) -> None:
        """Wait for requests whose clients have gone away, for at most 2 s, and close the ledger in this event loop."""
        here = {task for task in self._kept if task.get_loop() is asyncio.get_running_loop()}
        if here:
            await asyncio.wait(here, timeout=CLOSE_WITHIN)
        await self.ledger.close()

    def chosen(self, options: Options) -> Options:
        """Return the options of an endpoint, once they are checked against the settings.

        Raises:
            ConfigurationError: the lease is not shorter than the retention.
        """
        check_lease(options, self.ledger.policy.retention)
        self.keeps_bodies |= options.fingerprint is not None
        return options

    def check_principal(self, what: str) -> None:
        """Check that there is a principal for something that claims requests.

        Raises:
            ConfigurationError: there is none.
        """
        if self._principal is LEFT_OUT:
            raise ConfigurationError(
                f"{what} needs a principal, whose key it is: pass principal= to Idempotency; only guards have their own"
            )

    def ask_principal(self, scope: Scope) -> Any:
        """Return the principal of a request, or an awaitable of it."""
        return self._principal(scope) if callable(self._principal) else self._principal

    @property
    def principal_is_awaited(self) -> bool:
        """True if the principal's function is async."""
        return is_async(self._principal)

    def keep(self, task: asyncio.Task[None]) -> None:
        """Let a request run to its end although its client went away."""
        self._kept.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._kept.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a request failed after its client had gone away", exc_info=error)


def _misused(endpoint: object) -> str:
    if isinstance(endpoint, type):
        return f"protect takes a function; decorate the methods of the class {endpoint.__name__} instead"
    return misused(endpoint)
