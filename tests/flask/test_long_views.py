"""Views that run for longer than their lease."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from idemredis import Policy
from idemredis.flask import current_reservation
from tests.support.clock import TurnedClock, expires_at
from tests.support.servers import Server
from tests.support.site import MakeSite
from tests.support.waiting import wait_until

LEASE = 3.0


@pytest.mark.slow
def test_a_view_is_not_taken_over_while_it_runs_however_long(make_site: MakeSite, valkey_server: Server) -> None:
    """Until it was renewed twice, here; `tests/ledger/test_long_work.py` has work of several leases."""
    site = make_site(valkey_server, policy=Policy(lease=LEASE))
    running, done = threading.Event(), threading.Event()

    def slow() -> tuple[str, int]:
        running.set()
        assert done.wait(30)
        wait_until(lambda: current_reservation.held)  # for good no more, had it been taken over
        return f"generation {current_reservation.generation}", 201

    site.view(slow)
    with ThreadPoolExecutor(1) as beside:
        first = beside.submit(site.send)
        assert running.wait(10)
        ends = expires_at(site.store, site.row_name())

        def is_renewed() -> bool:
            assert site.send().status_code == 409
            return expires_at(site.store, site.row_name()) > ends + LEASE / 2 * 1000

        try:
            wait_until(is_renewed)
        finally:
            done.set()
        assert (first.result().status_code, first.result().data) == (201, b"generation 1")
    assert site.send().data == b"generation 1"
    assert len(site.runs) == 1


def test_without_a_heartbeat_it_is_and_the_first_client_gets_its_own_answer_while_the_row_keeps_the_second(
    make_site: MakeSite, valkey_server: Server, clock: TurnedClock, caplog: pytest.LogCaptureFixture
) -> None:
    site = make_site(valkey_server, policy=Policy(lease=0.5, heartbeat=False))
    running, done = threading.Event(), threading.Event()

    def slow() -> tuple[str, int]:
        generation = current_reservation.generation
        if generation == 1:
            running.set()
            assert done.wait(30)
            wait_until(lambda: not current_reservation.held)
        return f"generation {generation}", 201

    site.view(slow)
    with caplog.at_level(logging.ERROR, "idemredis"), ThreadPoolExecutor(1) as beside:
        first = beside.submit(site.send)
        assert running.wait(10)
        clock.turn(0.5)
        assert site.send().status_code == 201
        stored = site.row()
        done.set()
        assert (first.result().status_code, first.result().data) == (201, b"generation 1")

    assert site.row() == stored
    assert site.send().data == b"generation 2"
    assert len(site.runs) == 2
    assert site.told().count("fenced") == 1
    ours = [record for record in caplog.records if record.name.startswith("idemredis")]
    assert [record.message.partition(":")[0] for record in ours] == ["fenced"]
