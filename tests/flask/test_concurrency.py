"""Many clients at once on one key: one execution, and nobody sees a 5xx."""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.servers import Server
from tests.support.serving import Answer, Served
from tests.support.site import MakeSite
from tests.support.started import Servers
from tests.support.waiting import wait_until

CLIENTS = 100
ROUNDS = 200


def _at_once(count: int, run: Callable[[int], Any]) -> list[Any]:
    barrier = threading.Barrier(count)

    def wait_and_run(number: int) -> Any:
        barrier.wait(20)
        return run(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(wait_and_run, range(count)))


@pytest.mark.parametrize("wait", [0, 20])
def test_fifty_threads_over_two_applications_run_the_view_once(
    wait: float, make_site: MakeSite, valkey_server: Server
) -> None:
    runs: list[int] = []
    sites = [make_site(valkey_server, WAIT_SECONDS=wait) for _ in range(2)]

    def view() -> tuple[str, int]:
        runs.append(1)
        return f"run {len(runs)}", 201

    for site in sites:
        site.view(view)
    answers = _at_once(50, lambda number: sites[number % 2].send())
    assert len(runs) == 1
    statuses = Counter(answer.status_code for answer in answers)
    assert statuses.keys() <= ({201} if wait else {201, 409})
    assert {answer.text for answer in answers if answer.status_code == 201} == {"run 1"}
    firsts = [a for a in answers if a.status_code == 201 and "Idempotent-Replayed" not in a.headers]
    assert len(firsts) == 1
    busy = {answer.get_json()["error"] for answer in answers if answer.status_code == 409}
    assert busy <= {"idempotency_key_in_progress"}


def test_fifty_threads_at_a_stale_row_run_the_view_once_more(make_site: MakeSite, valkey_server: Server) -> None:
    site = make_site(valkey_server)
    generations: list[bytes] = []

    def view() -> tuple[str, int]:
        generations.append(site.row()["generation"])
        return "done", 503 if len(generations) == 1 else 201

    site.view(view)
    assert site.send().status_code == 503  # released, so that the next retry takes it over
    answers = _at_once(50, lambda number: site.send())
    assert generations == [b"1", b"2"]
    assert {answer.status_code for answer in answers} <= {201, 409}
    errors = {answer.get_json()["error"] for answer in answers if answer.status_code == 409}
    assert errors <= {"idempotency_key_in_progress", "idempotency_key_retry"}


def test_one_key_with_two_bodies_at_once_runs_one_and_refuses_the_other(
    make_site: MakeSite, valkey_server: Server
) -> None:
    site = make_site(valkey_server)
    site.view()
    answers = _at_once(20, lambda number: (number % 2, site.send(json={"amount": number % 2})))
    winners = {amount for amount, answer in answers if answer.status_code == 201}
    assert (len(site.runs), len(winners)) == (1, 1)
    for amount, answer in answers:
        if {amount} != winners:
            assert answer.get_json()["error"] == "idempotency_key_reused"


@pytest.fixture
def gunicorn(every_key_left_expires: Servers) -> Iterator[Served]:
    server = every_key_left_expires.get("valkey")
    assert isinstance(server, Server)
    with Served("gunicorn-gthread", server.url, socket_timeout=5.0, workers=4, threads=25) as served:
        yield served


@pytest.mark.timeout(300)
def test_each_round_of_100_clients_of_four_gunicorn_processes_runs_the_view_once(gunicorn: Served) -> None:
    barrier = threading.Barrier(CLIENTS)

    def play(number: int) -> list[Answer]:
        answers = []
        for turn in range(ROUNDS):
            head = f"POST /charges HTTP/1.1\nIdempotency-Key: round-{turn}\nContent-Length: 15"
            barrier.wait(60)
            answers.append(gunicorn.exchange(head, b'{"amount":1000}'))
        return answers

    with ThreadPoolExecutor(CLIENTS) as pool:
        rounds = list(zip(*pool.map(play, range(CLIENTS)), strict=True))
    assert Counter(gunicorn.runs()) == {f"round-{turn}": 1 for turn in range(ROUNDS)}
    workers = set()
    for answers in rounds:
        done = {answer.body for answer in answers if answer.status == 201}
        assert len(done) == 1
        workers.add(json.loads(done.pop())["server"])
        assert len([a for a in answers if a.status == 201 and "idempotent-replayed" not in a.headers]) == 1
        assert {answer.error for answer in answers if answer.status != 201} <= {"idempotency_key_in_progress"}
    assert len(workers) > 1
    assert {answer.status for answers in rounds for answer in answers} == {201, 409}


def test_a_client_that_goes_away_and_comes_back_finds_the_answer_of_its_first_request(
    gunicorn: Served,
) -> None:
    lines = "POST /charges HTTP/1.1\r\nHost: shop\r\nIdempotency-Key: gone\r\nContent-Length: 3\r\n\r\nabc"
    with gunicorn.connect() as connection:
        connection.sendall(lines.encode())
        connection.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: gunicorn.runs() == ["gone"])
    head = "POST /charges HTTP/1.1\nIdempotency-Key: gone\nContent-Length: 3"
    answer = wait_until(lambda: (got := gunicorn.exchange(head, b"abc")).status != 409 and got)
    assert answer
    assert (answer.status, answer.headers["idempotent-replayed"], gunicorn.runs()) == (201, "true", ["gone"])
