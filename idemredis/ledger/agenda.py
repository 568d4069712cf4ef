"""The schedule of background work: heartbeats, and retries of completions and releases. Threads are in `thread`."""

from __future__ import annotations

import heapq
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from ..core.flows import Emit, Flow, GivenUp, InBackground, Sleep
from ..core.operations import Call
from ..core.reservation import Lease
from ..errors import LedgerUnavailable

__all__ = [
    "EXIT_WITHIN",
    "IDLE",
    "Agenda",
    "Batch",
    "EmitEvent",
    "Heartbeat",
    "Job",
    "Place",
    "Result",
    "Room",
    "begin",
    "failed",
]

logger = logging.getLogger("idemredis")

Result: TypeAlias = Any
"""The outcome of a call, or the exception that it raised."""

EmitEvent: TypeAlias = Callable[[Emit], None]
Heartbeat: TypeAlias = Callable[[], Flow[None]]
"""Returns a new heartbeat flow for one lease."""

Place: TypeAlias = Callable[[str], "str | None"]
"""Returns the node of a cluster that has the row; None if it is unknown, and without a cluster."""

Kind: TypeAlias = Literal["heartbeat", "completion", "release"]

BATCH_WINDOW = 0.05
"""Seconds by which a flow may run early, so that many leases are renewed in one round trip."""

BATCH_SIZE = 100
"""Completions and releases sent in one round trip; each may wait for replicas."""

IDLE = 1.0
"""Seconds for which an idle thread or task waits for new work before it ends."""

MAX_COMPLETIONS = 10_000
MAX_BYTES = 64 * 1024 * 1024
"""Limits on responses kept in memory during an outage. A response beyond either is dropped: `completion_lost`."""

MAX_RELEASES = 10_000
"""Limit on releases kept during an outage, apart from responses. A row whose release is dropped is stale after its
lease."""

EXIT_WITHIN = 2.0
"""Seconds that an exiting process spends on completions and releases that are still pending."""


class Runner(Protocol):
    """A thread or task that runs flows when they are due."""

    agenda: Agenda


R = TypeVar("R", bound=Runner)


class Job:
    """A running flow. Heartbeats can be dropped at any time; completions and releases count against their limits."""

    __slots__ = ("flow", "kind", "row", "size")

    def __init__(self, flow: Flow[None], kind: Kind, size: int = 0, row: str = "") -> None:
        self.flow = flow
        self.kind = kind
        self.size = size
        self.row = row

    def advance(self, result: Result, emit: EmitEvent) -> Call[Any] | Sleep | None:
        """Run the flow up to its next call or sleep and return that step; return None when the flow has ended."""
        try:
            while True:
                step = self.flow.throw(result) if isinstance(result, BaseException) else self.flow.send(result)
                if isinstance(step, (Call, Sleep)):
                    return step
                if isinstance(step, Emit):
                    try:
                        emit(step)
                    except SystemExit:  # of an observer: it must not end the thread or task
                        logger.exception("an observer raised SystemExit in the background; it is ignored")
                result = None
        except (StopIteration, GivenUp):
            pass
        except Exception:
            logger.exception("background work of the ledger failed")
        return None


class Batch:
    """Flows that run together, up to the next sleep of each.

    Attributes:
        calls: the calls whose results the flows wait for.
    """

    def __init__(self, jobs: list[Job]) -> None:
        self.calls: list[Call[Any]] = []
        self._jobs = jobs
        self._calling = jobs
        self._slept: dict[Job, Sleep] = {}

    def wake(self, emit: EmitEvent) -> None:
        """Run each flow after its sleep, up to its next call or sleep."""
        self.advance([time.monotonic()] * len(self._jobs), emit)

    def advance(self, results: Sequence[Result], emit: EmitEvent) -> None:
        """Run each flow that made a call up to its next call or sleep."""
        jobs, self._calling, self.calls = self._calling, [], []
        killed: BaseException | None = None
        for job, result in zip(jobs, results, strict=True):
            try:
                step = job.advance(result, emit)
            except BaseException as error:  # it ends the thread or task, but no other flow
                killed = error
                continue
            if isinstance(step, Call):
                self._calling.append(job)
                self.calls.append(step)
            elif isinstance(step, Sleep):
                self._slept[job] = step
        if killed is not None:
            raise killed

    def interrupt(self, why: str, emit: EmitEvent) -> None:
        """Raise `LedgerUnavailable` in the flows that wait for a reply, so that each ends, or sleeps before it retries.

        A flow that sleeps already is left alone.
        """
        while self.calls:
            self.advance([LedgerUnavailable(why)] * len(self.calls), emit)

    def put_back(self, room: Room, runner_of: Callable[[Job], R]) -> set[R]:
        """Schedule the flows that sleep, each with its runner, and stop counting the others, which have ended.

        Returns:
            The runners that have flows to run.
        """
        now = time.monotonic()
        runners = set[R]()
        for job in self._jobs:
            if job in self._slept:
                runner = runner_of(job)
                runner.agenda.put(job, now + self._slept[job].seconds)
                runners.add(runner)
            else:
                room.leave(job)
        return runners


