"""The schedule of background work: heartbeats, and retries of completions and releases. Threads are in `thread`."""

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
"""The outcome of a call, or the exception that it raised."""

EmitEvent: TypeAlias = Callable[[Emit], None]
Heartbeat: TypeAlias = Callable[[], Flow[None]]
"""Returns a new heartbeat flow for one lease."""

BATCH_WINDOW = 0.05
"""Seconds by which a flow may run early, so that many leases are renewed in one round trip."""

IDLE = 1.0
"""Seconds for which an idle thread or task waits for new work before it ends."""

MAX_FLOWS = 10_000
MAX_BYTES = 64 * 1024 * 1024
"""Limits on responses kept in memory during an outage. A response beyond either is dropped: `completion_lost`."""

EXIT_WITHIN = 2.0
"""Seconds that an exiting process spends on completions and releases that are still pending."""


class Job:
    """A running flow. Heartbeats can be dropped at any time; all other flows count against the limits."""

    __slots__ = ("flow", "is_heartbeat", "size")

    def __init__(self, flow: Flow[None], size: int = 0, *, is_heartbeat: bool = False) -> None:
        self.flow = flow
        self.size = size
        self.is_heartbeat = is_heartbeat

    def advance(self, result: Result, emit: EmitEvent) -> Call[Any] | Sleep | None:
        """Run the flow up to its next call or sleep and return that step; return None when the flow has ended."""
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
            logger.exception("background work of the ledger failed")
        return None


class Agenda:
    """Which flow is due when. The runner locks it against other threads; only the end of a lease needs no lock."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, Job]] = []
        self._ties = count()
        # Leases whose first heartbeat is not due yet. Most attempts finish before it, so no flow is made until then.
        self._first: dict[Lease, Heartbeat] = {}
        self._flows = 0
        self._bytes = 0

    def add(self, job: Job, due: float) -> bool:
        """Add a new job and return True, or return False if a limit is reached."""
        if self._flows >= MAX_FLOWS or self._bytes + job.size > MAX_BYTES:
            return False
        self._flows += 1
        self._bytes += job.size
        self.put(job, due)
        return True

    def remove(self, job: Job) -> None:
        """Stop counting a job that has ended against the limits."""
        if not job.is_heartbeat:
            self._flows -= 1
            self._bytes -= job.size

    def put(self, job: Job, due: float) -> None:
        """Schedule a job."""
        heapq.heappush(self._waiting, (due, next(self._ties), job))

    def add_heartbeat(self, lease: Lease, heartbeat: Heartbeat) -> None:
        """Schedule the first heartbeat of a lease; it is dropped if the lease ends earlier."""
        lease.when_ended(self._drop)
        self._first[lease] = heartbeat

    def due_at(self) -> float | None:
        """Return when the next job is due, by the local monotonic clock, or None if there is none."""
        first = [self._waiting[0][0]] if self._waiting else []
        return min(first + [lease.first_heartbeat_at for lease in self._first.copy()], default=None)

    def take(self, now: float) -> list[Job]:
        """Remove and return the jobs that are due within the batch window."""
        jobs = []
        while self._waiting and self._waiting[0][0] <= now + BATCH_WINDOW:
            jobs.append(heapq.heappop(self._waiting)[2])
        for lease, heartbeat in self._first.copy().items():
            if lease.first_heartbeat_at <= now + BATCH_WINDOW:
                self._drop(lease)
                flow = heartbeat()
                next(flow)  # advance to the initial Sleep; the caller sends the time
                jobs.append(Job(flow, is_heartbeat=True))
        return jobs

    def clear(self) -> list[Job]:
        """Empty the agenda and return the jobs that still have something to store or release."""
        jobs = [job for _, _, job in sorted(self._waiting) if not job.is_heartbeat]
        self._waiting.clear()
        self._first.clear()
        return jobs

    def _drop(self, lease: Lease) -> None:
        self._first.pop(lease, None)


def advance_all(
    jobs: list[Job], results: list[Result], slept: dict[Job, Sleep], emit: EmitEvent
) -> tuple[list[Job], list[Call[Any]]]:
    """Run each flow up to its next call or sleep; return the jobs that make a call, and their calls."""
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
    """Raise `LedgerUnavailable` in flows that are waiting for a reply; return those that want to retry."""
    error = LedgerUnavailable("the process is exiting, and Redis has not replied yet")
    return [job for job in jobs if not job.is_heartbeat and isinstance(job.advance(error, emit), Sleep)]


def put_back(agenda: Agenda, jobs: list[Job], slept: dict[Job, Sleep]) -> None:
    """Schedule the jobs that sleep again, and remove the others, which have ended."""
    now = time.monotonic()
    for job in jobs:
        if job in slept:
            agenda.put(job, now + slept[job].seconds)
        else:
            agenda.remove(job)


def begin(wanted: InBackground, emit: EmitEvent) -> tuple[Job, float] | None:
    """Start a flow; return its job and when it is due, or None if it has ended already."""
    job = Job(wanted.flow, wanted.size)
    first = job.advance(None, emit)
    return (job, time.monotonic() + first.seconds) if isinstance(first, Sleep) else None
