"""How long `idemredis ls` takes to find ten stuck rows among a million, beside traffic."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from idemredis import Ledger, Policy, Reservation, StoredResponse
from tests.support.servers import Server

from .turns import Figure

__all__ = ["stuck_rows"]

MANY = 1_000_000
BATCH = 10_000
STUCK = 10

FILL = """
for i = ARGV[1], ARGV[2] do
  local row = 'idem:acct_' .. (i % 1000) .. ':8e03978e-40d5-43dd-bc93-' .. string.format('%012x', i)
  redis.call('HSET', row, 'status', 'completed', 'generation', '1', 'owner', '0123456789abcdef', 'fingerprint',
    string.rep('a', 64), 'lease', '30000', 'retention', '86400000', 'created_at', ARGV[3], 'route', 'POST /orders',
    'response_status', '201', 'response_headers',
    '[["content-type","application/json"],["location","/orders/' .. i .. '"]]', 'response_body', string.rep('x', 200))
  redis.call('PEXPIRE', row, 86400000 - i % 80000)
end
"""

PACE = 0.002
"""Seconds between two protected operations of the traffic beside."""

SLOW = 1_000
"""Microseconds from which SLOWLOG notes a call."""


def stuck_rows(server: Server) -> Iterable[Figure]:
    """Time of `ls` as a program, its longest calls, and what claims beside it take.

    The server has one core for itself and the clients have the others: a call is timed by the clock, so a server that
    waits for a core seems to be busy.
    """
    with _core_for(server), server.client(socket_timeout=60.0) as client:
        created_at = str(time.time_ns() // 1_000_000)
        fill = client.register_script(FILL)
        for first in range(0, MANY, BATCH):
            fill(args=[first, first + BATCH - 1, created_at])
        ledger = Ledger(client, Policy(heartbeat=False))
        stuck = {_claim(ledger, f"stuck-{i}", 0.001).row for i in range(STUCK)}
        raw: Any = client
        raw.config_set("slowlog-log-slower-than", SLOW)
        raw.config_set("slowlog-max-len", 100_000)
        alone = _claims(server, 1.0, None)
        raw.slowlog_reset()
        raw.config_resetstat()
        ended = threading.Event()
        beside: list[float] = []
        traffic = threading.Thread(target=lambda: beside.extend(_claims(server, 600.0, ended)))
        traffic.start()
        began = time.monotonic()
        command = [sys.executable, "-c", "from idemredis.operating.cli import main; main()", "--url", server.url]
        ran = subprocess.run(
            [*command, "ls", "--status", "stale", "--json"], capture_output=True, text=True, check=True
        )
        seconds = time.monotonic() - began
        ended.set()
        traffic.join()
        found = {row["row"] for row in json.loads(ran.stdout)}
        assert found == stuck, ran.stderr
        own = (b"EVALSHA", b"EVAL", b"SCAN")
        slow = [entry for entry in raw.slowlog_get(100_000) if entry["command"].split()[0].upper() in own]
        used = client.info("commandstats")
        ledger.close()
    calls = sum(used[f"cmdstat_{name}"]["calls"] for name in ("evalsha", "scan"))
    spent = sum(used[f"cmdstat_{name}"]["usec"] for name in ("evalsha", "scan")) / 1e6
    longest = sorted(entry["duration"] / 1000 for entry in slow)
    over = sum(duration > 5 for duration in longest)
    note = (
        f"{calls} calls, {spent:.1f} s of the server; {over} over 5 ms, p99.9 {_quantile(longest, calls, 0.999):.1f} ms"
    )
    yield Figure(f"ls: {STUCK} stuck rows among {MANY:,}, beside traffic", seconds, "s", 30.0, note=note)
    yield Figure("ls: p99 of its calls", _quantile(longest, calls, 0.99), "ms", 5.0)
    note = f"alone {statistics.median(alone) * 1000:.2f} ms, of {len(beside)} claims"
    yield Figure("ls: median of a claim beside it", statistics.median(beside) * 1000, "ms", note=note)


@contextmanager
def _core_for(server: Server) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    first, *others = sorted(before)
    if others:
        os.sched_setaffinity(server.pid, {first})
        os.sched_setaffinity(0, others)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _claim(ledger: Ledger, key: str, lease: float) -> Reservation:
    outcome = ledger.claim("acct_stuck", key, "f", lease=lease, route="POST /orders")
    assert isinstance(outcome, Reservation)
    return outcome


def _claims(server: Server, seconds: float, ended: threading.Event | None) -> list[float]:
    """Claim and complete new keys at a steady pace; return the time of each claim."""
    took = []
    with server.client(socket_timeout=60.0) as client:
        ledger = Ledger(client, Policy(heartbeat=False), "traffic")
        until = time.monotonic() + seconds
        while time.monotonic() < until and not (ended is not None and ended.is_set()):
            began = time.monotonic()
            outcome = ledger.claim("acct", f"k{time.monotonic_ns()}", "f")
            took.append(time.monotonic() - began)
            assert isinstance(outcome, Reservation)
            ledger.complete(outcome, StoredResponse(204))
            time.sleep(PACE)
        ledger.close()
    return took


def _quantile(slow: list[float], calls: int, share: float) -> float:
    """Return a quantile of all calls, of which only the slow ones are known."""
    at = len(slow) - round(calls * (1 - share)) - 1
    return slow[at] if at >= 0 else SLOW / 1000
