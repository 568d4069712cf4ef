"""What may not creep up, counted and not timed: commands, bytes, objects that stay, and work on what is unprotected."""

from __future__ import annotations

import gc
import io
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import redis
from flask import Flask
from werkzeug.test import EnvironBuilder

from idemredis import Ledger, Policy, Replay, Reservation, StoredResponse
from idemredis.flask import Idempotency
from tests.support.counting import count_calls
from tests.support.servers import Server

FINGERPRINT = "f" * 64
KEY = "8e03978e-40d5-43dd-bc93-6894a57f9324"
ANSWER = StoredResponse(201, (("content-type", "application/json"),), b"x" * 500)


class Counting(redis.Redis):
    """A client that counts its calls, and the bytes that they send."""

    def forget(self) -> None:
        self.calls: list[str] = []
        self.size = 0

    def execute_command(self, *words: Any, **options: Any) -> Any:
        self.calls.append(str(words[0]))
        self.size += sum(len(word) if isinstance(word, (str, bytes)) else len(str(word)) for word in words)
        return super().execute_command(*words, **options)  # type: ignore[no-untyped-call]


@pytest.fixture
def client(real_server: Server) -> Any:
    with Counting(port=real_server.port) as client:
        client.forget()
        yield client


@pytest.fixture
def warm(client: Counting, namespace: str) -> Ledger:
    """A ledger on a server that knows the scripts."""
    ledger = Ledger(client, Policy(heartbeat=False), namespace)
    run(ledger, "first")
    client.forget()
    return ledger


def run(ledger: Ledger, key: str) -> None:
    r = ledger.claim("acct_1", key, FINGERPRINT)
    assert isinstance(r, Reservation)
    ledger.complete(r, ANSWER)


def commands(client: Counting, act: Callable[[], object]) -> dict[str, int]:
    """What the server ran for it, within scripts too."""
    client.config_resetstat()
    act()
    stats = client.info("commandstats")
    ran = {name.removeprefix("cmdstat_"): figures["calls"] for name, figures in stats.items()}
    return {name: calls for name, calls in ran.items() if name not in ("info", "config|resetstat")}


def test_a_claim_and_a_completion_run_these_commands_and_no_more(warm: Ledger, client: Counting) -> None:
    r = warm.claim("acct_1", "other", FINGERPRINT)
    assert isinstance(r, Reservation)

    claim = commands(client, lambda: warm.claim("acct_1", KEY, FINGERPRINT))
    complete = commands(client, lambda: warm.complete(r, ANSWER))
    assert claim == {"evalsha": 1, "hmget": 1, "pttl": 1, "hset": 1, "pexpire": 1}
    assert complete == {"evalsha": 1, "hmget": 1, "hset": 1, "pexpire": 1}


def test_a_replay_and_a_refusal_run_these_commands_and_no_more(warm: Ledger, client: Counting) -> None:
    run(warm, KEY)
    warm.claim("acct_1", "busy", FINGERPRINT)

    replay = commands(client, lambda: warm.claim("acct_1", KEY, FINGERPRINT))
    reused = commands(client, lambda: warm.claim("acct_1", KEY, "another"))
    in_progress = commands(client, lambda: warm.claim("acct_1", "busy", FINGERPRINT))
    assert replay == reused == in_progress == {"evalsha": 1, "hmget": 2, "pttl": 1}


def test_a_claim_sends_its_hash_and_its_arguments_and_little_else(warm: Ledger, client: Counting) -> None:
    warm.claim("acct_1", KEY, FINGERPRINT)

    assert client.calls == ["EVALSHA"]
    row, sha, owner, lease, retention, created_at = len(f"{warm.namespace}:acct_1:{KEY}"), 40, 16, 5, 8, 13
    arguments = owner + len(FINGERPRINT) + lease + retention + created_at
    assert client.size == len("EVALSHA") + sha + len("1") + row + arguments


def test_a_completion_sends_the_body_once(warm: Ledger, client: Counting) -> None:
    r = warm.claim("acct_1", KEY, FINGERPRINT)
    assert isinstance(r, Reservation)
    client.forget()
    warm.complete(r, ANSWER)

    assert client.calls == ["EVALSHA"]
    assert client.size < len(ANSWER.body) + 250


def test_a_completed_row_takes_little_more_than_its_answer(warm: Ledger, client: Counting) -> None:
    run(warm, KEY)
    row = f"{warm.namespace}:acct_1:{KEY}"
    as_it_is = client.memory_usage(row, samples=0) or 0
    client.config_set("hash-max-listpack-value", 8192)
    try:
        client.delete(row)
        run(warm, KEY)
        packed = client.memory_usage(row, samples=0) or 0
    finally:
        client.config_set("hash-max-listpack-value", 64)

    assert 500 < packed < len(ANSWER.body) + 550
    assert 500 < as_it_is < len(ANSWER.body) + 1400


