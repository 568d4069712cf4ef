"""The clock of rows: advance it without sleeping, and read it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from idemredis import InProgress, Ledger
from idemredis.testing import Clock
from tests.support.subject import AnyServer

__all__ = ["SLACK", "TurnedClock", "expires_at", "in_progress"]

SLACK = 5.0
"""Seconds of real time that may pass in a test on a busy machine."""


class TurnedClock:
    """Advance the clock of all rows of one namespace, on every server that a test uses."""

    def __init__(self, namespace: str, servers: Sequence[AnyServer]) -> None:
        self._namespace = namespace
        self._servers = servers

    def turn(self, seconds: float) -> None:
        """Make every row older by `seconds`; a negative number makes rows younger."""
        for server in self._servers:
            with server.client() as client:
                Clock(Ledger(client, namespace=self._namespace)).turn(seconds)


def expires_at(client: Any, row: str) -> float:
    """Return when the row expires, in milliseconds by the local monotonic clock; each renewal makes it later."""
    now = time.monotonic() * 1000
    return now + float(client.pttl(row))


def in_progress(outcome: object, retry_after: float) -> bool:
    """Return True for an `InProgress` with about so many seconds left; some real time may have passed."""
    return (
        isinstance(outcome, InProgress)
        and not outcome.stale
        and retry_after - SLACK < outcome.retry_after <= retry_after
    )
