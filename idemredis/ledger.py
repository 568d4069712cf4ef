"""`Ledger` and `AsyncLedger`: run a call, drive a flow, tell what happened. No decisions, so the two cannot drift."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, Self, TypeVar

from redis.exceptions import NoScriptError

from . import clients, flows
from .background import AsyncBackground, Background
from .clients import ERRORS, AsyncClient, Client
from .cluster import routed, was_redirected
from .errors import ConfigurationError, LedgerUnavailable
from .events import Observer, Teller
from .flows import Flow, Later, Outcome, Sleep, Tell
from .keys import identify, valid_route
from .operations import Call, Reservation, Row
from .policy import Policy, check_lease, check_seconds
from .responses import StoredResponse
from .scripts import Script, load

__all__ = ["AsyncLedger", "Ledger"]

T = TypeVar("T")
C = TypeVar("C")

MAX_CHECKPOINT = 4096
"""Bytes of a checkpoint's JSON: enough for ids and amounts, and small enough to be written often."""


class _Base(Generic[C]):
    """What both ledgers have: how they are made, and checked arguments made into flows."""

    _client_for: Callable[[str, float], C]
    _check_client: Callable[[object], None]
    _make_background: Callable[[Any, Teller, str], Any]
    _run_all: Any

    def __init__(
        self,
        client: C,
        policy: Policy | None = None,
        namespace: str = "idem",
        observers: Iterable[Observer] = (),
        *,
        log_keys: bool = False,
        scripts: Mapping[str, Script] | None = None,
    ) -> None:
        self._check_client(client)
        if not isinstance(namespace, str) or not namespace:
            raise ConfigurationError(f"namespace must be a str that is not empty, not {namespace!r}")
        self._client: Any = client
        self._cluster = routed(client) if clients.is_cluster(client) else None
        self._made = False  # by us, so that it is ours to close
        self.policy = Policy() if policy is None else policy
        self.namespace = namespace
        self._scripts = load() if scripts is None else scripts
        self._tell = Teller(observers, log_keys)
        self._background = self._make_background(self._run_all, self._tell, f"idemredis {namespace}")
        self._check_replicas()

    @classmethod
    def from_url(
        cls,
        url: str,
        policy: Policy | None = None,
        namespace: str = "idem",
        observers: Iterable[Observer] = (),
        *,
        socket_timeout: float = clients.SOCKET_TIMEOUT,
        log_keys: bool = False,
        scripts: Mapping[str, Script] | None = None,
    ) -> Self:
        """Make a ledger and its client from `redis://`, `rediss://`, `unix://`, or `memory://` (this process alone).

        `memory://NAME` is one store for every ledger of the process that names it; `memory://` is a new one.

        Args:
            socket_timeout: seconds to wait for an answer; a call that times out is asked once more.

        Raises:
            ConfigurationError: the URL cannot be used, or `memory://` lacks its extra.
        """
        client = cls._client_for(url, socket_timeout)
        ledger = cls(client, policy, namespace, observers, log_keys=log_keys, scripts=scripts)
        ledger._made = True
        return ledger

    @property
    def client(self) -> Any:
        """The client that the ledger uses."""
        return self._client

    def _check_replicas(self) -> None:
        if not self.policy.min_replicas:
            return
        if self._cluster is not None:
            raise ConfigurationError(
                f"min_replicas={self.policy.min_replicas} cannot be promised on a cluster: WAIT must follow the script "
                "on its own node's connection; set min_replicas=0"
            )
        timeout = clients.socket_timeout(self._client)
        if timeout is not None and self.policy.replica_timeout >= timeout:
            raise ConfigurationError(
                f"replica_timeout must be shorter than the client's socket_timeout "
                f"(replica_timeout={self.policy.replica_timeout:g} s, socket_timeout={timeout:g} s)"
            )

    def _claim(
        self,
        principal: object,
        key: object,
        fingerprint: str,
        operation: str,
        lease: float | None,
        wait: float,
        takeover: bool,
        route: str,
    ) -> Flow[Outcome]:
        identity = identify(self.namespace, principal, key, operation)
        if not isinstance(fingerprint, str) or not fingerprint:
            raise ConfigurationError(f"fingerprint must be a str that is not empty, not {fingerprint!r}")
        if lease is None:
            lease = self.policy.lease
        else:
            check_lease(lease, self.policy.retention)
        if wait:
            check_seconds("wait", wait)
        return flows.claim(
            identity,
            os.urandom(8).hex(),
            fingerprint,
            lease=lease,
            wait=wait,
            takeover=takeover,
            policy=self.policy,
            created_at=time.time(),
            route=valid_route(route),
        )

    def _checkpoint(self, r: Reservation, name: str, data: object) -> Flow[None]:
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"a checkpoint's name must be a str that is not empty, not {name!r}")
        text = json.dumps(data, separators=(",", ":"), allow_nan=False)
        if len(text) > MAX_CHECKPOINT:
            raise ConfigurationError(
                f"checkpoint {name!r} has {len(text)} bytes of JSON; at most {MAX_CHECKPOINT} fit: keep ids, not data"
            )
        return flows.checkpoint(r, name, text, self.policy)


