"""Requests as they come in behind real servers: targets, bodies, broken uploads, keys that no HTTP has."""

from __future__ import annotations

import hashlib
import http.client
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from idemredis import fingerprint_request
from tests.support.served import KINDS, PRINCIPAL
from tests.support.served import __file__ as of_served
from tests.support.servers import Server
from tests.support.serving import Served
from tests.support.started import Servers
from tests.support.vectors import VECTORS, body_of
from tests.support.waiting import wait_until

RAW_KINDS = tuple(kind for kind in KINDS if kind != "gevent")
"""Those that hand on the raw target."""


@pytest.fixture(scope="module")
def served_by(all_servers: Servers) -> Iterator[Callable[[str], Served]]:
    """Start the server of a kind when a test first asks for it."""
    running: dict[str, Served] = {}

    def get(kind: str) -> Served:
        if kind.endswith("gevent") and find_spec("gevent") is None:
            pytest.skip("gevent is not installed")
        if kind not in running:
            server = all_servers.get("valkey")
            assert isinstance(server, Server)
            running[kind] = Served(kind, server.url)
        running[kind].forget()
        return running[kind]

    yield get
    for served in running.values():
        served.close()


def _stored(server: Server, key: str = "k1") -> str:
    with server.client() as client:
        value = client.hget(f"served:{PRINCIPAL}:{key}", "fingerprint")
        assert isinstance(value, bytes)
        return value.decode()


def _rows(server: Server) -> int:
    with server.client() as client:
        size: int = client.dbsize()
        return size


def _head(target: str = "/charges", method: str = "POST", key: str = "k1", **headers: str) -> str:
    lines = [f"{method} {target} HTTP/1.1", f"Idempotency-Key: {key}"]
    return "\n".join([*lines, *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())])


