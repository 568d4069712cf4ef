"""Many clients at once on one key: one execution, and nobody sees a 5xx."""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.servers import Server
from tests.support.serving import Answer, Served
from tests.support.started import Servers
from tests.support.waiting import wait_until

CLIENTS = 100
ROUNDS = 200


@pytest.fixture(params=["gunicorn-gthread", "uvicorn"])
def workers(request: pytest.FixtureRequest, every_key_left_expires: Servers) -> Iterator[Served]:
    """Four workers of gunicorn, or of uvicorn."""
    server = every_key_left_expires.get("valkey")
    assert isinstance(server, Server)
    with Served(request.param, server.url, workers=4, threads=25) as served:
        yield served


@pytest.mark.timeout(300)
def test_each_round_of_100_clients_of_four_processes_runs_the_view_once(workers: Served) -> None:
    barrier = threading.Barrier(CLIENTS)

    def play(number: int) -> list[Answer]:
        answers = []
        for turn in range(ROUNDS):
            head = f"POST /charges HTTP/1.1\nIdempotency-Key: round-{turn}\nContent-Length: 15"
            barrier.wait(60)
            answers.append(workers.exchange(head, b'{"amount":1000}'))
        return answers

    with ThreadPoolExecutor(CLIENTS) as pool:
        rounds = list(zip(*pool.map(play, range(CLIENTS)), strict=True))
    assert Counter(workers.runs()) == {f"round-{turn}": 1 for turn in range(ROUNDS)}
    pids = set()
    for answers in rounds:
        done = {answer.body for answer in answers if answer.status == 201}
        assert len(done) == 1
        pids.add(json.loads(done.pop())["server"])
        assert len([a for a in answers if a.status == 201 and "idempotent-replayed" not in a.headers]) == 1
        assert {answer.error for answer in answers if answer.status != 201} <= {"idempotency_key_in_progress"}
    assert len(pids) > 1
    assert {answer.status for answers in rounds for answer in answers} == {201, 409}


def test_a_client_that_goes_away_and_comes_back_finds_the_answer_of_its_first_request(
    workers: Served,
) -> None:
    lines = "POST /charges HTTP/1.1\r\nHost: shop\r\nIdempotency-Key: gone\r\nContent-Length: 3\r\n\r\nabc"
    with workers.connect() as connection:
        connection.sendall(lines.encode())
        connection.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: workers.runs() == ["gone"])
    head = "POST /charges HTTP/1.1\nIdempotency-Key: gone\nContent-Length: 3"
    answer = wait_until(lambda: (got := workers.exchange(head, b"abc")).status != 409 and got)
    assert answer
    assert (answer.status, answer.headers["idempotent-replayed"], workers.runs()) == (201, "true", ["gone"])
