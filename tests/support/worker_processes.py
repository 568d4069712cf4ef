"""Worker processes of the tests: `python -m tests.support.worker_processes stalled|many …`.

Each prints what happens to stdout. It ends when its stdin does, so it never outlives its test.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from idemredis import FencedOut, KeyInProgress, Ledger, Policy, Reservation, StoredResponse
from idemredis.events import Event

_one_at_a_time = threading.Lock()


def say(*words: object) -> None:
    with _one_at_a_time:
        print(*words, flush=True)


found_out = threading.Event()


def told(event: Event) -> None:
    say("event", event.name)
    if event.name == "fenced":
        found_out.set()


def stalled(url: str, namespace: str, lease: str, heartbeat: str, how: str) -> None:
    """Hold a row and print "inside"; on the next line of stdin finish late, after the heartbeat has been fenced."""
    policy = Policy(lease=float(lease), heartbeat=heartbeat == "on")
    ledger = Ledger.from_url(url, policy, namespace, observers=[told])
    if how == "reserve":
        try:
            with ledger.reserve("worker", "k", "f") as r:
                say("inside")
                sys.stdin.readline()
                assert heartbeat == "off" or found_out.wait(10)
                say("held", r.held)
                r.result = "late"
        except FencedOut:
            say("refused")
    else:
        outcome = ledger.claim("worker", "k", "f")
        assert isinstance(outcome, Reservation)
        ledger.start_heartbeat(outcome)
        say("inside")
        sys.stdin.readline()
        assert heartbeat == "off" or found_out.wait(10)
        say("held", outcome.held)
        try:
            ledger.complete(outcome, StoredResponse(200, (), b"late"))
        except FencedOut:
            say("refused")
    ledger.close()
    say("left")


def many(url: str, namespace: str, ran: str) -> None:
    """On the next line of stdin, make 20 calls of one `once` function at the same time; half of them wait."""
    ledger = Ledger.from_url(url, namespace=namespace, socket_timeout=20.0)  # eight processes on a busy machine

    def work(order: int) -> object:
        with Path(ran).open("a") as file:
            file.write(f"{order}\n")
        time.sleep(0.2)
        return {"order": order}

    calls = [ledger.once(principal="worker", key="k", operation="many", wait=wait)(work) for wait in (0.0, 10.0)]

    def call(turn: int) -> None:
        try:
            say("got", calls[turn % 2](7))
        except KeyInProgress:
            say("busy")

    say("ready")
    sys.stdin.readline()
    threads = [threading.Thread(target=call, args=(turn,)) for turn in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ledger.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    jobs: dict[str, Callable[..., None]] = {"stalled": stalled, "many": many}
    jobs[sys.argv[1]](*sys.argv[2:])
