"""Run a ledger's background work in daemon threads: one for heartbeats, and one for retries while there are any."""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias
from weakref import WeakSet

from ..core.flows import GivenUp, InBackground
from ..core.operations import Call
from ..core.reservation import Lease
from .agenda import EXIT_WITHIN, IDLE, Agenda, Batch, EmitEvent, Heartbeat, Job, Place, Result, Room, begin, failed

__all__ = ["Background"]

logger = logging.getLogger("idemredis")

RunCalls: TypeAlias = Callable[[Sequence[Call[Any]]], list[Result]]
Lane: TypeAlias = Literal["heartbeats", "retries"]


class Background:
    """Run flows in daemon threads, started when there is work.

    Heartbeats have a thread of their own, so that no renewal waits for a completion or release that hangs. On a cluster
    there is one of each kind for each node, so that nothing waits for another node. The threads belong to one process:
    a forked child starts new threads for its own work, and the parent's work stays with the parent. A fork is detected
    by the process id, because servers such as uWSGI fork without running Python's hooks.
    """

    def __init__(self, run: RunCalls, emit: EmitEvent, name: str, place: Place) -> None:
        self._run = run
        self._emit = emit
        self._name = name
        self._place = place
        self._crews: dict[tuple[object, ...], _Crew] = {}
        _backgrounds.add(self)

    def run(self, wanted: InBackground) -> None:
        """Run a flow. If a limit is reached, end the flow instead; it then emits an event for what is lost."""
        begun = begin(wanted, self._emit)
        if begun is not None and not self._crew().runner("retries", wanted.row).add(*begun):
            begun[0].advance(GivenUp(), self._emit)

    def start_heartbeat(self, lease: Lease, heartbeat: Heartbeat, row: str) -> None:
        """Schedule a heartbeat for a third of the lease from now; it starts if the attempt is still running then."""
        crew = self._crew()
        crew.runner("heartbeats", row).start_heartbeat(lease, heartbeat, row)
        crew.go_on()

    def close(self, seconds: float = EXIT_WITHIN) -> None:
        """Stop the threads, retry pending work once within about `seconds`, and emit an event for what is lost."""
        until = time.monotonic() + seconds
        process = os.getpid()
        runners = [runner for key, crew in list(self._crews.items()) if key[0] == process for runner in crew.all()]
        for runner in runners:
            runner.stop()
        retries = sorted(
            (runner for runner in runners if runner.lane == "retries"), key=lambda runner: runner.is_calling
        )
        for left, runner in zip(range(len(retries), 0, -1), retries, strict=True):  # responses first
            now = time.monotonic()
            runner.finish(now + max(until - now, 0.0) / left)  # so that a hung node leaves time for the others
        for runner in runners:
            if runner.lane == "heartbeats":
                runner.finish(until)

    def _crew(self) -> _Crew:
        """Return the runners of this process; gevent may replace the locks after the application was loaded."""
        key = (os.getpid(), threading.Lock)
        crew = self._crews.get(key)
        if crew is None:
            crew = _Crew(self._run, self._emit, self._name, self._place)
            crew = self._crews.setdefault(key, crew)  # atomic, as a lock could be held by a thread of the parent
            for other in list(self._crews):
                if other[0] != key[0]:
                    self._crews.pop(other, None)
            _close_when_a_child_process_ends()
        return crew


class _Crew:
    """The runners of one process: one of each kind, for each node of a cluster."""

    def __init__(self, run: RunCalls, emit: EmitEvent, name: str, place: Place) -> None:
        self.run = run
        self.emit = emit
        self.name = name
        # Reentrant, since the garbage collector may settle an abandoned stream while this thread holds the lock.
        self.lock = threading.RLock()
        self.room = Room()
        self._place = place
        self._runners: dict[tuple[Lane, str | None], _Runner] = {}

    def runner(self, lane: Lane, row: str) -> _Runner:
        """Return the runner for a row."""
        key = lane, self._place(row)
        runner = self._runners.get(key)
        return self._runners.setdefault(key, _Runner(self, lane)) if runner is None else runner

    def all(self) -> list[_Runner]:
        return list(self._runners.values())

    def go_on(self) -> None:
        """Start a thread for each runner of retries whose thread died or could not be started."""
        for (lane, _), runner in list(self._runners.items()):
            if lane == "retries":
                runner.go_on()


