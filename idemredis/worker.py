"""`reserve` and `once`: the ledger for code outside HTTP, such as queue workers, consumers and cron jobs.

The two classes here are the public `Ledger` and `AsyncLedger`. What they decide is decided once for both, in the
functions at the end and in `once`; each face only calls, or awaits.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from . import flows, ledger
from .errors import (
    AlreadyCompleted,
    FencedOut,
    HoldForReview,
    IdempotencyError,
    InvalidResponse,
    KeyInProgress,
    KeyReused,
    LedgerUnavailable,
    PreviousAttemptFailed,
)
from .flows import Flow, Outcome
from .once import ClaimArguments, Given, Once, OnError, check_on_error, json_answer, json_failure
from .operating import SAMPLE
from .operations import InProgress, Replay, Reservation
from .policy import Policy
from .responses import StoredResponse

if TYPE_CHECKING:
    from .operating.diagnosis import Report

__all__ = ["AsyncLedger", "Ledger", "OnError", "Reserved", "current_reservation"]

logger = logging.getLogger("idemredis")

P = ParamSpec("P")
R = TypeVar("R")

_current: ContextVar[Reserved] = ContextVar("idemredis_reservation")


class Reserved(Reservation):
    """The reservation inside a `reserve` block or a `once` function, and what is stored when it ends.

    Attributes:
        result: a JSON value to store; `None` (JSON `null`) where nothing is said.
        response: a `StoredResponse` to store instead.
    """

    __slots__ = ("response", "result")

    result: object
    response: StoredResponse | None

    def __init__(self, r: Reservation) -> None:
        super().__init__(r.identity, r.fingerprint, r.generation, r.owner, r.checkpoint, r.hold, r.route)
        self.result = None
        self.response = None

    if not TYPE_CHECKING:  # a type checker that sees it would take any name

        def __setattr__(self, name: str, value: object) -> None:
            if name not in Reserved.__slots__:
                raise AttributeError(f"{name} cannot be set; a reservation takes `result` or `response`")
            if name == "response" and not (value is None or isinstance(value, StoredResponse)):
                raise InvalidResponse(f"response must be a StoredResponse, not {type(value).__name__}; or set `result`")
            object.__setattr__(self, name, value)


def current_reservation() -> Reserved:
    """Return the reservation of the `once` function that is running: its checkpoint, generation, downstream keys.

    Raises:
        LookupError: no `once` function is running in this context.
    """
    try:
        return _current.get()
    except LookupError:
        raise LookupError("no `once` function is running here, so there is no reservation") from None


class Ledger(ledger.Ledger):
    __doc__ = ledger.Ledger.__doc__

    def reserve(
        self,
        principal: object,
        key: str,
        fingerprint: str,
        operation: str = "",
        lease: float | None = None,
        wait: float = 0.0,
        on_error: OnError = "release",
        route: str = "",
    ) -> AbstractContextManager[Reserved]:
        """Hold the operation for a `with` block, whose lease is renewed while it runs; leaving it completes the row.

        Set `result` (JSON) or `response` on what the block yields, to be stored; nothing said stores `null`. What
        cannot be stored leaves a tombstone. An error at the completion itself is logged and told, never raised: the
        work is done.

        Args:
            principal, key, fingerprint, operation, lease, wait, route: as for `claim`.
            on_error: what an exception does to the row: `release` (the next retry runs at once), `hold` (the row
                stays pending until its lease ends), or `store` (a final failure that is not run again). An
                `IdempotencyError` and what is not an `Exception` (a cancellation, say) are never stored. After
                `HoldForReview` the row stays pending, and an event says so.

        Raises:
            AlreadyCompleted, PreviousAttemptFailed: it was done, or failed for good; each has the `response`.
            KeyInProgress: another attempt runs; with `retry_after`.
            KeyReused: the key was used for something else.
            LedgerUnavailable, NotDurable, CorruptRow, InvalidKey, InvalidPrincipal, ConfigurationError: as `claim`.
        """
        return self._reserve(
            ClaimArguments(principal, key, fingerprint, operation, lease, wait, route=route), check_on_error(on_error)
        )

    def once(
        self,
        *,
        principal: object,
        key: object,
        fingerprint: str | Callable[..., str] | None = None,
        operation: str | None = None,
        lease: float | None = None,
        wait: float = 0.0,
        on_error: OnError = "release",
        recover: Callable[[Reservation], object] | None = None,
        encode: Callable[..., object] | None = None,
        decode: Callable[..., object] | None = None,
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Decorate a function so that it runs once a key: a duplicate call gets the first one's result.

        Args:
            principal, key, fingerprint: constants, or functions of the call's arguments. Such a function is given
                those arguments that its parameters name; one with other names gets all of them, in order. The
                default fingerprint is of all arguments, defaults applied, `self` and `cls` left out.
            operation: by default the function's module and qualified name; name it yourself where the function may
                move, for a moved one starts anew.
            lease, wait: as for `claim`.
            on_error: as for `reserve`; it also covers `recover`.
            recover: called with the reservation when an earlier attempt did not finish, before the function is run
                again. It returns what the function might have returned, to be stored and given; None to run the
                function; or it raises `HoldForReview`.
            encode, decode: make a result JSON, and back. Without them a result is plain JSON, or of the dataclass or
                pydantic model that the return annotation names.

        The caller always gets the function's own value, also when it cannot be stored: then the row is a tombstone
        (`not_encodable`, `too_large`), and duplicates get `AlreadyCompleted` whose `response.omitted` says why.

        Raises:
            ConfigurationError: at the decoration, a setting or function that cannot work (an `async def` needs
                `AsyncLedger.once`); at the call, arguments that are not JSON where no `fingerprint` is given.

        The decorated function raises as `reserve` does; `AlreadyCompleted` only for a tombstone.
        """
        settings = Given(
            self.policy, principal, key, fingerprint, operation, lease, wait, on_error, recover, encode, decode
        )

        def decorate(function: Callable[P, R]) -> Callable[P, R]:
            if isinstance(function, (classmethod, staticmethod)):
                return type(function)(decorate(function.__func__))
            once = Once(settings, function, asynchronous=False)

            @wraps(function)
            def run(*args: P.args, **kwargs: P.kwargs) -> R:
                outcome = self.claim(*once.claim_arguments(args, kwargs))
                if isinstance(outcome, Replay):
                    return once.value_of(outcome)  # type: ignore[no-any-return]  # what the function once returned
                with self._hold(_reserved(outcome), on_error) as r:
                    told = _current.set(r)
                    try:
                        value: Any = recover(r) if recover is not None and r.taken_over else None
                        if value is None:
                            value = function(*args, **kwargs)
                    finally:
                        _current.reset(told)
                    r.response = once.answer(value)
                return value  # type: ignore[no-any-return]

            return run

        return decorate

    def check(self, *, sample: int = SAMPLE, scratch: bool = True) -> Report:
        """Examine the server, the client and some rows, for a health endpoint: what `idemredis doctor` prints.

        Args:
            sample: rows to look at, at most.
            scratch: try the scripts on two rows of its own, which are removed; False changes nothing.
        """
        from . import doctor  # not for everyone: who asks for a check does not mind 10 ms

        return doctor.check(self, sample=sample, scratch=scratch)

    @contextmanager
    def _reserve(self, arguments: ClaimArguments, on_error: OnError) -> Generator[Reserved]:
        with self._hold(_reserved(self.claim(*arguments)), on_error) as r:
            yield r

    @contextmanager
    def _hold(self, r: Reserved, on_error: OnError) -> Generator[Reserved]:
        try:
            self.keep(r)
            yield r
        except BaseException as error:
            self._drive(_settle(r, error, on_error, self.policy))
            raise
        self._drive(_settle(r, None, on_error, self.policy))


