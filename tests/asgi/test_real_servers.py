"""Behind uvicorn and hypercorn: targets, bodies, and clients that go away while a stream is sent."""

from __future__ import annotations

import hashlib
import http.client
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from idemredis import fingerprint_request
from tests.support.served import PRINCIPAL
from tests.support.servers import Server
from tests.support.serving import ASGI_KINDS, Served
from tests.support.started import Servers
from tests.support.vectors import VECTORS, body_of
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def served_by(all_servers: Servers) -> Iterator[Callable[[str], Served]]:
    """Start the server of a kind when a test first asks for it."""
    running: dict[str, Served] = {}

    def get(kind: str) -> Served:
        if kind not in running:
            server = all_servers.get("valkey")
            assert isinstance(server, Server)
            running[kind] = Served(kind, server.url)
        running[kind].forget()
        return running[kind]

    yield get
    for served in running.values():
        served.close()


def _field(server: Server, name: str, key: str = "k1") -> bytes | None:
    with server.client() as client:
        value: bytes | None = client.hget(f"served:{PRINCIPAL}:{key}", name)
        return value


def _head(target: str = "/charges", method: str = "POST", key: str = "k1", **headers: str) -> str:
    lines = [f"{method} {target} HTTP/1.1", f"Idempotency-Key: {key}"]
    return "\n".join([*lines, *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())])


@pytest.mark.parametrize("kind", ASGI_KINDS)
def test_the_vectors_come_out_of_a_raw_socket(
    kind: str, served_by: Callable[[str], Served], valkey_server: Server
) -> None:
    served = served_by(kind)
    for number, vector in enumerate(VECTORS):
        body = body_of(vector)
        headers = {"Content-Length": str(len(body)), **vector["headers"]}
        answer = served.exchange(_head(vector["target"], vector["method"].upper(), f"v{number}", **headers), body)
        assert answer.status == 201
        assert answer.json["sha256"] == hashlib.sha256(body).hexdigest()
        assert _field(valkey_server, "fingerprint", f"v{number}") == vector["fingerprint"].encode(), vector["target"]


@pytest.mark.parametrize("kind", ASGI_KINDS)
def test_every_server_hands_on_the_raw_target(
    kind: str, served_by: Callable[[str], Served], valkey_server: Server
) -> None:
    served = served_by(kind)
    for number, target in enumerate(["/a%2Fb", "/%61", "/a//b;p=1", "/~x%7E", "/caf%C3%A9?q=%E3%81%82", "/x?b=%zz&a"]):
        assert served.exchange(_head(target, key=f"t{number}", Content_Length="3"), b"abc").status == 201
        expected = fingerprint_request("POST", target, {}, b"abc").encode()
        assert _field(valkey_server, "fingerprint", f"t{number}") == expected, target


@pytest.mark.parametrize("kind", ASGI_KINDS)
def test_an_upload_that_a_client_breaks_off_runs_and_claims_nothing(
    kind: str, served_by: Callable[[str], Served], valkey_server: Server
) -> None:
    served = served_by(kind)
    whole = b"x" * 100_000
    answer = served.exchange(_head(Content_Length="100000"), whole[:70_000], half_close=True)
    assert answer.status in (0, 400)
    assert served.exchange(_head(Content_Length="100000"), whole).status == 201
    assert served.runs() == ["k1"]
    assert _field(valkey_server, "generation") == b"1"


@pytest.mark.parametrize("answer", ["plain", "stream"])
@pytest.mark.parametrize("kind", ASGI_KINDS)
def test_a_first_answer_and_its_replay_are_the_same(
    kind: str, answer: str, served_by: Callable[[str], Served], valkey_server: Server
) -> None:
    served = served_by(kind)
    head = _head(f"/answers/{answer}", Content_Length="3")
    first, again = served.exchange(head, b"abc"), served.exchange(head, b"abc")
    assert (first.status, again.status, again.headers["idempotent-replayed"]) == (201, 201, "true")
    assert again.body == first.body
    assert again.headers["content-type"] == first.headers["content-type"]
    assert served.runs() == ["k1"]


@pytest.mark.parametrize("kind", ASGI_KINDS)
def test_a_stream_that_breaks_is_final_only_if_something_of_it_was_sent(
    kind: str, served_by: Callable[[str], Served], valkey_server: Server
) -> None:
    served = served_by(kind)
    for key, answer in (("k1", "broken"), ("k2", "broken-first")):
        with suppress(http.client.IncompleteRead):
            served.exchange(_head(f"/answers/{answer}", key=key, Content_Length="0"))
    wait_until(lambda: _field(valkey_server, "status") == b"completed")
    assert served.exchange(_head("/answers/broken", Content_Length="0")).error == "idempotency_response_not_stored"
    assert (_field(valkey_server, "status", "k2"), _field(valkey_server, "owner", "k2")) == (b"pending", b"")


@pytest.mark.parametrize("kind", ASGI_KINDS)
def test_a_small_stream_whose_client_goes_away_is_stored_whole(
    kind: str, served_by: Callable[[str], Served], valkey_server: Server
) -> None:
    """The server tells the application at once, and Starlette would cancel the stream."""
    served = served_by(kind)
    head = _head("/answers/slow", Content_Length="0")
    with served.connect() as connection:
        connection.sendall(f"{head}\nHost: shop\nConnection: close\n\n".replace("\n", "\r\n").encode())
        assert connection.recv(1)
    wait_until(lambda: _field(valkey_server, "status") == b"completed", 20.0)
    again = served.exchange(head)
    assert (again.status, again.body.count(b"piece"), served.runs()) == (201, 20, ["k1"])
