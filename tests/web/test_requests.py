"""What identifies a request, and how its body reaches the view."""

from __future__ import annotations

import gc
import hashlib
import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from idemredis import fingerprint_request
from tests.support.doors import MakeDoor
from tests.support.site import Door

PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "query": ({"path": "/charges?a=1"}, {"path": "/charges?a=2"}),
    "order of the query": ({"path": "/charges?a=1&b=2"}, {"path": "/charges?b=2&a=1"}),
    "no query and an empty one": ({"path": "/charges"}, {"path": "/charges?a"}),
    "encoded slash": ({"path": "/a%2Fb"}, {"path": "/a/b"}),
    "case of the encoding": ({"path": "/a%2fb"}, {"path": "/a%2Fb"}),
    "method": ({"method": "POST"}, {"method": "PATCH"}),
    "content type": ({"content_type": "application/json"}, {"content_type": "application/x-www-form-urlencoded"}),
    "parameter of the content type": ({"content_type": "a/b"}, {"content_type": "a/b; charset=x"}),
    "no content type": ({}, {"content_type": "application/json"}),
    "version": ({"headers": [("X-Api-Version", "1")]}, {"headers": [("X-Api-Version", "2")]}),
    "one byte": ({"data": b'{"amount":1000}'}, {"data": b'{"amount":1001}'}),
    "one space": ({"data": b'{"amount":1000}'}, {"data": b'{"amount": 1000}'}),
    "no body": ({"data": b""}, {"data": b"0"}),
    "a trailing slash": ({"path": "/charges/"}, {"path": "/charges"}),
}


@pytest.mark.parametrize("name", PAIRS)
def test_requests_that_differ_in_what_matters_are_not_the_same(name: str, door: Door) -> None:
    for path in ("/a/b", "/<path:path>"):
        door.view(lambda **_: "done", path)
    one, other = ({"data": b"{}", **options} for options in PAIRS[name])
    assert door.send(**one).status_code < 300
    assert door.send(**other).get_json()["error"] == "idempotency_key_reused"
    assert door.send(**one).headers["Idempotent-Replayed"] == "true"


def test_headers_that_change_between_retries_do_not_matter(door: Door) -> None:
    first = door.send(headers=[("User-Agent", "a"), ("X-Trace-Id", "1"), ("Accept", "*/*"), ("Date", "x")])
    again = door.send(headers=[("User-Agent", "b"), ("X-Trace-Id", "2"), ("Authorization", "new")])
    assert (again.data, len(door.runs)) == (first.data, 1)


def test_the_headers_that_matter_can_be_chosen(make_door: MakeDoor) -> None:
    door = make_door(FINGERPRINT_HEADERS=("X-Tenant",))
    door.view()
    door.send(data=b"{}", headers=[("X-Tenant", "a")], content_type="a/b")
    assert door.send(data=b"{}", headers=[("X-Tenant", "a")], content_type="c/d").status_code == 201
    assert door.send(data=b"{}", headers=[("X-Tenant", "b")], content_type="a/b").status_code == 409


@pytest.mark.parametrize("value", ["text", {"a": [1, None]}, 7, None])
def test_an_applications_own_fingerprint_may_be_text_or_any_json(value: object, door: Door) -> None:
    door.view(path="/own", fingerprint=lambda: value)
    assert door.send(path="/own", json=1).data == door.send(path="/own?x", json=2).data


@pytest.mark.parametrize("fingerprint", [lambda: 1 / 0, lambda: {1: 2}, lambda: object(), lambda: ""])
def test_a_fingerprint_that_fails_runs_and_claims_nothing(fingerprint: Callable[[], object], door: Door) -> None:
    door.view(path="/own", fingerprint=fingerprint)
    assert door.send(path="/own").status_code == 500
    assert (door.runs, door.rows()) == ([], {})


# Bodies

BIG = bytes(range(256)) * 1200


@contextmanager
def _small_files(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_room_is_not_an_outage_of_redis(make_door: MakeDoor) -> None:
    door = make_door(FAIL_OPEN=True)
    door.view()
    with _small_files(0):
        assert door.send(data=BIG).status_code == 503
    assert door.runs == []


def test_a_temporary_directory_that_is_gone_is_no_room(
    door: Door, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    assert door.send(data=BIG).status_code == 503
    assert door.send(data=b"x").status_code == 201


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 65537, 262144, 262145, 1_048_576])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_any_size_is_hashed_and_handed_on_whole(size: int, chunked: bool, door: Door) -> None:
    body = (bytes(range(256)) * (size // 256 + 1))[:size]
    door.view(lambda: hashlib.sha256(door.body()).hexdigest(), "/things")
    answer = door.send(path="/things", data=body, chunked=chunked)
    assert answer.text == hashlib.sha256(body).hexdigest()
    assert door.row()["fingerprint"].decode() == fingerprint_request("POST", "/things", {}, body)
    gc.collect()  # a temporary file left open would be a ResourceWarning, which is an error here


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_refused_and_claims_nothing(chunked: bool, make_door: MakeDoor) -> None:
    door = make_door(MAX_REQUEST_BYTES=100_000)
    door.view()
    answer = door.send(data=b"x" * 100_001, chunked=chunked)
    assert (answer.status_code, answer.get_json()["error"]) == (413, "idempotency_body_too_large")
    assert "100000 bytes" in answer.get_json()["message"]
    assert (door.runs, door.rows()) == ([], {})
    assert door.send(data=b"x" * 100_000, chunked=chunked).status_code == 201


@pytest.mark.parametrize("cut", [0, 1, 70_000, 300_000])
def test_a_cut_off_upload_runs_and_claims_nothing_and_its_retry_is_not_locked_out(cut: int, door: Door) -> None:
    whole = b"x" * 300_001
    answer = door.send(data=whole[:cut], announced=len(whole))
    assert (answer.status_code, answer.get_json()["error"]) == (400, "idempotency_body_incomplete")
    assert (door.runs, door.rows()) == ([], {})
    assert door.send(data=whole).status_code == 201


@pytest.mark.parametrize("room", [0, 4096, 262_144, 300_000])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_does_not_fit_on_the_disk_is_refused_and_its_retry_is_not_locked_out(
    room: int, chunked: bool, make_door: MakeDoor, caplog: pytest.LogCaptureFixture
) -> None:
    door = make_door()
    door.view(lambda: hashlib.sha256(door.body()).hexdigest(), "/things")
    with _small_files(room):
        answer = door.send(path="/things", data=BIG, chunked=chunked)
        assert door.send("small", "/things", data=b"x").status_code == 200
    assert (answer.status_code, answer.get_json()["error"]) == (503, "idempotency_unavailable")
    assert answer.headers["Retry-After"]
    assert "does not fit into the temporary directory" in caplog.text
    assert (len(door.runs), door.row()) == (1, {})
    assert door.send(path="/things", data=BIG).text == hashlib.sha256(BIG).hexdigest()
