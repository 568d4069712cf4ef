"""For users' own tests: a server clock that is turned by hand.

clock = Clock()
ledger = Ledger.from_url("memory://", scripts=clock)
...
clock.turn(31)      # the lease of 30 s has run out, and nobody slept
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from .scripts import NAMES, Script, assemble

__all__ = ["Clock"]


class Clock(Mapping[str, Script]):
    """The ledger's scripts with the server's clock standing still until it is turned.

    It decides when leases end. Redis itself goes on expiring rows by its own clock. Works with every server and
    client; each turn makes new scripts, so it is not for production.
    """

    def __init__(self) -> None:
        self._now = time.time_ns() // 1_000_000
        self._scripts: Mapping[str, Script] = {}
        self.turn(0)

    @property
    def milliseconds(self) -> int:
        """What the scripts read as the time, in milliseconds since the epoch."""
        return self._now

    def turn(self, seconds: float) -> None:
        """Move the clock on by so many seconds (or back, where negative)."""
        self._now += round(seconds * 1000)
        self._scripts = assemble({"lib/clock.lua": f"local function now_ms() return {self._now} end\n"})

    def __getitem__(self, name: str) -> Script:
        return self._scripts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)
