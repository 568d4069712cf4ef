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


def test_its_health_is_that_of_its_ledgers_server(shop: FlaskClient, valkey_server: Server) -> None:
    fit = shop.get("/healthz")
    assert fit.status_code == 200
    assert fit.json is not None
    assert fit.json["reachable"]
    with valkey_server.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        sick = shop.get("/healthz")
        client.config_set("maxmemory-policy", "noeviction")
    assert sick.status_code == 503
    assert sick.json is not None
    assert [f["check"] for f in sick.json["findings"] if f["verdict"] == "problem"] == ["eviction"]
