"""Many threads in many processes, and forks."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
import redis

from idemredis import InProgress, Ledger, Replay, Reservation, StoredResponse
from tests.support.processes import die_with
from tests.support.servers import Server

pytestmark = pytest.mark.slow

PROCESSES, THREADS = 4, 25
PATIENCE = 60.0
"""Seconds that a thread waits for the others; far more than they need."""

_barrier: Barrier


def prepare(barrier: Barrier, parent: int) -> None:
    global _barrier
    _barrier = barrier
    die_with(parent)


def meet_the_other_processes() -> None:
    _barrier.wait(PATIENCE)


def race(url: str, namespace: str, rounds: int) -> list[list[str]]:
    """Claim one key a round with all threads of this process at once; return what each thread came to, by rounds."""
    ledger = Ledger.from_url(url, namespace=namespace, socket_timeout=10.0)
    seen: list[list[str]] = [[] for _ in range(rounds)]
    together = threading.Barrier(THREADS, action=meet_the_other_processes)

    def run() -> None:
        for turn in range(rounds):
            together.wait(PATIENCE)
            match ledger.claim("acct_1", f"key-{turn}", "f"):
                case Reservation(generation=1) as r:
                    executions = ledger.client.incr(f"executions:{turn}")
                    ledger.client.pexpire(f"executions:{turn}", 600_000)
                    ledger.complete(r, StoredResponse(201, (), b"%d of %d" % (executions, turn)))
                    seen[turn].append("ran")
                case Replay(response=StoredResponse(status=201, body=body)) if body == b"1 of %d" % turn:
                    seen[turn].append("replay")
                case InProgress(stale=False):
                    seen[turn].append("in_progress")
                case other:
                    seen[turn].append(repr(other))

    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE * 2)
    ledger.close()
    ledger.client.close()
    return seen


def test_of_100_threads_in_4_processes_exactly_one_runs(real_server: Server, namespace: str) -> None:
    rounds = 200 if real_server.kind == "valkey" else 50
    spawn = multiprocessing.get_context("spawn")
    initargs = (spawn.Barrier(PROCESSES), os.getpid())
    with ProcessPoolExecutor(PROCESSES, spawn, prepare, initargs) as pool:
        racing = [pool.submit(race, real_server.url, namespace, rounds) for _ in range(PROCESSES)]
        shares = [future.result(PATIENCE * 2) for future in racing]

    for turn in range(rounds):
        counts = Counter(outcome for share in shares for outcome in share[turn])
        assert counts["ran"] == 1, (turn, counts)
        assert counts["ran"] + counts["replay"] + counts["in_progress"] == PROCESSES * THREADS, (turn, counts)
    with real_server.client() as client:
        assert {client.get(f"executions:{turn}") for turn in range(rounds)} == {b"1"}


def script(text: str, server: Server, *args: str) -> str:
    """Run a script in a process of its own and return what it printed."""
    ran = subprocess.run(
        [sys.executable, "-c", text, str(server.port), *args],
        capture_output=True,
        text=True,
        timeout=30,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


FORK = """
import os, sys
from idemredis import Ledger, Policy, Reservation, StoredResponse
from tests.support.waiting import wait_until

def until_at(r):
    return ledger.client.pexpiretime(r.identity.row)

ledger = Ledger.from_url(f"redis://127.0.0.1:{sys.argv[1]}/0", policy=Policy(lease=1.0), namespace=sys.argv[2])
parents = ledger.claim("acct_1", "parents", "f")
ledger.start_heartbeat(parents)
first = until_at(parents)
wait_until(lambda: until_at(parents) > first)  # its thread is at work

if os.fork():
    os._exit(0)  # nobody renews the parent's lease any more

childs = ledger.claim("acct_1", "childs", "f")
assert isinstance(childs, Reservation)
ledger.start_heartbeat(childs)
first = until_at(childs)
wait_until(lambda: until_at(childs) > first + 1200)  # the child has a thread of its own
assert childs.held
taken = wait_until(lambda: r if isinstance(r := ledger.claim("acct_1", "parents", "f"), Reservation) else None)
assert taken.generation == 2
ledger.complete(childs, StoredResponse(200))
ledger.complete(taken, StoredResponse(200))
ledger.close()
ledger.client.close()
print("the child is done")
"""


def test_a_forked_child_works_on_its_own_and_leaves_its_parents_reservations_alone(
    valkey_server: Server, namespace: str
) -> None:
    assert script(FORK, valkey_server, namespace) == "the child is done\n"


def test_two_threads_that_set_up_at_once_share_one_ledger(valkey_server: Server, namespace: str) -> None:
    with redis.Redis(port=valkey_server.port) as client:
        client.script_flush()
        ledger = Ledger(client, namespace=namespace)
        barrier = threading.Barrier(50)
        outcomes: list[object] = []

        def claim() -> None:
            barrier.wait(PATIENCE)
            outcomes.append(ledger.claim("acct_1", "key-1", "f"))

        threads = [threading.Thread(target=claim) for _ in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    assert sum(isinstance(outcome, Reservation) for outcome in outcomes) == 1
    assert sum(isinstance(outcome, InProgress) for outcome in outcomes) == 49


EXIT = """
import socket, sys
from idemredis import Ledger, LedgerUnavailable, StoredResponse
from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

def point_at(port):
    pool.connection_kwargs["port"] = port
    pool.reset()

nobody = socket.socket()
nobody.bind(("127.0.0.1", 0))
client = Redis(port=int(sys.argv[1]), retry=Retry(NoBackoff(), 0))
pool = client.connection_pool
ledger = Ledger(client, namespace=sys.argv[2])
r = ledger.claim("acct_1", "key-1", "f")
point_at(nobody.getsockname()[1])
try:
    ledger.complete(r, StoredResponse(201, (), b"done"))
except LedgerUnavailable:
    point_at(int(sys.argv[1]))
    print("not stored yet")
"""


def test_a_process_that_ends_stores_what_waits_for_that(valkey_server: Server, namespace: str) -> None:
    assert script(EXIT, valkey_server, namespace) == "not stored yet\n"

    with valkey_server.client() as client:
        assert client.hget(f"{namespace}:acct_1:key-1", "response_body") == b"done"


LOOP = """
import asyncio, sys
from idemredis import AsyncLedger, LedgerUnavailable, Replay, StoredResponse
from tests.support.proxy import Proxy

proxy = Proxy(int(sys.argv[1]))
ledger = AsyncLedger.from_url(proxy.url, namespace=sys.argv[2])

async def main():
    r = await ledger.claim("acct_1", "key-1", "f")
    await ledger.start_heartbeat(r)
    proxy.refuse()
    try:
        await ledger.complete(r, StoredResponse(201, (), b"done"))
    except LedgerUnavailable:
        proxy.refuse(False)
        print("not stored yet")

async def again():
    print(type(await ledger.claim("acct_1", "key-1", "f")).__name__)

asyncio.run(main())
if len(sys.argv) > 3:
    asyncio.run(again())
"""


def test_an_event_loop_that_ends_stores_what_waits_for_that(valkey_server: Server, namespace: str) -> None:
    assert script(LOOP, valkey_server, namespace) == "not stored yet\n"

    with valkey_server.client() as client:
        assert client.hget(f"{namespace}:acct_1:key-1", "response_body") == b"done"


def test_a_ledger_works_on_in_the_next_event_loop(valkey_server: Server, namespace: str) -> None:
    assert script(LOOP, valkey_server, namespace, "again") == "not stored yet\nReplay\n"
