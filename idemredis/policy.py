"""The ledger's settings: frozen, checked once, each error naming the setting and the fix."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import ConfigurationError

__all__ = ["LONGEST_RETENTION", "Policy", "check_lease"]

LONGEST_RETENTION = 10 * 366 * 86400.0
"""Ten years, in seconds: far below where Redis' own milliseconds overflow, and longer than any ledger is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How long things last, and what a write must reach before it counts.

    Attributes:
        lease: seconds a reservation stays pending without being renewed. 30 s is the time most proxies give a request.
        retention: seconds a row lives from its last transition. 24 h is what the large payment APIs promise clients.
        max_hold: seconds after which a heartbeat stops, so that a hung handler can be taken over. 15 minutes.
        heartbeat: renew leases while protected work runs.
        max_body: bytes of a stored answer; a larger one becomes a tombstone. 16 KiB.
        min_replicas: how many replicas must have a claim or completion before it counts (0: none need to).
        replica_timeout: seconds to wait for them; below the client's socket timeout.

    Raises:
        ConfigurationError: a setting that cannot work.
    """

    lease: float = 30.0
    retention: float = 86400.0
    max_hold: float = 900.0
    heartbeat: bool = True
    max_body: int = 16384
    min_replicas: int = 0
    replica_timeout: float = 0.5

    def __post_init__(self) -> None:
        check_seconds("retention", self.retention)
        check_lease(self.lease, self.retention)
        check_seconds("max_hold", self.max_hold)
        check_seconds("replica_timeout", self.replica_timeout)
        if not isinstance(self.heartbeat, bool):
            raise ConfigurationError(f"heartbeat must be True or False, not {self.heartbeat!r}")
        for name in ("max_body", "min_replicas"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ConfigurationError(f"{name} must be a whole number, 0 or more, not {value!r}")


def check_lease(lease: float, retention: float) -> None:
    """Refuse a lease that is not a time, or not shorter than the retention.

    Raises:
        ConfigurationError: with both values.
    """
    check_seconds("lease", lease)
    if lease >= retention:
        raise ConfigurationError(f"lease must be shorter than retention (lease={lease:g} s, retention={retention:g} s)")


def check_seconds(name: str, value: float) -> None:
    """Refuse what is not a finite time of at least a millisecond, and at most ten years.

    Raises:
        ConfigurationError: with the setting's name and value.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigurationError(f"{name} must be a number of seconds, not {value!r}")
    if not math.isfinite(value) or not 0.001 <= value <= LONGEST_RETENTION:
        raise ConfigurationError(f"{name} must be from 0.001 to {LONGEST_RETENTION:g} seconds, not {value!r}")
