"""The clients that docs/flask.md shows, each with a real server of its kind behind a protected view."""

from __future__ import annotations

import re
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.sentinel
import trustme
from flask import Flask

from idemredis.flask import Idempotency
from tests.support.clusters import Cluster
from tests.support.servers import Server, free_port, redis_server, valkey
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

DOCUMENT = (Path(__file__).parents[2] / "docs" / "flask.md").read_text()


def _of_document(name: str, **replace: str) -> Any:
    """Make the client of the document's line that has this name, with other addresses."""
    (line,) = re.findall(rf"^# (redis\.\S*{name}.*)$", DOCUMENT, re.MULTILINE)
    for old, new in replace.items():
        assert old in line, line
        line = line.replace(old, new)
    return eval(line, {"redis": redis})


def _serve(client: Any) -> None:
    app = Flask("shop")
    idempotency = Idempotency(app, principal="shop", client=client)
    runs: list[int] = []

    @app.post("/orders")
    @idempotency.protect
    def create_order() -> tuple[str, int]:
        runs.append(1)
        return "made", 201

    answers = [app.test_client().post("/orders", headers={"Idempotency-Key": f"o-{n // 2}"}) for n in range(20)]
    assert {answer.status_code for answer in answers} == {201}
    assert [answer.headers.get("Idempotent-Replayed") for answer in answers] == [None, "true"] * 10
    assert len(runs) == 10


def test_a_primary_that_sentinel_names(tmp_path: Path) -> None:
    with ExitStack() as stack:
        primary = stack.enter_context(valkey(tmp_path / "primary"))
        conf = tmp_path / "sentinel.conf"
        conf.write_text(f"sentinel monitor mymaster 127.0.0.1 {primary.port} 1\n")
        sentinel = Server("sentinel", tmp_path / "sentinel", [primary.command[0], str(conf), "--sentinel"])
        stack.callback(sentinel.stop)
        with sentinel.client() as admin:
            wait_until(lambda: admin.sentinel_masters()["mymaster"]["flags"] == "master")
        client = _of_document("sentinel", **{'"sentinel-1", 26379': f'"127.0.0.1", {sentinel.port}'})
        stack.callback(client.close)
        _serve(client)


def test_a_cluster(cluster: Cluster) -> None:
    client = _of_document("RedisCluster", **{"node-1:6379": f"127.0.0.1:{cluster.nodes[0].port}"})
    try:
        _serve(client)
    finally:
        client.close()


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="the embedded server has no TLS")
def test_a_server_with_tls(tmp_path: Path) -> None:
    authority, port = trustme.CA(), free_port()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    of_server = authority.issue_cert("127.0.0.1")
    of_server.private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    files = {"cert": "server.pem", "key": "server.pem", "ca-cert": "ca.pem"}
    words = [word for name, file in files.items() for word in (f"--tls-{name}-file", str(tmp_path / file))]
    with redis_server(tmp_path / "redis", "--tls-port", str(port), "--tls-auth-clients", "no", *words):
        there = {"redis.example:6380": f"127.0.0.1:{port}", "/etc/ssl/redis.pem": str(tmp_path / "ca.pem")}
        with _of_document("rediss", **there) as client:
            _serve(client)
        stranger = tmp_path / "other.pem"
        trustme.CA().cert_pem.write_to_path(stranger)
        with _of_document("rediss", **{**there, "/etc/ssl/redis.pem": str(stranger)}) as client:
            app = Flask("shop")
            view = Idempotency(app, principal="shop", client=client).protect(lambda: "made")
            app.add_url_rule("/orders", "orders", view, methods=["POST"])
            assert app.test_client().post("/orders", headers={"Idempotency-Key": "o-1"}).status_code == 503