class Room:
    """Counts what is kept during an outage, on all agendas together, and limits it. The runners lock it."""

    def __init__(self) -> None:
        self._kept: Counter[Kind] = Counter()
        self._bytes = 0

    def enter(self, job: Job) -> bool:
        """Count a new job and return True, or return False if the limit of its kind is reached."""
        most = MAX_COMPLETIONS if job.kind == "completion" else MAX_RELEASES
        if self._kept[job.kind] >= most or self._bytes + job.size > MAX_BYTES:
            return False
        self._kept[job.kind] += 1
        self._bytes += job.size
        return True

    def leave(self, job: Job) -> None:
        """Stop counting a job that has ended."""
        if job.kind != "heartbeat":
            self._kept[job.kind] -= 1
            self._bytes -= job.size


class Agenda:
    """When each flow is due. The runner locks it against other threads; only the end of a lease needs no lock."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, Job]] = []
        self._ties = count()
        # Leases whose first heartbeat is not due yet. Most attempts finish before it, so no flow is made until then.
        self._first: dict[Lease, tuple[Heartbeat, str]] = {}

    def put(self, job: Job, due: float) -> None:
        """Schedule a job."""
        heapq.heappush(self._waiting, (due, next(self._ties), job))

    def add_heartbeat(self, lease: Lease, heartbeat: Heartbeat, row: str) -> None:
        """Schedule the first heartbeat of a lease; it is dropped if the lease ends earlier."""
        lease.when_ended(self._drop)
        self._first[lease] = heartbeat, row

    def due_at(self) -> float | None:
        """Return when the next job is due, by the local monotonic clock, or None if there is none."""
        first = [self._waiting[0][0]] if self._waiting else []
        return min(first + [lease.first_heartbeat_at for lease in self._first.copy()], default=None)

    def take(self, now: float) -> Batch | None:
        """Remove and return the jobs that are due within the batch window; None if there are none."""
        jobs: list[Job] = []
        limited = 0
        while self._waiting and self._waiting[0][0] <= now + BATCH_WINDOW and limited < BATCH_SIZE:
            jobs.append(heapq.heappop(self._waiting)[2])
            limited += jobs[-1].kind != "heartbeat"
        for lease, (heartbeat, row) in self._first.copy().items():
            if lease.first_heartbeat_at <= now + BATCH_WINDOW:
                self._drop(lease)
                flow = heartbeat()
                if next(flow, None) is not None:  # it sleeps first; the caller sends the time
                    jobs.append(Job(flow, "heartbeat", row=row))
        return Batch(jobs) if jobs else None

    def clear(self) -> list[Job]:
        """Empty the agenda and return the jobs that have something to store or release, completions first."""
        jobs = [job for _, _, job in sorted(self._waiting) if job.kind != "heartbeat"]
        self._waiting.clear()
        self._first.clear()
        return sorted(jobs, key=lambda job: job.kind != "completion")

    def _drop(self, lease: Lease) -> None:
        self._first.pop(lease, None)


def failed(calls: Sequence[Call[Any]], error: BaseException) -> list[Result]:
    """Return results for calls that failed with an error that did not come from Redis; the flows retry them."""
    logger.error("background calls of the ledger failed; they are retried", exc_info=error)
    return [LedgerUnavailable(f"the calls failed with {type(error).__name__}") for _ in calls]


def begin(wanted: InBackground, emit: EmitEvent) -> tuple[Job, float] | None:
    """Start a flow; return its job and when it is due, or None if it has ended already."""
    job = Job(wanted.flow, wanted.kind, wanted.size, wanted.row)
    first = job.advance(None, emit)
    return (job, time.monotonic() + first.seconds) if isinstance(first, Sleep) else None
