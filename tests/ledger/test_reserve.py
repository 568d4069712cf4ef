"""What a `reserve` block does to its row."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from idemredis import (
    AlreadyCompleted,
    ConfigurationError,
    FencedOut,
    HoldForReview,
    InvalidResponse,
    KeyInProgress,
    KeyReused,
    Ledger,
    LedgerUnavailable,
    Policy,
    PreviousAttemptFailed,
    Reservation,
    StoredResponse,
)
from tests.support.clock import SLACK, TurnedClock, expires_at
from tests.support.proxy import Proxy
from tests.support.servers import Server
from tests.support.subject import AnyServer, Mode
from tests.support.waiting import wait_until
from tests.support.worker import MakeWorker, Worker

ANSWER = StoredResponse(201, (("content-type", "text/plain"),), b"\xff\x00")
LEASE = 3.0
"""Long enough for a heartbeat to be in time on a machine that is busy with other tests."""


def nothing(r: Reservation) -> None:
    """A block that does nothing."""


def failing(error: BaseException) -> Any:
    def work(r: Reservation) -> None:
        raise error

    return work


def storing(value: object) -> Any:
    def work(r: Reservation) -> None:
        r.result = value

    return work


def test_leaving_the_block_stores_its_result_as_json_for_every_duplicate(worker: Worker) -> None:
    worker.reserve(storing({"sent": [1, "é", None]}), "worker", "k", "f")
    with pytest.raises(AlreadyCompleted) as done:
        worker.reserve(failing(AssertionError("ran again")), "worker", "k", "f")
    assert done.value.response.status == 200
    assert done.value.response.headers == (("content-type", "application/json"),)
    assert json.loads(done.value.response.body) == {"sent": [1, "é", None]}
    assert worker.row("k").generation == 1


def test_a_block_that_says_nothing_stores_null(worker: Worker) -> None:
    worker.reserve(nothing, "worker", "k", "f")
    assert worker.fields("k")[b"response_body"] == b"null"


def test_a_block_may_store_a_response_of_its_own(worker: Worker) -> None:
    def work(r: Reservation) -> None:
        r.response = ANSWER

    worker.reserve(work, "worker", "k", "f")
    assert worker.row("k").response == ANSWER


def test_what_is_no_response_is_refused_where_it_is_set(worker: Worker) -> None:
    def work(r: Reservation) -> None:
        with pytest.raises(InvalidResponse):
            r.response = b"bytes"  # type: ignore[assignment]
        with pytest.raises(AttributeError):
            r.results = 1  # type: ignore[attr-defined]
        with pytest.raises(AttributeError):
            r.generation = 2  # type: ignore[misc]

    worker.reserve(work, "worker", "k", "f")
    assert worker.fields("k")[b"response_body"] == b"null"


def test_the_block_has_all_that_a_reservation_has(worker: Worker) -> None:
    seen: list[Reservation] = []
    worker.reserve(seen.append, "worker", "k", "f", operation="op", lease=7.0, route="mail.send")
    r = seen[0]
    assert isinstance(r, Reservation)
    assert (r.principal, r.key, r.operation, r.fingerprint) == ("worker", "k", "op", "f")
    assert (r.generation, r.taken_over, r.last_checkpoint, r.route) == (1, False, None, "mail.send")
    row = worker.row("k", operation="op")
    assert (row.route, row.lease) == ("mail.send", 7.0)
    other = worker.looking.claim("worker", "k2", "f", "op")
    assert isinstance(other, Reservation)
    assert r.downstream_key("mail") != other.downstream_key("mail")
    assert not r.held  # the block is over
    with pytest.raises(FencedOut):
        r.ensure_held()


def test_an_exception_releases_the_row_and_the_next_retry_runs_at_once(worker: Worker) -> None:
    with pytest.raises(ZeroDivisionError):
        worker.reserve(failing(ZeroDivisionError()), "worker", "k", "f")
    generations: list[int] = []
    worker.reserve(lambda r: generations.append(r.generation), "worker", "k", "f")
    assert generations == [2]
    assert worker.row("k").status == "completed"


def test_hold_keeps_the_row_until_its_lease_ends(worker: Worker, clock: TurnedClock) -> None:
    with pytest.raises(ZeroDivisionError):
        worker.reserve(failing(ZeroDivisionError()), "worker", "k", "f", lease=100.0, on_error="hold")
    clock.turn(80)
    with pytest.raises(KeyInProgress) as busy:
        worker.reserve(nothing, "worker", "k", "f")
    assert 20.0 - SLACK < busy.value.retry_after <= 20.0
    with worker.unchanged("k"), pytest.raises(KeyInProgress):
        worker.reserve(nothing, "worker", "k", "f")
    clock.turn(20)
    worker.reserve(nothing, "worker", "k", "f")
    assert worker.row("k").generation == 2


def test_store_keeps_the_error_as_a_final_failure(worker: Worker) -> None:
    with pytest.raises(ValueError, match="no such account"):
        worker.reserve(failing(ValueError("no such account")), "worker", "k", "f", on_error="store")
    with pytest.raises(PreviousAttemptFailed, match="no such account") as failed:
        worker.reserve(failing(AssertionError("ran again")), "worker", "k", "f", on_error="store")
    assert json.loads(failed.value.response.body) == {"error": "ValueError", "message": "no such account"}
    assert worker.row("k").status == "failed"


@pytest.mark.parametrize("error", [LedgerUnavailable("gone"), KeyInProgress(1.0), KeyboardInterrupt(), SystemExit(3)])
def test_store_keeps_nothing_that_says_nothing_final(worker: Worker, error: BaseException) -> None:
    if worker.mode == "async" and isinstance(error, (KeyboardInterrupt, SystemExit)):
        error = asyncio.CancelledError()  # what an event loop makes of them
    with pytest.raises(type(error)):
        worker.reserve(failing(error), "worker", "k", "f", on_error="store")
    row = worker.row("k")
    assert (row.status, row.owner) == ("pending", "")


def test_hold_for_review_leaves_the_row_pending_and_says_so(worker: Worker) -> None:
    with pytest.raises(HoldForReview):
        worker.reserve(failing(HoldForReview("look")), "worker", "k", "f", on_error="store")
    row = worker.row("k")
    assert row.status == "pending"
    assert row.owner
    assert worker.events == ["claimed", "held_for_review"]


def test_another_fingerprint_is_refused_and_changes_nothing(worker: Worker) -> None:
    worker.reserve(storing(1), "worker", "k", "f")
    with worker.unchanged("k"), pytest.raises(KeyReused):
        worker.reserve(failing(AssertionError("ran")), "worker", "k", "other")


@pytest.mark.parametrize(
    ("value", "why"), [(object(), "not_encodable"), (float("nan"), "not_encodable"), ("x" * 101, "too_large")]
)
def test_a_result_that_cannot_be_kept_leaves_a_tombstone(
    make_worker: MakeWorker, mode: Mode, valkey_server: Server, value: object, why: str
) -> None:
    worker = make_worker(mode, valkey_server, policy=Policy(max_body=100))
    worker.reserve(storing(value), "worker", "k", "f")
    stored = worker.fields("k")
    assert stored[b"response_omitted"].decode() == why
    assert stored[b"response_body"] == b""
    with worker.unchanged("k"), pytest.raises(AlreadyCompleted, match=why) as done:
        worker.reserve(failing(AssertionError("ran again")), "worker", "k", "f")
    assert done.value.response.omitted == why
    assert "not_stored" in worker.events


def test_an_error_text_is_cut_so_that_it_can_be_kept(worker: Worker) -> None:
    with pytest.raises(ValueError, match="x"):
        worker.reserve(failing(ValueError("x" * 100_000)), "worker", "k", "f", on_error="store")
    with pytest.raises(PreviousAttemptFailed, match="xxx"):
        worker.reserve(nothing, "worker", "k", "f")


def test_a_checkpoint_of_the_block_is_there_for_whoever_takes_over(worker: Worker) -> None:
    keys: list[str] = []

    def work(r: Reservation) -> Any:
        keys.append(r.downstream_key("card"))
        saved = worker.ledger.checkpoint(r, "charged", {"charge": "ch_1"})

        async def then_fail() -> None:
            await saved
            raise ZeroDivisionError

        if worker.mode == "async":
            return then_fail()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        worker.reserve(work, "worker", "k", "f")
    seen: list[Reservation] = []
    worker.reserve(seen.append, "worker", "k", "f")
    assert seen[0].last_checkpoint == ("charged", {"charge": "ch_1"})
    assert seen[0].taken_over
    assert keys == [seen[0].downstream_key("card")]


def test_a_block_that_was_fenced_out_raises_at_its_end_and_the_log_and_one_event_say_so(
    worker: Worker, clock: TurnedClock, caplog: pytest.LogCaptureFixture
) -> None:
    def overtaken(r: Reservation) -> None:
        clock.turn(31)
        successor = worker.looking.claim("worker", "k", "f")
        assert isinstance(successor, Reservation)
        worker.looking.complete(successor, ANSWER)
        from_then_on.enter_context(worker.unchanged("k"))
        r.result = "late"

    with (
        ExitStack() as from_then_on,
        caplog.at_level(logging.ERROR, "idemredis"),
        pytest.raises(FencedOut, match="generation 1"),
    ):
        worker.reserve(overtaken, "worker", "k", "f")
    assert worker.events == ["claimed", "fenced"]
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_a_block_whose_row_is_gone_raises_at_its_end_and_leaves_no_row(worker: Worker) -> None:
    def emptied(r: Reservation) -> None:
        worker.looking.client.delete(r.row)

    with pytest.raises(FencedOut):
        worker.reserve(emptied, "worker", "k", "f")
    assert worker.fields("k") == {}


@pytest.mark.parametrize("ending", ["caught", "settled"])
def test_a_block_that_was_told_that_it_is_fenced_out_raises_at_its_end_all_the_same(
    worker: Worker, clock: TurnedClock, ending: str
) -> None:
    def overtaken(r: Reservation) -> Any:
        clock.turn(31)
        assert isinstance(worker.looking.claim("worker", "k", "f"), Reservation)
        told = worker.ledger.renew(r) if ending == "caught" else worker.ledger.complete(r, ANSWER)

        async def ignore() -> None:
            with pytest.raises(FencedOut):
                await told

        return ignore()

    def plain(r: Reservation) -> None:
        with pytest.raises(FencedOut):
            overtaken(r)

    with pytest.raises(FencedOut):
        worker.reserve(plain if worker.mode == "sync" else overtaken, "worker", "k", "f")
    assert worker.events == ["claimed", "fenced"]


def test_an_exception_of_who_is_fenced_out_comes_through(worker: Worker, clock: TurnedClock) -> None:
    def overtaken(r: Reservation) -> None:
        clock.turn(31)
        assert isinstance(worker.looking.claim("worker", "k", "f"), Reservation)
        from_then_on.enter_context(worker.unchanged("k"))
        raise ZeroDivisionError

    with ExitStack() as from_then_on, pytest.raises(ZeroDivisionError):
        worker.reserve(overtaken, "worker", "k", "f", on_error="store")
    assert worker.events == ["claimed", "fenced"]


@pytest.mark.parametrize("settle", ["complete", "fail", "release"])
def test_a_row_that_the_block_settled_by_hand_is_left_as_it_is(worker: Worker, settle: str) -> None:
    def work(r: Reservation) -> Any:
        r.result = "not this"
        args = () if settle == "release" else (ANSWER,)
        return getattr(worker.ledger, settle)(r, *args)

    worker.reserve(work, "worker", "k", "f")
    row = worker.row("k")
    assert row.response == (None if settle == "release" else ANSWER)
    assert len(worker.events) == 2


def test_a_result_that_redis_is_not_there_for_is_stored_when_it_is_back(
    make_worker: MakeWorker, mode: Mode, valkey_server: Server
) -> None:
    with Proxy(valkey_server.port) as proxy:
        worker = make_worker(mode, valkey_server, url=proxy.url)

        def work(r: Reservation) -> None:
            r.result = "done"
            proxy.refuse()

        worker.reserve(work, "worker", "k", "f")
        assert worker.row("k").status == "pending"
        proxy.refuse(False)
        if mode == "async":
            worker.do("close")  # its loop runs only while a call does
        wait_until(lambda: worker.row("k").status == "completed")
        assert worker.fields("k")[b"response_body"] == b'"done"'


def test_an_exception_comes_through_also_when_redis_is_gone(
    make_worker: MakeWorker, mode: Mode, valkey_server: Server
) -> None:
    with Proxy(valkey_server.port) as proxy:
        worker = make_worker(mode, valkey_server, url=proxy.url)

        def work(r: Reservation) -> None:
            proxy.refuse()
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            worker.reserve(work, "worker", "k", "f")
        proxy.refuse(False)


def test_an_unknown_on_error_is_refused_before_anything_is_written(worker: Worker) -> None:
    with pytest.raises(ConfigurationError, match="on_error"):
        worker.reserve(nothing, "worker", "k", "f", on_error="ignore")
    assert worker.fields("k") == {}


@pytest.mark.slow
def test_a_block_keeps_its_lease_for_as_long_as_it_runs(make_worker: MakeWorker, mode: Mode, server: AnyServer) -> None:
    """Until it was renewed twice, here; `test_long_work` has blocks of several leases."""
    worker = make_worker(mode, server, policy=Policy(lease=LEASE))
    renewals: list[float] = []

    def is_renewed(r: Reservation) -> bool:
        assert r.held
        assert not isinstance(worker.looking.claim("worker", "k", "f"), Reservation)
        renewals.append(expires_at(worker.looking.client, r.identity.row))
        return renewals[-1] > renewals[0] + LEASE / 2 * 1000

    def long(r: Reservation) -> Any:
        wait = partial(wait_until, lambda: is_renewed(r))
        return wait() if mode == "sync" else asyncio.to_thread(wait)

    worker.reserve(long, "worker", "k", "f")
    assert worker.row("k").generation == 1


def test_a_block_without_heartbeat_is_taken_over_when_its_lease_ends(
    make_worker: MakeWorker, mode: Mode, valkey_server: Server
) -> None:
    worker = make_worker(mode, valkey_server, policy=Policy(lease=0.2, heartbeat=False))

    def long(r: Reservation) -> None:
        wait_until(lambda: isinstance(worker.looking.claim("worker", "k", "f"), Reservation))
        assert not r.held

    with pytest.raises(FencedOut):
        worker.reserve(long, "worker", "k", "f")
    assert worker.row("k").generation == 2
    assert worker.row("k").status == "pending"


def test_a_cancelled_block_releases_its_row(make_worker: MakeWorker, valkey_server: Server) -> None:
    worker = make_worker("async", valkey_server)

    async def cancelled() -> None:
        inside = asyncio.Event()

        async def block() -> None:
            async with worker.ledger.reserve("worker", "k", "f"):
                inside.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(block())
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    worker.result(cancelled())
    row = worker.row("k")
    assert (row.status, row.owner) == ("pending", "")


def test_a_block_in_each_of_many_threads_runs_once(valkey_server: Server, namespace: str) -> None:
    ledger = Ledger(valkey_server.client(), namespace=namespace)
    barrier, ran, told = threading.Barrier(20), [], []

    def run() -> None:
        barrier.wait()
        try:
            with ledger.reserve("worker", "k", "f"):
                ran.append(1)
        except (AlreadyCompleted, KeyInProgress) as error:
            told.append(error)

    threads = [threading.Thread(target=run) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ledger.close()
    ledger.client.close()
    assert (len(ran), len(told)) == (1, 19)
