"""Every framework behind uvicorn and hypercorn: once, replayed, refused and streamed, over HTTP/1.1 and HTTP/2."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from idemredis import fingerprint_request
from tests.support.frameworks import FRAMEWORKS, PIECES
from tests.support.served import PRINCIPAL
from tests.support.servers import Server
from tests.support.serving import ASGI_KINDS, PATIENCE, Served

HTTP = {"uvicorn": ["HTTP/1.1"], "hypercorn": ["HTTP/1.1", "HTTP/2"]}


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(params=ASGI_KINDS)
def served(request: pytest.FixtureRequest, framework: str, valkey_server: Server) -> Iterator[Served]:
    with Served(request.param, valkey_server.url, framework=framework, workers=1) as served:
        yield served


def _client(served: Served, version: str) -> httpx.Client:
    is_2 = version == "HTTP/2"
    transport = httpx.HTTPTransport(uds=served.address, http1=not is_2, http2=is_2)
    return httpx.Client(transport=transport, base_url="http://shop", timeout=PATIENCE)


@pytest.mark.slow
def test_a_request_runs_once_and_is_replayed_or_refused_over_every_version_of_http(
    served: Served, valkey_server: Server
) -> None:
    """One server answers everything, since to start one takes seconds."""
    for version in HTTP[served.kind]:
        with _client(served, version) as client:
            key = f"charge-over-{version}"
            target, body = "/charges/7?note=%7E%2f", b'{"amount": 1000}'
            kind = {"Content-Type": "application/json"}
            headers = {"Idempotency-Key": key, **kind}
            first, again = (client.post(target, content=body, headers=headers) for _ in range(2))
            assert first.http_version == version
            assert (first.status_code // 100, first.json()) == (2, {"key": key, "body": body.decode()})
            assert "Idempotent-Replayed" not in first.headers
            assert (again.status_code, again.content) == (first.status_code, first.content)
            assert again.headers["Content-Type"] == first.headers["Content-Type"]
            assert again.headers["Idempotent-Replayed"] == "true"
            with valkey_server.client() as store:
                stored = store.hget(f"served:{PRINCIPAL}:{key}", "fingerprint")
            sent = first.request.url.raw_path.decode()
            assert stored == fingerprint_request("POST", sent, kind, body).encode()

            reused = client.post(target, content=b'{"amount": 2}', headers=headers)
            assert (reused.status_code, reused.json()["error"]) == (409, "idempotency_key_reused")
            request = client.build_request("POST", target)
            del request.headers["Content-Length"]  # hypercorn ends a connection if nobody reads a body: its pull 365
            missing = client.send(request)
            assert (missing.status_code, missing.json()["error"]) == (400, "idempotency_key_required")
            assert client.get("/up", headers={"Idempotency-Key": key}).status_code == 200

            key = f"stream-over-{version}"
            first, again = (client.post("/streams", headers={"Idempotency-Key": key}) for _ in range(2))
            assert first.status_code // 100 == 2
            assert first.content == b"".join(PIECES)
            assert (again.status_code, again.content) == (first.status_code, first.content)
            assert "Idempotent-Replayed" not in first.headers
            assert again.headers["Idempotent-Replayed"] == "true"

    expected = [f"{what}-over-{version}" for version in HTTP[served.kind] for what in ("charge", "stream")]
    assert served.runs() == expected
    if served.kind == "hypercorn":
        with _client(served, "HTTP/2") as client:
            crossed = client.post(
                "/charges/7?note=%7E%2f",
                content=b'{"amount": 1000}',
                headers={"Idempotency-Key": "charge-over-HTTP/1.1", "Content-Type": "application/json"},
            )
        assert crossed.headers["Idempotent-Replayed"] == "true"
    assert "Traceback" not in served.log