class AsyncLedger(ledger.AsyncLedger):
    __doc__ = ledger.AsyncLedger.__doc__

    def reserve(
        self,
        principal: object,
        key: str,
        fingerprint: str,
        operation: str = "",
        lease: float | None = None,
        wait: float = 0.0,
        on_error: OnError = "release",
        route: str = "",
    ) -> AbstractAsyncContextManager[Reserved]:
        """See `Ledger.reserve`; here it is for `async with`."""
        return self._reserve(
            ClaimArguments(principal, key, fingerprint, operation, lease, wait, route=route), check_on_error(on_error)
        )

    def once(
        self,
        *,
        principal: object,
        key: object,
        fingerprint: str | Callable[..., str] | None = None,
        operation: str | None = None,
        lease: float | None = None,
        wait: float = 0.0,
        on_error: OnError = "release",
        recover: Callable[[Reservation], object] | None = None,
        encode: Callable[..., object] | None = None,
        decode: Callable[..., object] | None = None,
    ) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Coroutine[Any, Any, R]]]:
        """See `Ledger.once`; here it is for `async def` functions, and `recover` may be one too."""
        settings = Given(
            self.policy, principal, key, fingerprint, operation, lease, wait, on_error, recover, encode, decode
        )

        def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R]]:
            if isinstance(function, (classmethod, staticmethod)):
                return type(function)(decorate(function.__func__))
            once = Once(settings, function, asynchronous=True)

            @wraps(function)
            async def run(*args: P.args, **kwargs: P.kwargs) -> R:
                outcome = await self.claim(*once.claim_arguments(args, kwargs))
                if isinstance(outcome, Replay):
                    return once.value_of(outcome)  # type: ignore[no-any-return]  # what the function once returned
                async with self._hold(_reserved(outcome), on_error) as r:
                    told = _current.set(r)
                    try:
                        value: Any = recover(r) if recover is not None and r.taken_over else None
                        if inspect.isawaitable(value):
                            value = await value
                        if value is None:
                            value = await function(*args, **kwargs)
                    finally:
                        _current.reset(told)
                    r.response = once.answer(value)
                return value  # type: ignore[no-any-return]

            return run

        return decorate

    async def check(self, *, sample: int = SAMPLE, scratch: bool = True) -> Report:
        """See `Ledger.check`."""
        from . import doctor

        return await doctor.check_async(self, sample=sample, scratch=scratch)

    @asynccontextmanager
    async def _reserve(self, arguments: ClaimArguments, on_error: OnError) -> AsyncGenerator[Reserved]:
        async with self._hold(_reserved(await self.claim(*arguments)), on_error) as r:
            yield r

    @asynccontextmanager
    async def _hold(self, r: Reserved, on_error: OnError) -> AsyncGenerator[Reserved]:
        try:
            await self.keep(r)
            yield r
        except BaseException as error:
            await self._drive(_settle(r, error, on_error, self.policy))
            raise
        await self._drive(_settle(r, None, on_error, self.policy))


