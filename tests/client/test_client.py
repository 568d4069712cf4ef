"""However the network fails, the operation runs once and the client has its answer; what is final is sent once."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path
from time import time
from typing import Any

import httpx
import pytest
import requests
import urllib3
from client import (
    LONGEST_PAUSE,
    AnotherAccount,
    Answer,
    AsyncTransport,
    FateUnknown,
    Operation,
    Outbox,
    may_be_sent_again,
    over_async_httpx,
    over_httpx,
    over_requests,
    over_urllib3,
    pause_after,
    send,
    send_async,
)
from flask import Flask, request
from werkzeug.serving import make_server

from idemredis import Ledger
from idemredis.flask import Idempotency, current_reservation
from idemredis.web.contract import REFUSALS
from tests.support.proxy import Proxy
from tests.support.servers import Server
from tests.support.waiting import wait_until


class Service:
    """A protected application behind a proxy that loses requests and answers, with its Redis behind another."""

    def __init__(self, redis: Server, namespace: str) -> None:
        self.redis = Proxy(redis.port)
        self.runs: list[str] = []
        self.asked: list[str] = []
        self.go_on = threading.Event()
        self.go_on.set()
        app = Flask("service")
        self._ledger = Ledger.from_url(self.redis.url, namespace=namespace)
        idempotency = Idempotency(app, principal="acme", ledger=self._ledger)

        @app.before_request
        def note() -> None:
            self.asked.append(request.headers["Idempotency-Key"])

        @app.post("/charges")
        @idempotency.protect
        def charge() -> tuple[dict[str, Any], int]:
            self.runs.append(current_reservation.key)
            assert self.go_on.wait(20)
            amount = request.get_json()["amount"]
            return ({"charged": amount}, 201) if amount < 10_000 else ({"error": "card_declined"}, 402)

        self._server = make_server("127.0.0.1", 0, app, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="service")
        self._thread.start()
        self.network = Proxy(self._server.port, matching=b'"amount"')  # the body, which may come after the head
        self.url = f"http://127.0.0.1:{self.network.port}/charges"

    def close(self) -> None:
        self.go_on.set()
        self.network.close()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._ledger.close()
        self.redis.close()


class Client:
    """One of the transports, with pauses that are noted and not slept, and `on_pause` to mend things in them."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.pauses: list[float] = []
        self.on_pause: Callable[[], object] = lambda: None

    def send(self, operation: Operation, outbox: Outbox) -> Answer:
        match self.kind:
            case "requests":
                with requests.Session() as session:
                    return send(operation, outbox, over_requests(session), self._sleep)
            case "urllib3":
                with urllib3.PoolManager() as pool:
                    return send(operation, outbox, over_urllib3(pool, {}), self._sleep)
            case "httpx":
                with httpx.Client() as client:
                    return send(operation, outbox, over_httpx(client), self._sleep)
            case _:
                return asyncio.run(self._send_async(operation, outbox))

    async def _send_async(self, operation: Operation, outbox: Outbox) -> Answer:
        async def sleep(seconds: float) -> None:
            await asyncio.to_thread(self._sleep, seconds)

        async with httpx.AsyncClient() as client:
            transport: AsyncTransport = over_async_httpx(client)
            return await send_async(operation, outbox, transport, sleep)

    def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        assert len(self.pauses) < 20, "it never ends"
        self.on_pause()


@pytest.fixture
def service(valkey_server: Server, namespace: str) -> Iterator[Service]:
    service = Service(valkey_server, namespace)
    yield service
    service.close()


@pytest.fixture
def outbox(tmp_path: Path) -> Outbox:
    return Outbox(tmp_path / "outbox.sqlite3")


@pytest.fixture(params=["requests", "urllib3", "httpx", "async httpx"])
def client(request: pytest.FixtureRequest) -> Client:
    return Client(request.param)


@pytest.fixture
def operation(service: Service, outbox: Outbox) -> Operation:
    return outbox.intend("order-1", "POST", service.url, {"amount": 1999})


def test_an_answer_comes_back_and_is_kept(
    service: Service, client: Client, outbox: Outbox, operation: Operation
) -> None:
    answer = client.send(operation, outbox)

    assert (answer.status, answer.body.strip()) == (201, b'{"charged":1999}')
    assert service.asked == [operation.key]
    assert client.pauses == []
    assert outbox.unsettled() == []
    assert outbox.intend("order-1", "POST", service.url, {"amount": 1999}).answer == answer


