"""Run a ledger's background work in tasks of each event loop: one for heartbeats, and one for retries."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeAlias

from ..core.flows import GivenUp, InBackground
from ..core.operations import Call
from ..core.reservation import Lease
from .agenda import EXIT_WITHIN, IDLE, Agenda, Batch, EmitEvent, Heartbeat, Job, Result, begin, failed

__all__ = ["AsyncBackground"]

RunCalls: TypeAlias = Callable[[Sequence[Call[Any]]], Awaitable[list[Result]]]
Lane: TypeAlias = Literal["heartbeats", "retries"]


class AsyncBackground:
    """Run flows in tasks of each event loop, started when there is work and ended when idle.

    Heartbeats have a task of their own, so that no renewal waits for a completion or release that hangs.
    """

    def __init__(self, run: RunCalls, emit: EmitEvent, name: str) -> None:
        self._run = run
        self._emit = emit
        self._name = name
        self._runners: dict[tuple[Any, ...], _Runner] = {}

    def run(self, wanted: InBackground) -> None:
        """Run a flow; if a limit is reached, end it instead, and it emits what is lost."""
        begun = begin(wanted, self._emit)
        if begun is None:
            return
        try:
            room = self._runner("retries").add(*begun)
        except RuntimeError:  # the loop has ended, and a call that it left unfinished is collected as garbage
            room = False
        if not room:
            begun[0].advance(GivenUp(), self._emit)

    def start_heartbeat(self, lease: Lease, heartbeat: Heartbeat) -> None:
        """Schedule a heartbeat for a third of the lease from now; it starts if the attempt is still running then."""
        self._runner("heartbeats").start_heartbeat(lease, heartbeat)

    async def close(self) -> None:
        """Stop this loop's tasks, retry pending work once for about 2 s, and emit what is lost."""
        until = time.monotonic() + EXIT_WITHIN
        loop = asyncio.get_running_loop()
        runners = [runner for key, runner in self._runners.items() if key[:2] == (os.getpid(), loop)]
        for runner in runners:
            runner.stop()
        for runner in sorted(runners, key=lambda runner: runner.lane, reverse=True):  # responses first
            await runner.finish(until)

    def _runner(self, lane: Lane) -> _Runner:
        """Return the running loop's runner."""
        loop = asyncio.get_running_loop()
        key = (os.getpid(), loop, lane)
        runner = self._runners.get(key)
        if runner is None:
            for other in [other for other in self._runners if other[0] != key[0] or other[1].is_closed()]:
                del self._runners[other]
            runner = self._runners[key] = _Runner(lane, loop, self._run, self._emit, self._name)
        return runner


class _Runner:
    """One event loop's agenda, and the task that runs it."""

    def __init__(self, lane: Lane, loop: asyncio.AbstractEventLoop, run: RunCalls, emit: EmitEvent, name: str) -> None:
        self.lane = lane
        self._loop = loop
        self._run = run
        self._emit = emit
        self._name = name if lane == "heartbeats" else f"{name} {lane}"
        self._agenda = Agenda()
        self._batch: Batch | None = None
        self._task: asyncio.Task[None] | None = None
        self._guard: AsyncGenerator[None] | None = None
        self._changed = asyncio.Event()
        self._wakes_at = 0.0
        self._closing = False

    def add(self, job: Job, due: float) -> bool:
        if room := self._agenda.add(job, due):
            self._wake_by(due)
        return room

    def start_heartbeat(self, lease: Lease, heartbeat: Heartbeat) -> None:
        self._agenda.add_heartbeat(lease, heartbeat)
        self._wake_by(lease.first_heartbeat_at)

    def stop(self) -> None:
        """Ask the task to end after its current calls."""
        self._closing = True
        self._changed.set()

    async def finish(self, until: float) -> None:
        """Wait for the task, retry what is pending once until then, and emit what is lost."""
        task, self._task = self._task, None
        jobs: list[Job] = []
        try:
            if task is not None and task is not asyncio.current_task() and not task.done():
                await asyncio.wait([task], timeout=max(until - time.monotonic(), 0.0))
                task.cancel()
            self._recover("the ledger is closing, and Redis has not replied yet")
            jobs = self._agenda.clear()
            while jobs:
                job = jobs[0]
                if time.monotonic() < until and isinstance(call := job.advance(time.monotonic(), self._emit), Call):
                    job.advance((await self._results([call]))[0], self._emit)
                self._give_up(jobs.pop(0))
        finally:
            self._closing = False
            self._recover("the ledger is closing, and was cancelled")
            for job in jobs + self._agenda.clear():
                self._give_up(job)

    def _give_up(self, job: Job) -> None:
        job.advance(GivenUp(), self._emit)
        self._agenda.remove(job)

    def _wake_by(self, due: float) -> None:
        if self._task is None or self._task.done():
            self._start()
        elif due < self._wakes_at:
            self._changed.set()

    def _start(self) -> None:
        self._recover("the background task ended during the call")
        self._task = self._loop.create_task(self._main(), name=self._name)
        if self._guard is None:
            self._guard = self._finish_with_the_loop()
            with suppress(StopIteration):
                self._guard.__anext__().send(None)  # run it to its `yield`, which registers it with the loop

    def _recover(self, why: str) -> None:
        """Put back the flows of a task that ended during a call."""
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.interrupt(why, self._emit)
            batch.put_back(self._agenda)

    async def _finish_with_the_loop(self) -> AsyncGenerator[None]:
        """Finish when the loop ends.

        `asyncio.run` cancels all tasks, and only then closes asynchronous generators. By then each task has ended its
        calls, and handed over what is to be retried.
        """
        try:
            yield
        finally:
            self._guard = None
            self.stop()
            await self.finish(time.monotonic() + EXIT_WITHIN)

    async def _main(self) -> None:
        try:
            while (batch := await self._next()) is not None:
                batch.wake(self._emit)
                while batch.calls:
                    results = await self._results(batch.calls)
                    if self._batch is not batch:  # `finish` has taken the flows over
                        return
                    batch.advance(results, self._emit)
                self._batch = None
                batch.put_back(self._agenda)
        except BaseException:  # cancelled, perhaps with all tasks of the loop, which is ending; see the guard
            if not self._loop.is_closed():
                self._loop.call_soon(self._go_on, asyncio.current_task())
            raise

    def _go_on(self, ended: object) -> None:
        if self._task is ended and (self._batch is not None or self._agenda.due_at() is not None):
            self._start()

    async def _next(self) -> Batch | None:
        """Wait until flows are due and return them; return None when the task is to end."""
        while True:
            if not self._closing:
                self._batch = self._agenda.take(time.monotonic())
                if self._batch is not None:
                    return self._batch
            due = self._agenda.due_at()
            now = time.monotonic()
            self._wakes_at = now + IDLE if due is None else due
            self._changed.clear()
            if not self._closing:
                try:
                    async with asyncio.timeout(max(self._wakes_at - now, 0.0)):
                        await self._changed.wait()
                except TimeoutError:
                    pass
            self._wakes_at = 0.0
            if self._closing or (due is None and self._agenda.due_at() is None):
                return None

    async def _results(self, calls: Sequence[Call[Any]]) -> list[Result]:
        try:
            return await self._run(calls)
        except Exception as error:
            return failed(calls, error)