def _reserved(outcome: Outcome) -> Reserved:
    """Return the reservation, or raise what a claim found instead."""
    match outcome:
        case Reservation():
            return Reserved(outcome)
        case Replay(response, failed=True):
            raise PreviousAttemptFailed(response)
        case Replay(response):
            raise AlreadyCompleted(response)
        case InProgress(retry_after):
            raise KeyInProgress(retry_after)
        case _:
            raise KeyReused


def _settle(r: Reserved, error: BaseException | None, on_error: OnError, policy: Policy) -> Flow[None]:
    """Bring the row to the end that the work had. What goes wrong here must not hide the work's own end."""
    if r.hold.ended:  # fenced, which was told then; or settled by hand inside the block
        return
    try:
        if error is None:
            yield from flows.complete(r, _fitting(r.response or json_answer(r.result), policy), policy)
        elif isinstance(error, HoldForReview):
            yield from flows.leave(r, for_review=True)
        elif on_error == "hold":
            yield from flows.leave(r, for_review=False)
        elif on_error == "store" and isinstance(error, Exception) and not isinstance(error, IdempotencyError):
            yield from flows.fail(r, _fitting(json_failure(error), policy), policy)
        else:
            yield from flows.release(r, policy)
    except (FencedOut, LedgerUnavailable):
        pass  # the flow told it, and goes on in the background where that helps
    except Exception:
        logger.exception("the row of a finished attempt could not be settled")


def _fitting(response: StoredResponse, policy: Policy) -> StoredResponse:
    return response if len(response.body) <= policy.max_body else response.without_body("too_large")
