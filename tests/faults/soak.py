"""Random faults under load, for as long as asked: `python -m tests.faults.soak [--minutes 5] [--seed N]`.

gunicorn and a real server with a proxy between them; clients that retry as clients do; workers and the server killed,
frozen and restarted; messages lost, cut off and delivered late. It prints what happened, and ends with status 1 on any
violation of what is promised.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

from tests.support.linearizability import TooHard, violations
from tests.support.proxy import Fate, Proxy
from tests.support.recording import play, settled, troubled
from tests.support.servers import Server, valkey
from tests.support.serving import Answer, Served

CLIENTS = 8
NAMESPACE = "soak"
LEASE = 1.0
GIVE_UP = 60.0
"""Seconds after which a client that was never answered is a violation: many leases, and every fault has ended."""

SLOWEST = 3.0
"""Seconds within which a 503 is promised, and as much again for a machine that is busy."""


class Soak:
    """The counts, and what went wrong."""

    def __init__(self, server: Server, proxy: Proxy, service: Served, seed: int) -> None:
        self.server = server
        self.proxy = proxy
        self.service = service
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.violations: list[str] = []
        self.slowest = 0.0
        self.stop = threading.Event()
        self._lock = threading.Lock()

    def client(self, number: int) -> None:
        """Send one operation after the other, each until it is answered, and some of them once more."""
        dice = random.Random(f"{self.seed}/client/{number}")
        turn = 0
        try:
            while not self.stop.is_set():
                turn += 1
                key = f"{number}-{turn}"
                if dice.random() < 0.03:
                    key = f"in-the-view-{key}"  # its worker kills itself
                first = self.until_answered(key)
                if first is None:
                    continue
                for _ in range(dice.choice((0, 1, 2))):
                    again = self.until_answered(key)
                    if again is None:
                        break
                    self.compare(key, first, again)
                    first = again
        except Exception as error:
            self.violation(f"client {number}: {error!r}")

    def until_answered(self, key: str) -> Answer | None:
        began = time.monotonic()
        while time.monotonic() - began < GIVE_UP:
            sent = time.monotonic()
            try:
                answer = self.service.post(key)
            except (OSError, HTTPException):
                answer = Answer(0, {}, b"")
            took = time.monotonic() - sent
            self.count(answer, took)
            if answer.status == 201:
                return answer
            if answer.status not in (0, 409, 503):
                self.violation(f"{key}: {answer.status} {answer.body[:200]!r}")
            time.sleep(0.05)
        self.violation(f"{key}: not answered for {GIVE_UP:g} s")
        return None

    def compare(self, key: str, before: Answer, answer: Answer) -> None:
        """What was replayed once is the answer for good; one that Redis could not take in time may be followed."""
        if answer.body == before.body:
            if not is_replay(answer):
                self.violation(f"{key}: {answer.body!r} twice, and not as a replay")
        elif is_replay(before) or answer.json["generation"] <= before.json["generation"]:
            self.violation(f"{key}: {before.body!r} and then {answer.body!r}")
        else:
            with self._lock:
                self.counts["ran again, the answer was not stored in time"] += 1

    def count(self, answer: Answer, took: float) -> None:
        with self._lock:
            self.counts["requests"] += 1
            if answer.status == 0:
                self.counts["no answer"] += 1
            elif answer.status == 201:
                self.counts["replayed" if is_replay(answer) else "answered by the view"] += 1
            else:
                self.counts[str(answer.error)] += 1
            if answer.status == 503:
                self.slowest = max(self.slowest, took)
                if took > 2 * SLOWEST:
                    self.violations.append(f"a 503 took {took:.1f} s")

    def trouble(self, until: float) -> None:
        """Break something, mend it, and leave it alone for a while; then something else."""
        dice = random.Random(f"{self.seed}/faults")
        faults: list[Callable[[random.Random], None]] = [
            self.refuse,
            self.freeze,
            self.restart,
            self.network,
            self.network,
            self.kill_a_worker,
            self.full,
            self.forget_scripts,
        ]
        while time.monotonic() < until:
            time.sleep(dice.uniform(0.3, 1.5))
            fault = dice.choice(faults)
            self.faults[fault.__name__.replace("_", " ")] += 1
            try:
                fault(dice)
            except Exception as error:
                self.violation(f"{fault.__name__}: {error!r}")

    def refuse(self, dice: random.Random) -> None:
        self.proxy.refuse()
        time.sleep(dice.uniform(0.1, 2.0))
        self.proxy.refuse(False)

    def freeze(self, dice: random.Random) -> None:
        self.server.freeze()
        time.sleep(dice.uniform(0.1, 3.0))
        self.server.thaw()

    def restart(self, dice: random.Random) -> None:
        self.server.kill()
        time.sleep(dice.uniform(0.0, 1.0))
        self.server.start()

    def network(self, dice: random.Random) -> None:
        fates: list[Fate] = ["lose request", "lose reply", "cut reply", 0.3, 1.5]
        share = dice.uniform(0.05, 0.4)
        self.proxy.choose(lambda: dice.choice(fates) if dice.random() < share else "pass")
        time.sleep(dice.uniform(0.5, 3.0))
        self.proxy.choose(None)

    def kill_a_worker(self, dice: random.Random) -> None:
        children = Path(f"/proc/{self.service.process.pid}/task/{self.service.process.pid}/children")
        workers = [int(pid) for pid in children.read_text().split()]
        if workers:
            with suppress(ProcessLookupError):
                os.kill(dice.choice(workers), signal.SIGKILL)

    def full(self, dice: random.Random) -> None:
        with self.server.client() as admin:
            admin.config_set("maxmemory", 1)
            time.sleep(dice.uniform(0.1, 1.0))
            admin.config_set("maxmemory", 0)

    def forget_scripts(self, dice: random.Random) -> None:
        with self.server.client() as admin:
            admin.script_flush()

    def violation(self, text: str) -> None:
        with self._lock:
            self.violations.append(text)

    def look_at_the_rows(self) -> int:
        """Check that each row expires; return how many there are."""
        rows = 0
        with self.server.client() as client:
            for row in client.scan_iter(f"{NAMESPACE}:*", 1000):
                rows += 1
                if client.pttl(row) <= 0:
                    self.violation(f"{row!r} never expires")
        return rows

    def executions(self) -> int:
        return len(self.service.runs())

    def look_at_the_log(self) -> None:
        """Check that no row was completed twice, and that nothing raised where it should not."""
        log = self.service.log
        stored = Counter(re.findall(r"completed: row (\w+)", log))
        for row, times in stored.items():
            if times > 1:
                self.violation(f"row {row} was completed {times} times")
        if "Traceback" in log:
            self.violation(f"a traceback in the service's log: {log[log.index('Traceback') :][:2000]}")


def is_replay(answer: Answer) -> bool:
    return "idempotent-replayed" in answer.headers


class Games:
    """Games of the history checker, one after the other, on a server that is left alone."""

    def __init__(self, server: Server, seed: int, until: float) -> None:
        self.played = self.calls = self.undecided = 0
        self.violations: list[str] = []
        self._server = server
        self._seed = seed
        self._until = until

    def play(self) -> None:
        try:
            with Proxy(self._server.port) as proxy, self._server.client() as near:
                while time.monotonic() < self._until:
                    self.played += 1
                    seed = self._seed + self.played
                    proxy.choose(troubled(seed, 0.2))
                    name = f"games{self.played}"
                    history = settled(near, name, play(proxy.port, near, name, seed))
                    self.calls += len(history)
                    try:
                        self.violations += violations(history)
                    except TooHard:
                        self.undecided += 1
        except Exception as error:
            self.violations.append(f"the games ended: {error!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Random faults under load.")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.minutes:g} minutes", flush=True)
    ends = time.monotonic() + options.minutes * 60
    with (
        tempfile.TemporaryDirectory(prefix="soak") as folder,
        valkey(Path(folder) / "server", "--appendonly", "yes", "--appendfsync", "always") as server,
        valkey(Path(folder) / "games") as other,
        Proxy(server.port) as proxy,
        Served("gunicorn-gthread", proxy.url, NAMESPACE, lease=LEASE, socket_timeout=1.0) as service,
    ):
        soak = Soak(server, proxy, service, options.seed)
        clients = [threading.Thread(target=soak.client, args=(number,)) for number in range(CLIENTS)]
        games = Games(other, options.seed, ends)
        playing = threading.Thread(target=games.play)
        for thread in (*clients, playing):
            thread.start()
        soak.trouble(ends)  # in this thread: a server dies with the thread that started it
        soak.stop.set()
        for thread in (playing, *clients):
            thread.join()
        soak.violations += games.violations
        rows, executions = soak.look_at_the_rows(), soak.executions()
        soak.look_at_the_log()
        fenced = service.log.count("fenced:")
        lost = service.log.count("completion_lost:")
        taken = service.log.count("taken_over:")
    table: list[tuple[str, object]] = [
        ("requests", soak.counts["requests"]),
        ("executions", executions),
        ("rows", rows),
        ("taken over / fenced / completions lost", f"{taken} / {fenced} / {lost}"),
        *sorted((name, count) for name, count in soak.counts.items() if name != "requests"),
        ("slowest 503, s", f"{soak.slowest:.2f}"),
        *((f"fault: {name}", count) for name, count in sorted(soak.faults.items())),
        ("games of the history checker / undecided", f"{games.played} / {games.undecided}"),
        ("calls in them", games.calls),
        ("violations", len(soak.violations)),
    ]
    for name, value in table:
        print(f"{name:<44}{value:>12}")
    for text in soak.violations[:20]:
        print("VIOLATION", text)
    return 1 if soak.violations else 0


if __name__ == "__main__":
    sys.exit(main())
