"""For users' own tests: a clock that is turned by hand.

A row's TTL is its clock, so a row that is made 31 seconds older is a row whose lease of 30 seconds is over:

    ledger = Ledger.from_url("memory://")
    ledger.claim("acct_1", "key-1", "f")
    Clock(ledger).turn(31)              # nobody slept; the next claim takes the row over

The ledger and its scripts are the unmodified ones, on any server and client. With an `AsyncLedger` it is
`await AsyncClock(ledger).turn(31)`.
"""

from __future__ import annotations

from typing import Any

from .core.keys import row_prefix
from .core.operations import milliseconds
from .ledger import AsyncLedger, Ledger

__all__ = ["AsyncClock", "Clock"]

_AGE = """
local row, elapsed = KEYS[1], ARGV[1]
local ttl = redis.call('PTTL', row)
if ttl >= 0 then redis.call('PEXPIRE', row, ttl - elapsed) end
"""


class Clock:
    """Makes every row of a ledger older, and so turns the only clock that a ledger has.

    A row whose retention is over by then expires; a row that is claimed afterwards is new. Redis's own clock and the
    local one go on, so `held` and heartbeats follow real time.

    Args:
        ledger: a `Ledger`; in a Flask application the one that was given to `Idempotency(ledger=…)`.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def turn(self, seconds: float) -> None:
        """Make every row older by so many seconds; younger where negative, as when a server's clock steps back."""
        client: Any = self._ledger.client
        for row in list(client.scan_iter(_rows(self._ledger))):
            client.eval(_AGE, 1, row, milliseconds(seconds))


class AsyncClock:
    """`Clock` for an `AsyncLedger`."""

    def __init__(self, ledger: AsyncLedger) -> None:
        self._ledger = ledger

    async def turn(self, seconds: float) -> None:
        """Make every row older by so many seconds; younger where negative."""
        client: Any = self._ledger.client
        for row in [row async for row in client.scan_iter(_rows(self._ledger))]:
            await client.eval(_AGE, 1, row, milliseconds(seconds))


def _rows(ledger: Ledger | AsyncLedger) -> str:
    return f"{row_prefix(ledger.namespace)}*"
