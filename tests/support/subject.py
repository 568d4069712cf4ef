"""One sync interface for both ledgers, so that each behaviour has one test."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, cast

from idemredis import AsyncLedger, Ledger, Policy, Reservation, Row, StoredResponse
from idemredis.core.keys import identify
from idemredis.core.outcomes import Outcome
from idemredis.core.scripts import Script
from idemredis.events import Observer

__all__ = ["PATIENCE", "AnyServer", "Fields", "Loop", "MakeSubject", "Mode", "Subject"]

T = TypeVar("T")
Mode: TypeAlias = Literal["sync", "async"]
Fields: TypeAlias = dict[bytes, bytes]

ANSWER_WITHIN = 60.0


class AnyServer(Protocol):
    """Anything that makes clients: a server, fakeredis, a cluster."""

    @property
    def kind(self) -> str:
        """The kind of server, such as "valkey"."""

    def client(self, **options: Any) -> Any:
        """Return a sync client."""

    def async_client(self, **options: Any) -> Any:
        """Return an asyncio client."""


PATIENCE = 5.0
"""Seconds for one call, where a test does not say: longer than a busy machine pauses."""


class Subject:
    """A ledger under test; an async one runs on its own event loop in its own thread.

    Attributes:
        mode: "sync" or "async".
        server: the server with its rows.
        ledger: the `Ledger` or `AsyncLedger`.
        client: a plain sync client of the same server, to read and edit rows.
    """

    def __init__(
        self,
        mode: Mode,
        server: AnyServer,
        *,
        policy: Policy | None = None,
        namespace: str = "idem",
        observers: Iterable[Observer] = (),
        scripts: Mapping[str, Script] | None = None,
        url: str | None = None,
        log_keys: bool = False,
        **options: Any,
    ) -> None:
        """Make a ledger, with `from_url` if `url` is given, otherwise on a client of `server` made with `options`."""
        self.mode = mode
        self.server = server
        self.namespace = namespace
        self.client = server.client()
        self._loop = Loop() if mode == "async" else None
        rest: dict[str, Any] = {"log_keys": log_keys, "scripts": scripts}
        self.ledger: Any
        kind: Any = Ledger if self._loop is None else AsyncLedger
        self._own: Any = None
        if url is not None:
            self.ledger = kind.from_url(url, policy, namespace, observers, **rest, **options)
        else:
            self._own = server.client(**options) if self._loop is None else server.async_client(**options)
            timeout = options.get("socket_timeout", PATIENCE)
            self.ledger = kind(self._own, policy, namespace, observers, socket_timeout=timeout, **rest)

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
        """Claim the key, and return the outcome."""
        outcome: Outcome = self._do("claim", principal, key, fingerprint, operation, lease, wait, takeover, route)
        return outcome

    def claimed(self, *args: Any, **kwargs: Any) -> Reservation:
        """Claim the key, and return the reservation, which must have been granted."""
        outcome = self._do("claim", *args, **kwargs)
        assert isinstance(outcome, Reservation), outcome
        return outcome

    def complete(self, r: Reservation, response: StoredResponse) -> None:
        """Complete the row with a response."""
        self._do("complete", r, response)

    def fail(self, r: Reservation, response: StoredResponse) -> None:
        """Fail the row with a response."""
        self._do("fail", r, response)

    def release(self, r: Reservation) -> None:
        """Release the row."""
        self._do("release", r)

    def hold(self, r: Reservation, *, for_review: bool = False) -> None:
        """Leave the row pending until its lease ends."""
        self._do("hold", r, for_review=for_review)

    def renew(self, r: Reservation) -> None:
        """Extend the lease."""
        self._do("renew", r)

    def start_heartbeat(self, r: Reservation) -> None:
        """Start renewing the lease in the background."""
        self._do("start_heartbeat", r)

    def checkpoint(self, r: Reservation, name: str, data: object = None) -> None:
        """Save a checkpoint and extend the lease."""
        self._do("checkpoint", r, name, data)

    def ping(self) -> float:
        """Return how long a ping took."""
        seconds: float = self._do("ping")
        return seconds

    def read(self, principal: object, key: str, operation: str = "") -> Row | None:
        """Return the row, or None if there is none."""
        row: Row | None = self._do("read", principal, key, operation)
        return row

    def flush(self) -> None:
        """Close the ledger, so that background work is retried once and then given up."""
        self._do("close")

    def close(self) -> None:
        """Close the ledger, both clients and the event loop; it can be called more than once."""
        if self._loop is None:
            self.ledger.close()
            if self._own is not None:
                self._own.close()
        elif self._loop.running:
            self._do("close")
            if self._own is not None:
                self._loop.run(self._own.aclose())
            self._loop.close()
        self.client.close()

    def begin(self, method: str, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        """Start a method of the ledger and return its future; cancelling an AsyncLedger's future cancels its task."""
        if self._loop is not None:
            return self._loop.begin(getattr(self.ledger, method)(*args, **kwargs))
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(getattr(self.ledger, method)(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="subject", daemon=True).start()
        return future

    def result(self, value: Any) -> Any:
        """Return the value; if it is a coroutine, return its result, run on the ledger's event loop."""
        return self._loop.run(value) if self._loop is not None and asyncio.iscoroutine(value) else value

    def row(self, principal: object, key: str, operation: str = "") -> str:
        """Return the row's name."""
        return identify(self.namespace, principal, key, operation).row

    def fields(self, name: str) -> Fields:
        """Return all fields of the row in Redis."""
        return cast(Fields, self.client.hgetall(name))

    def pttl(self, name: str) -> int:
        """Return the milliseconds until the row expires."""
        left: int = self.client.pttl(name)
        return left

    def at_work(self) -> int:
        """Return the number of background threads of this namespace, or of tasks of this loop."""
        if self._loop is None:
            return sum(thread.name == f"idemredis {self.namespace}" for thread in threading.enumerate())
        return self._loop.run(_other_tasks())

    def _do(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._loop is None:
            return getattr(self.ledger, method)(*args, **kwargs)
        return self._loop.run(getattr(self.ledger, method)(*args, **kwargs))


class Loop:
    """An event loop in a thread, so that background tasks keep running between the calls of a test."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="subject", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.begin(coroutine).result(ANSWER_WITHIN)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ANSWER_WITHIN)
        self._loop.close()


async def _other_tasks() -> int:
    return len(asyncio.all_tasks()) - 1


MakeSubject: TypeAlias = Callable[..., Subject]