def test_a_lost_answer_is_asked_for_again_with_the_same_key(
    service: Service, client: Client, outbox: Outbox, operation: Operation
) -> None:
    service.network.drop_replies()
    answer = client.send(operation, outbox)

    assert (answer.status, answer.headers["idempotent-replayed"]) == (201, "true")
    assert service.asked == [operation.key] * 2
    assert service.runs == [operation.key]
    assert len(client.pauses) == 1


def test_a_lost_request_is_sent_again(service: Service, client: Client, outbox: Outbox, operation: Operation) -> None:
    service.network.drop_requests()
    answer = client.send(operation, outbox)

    assert (answer.status, "idempotent-replayed" in answer.headers) == (201, False)
    assert service.runs == [operation.key]
    assert len(client.pauses) == 1


def test_a_service_that_cannot_be_reached_is_tried_until_it_can(
    service: Service, client: Client, outbox: Outbox, operation: Operation
) -> None:
    service.network.refuse()
    client.on_pause = lambda: service.network.refuse(len(client.pauses) < 3)

    assert client.send(operation, outbox).status == 201
    assert service.runs == [operation.key]
    assert len(client.pauses) == 3


def test_while_the_same_request_runs_the_client_waits_as_long_as_it_is_told(
    service: Service, client: Client, outbox: Outbox, operation: Operation
) -> None:
    service.go_on.clear()
    first = threading.Thread(target=lambda: Client("httpx").send(operation, outbox))
    first.start()
    wait_until(lambda: service.runs)

    def let_it_finish() -> None:
        service.go_on.set()
        first.join()

    client.on_pause = let_it_finish
    answer = client.send(operation, outbox)

    assert (answer.status, answer.headers["idempotent-replayed"]) == (201, "true")
    assert service.runs == [operation.key]
    assert len(client.pauses) == 1
    assert client.pauses[0] >= 2  # Retry-After


def test_while_redis_is_away_the_client_waits_and_nothing_runs(
    service: Service, client: Client, outbox: Outbox, operation: Operation
) -> None:
    service.redis.refuse()

    def bring_it_back() -> None:
        assert service.runs == []
        service.redis.refuse(False)

    client.on_pause = bring_it_back

    assert client.send(operation, outbox).status == 201
    assert service.runs == [operation.key]
    assert client.pauses[0] >= 2  # Retry-After


def test_a_declined_card_is_an_answer_that_counts(service: Service, client: Client, outbox: Outbox) -> None:
    declined = outbox.intend("order-2", "POST", service.url, {"amount": 10_000})

    assert client.send(declined, outbox).status == 402
    assert service.asked == [declined.key]
    assert outbox.unsettled() == []


def test_a_reused_key_is_not_sent_again(service: Service, client: Client, outbox: Outbox, operation: Operation) -> None:
    client.send(operation, outbox)
    other = Operation("other", operation.key, "POST", service.url, b'{"amount": 2}')

    assert client.send(other, outbox).error == "idempotency_key_reused"
    assert service.asked == [operation.key] * 2
    assert client.pauses == []


def test_a_client_that_died_sends_what_it_meant_to_with_the_key_that_it_had(
    service: Service, client: Client, outbox: Outbox, operation: Operation, tmp_path: Path
) -> None:
    service.network.refuse()

    def die() -> None:
        raise SystemExit

    client.on_pause = die
    with pytest.raises(SystemExit):
        client.send(operation, outbox)
    service.network.refuse(False)

    anew = Outbox(tmp_path / "outbox.sqlite3")
    (left,) = anew.unsettled()
    assert left == operation
    assert client.send(left, anew).status == 201
    assert service.asked == [operation.key]


def test_what_has_its_answer_is_not_sent_again(service: Service, client: Client, outbox: Outbox) -> None:
    answers = [client.send(outbox.intend("order-3", "POST", service.url, {"amount": 5}), outbox) for _ in range(2)]

    assert answers[0] == answers[1]
    assert len(service.asked) == 1


