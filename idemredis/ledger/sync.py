"""The sync face of the ledger: calls, where `aio` awaits."""

from __future__ import annotations

import time
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
from ..core.settle import Ending, OnError, settle
from ..inspection import SAMPLE
from ..store import clients
from ..store.clients import Client
from ..store.evaluate import evaluate, raised
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
    """Claims, completes and replays operations by (principal, operation, key), over a sync redis-py client.

    Safe to share between threads and greenlets; a forked child may go on using it.

    Args:
        client: `redis.Redis`, `redis.RedisCluster`, one from Sentinel's `master_for`, or `fakeredis.FakeRedis`. Its
            timeouts and retries stay its own; `from_url` makes one with ours.
        policy: how long things last; see `Policy`.
        namespace: first part of every row's name.
        observers: called with each `Event`, in the thread where it happened; one that raises is logged once.
        log_keys: put raw keys and principals into events; otherwise only a digest.
        scripts: the Lua to run; for tests that break it on purpose.

    Raises:
        ConfigurationError: the client is of another kind, or a setting cannot work with it.
    """

    _client_for = staticmethod(clients.client)
    _check_client = staticmethod(clients.check_sync)
    _reservation_class = Reservation

    # One step each

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
            `Reservation`: run it, then complete, fail or release. `Replay`: it is done, return this response.
            `InProgress`: another attempt holds it. `Reused`: the key was used for something else.

        Raises:
            InvalidKey, InvalidPrincipal, ConfigurationError: nothing was sent.
            CorruptRow: the row is not one of ours; it stays as it is.
            LedgerUnavailable: do not run. Should the claim have been made, it is released in the background.
            NotDurable: fewer than `min_replicas` have it; it is released in the background.
        """
        return self._drive(self._claim_flow(principal, key, fingerprint, operation, lease, wait, takeover, route))

    def complete(self, r: Reservation, response: StoredResponse) -> None:
        """Store the response for every retry until the retention ends. Doing it again has the same effect.

        Raises:
            FencedOut: another attempt owns the row; nothing was changed.
            LedgerUnavailable: it is tried again in the background for 5 minutes, also past the lease; the caller may
                return its response. If it cannot be stored, a `completion_lost` event says so.
        """
        self._drive(flows.complete(r, response, self.policy))

    def fail(self, r: Reservation, response: StoredResponse) -> None:
        """Store a final failure: it is replayed, and the operation never run again.

        Raises:
            FencedOut: another attempt owns the row; nothing was changed.
            LedgerUnavailable: it is tried again in the background for 5 minutes, as for `complete`.
        """
        self._drive(flows.fail(r, response, self.policy))

    def release(self, r: Reservation) -> None:
        """Give up now: the next retry takes over at once, at generation + 1.

        Raises:
            FencedOut: another attempt owns the row; nothing was changed.
            LedgerUnavailable: it is tried again in the background; after the lease the row is stale anyway.
        """
        self._drive(flows.release(r, self.policy))

    def hold(self, r: Reservation, *, for_review: bool = False) -> None:
        """Leave the row pending until its lease ends; nothing is sent.

        Args:
            r: the reservation.
            for_review: emit `held_for_review`, since a person must look.
        """
        self._drive(flows.hold(r, for_review))

    def renew(self, r: Reservation) -> None:
        """Extend the lease to its full length from now.

        Raises:
            FencedOut: another attempt owns the row, or it is finished; nothing was changed.
            LedgerUnavailable: the lease may or may not have been extended.
        """
        self._drive(flows.renew(r, self.policy))

    def start_heartbeat(self, r: Reservation) -> None:
        """Renew the lease in the background, at a third of it, until it ends or `max_hold` has passed.

        One thread does so for all reservations of the ledger. Nothing happens where the policy has no heartbeat.
        """
        if self.policy.heartbeat:
            self._background.start_heartbeat(r.lease, partial(flows.heartbeat, r, self.policy))

    def checkpoint(self, r: Reservation, name: str, data: object = None) -> None:
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
        self._drive(self._checkpoint_flow(r, name, data))

    def read(self, principal: object, key: str, operation: str = "") -> Row | None:
        """Return the row, or None where there is none. Changes nothing.

        Raises:
            CorruptRow: it is not a row of ours.
            LedgerUnavailable: Redis did not answer.
        """
        return self._drive(flows.read(identify(self.namespace, principal, key, operation)))

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
    ) -> AbstractContextManager[Reservation]:
        """Hold the operation for a `with` block, and renew its lease while it runs; leaving it completes the row.

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
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Decorate a function so that it runs once a key: a duplicate call gets the first one's result.

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
                again. It returns what the function might have returned, to be stored and returned; None to run the
                function; or it raises `HoldForReview`.
            encode, decode: make a result JSON, and back. Without them a result is plain JSON, or of the dataclass or
                pydantic model that the return annotation names.

        Raises:
            ConfigurationError: at the decoration, a setting or function that cannot work (an `async def` needs
                `AsyncLedger.once`); at the call, arguments that are not JSON where no `fingerprint` is given.
            AlreadyCompleted: at the call, the result of the first one was not stored.
            PreviousAttemptFailed, KeyInProgress, KeyReused, LedgerUnavailable: at the call, as `reserve`.
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
                    return once.value_of(outcome)  # type: ignore[no-any-return]  # what the function once returned
                with self._work(reserved(outcome), on_error) as r:
                    with running(r):
                        value: Any = recover(r) if recover is not None and r.taken_over else None
                        if value is None:
                            value = function(*args, **kwargs)
                    r.response = once.response(value)
                return value  # type: ignore[no-any-return]

            return run

        return decorate

    def check(self, *, sample: int = SAMPLE, scratch: bool = True) -> Report:
        """Examine the server, the client and some rows, for a health endpoint: what `idemredis doctor` prints.

        Args:
            sample: rows to look at, at most.
            scratch: try the scripts on two rows of its own, which are removed; False changes nothing.
        """
        from ..inspection import doctor  # its import takes 10 ms, which few need

        return doctor.check(
            self.client, self.policy, self.namespace, self._wire.timeout, sample=sample, scratch=scratch
        )

    def settle(self, r: Reservation, ending: Ending) -> None:
        """Settle the row according to how the work ended. For doors; it never raises because of Redis."""
        self._drive(settle(r, ending, self.policy))

    def close(self) -> None:
        """Store and release what is still waiting for that, for at most about 2 s, and end the thread.

        Python does the same at exit. A client that `from_url` made is closed, one of the caller's stays open.
        """
        self._background.close()
        if self._made:
            self._client.close()

    @contextmanager
    def _reserve(self, arguments: ClaimArguments, on_error: OnError) -> Generator[Reservation]:
        with self._work(reserved(self.claim(*arguments)), on_error) as r:
            yield r

    @contextmanager
    def _work(self, r: Reservation, on_error: OnError) -> Generator[Reservation]:
        """Renew the lease while the block runs, then settle the row."""
        try:
            self.start_heartbeat(r)
            yield r
        except BaseException as error:
            self.settle(r, after_error(error, on_error))
            raise
        self.settle(r, completed(r))

    # Driving

    def _make_background(self, name: str) -> Background:
        return Background(self._evaluate, self._emit, name)

    def _save(self, r: Reservation, name: str, data: object) -> None:
        self.checkpoint(r, name, data)

    def _drive(self, flow: Flow[T]) -> T:
        """Run a flow's steps, one after the other, and return what it returns."""
        began = time.monotonic()
        result: Any
        try:
            step = next(flow)
            while True:
                try:
                    match step:
                        case Call():
                            result = raised(self._evaluate([step])[0])
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
            return end.value  # type: ignore[no-any-return]  # what the generator returns, which its type says

    def _evaluate(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Run scripts that have nothing to do with each other; an error is returned in the place of an outcome."""
        sent = time.monotonic()
        outcomes = evaluate(self._wire, calls, self._scripts, self.policy)
        for call, outcome in zip(calls, outcomes, strict=True):
            self._emit.timed(call.script, sent, outcome)
        return outcomes
