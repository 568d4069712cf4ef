"""The base class of both ledgers: construction, and argument checks."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Generic, Self, TypeVar

from ..core import flows
from ..core.flows import Emit, Flow
from ..core.keys import Identity, identify, valid_route
from ..core.outcomes import InProgress, Outcome, Replay
from ..core.reservation import Reservation, allow
from ..core.scripts import Script
from ..core.tracebacks import hides_arguments
from ..errors import AlreadyCompleted, ConfigurationError, KeyInProgress, KeyReused, PreviousAttemptFailed
from ..events import EventEmitter, Observer
from ..policy import Policy, check_lease, check_seconds
from ..store import clients
from ..store.cluster import wire
from .waiting import room_of_request

__all__ = ["MAX_CHECKPOINT", "BaseLedger", "reserved"]

C = TypeVar("C")

MAX_CHECKPOINT = 4096
"""Bytes of a checkpoint's JSON. Enough for ids and amounts, and cheap to write after every step."""


class BaseLedger(Generic[C]):
    """The constructors and argument checks that `Ledger` and `AsyncLedger` share."""

    _client_for: Callable[[str, float], C]
    _check_client: Callable[[object], None]
    _reservation_class: type[Reservation]

    @hides_arguments
    def __init__(
        self,
        client: C,
        policy: Policy | None = None,
        namespace: str = "idem",
        observers: Iterable[Observer] = (),
        *,
        socket_timeout: float = clients.SOCKET_TIMEOUT,
        log_keys: bool = False,
        scripts: Mapping[str, Script] | None = None,
    ) -> None:
        self._check_client(client)
        if not isinstance(namespace, str) or not namespace:
            raise ConfigurationError(f"namespace must be a non-empty str, not {namespace!r}")
        self._client: Any = client
        check_seconds("socket_timeout", socket_timeout)
        self._wire = wire(client, socket_timeout)
        self._owns_client = False  # True if `from_url` made the client; `close` then closes it
        self.policy = Policy() if policy is None else policy
        self.namespace = namespace
        self._scripts = scripts
        self._emit = EventEmitter(observers, log_keys)
        self._make_reservation = partial(self._reservation_class, save=self._save)
        self._background = self._make_background(f"idemredis {namespace}")
        self._check_replicas()

    @classmethod
    @hides_arguments
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
        """Make a ledger and its client from a `redis://`, `rediss://`, `unix://` or `memory://` URL.

        `memory://` is a new in-process store; all ledgers of the process that use `memory://NAME` share one store.

        Args:
            url: where Redis is.
            policy: lease, retention and other limits; defaults to `Policy()`.
            namespace: first part of every row's name; use one for each service.
            observers: called with each `Event`.
            socket_timeout: seconds to wait for a reply. A claim or completion that times out is sent once more.
            log_keys: include raw keys and principals in events; by default they have only a digest.
            scripts: the Lua scripts to run; for tests only.

        Raises:
            ConfigurationError: the URL or a setting is not supported, or `memory://` is used without its extra.
        """
        client = cls._client_for(url, socket_timeout)
        ledger = cls(
            client,
            policy,
            namespace,
            observers,
            socket_timeout=socket_timeout,
            log_keys=log_keys,
            scripts=scripts,
        )
        ledger._owns_client = True
        return ledger

    @property
    def client(self) -> Any:
        """The redis-py client that the ledger uses."""
        return self._client

    def report_missing_key(self, principal: str = "", operation: str = "", route: str = "") -> None:
        """Emit `key_missing`: a request came without the key that it needs; for framework adapters.

        Args:
            principal: whose request it is; "" if unknown.
            operation: third part of the row's identity, if it would have one.
            route: the endpoint, for people and metrics.
        """
        self._emit(Emit("key_missing", Identity(principal, operation, "", ""), 0, valid_route(route)))

    def _make_background(self, name: str) -> Any:
        raise NotImplementedError

    def _save(self, r: Reservation, name: str, data: object) -> Any:
        raise NotImplementedError

    def _check_replicas(self) -> None:
        if not self.policy.min_replicas:
            return
        if clients.is_cluster(self._client):
            raise ConfigurationError(
                f"min_replicas={self.policy.min_replicas} is not supported on a cluster, where WAIT cannot follow the "
                "script on the same connection; set min_replicas=0"
            )
        timeout = self._wire.timeout
        if self.policy.replica_timeout >= timeout:
            raise ConfigurationError(
                f"replica_timeout must be shorter than socket_timeout "
                f"(replica_timeout={self.policy.replica_timeout:g} s, socket_timeout={timeout:g} s)"
            )

    def _claim_flow(
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
            raise ConfigurationError(f"fingerprint must be a non-empty str, not {fingerprint!r}")
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
            make=self._make_reservation,
            room=room_of_request.get() if wait else None,
        )

    def _checkpoint_flow(self, r: Reservation, name: str, data: object) -> Flow[None]:
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"a checkpoint name must be a non-empty str, not {name!r}")
        text = json.dumps(data, separators=(",", ":"), allow_nan=False)
        if len(text) > MAX_CHECKPOINT:
            raise ConfigurationError(
                f"checkpoint {name!r} has {len(text)} bytes of JSON, and the limit is {MAX_CHECKPOINT}; "
                "store ids instead of data"
            )
        return flows.checkpoint(r, name, text, self.policy)


def reserved(outcome: Outcome) -> Reservation:
    """Return the reservation with `result` and `response` made settable, or raise the error for another outcome."""
    match outcome:
        case Reservation():
            allow(outcome, "result", "response")
            return outcome
        case Replay(response, failed=True):
            raise PreviousAttemptFailed(response)
        case Replay(response):
            raise AlreadyCompleted(response)
        case InProgress(retry_after):
            raise KeyInProgress(retry_after)
        case _:
            raise KeyReused
