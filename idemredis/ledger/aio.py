"""The asyncio face of the ledger: awaits, where `sync` calls."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial, wraps
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from ..core import flows
from ..core.flows import Emit, Flow, InBackground, Sleep
from ..core.keys import identify
from ..core.operations import Call
from ..core.outcomes import InProgress, Replay, Reused, Row
from ..core.reservation import AsyncReservation, Reservation
from ..core.response import StoredResponse
from ..core.settle import Ending, OnError, settle
from ..inspection import SAMPLE
from ..store import clients
from ..store.clients import AsyncClient
from ..store.cluster import wire
from ..store.evaluate import evaluate_async, raised
from .base import BaseLedger, reserved
from .current import running
from .once import ClaimArguments, Once, OnceOptions, after_error, check_on_error, completed
from .task import AsyncBackground

if TYPE_CHECKING:
    from ..inspection.diagnosis import Report

__all__ = ["AsyncLedger"]

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


class AsyncLedger(BaseLedger[AsyncClient]):
    """Claims, completes and replays operations by (principal, operation, key), over an asyncio redis-py client.

    Its arguments, outcomes and errors are those of `Ledger`. Safe to share between tasks, and between event loops where
    `from_url` made the client. A claim that is cancelled while its reply is on the way is released in the background.

    Args:
        client: `redis.asyncio.Redis`, `redis.asyncio.RedisCluster`, one from asyncio Sentinel's `master_for`, or
            `fakeredis.FakeAsyncRedis`. Its timeouts and retries stay its own; `from_url` makes one with ours.
        policy: how long things last; see `Policy`.
        namespace: first part of every row's name.
        observers: called with each `Event`, in the event loop; one that raises is logged once.
        log_keys: put raw keys and principals into events; otherwise only a digest.
        scripts: the Lua to run; for tests that break it on purpose.

    Raises:
        ConfigurationError: the client is of another kind, or a setting cannot work with it.
    """

    _client_for = staticmethod(clients.async_client)
    _check_client = staticmethod(clients.check_async)
    _reservation_class = AsyncReservation
    _wires: Mapping[asyncio.AbstractEventLoop, Any] = MappingProxyType({})

    @property
    def client(self) -> Any:
        """The redis-py client that the ledger uses in the running event loop."""
        return self._wire_here().client

    def _wire_here(self) -> Any:
        """Return the way to Redis in the running event loop: a client of our own has connections in each."""
        if not self._made:
            return self._wire
        loop = asyncio.get_running_loop()
        if loop not in self._wires:
            running_on = {other: made for other, made in self._wires.items() if not other.is_closed()}
            self._wires = {**running_on, loop: wire(clients.clone(self._client), self._wire.timeout)}
        return self._wires[loop]

    # One step each

    async def claim(
        self,
        principal: object,
        key: str,
        fingerprint: str,
        operation: str = "",
        lease: float | None = None,
        wait: float = 0.0,
        takeover: bool = True,
        route: str = "",
    ) -> AsyncReservation | Replay | InProgress | Reused:
        """Reserve the operation for this attempt, before anything is changed elsewhere.

        Args:
            principal: whose key it is: a str, int or UUID that the server derived, never the client's word.
            key: 1 to 255 printable ASCII characters.
            fingerprint: digest of what is asked; see `fingerprint_request` and `fingerprint_value`.
            operation: third part of the row's identity.
            lease: seconds; by default the policy's.
            wait: seconds to wait for another attempt that is running, before `InProgress` is returned.
            takeover: False leaves a stale row to others (`InProgress` with `stale`).
            route: which endpoint or function this is, for people and metrics: a template such as `POST /orders/<id>`,
                never a concrete path. More than 64 bytes are shortened in the middle.

        Returns:
            `AsyncReservation`: run it, then complete, fail or release. `Replay`: it is done, return this response.
            `InProgress`: another attempt holds it. `Reused`: the key was used for something else.

        Raises:
            InvalidKey, InvalidPrincipal, ConfigurationError: nothing was sent.
            CorruptRow: the row is not one of ours; it stays as it is.
            LedgerUnavailable: do not run. Should the claim have been made, it is released in the background.
            NotDurable: fewer than `min_replicas` have it; it is released in the background.
        """
        outcome = await self._drive(
            self._claim_flow(principal, key, fingerprint, operation, lease, wait, takeover, route)
        )
        return cast(AsyncReservation | Replay | InProgress | Reused, outcome)

    async def complete(self, r: Reservation, response: StoredResponse) -> None:
        """Store the response for every retry until the retention ends. Doing it again has the same effect.

        Raises:
            FencedOut: another attempt owns the row; nothing was changed.
            LedgerUnavailable: it is tried again in the background for 5 minutes, also past the lease; the caller may
                return its response. If it cannot be stored, a `completion_lost` event says so.
        """
        await self._drive(flows.complete(r, response, self.policy))

    async def fail(self, r: Reservation, response: StoredResponse) -> None:
        """Store a final failure: it is replayed, and the operation never run again.

        Raises:
            FencedOut: another attempt owns the row; nothing was changed.
            LedgerUnavailable: it is tried again in the background for 5 minutes, as for `complete`.
        """
        await self._drive(flows.fail(r, response, self.policy))

    async def release(self, r: Reservation) -> None:
        """Give up now: the next retry takes over at once, at generation + 1.

        Raises:
            FencedOut: another attempt owns the row; nothing was changed.
            LedgerUnavailable: it is tried again in the background; after the lease the row is stale anyway.
        """
        await self._drive(flows.release(r, self.policy))

    async def hold(self, r: Reservation, *, for_review: bool = False) -> None:
        """Leave the row pending until its lease ends; nothing is sent.

        Args:
            r: the reservation.
            for_review: emit `held_for_review`, since a person must look.
        """
        await self._drive(flows.hold(r, for_review))

    async def renew(self, r: Reservation) -> None:
        """Extend the lease to its full length from now.

        Raises:
            FencedOut: another attempt owns the row, or it is finished; nothing was changed.
            LedgerUnavailable: the lease may or may not have been extended.
        """
        await self._drive(flows.renew(r, self.policy))

    async def start_heartbeat(self, r: Reservation) -> None:
        """Renew the lease in the background, at a third of it, until it ends or `max_hold` has passed.

        One task an event loop does so for all reservations of the ledger. Nothing happens where the policy has no
        heartbeat.
        """
        if self.policy.heartbeat:
            self._background.start_heartbeat(r.lease, partial(flows.heartbeat, r, self.policy))

    async def checkpoint(self, r: Reservation, name: str, data: object = None) -> None:
        """Save how far the work got, for whoever takes over, and extend the lease. The same as `r.checkpoint`.

        Args:
            r: the reservation.
            name: of the step that is done.
            data: JSON, at most 4096 bytes of it.

        Raises:
            ConfigurationError, TypeError, ValueError: the data does not fit, or is not JSON; nothing was sent.
            FencedOut: another attempt owns the row; nothing was changed.
            LedgerUnavailable: it may or may not have been saved.
        """
        await self._drive(self._checkpoint_flow(r, name, data))

    async def read(self, principal: object, key: str, operation: str = "") -> Row | None:
        """Return the row, or None where there is none. Changes nothing.

        Raises:
            CorruptRow: it is not a row of ours.
            LedgerUnavailable: Redis did not answer.
        """
        return await self._drive(flows.read(identify(self.namespace, principal, key, operation)))

    # Whole pieces of work

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
    ) -> AbstractAsyncContextManager[AsyncReservation]:
        """Hold the operation for an `async with` block, renewing its lease; leaving the block completes the row.

        Set `result` (JSON) or `response` on what the block yields, to be stored; without either, `null` is stored. What
        cannot be stored leaves a tombstone. An error at the completion itself is logged and emitted, never raised: the
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
        arguments = ClaimArguments(principal, key, fingerprint, operation, lease, wait, route=route)
        return self._reserve(arguments, check_on_error(on_error))

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
        """Decorate an `async def` function so that it runs once a key: a duplicate call gets the first one's result.

        The caller always gets the function's own value, also when it cannot be stored: then the row is a tombstone
        (`not_encodable`, `too_large`), and duplicates get `AlreadyCompleted` whose `response.omitted` says why. The
        row's route is the function's name.

        Args:
            principal, key, fingerprint: constants, or functions of the call's arguments. Such a function is given
                those arguments that its parameters name; one with other names gets all of them, in order. The
                default fingerprint is of all arguments, defaults applied, `self` and `cls` left out.
            operation: by default the function's module and qualified name; name it yourself where the function may
                move, for a moved one starts anew.
            lease, wait: as for `claim`.
            on_error: as for `reserve`; it also covers `recover`.
            recover: called with the reservation when an earlier attempt did not finish, before the function is run
                again; it may be an `async def`. It returns what the function might have returned, to be stored and
                returned; None to run the function; or it raises `HoldForReview`.
            encode, decode: make a result JSON, and back. Without them a result is plain JSON, or of the dataclass or
                pydantic model that the return annotation names.

        Raises:
            ConfigurationError: at the decoration, a setting or function that cannot work (a plain function needs
                `Ledger.once`); at the call, arguments that are not JSON where no `fingerprint` is given.
            AlreadyCompleted: at the call, the result of the first one was not stored.
            PreviousAttemptFailed, KeyInProgress, KeyReused, LedgerUnavailable: at the call, as `reserve`.
        """
        options = OnceOptions(
            self.policy, principal, key, fingerprint, operation, lease, wait, on_error, recover, encode, decode
        )

        def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R]]:
            if isinstance(function, (classmethod, staticmethod)):
                return type(function)(decorate(function.__func__))
            once = Once(options, function, asynchronous=True)

            @wraps(function)
            async def run(*args: P.args, **kwargs: P.kwargs) -> R:
                outcome = await self.claim(*once.claim_arguments(args, kwargs))
                if isinstance(outcome, Replay):
                    return once.value_of(outcome)  # type: ignore[no-any-return]  # what the function once returned
                async with self._work(reserved(outcome), on_error) as r:
                    with running(r):
                        value: Any = recover(r) if recover is not None and r.taken_over else None
                        if inspect.isawaitable(value):
                            value = await value
                        if value is None:
                            value = await function(*args, **kwargs)
                    r.response = once.response(value)
                return value  # type: ignore[no-any-return]

            return run

        return decorate

    async def check(self, *, sample: int = SAMPLE, scratch: bool = True) -> Report:
        """Examine the server, the client and some rows, for a health endpoint: what `idemredis doctor` prints.

        Args:
            sample: rows to look at, at most.
            scratch: try the scripts on two rows of its own, which are removed; False changes nothing.
        """
        from ..inspection import doctor  # its import takes 10 ms, which few need

        return await doctor.check_async(
            self.client, self.policy, self.namespace, self._wire.timeout, sample=sample, scratch=scratch
        )

    async def settle(self, r: Reservation, ending: Ending) -> None:
        """Settle the row according to how the work ended. For doors; it never raises because of Redis."""
        await self._drive(settle(r, ending, self.policy))

    async def close(self) -> None:
        """Store and release what the running event loop still waits for, for at most about 2 s, and end its task.

        `asyncio.run` does the same when it ends. A client that `from_url` made is closed, the caller's own stays open.
        """
        await self._background.close()
        if self._made:
            await self.client.aclose()

    @asynccontextmanager
    async def _reserve(self, arguments: ClaimArguments, on_error: OnError) -> AsyncGenerator[AsyncReservation]:
        async with self._work(reserved(await self.claim(*arguments)), on_error) as r:
            yield r

    @asynccontextmanager
    async def _work(self, r: Reservation, on_error: OnError) -> AsyncGenerator[AsyncReservation]:
        """Renew the lease while the block runs, then settle the row."""
        try:
            await self.start_heartbeat(r)
            yield cast(AsyncReservation, r)
        except BaseException as error:
            await self.settle(r, after_error(error, on_error))
            raise
        await self.settle(r, completed(r))

    # Driving

    def _make_background(self, name: str) -> AsyncBackground:
        return AsyncBackground(self._evaluate, self._emit, name)

    def _save(self, r: Reservation, name: str, data: object) -> Coroutine[Any, Any, None]:
        return self.checkpoint(r, name, data)

    async def _drive(self, flow: Flow[T]) -> T:
        """Run a flow's steps, one after the other, and return what it returns."""
        began = time.monotonic()
        result: Any
        try:
            step = next(flow)
            while True:
                try:
                    match step:
                        case Call():
                            result = raised((await self._evaluate([step]))[0])
                        case Emit():
                            self._emit(step, began)
                            result = None
                        case Sleep():
                            await asyncio.sleep(step.seconds)
                            result = time.monotonic()
                        case InBackground():
                            self._background.run(step)
                            result = None
                except BaseException as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(result)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # what the generator returns, which its type says

    async def _evaluate(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Run scripts that have nothing to do with each other; an error is returned in the place of an outcome."""
        sent = time.monotonic()
        outcomes = await evaluate_async(self._wire_here(), calls, self._scripts, self.policy)
        for call, outcome in zip(calls, outcomes, strict=True):
            self._emit.timed(call.script, sent, outcome)
        return outcomes
