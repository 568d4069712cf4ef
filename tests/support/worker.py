"""One sync interface for `reserve` and `once` of both ledgers, so that each behaviour has one test."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from idemredis import AsyncLedger, Ledger, Policy, Reservation, Row
from idemredis.events import Event
from idemredis.testing import Clock
from tests.support.servers import Server
from tests.support.started import Servers
from tests.support.subject import AnyServer, Mode


class Worker:
    """The ledger of a worker process; an async one has an event loop that runs during calls.

    Attributes:
        ledger: the `Ledger` or `AsyncLedger`.
        looking: a plain `Ledger` on the same rows, to read them or to act as another process.
        events: the names of the events that the ledger emitted, in order.
    """

    def __init__(
        self,
        mode: Mode,
        server: AnyServer,
        namespace: str,
        *,
        policy: Policy | None = None,
        url: str | None = None,
    ) -> None:
        self.mode = mode
        self.events: list[str] = []
        self.looking = Ledger(server.client(), policy, namespace)
        self._runner = asyncio.Runner() if mode == "async" else None
        rest: dict[str, Any] = {"policy": policy, "namespace": namespace, "observers": [self._note]}
        self.ledger: Any
        self._own: Any = None
        if url is not None:
            self.ledger = (Ledger if mode == "sync" else AsyncLedger).from_url(url, **rest)
        elif mode == "sync":
            self._own = server.client()
            self.ledger = Ledger(self._own, **rest)
        else:
            self._own = server.async_client()
            self.ledger = AsyncLedger(self._own, **rest)

    def reserve(self, work: Callable[[Reservation], object], *args: Any, **settings: Any) -> None:
        """Run `work` in a `reserve` block; in an async one, its result is awaited if there is one."""
        if self._runner is None:
            with self.ledger.reserve(*args, **settings) as r:
                work(r)
            return

        async def block() -> None:
            async with self.ledger.reserve(*args, **settings) as r:
                if asyncio.iscoroutine(begun := work(r)):
                    await begun

        self._runner.run(block())

    def once(self, function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
        """Decorate `function`, for an AsyncLedger as an `async def`; the result is called without `await`."""
        if self._runner is None:
            decorated: Callable[..., Any] = self.ledger.once(**settings)(function)
            return decorated
        return self.awaited(self.ledger.once(**settings)(_as_async(function)))

    def awaited(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Make a decorated function callable without `await`."""
        return lambda *args, **kwargs: self.result(function(*args, **kwargs))

    def result(self, value: Any) -> Any:
        """Return the value; if it is a coroutine, return its result."""
        return self._runner.run(value) if self._runner is not None and asyncio.iscoroutine(value) else value

    def do(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the ledger."""
        return self.result(getattr(self.ledger, method)(*args, **kwargs))

    def row(self, key: str, principal: str = "worker", operation: str = "") -> Row:
        """Return the row, which must exist."""
        row = self.looking.read(principal, key, operation)
        assert row is not None
        return row

    def fields(self, key: str) -> dict[bytes, bytes]:
        """Return the row of the only principal as it is in Redis."""
        fields: dict[bytes, bytes] = self.looking.client.hgetall(self._name(key))
        return fields

    @contextmanager
    def unchanged(self, key: str) -> Iterator[None]:
        """Assert that the block changes no field and no TTL; the row is aged by a second first, so a new TTL shows."""
        Clock(self.looking).turn(1)
        before, left = self.fields(key), self.looking.client.pttl(self._name(key))
        assert before
        yield
        assert self.fields(key) == before
        assert self.looking.client.pttl(self._name(key)) <= left

    def close(self) -> None:
        self.do("close")
        if self._own is not None:
            self.result(self._own.close() if self.mode == "sync" else self._own.aclose())
        if self._runner is not None:
            self._runner.close()
        self.looking.close()
        self.looking.client.close()

    def _name(self, key: str) -> str:
        return f"{self.looking.namespace}:worker:{key}"

    def _note(self, event: Event) -> None:
        self.events.append(event.name)


def _as_async(function: Callable[..., Any]) -> Callable[..., Any]:

    @functools.wraps(function)
    async def later(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return later


MakeWorker = Callable[..., Worker]


@pytest.fixture
def make_worker(namespace: str, every_key_left_expires: Servers) -> Iterator[MakeWorker]:
    """Make workers: `make_worker(mode, server, policy=…, url=…)`."""
    made: list[Worker] = []

    def make(mode: Mode, server: AnyServer, **options: Any) -> Worker:
        made.append(Worker(mode, server, namespace, **options))
        return made[-1]

    yield make
    for worker in made:
        worker.close()


@pytest.fixture
def worker(make_worker: MakeWorker, mode: Mode, server: AnyServer) -> Worker:
    """A worker over sync and async, on each server."""
    return make_worker(mode, server)


@pytest.fixture
def real_worker(make_worker: MakeWorker, mode: Mode, valkey_server: Server) -> Worker:
    """A worker over sync and async, on a real server, with leases of 2 s."""
    return make_worker(mode, valkey_server, policy=Policy(lease=2.0))