class _Runner:
    """An agenda, and the thread that runs it."""

    def __init__(self, crew: _Crew, lane: Lane) -> None:
        self.lane = lane
        self._crew = crew
        self._run = crew.run
        self._emit = crew.emit
        self._name = crew.name if lane == "heartbeats" else f"{crew.name} {lane}"
        # Used in place of the Condition, whose `__enter__` is Python code: a signal's exception in it would leave the
        # lock held.
        self._lock = crew.lock
        self._changed = threading.Condition(crew.lock)
        self.agenda = Agenda()
        self._batch: Batch | None = None
        self._advancing = False
        self._thread: threading.Thread | None = None
        self._wakes_at = 0.0
        self._closing = False

    @property
    def is_calling(self) -> bool:
        """Whether a call is under way."""
        return self._batch is not None

    def add(self, job: Job, due: float) -> bool:
        with self._lock:
            if room := self._crew.room.enter(job):
                self.agenda.put(job, due)
                self._wake_by(due)
        return room

    def start_heartbeat(self, lease: Lease, heartbeat: Heartbeat, row: str) -> None:
        with self._lock:
            self.agenda.add_heartbeat(lease, heartbeat, row)
            self._wake_by(lease.first_heartbeat_at)

    def go_on(self) -> None:
        """Start a thread if there is work, and its thread died or could not be started."""
        with self._lock:
            if self._batch is not None or self.agenda.due_at() is not None:
                self._wake_by(math.inf)

    def stop(self) -> None:
        """Ask the thread to end after its current calls."""
        with self._lock:
            self._closing = True
            self._changed.notify_all()

    def finish(self, until: float) -> None:
        """Wait for the thread, retry pending work once, until `until`; emit an event for what is lost."""
        with self._lock:
            while self._works_elsewhere() and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            while self._advancing and self._changed.wait(1.0):  # the thread is not in a call, so this ends soon
                pass
            batch, self._batch = self._batch, None  # from here on the thread leaves its flows alone
            self._thread = None
            if batch is not None:
                batch.interrupt("the ledger is closing, and Redis has not replied yet", self._emit)
                batch.put_back(self._crew.room, lambda job: self)
            jobs = self.agenda.clear()
            self._closing = False
        for job in jobs:
            if time.monotonic() < until and isinstance(call := job.advance(time.monotonic(), self._emit), Call):
                job.advance(self._results([call])[0], self._emit)
            job.advance(GivenUp(), self._emit)
            with self._lock:
                self._crew.room.leave(job)

    def _works_elsewhere(self) -> bool:
        thread = self._thread
        return thread is not None and thread is not threading.current_thread() and thread.is_alive()

    def _wake_by(self, due: float) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._start()
        elif due < self._wakes_at:
            self._changed.notify_all()

    def _start(self) -> None:
        thread = threading.Thread(target=self._main, name=self._name, daemon=True)
        self._recover()
        self._thread = thread
        try:
            thread.start()
        except RuntimeError as error:  # too many threads, or the process is exiting; `close` flushes at exit
            self._thread = None
            logger.error("cannot start the background thread; the next background work tries again: %s", error)

    def _recover(self) -> None:
        """Put back the flows of a thread that died during a call."""
        batch, self._batch, self._advancing = self._batch, None, False
        if batch is not None:
            batch.interrupt("the background thread died during the call", self._emit)
            batch.put_back(self._crew.room, lambda job: self)

    def _put_back(self, batch: Batch) -> None:
        """Schedule the batch's flows again; if a row has moved to another node, with that node's runner."""
        for runner in batch.put_back(self._crew.room, self._runner_of) - {self}:
            runner.go_on()
            runner._changed.notify_all()

    def _runner_of(self, job: Job) -> _Runner:
        return self if self._closing else self._crew.runner(self.lane, job.row)

    def _main(self) -> None:
        try:
            while (batch := self._next()) is not None:
                if self._advance(batch, None):
                    while self._advance(batch, self._results(batch.calls)):
                        pass
        except BaseException:  # whatever ends a thread or greenlet from outside
            logger.exception("the background thread died; a new one continues")
            with self._lock:
                if self._thread is threading.current_thread():
                    self._start()

    def _next(self) -> Batch | None:
        """Wait until flows are due and return them; return None when the thread is to end."""
        with self._lock:
            while self._thread is threading.current_thread():
                batch = None if self._closing else self.agenda.take(time.monotonic())
                if batch is not None:
                    self._batch = batch
                    return batch
                due = self.agenda.due_at()
                now = time.monotonic()
                self._wakes_at = now + IDLE if due is None else due
                if not self._closing:
                    self._changed.wait(max(self._wakes_at - now, 0.0))
                self._wakes_at = 0.0
                if self._closing or (due is None and self.agenda.due_at() is None):
                    self._thread = None
                    self._changed.notify_all()
        return None

    def _advance(self, batch: Batch, results: list[Result] | None) -> bool:
        """Run the flows of a batch up to their next calls, and return whether there are any."""
        with self._lock:
            if self._batch is not batch:  # `finish` has taken the flows over
                return False
            self._advancing = True
        if results is None:
            batch.wake(self._emit)
        else:
            batch.advance(results, self._emit)
        with self._lock:
            self._advancing = False
            if not batch.calls:
                self._batch = None
                self._put_back(batch)
            self._changed.notify_all()
        return bool(batch.calls)

    def _results(self, calls: Sequence[Call[Any]]) -> list[Result]:
        try:
            return self._run(calls)
        except (Exception, SystemExit) as error:
            return failed(calls, error)


_backgrounds: WeakSet[Background] = WeakSet()
_closes_in: set[int] = set()


def _close_all(*_: object, **__: object) -> None:
    for background in list(_backgrounds):
        background.close()


def _close_when_a_child_process_ends() -> None:
    """Close the ledgers when children of multiprocessing and Celery end, which do not run `atexit` functions."""
    process = os.getpid()
    if process in _closes_in:
        return
    _closes_in.clear()
    _closes_in.add(process)
    for name in ("multiprocessing.util", "billiard.util"):
        if (util := sys.modules.get(name)) is not None:
            util.Finalize(None, _close_all, exitpriority=100)
    if (signals := sys.modules.get("celery.signals")) is not None:
        signals.worker_process_shutdown.connect(_close_all, weak=False)


atexit.register(_close_all)