@pytest.mark.parametrize("then", ["intends it again", "sends what is left", "sends what it still has"])
def test_another_login_between_two_attempts_sends_nothing(
    service: Service, client: Client, tmp_path: Path, then: str
) -> None:
    """A key belongs to its account: sent after another login, it would be another operation, and charge both."""
    path = tmp_path / "outbox.sqlite3"
    of_alice = Outbox(path, "alice")
    operation = of_alice.intend("order-1", "POST", service.url, {"amount": 1999})
    of_bob = Outbox(path, "bob")  # another login; the response to alice's attempt was lost, or never waited for

    def go_on() -> None:
        match then:
            case "intends it again":
                client.send(of_bob.intend("order-1", "POST", service.url, {"amount": 1999}), of_bob)
            case "sends what it still has":
                client.send(operation, of_bob)

    if then == "sends what is left":
        assert of_bob.unsettled() == []
    else:
        with pytest.raises(AnotherAccount, match="'alice'"):
            go_on()
    assert service.asked == []
    assert [left.key for left in Outbox(path, "alice").unsettled()] == [operation.key]
    assert client.send(operation, of_alice).status == 201
    assert service.asked == [operation.key]
    with pytest.raises(AnotherAccount):
        of_bob.intend("order-1", "POST", service.url, {"amount": 1999})


def test_a_client_that_gives_up_leaves_the_operation_in_the_outbox(
    service: Service, client: Client, outbox: Outbox, operation: Operation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("client.ALL_TRIES_WITHIN", 0.0)
    service.network.drop_replies()
    with pytest.raises(FateUnknown, match=r"order-1 has no answer yet"):
        client.send(operation, outbox)
    assert outbox.unsettled() == [operation]

    answer = client.send(operation, outbox)
    assert (answer.status, answer.headers["idempotent-replayed"]) == (201, "true")
    assert service.runs == [operation.key]


def test_one_name_is_one_operation(outbox: Outbox) -> None:
    first = outbox.intend("order-1", "POST", "http://localhost/charges", {"amount": 1})

    assert outbox.intend("order-1", "POST", "http://localhost/charges", {"amount": 1}) == first
    with pytest.raises(ValueError, match="order-1 was meant to be POST"):
        outbox.intend("order-1", "POST", "http://localhost/charges", {"amount": 2})
    assert outbox.unsettled() == [first]
    assert outbox.intend("order-2", "POST", "http://localhost/charges", {"amount": 1}).key != first.key


RETRIED = {"idempotency_key_in_progress", "idempotency_key_retry", "idempotency_unavailable"}


@pytest.mark.parametrize("code", sorted(REFUSALS))
def test_of_the_refusals_only_those_that_pass_are_sent_again(code: str) -> None:
    answer = Answer(REFUSALS[code][0], {}, f'{{"error": "{code}"}}'.encode())

    assert may_be_sent_again(answer) == (code in RETRIED)


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_a_fault_of_the_moment_is_sent_again_unless_it_is_what_was_stored(status: int) -> None:
    assert may_be_sent_again(Answer(status, {}, b"<html>"))
    assert not may_be_sent_again(Answer(status, {"idempotent-replayed": "true"}, b"<html>"))


@pytest.mark.parametrize("status", [200, 201, 204, 303, 400, 401, 402, 403, 404, 409, 410, 422, 501])
def test_what_the_service_itself_answers_is_final(status: int) -> None:
    assert not may_be_sent_again(Answer(status, {}, b'["no object"]'))


def test_pauses_grow_to_a_bound_and_differ() -> None:
    drawn = [[pause_after(None, tries) for _ in range(200)] for tries in range(1, 12)]

    middles = [sorted(pauses)[100] for pauses in drawn]
    assert middles[0] < middles[1] < middles[2] < middles[3]
    assert all(len(set(pauses)) > 100 for pauses in drawn)
    assert max(map(max, drawn)) <= LONGEST_PAUSE


@pytest.mark.parametrize("value", ["30", "date"])
def test_no_pause_is_shorter_than_the_server_asks_for(value: str) -> None:
    said = formatdate(time() + 30, usegmt=True) if value == "date" else value
    pauses = [pause_after(Answer(503, {"retry-after": said}, b""), tries) for tries in range(1, 9)]

    assert all(28 <= pause <= 31 for pause in pauses)
    assert len(set(pauses)) > 1


@pytest.mark.parametrize("value", ["", "soon", "-1"])
def test_a_retry_after_that_says_nothing_is_ignored(value: str) -> None:
    assert 0 < pause_after(Answer(503, {"retry-after": value}, b""), 1) <= 1


def test_its_command_line_charges_once_however_often_it_is_run(service: Service, tmp_path: Path) -> None:
    script = Path(sys.modules["client"].__file__ or "")
    command = [sys.executable, str(script), service.url.removesuffix("/charges"), "order-1", "1999"]
    said = [subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout for _ in range(2)]

    assert said[0] == said[1]
    assert said[0].startswith('201 {"charged":1999}')
    assert len(service.runs) == 1
