"""What a client is told when Redis is away or a row is corrupt, and `IDEMREDIS_FAIL_OPEN`."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from idemredis import current_reservation
from tests.support.doors import MakeDoor
from tests.support.proxy import Proxy
from tests.support.servers import Server, valkey
from tests.support.site import Door
from tests.support.waiting import wait_until


def test_without_redis_the_view_does_not_run_and_the_answer_is_503(make_door: MakeDoor) -> None:
    door = make_door(port=1)
    door.view()
    answers = [door.send() for _ in range(2)]
    assert [answer.status_code for answer in answers] == [503, 503]
    assert door.runs == []


def test_fail_open_runs_unprotected_and_says_so_in_a_header_and_the_log(
    make_door: MakeDoor, caplog: pytest.LogCaptureFixture
) -> None:
    door = make_door(port=1, FAIL_OPEN=True)
    door.view(lambda: f"run {len(door.runs)} {bool(current_reservation)}")
    answers = [door.send() for _ in range(2)]
    assert [answer.text for answer in answers] == ["run 1 False", "run 2 False"]
    assert [answer.headers["Idempotency-Status"] for answer in answers] == ["unprotected"] * 2
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len([text for text in errors if "runs unprotected, since IDEMREDIS_FAIL_OPEN is set" in text]) == 2


def test_fail_open_opens_nothing_but_an_outage(make_door: MakeDoor) -> None:
    principals: list[object] = ["acme"]
    door = make_door(FAIL_OPEN=True, principal=lambda: principals[-1])
    door.view()
    assert door.send().status_code == 201
    assert door.send(json={"amount": 2}).status_code == 409
    assert door.send(None).status_code == 400
    assert door.send("\t").status_code == 400
    assert door.send("k2", data=b"1", announced=2).status_code == 400
    door.store.hset(door.row_name(), "status", "other")
    assert door.send().status_code == 500
    principals.append(None)
    assert door.send("k3").status_code == 401
    assert len(door.runs) == 1
    assert "Idempotency-Status" not in door.send("k3").headers


def test_fail_open_without_a_principal_runs_nothing_during_an_outage_either(make_door: MakeDoor) -> None:
    door = make_door(port=1, FAIL_OPEN=True, principal=lambda: None)
    door.view()
    assert (door.send().status_code, door.runs) == (401, [])


@pytest.mark.parametrize(
    "field", ["status", "generation", "owner", "fingerprint", "lease", "retention", "response_body"]
)
def test_a_row_with_a_field_missing_is_500_and_stays_as_it_is(field: str, door: Door) -> None:
    door.send()
    door.store.hdel(door.row_name(), field)
    before = door.rows()
    answer = door.send()
    assert (answer.status_code, answer.get_json()["error"]) == (500, "idempotency_row_corrupt")
    assert (door.rows(), len(door.runs)) == (before, 1)


@pytest.mark.parametrize("kind", ["string", "list", "set", "zset"])
def test_a_row_of_another_type_is_500_and_stays_as_it_is(
    kind: str, make_door: MakeDoor, valkey_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    door = make_door(valkey_server)
    door.view()
    name = door.row_name()
    match kind:
        case "string":
            door.store.set(name, "x")
        case "list":
            door.store.rpush(name, "x")
        case "set":
            door.store.sadd(name, "x")
        case _:
            door.store.zadd(name, {"x": 1})
    door.store.expire(name, 60)
    before = door.rows()
    answer = door.send()
    assert (answer.status_code, answer.get_json()["error"], door.runs) == (500, "idempotency_row_corrupt", [])
    assert door.rows() == before
    assert f"corrupt: row {door.events[-1].digest} generation 0" in caplog.text


def test_redis_dying_in_the_view_costs_the_client_nothing_and_the_answer_is_stored_when_it_is_back(
    make_door: MakeDoor, valkey_server: Server
) -> None:
    with Proxy(valkey_server.port) as proxy:
        door = make_door(valkey_server, port=proxy.port)

        def view() -> tuple[str, int]:
            proxy.refuse()
            return "charged", 201

        door.view(view)
        first = door.send()
        assert (first.status_code, first.text, door.row()["status"]) == (201, "charged", b"pending")
        assert door.send().status_code == 503
        proxy.refuse(False)
        wait_until(lambda: door.row()["status"] == b"completed")
        again = door.send()
        assert (again.text, again.headers["Idempotent-Replayed"], len(door.runs)) == ("charged", "true", 1)


def test_a_lost_reply_to_the_claim_is_asked_for_again_and_the_view_runs_once(
    make_door: MakeDoor, valkey_server: Server
) -> None:
    with Proxy(valkey_server.port) as proxy:
        door = make_door(valkey_server, port=proxy.port)
        door.view()
        proxy.drop_replies(1)
        assert [door.send().text for _ in range(2)] == ["charge 1"] * 2
        assert door.row()["generation"] == b"1"


def test_a_restarted_server_without_the_scripts_is_no_trouble(make_door: MakeDoor, valkey_server: Server) -> None:
    door = make_door(valkey_server)

    def view() -> str:
        door.store.script_flush()
        return "done"

    door.view(view)
    assert [door.send().text for _ in range(2)] == ["done"] * 2
    assert len(door.runs) == 1


@pytest.mark.slow
def test_a_server_that_hangs_is_a_503_within_the_timeout_and_the_next_retry_is_not_locked_out(
    make_door: MakeDoor, tmp_path: Path
) -> None:
    with valkey(tmp_path) as server:
        door = make_door(server, port=server.port, socket_timeout=0.3)
        door.view()
        wait_until(lambda: door.send("k0").status_code == 201)

        def is_refused_in_time(key: str) -> bool:
            began = time.monotonic()
            assert door.send(key).status_code == 503
            return time.monotonic() - began < 2.5

        server.freeze()
        assert any(map(is_refused_in_time, ("k1", "k2", "k3")))  # a busy machine is late once, no timeout each time
        server.thaw()
        assert len(door.runs) == 1
        assert wait_until(lambda: door.send().status_code == 201)
        assert len(door.runs) == 2
