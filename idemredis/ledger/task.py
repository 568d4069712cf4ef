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
from .agenda import EXIT_WITHIN, IDLE, Agenda, Batch, EmitEvent, Heartbeat, Job, Place, Result, Room, begin, failed

__all__ = ["AsyncBackground"]

RunCalls: TypeAlias = Callable[[Sequence[Call[Any]]], Awaitable[list[Result]]]
Lane: TypeAlias = Literal["heartbeats", "retries"]


class AsyncBackground:
    """Run flows in tasks of each event loop, started when there is work and ended when idle.

    Heartbeats have a task of their own, so that no renewal waits for a completion or release that hangs. On a cluster
    there is one of each kind for each node, so that nothing waits for another node.
    """

    def __init__(self, run: RunCalls, emit: EmitEvent, name: str, place: Place) -> None:
        self._run = run
        self._emit = emit
        self._name = name
        self._place = place
        self._crews: dict[tuple[int, asyncio.AbstractEventLoop], _Crew] = {}

    def run(self, wanted: InBackground) -> None:
        """Run a flow; if a limit is reached, end it instead, and it emits what is lost."""
        begun = begin(wanted, self._emit)
        if begun is None:
            return
        try:
            room = self._crew().runner("retries", wanted.row).add(*begun)
        except RuntimeError:  # the loop has ended, and a call that it left unfinished is collected as garbage
            room = False
        if not room:
            begun[0].advance(GivenUp(), self._emit)

    def start_heartbeat(self, lease: Lease, heartbeat: Heartbeat, row: str) -> None:
        """Schedule a heartbeat for a third of the lease from now; it starts if the attempt is still running then."""
        self._crew().runner("heartbeats", row).start_heartbeat(lease, heartbeat, row)

    async def close(self) -> None:
        """Stop this loop's tasks, retry pending work once for about 2 s, and emit what is lost."""
        until = time.monotonic() + EXIT_WITHIN
        crew = self._crews.get((os.getpid(), asyncio.get_running_loop()))
        runners = [] if crew is None else crew.all()
        for runner in runners:
            runner.stop()
        await asyncio.gather(*(runner.finish(until) for runner in runners))

    def _crew(self) -> _Crew:
        """Return the running loop's runners."""
        loop = asyncio.get_running_loop()
        key = (os.getpid(), loop)
        crew = self._crews.get(key)
        if crew is None:
            for other in [other for other in self._crews if other[0] != key[0] or other[1].is_closed()]:
                del self._crews[other]
            crew = self._crews[key] = _Crew(loop, self._run, self._emit, self._name, self._place)
        return crew


class _Crew:
    """The runners of one event loop: one of each kind, for each node of a cluster."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, run: RunCalls, emit: EmitEvent, name: str, place: Place
    ) -> None:
        self.loop = loop
        self.run = run
        self.emit = emit
        self.name = name
        self.room = Room()
        self._place = place
        self._runners: dict[tuple[Lane, str | None], _Runner] = {}

    def runner(self, lane: Lane, row: str) -> _Runner:
        """Return the runner for a row."""
        key = lane, self._place(row)
        runner = self._runners.get(key)
        if runner is None:
            runner = self._runners[key] = _Runner(self, lane)
        return runner

    def all(self) -> list[_Runner]:
        return list(self._runners.values())


class _Runner:
    """The agenda of one kind of work, and the task that runs it."""

    def __init__(self, crew: _Crew, lane: Lane) -> None:
        self.lane = lane
        self._crew = crew
        self._loop = crew.loop
        self._run = crew.run
        self._emit = crew.emit
        self._name = crew.name if lane == "heartbeats" else f"{crew.name} {lane}"
        self.agenda = Agenda()
        self._batch: Batch | None = None
        self._task: asyncio.Task[None] | None = None
        self._guard: AsyncGenerator[None] | None = None
        self._changed = asyncio.Event()
        self._wakes_at = 0.0
        self._closing = False

    def add(self, job: Job, due: float) -> bool:
        if room := self._crew.room.enter(job):
            self.agenda.put(job, due)
            self._wake_by(due)
        return room

    def start_heartbeat(self, lease: Lease, heartbeat: Heartbeat, row: str) -> None:
        self.agenda.add_heartbeat(lease, heartbeat, row)
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
            jobs = self.agenda.clear()
            while jobs:
                job = jobs[0]
                if time.monotonic() < until and isinstance(call := job.advance(time.monotonic(), self._emit), Call):
                    job.advance((await self._results([call]))[0], self._emit)
                self._give_up(jobs.pop(0))
        finally:
            self._closing = False
            self._recover("the ledger is closing, and was cancelled")
            for job in jobs + self.agenda.clear():
                self._give_up(job)

    def _give_up(self, job: Job) -> None:
        job.advance(GivenUp(), self._emit)
        self._crew.room.leave(job)

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
            batch.put_back(self._crew.room, lambda job: self)

    def _put_back(self, batch: Batch) -> None:
        """Schedule the batch's flows again; if a row has moved to another node, with that node's runner."""
        for runner in batch.put_back(self._crew.room, self._runner_of) - {self}:
            runner._wake_by(0.0)
            runner._changed.set()

    def _runner_of(self, job: Job) -> _Runner:
        return self if self._closing else self._crew.runner(self.lane, job.row)

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
                self._put_back(batch)
        except BaseException:  # cancelled, perhaps with all tasks of the loop, which is ending; see the guard
            if not self._loop.is_closed():
                self._loop.call_soon(self._go_on, asyncio.current_task())
            raise

    def _go_on(self, ended: object) -> None:
        if self._task is ended and (self._batch is not None or self.agenda.due_at() is not None):
            self._start()

    async def _next(self) -> Batch | None:
        """Wait until flows are due and return them; return None when the task is to end."""
        while True:
            if not self._closing:
                self._batch = self.agenda.take(time.monotonic())
                if self._batch is not None:
                    return self._batch
            due = self.agenda.due_at()
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
            if self._closing or (due is None and self.agenda.due_at() is None):
                return None

    async def _results(self, calls: Sequence[Call[Any]]) -> list[Result]:
        try:
            return await self._run(calls)
        except Exception as error:
            return failed(calls, error)
