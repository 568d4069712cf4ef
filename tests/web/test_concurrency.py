"""Many clients at once on one key: one execution, and nobody sees a 5xx."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from idemredis.ledger.waiting import A_KEY
from tests.support.doors import MakeDoor
from tests.support.servers import Server


def _at_once(count: int, run: Callable[[int], Any]) -> list[Any]:
    barrier = threading.Barrier(count)

    def wait_and_run(number: int) -> Any:
        barrier.wait(20)
        return run(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(wait_and_run, range(count)))


@pytest.mark.parametrize(("wait", "clients"), [(0, 50), (20, 50), (20, 1 + A_KEY)])
def test_many_threads_over_two_applications_run_the_view_once(
    wait: float, clients: int, make_door: MakeDoor, valkey_server: Server
) -> None:
    """More duplicates than may wait are refused."""
    runs: list[int] = []
    sites = [make_door(valkey_server, WAIT_SECONDS=wait) for _ in range(2)]

    def view() -> tuple[str, int]:
        runs.append(1)
        return f"run {len(runs)}", 201

    for door in sites:
        door.view(view)
    answers = _at_once(clients, lambda number: sites[number % 2].send())
    assert len(runs) == 1
    statuses = Counter(answer.status_code for answer in answers)
    assert statuses.keys() <= ({201} if wait and clients <= 1 + A_KEY else {201, 409})
    assert {answer.text for answer in answers if answer.status_code == 201} == {"run 1"}
    firsts = [a for a in answers if a.status_code == 201 and "Idempotent-Replayed" not in a.headers]
    assert len(firsts) == 1
    busy = {answer.get_json()["error"] for answer in answers if answer.status_code == 409}
    assert busy <= {"idempotency_key_in_progress"}


def test_fifty_threads_at_a_stale_row_run_the_view_once_more(make_door: MakeDoor, valkey_server: Server) -> None:
    door = make_door(valkey_server)
    generations: list[bytes] = []

    def view() -> tuple[str, int]:
        generations.append(door.row()["generation"])
        return "done", 503 if len(generations) == 1 else 201

    door.view(view)
    assert door.send().status_code == 503  # released, so that the next retry takes it over
    answers = _at_once(50, lambda number: door.send())
    assert generations == [b"1", b"2"]
    assert {answer.status_code for answer in answers} <= {201, 409}
    errors = {answer.get_json()["error"] for answer in answers if answer.status_code == 409}
    assert errors <= {"idempotency_key_in_progress", "idempotency_key_retry"}


def test_one_key_with_two_bodies_at_once_runs_one_and_refuses_the_other(
    make_door: MakeDoor, valkey_server: Server
) -> None:
    door = make_door(valkey_server)
    door.view()
    answers = _at_once(20, lambda number: (number % 2, door.send(json={"amount": number % 2})))
    winners = {amount for amount, answer in answers if answer.status_code == 201}
    assert (len(door.runs), len(winners)) == (1, 1)
    for amount, answer in answers:
        if {amount} != winners:
            assert answer.get_json()["error"] == "idempotency_key_reused"
