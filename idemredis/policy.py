"""The ledger's settings: leases, retention and other limits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import ConfigurationError

__all__ = ["LONGEST_RETENTION", "Policy", "check_lease"]

LONGEST_RETENTION = 10 * 366 * 86400.0
"""Ten years, in seconds. Longer than any ledger needs, and far below the limit of Redis's milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The limits of a ledger: times in seconds, sizes in bytes.

    Attributes:
        lease: seconds that a reservation stays pending without being renewed. Most proxies time a request out after
            30 s.
        retention: seconds that a row lives after its last transition. The large payment APIs keep keys for 24 h.
        max_hold: seconds after which the heartbeat stops, so that a hung handler can be taken over. 15 minutes is
            longer than a healthy handler runs.
        heartbeat: renew leases while protected work runs.
        max_body: bytes of a stored body; a response with a larger one becomes a tombstone. 16 KiB fits API responses
            and keeps rows small.
        min_replicas: how many replicas must acknowledge a claim or completion before it takes effect; 0 for none.
        replica_timeout: seconds to wait for the replicas; must be below the client's socket timeout of 1 s.

    Raises:
        ConfigurationError: a setting is not supported; the message names it, its value and the fix.
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
    """Check that a lease is a valid time and shorter than the retention; both are in seconds.

    Raises:
        ConfigurationError: it is not; the message has both values.
    """
    check_seconds("lease", lease)
    if lease >= retention:
        raise ConfigurationError(f"lease must be shorter than retention (lease={lease:g} s, retention={retention:g} s)")


def check_seconds(name: str, value: float) -> None:
    """Check that a time in seconds is at least a millisecond and at most ten years.

    Raises:
        ConfigurationError: it is not; the message has the setting's name and value.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigurationError(f"{name} must be a number of seconds, not {value!r}")
    if not math.isfinite(value) or not 0.001 <= value <= LONGEST_RETENTION:
        raise ConfigurationError(f"{name} must be from 0.001 to {LONGEST_RETENTION:g} seconds, not {value!r}")
