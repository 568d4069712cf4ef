"""What goes on beside the caller: heartbeats, and releases and completions that are tried again.

Each is a flow. An agenda knows when each goes on; one thread a ledger (or one task an event loop) runs it, sends what
is due together, and is gone when there is nothing left to do.
"""

from __future__ import annotations

import asyncio
import atexit
import heapq
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import Any, TypeAlias
from weakref import WeakSet

from .errors import LedgerUnavailable
from .flows import Flow, GivenUp, Later, Sleep, Tell
from .operations import Call, Hold

__all__ = ["AsyncBackground", "Background"]

logger = logging.getLogger("idemredis")

Answer: TypeAlias = Any  # what a call gave: its outcome, or the exception it raised
Told: TypeAlias = Callable[[Tell], None]
Beat: TypeAlias = Callable[[], Flow[None]]  # makes a heartbeat's flow

TOGETHER = 0.05
"""Seconds by which a flow may go on early, so that many leases are renewed in one round trip."""

IDLE = 1.0
"""Seconds for which a thread or task with nothing to do waits for more before it ends."""

MOST_FLOWS = 10_000
MOST_BYTES = 64 * 1024 * 1024
"""Answers kept in memory while Redis is away. Beyond either bound an answer is lost, and that is told."""

EXIT_WITHIN = 2.0
"""Seconds that an exiting process spends on what is still to be stored."""


class _Job:
    """A flow under way. One that beats can be dropped at any time; any other counts against the bounds."""

    __slots__ = ("beats", "flow", "size")

    def __init__(self, flow: Flow[None], size: int = 0, *, beats: bool = False) -> None:
        self.flow = flow
        self.size = size
        self.beats = beats

    def go_on(self, answer: Answer, tell: Told) -> Call[Any] | Sleep | None:
        """Go on to where the flow next calls or sleeps; None when it has ended."""
        try:
            while True:
                step = self.flow.throw(answer) if isinstance(answer, BaseException) else self.flow.send(answer)
                if isinstance(step, (Call, Sleep)):
                    return step
                if isinstance(step, Tell):
                    tell(step)
                answer = None
        except (StopIteration, GivenUp):
            pass
        except Exception:
            logger.exception("a background flow of the ledger ended with an error")
        return None


