"""Views that run for longer than their lease."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from idemredis import Policy
from idemredis.flask import current_reservation
from tests.support.servers import Server
from tests.support.site import MakeSite
from tests.support.waiting import wait_until

LEASE = 2.0
LEASES = 5


def test_a_view_that_runs_five_leases_long_is_not_taken_over(make_site: MakeSite, valkey_server: Server) -> None:
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
        until = time.monotonic() + LEASES * LEASE
        while time.monotonic() < until:
            assert site.send().status_code == 409
        done.set()
        assert (first.result().status_code, first.result().data) == (201, b"generation 1")
    assert site.send().data == b"generation 1"
    assert len(site.runs) == 1


def test_without_a_heartbeat_it_is_and_the_first_client_gets_its_own_answer_while_the_row_keeps_the_second(
    make_site: MakeSite, valkey_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    site = make_site(valkey_server, policy=Policy(lease=LEASE, heartbeat=False))
    running, done = threading.Event(), threading.Event()

    def slow() -> tuple[str, int]:
        generation = current_reservation.generation
        if generation == 1:
            running.set()
            assert done.wait(30)
            assert not current_reservation.held
        return f"generation {generation}", 201

    site.view(slow)
    with caplog.at_level(logging.ERROR, "idemredis"), ThreadPoolExecutor(1) as beside:
        first = beside.submit(site.send)
        assert running.wait(10)
        wait_until(lambda: site.send().status_code == 201)
        stored = site.row()
        done.set()
        assert (first.result().status_code, first.result().data) == (201, b"generation 1")

    assert site.row() == stored
    assert site.send().data == b"generation 2"
    assert len(site.runs) == 2
    assert site.told().count("fenced") == 1
    ours = [record for record in caplog.records if record.name.startswith("idemredis")]
    assert [record.message.partition(":")[0] for record in ours] == ["fenced"]
