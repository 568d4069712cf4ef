"""`protect`: an endpoint, sync or async, that is claimed before it runs."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from ..core.response import StoredResponse
from ..errors import ConfigurationError
from ..web.options import Options
from ._claim import answer_error, begin, recovered, stored
from ._exchange import Exchange, Passing, check_same, exchanges
from ._messages import Answered, native

if TYPE_CHECKING:
    from ._setup import Idempotency

__all__ = ["is_async", "protected"]

T = TypeVar("T")


def protected(idempotency: Idempotency, options: Options, endpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Return an endpoint that is claimed before it runs; it is async if the endpoint is.

    Raises:
        ConfigurationError: the endpoint is a generator.
    """
    if inspect.isgeneratorfunction(endpoint) or inspect.isasyncgenfunction(endpoint):
        raise ConfigurationError(
            f"{endpoint.__qualname__} is a generator; protect needs a function that returns a response, such as a "
            "streaming one (in FastAPI, guard protects generators too)"
        )
    name = f"{endpoint.__module__}.{endpoint.__qualname__}" if hasattr(endpoint, "__qualname__") else ""
    if is_async(endpoint):

        @functools.wraps(endpoint)
        async def run(*args: Any, **kwargs: Any) -> Any:
            exchange = _exchange(idempotency, name)
            if isinstance(exchange, Passing):
                return _unclaimed(exchange, await endpoint(*args, **kwargs), args)
            if exchange.within_protect:
                return await endpoint(*args, **kwargs)
            exchange.within_protect = True
            try:
                is_first = not exchange.began
                await begin(exchange, options)
                if (answer := exchange.outgoing.answer) is not None:
                    return native(answer, exchange.scope, args)
                try:
                    made = await recovered(exchange, options) if is_first else None
                    if made is None:
                        made = await endpoint(*args, **kwargs)
                    return await _returned(exchange, made, args)
                except Exception as error:
                    if not await answer_error(exchange, error) or (answer := exchange.outgoing.answer) is None:
                        raise
                    return native(answer, exchange.scope, args)
            finally:
                exchange.within_protect = False

        return run

    @functools.wraps(endpoint)
    def run_in_thread(*args: Any, **kwargs: Any) -> Any:
        exchange = _exchange(idempotency, name)
        if isinstance(exchange, Passing):
            return _unclaimed(exchange, endpoint(*args, **kwargs), args)
        if exchange.within_protect:
            return endpoint(*args, **kwargs)
        if exchange.on_loop():
            raise ConfigurationError(
                f"{name} is a plain function that runs on the event loop, where it cannot wait for its claim; make it "
                "an async def, or have the framework run it in a thread (Litestar: sync_to_thread=True)"
            )
        exchange.within_protect = True
        try:
            is_first = not exchange.began
            _on_loop(exchange, begin(exchange, options))
            if (answer := exchange.outgoing.answer) is not None:
                return native(answer, exchange.scope, args)
            try:
                r = exchange.reservation
                made = options.recover(r) if is_first and options.recover is not None and r and r.taken_over else None
                if inspect.iscoroutine(made):
                    made = _on_loop(exchange, made)
                if made is None:
                    made = endpoint(*args, **kwargs)
                if isinstance(made, StoredResponse):
                    return _on_loop(exchange, _returned(exchange, made, args))
                return made
            except Exception as error:
                if (
                    not _on_loop(exchange, answer_error(exchange, error))
                    or (answer := exchange.outgoing.answer) is None
                ):
                    raise
                return native(answer, exchange.scope, args)
        finally:
            exchange.within_protect = False

    return run_in_thread


async def _returned(exchange: Exchange, made: Any, args: tuple[Any, ...]) -> Any:
    """Convert a `StoredResponse` that an endpoint returned to its framework's response; return others unchanged."""
    if not isinstance(made, StoredResponse):
        return made
    return native(await stored(exchange, made), exchange.scope, args)


def is_async(function: object) -> bool:
    """Return True if a call of this returns a coroutine."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _on_loop(exchange: Exchange, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the request's event loop, and wait for it in this thread."""
    return asyncio.run_coroutine_threadsafe(work, exchange.loop).result()


def _unclaimed(passing: Passing, made: Any, args: tuple[Any, ...]) -> Any:
    """Return what a framework takes for what an endpoint has returned to a request whose method is not protected.

    An application of no known framework gets a `StoredResponse` as it is.
    """
    if not isinstance(made, StoredResponse):
        return made
    try:
        return native(passing.idempotency.settings.contract.answer(made), passing.scope, args)
    except Answered:
        return made


def _exchange(idempotency: Idempotency, name: str) -> Exchange | Passing:
    """Return the request of a protected endpoint.

    Raises:
        ConfigurationError: there is no middleware, or it has another `Idempotency`.
    """
    exchange = exchanges.get()
    if exchange is None:
        raise ConfigurationError(
            f"{name} is protected, but no IdempotencyMiddleware is around it; add the middleware to the application"
        )
    check_same(idempotency, exchange, name)
    if isinstance(exchange, Exchange) and not exchange.began:
        exchange.endpoint = name
    return exchange