class Ledger(_Base[Client]):
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
    _make_background = Background

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
            `Reservation`: run it, then complete, fail or release. `Replay`: it is done, give this answer.
            `InProgress`: another attempt holds it. `Reused`: the key was used for something else.

        Raises:
            InvalidKey, InvalidPrincipal, ConfigurationError: nothing was sent.
            CorruptRow: the row is not one of ours; it stays as it is.
            LedgerUnavailable: do not run. Should the claim have been made, it is released in the background.
            NotDurable: fewer than `min_replicas` have it; it is released in the background.
        """
        return self._drive(self._claim(principal, key, fingerprint, operation, lease, wait, takeover, route))

    def complete(self, r: Reservation, response: StoredResponse) -> None:
        """Store the answer for every retry until the retention ends. Doing it again has the same effect.

        Raises:
            FencedOut: another attempt owns the row; nothing was changed.
            LedgerUnavailable: it goes on being tried in the background for 5 minutes, also past the lease; the
                caller may give its answer. If it cannot be stored, a `completion_lost` event says so.
        """
        self._drive(flows.complete(r, response, self.policy))

    def fail(self, r: Reservation, response: StoredResponse) -> None:
        """Store a final failure: it is replayed, and the operation never run again. Raises as `complete` does."""
        self._drive(flows.fail(r, response, self.policy))

    def release(self, r: Reservation) -> None:
        """Give up now: the next retry takes over at once, at generation + 1.

        Raises:
            FencedOut: another attempt owns the row; nothing was changed.
            LedgerUnavailable: it is tried again in the background; after the lease the row is stale anyway.
        """
        self._drive(flows.release(r, self.policy))

    def leave(self, r: Reservation, *, for_review: bool = False) -> None:
        """Leave the row pending until its lease ends; nothing is sent. `for_review` tells that a person must look."""
        self._drive(flows.leave(r, for_review))

    def renew(self, r: Reservation) -> None:
        """Extend the lease to its full length from now.

        Raises:
            FencedOut: another attempt owns the row, or it is finished; nothing was changed.
            LedgerUnavailable: the lease may or may not have been extended.
        """
        self._drive(flows.renew(r, self.policy))

    def keep(self, r: Reservation) -> None:
        """Renew the lease in the background, at a third of it, until it ends or `max_hold` has passed.

        One thread does so for all reservations of the ledger. Nothing happens where the policy has no heartbeat.
        """
        if self.policy.heartbeat:
            self._background.keep(r.hold, partial(flows.heartbeat, r, self.policy))

    def checkpoint(self, r: Reservation, name: str, data: object = None) -> None:
        """Note how far the work got, for whoever takes over, and extend the lease.

        Args:
            name: of the step that is done.
            data: JSON, at most 4096 bytes of it.

        Raises:
            ConfigurationError, TypeError, ValueError: the data does not fit, or is not JSON; nothing was sent.
            FencedOut: another attempt owns the row; nothing was changed.
            LedgerUnavailable: it may or may not have been noted.
        """
        self._drive(self._checkpoint(r, name, data))

    def read(self, principal: object, key: str, operation: str = "") -> Row | None:
        """Return the row, or None where there is none. Changes nothing.

        Raises:
            CorruptRow: it is not a row of ours.
            LedgerUnavailable: Redis did not answer.
        """
        return self._drive(flows.read(identify(self.namespace, principal, key, operation)))

    def close(self) -> None:
        """Store and release what is still waiting for that, for at most about 2 s, and end the thread.

        Python does the same at exit. A client that `from_url` made is closed, one of the caller's stays open.
        """
        self._background.close()
        if self._made:
            self._client.close()

    def _drive(self, flow: Flow[T]) -> T:
        began = time.monotonic()
        result: Any
        try:
            step = next(flow)
            while True:
                try:
                    match step:
                        case Call():
                            result = self._run(step)
                        case Tell():
                            self._tell(step, began)
                            result = None
                        case Sleep():
                            time.sleep(step.seconds)
                            result = time.monotonic()
                        case Later():
                            self._background.begin(step)
                            result = None
                except BaseException as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(result)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # what the generator returns, which its type says

    def _run(self, call: Call[Any]) -> Any:
        if call.durable and self.policy.min_replicas:
            return _outcome(self._run_all([call])[0])
        script = self._scripts[call.script]
        sent = time.monotonic()
        execute = (self._cluster or self._client).execute_command
        try:
            try:
                reply = execute("EVALSHA", script.sha, 1, call.row, *call.args, NEVER_DECODE=True)
            except NoScriptError:
                reply = execute("EVAL", script.text, 1, call.row, *call.args, NEVER_DECODE=True)
        except ERRORS as error:
            unserved = clients.ours(error, time.monotonic() - sent)
            self._tell.timed(call.script, sent, unserved)
            raise unserved from error
        outcome = call.outcome(reply, sent)
        self._tell.timed(call.script, sent, outcome)
        return outcome

    def _run_all(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Run calls that have nothing to do with each other, in one round trip; errors come back as answers."""
        if self._cluster is None:
            return self._run_together(self._client, calls)
        answers: dict[int, Any] = {}
        for client, places in self._cluster.nodes(calls):  # a cluster's own pipeline refuses EVALSHA
            told = self._run_together(client, [calls[i] for i in places])
            answers |= zip(places, told, strict=True)
            if any(isinstance(answer, LedgerUnavailable) and answer.unknown for answer in told):
                self._cluster.mend(calls[places[0]].row)
        return [
            clients.attempt(self._run, call) if i not in answers or was_redirected(answers[i]) else answers[i]
            for i, call in enumerate(calls)
        ]

    def _run_together(self, client: Any, calls: Sequence[Call[Any]]) -> list[Any]:
        began = time.monotonic()
        batch = clients.Batch(calls, self._scripts, self.policy)
        while commands := batch.commands():
            pipeline = client.pipeline(transaction=False)
            for words in commands:
                pipeline.execute_command(*words, NEVER_DECODE=True)
            sent = time.monotonic()
            try:
                replies = pipeline.execute(raise_on_error=False)
            except ERRORS as error:
                replies = [error] * len(commands)
            batch.receive(replies, sent)
        for call, answer in zip(calls, batch.answers, strict=True):
            self._tell.timed(call.script, began, answer)
        return batch.answers


