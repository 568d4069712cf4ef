"""Run a ledger's background work in one task of each event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

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

__all__ = ["AsyncBackground"]


class AsyncBackground:
    """Run flows in one task of each event loop, started when there is work and ended when idle."""

    def __init__(
        self, run: Callable[[Sequence[Call[Any]]], Awaitable[list[Result]]], emit: EmitEvent, name: str
    ) -> None:
        self._run = run
        self._emit = emit
        self._name = name
        self._runners: dict[asyncio.AbstractEventLoop, _Runner] = {}

    def run(self, wanted: InBackground) -> None:
        """Run a flow; if a limit is reached, end it instead, and it emits what is lost."""
        begun = begin(wanted, self._emit)
        if begun is not None and not self._runner().add(*begun):
            begun[0].advance(GivenUp(), self._emit)

    def start_heartbeat(self, lease: Lease, heartbeat: Heartbeat) -> None:
        """Schedule a heartbeat for a third of the lease from now; it starts if the attempt is still running then."""
        self._runner().start_heartbeat(lease, heartbeat)

    async def close(self) -> None:
        """Stop this loop's task, which retries pending work once and emits what is lost."""
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
            runner = self._runners[loop] = _Runner(self._run, self._emit)
            runner.task = loop.create_task(self._until_idle(loop, runner), name=self._name)
        return runner

    async def _until_idle(self, loop: asyncio.AbstractEventLoop, runner: _Runner) -> None:
        try:
            await runner.loop()
        finally:
            self._runners.pop(loop, None)


class _Runner:
    """One event loop's agenda, and the task that runs it."""

    def __init__(self, run: Callable[[Sequence[Call[Any]]], Awaitable[list[Result]]], emit: EmitEvent) -> None:
        self.agenda = Agenda()
        self.task: asyncio.Task[None] | None = None
        self._run = run
        self._emit = emit
        self._changed = asyncio.Event()
        self._wakes_at = 0.0
        self._running: list[Job] = []

    def add(self, job: Job, due: float) -> bool:
        if room := self.agenda.add(job, due):
            self._wake_by(due)
        return room

    def start_heartbeat(self, lease: Lease, heartbeat: Heartbeat) -> None:
        self.agenda.add_heartbeat(lease, heartbeat)
        self._wake_by(lease.first_heartbeat_at)

    def _wake_by(self, due: float) -> None:
        if due < self._wakes_at:
            self._changed.set()

    async def loop(self) -> None:
        try:
            while True:
                self._running = self.agenda.take(time.monotonic())
                if self._running:
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
        jobs, slept = self._running, dict[Job, Sleep]()
        results: list[Result] = [time.monotonic()] * len(jobs)
        while jobs:
            jobs, calls = advance_all(jobs, results, slept, self._emit)
            try:
                results = await self._run(calls) if calls else []
            except Exception as error:  # not an error of Redis: raise it in each flow, and keep the task running
                results = [error] * len(jobs)
        put_back(self.agenda, self._running, slept)
        self._running = []

    async def _finish(self) -> None:
        until = time.monotonic() + EXIT_WITHIN
        for job in interrupt(self._running, self._emit) + self.agenda.clear():
            if time.monotonic() < until and isinstance(call := job.advance(time.monotonic(), self._emit), Call):
                job.advance((await self._run([call]))[0], self._emit)
            job.advance(GivenUp(), self._emit)
