"""Forks, late patches and the ends of processes and loops, each in real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers import Server

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def script(text: str, server: Server, *args: str, file: Path | None = None) -> str:
    """Run a script in a process of its own and return what it printed."""
    if file is not None:
        file.write_text(text)
    command = ["-c", text] if file is None else [str(file)]
    ran = subprocess.run(
        [sys.executable, *command, str(server.port), *args],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr, ran.stderr
    return ran.stdout


def owner(server: Server, namespace: str, key: str = "k") -> tuple[bytes | None, bytes | None]:
    """Return the row's status and owner."""
    with server.client() as client:
        status, owner = client.hmget(f"{namespace}:worker:{key}", "status", "owner")
        return status, owner


START = """
import os, sys
from idemredis import Ledger, Policy, StoredResponse
ledger = Ledger.from_url(f"redis://127.0.0.1:{sys.argv[1]}/0", policy=Policy(lease=1.5), namespace=sys.argv[2])
"""

# A child that is forked inside a block

BLOCK = (
    START
    + """
def work():
    with ledger.reserve("worker", "k", "f", lease=60.0) as r:
        child = os.fork()
        if not child:
            if sys.argv[3] == "exits":
                sys.exit()
            if sys.argv[3] == "raises":
                raise ZeroDivisionError
            r.result = "the child's"
            return
        os.waitpid(child, 0)
        row = ledger.read("worker", "k")
        print(row.status, row.owner == r.owner, r.held)
        r.result = "the parent's"

try:
    work()
except ZeroDivisionError:
    pass
"""
)


@pytest.mark.parametrize("child", ["exits", "raises", "returns"])
def test_a_child_forked_inside_a_block_settles_nothing(valkey_server: Server, namespace: str, child: str) -> None:
    assert script(BLOCK, valkey_server, namespace, child) == "pending True True\n"
    with valkey_server.client() as client:
        assert client.hget(f"{namespace}:worker:k", "response_body") == b'"the parent\'s"'


# Forks that Python is not told of

BARE_FORK = (
    START
    + """
import ctypes
from tests.support.waiting import wait_until

def expiry(r):
    return ledger.client.pexpiretime(r.row)

before = ledger.claim("worker", "before", "f")  # as a module may do when it is imported
ledger.start_heartbeat(before)
began = expiry(before)
wait_until(lambda: expiry(before) > began)  # its thread is at work

child = ctypes.PyDLL(None).fork()  # runs none of Python's hooks
if child:
    status = os.waitpid(child, 0)[1]
    ledger.complete(before, StoredResponse(200))
    sys.exit(os.waitstatus_to_exitcode(status))
try:
    r = ledger.claim("worker", "k", "f")
    ledger.start_heartbeat(r)
    began = expiry(r)
    wait_until(lambda: expiry(r) > began + 2000)
    assert r.held
    sys.stdout.write("the child's lease was renewed\\n")
    sys.stdout.flush()
    os._exit(0)
except BaseException as error:
    sys.stderr.write(repr(error))
    sys.stderr.flush()
    os._exit(1)
"""
)


def test_a_child_forked_without_pythons_hooks_renews_its_own_leases(valkey_server: Server, namespace: str) -> None:
    assert script(BARE_FORK, valkey_server, namespace) == "the child's lease was renewed\n"


# gevent

GEVENT = """
import sys
if sys.argv[3] == "first":
    from gevent import monkey
    monkey.patch_all()
from idemredis import Ledger, Policy, Reservation, StoredResponse
ledger = Ledger.from_url(
    f"redis://127.0.0.1:{sys.argv[1]}/0", policy=Policy(lease=1.5), namespace=sys.argv[2], socket_timeout=20.0
)
if sys.argv[4] == "used":
    r = ledger.claim("worker", "before", "f")
    ledger.start_heartbeat(r)
    ledger.complete(r, StoredResponse(200))
if sys.argv[3] == "last":
    import warnings
    warnings.simplefilter("ignore")
    from gevent import monkey
    monkey.patch_all()
import gevent
from tests.support.waiting import wait_until

def expiry(r):
    return ledger.client.pexpiretime(r.row)

def hold(key):
    with ledger.reserve("worker", key, "f") as r:
        began = expiry(r)
        wait_until(lambda: expiry(r) > began + 2000)
        assert r.held

jobs = [gevent.spawn(hold, f"k{i}") for i in range(20)]
gevent.joinall(jobs, timeout=40, raise_error=True)
print(sum(ledger.read("worker", f"k{i}").status == "completed" for i in range(20)))
"""


