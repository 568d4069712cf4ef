"""Raw bytes at gunicorn: only the statuses of the contract, no traceback, and nothing written for what was refused."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from idemredis.core.keys import identify
from tests.support.served import PRINCIPAL
from tests.support.servers import Server
from tests.support.serving import Answer, Served, read_answer
from tests.support.waiting import wait_until

REQUESTS = int(os.environ.get("IDEMREDIS_FUZZ", "400"))
RAN = {201}
REFUSED = {400, 409, 411, 413, 414, 431, 501, 505, 0}
"""By us (400, 409, 411), or by gunicorn before us; 0 is a connection closed without an answer."""
NOT_FOUND = {404, 405, 308}


@pytest.fixture
def service(valkey_server: Server, namespace: str) -> Iterator[Served]:
    with Served("gunicorn-gthread", valkey_server.url, namespace) as service:
        yield service


def some_key(dice: random.Random) -> bytes:
    """Return a key: often valid, and often not by a byte."""
    printable = bytes(range(0x21, 0x7F))
    kinds: list[bytes] = [
        b"secretkey-%d" % dice.randrange(40),
        bytes(dice.choices(printable, k=dice.choice((1, 2, 254, 255, 256, 4000)))),
        bytes(dice.choices(range(256), k=dice.randrange(1, 40))),
        b"",
        b" \t ",
        b"{a}:*?[x]%0a%25",
        b"a\x00b",
        b"k\xc3\xa9y",
        b'"quoted"',
        b"a, b",
        b"x\x7f",
    ]
    return dice.choice(kinds)


def some_request(dice: random.Random) -> bytes:
    method = dice.choice((b"POST", b"POST", b"POST", b"PUT", b"PATCH", b"DELETE", b"post", b"TRACE", b"BREW"))
    targets = (b"/", b"/charges", b"/a%2Fb", b"/a/../b", b"/%zz", b"/a?b=%00", b"//x", b"*", b"/" + b"l" * 300)
    target = dice.choice(
        (*targets, b"/\xff\xfe", b"http://shop/abs", b"/?" + bytes(dice.choices(range(33, 127), k=20)))
    )
    lines = [method + b" " + target + b" HTTP/1.1", b"Host: shop", b"Connection: close"]
    for _ in range(dice.choice((0, 1, 1, 1, 1, 2))):
        name = dice.choice((b"Idempotency-Key", b"idempotency-key", b"IDEMPOTENCY-KEY", b"Idempotency_Key"))
        lines.append(name + b": " + some_key(dice))
    if dice.random() < 0.3:
        lines.append(
            dice.choice((b"Content-Type: \xff", b"X-Api-Version: 1\t", b"Content-Type: multipart/form-data", b"X: y"))
        )
    body = bytes(dice.choices(range(256), k=dice.choice((0, 1, 20, 3000))))
    match dice.choice(("plain", "plain", "plain", "chunked", "bad chunks", "short", "long", "no number", "both")):
        case "plain":
            lines.append(b"Content-Length: %d" % len(body))
        case "chunked":
            lines.append(b"Transfer-Encoding: chunked")
            body = (
                b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (body[:7], body[7:]) if piece)
                + b"0\r\n\r\n"
            )
        case "bad chunks":
            lines.append(b"Transfer-Encoding: chunked")
            body = b"zz\r\n" + body
        case "short":
            lines.append(b"Content-Length: %d" % (len(body) + 10))
        case "long":
            lines.append(b"Content-Length: %d" % max(0, len(body) - 1))
        case "no number":
            lines.append(b"Content-Length: " + dice.choice((b"-1", b"1e3", b"0x10", b"", b"99999999999999999999")))
        case "both":
            lines += [b"Transfer-Encoding: chunked", b"Content-Length: 3"]
            body = b"3\r\nabc\r\n0\r\n\r\n"
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def exchange(service: Served, request: bytes) -> Answer:
    with service.connect() as connection:
        with suppress(OSError):
            connection.sendall(request)
            connection.shutdown(1)
        return read_answer(connection)


def test_whatever_comes_in_is_answered_by_the_contract(service: Served, valkey_server: Server, namespace: str) -> None:
    dice = random.Random(20261129)
    seen: set[int] = set()
    with valkey_server.client() as client:
        for turn in range(REQUESTS):
            request = some_request(dice)
            before = set(client.keys())
            answer = exchange(service, request)
            seen.add(answer.status)
            assert answer.status in RAN | REFUSED | NOT_FOUND, (turn, request[:300], answer)
            if answer.status in REFUSED - {0}:
                assert set(client.keys()) == before, (turn, request[:300], answer)
            if answer.status == 201:
                assert answer.json["generation"] == 1
        for row in client.scan_iter():
            assert row.startswith(namespace.encode() + b":")
            assert client.hget(row, "status") == b"completed", row
    assert seen >= {201, 400, 409}
    assert "Traceback" not in service.log
    for secret in ("secretkey", PRINCIPAL):
        assert secret not in service.log


def test_pipelined_requests_are_each_answered_for_themselves(service: Served) -> None:
    one = b"POST /charges HTTP/1.1\r\nHost: shop\r\nIdempotency-Key: p-%d\r\nContent-Length: 2\r\n\r\n{}"
    pipelined = b"".join(one % (i % 3) for i in range(6))
    with service.connect() as connection:
        connection.sendall(pipelined.replace(b"Host: shop\r\n", b"Host: shop\r\n", 1))
        received = b""

        def all_there() -> bool:
            nonlocal received
            with suppress(TimeoutError):
                received += connection.recv(65536)
            return received.count(b"HTTP/1.1 201") == 6

        connection.settimeout(0.2)
        wait_until(all_there, 10.0)
    assert received.lower().count(b"idempotent-replayed: true") == 3
    assert [service.notes(f"p-{i}") for i in range(3)] == [["begun", "done"]] * 3


EDITED: list[tuple[str, Any]] = [
    ("response_headers", json.dumps([["location", "/x\r\nSet-Cookie: evil=1"]])),
    ("response_headers", json.dumps([["location: /x\r\nX-Evil", "1"]])),
    ("response_headers", json.dumps([["location", "/x\n\nevil"]])),
    ("response_headers", json.dumps([["set-cookie", "evil=1"]])),
    ("response_headers", json.dumps([["transfer-encoding", "chunked"], ["content-length", "3"]])),
    ("response_headers", "{}"),
    ("response_headers", "[" * 5000),
    ("response_status", "200 OK\r\nX-Evil: 1"),
    ("response_status", "99"),
    ("response_omitted", "\r\nX-Evil: 1"),
    ("status", "completed\r\nX-Evil: 1"),
    ("generation", "1\r\nX-Evil: 1"),
    ("checkpoint", "x\r\nX-Evil: 1"),
]


def test_no_header_comes_out_of_a_row_that_somebody_edited(
    service: Served, valkey_server: Server, namespace: str
) -> None:
    with valkey_server.client() as client:
        for i, (field, value) in enumerate(EDITED):
            key = f"edited-{i}"
            assert service.post(key).status == 201
            client.hset(identify(namespace, PRINCIPAL, key).row, field, value)
            with service.send(key) as connection:
                answer = read_answer(connection)
            assert answer.status in {201, 500}, (field, value, answer)
            assert "x-evil" not in answer.headers, (field, value)
            assert "set-cookie" not in answer.headers, (field, value)
            if answer.status == 500:
                assert answer.error == "idempotency_row_corrupt"
            assert service.notes(key) == ["begun", "done"]
    assert "Traceback" not in service.log