class AsyncLedger(_Base[AsyncClient]):
    """`Ledger` with `await`, over `redis.asyncio.Redis` and its like. Arguments, outcomes and errors are the same.

    A claim that is cancelled while its answer is on the way is released in the background.
    """

    _client_for = staticmethod(clients.async_client)
    _check_client = staticmethod(clients.check_async)
    _make_background = AsyncBackground
    _twins: Mapping[asyncio.AbstractEventLoop, Any] = MappingProxyType({})

    @property
    def client(self) -> Any:
        """The client that the ledger uses in the running event loop."""
        if not self._made:
            return self._client
        loop = asyncio.get_running_loop()
        if loop not in self._twins:
            going = {other: twin for other, twin in self._twins.items() if not other.is_closed()}
            self._twins = {**going, loop: clients.twin(self._client)}
        return self._twins[loop]

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
    ) -> Outcome:
        """See `Ledger.claim`."""
        return await self._drive(self._claim(principal, key, fingerprint, operation, lease, wait, takeover, route))

    async def complete(self, r: Reservation, response: StoredResponse) -> None:
        """See `Ledger.complete`."""
        await self._drive(flows.complete(r, response, self.policy))

    async def fail(self, r: Reservation, response: StoredResponse) -> None:
        """See `Ledger.fail`."""
        await self._drive(flows.fail(r, response, self.policy))

    async def release(self, r: Reservation) -> None:
        """See `Ledger.release`."""
        await self._drive(flows.release(r, self.policy))

    async def leave(self, r: Reservation, *, for_review: bool = False) -> None:
        """See `Ledger.leave`."""
        await self._drive(flows.leave(r, for_review))

    async def renew(self, r: Reservation) -> None:
        """See `Ledger.renew`."""
        await self._drive(flows.renew(r, self.policy))

    async def keep(self, r: Reservation) -> None:
        """See `Ledger.keep`. One task an event loop does so."""
        if self.policy.heartbeat:
            self._background.keep(r.hold, partial(flows.heartbeat, r, self.policy))

    async def checkpoint(self, r: Reservation, name: str, data: object = None) -> None:
        """See `Ledger.checkpoint`."""
        await self._drive(self._checkpoint(r, name, data))

    async def read(self, principal: object, key: str, operation: str = "") -> Row | None:
        """See `Ledger.read`."""
        return await self._drive(flows.read(identify(self.namespace, principal, key, operation)))

    async def close(self) -> None:
        """See `Ledger.close`; it is about the running event loop. `asyncio.run` stores and releases when it ends."""
        await self._background.close()
        if self._made:
            await self.client.aclose()

    async def _drive(self, flow: Flow[T]) -> T:
        began = time.monotonic()
        result: Any
        try:
            step = next(flow)
            while True:
                try:
                    match step:
                        case Call():
                            result = await self._run(step)
                        case Tell():
                            self._tell(step, began)
                            result = None
                        case Sleep():
                            await asyncio.sleep(step.seconds)
                            result = time.monotonic()
                        case Later():
                            self._background.begin(step)
                            result = None
                except BaseException as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(result)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # what the generator returns, which its type says

    async def _run(self, call: Call[Any]) -> Any:
        if call.durable and self.policy.min_replicas:
            return _outcome((await self._run_all([call]))[0])
        script = self._scripts[call.script]
        sent = time.monotonic()
        execute = (self._cluster or self.client).execute_command
        try:
            try:
                reply = await execute("EVALSHA", script.sha, 1, call.row, *call.args, NEVER_DECODE=True)
            except NoScriptError:
                reply = await execute("EVAL", script.text, 1, call.row, *call.args, NEVER_DECODE=True)
        except ERRORS as error:
            unserved = clients.ours(error, time.monotonic() - sent)
            self._tell.timed(call.script, sent, unserved)
            raise unserved from error
        outcome = call.outcome(reply, sent)
        self._tell.timed(call.script, sent, outcome)
        return outcome

    async def _run_all(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Run calls that have nothing to do with each other, in one round trip; errors come back as answers."""
        if self._cluster is not None:  # a cluster's own pipeline refuses EVALSHA
            return await asyncio.gather(*map(self._run, calls), return_exceptions=True)
        began = time.monotonic()
        batch = clients.Batch(calls, self._scripts, self.policy)
        while commands := batch.commands():
            pipeline = self.client.pipeline(transaction=False)
            for words in commands:
                pipeline.execute_command(*words, NEVER_DECODE=True)
            sent = time.monotonic()
            try:
                replies = await pipeline.execute(raise_on_error=False)
            except ERRORS as error:
                replies = [error] * len(commands)
            batch.receive(replies, sent)
        for call, answer in zip(calls, batch.answers, strict=True):
            self._tell.timed(call.script, began, answer)
        return batch.answers


def _outcome(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer
