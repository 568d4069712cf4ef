"""Worker processes that are stopped while another one takes over, and killed at random while they make orders."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from idemredis import EffectDone, Ledger
from tests.support.databases import Database
from tests.support.orders import Orders
from tests.support.processes import mortal
from tests.support.servers import Server
from tests.support.subject import Mode
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture
def mode() -> Mode:
    return "sync"


def stalled(server: Server, namespace: str, database: Database, step: str) -> subprocess.Popen[bytes]:
    """Start a worker that makes the order "k", and wait until it has stopped itself after a step."""
    words = [sys.executable, "-m", "tests.support.effect_worker", server.url, namespace, database.url, "k", step]
    process = subprocess.Popen(mortal(words), stdout=subprocess.PIPE, cwd=ROOT)
    wait_until(lambda: os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT), 60)
    return process


def outcome(process: subprocess.Popen[bytes]) -> list[str]:
    """Let a stopped worker go on, and return what it prints."""
    process.send_signal(signal.SIGCONT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    words: list[str] = json.loads(printed)
    return words


@pytest.mark.parametrize("step", ["begun", "made"])
def test_a_stopped_attempt_that_wakes_after_its_successor_s_commit_is_refused(
    orders: Orders, valkey_server: Server, namespace: str, ledger: Ledger, claim: Any, step: str
) -> None:
    """On SQLite, a transaction that has written keeps all others from writing, and so its successor, too."""
    if orders.database.kind == "sqlite":
        step = "begun"
    process = stalled(valkey_server, namespace, orders.database, step)
    successor = claim()
    answer = orders.place(successor)
    ledger.complete(successor, answer)

    assert successor.generation == 2
    assert outcome(process) == ["refused", "fenced", answer.body.decode()]
    assert orders.count() == 1
    row = ledger.read("alice", "k")
    assert row is not None
    assert row.response == answer


def test_a_stopped_attempt_that_has_recorded_keeps_its_successor_waiting_and_commits_first(
    orders: Orders, valkey_server: Server, namespace: str, ledger: Ledger, claim: Any
) -> None:
    process = stalled(valkey_server, namespace, orders.database, "recorded")
    successor = claim()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(orders.place, successor)
        if orders.database.kind != "sqlite":
            wait_until(lambda: orders.database.waiting() == 1, 60)
        first = outcome(process)
        with pytest.raises(EffectDone) as done:
            future.result(60)
    ledger.complete(successor, done.value.response)

    assert first == ["committed", "fenced", done.value.response.body.decode()]
    assert orders.count() == 1


def test_a_stopped_attempt_that_is_killed_lets_its_successor_commit(
    orders: Orders, valkey_server: Server, namespace: str, claim: Any
) -> None:
    process = stalled(valkey_server, namespace, orders.database, "recorded")
    successor = claim()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(orders.place, successor)
        process.kill()
        process.communicate()
        assert future.result(60).status == 201
    assert [record.generation for record in orders.recorded()] == [2]


def test_workers_that_are_killed_all_the_time_make_each_order_once(databases: Any, tmp_path: Path) -> None:
    databases.get("postgresql")  # skips where it is not installed
    example = ROOT / "examples" / "orders_exactly_once.py"
    words = [sys.executable, str(example), "--database", "postgresql", "--keys", "40", "--losses", "1"]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert len(re.findall(r"^proved: .+$", ran.stdout, re.MULTILINE)) == example.read_text().count("prove(") > 0
    assert list(tmp_path.iterdir()) == []
