"""Run a ledger's background work in one daemon thread."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

from ..core.flows import GivenUp, InBackground, Sleep
from ..core.operations import Call
from ..core.reservation import Lease
from .agenda import (
    EXIT_WITHIN,
    IDLE,
    Agenda,
    EmitEvent,
    Heartbeat,
    Job,
    Result,
    advance_all,
    begin,
    interrupt,
    put_back,
)

__all__ = ["Background"]

logger = logging.getLogger("idemredis")


class Background:
    """Run flows in one daemon thread, started when there is work and again in a forked child."""

    def __init__(self, run: Callable[[Sequence[Call[Any]]], list[Result]], emit: EmitEvent, name: str) -> None:
        self._run = run
        self._emit = emit
        self._name = name
        self.reset_after_fork()
        _backgrounds.add(self)

    def reset_after_fork(self) -> None:
        """Start empty, as a forked child must: pending work belongs to the parent."""
        # Reentrant, since the garbage collector may settle an abandoned stream while this thread holds the lock.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._agenda = Agenda()
        self._running: list[Job] = []
        self._thread: threading.Thread | None = None
        self._wakes_at = 0.0
        self._closing = False

    def run(self, wanted: InBackground) -> None:
        """Run a flow; if a limit is reached, end it instead, and it emits what is lost."""
        begun = begin(wanted, self._emit)
        if begun is None:
            return
        job, due = begun
        with self._lock:
            if room := self._agenda.add(job, due):
                self._wake_by(due)
        if not room:
            job.advance(GivenUp(), self._emit)

    def start_heartbeat(self, lease: Lease, heartbeat: Heartbeat) -> None:
        """Schedule a heartbeat for a third of the lease from now; it starts if the attempt is still running then."""
        with self._lock:
            self._agenda.add_heartbeat(lease, heartbeat)
            self._wake_by(lease.first_heartbeat_at)

    def close(self, seconds: float = EXIT_WITHIN) -> None:
        """Stop the thread, retry pending work once for about `seconds` seconds, and emit what is lost."""
        until = time.monotonic() + seconds
        with self._lock:
            self._closing = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(seconds)
        with self._lock:
            interrupted, self._running = self._running, []
            jobs = interrupt(interrupted, self._emit) + self._agenda.clear()
            self._closing = False
        for job in jobs:
            if time.monotonic() < until and isinstance(call := job.advance(time.monotonic(), self._emit), Call):
                job.advance(self._run([call])[0], self._emit)
            job.advance(GivenUp(), self._emit)
            self._agenda.remove(job)

    def _wake_by(self, due: float) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # too many threads, or the process is exiting; `close` flushes at exit
                logger.error("cannot start the background thread; it is tried again with the next work: %s", error)
            else:
                self._thread = thread
        elif due < self._wakes_at:
            self._changed.notify()

    def _loop(self) -> None:
        while True:
            with self._lock:
                jobs = self._agenda.take(time.monotonic())
                if not jobs:
                    due = self._agenda.due_at()
                    now = time.monotonic()
                    self._wakes_at = now + IDLE if due is None else due
                    if not self._closing:
                        self._changed.wait(max(self._wakes_at - now, 0.0))
                    self._wakes_at = 0.0
                    if self._closing or (due is None and self._agenda.due_at() is None):
                        self._thread = None
                        return
                    continue
                self._running = [job for job in jobs if not job.is_heartbeat]
            slept = self._run_calls(jobs)
            with self._lock:
                self._running = []
                put_back(self._agenda, jobs, slept)

    def _run_calls(self, jobs: list[Job]) -> dict[Job, Sleep]:
        """Run the calls of these flows in shared round trips until each flow sleeps or ends."""
        slept: dict[Job, Sleep] = {}
        results: list[Result] = [time.monotonic()] * len(jobs)
        while jobs:
            jobs, calls = advance_all(jobs, results, slept, self._emit)
            try:
                results = self._run(calls) if calls else []
            except Exception as error:  # not an error of Redis: raise it in each flow, and keep the thread running
                results = [error] * len(jobs)
        return slept


_backgrounds: WeakSet[Background] = WeakSet()


def _reset_all() -> None:
    for background in list(_backgrounds):
        background.reset_after_fork()


def _close_all() -> None:
    for background in list(_backgrounds):
        background.close()


os.register_at_fork(after_in_child=_reset_all)
atexit.register(_close_all)
