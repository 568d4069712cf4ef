"""Threads, tasks and processes on a few keys, through a proxy that loses things: there is an order that explains it."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest
import redis

from tests.support.linearizability import Entry, violations
from tests.support.processes import die_with
from tests.support.proxy import Proxy
from tests.support.recording import play, play_async, settled, troubled
from tests.support.servers import Server
from tests.support.subject import Mode

SEEDS = range(int(os.environ.get("IDEMREDIS_SEEDS", "3")))
PROCESSES = 3
DAYS = 300_000
"""Seconds by which the wall clocks of two processes differ."""


@pytest.mark.parametrize("seed", SEEDS)
def test_threads_and_tasks_behind_a_broken_network_see_one_row_at_a_time(
    mode: Mode, real_server: Server, namespace: str, seed: int
) -> None:
    with Proxy(real_server.port) as proxy, real_server.client() as near:
        proxy.choose(troubled(seed))
        sent = (play if mode == "sync" else play_async)(proxy.port, near, namespace, seed)
        history = settled(near, namespace, sent)
    assert violations(history) == []
    assert_something_happened(history)


def test_processes_whose_clocks_disagree_see_one_row_at_a_time(valkey_server: Server, namespace: str) -> None:
    spawn = multiprocessing.get_context("spawn")
    with Proxy(valkey_server.port) as proxy, valkey_server.client() as near:
        proxy.choose(troubled(1))
        with ProcessPoolExecutor(PROCESSES, spawn, die_with, (os.getpid(),)) as pool:
            playing = [
                pool.submit(play_in_a_process, proxy.port, valkey_server.port, namespace, seed)
                for seed in range(PROCESSES)
            ]
            sent = [entry for share in playing for entry in share.result(60)]
        history = settled(near, namespace, sent)
    assert violations(history) == []
    assert_something_happened(history)
    created = {round(float(entry.args[4]) / 1000 - time.time(), -5) for entry in history if entry.script == "claim"}
    assert created >= {seed * DAYS for seed in range(PROCESSES)}, "the clocks agreed"


def play_in_a_process(port: int, server: int, namespace: str, seed: int) -> list[Entry]:
    """Play with a wall clock that is some days ahead of the other processes'."""
    now = time.time
    with redis.Redis(port=server) as near, pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: now() + seed * DAYS)
        return play(port, near, namespace, seed, workers=3)


def assert_something_happened(history: list[Entry]) -> None:
    """A quiet game would show nothing."""
    words = Counter(entry.reply[0] for entry in history if entry.reply)
    assert words.keys() >= {b"claimed", b"replay", b"completed", b"row"}, words
    assert any(entry.end == math.inf for entry in history), "no answer was lost"
    assert {entry.script for entry in history} >= {"claim", "complete", "fail", "release"}
