"""The sync ledger; `aio` has the same methods as coroutines."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ..core import flows
from ..core.flows import Emit, Flow, InBackground, Sleep
from ..core.keys import identify
from ..core.operations import Call
from ..core.outcomes import Outcome, Replay, Row
from ..core.reservation import Reservation
from ..core.response import StoredResponse
from ..core.settle import Ending, OnError, of_effect, settle
from ..errors import EffectDone, FencedOut
from ..inspection import PINGED, SAMPLE
from ..store import clients
from ..store.clients import Client
from ..store.evaluate import evaluate, evaluate_call, raised
from .base import BaseLedger, reserved
from .current import running
from .once import ClaimArguments, Once, OnceOptions, after_error, check_on_error, completed
from .thread import Background

if TYPE_CHECKING:
    from ..inspection.diagnosis import Report

__all__ = ["Ledger"]

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


class Ledger(BaseLedger[Client]):
    """Claim, complete and replay operations by (principal, operation, key), over a sync redis-py client.

    A ledger can be shared between threads and greenlets, and a forked child can keep using it.

    Args:
        client: `redis.Redis`, `redis.RedisCluster`, one from Sentinel's `master_for`, or `fakeredis.FakeRedis`. It
            keeps its own timeouts and retries; `from_url` makes a client with suitable ones.
        policy: lease, retention and other limits; defaults to `Policy()`.
        namespace: first part of every row's name; use one for each service.
        observers: called with each `Event`, in the thread that emits it; the first exception of each is logged.
        log_keys: include raw keys and principals in events; by default they have only a digest.
        scripts: the Lua scripts to run; for tests only.

    Raises:
        ConfigurationError: the client is of another kind, or a setting does not work with it.
    """

    _client_for = staticmethod(clients.client)
    _check_client = staticmethod(clients.check_sync)
    _reservation_class = Reservation

    # Single steps

    def claim(
        self,
        principal: object,
        key: str,
        fingerprint: str,
        operation: str = "",
        lease: float | None = None,
        wait: float = 0.0,
        takeover: bool = True,
        route: str = "",
    ) -> Outcome:
        """Reserve the operation for this attempt; call it before the work changes anything.

        If the process dies afterwards, the row becomes stale when the lease ends, and the next claim takes it over.

        Args:
            principal: whose key it is: a str, int or UUID that the server derived, never a value the client chose.
            key: 1 to 255 printable ASCII characters.
            fingerprint: digest of the request; `fingerprint_request` and `fingerprint_value` compute one.
            operation: optional third part of the row's identity.
            lease: seconds; defaults to the policy's. Must be shorter than the policy's retention.
            wait: seconds to wait for a running attempt to finish before returning `InProgress`.
            takeover: False leaves a stale row to others and returns `InProgress` with `stale` set.
            route: the endpoint or function, for people and metrics: a template such as `POST /orders/<id>`, never a
                concrete path. Routes longer than 64 bytes are shortened in the middle.

        Returns:
            `Reservation`: run the operation, then complete, fail or release it. `Replay`: the operation is finished;
            return its response. `InProgress`: another attempt holds the row. `Reused`: the key was used for a
            different request.

        Raises:
            InvalidKey, InvalidPrincipal, ConfigurationError: an argument is invalid; nothing was sent.
            CorruptRow: the row was not written by this ledger, or was edited; it is left unchanged.
            LedgerUnavailable: do not run the operation. If the claim was made after all, it is released in the
                background.
            NotDurable: fewer than `min_replicas` replicas have the claim; it is released in the background.
        """
        return self._drive(self._claim_flow(principal, key, fingerprint, operation, lease, wait, takeover, route))

    def complete(self, r: Reservation, response: StoredResponse) -> None:
        """Store the response, so that every retry gets it until the retention ends.

        Calling it again has the same effect. If the process dies before the response is stored, the row becomes stale
        when the lease ends, and the next claim takes it over.

        Args:
            r: the reservation.
            response: the response to store.

        Raises:
            FencedOut: another attempt owns the row, or the row is gone; nothing was changed.
            LedgerUnavailable: the caller may return its response. The completion is retried in the background for 5
                minutes, even past the lease; if it cannot be stored, a `completion_lost` event is emitted.
            NotDurable: fewer than `min_replicas` replicas have the response; it is retried in the same way.
        """
        self._drive(flows.complete(r, response, self.policy))

    def fail(self, r: Reservation, response: StoredResponse) -> None:
        """Store a final failure, which is replayed to every retry until the retention ends.

        The operation is not run again within the retention. Calling it again has the same effect. If the process dies
        before the failure is stored, the row becomes stale when the lease ends, and the next claim takes it over.

        Args:
            r: the reservation.
            response: the failure to store.

        Raises:
            FencedOut: another attempt owns the row, or the row is gone; nothing was changed.
            LedgerUnavailable: the failure is retried in the background for 5 minutes, even past the lease; if it
                cannot be stored, a `completion_lost` event is emitted.
            NotDurable: fewer than `min_replicas` replicas have the failure; it is retried in the same way.
        """
        self._drive(flows.fail(r, response, self.policy))

    def release(self, r: Reservation) -> None:
        """Give the row up, so that the next claim takes it over at once, at the next generation.

        Args:
            r: the reservation.

        Raises:
            FencedOut: another attempt owns the row, or the row is gone or finished; nothing was changed.
            LedgerUnavailable: the release is retried in the background for one lease; then the row is stale anyway.
        """
        self._drive(flows.release(r, self.policy))

    def hold(self, r: Reservation, *, for_review: bool = False) -> None:
        """Stop renewing the lease and leave the row pending until the lease ends.

        Nothing is sent to Redis. When the lease has ended, the next claim takes the row over.

        Args:
            r: the reservation.
            for_review: emit `held_for_review`, so that a person looks at the row.
        """
        self._drive(flows.hold(r, for_review))

    def renew(self, r: Reservation) -> None:
        """Extend the lease to its full length from now.

        Args:
            r: the reservation.

        Raises:
            FencedOut: another attempt owns the row, or the row is gone or finished; nothing was changed.
            LedgerUnavailable: the lease may or may not have been extended.
        """
        self._drive(flows.renew(r, self.policy))

    def start_heartbeat(self, r: Reservation) -> None:
        """Renew the lease in the background until the attempt ends.

        The lease is renewed each time a third of it has passed, for at most the policy's `max_hold` seconds. One
        thread does this for all reservations of the ledger. It does nothing if the policy's `heartbeat` is False.

        Args:
            r: the reservation.
        """
        if self.policy.heartbeat:
            r.lease.heartbeat_due = r.lease.first_heartbeat_at
            self._background.start_heartbeat(r.lease, partial(flows.heartbeat, weakref.ref(r), self.policy), r.row)

    def checkpoint(self, r: Reservation, name: str, data: object = None) -> None:
        """Save how far the work got, for the attempt that takes over after a crash, and extend the lease.

        `r.checkpoint` does the same. A row keeps its latest checkpoint only; the next attempt reads it as
        `last_checkpoint`.

        Args:
            r: the reservation.
            name: name of the step that is done.
            data: a JSON value of at most 4096 bytes.

        Raises:
            ConfigurationError, TypeError, ValueError: the data is too large or not JSON; nothing was sent.
            FencedOut: another attempt owns the row, or the row is gone or finished; nothing was changed.
            LedgerUnavailable: the checkpoint may or may not have been saved.
        """
        self._drive(self._checkpoint_flow(r, name, data))

    def read(self, principal: object, key: str, operation: str = "") -> Row | None:
        """Return the row, or None if there is none, without changing anything.

        Args:
            principal: whose key it is.
            key: the key that the client sent.
            operation: third part of the row's identity, if it has one.

        Raises:
            InvalidKey, InvalidPrincipal, ConfigurationError: an argument is invalid; nothing was sent.
            CorruptRow: the row was not written by this ledger, or was edited.
            LedgerUnavailable: Redis was unreachable, refused the call, or was too slow.
        """
        return self._drive(flows.read(identify(self.namespace, principal, key, operation)))

    # Whole operations

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
    ) -> AbstractContextManager[Reservation]:
        """Hold the operation for a `with` block: renew its lease during the block and complete the row at its end.

        Set `result` (a JSON value) or `response` on the yielded reservation to store it; otherwise `null` is stored. A
        result that cannot be stored leaves a tombstone. If Redis cannot be reached at the end of the block, that is
        logged and emitted, never raised, since the work is done; the completion is retried in the background. If the
        process dies inside the block, the row becomes stale when the lease ends, and the next attempt takes it over.

        Args:
            principal: whose key it is: a str, int or UUID that the server derived, never a value the client chose.
            key: 1 to 255 printable ASCII characters.
            fingerprint: digest of the request; `fingerprint_request` and `fingerprint_value` compute one.
            operation: optional third part of the row's identity.
            lease: seconds; defaults to the policy's.
            wait: seconds to wait for a running attempt to finish before raising `KeyInProgress`.
            on_error: what an exception does to the row: `release` (the next retry runs at once), `hold` (the row
                stays pending until its lease ends), or `store` (a final failure that is not run again). An
                `IdempotencyError`, or an exception that is not an `Exception` (such as a cancellation), is never
                stored. After `HoldForReview` the row stays pending, and `held_for_review` is emitted.
            route: the endpoint or function, for people and metrics; at most 64 bytes of it are kept.

        Raises:
            AlreadyCompleted, PreviousAttemptFailed: an earlier attempt finished or failed; `response` has its result.
            KeyInProgress: another attempt is running; `retry_after` has the seconds left on its lease.
            KeyReused: the key was used for a different request.
            LedgerUnavailable, NotDurable, CorruptRow, InvalidKey, InvalidPrincipal, ConfigurationError: as `claim`
                raises them; the block does not run.
            FencedOut: at the end of a block that raised nothing: another attempt owns the row, or the row is gone.
                Do not acknowledge the message: the other attempt decides its result.
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
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Decorate a function so that it runs once per key; a duplicate call returns the stored result.

        The caller gets the function's own return value, even if it cannot be stored. In that case the row is a
        tombstone, and duplicate calls raise `AlreadyCompleted`, whose `response.omitted` is `not_encodable` or
        `too_large`. If another attempt has taken the row over, the caller gets what a duplicate call gets, so that all
        callers agree; without a stored result it gets `FencedOut`. The row's route is the function's name. If the
        process dies inside the function, the row becomes stale when the lease ends, and the next call takes it over.

        Args:
            principal, key, fingerprint: constants, or functions of the call's arguments. A function receives the
                arguments that its parameters name; if its parameters have other names, it receives all arguments in
                order. The default fingerprint covers all arguments, with defaults applied, except `self` and `cls`.
            operation: defaults to the function's module and qualified name. Set it if the function may be moved or
                renamed; otherwise that starts new rows.
            lease: seconds; defaults to the policy's.
            wait: seconds to wait for a running attempt to finish before raising `KeyInProgress`.
            on_error: what an exception does to the row, `release`, `hold` or `store`, as in `reserve`; it also
                applies to `recover`.
            recover: called with the reservation on a takeover, before the function is run again. It returns the
                result that the earlier attempt would have returned, which is then stored and returned; or None to run
                the function; or it raises `HoldForReview`.
            encode, decode: convert a result to a JSON value and back. Without them, a result is plain JSON, or the
                dataclass or pydantic model that the return annotation names.

        Raises:
            ConfigurationError: at the decoration: a setting or the function is not supported (an `async def` needs
                `AsyncLedger.once`). At the call: the arguments are not JSON, and no `fingerprint` is given.
            AlreadyCompleted: at the call: an earlier call finished, and its result was not stored.
            PreviousAttemptFailed, KeyInProgress, KeyReused, LedgerUnavailable, NotDurable, CorruptRow, InvalidKey,
                InvalidPrincipal: at the call, as `reserve` raises them; the function does not run.
            FencedOut: at the call: another attempt owns the row, or the row is gone, and there is no stored result.
        """
        options = OnceOptions(
            self.policy, principal, key, fingerprint, operation, lease, wait, on_error, recover, encode, decode
        )

        def decorate(function: Callable[P, R]) -> Callable[P, R]:
            if isinstance(function, (classmethod, staticmethod)):
                return type(function)(decorate(function.__func__))
            once = Once(options, function, asynchronous=False)

            @wraps(function)
            def run(*args: P.args, **kwargs: P.kwargs) -> R:
                outcome = self.claim(*once.claim_arguments(args, kwargs))
                if isinstance(outcome, Replay):
                    return once.value_of(outcome)  # type: ignore[no-any-return]  # the stored result of an earlier call
                r = reserved(outcome)
                try:
                    with self._work(r, on_error):
                        with running(r):
                            value: Any = recover(r) if recover is not None and r.taken_over else None
                            if value is None:
                                value = function(*args, **kwargs)
                        r.response = once.response(value)
                except FencedOut:
                    if not r.lease.fenced or (done := self._drive(flows.look_again(r))) is None:
                        raise
                    return once.value_of(done)  # type: ignore[no-any-return]
                except EffectDone as found:
                    if of_effect(found, r) is None:  # of another row
                        raise
                    return once.result_of(found.response)  # type: ignore[no-any-return]
                return once.returned(value)  # type: ignore[no-any-return]

            return run

        return decorate

    def ping(self) -> float:
        """Run one script that only reads, and return how long it took in seconds; for a health endpoint.

        It needs no more rights than the application has, and is one round trip. It does not tell whether Redis accepts
        writes, which a full server or a replica refuses, or whether the server is fit for the ledger: see `check`.

        Raises:
            LedgerUnavailable: Redis was unreachable, refused the call, or was too slow.
        """
        began = time.monotonic()
        self._drive(flows.read(identify(self.namespace, PINGED, PINGED)))
        return time.monotonic() - began

    def check(self, *, sample: int = SAMPLE, scratch: bool = True) -> Report:
        """Check the server, the client and a sample of rows, as `idemredis doctor` does.

        An unreachable server is a finding of the report, not an exception.

        Args:
            sample: how many rows to look at, at most.
            scratch: run the scripts on two scratch rows, which are removed afterwards; False writes nothing.
        """
        from ..inspection import doctor  # imported here, since it takes 10 ms and few callers need it

        return doctor.check(
            self.client, self.policy, self.namespace, self._wire.timeout, sample=sample, scratch=scratch
        )

    def settle(self, r: Reservation, ending: Ending) -> None:
        """Settle the row according to how the work ended; for framework adapters.

        Errors are logged and emitted, never raised. If Redis cannot be reached, a completion is retried in the
        background, as in `complete`.

        Args:
            r: the reservation; nothing is done if it has ended already.
            ending: what to do with the row.
        """
        self._drive(settle(r, ending, self.policy))

    def close(self) -> None:
        """Flush pending completions and releases for at most about 2 s, and stop the background thread.

        This also happens at interpreter exit. A completion that cannot be stored in time is lost: `completion_lost` is
        emitted, and a retry runs the operation again. A client made by `from_url` is closed; the caller's stays open.
        """
        self._background.close()
        if self._owns_client:
            self._client.close()

    @contextmanager
    def _reserve(self, arguments: ClaimArguments, on_error: OnError) -> Generator[Reservation]:
        with self._work(reserved(self.claim(*arguments)), on_error) as r:
            yield r

    @contextmanager
    def _work(self, r: Reservation, on_error: OnError) -> Generator[Reservation]:
        """Renew the lease while the block runs, then settle the row; raise `FencedOut` if another attempt owns it."""
        try:
            self.start_heartbeat(r)
            yield r
        except BaseException as error:
            self.settle(r, after_error(error, on_error, r))
            raise
        self.settle(r, completed(r))
        flows.raise_if_fenced(r)

    # Driving

    def _make_background(self, name: str) -> Background:
        return Background(self._evaluate, self._emit, name, self._wire.place)

    def _save(self, r: Reservation, name: str, data: object) -> None:
        self.checkpoint(r, name, data)

    def _drive(self, flow: Flow[T]) -> T:
        """Run a flow's steps one after the other, and return the flow's result."""
        began = time.monotonic()
        result: Any
        try:
            step = next(flow)
            while True:
                try:
                    match step:
                        case Call():
                            sent = time.monotonic()
                            outcome = evaluate_call(self._wire, step, self._scripts, self.policy)
                            if self._emit.timers:
                                self._emit.timed(step.script, sent, outcome)
                            result = raised(outcome)
                        case Emit():
                            self._emit(step, began)
                            result = None
                        case Sleep():
                            time.sleep(step.seconds)
                            result = time.monotonic()
                        case InBackground():
                            self._background.run(step)
                            result = None
                except BaseException as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(result)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # the generator's return value has type T

    def _evaluate(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Run independent scripts; a call that failed has its error in place of an outcome."""
        sent = time.monotonic()
        outcomes = evaluate(self._wire, calls, self._scripts, self.policy)
        for call, outcome in zip(calls, outcomes, strict=True):
            self._emit.timed(call.script, sent, outcome)
        return outcomes
