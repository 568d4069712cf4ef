"""A WSGI application for a real uWSGI: it calls the ledger when it is imported, before uWSGI forks its workers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

from idemredis import InProgress, Ledger, Policy, Replay, Reservation, StoredResponse

ledger = Ledger.from_url(os.environ["LEDGER_URL"], Policy(lease=1.5), os.environ["LEDGER_NAMESPACE"])
before = ledger.claim("worker", f"before-{os.getpid()}", "f")
assert isinstance(before, Reservation)
ledger.start_heartbeat(before)  # a thread of the master process
ledger.complete(before, StoredResponse(200))


def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """Hold the key that the path names until its lease was renewed, twice over; at "/first/…" for ever, once."""
    _, how, key = environ["PATH_INFO"].split("/")
    said = "busy"
    match ledger.claim("worker", key, "f", wait=10.0):
        case Reservation() as r:
            ledger.start_heartbeat(r)
            while not is_renewed(r) or (how == "first" and r.generation == 1):
                time.sleep(0.01)
            said = f"generation {r.generation} held {r.held}"
            ledger.complete(r, StoredResponse(200, (), said.encode()))
        case Replay(response=response):
            said = f"replay of {response.body.decode()}"
        case InProgress():
            pass
    start_response("200 OK", [("Content-Type", "text/plain"), ("Worker", str(os.getpid()))])
    return [said.encode()]


def is_renewed(r: Reservation) -> bool:
    """Return True when the reservation has outlived two leases, or has lost its row."""
    row = ledger.read("worker", r.key)
    assert row is not None
    return not r.held or time.time() - (row.created_at or 0) > 3.0
