"""One sync-looking face over both ledgers, so that behaviour is written once."""

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

__all__ = ["AnyServer", "Fields", "MakeSubject", "Mode", "Subject"]

T = TypeVar("T")
Mode: TypeAlias = Literal["sync", "async"]
Fields: TypeAlias = dict[bytes, bytes]

ANSWER_WITHIN = 60.0


class AnyServer(Protocol):
    """Whatever clients can be had of: a server, fakeredis, a cluster."""

    @property
    def kind(self) -> str:
        """What it is."""

    def client(self, **options: Any) -> Any:
        """Return a sync client."""

    def async_client(self, **options: Any) -> Any:
        """Return an asyncio client."""


PATIENCE = 5.0
"""Seconds for one call, where a test does not say: longer than a busy machine pauses."""


class Subject:
    """A ledger under test. The async one runs on an event loop of its own, in a thread of its own.

    Attributes:
        mode: "sync" or "async".
        server: where its rows are.
        ledger: the `Ledger` or `AsyncLedger` itself.
        client: a plain sync client of the same server, to look at rows and to spoil them.
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
        """Make a ledger of that mode: on `url` by `from_url`, or on a client of `server` made with `options`."""
        self.mode = mode
        self.server = server
        self.namespace = namespace
        self.client = server.client()
        self._loop = _Loop() if mode == "async" else None
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
        """See `Ledger.claim`."""
        outcome: Outcome = self._do("claim", principal, key, fingerprint, operation, lease, wait, takeover, route)
        return outcome

    def claimed(self, *args: Any, **kwargs: Any) -> Reservation:
        """Claim, and be sure to have it."""
        outcome = self._do("claim", *args, **kwargs)
        assert isinstance(outcome, Reservation), outcome
        return outcome

    def complete(self, r: Reservation, response: StoredResponse) -> None:
        """See `Ledger.complete`."""
        self._do("complete", r, response)

    def fail(self, r: Reservation, response: StoredResponse) -> None:
        """See `Ledger.fail`."""
        self._do("fail", r, response)

    def release(self, r: Reservation) -> None:
        """See `Ledger.release`."""
        self._do("release", r)

    def hold(self, r: Reservation, *, for_review: bool = False) -> None:
        """See `Ledger.hold`."""
        self._do("hold", r, for_review=for_review)

    def renew(self, r: Reservation) -> None:
        """See `Ledger.renew`."""
        self._do("renew", r)

    def start_heartbeat(self, r: Reservation) -> None:
        """See `Ledger.start_heartbeat`."""
        self._do("start_heartbeat", r)

    def checkpoint(self, r: Reservation, name: str, data: object = None) -> None:
        """See `Ledger.checkpoint`."""
        self._do("checkpoint", r, name, data)

    def read(self, principal: object, key: str, operation: str = "") -> Row | None:
        """See `Ledger.read`."""
        row: Row | None = self._do("read", principal, key, operation)
        return row

    def flush(self) -> None:
        """Close the ledger: what waits in the background is tried once more, or lost."""
        self._do("close")

    def close(self) -> None:
        """Close the ledger, its client, the client to look with, and the event loop. More than once is fine."""
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
        """Start a method of the ledger and return its future. Cancelling that of an AsyncLedger cancels its task."""
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

    def row(self, principal: object, key: str, operation: str = "") -> str:
        """Return the row's name."""
        return identify(self.namespace, principal, key, operation).row

    def fields(self, name: str) -> Fields:
        """Return the whole row as it is in Redis."""
        return cast(Fields, self.client.hgetall(name))

    def pttl(self, name: str) -> int:
        """Return the milliseconds until the row expires."""
        left: int = self.client.pttl(name)
        return left

    def at_work(self) -> int:
        """Return how many threads (of this namespace) or tasks (of this loop) work in the background."""
        if self._loop is None:
            return sum(thread.name == f"idemredis {self.namespace}" for thread in threading.enumerate())
        return self._loop.run(_other_tasks())

    def _do(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._loop is None:
            return getattr(self.ledger, method)(*args, **kwargs)
        return self._loop.run(getattr(self.ledger, method)(*args, **kwargs))


class _Loop:
    """An event loop in a thread, so that its background tasks go on between two calls of a test."""

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
