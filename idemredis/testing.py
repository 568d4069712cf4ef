"""Test helpers: a clock for rows that can be advanced without sleeping.

A row's TTL is its clock. Making a row 31 seconds older ends a lease of 30 seconds:

    ledger = Ledger.from_url("memory://")
    ledger.claim("acct_1", "key-1", "f")
    Clock(ledger).turn(31)              # no sleep; the next claim takes the row over

This works with any server and client, and with the unmodified ledger and scripts. For an `AsyncLedger`, use
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
    """Advance the clock of all rows of a ledger.

    A row whose retention has passed by then expires. Rows that are claimed later are not affected. `held` and
    heartbeats use the local clock and follow real time.

    Args:
        ledger: a `Ledger`; in a Flask application, the one passed to `Idempotency(ledger=…)`.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def turn(self, seconds: float) -> None:
        """Make every row older by `seconds`; a negative number makes rows younger, as a clock that steps back does."""
        client: Any = self._ledger.client
        for row in list(client.scan_iter(_rows(self._ledger))):
            client.eval(_AGE, 1, row, milliseconds(seconds))


class AsyncClock:
    """Advance the clock of all rows of an `AsyncLedger`, as `Clock` does for a `Ledger`.

    Args:
        ledger: an `AsyncLedger`.
    """

    def __init__(self, ledger: AsyncLedger) -> None:
        self._ledger = ledger

    async def turn(self, seconds: float) -> None:
        """Make every row older by `seconds`; a negative number makes rows younger, as a clock that steps back does."""
        client: Any = self._ledger.client
        for row in [row async for row in client.scan_iter(_rows(self._ledger))]:
            await client.eval(_AGE, 1, row, milliseconds(seconds))


def _rows(ledger: Ledger | AsyncLedger) -> str:
    return f"{row_prefix(ledger.namespace)}*"
