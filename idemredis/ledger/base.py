"""What both ledgers share: how they are made, and checked arguments turned into flows."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Generic, Self, TypeVar

from ..core import flows
from ..core.flows import Flow
from ..core.keys import identify, valid_route
from ..core.outcomes import InProgress, Outcome, Replay
from ..core.reservation import Reservation, allow
from ..core.scripts import Script
from ..errors import AlreadyCompleted, ConfigurationError, KeyInProgress, KeyReused, PreviousAttemptFailed
from ..events import EventEmitter, Observer
from ..policy import Policy, check_lease, check_seconds
from ..store import clients
from ..store.cluster import wire

__all__ = ["MAX_CHECKPOINT", "BaseLedger", "reserved"]

C = TypeVar("C")

MAX_CHECKPOINT = 4096
"""Bytes of a checkpoint's JSON: enough for ids and amounts, and small enough to be written often."""


class BaseLedger(Generic[C]):
    """How a ledger is made."""

    _client_for: Callable[[str, float], C]
    _check_client: Callable[[object], None]
    _reservation_class: type[Reservation]

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
            raise ConfigurationError(f"namespace must be a str that is not empty, not {namespace!r}")
        self._client: Any = client
        check_seconds("socket_timeout", socket_timeout)
        self._wire = wire(client, socket_timeout)
        self._made = False  # by us, so that it is ours to close
        self.policy = Policy() if policy is None else policy
        self.namespace = namespace
        self._scripts = scripts
        self._emit = EventEmitter(observers, log_keys)
        self._make_reservation = partial(self._reservation_class, save=self._save)
        self._background = self._make_background(f"idemredis {namespace}")
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
            url: where Redis is.
            policy: how long things last; see `Policy`.
            namespace: first part of every row's name.
            observers: called with each `Event`.
            socket_timeout: seconds to wait for a reply; a call that times out is asked once more.
            log_keys: put raw keys and principals into events.
            scripts: the Lua to run; for tests that break it on purpose.

        Raises:
            ConfigurationError: the URL cannot be used, or `memory://` lacks its extra.
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
        ledger._made = True
        return ledger

    @property
    def client(self) -> Any:
        """The redis-py client that the ledger uses."""
        return self._client

    def _make_background(self, name: str) -> Any:
        raise NotImplementedError

    def _save(self, r: Reservation, name: str, data: object) -> Any:
        raise NotImplementedError

    def _check_replicas(self) -> None:
        if not self.policy.min_replicas:
            return
        if clients.is_cluster(self._client):
            raise ConfigurationError(
                f"min_replicas={self.policy.min_replicas} cannot be promised on a cluster: WAIT must follow the script "
                "on its own node's connection; set min_replicas=0"
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
            make=self._make_reservation,
        )

    def _checkpoint_flow(self, r: Reservation, name: str, data: object) -> Flow[None]:
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"a checkpoint's name must be a str that is not empty, not {name!r}")
        text = json.dumps(data, separators=(",", ":"), allow_nan=False)
        if len(text) > MAX_CHECKPOINT:
            raise ConfigurationError(
                f"checkpoint {name!r} has {len(text)} bytes of JSON; at most {MAX_CHECKPOINT} fit: keep ids, not data"
            )
        return flows.checkpoint(r, name, text, self.policy)


def reserved(outcome: Outcome) -> Reservation:
    """Return the reservation, which takes a `result` or `response` from now on, or raise what a claim found instead."""
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
