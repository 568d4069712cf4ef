"""What a client is told when Redis is away or a row is corrupt, and `IDEMREDIS_FAIL_OPEN`."""

from __future__ import annotations

import logging
import socket
import time
from pathlib import Path

import pytest
import redis
from flask import Flask
from redis.backoff import NoBackoff
from redis.retry import Retry

from idemredis.flask import Idempotency, current_reservation
from tests.support.proxy import Proxy
from tests.support.servers import Server, valkey
from tests.support.site import MakeSite, Site
from tests.support.waiting import wait_until


def _unreachable() -> redis.Redis:
    return redis.Redis(port=1, retry=Retry(NoBackoff(), 0))


def test_without_redis_the_view_does_not_run_and_the_answer_is_503(make_site: MakeSite) -> None:
    site = make_site(client=_unreachable())
    site.view()
    answers = [site.send() for _ in range(2)]
    assert [answer.status_code for answer in answers] == [503, 503]
    assert site.runs == []


def test_fail_open_runs_unprotected_and_says_so_in_a_header_and_the_log(
    make_site: MakeSite, caplog: pytest.LogCaptureFixture
) -> None:
    site = make_site(client=_unreachable(), FAIL_OPEN=True)
    site.view(site.idempotency.protect(lambda: f"run {len(site.runs)} {bool(current_reservation)}"))
    answers = [site.send() for _ in range(2)]
    assert [answer.text for answer in answers] == ["run 1 False", "run 2 False"]
    assert [answer.headers["Idempotency-Status"] for answer in answers] == ["unprotected"] * 2
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len([text for text in errors if "runs unprotected, since IDEMREDIS_FAIL_OPEN is set" in text]) == 2


def test_fail_open_opens_nothing_but_an_outage(make_site: MakeSite) -> None:
    principals: list[object] = ["acme"]
    site = make_site(FAIL_OPEN=True, principal=lambda: principals[-1])
    site.view()
    assert site.send().status_code == 201
    assert site.send(json={"amount": 2}).status_code == 409
    assert site.send(None).status_code == 400
    assert site.send("\t").status_code == 400
    assert site.send("k2", data=b"1", environ_overrides={"CONTENT_LENGTH": "2"}).status_code == 400
    site.store.hset(site.row_name(), "status", "other")
    assert site.send().status_code == 500
    principals.append(None)
    assert site.send("k3").status_code == 401
    assert len(site.runs) == 1
    assert "Idempotency-Status" not in site.send("k3").headers


def test_fail_open_without_a_principal_runs_nothing_during_an_outage_either(make_site: MakeSite) -> None:
    site = make_site(client=_unreachable(), FAIL_OPEN=True, principal=lambda: None)
    site.view()
    assert (site.send().status_code, site.runs) == (401, [])


@pytest.mark.parametrize(
    "field", ["status", "generation", "owner", "fingerprint", "lease", "retention", "response_body"]
)
def test_a_row_with_a_field_missing_is_500_and_stays_as_it_is(field: str, site: Site) -> None:
    site.send()
    site.store.hdel(site.row_name(), field)
    before = site.rows()
    answer = site.send()
    assert (answer.status_code, answer.get_json()["error"]) == (500, "idempotency_row_corrupt")
    assert (site.rows(), len(site.runs)) == (before, 1)


@pytest.mark.parametrize("kind", ["string", "list", "set", "zset"])
def test_a_row_of_another_type_is_500_and_stays_as_it_is(
    kind: str, make_site: MakeSite, valkey_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    site = make_site(valkey_server)
    site.view()
    name = site.row_name()
    match kind:
        case "string":
            site.store.set(name, "x")
        case "list":
            site.store.rpush(name, "x")
        case "set":
            site.store.sadd(name, "x")
        case _:
            site.store.zadd(name, {"x": 1})
    site.store.expire(name, 60)
    before = site.rows()
    answer = site.send()
    assert (answer.status_code, answer.get_json()["error"], site.runs) == (500, "idempotency_row_corrupt", [])
    assert site.rows() == before
    assert "a row is corrupt, and its request was not run" in caplog.text


def test_redis_dying_in_the_view_costs_the_client_nothing_and_the_answer_is_stored_when_it_is_back(
    make_site: MakeSite, valkey_server: Server
) -> None:
    with Proxy(valkey_server.port) as proxy:
        client = redis.Redis(port=proxy.port, retry=Retry(NoBackoff(), 0))
        site = make_site(valkey_server, client=client)

        def view() -> tuple[str, int]:
            proxy.refuse()
            return "charged", 201

        site.view(view)
        first = site.send()
        assert (first.status_code, first.text, site.row()["status"]) == (201, "charged", b"pending")
        assert site.send().status_code == 503
        proxy.refuse(False)
        wait_until(lambda: site.row()["status"] == b"completed")
        again = site.send()
        assert (again.text, again.headers["Idempotent-Replayed"], len(site.runs)) == ("charged", "true", 1)


def test_a_lost_reply_to_the_claim_is_asked_for_again_and_the_view_runs_once(
    make_site: MakeSite, valkey_server: Server
) -> None:
    with Proxy(valkey_server.port) as proxy:
        site = make_site(valkey_server, client=redis.Redis(port=proxy.port, retry=Retry(NoBackoff(), 0)))
        site.view()
        proxy.drop_replies(1)
        assert [site.send().text for _ in range(2)] == ["charge 1"] * 2
        assert site.row()["generation"] == b"1"


def test_a_restarted_server_without_the_scripts_is_no_trouble(make_site: MakeSite, valkey_server: Server) -> None:
    site = make_site(valkey_server)

    def view() -> str:
        site.store.script_flush()
        return "done"

    site.view(view)
    assert [site.send().text for _ in range(2)] == ["done"] * 2
    assert len(site.runs) == 1


def test_a_server_that_hangs_is_a_503_within_the_timeout_and_the_next_retry_is_not_locked_out(
    make_site: MakeSite, tmp_path: Path
) -> None:
    with valkey(tmp_path) as server:
        site = make_site(server, client=server.client(socket_timeout=0.3, retry=Retry(NoBackoff(), 0)))
        site.view()
        wait_until(lambda: site.send("k0").status_code == 201)

        def is_refused_in_time(key: str) -> bool:
            began = time.monotonic()
            assert site.send(key).status_code == 503
            return time.monotonic() - began < 2.5

        server.freeze()
        assert any(map(is_refused_in_time, ("k1", "k2", "k3")))  # a busy machine is late once, no timeout each time
        server.thaw()
        assert len(site.runs) == 1
        assert wait_until(lambda: site.send().status_code == 201)
        assert len(site.runs) == 2


def test_the_deadline_of_the_settings_holds_for_a_client_of_ones_own_too() -> None:
    """Its server takes connections and never replies."""
    app = Flask("shop")
    app.config.update(IDEMREDIS_SOCKET_TIMEOUT_SECONDS=0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = redis.Redis(port=silent.getsockname()[1], socket_timeout=None)
        idempotency = Idempotency(app, principal="acct_1", client=client)
        app.add_url_rule("/charges", view_func=idempotency.protect(lambda: "charged"), methods=["POST"])
        began = time.monotonic()
        answer = app.test_client().post("/charges", headers={"Idempotency-Key": "k1"})
        assert (answer.status_code, time.monotonic() - began < 5.0) == (503, True)