@pytest.mark.parametrize("patched", ["first", "last"])
@pytest.mark.parametrize("before", ["used", "unused"])
def test_greenlets_share_a_ledger_whether_gevent_patches_before_or_after_it_is_made(
    valkey_server: Server, namespace: str, patched: str, before: str
) -> None:
    assert script(GEVENT, valkey_server, namespace, patched, before) == "20\n"


# Event loops that end during a call

LOOP = """
import asyncio, os, sys
from idemredis import AsyncLedger, LedgerUnavailable, Reservation, StoredResponse
from tests.support.proxy import Proxy
import redis

proxy = Proxy(int(sys.argv[1]))
look = redis.Redis(port=int(sys.argv[1]))
ledger = AsyncLedger.from_url(proxy.url, namespace=sys.argv[2], socket_timeout=20.0,
                              observers=[lambda event: print(event.name)])
row = f"{sys.argv[2]}:worker:k"

async def main():
    r = None
    await ledger.read("worker", "k")
    if sys.argv[3] == "complete":
        r = await ledger.claim("worker", "k", "f")
    proxy.hold()
    if r is None:
        task = asyncio.create_task(ledger.claim("worker", "k", "f"))
        while not look.exists(row):
            await asyncio.sleep(0.01)
    else:
        task = asyncio.create_task(ledger.complete(r, StoredResponse(201, (), b"done")))
        while look.hget(row, "status") == b"pending":
            await asyncio.sleep(0.01)
    if sys.argv[4] == "back":
        proxy.hold(False)
    else:
        proxy.refuse()
    return task  # unfinished: asyncio.run cancels it

asyncio.run(main())
print(look.hget(row, "status").decode(), bool(look.hget(row, "owner")))
os._exit(0)
"""


@pytest.mark.parametrize(
    ("call", "server", "seen"),
    [
        ("claim", "back", ["pending False"]),
        ("complete", "back", ["claimed", "completed", "completed True"]),
        ("complete", "away", ["claimed", "completion_lost", "completed True"]),
    ],
)
def test_an_event_loop_that_ends_during_a_call_leaves_no_claim_and_loses_no_response_silently(
    valkey_server: Server, namespace: str, call: str, server: str, seen: list[str]
) -> None:
    said = script(LOOP, valkey_server, namespace, call, server).splitlines()
    assert [line for line in said if line != "unavailable"] == seen


# Children of multiprocessing

CHILD = """
import multiprocessing, sys
from idemredis import Ledger, LedgerUnavailable, StoredResponse
from tests.support.proxy import Proxy

def work(port, namespace, back):
    proxy = Proxy(port)
    ledger = Ledger.from_url(proxy.url, namespace=namespace,
                             observers=[lambda event: print(event.name, flush=True)])
    r = ledger.claim("worker", "k", "f")
    proxy.refuse()
    try:
        ledger.complete(r, StoredResponse(201, (), b"done"))
    except LedgerUnavailable:
        if back == "back":
            proxy.refuse(False)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[3])
    child = context.Process(target=work, args=(int(sys.argv[1]), sys.argv[2], sys.argv[4]))
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize(("server", "end"), [("back", "completed"), ("away", "completion_lost")])
def test_a_child_of_multiprocessing_stores_what_waits_or_says_that_it_is_lost(
    valkey_server: Server, namespace: str, tmp_path: Path, method: str, server: str, end: str
) -> None:
    said = script(CHILD, valkey_server, namespace, method, server, file=tmp_path / "child.py").splitlines()
    assert said == ["claimed", "unavailable", end]
    assert owner(valkey_server, namespace)[0] == (b"completed" if end == "completed" else b"pending")