def growth(url: str, namespace: str, heartbeat: bool, keys: int) -> tuple[int, int]:
    """How many objects and memory blocks more there are in this process after so many keys."""
    ledger = Ledger.from_url(url, Policy(heartbeat=heartbeat), namespace)

    def use(first: int, last: int) -> None:
        for number in range(first, last):
            r = ledger.claim("acct_1", f"key-{number}", FINGERPRINT)
            assert isinstance(r, Reservation)
            ledger.start_heartbeat(r)
            ledger.complete(r, ANSWER)
            assert isinstance(ledger.claim("acct_1", f"key-{number}", FINGERPRINT), Replay)

    use(0, 200)
    gc.collect()
    objects, blocks = len(gc.get_objects()), sys.getallocatedblocks()
    use(200, 200 + keys)
    gc.collect()
    more = len(gc.get_objects()) - objects, sys.getallocatedblocks() - blocks
    ledger.close()
    return more


@pytest.mark.parametrize("heartbeat", [False, True])
def test_nothing_is_kept_in_the_process_for_a_key(real_server: Server, namespace: str, heartbeat: bool) -> None:
    """In a process of its own, where nothing else comes and goes. A heartbeat ends with its attempt, not its lease."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        objects, blocks = alone.submit(growth, real_server.url, namespace, heartbeat, 1000).result(60.0)

    assert objects < 100
    assert blocks < 100


@pytest.fixture
def app(client: Counting, namespace: str) -> Flask:
    app = Flask("shop")
    idempotency = Idempotency(app, principal="acct_1", ledger=Ledger(client, Policy(heartbeat=False), namespace))
    app.add_url_rule("/protected", "protected", idempotency.protect(lambda: ("made", 201)), methods=["POST", "GET"])
    app.add_url_rule("/plain", "plain", lambda: ("made", 201), methods=["POST"])
    return app


def send(app: Flask, method: str, path: str, **headers: str) -> bytes:
    environ = EnvironBuilder(path, method=method, data=b"{}", content_type="application/json").get_environ()
    answer = app.wsgi_app(
        {**environ, "wsgi.input": io.BytesIO(b"{}"), **headers}, lambda status, headers, info=None: lambda data: None
    )
    body = b"".join(answer)
    answer.close()  # type: ignore[attr-defined]
    return body


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", "/protected", {}),
        ("GET", "/protected", {"HTTP_IDEMPOTENCY_KEY": KEY}),
        ("OPTIONS", "/protected", {"HTTP_IDEMPOTENCY_KEY": KEY}),
        ("POST", "/plain", {}),
        ("POST", "/plain", {"HTTP_IDEMPOTENCY_KEY": KEY}),
    ],
)
def test_safe_methods_and_unprotected_views_cost_no_command(
    app: Flask, client: Counting, method: str, path: str, headers: dict[str, str]
) -> None:
    send(app, method, path, **headers)

    assert client.calls == []


def test_a_protected_request_costs_two_commands_and_its_replay_one(app: Flask, client: Counting) -> None:
    send(app, "POST", "/protected", HTTP_IDEMPOTENCY_KEY="first")
    client.forget()
    send(app, "POST", "/protected", HTTP_IDEMPOTENCY_KEY=KEY)
    assert client.calls == ["EVALSHA", "EVALSHA"]
    client.forget()
    assert send(app, "POST", "/protected", HTTP_IDEMPOTENCY_KEY=KEY) == b"made"
    assert client.calls == ["EVALSHA"]


@pytest.mark.parametrize(
    ("method", "path", "key", "most"),
    [
        ("GET", "/protected", None, 6),
        ("GET", "/protected", KEY, 8),
        ("POST", "/plain", None, 2),
        ("POST", "/plain", KEY, 25),
        ("POST", "/protected", KEY, 230),
    ],
)
def test_the_extension_enters_few_python_functions_a_request(
    app: Flask, client: Counting, method: str, path: str, key: str | None, most: int
) -> None:
    """Those of an application with a `teardown_request` that does nothing, and of redis-py, do not count."""
    bare = Flask("bare")
    bare.teardown_request(lambda error: None)
    bare.add_url_rule(path, "view", lambda: ("made", 201), methods=["POST", "GET"])
    send(app, "POST", "/protected", HTTP_IDEMPOTENCY_KEY="first")
    send(bare, method, path)
    headers = {} if key is None else {"HTTP_IDEMPOTENCY_KEY": key}
    without = count_calls(lambda: send(bare, method, path))

    assert count_calls(lambda: send(app, method, path, **headers)) - without <= most
