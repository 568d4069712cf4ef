"""Work that outlives its lease, workers that stall, and many processes with one key."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path

import pytest

from idemredis import AsyncLedger, FencedOut, Ledger, Policy, Reservation, StoredResponse
from tests.support.servers import Server
from tests.support.waiting import wait_until
from tests.support.worker import MakeWorker

ROOT = Path(__file__).parents[2]

HELD = 500
LEASE = 3.0
FOR = 10.0  # seconds, more than three leases


@contextmanager
def process(*words: object) -> Iterator[subprocess.Popen[str]]:
    """Run a worker process of `processes.py`; it ends with its stdin."""
    command = [sys.executable, "-m", "tests.support.worker_processes", *map(str, words)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as worker:
        try:
            yield worker
        finally:
            worker.send_signal(signal.SIGCONT)
            worker.kill()


def line(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    return worker.stdout.readline().strip()


@pytest.mark.slow
def test_no_lease_of_500_held_at_once_is_missed_and_one_thread_renews_them(
    valkey_server: Server, namespace: str
) -> None:
    ledger = Ledger(valkey_server.client(), Policy(lease=LEASE), namespace)
    with ExitStack() as blocks:
        held = [blocks.enter_context(ledger.reserve("worker", f"k{i}", "f")) for i in range(HELD)]
        until = time.monotonic() + FOR
        while time.monotonic() < until:
            assert all(r.held for r in held)
            assert [thread.name for thread in threading.enumerate()].count(f"idemredis {namespace}") == 1
            time.sleep(0.02)
        rows = [ledger.read("worker", f"k{i}") for i in range(HELD)]
    assert all(row is not None and row.generation == 1 and row.status == "pending" for row in rows)
    assert min(row.lease_left for row in rows if row is not None) > -1.0
    row = ledger.read("worker", "k0")
    assert row is not None
    assert row.status == "completed"
    ledger.close()
    ledger.client.close()


@pytest.mark.slow
def test_no_lease_of_500_held_at_once_is_missed_and_one_task_renews_them(valkey_server: Server, namespace: str) -> None:
    async def hold() -> None:
        ledger = AsyncLedger(valkey_server.async_client(), Policy(lease=LEASE), namespace)
        before = len(asyncio.all_tasks())
        async with AsyncExitStack() as blocks:
            held = [await blocks.enter_async_context(ledger.reserve("worker", f"k{i}", "f")) for i in range(HELD)]
            assert len(asyncio.all_tasks()) == before + 1
            until = time.monotonic() + FOR
            while time.monotonic() < until:
                assert all(r.held for r in held)
                await asyncio.sleep(0.02)
            rows = [await ledger.read("worker", f"k{i}") for i in range(HELD)]
        assert all(row is not None and row.generation == 1 and row.status == "pending" for row in rows)
        await ledger.close()
        await ledger.client.aclose()

    asyncio.run(hold())


@pytest.mark.slow
def test_the_heartbeat_ends_at_max_hold_so_that_hung_work_is_taken_over(
    make_worker: MakeWorker, valkey_server: Server
) -> None:
    worker = make_worker("sync", valkey_server, policy=Policy(lease=1.5, max_hold=3.0))

    def hung(r: Reservation) -> None:
        began = time.monotonic()
        wait_until(lambda: isinstance(worker.looking.claim("worker", "k", "f"), Reservation))
        assert 3.0 <= time.monotonic() - began < 15.0

    with pytest.raises(FencedOut):
        worker.reserve(hung, "worker", "k", "f")
    assert worker.row("k").generation == 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["reserve", "claim"])
@pytest.mark.parametrize("heartbeat", ["on", "off"])
def test_a_worker_stopped_for_two_leases_is_taken_over_and_finds_out(
    make_worker: MakeWorker, valkey_server: Server, namespace: str, how: str, heartbeat: str
) -> None:
    lease = 0.5
    answer = StoredResponse(200, (("content-type", "application/json"),), b'"in time"')
    worker = make_worker("sync", valkey_server)
    with process("stalled", valkey_server.url, namespace, lease, heartbeat, how) as first:
        assert [line(first), line(first)] == ["event claimed", "inside"]
        first.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        taken = worker.looking.claim("worker", "k", "f", wait=10.0)
        assert isinstance(taken, Reservation)
        assert taken.generation == 2
        worker.looking.complete(taken, answer)
        with worker.unchanged("k"):
            wait_until(lambda: time.monotonic() - stopped >= 2 * lease)
            first.send_signal(signal.SIGCONT)
            said, errors = first.communicate("go on\n", timeout=20)
        assert first.returncode == 0
    assert "held False" in said
    assert said.count("event fenced") == 1
    assert said.count("event completed") == 0
    assert "left" in said
    assert "refused" in said
    logged = [line for line in errors.splitlines() if "heartbeat_late" not in line]  # late it is, being stopped
    assert ["fenced" in line for line in logged] == [True], errors


@pytest.mark.slow
def test_one_of_8_processes_with_20_calls_each_runs_the_function(
    valkey_server: Server, namespace: str, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    with ExitStack() as started:
        workers = [started.enter_context(process("many", valkey_server.url, namespace, ran)) for _ in range(8)]
        for worker in workers:
            assert line(worker) == "ready"
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        said = Counter(text for worker in workers for text in worker.communicate(timeout=60)[0].splitlines())
    assert ran.read_text() == "7\n"
    assert said.keys() <= {"got {'order': 7}", "busy"}
    assert said.total() == 160
    assert said["got {'order': 7}"] >= 80  # those that wait all get it
