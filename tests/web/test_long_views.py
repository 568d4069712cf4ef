"""Views that run for longer than their lease."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from idemredis import Policy, current_reservation
from tests.support.clock import TurnedClock, expires_at
from tests.support.doors import MakeDoor
from tests.support.servers import Server
from tests.support.waiting import wait_until

LEASE = 3.0


@pytest.mark.slow
def test_a_view_is_not_taken_over_while_it_runs_however_long(make_door: MakeDoor, valkey_server: Server) -> None:
    """Until it was renewed twice, here; `tests/ledger/test_long_work.py` has work of several leases."""
    door = make_door(valkey_server, policy=Policy(lease=LEASE))
    running, done = threading.Event(), threading.Event()

    def slow() -> tuple[str, int]:
        running.set()
        assert done.wait(30)
        wait_until(lambda: current_reservation.held)  # for good no more, had it been taken over
        return f"generation {current_reservation.generation}", 201

    door.view(slow)
    with ThreadPoolExecutor(1) as beside:
        first = beside.submit(door.send)
        assert running.wait(10)
        ends = expires_at(door.store, door.row_name())

        def is_renewed() -> bool:
            assert door.send().status_code == 409
            return expires_at(door.store, door.row_name()) > ends + LEASE / 2 * 1000

        try:
            wait_until(is_renewed)
        finally:
            done.set()
        assert (first.result().status_code, first.result().data) == (201, b"generation 1")
    assert door.send().data == b"generation 1"
    assert len(door.runs) == 1


@pytest.mark.slow
def test_without_a_heartbeat_it_is_and_the_first_client_gets_its_own_answer_while_the_row_keeps_the_second(
    make_door: MakeDoor, valkey_server: Server, clock: TurnedClock, caplog: pytest.LogCaptureFixture
) -> None:
    door = make_door(valkey_server, policy=Policy(lease=0.5, heartbeat=False))
    running, done = threading.Event(), threading.Event()

    def slow() -> tuple[str, int]:
        generation = current_reservation.generation
        if generation == 1:
            running.set()
            assert done.wait(30)
            wait_until(lambda: not current_reservation.held)
        return f"generation {generation}", 201

    door.view(slow)
    with caplog.at_level(logging.ERROR, "idemredis"), ThreadPoolExecutor(1) as beside:
        first = beside.submit(door.send)
        assert running.wait(10)
        clock.turn(0.5)
        assert door.send().status_code == 201
        stored = door.row()
        done.set()
        assert (first.result().status_code, first.result().data) == (201, b"generation 1")

    assert door.row() == stored
    assert door.send().data == b"generation 2"
    assert len(door.runs) == 2
    assert door.told().count("fenced") == 1
    ours = [record for record in caplog.records if record.name.startswith("idemredis")]
    assert [record.message.partition(":")[0] for record in ours] == ["fenced"]
