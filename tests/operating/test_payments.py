"""The shop of the examples shows its health and its metrics."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from flask import Flask
from flask.testing import FlaskClient

from tests.support.servers import Server

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def shop(valkey_server: Server, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FlaskClient:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for name, value in (
        ("IDEMREDIS_URL", valkey_server.url),
        ("IDEMREDIS_NAMESPACE", namespace),
        ("DATABASE", str(tmp_path / "shop.sqlite3")),
        ("GATEWAY", str(tmp_path / "gateway.sqlite3")),
        ("HEALTH_TOKEN", "token-1"),
    ):
        monkeypatch.setenv(f"SHOP_{name}", value)
    app: Flask = importlib.import_module("payments").create_app()
    return app.test_client()


def test_its_metrics_count_what_its_clients_send(shop: FlaskClient) -> None:
    headers = {"Authorization": "Bearer alice-token", "Idempotency-Key": "order-1"}
    for _ in range(2):
        assert shop.post("/charges", json={"card": "4242", "amount": 5}, headers=headers).status_code == 201
    answer = shop.get("/metrics")
    assert answer.content_type.startswith("text/plain")
    counted = [line for line in answer.text.splitlines() if line.startswith("idempotency_outcomes_total{")]
    assert any('outcome="claimed"' in line for line in counted)
    assert any('outcome="replayed"' in line for line in counted)
    assert "acct_alice" not in answer.text
    assert "order-1" not in answer.text


HEALTH = {"Authorization": "Bearer token-1"}


def test_its_health_is_that_of_its_ledgers_server(shop: FlaskClient, valkey_server: Server) -> None:
    fit = shop.get("/healthz", headers=HEALTH)
    assert (fit.status_code, fit.json) == (200, {"redis": "ok"})
    with valkey_server.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "-evalsha")
        sick = shop.get("/healthz", headers=HEALTH)
        client.execute_command("ACL", "SETUSER", "default", "+@all")
    assert (sick.status_code, sick.json) == (503, {"redis": "unavailable"})


@pytest.mark.parametrize("header", [None, "Bearer ", "Bearer token-2", "Bearer alice-token", "Basic dG9rZW4tMTo="])
def test_its_health_is_not_for_everybody(shop: FlaskClient, header: str | None) -> None:
    answer = shop.get("/healthz", headers={} if header is None else {"Authorization": header})
    assert (answer.status_code, answer.json) == (401, {"error": "unauthorized"})
    shop.application.config["HEALTH_TOKEN"] = ""
    assert shop.get("/healthz", headers={"Authorization": "Bearer "}).status_code == 401


def test_its_health_takes_one_call_and_no_other_rights_than_its_own(shop: FlaskClient, valkey_server: Server) -> None:
    shop.get("/healthz", headers=HEALTH)
    with valkey_server.client() as client:
        client.config_resetstat()
        assert shop.get("/healthz", headers=HEALTH).status_code == 200
        used = set(client.info("commandstats"))
        client.config_resetstat()
    assert used - {"cmdstat_config|resetstat"} == {"cmdstat_evalsha", "cmdstat_pttl"}
