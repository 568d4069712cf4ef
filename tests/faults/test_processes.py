"""Workers of gunicorn, uvicorn and others, killed at every point, timed out, told to end; clients that hang up."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from idemredis.core.keys import identify
from tests.support.clock import SLACK, TurnedClock
from tests.support.served import PRINCIPAL
from tests.support.servers import Server
from tests.support.serving import ASGI_KINDS, PATIENCE, Answer, Served, read_answer
from tests.support.waiting import wait_until

WORKERS = ("sync", "gthread", "gevent")
LEASE, LONG = 1.0, 100.0
WITHIN = 10.0

MakeService = Callable[..., Served]


@pytest.fixture
def make_service(valkey_server: Server, namespace: str) -> Iterator[MakeService]:
    made: list[Served] = []

    def make(worker: str, **settings: Any) -> Served:
        settings.setdefault("lease", LEASE)
        kind = f"gunicorn-{worker}" if worker in WORKERS else worker
        made.append(Served(kind, valkey_server.url, namespace, **settings))
        return made[-1]

    yield make
    for service in made:
        service.close()


def settled(service: Served, key: str, path: str = "/charges") -> Answer:
    """Send it again until it is done."""
    answer = wait_until(lambda: (got := service.post(key, path)).status == 201 and got, WITHIN)
    assert answer
    return answer


def answered(service: Served, key: str) -> Answer:
    """Send it again until somebody is there to answer."""
    answer = wait_until(lambda: (got := service.post(key)).status and got, WITHIN)
    assert isinstance(answer, Answer)
    return answer


@pytest.mark.parametrize("worker", [*WORKERS, "uvicorn"])
def test_a_worker_killed_anywhere_is_taken_over_after_its_lease_and_never_before(
    worker: str, make_service: MakeService, clock: TurnedClock
) -> None:
    service = make_service(worker, lease=LONG)
    runs = {
        "in-the-claim": ["died in-the-claim", "begun", "done"],
        "in-the-view": ["begun", "died in-the-view", "begun", "done"],
        "before-the-completion": ["begun", "done", "died before-the-completion", "begun", "done"],
    }
    for died, (where, noted) in enumerate(runs.items()):
        wait_until(lambda died=died: len(service.notes("server")) >= 2 + died, PATIENCE)  # type: ignore[misc]
        assert service.post(where).status == 0  # it died, and nobody answered
        for left in (LONG, SLACK):
            refused = answered(service, where)
            assert (refused.status, refused.error) == (409, "idempotency_key_in_progress")
            assert int(refused.headers["retry-after"]) >= 1
            clock.turn(left - SLACK if left == LONG else left)
        answer = answered(service, where)
        assert (answer.status, answer.json["generation"], service.notes(where)) == (201, 2, noted)
        assert service.post(where).headers["idempotent-replayed"] == "true"


@pytest.mark.parametrize(
    ("worker", "settings"),
    [
        *((worker, {"preload": True}) for worker in WORKERS),
        ("waitress", {}),
        ("hypercorn", {}),
        ("uwsgi", {"enable_threads": False}),
        ("uwsgi", {"enable_threads": True}),
        ("uwsgi-gevent", {}),
    ],
    ids=[
        "sync preload",
        "gthread preload",
        "gevent preload",
        "waitress",
        "hypercorn",
        "uwsgi",
        "uwsgi enable-threads",
        "uwsgi gevent",
    ],
)
def test_a_view_whose_process_is_killed_is_taken_over_after_its_lease_behind_every_server(
    worker: str, settings: dict[str, Any], make_service: MakeService, clock: TurnedClock
) -> None:
    service = make_service(worker, lease=LONG, **settings)
    key = "in-the-view"
    assert service.post(key).status == 0
    service.revive()
    assert answered(service, key).error == "idempotency_key_in_progress"
    clock.turn(LONG)
    answer = answered(service, key)
    assert (answer.status, answer.json["generation"]) == (201, 2)
    assert service.notes(key) == ["begun", "died in-the-view", "begun", "done"]
    assert service.post(key).headers["idempotent-replayed"] == "true"


@pytest.mark.parametrize(("worker", "settings"), [("gevent", {"preload": True}), ("uwsgi-gevent", {})])
def test_requests_run_side_by_side_where_gevent_has_replaced_the_threads_after_the_application_was_loaded(
    worker: str, settings: dict[str, Any], make_service: MakeService
) -> None:
    service = make_service(worker, lease=LONG, workers=1, **settings)
    keys = [f"key-{n}" for n in range(5)]
    with ExitStack() as stack:
        connections = [stack.enter_context(service.send(key, "/held")) for key in keys]
        wait_until(lambda: len(service.runs()) == len(keys), 60.0)  # all of them are in their views
        for key in keys:
            service.let_go(key)
        answers = [read_answer(connection) for connection in connections]
    assert [answer.status for answer in answers] == [201] * len(keys)
    assert [service.post(key, "/held").headers["idempotent-replayed"] for key in keys] == ["true"] * len(keys)
    assert "Traceback" not in service.log


@pytest.mark.parametrize("worker", [*WORKERS, *ASGI_KINDS])
def test_running_requests_finish_and_are_stored_when_the_service_is_told_to_end(
    worker: str, make_service: MakeService, valkey_server: Server, namespace: str
) -> None:
    """The lease is long, so that a heartbeat sleeps for minutes: it must not hold the exit up."""
    service = make_service(worker, lease=600.0)
    with service.send("ending", "/slow?seconds=0.8") as connection:
        wait_until(lambda: service.notes("ending"))
        service.process.send_signal(signal.SIGTERM)
        told = time.monotonic()
        answer = read_answer(connection)
    assert (answer.status, service.notes("ending")) == (201, ["begun", "done"])
    service.process.wait(60.0)
    assert time.monotonic() - told < 60.0
    with valkey_server.client() as client:
        row = identify(namespace, PRINCIPAL, "ending").row
        assert client.hget(row, "status") == b"completed"


def test_a_worker_that_gunicorn_times_out_is_taken_over(make_service: MakeService) -> None:
    service = make_service("sync", timeout=2)
    assert service.post("hangs", "/slow?seconds=60").status in (0, 500)
    answer = settled(service, "hangs", "/slow?seconds=60")
    assert answer.json["generation"] == 2
    assert service.notes("hangs") == ["begun", "begun", "done"]


@pytest.mark.parametrize("worker", [*WORKERS, *ASGI_KINDS])
def test_a_client_that_hangs_up_finds_its_answer_when_it_comes_back(worker: str, make_service: MakeService) -> None:
    service = make_service(worker)
    connection = service.send("gone", "/slow?seconds=0.4")
    wait_until(lambda: service.notes("gone"))
    connection.shutdown(socket.SHUT_RDWR)
    connection.close()
    answer = settled(service, "gone", "/slow?seconds=0.4")
    assert (answer.json["generation"], service.notes("gone")) == (1, ["begun", "done"])
    assert answer.headers["idempotent-replayed"] == "true"


@pytest.mark.parametrize("preload", [True, False], ids=["preload", "no_preload"])
@pytest.mark.parametrize("worker", WORKERS)
def test_a_long_view_keeps_its_lease_also_where_the_ledger_was_used_before_the_fork(
    worker: str, preload: bool, make_service: MakeService, valkey_server: Server, namespace: str
) -> None:
    """It is renewed in its worker: `tests/ledger/test_long_work.py` has work of several leases."""
    service = make_service(worker, preload=preload, lease=6.0)
    row = identify(namespace, PRINCIPAL, "long").row
    with service.send("long", "/held") as connection, valkey_server.client() as client:
        wait_until(lambda: service.notes("long"))
        ends = client.pexpiretime(row)
        refusals = []

        def is_renewed() -> bool:
            refusals.append(service.post("long", "/held").error)
            return bool(client.pexpiretime(row) > ends)

        wait_until(is_renewed)
        assert client.hget(row, "status") == b"pending"
        service.let_go("long")
        answer = read_answer(connection)
    assert set(refusals) == {"idempotency_key_in_progress"}
    assert (answer.status, answer.json["generation"]) == (201, 1)
    assert service.post("long", "/held").headers["idempotent-replayed"] == "true"
