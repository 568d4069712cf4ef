"""What is due when in the background: heartbeats, and releases and completions that are tried again. No thread here."""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable
from itertools import count
from typing import Any, TypeAlias

from ..core.flows import Emit, Flow, GivenUp, InBackground, Sleep
from ..core.operations import Call
from ..core.reservation import Lease
from ..errors import LedgerUnavailable

__all__ = [
    "EXIT_WITHIN",
    "IDLE",
    "Agenda",
    "EmitEvent",
    "Heartbeat",
    "Job",
    "Result",
    "advance_all",
    "begin",
    "interrupt",
    "put_back",
]

logger = logging.getLogger("idemredis")

Result: TypeAlias = Any
"""What a call came to: its outcome, or the exception it raised."""

EmitEvent: TypeAlias = Callable[[Emit], None]
Heartbeat: TypeAlias = Callable[[], Flow[None]]
"""Makes the flow of one heartbeat."""

TOGETHER = 0.05
"""Seconds by which a flow may go on early, so that many leases are renewed in one round trip."""

IDLE = 1.0
"""Seconds for which a thread or task with nothing to do waits for more before it ends."""

MOST_FLOWS = 10_000
MOST_BYTES = 64 * 1024 * 1024
"""Responses kept in memory while Redis is away. Beyond either bound one is lost, and `completion_lost` is emitted."""

EXIT_WITHIN = 2.0
"""Seconds that an exiting process spends on what is still to be stored."""


class Job:
    """A flow under way. A heartbeat can be dropped at any time; every other flow counts against the bounds."""

    __slots__ = ("flow", "is_heartbeat", "size")

    def __init__(self, flow: Flow[None], size: int = 0, *, is_heartbeat: bool = False) -> None:
        self.flow = flow
        self.size = size
        self.is_heartbeat = is_heartbeat

    def advance(self, result: Result, emit: EmitEvent) -> Call[Any] | Sleep | None:
        """Run the flow until it next calls or sleeps, and return that step; None when it has ended."""
        try:
            while True:
                step = self.flow.throw(result) if isinstance(result, BaseException) else self.flow.send(result)
                if isinstance(step, (Call, Sleep)):
                    return step
                if isinstance(step, Emit):
                    emit(step)
                result = None
        except (StopIteration, GivenUp):
            pass
        except Exception:
            logger.exception("a background flow of the ledger ended with an error")
        return None


class Agenda:
    """Which flow is due when. Its runner locks it against other threads; only a lease that ends reaches it without."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, Job]] = []
        self._ties = count()
        self._first: dict[Lease, Heartbeat] = {}  # first heartbeat not due yet; most attempts finish before it
        self._flows = 0
        self._bytes = 0

    def add(self, job: Job, due: float) -> bool:
        """Add a new job where there is room for it, and return whether there was."""
        if self._flows >= MOST_FLOWS or self._bytes + job.size > MOST_BYTES:
            return False
        self._flows += 1
        self._bytes += job.size
        self.put(job, due)
        return True

    def remove(self, job: Job) -> None:
        """Count a job that has ended."""
        if not job.is_heartbeat:
            self._flows -= 1
            self._bytes -= job.size

    def put(self, job: Job, due: float) -> None:
        """Have a job run again when it is due."""
        heapq.heappush(self._waiting, (due, next(self._ties), job))

    def add_heartbeat(self, lease: Lease, heartbeat: Heartbeat) -> None:
        """Note when a lease's first heartbeat is due; it is forgotten when the lease ends before."""
        lease.when_ended(self._drop)
        self._first[lease] = heartbeat

    def due_at(self) -> float | None:
        """Return when the next job is due, by the local monotonic clock; None where there is none."""
        first = [self._waiting[0][0]] if self._waiting else []
        return min(first + [lease.first_heartbeat_at for lease in self._first.copy()], default=None)

    def take(self, now: float) -> list[Job]:
        """Take out what is due, or so soon that it can go along."""
        jobs = []
        while self._waiting and self._waiting[0][0] <= now + TOGETHER:
            jobs.append(heapq.heappop(self._waiting)[2])
        for lease, heartbeat in self._first.copy().items():
            if lease.first_heartbeat_at <= now + TOGETHER:
                self._drop(lease)
                flow = heartbeat()
                next(flow)  # to its first Sleep, which is over
                jobs.append(Job(flow, is_heartbeat=True))
        return jobs

    def clear(self) -> list[Job]:
        """Take everything out and return what must still be stored or released."""
        jobs = [job for _, _, job in sorted(self._waiting) if not job.is_heartbeat]
        self._waiting.clear()
        self._first.clear()
        return jobs

    def _drop(self, lease: Lease) -> None:
        self._first.pop(lease, None)


def advance_all(
    jobs: list[Job], results: list[Result], slept: dict[Job, Sleep], emit: EmitEvent
) -> tuple[list[Job], list[Call[Any]]]:
    """Run each flow until it next calls or sleeps; return those that call, with their calls."""
    calling, calls = [], []
    for job, result in zip(jobs, results, strict=True):
        step = job.advance(result, emit)
        if isinstance(step, Call):
            calling.append(job)
            calls.append(step)
        elif isinstance(step, Sleep):
            slept[job] = step
    return calling, calls


def interrupt(jobs: list[Job], emit: EmitEvent) -> list[Job]:
    """Tell each flow whose call is under way that no reply will come; return those that would try again."""
    unanswered = LedgerUnavailable("the process is ending; the reply did not come in time")
    return [job for job in jobs if not job.is_heartbeat and isinstance(job.advance(unanswered, emit), Sleep)]


def put_back(agenda: Agenda, jobs: list[Job], slept: dict[Job, Sleep]) -> None:
    """Put the jobs that sleep back on the agenda; the others have ended."""
    now = time.monotonic()
    for job in jobs:
        if job in slept:
            agenda.put(job, now + slept[job].seconds)
        else:
            agenda.remove(job)


def begin(wanted: InBackground, emit: EmitEvent) -> tuple[Job, float] | None:
    """Start a flow; return its job and when it is due, or None where it has ended already."""
    job = Job(wanted.flow, wanted.size)
    first = job.advance(None, emit)
    return (job, time.monotonic() + first.seconds) if isinstance(first, Sleep) else None