def _chunks(body: bytes, size: int) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@pytest.mark.parametrize("kind", ["gunicorn-sync", "werkzeug"])
def test_the_vectors_come_out_of_a_raw_socket_too(
    kind: str, served_by: Callable[[str], Served], valkey_server: Server
) -> None:
    served = served_by(kind)
    for number, vector in enumerate(VECTORS):
        if vector["method"] == "post" and kind == "gunicorn-sync":
            continue  # gunicorn refuses a method in lower case
        body = body_of(vector)
        headers = {"Content-Length": str(len(body)), **vector["headers"]}
        answer = served.exchange(_head(vector["target"], vector["method"], f"v{number}", **headers), body)
        assert answer.status == 201
        assert answer.json["sha256"] == hashlib.sha256(body).hexdigest()
        assert _stored(valkey_server, f"v{number}") == vector["fingerprint"], vector["target"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_server_hands_on_the_raw_target_or_says_that_it_does_not(
    kind: str, served_by: Callable[[str], Served], valkey_server: Server
) -> None:
    served = served_by(kind)
    targets = ["/a/b", "/caf%C3%A9?q=%E3%81%82", "/x?a=1&b=%zz", "/"]
    if kind in RAW_KINDS:
        targets += ["/a%2Fb", "/%61", "/x?", "/a//b;p=1", "/~x%7E"]
    else:
        assert "does not give the raw request target" not in served.log
    for number, target in enumerate(targets):
        answer = served.exchange(_head(target, key=f"t{number}", Content_Length="3"), b"abc")
        assert answer.status == 201
        assert _stored(valkey_server, f"t{number}") == fingerprint_request("POST", target, {}, b"abc"), target
    assert (kind in RAW_KINDS) == ("does not give the raw request target" not in served.log)


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_of_a_megabyte_hashes_alike_chunked_and_plain(
    kind: str, served_by: Callable[[str], Served], valkey_server: Server
) -> None:
    served = served_by(kind)
    body = bytes(range(256)) * 4096
    plain = served.exchange(_head(Content_Length=str(len(body))), body)
    chunked = served.exchange(_head(key="k2", Transfer_Encoding="chunked"), _chunks(body, 60_000))
    assert plain.json["sha256"] == chunked.json["sha256"] == hashlib.sha256(body).hexdigest()
    assert _stored(valkey_server) == _stored(valkey_server, "k2") == fingerprint_request("POST", "/charges", {}, body)
    again = served.exchange(_head(Transfer_Encoding="chunked"), _chunks(body, 9_999))
    assert (again.headers["idempotent-replayed"], again.body) == ("true", plain.body)
    assert served.runs() == ["k1", "k2"]


def test_uwsgi_alone_has_chunked_bodies_refused_and_nothing_claimed(
    served_by: Callable[[str], Served], valkey_server: Server
) -> None:
    served = served_by("uwsgi-bare")
    answer = served.exchange(_head(Transfer_Encoding="chunked"), _chunks(b"abc", 2))
    assert (answer.status, answer.error) == (411, "idempotency_length_required")
    assert (served.runs(), _rows(valkey_server)) == ([], 0)
    assert served.exchange(_head(Content_Length="3"), b"abc").status == 201


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_upload_that_a_client_breaks_off_runs_and_claims_nothing(
    kind: str, chunked: bool, served_by: Callable[[str], Served], valkey_server: Server
) -> None:
    served = served_by(kind)
    whole = b"x" * 100_000
    if chunked:
        answer = served.exchange(_head(Transfer_Encoding="chunked"), _chunks(whole, 30_000)[:70_000], half_close=True)
    else:
        answer = served.exchange(_head(Content_Length="100000"), whole[:70_000], half_close=True)
    if kind == "waitress":  # it waits for the whole body, and forgets a client that goes away
        assert answer.status == 0
    else:
        assert (answer.status, answer.error) == (400, "idempotency_body_incomplete")
    assert (served.runs(), _rows(valkey_server)) == ([], 0)
    assert served.exchange(_head(Content_Length="100000"), whole).status == 201


@pytest.mark.parametrize("kind", ["gunicorn-gthread", "werkzeug"])
def test_an_upload_of_50_mb_arrives_whole_and_costs_no_memory_in_proportion(
    kind: str, served_by: Callable[[str], Served], valkey_server: Server
) -> None:
    served = served_by(kind)
    before = max(served.exchange(_head(key=f"w{n}", Content_Length="1"), b"x").json["peak_kib"] for n in range(6))
    body = bytes(range(256)) * (200 * 1024)
    answer = served.exchange(_head(Content_Length=str(len(body))), body).json
    assert (answer["size"], answer["sha256"]) == (len(body), hashlib.sha256(body).hexdigest())
    assert answer["peak_kib"] - before < 12 * 1024


@pytest.mark.parametrize("kind", ["werkzeug", "gevent", "uwsgi"])
def test_a_server_that_takes_methods_in_lower_case_runs_no_view_unclaimed(
    kind: str, served_by: Callable[[str], Served], valkey_server: Server
) -> None:
    served = served_by(kind)
    assert served.exchange("post /charges HTTP/1.1\nContent-Length: 0").error == "idempotency_key_required"
    first = served.exchange(_head(method="post", Content_Length="0"))
    again = served.exchange(_head(Content_Length="0"))
    assert (first.status, again.body, again.headers["idempotent-replayed"]) == (201, first.body, "true")
    assert served.runs() == ["k1"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_repeated_header_line_is_one_key_that_no_single_line_names(
    kind: str, served_by: Callable[[str], Served], valkey_server: Server
) -> None:
    served = served_by(kind)
    assert served.exchange(f"{_head(key='a')}\nIdempotency-Key: b\nContent-Length: 0").status == 201
    for key in ("a", "b"):
        assert served.exchange(_head(key=key, Content_Length="0")).json["generation"] == 1
    assert [len(run) for run in served.runs()][1:] == [1, 1]
    assert served.runs()[0] in ("a,b", "a, b")


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_no_key_may_have_are_refused_by_every_server_or_by_us(
    kind: str, served_by: Callable[[str], Served], valkey_server: Server
) -> None:
    served = served_by(kind)
    for key in ("a\x00b", "a\x7fb", "caf\xe9", "a\x80", "k" * 256):
        answer = served.exchange(_head(key=key, Content_Length="0"))
        assert answer.status in (0, 400, 431), key
    assert (served.runs(), _rows(valkey_server)) == ([], 0)


@pytest.mark.parametrize("answer", ["plain", "stream", "file"])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_first_answer_and_its_replay_are_the_same_behind_every_server(
    kind: str, chunked: bool, answer: str, served_by: Callable[[str], Served], valkey_server: Server
) -> None:
    served = served_by(kind)
    head, body = (
        (_head(f"/answers/{answer}", Transfer_Encoding="chunked"), _chunks(b"abc", 2))
        if chunked
        else (_head(f"/answers/{answer}", Content_Length="3"), b"abc")
    )
    first = served.exchange(head, body)
    wait_until(lambda: _status(valkey_server) == b"completed")
    again = served.exchange(head, body)
    assert first.status == again.status == (200 if answer == "file" else 201)
    assert (again.body, again.headers["idempotent-replayed"]) == (first.body, "true")
    assert again.headers["content-type"] == first.headers["content-type"]
    if answer == "file":
        assert first.body == Path(of_served).read_bytes()
    assert served.runs() == ["k1"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_commit_that_fails_in_the_teardown_is_no_success_behind_any_server(
    kind: str, served_by: Callable[[str], Served], valkey_server: Server
) -> None:
    served = served_by(kind)
    head = _head("/answers/uncommitted", Content_Length="0")
    with suppress(http.client.IncompleteRead):  # uWSGI has sent the head by then
        assert served.exchange(head).status in (0, 500)
    again = served.exchange(head)
    assert (again.status, again.body, served.runs()) == (201, b"uncommitted", ["k1", "k1"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_breaks_is_final_only_if_something_of_it_was_sent(
    kind: str, served_by: Callable[[str], Served], valkey_server: Server
) -> None:
    served = served_by(kind)
    for key, answer in (("k1", "broken"), ("k2", "broken-first")):
        with suppress(http.client.IncompleteRead):
            served.exchange(_head(f"/answers/{answer}", key=key, Content_Length="0"))
    wait_until(lambda: _status(valkey_server) == b"completed")
    assert served.exchange(_head("/answers/broken", Content_Length="0")).error == "idempotency_response_not_stored"
    with valkey_server.client() as client:
        assert client.hmget(f"served:{PRINCIPAL}:k2", "status", "owner") == [b"pending", b""]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "waitress"])
def test_a_small_stream_whose_client_goes_away_is_stored_whole_behind_a_server(
    kind: str, served_by: Callable[[str], Served], valkey_server: Server
) -> None:
    """waitress reads a response to its end by itself."""
    served = served_by(kind)
    head = _head("/answers/slow", Content_Length="0")
    with served.connect() as connection:
        connection.sendall(f"{head}\nHost: shop\nConnection: close\n\n".replace("\n", "\r\n").encode())
        assert connection.recv(1)
    wait_until(lambda: _status(valkey_server) == b"completed", 20.0)
    again = served.exchange(head)
    assert (again.status, again.body.count(b"piece"), served.runs()) == (201, 20, ["k1"])


def _status(server: Server, key: str = "k1") -> object:
    with server.client() as client:
        return client.hget(f"served:{PRINCIPAL}:{key}", "status")
