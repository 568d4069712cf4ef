"""The clock of rows: turned by hand, and read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from idemredis import InProgress, Ledger
from idemredis.testing import Clock
from tests.support.subject import AnyServer

__all__ = ["SLACK", "TurnedClock", "expires_at", "in_progress"]

SLACK = 5.0
"""Seconds by which real time may go on in a test, on a machine that is busy with others."""


class TurnedClock:
    """Makes the rows of one namespace older, on every server that a test uses, whichever ledger made them."""

    def __init__(self, namespace: str, servers: Sequence[AnyServer]) -> None:
        self._namespace = namespace
        self._servers = servers

    def turn(self, seconds: float) -> None:
        """Make every row older by so many seconds; younger where negative."""
        for server in self._servers:
            with server.client() as client:
                Clock(Ledger(client, namespace=self._namespace)).turn(seconds)


def expires_at(client: Any, row: str) -> float:
    """Return when the row expires, in milliseconds by the local monotonic clock: each renewal makes it later."""
    now = time.monotonic() * 1000
    return now + float(client.pttl(row))


def in_progress(outcome: object, retry_after: float) -> bool:
    """Whether the outcome is `InProgress` with about so many seconds left: real time goes on."""
    return (
        isinstance(outcome, InProgress)
        and not outcome.stale
        and retry_after - SLACK < outcome.retry_after <= retry_after
    )