class _Agenda:
    """Which flow goes on when. Its runner keeps threads out of each other's way; only a hold that ends does not ask."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, _Job]] = []
        self._ties = count()
        self._kept: dict[Hold, Beat] = {}  # before their first beat, which most attempts do not live to see
        self._flows = 0
        self._bytes = 0

    def take_on(self, job: _Job, due: float) -> bool:
        """Put a new job in, where there is room for it."""
        if self._flows >= MOST_FLOWS or self._bytes + job.size > MOST_BYTES:
            return False
        self._flows += 1
        self._bytes += job.size
        self.put(job, due)
        return True

    def count_out(self, job: _Job) -> None:
        if not job.beats:
            self._flows -= 1
            self._bytes -= job.size

    def put(self, job: _Job, due: float) -> None:
        heapq.heappush(self._waiting, (due, next(self._ties), job))

    def keep(self, hold: Hold, beat: Beat) -> None:
        hold.kept = self._kept
        self._kept[hold] = beat

    def due_at(self) -> float | None:
        first = [self._waiting[0][0]] if self._waiting else []
        return min(first + [hold.beats_at() for hold in self._kept.copy()], default=None)

    def take(self, now: float) -> list[_Job]:
        """Take out what is due, or so soon that it can go along."""
        jobs = []
        while self._waiting and self._waiting[0][0] <= now + TOGETHER:
            jobs.append(heapq.heappop(self._waiting)[2])
        for hold, beat in self._kept.copy().items():
            if hold.beats_at() <= now + TOGETHER:
                self._kept.pop(hold, None)
                flow = beat()
                next(flow)  # to its first Sleep, which is over
                jobs.append(_Job(flow, beats=True))
        return jobs

    def clear(self) -> list[_Job]:
        """Take everything out and return what must still be stored or released."""
        jobs = [job for _, _, job in sorted(self._waiting) if not job.beats]
        self._waiting.clear()
        self._kept.clear()
        return jobs


class Background:
    """Runs the flows in one daemon thread: started when there is something to do, and anew after a fork."""

    def __init__(self, run: Callable[[Sequence[Call[Any]]], list[Answer]], tell: Told, name: str) -> None:
        self._run = run
        self._tell = tell
        self._name = name
        self.forget()
        _backgrounds.add(self)

    def forget(self) -> None:
        """Begin with nothing, as a forked child does: what its parent holds is the parent's."""
        self._lock = threading.RLock()  # the collector may settle an abandoned stream in the middle of anything here
        self._changed = threading.Condition(self._lock)
        self._agenda = _Agenda()
        self._in_hand: list[_Job] = []
        self._thread: threading.Thread | None = None
        self._wakes_at = 0.0
        self._closing = False

    def begin(self, later: Later) -> None:
        """Take a flow on; where there is no room for it, have it say so and end."""
        job = _Job(later.flow, later.size)
        first = job.go_on(None, self._tell)
        if not isinstance(first, Sleep):
            return
        due = time.monotonic() + first.seconds
        with self._lock:
            if room := self._agenda.take_on(job, due):
                self._wake_by(due)
        if not room:
            job.go_on(GivenUp(), self._tell)

    def keep(self, hold: Hold, beat: Beat) -> None:
        """Begin a heartbeat when its first beat is due, unless the hold has ended by then."""
        with self._lock:
            self._agenda.keep(hold, beat)
            self._wake_by(hold.beats_at())

    def close(self, seconds: float = EXIT_WITHIN) -> None:
        """End the thread; try what is still to be stored once more, for about `seconds`, and tell what is lost."""
        until = time.monotonic() + seconds
        with self._lock:
            self._closing = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(seconds)
        with self._lock:
            interrupted, self._in_hand = self._in_hand, []
            jobs = _interrupt(interrupted, self._tell) + self._agenda.clear()
            self._closing = False
        for job in jobs:
            if time.monotonic() < until and isinstance(call := job.go_on(time.monotonic(), self._tell), Call):
                job.go_on(self._run([call])[0], self._tell)
            job.go_on(GivenUp(), self._tell)
            self._agenda.count_out(job)

    def _wake_by(self, due: float) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the process has too many, or is ending: then `close` does what it can
                logger.error("no thread for the ledger's background work, until there is more of it: %s", error)
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
                self._in_hand = [job for job in jobs if not job.beats]
            slept = self._calls_of(jobs)
            with self._lock:
                self._in_hand = []
                _put_back(self._agenda, jobs, slept)

    def _calls_of(self, jobs: list[_Job]) -> dict[_Job, Sleep]:
        """Let all these flows make their calls, together, until each sleeps or ends."""
        slept: dict[_Job, Sleep] = {}
        answers: list[Answer] = [time.monotonic()] * len(jobs)
        while jobs:
            jobs, calls = _go_on_together(jobs, answers, slept, self._tell)
            try:
                answers = self._run(calls) if calls else []
            except Exception as error:  # not Redis' doing: each flow is told, and the thread goes on
                answers = [error] * len(jobs)
        return slept


class AsyncBackground:
    """Runs the flows in one task an event loop: started when there is something to do, gone when there is not."""

    def __init__(self, run: Callable[[Sequence[Call[Any]]], Awaitable[list[Answer]]], tell: Told, name: str) -> None:
        self._run = run
        self._tell = tell
        self._name = name
        self._runners: dict[asyncio.AbstractEventLoop, _Runner] = {}

    def begin(self, later: Later) -> None:
        """Take a flow on; where there is no room for it, have it say so and end."""
        job = _Job(later.flow, later.size)
        first = job.go_on(None, self._tell)
        if not isinstance(first, Sleep):
            return
        if not self._runner().take_on(job, time.monotonic() + first.seconds):
            job.go_on(GivenUp(), self._tell)

    def keep(self, hold: Hold, beat: Beat) -> None:
        """Begin a heartbeat when its first beat is due, unless the hold has ended by then."""
        self._runner().keep(hold, beat)

    async def close(self) -> None:
        """End this loop's task; it tries what is still to be stored once more, and tells what is lost."""
        runner = self._runners.get(asyncio.get_running_loop())
        if runner is not None and runner.task is not None:
            runner.task.cancel()
            await asyncio.wait([runner.task])

    def _runner(self) -> _Runner:
        loop = asyncio.get_running_loop()
        runner = self._runners.get(loop)
        if runner is None:
            for ended in [other for other in self._runners if other.is_closed()]:
                del self._runners[ended]
            runner = self._runners[loop] = _Runner(self._run, self._tell)
            runner.task = loop.create_task(self._until_idle(loop, runner), name=self._name)
        return runner

    async def _until_idle(self, loop: asyncio.AbstractEventLoop, runner: _Runner) -> None:
        try:
            await runner.loop()
        finally:
            self._runners.pop(loop, None)


