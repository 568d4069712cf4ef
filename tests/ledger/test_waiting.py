"""Duplicates that wait for the running attempt instead of being told to come back."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from idemredis import (
    AlreadyCompleted,
    InProgress,
    KeyInProgress,
    KeyReused,
    Policy,
    Replay,
    Reservation,
    Reused,
    StoredResponse,
)
from tests.support.servers import Server
from tests.support.subject import Mode
from tests.support.worker import MakeWorker, Worker

ANSWER = StoredResponse(200, (("content-type", "application/json"),), b'"done"')


@pytest.fixture
def waiter(make_worker: MakeWorker, mode: Mode, valkey_server: Server) -> Worker:
    return make_worker(mode, valkey_server)


def owner_of(waiter: Worker, lease: float = 30.0, key: str = "k") -> Reservation:
    outcome = waiter.looking.claim("worker", key, "f", lease=lease)
    assert isinstance(outcome, Reservation)
    return outcome


@contextmanager
def after(seconds: float, change: object) -> Iterator[None]:
    """Do something to the row that long after the block began, from a thread of its own."""
    assert callable(change)
    timer = threading.Timer(seconds, change)
    timer.start()
    try:
        yield
    finally:
        timer.join()


def test_a_waiting_duplicate_gets_the_answer_when_it_is_there(waiter: Worker) -> None:
    owner = owner_of(waiter)
    with after(0.1, lambda: waiter.looking.complete(owner, ANSWER)):
        outcome = waiter.do("claim", "worker", "k", "f", wait=5.0)
    assert outcome == Replay(ANSWER, 1, failed=False)


def test_a_waiting_block_is_told_that_it_was_completed(waiter: Worker) -> None:
    owner = owner_of(waiter)
    with after(0.1, lambda: waiter.looking.complete(owner, ANSWER)), pytest.raises(AlreadyCompleted) as done:
        waiter.reserve(lambda r: None, "worker", "k", "f", wait=5.0)
    assert done.value.response == ANSWER


def test_a_waiting_function_returns_the_result_of_the_other_attempt(waiter: Worker) -> None:
    owner = owner_of(waiter)
    once = waiter.once(lambda: "mine", principal="worker", key="k", operation="", fingerprint="f", wait=5.0)
    with after(0.1, lambda: waiter.looking.complete(owner, ANSWER)):
        assert once() == "done"


def test_the_wait_is_bounded(waiter: Worker) -> None:
    owner_of(waiter)
    began = time.monotonic()
    with waiter.unchanged("k"), pytest.raises(KeyInProgress) as busy:
        waiter.reserve(lambda r: None, "worker", "k", "f", wait=0.3)
    assert 0.3 <= time.monotonic() - began < 10.0
    assert 20 < busy.value.retry_after < 30


def test_another_fingerprint_does_not_wait(waiter: Worker) -> None:
    owner_of(waiter)
    began = time.monotonic()
    with pytest.raises(KeyReused):
        waiter.reserve(lambda r: None, "worker", "k", "other", wait=25.0)
    assert time.monotonic() - began < 10.0


def test_the_fingerprint_is_checked_anew_each_time(waiter: Worker) -> None:
    owner_of(waiter)

    def replace() -> None:
        """As if the row had ended and been claimed anew, without a moment in between that the waiter could use."""
        waiter.looking.client.hset(f"{waiter.looking.namespace}:worker:k", "fingerprint", "of something else")

    with after(0.1, replace):
        assert waiter.do("claim", "worker", "k", "f", wait=5.0) == Reused()


def test_a_waiter_whose_owner_dies_takes_over_behind_the_fence(waiter: Worker) -> None:
    owner = owner_of(waiter, lease=0.3)
    outcome = waiter.do("claim", "worker", "k", "f", wait=5.0)
    assert isinstance(outcome, Reservation)
    assert outcome.generation == owner.generation + 1


def test_a_waiter_whose_owner_releases_runs_at_once(waiter: Worker) -> None:
    owner = owner_of(waiter)
    began = time.monotonic()
    with after(0.1, lambda: waiter.looking.release(owner)):
        outcome = waiter.do("claim", "worker", "k", "f", wait=25.0)
    assert isinstance(outcome, Reservation)
    assert outcome.generation == 2
    assert time.monotonic() - began < 10.0


def test_of_many_waiters_one_takes_over_and_the_others_wait_on(valkey_server: Server, make_worker: MakeWorker) -> None:
    waiters = [make_worker("sync", valkey_server) for _ in range(5)]
    owner_of(waiters[0], lease=0.3)
    outcomes: list[object] = []

    def wait(waiter: Worker) -> None:
        outcome = waiter.do("claim", "worker", "k", "f", wait=3.0)
        if isinstance(outcome, Reservation):
            waiter.ledger.complete(outcome, ANSWER)
        outcomes.append(outcome)

    threads = [threading.Thread(target=wait, args=(waiter,)) for waiter in waiters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Replay"] * 4 + ["Reservation"]


def test_without_takeover_a_stale_row_is_not_waited_for(waiter: Worker, make_worker: MakeWorker) -> None:
    owner_of(waiter, lease=0.05)
    began = time.monotonic()
    outcome = waiter.do("claim", "worker", "k", "f", wait=25.0, takeover=False)
    assert outcome == InProgress(0.0, stale=True)
    assert time.monotonic() - began < 10.0


@pytest.mark.slow
def test_the_median_delay_after_a_completion_is_under_30_ms(
    make_worker: MakeWorker, mode: Mode, valkey_server: Server
) -> None:
    waiter = make_worker(mode, valkey_server, policy=Policy(heartbeat=False))
    medians: list[float] = []
    while len(medians) < 3 and not any(median < 0.030 for median in medians):  # a busy machine may spoil one
        medians.append(statistics.median(delay_after_completion(waiter, 0.05 + 0.03 * turn) for turn in range(15)))
    assert min(medians) < 0.030, medians


def delay_after_completion(waiter: Worker, seconds: float) -> float:
    """Wait for an owner that takes so long, and return by how much later its answer was there."""
    key = f"k{time.monotonic_ns()}"
    owner = owner_of(waiter, key=key)
    completed: list[float] = []

    def complete() -> None:
        waiter.looking.complete(owner, ANSWER)
        completed.append(time.monotonic())

    with after(seconds, complete):
        assert isinstance(waiter.do("claim", "worker", key, "f", wait=5.0), Replay)
        replayed = time.monotonic()
    return replayed - completed[0]