class _Runner:
    """One event loop's agenda, and the task that runs it."""

    def __init__(self, run: Callable[[Sequence[Call[Any]]], Awaitable[list[Answer]]], tell: Told) -> None:
        self.agenda = _Agenda()
        self.task: asyncio.Task[None] | None = None
        self._run = run
        self._tell = tell
        self._changed = asyncio.Event()
        self._wakes_at = 0.0
        self._in_hand: list[_Job] = []

    def take_on(self, job: _Job, due: float) -> bool:
        if room := self.agenda.take_on(job, due):
            self._wake_by(due)
        return room

    def keep(self, hold: Hold, beat: Beat) -> None:
        self.agenda.keep(hold, beat)
        self._wake_by(hold.beats_at())

    def _wake_by(self, due: float) -> None:
        if due < self._wakes_at:
            self._changed.set()

    async def loop(self) -> None:
        try:
            while True:
                self._in_hand = self.agenda.take(time.monotonic())
                if self._in_hand:
                    await self._step()
                    continue
                due = self.agenda.due_at()
                now = time.monotonic()
                self._wakes_at = now + IDLE if due is None else due
                self._changed.clear()
                try:
                    async with asyncio.timeout(self._wakes_at - now):
                        await self._changed.wait()
                except TimeoutError:
                    if due is None and self.agenda.due_at() is None:
                        return
        except asyncio.CancelledError:
            await self._finish()
            raise

    async def _step(self) -> None:
        jobs, slept = self._in_hand, dict[_Job, Sleep]()
        answers: list[Answer] = [time.monotonic()] * len(jobs)
        while jobs:
            jobs, calls = _go_on_together(jobs, answers, slept, self._tell)
            try:
                answers = await self._run(calls) if calls else []
            except Exception as error:  # not Redis' doing: each flow is told, and the task goes on
                answers = [error] * len(jobs)
        _put_back(self.agenda, self._in_hand, slept)
        self._in_hand = []

    async def _finish(self) -> None:
        until = time.monotonic() + EXIT_WITHIN
        for job in _interrupt(self._in_hand, self._tell) + self.agenda.clear():
            if time.monotonic() < until and isinstance(call := job.go_on(time.monotonic(), self._tell), Call):
                job.go_on((await self._run([call]))[0], self._tell)
            job.go_on(GivenUp(), self._tell)


def _go_on_together(
    jobs: list[_Job], answers: list[Answer], slept: dict[_Job, Sleep], tell: Told
) -> tuple[list[_Job], list[Call[Any]]]:
    """Go on with each flow; return those that want a call, and their calls."""
    calling, calls = [], []
    for job, answer in zip(jobs, answers, strict=True):
        step = job.go_on(answer, tell)
        if isinstance(step, Call):
            calling.append(job)
            calls.append(step)
        elif isinstance(step, Sleep):
            slept[job] = step
    return calling, calls


def _interrupt(jobs: list[_Job], tell: Told) -> list[_Job]:
    """Tell flows whose call was still under way that its answer is not coming; return those that want to try again."""
    unanswered = LedgerUnavailable("the process is ending; the answer did not come in time")
    return [job for job in jobs if not job.beats and isinstance(job.go_on(unanswered, tell), Sleep)]


def _put_back(agenda: _Agenda, jobs: list[_Job], slept: dict[_Job, Sleep]) -> None:
    now = time.monotonic()
    for job in jobs:
        if job in slept:
            agenda.put(job, now + slept[job].seconds)
        else:
            agenda.count_out(job)


_backgrounds: WeakSet[Background] = WeakSet()


def _forget_all() -> None:
    for background in list(_backgrounds):
        background.forget()


def _close_all() -> None:
    for background in list(_backgrounds):
        background.close()


os.register_at_fork(after_in_child=_forget_all)
atexit.register(_close_all)
