"""What comes back: the stored answer to the last byte, and what becomes of answers that are not stored."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from werkzeug.test import TestResponse

from idemredis import FencedOut, HoldForReview, KeyReused, Policy, StoredResponse, current_reservation
from idemredis.errors import EffectDone
from idemredis.events import digest
from tests.support.clock import SLACK, TurnedClock
from tests.support.doors import MakeDoor
from tests.support.site import Door, Stream

CAP = 16384


def _headers(response: TestResponse) -> list[tuple[str, str]]:
    """Those of the answer, repeated ones in their order; a Content-Length made anew comes last."""
    pairs = [(name.lower(), value) for name, value in response.headers if name.lower() != "idempotent-replayed"]
    return sorted(pairs, key=lambda pair: pair[0] == "content-length")


def _assert_replayed(door: Door, first: TestResponse, again: TestResponse, runs: int = 1) -> None:
    assert again.headers["Idempotent-Replayed"] == "true"
    assert "Idempotent-Replayed" not in first.headers
    assert (again.status_code, again.data) == (first.status_code, first.data)
    assert _headers(again) == _headers(first)
    assert len(door.runs) == runs


@pytest.mark.parametrize("status", [200, 201, 202, 299, 301, 303, 400, 404, 409, 418, 422, 499])
@pytest.mark.parametrize("body", [b"", b"0", b"null", b"\xff\xfe\x00\x80\n\r", b"caf\xc3\xa9", b"x" * CAP])
def test_a_replay_is_identical_in_status_headers_and_body(status: int, body: bytes, door: Door) -> None:
    answer = (body, status, {"Content-Type": "application/x-thing"})
    door.view(lambda: answer, "/things")
    first = door.send(path="/things")
    assert (first.status_code, first.data) == (status, body)
    _assert_replayed(door, first, door.send(path="/things"))
    _assert_replayed(door, first, door.send(path="/things"))


def test_kept_headers_come_back_in_order_and_repeated_ones_stay_repeated(door: Door) -> None:
    kept = [
        ("Content-Type", "application/json"),
        ("Link", '</1>; rel="next"'),
        ("ETag", '"abc"'),
        ("Link", '</2>; rel="prev"'),
        ("Location", "/charges/7?x=%2F"),
        ("Content-Language", "de"),
        ("Content-Disposition", "attachment; filename=a.txt"),
        ("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT"),
        ("Content-Encoding", "identity"),
    ]
    door.view(lambda: (b"{}", 201, kept), "/things")
    first, again = door.send(path="/things"), door.send(path="/things")
    _assert_replayed(door, first, again)
    assert _headers(again)[:-1] == [(name.lower(), value) for name, value in kept]


NEVER = [
    ("Set-Cookie", "session=first-caller"),
    ("Set-Cookie2", "a=b"),
    ("Connection", "close"),
    ("Keep-Alive", "timeout=5"),
    ("Proxy-Authenticate", "Basic"),
    ("TE", "trailers"),
    ("Trailer", "Expires"),
    ("Transfer-Encoding", "chunked"),
    ("Upgrade", "h2c"),
    ("Date", "Wed, 21 Oct 2015 07:28:00 GMT"),
]


def test_cookies_and_what_belongs_to_one_delivery_are_never_replayed(door: Door) -> None:
    door.view(lambda: (b"12345", 201, [*NEVER, ("X-Other", "1"), ("Content-Length", "5")]), "/things")
    assert door.send(path="/things").headers["Set-Cookie"] == "session=first-caller"
    again = door.send(path="/things")
    assert {name for name, _ in _headers(again)} == {"content-length", "content-type"}
    assert "Set-Cookie" not in door.row()["response_headers"].decode()
    assert again.headers["Content-Length"] == "5"


def test_what_no_answer_may_repeat_is_not_sent_from_a_row_that_somebody_else_wrote(door: Door) -> None:
    door.send()
    door.store.hset(
        door.row_name(),
        "response_headers",
        '[["Set-Cookie","a=b"],["Content-Length","3"],["Transfer-Encoding","chunked"],["Date","x"],["X-Own","1"]]',
    )
    again = door.send()
    assert again.data == b"charge 1"
    assert {name for name, _ in _headers(again)} == {"content-length", "x-own"}
    assert again.headers["Content-Length"] == "8"


@pytest.mark.parametrize(
    "headers",
    ['[["X","a\\r\\nSet-Cookie: b"]]', '[["X\\r\\nY","a"]]', '[["X","a\\nb"]]', '{"X":"a"}', "[", '[["X",1]]'],
)
def test_a_header_edited_into_two_is_a_corrupt_row_and_not_sent(headers: str, door: Door) -> None:
    door.send()
    door.store.hset(door.row_name(), "response_headers", headers)
    before = door.rows()
    again = door.send()
    assert (again.status_code, again.get_json()["error"]) == (500, "idempotency_row_corrupt")
    assert "Set-Cookie" not in again.headers
    assert (door.rows(), len(door.runs)) == (before, 1)


@pytest.mark.parametrize("status", [204, 205, 304])
def test_a_status_without_content_is_sent_without_a_body(status: int, door: Door) -> None:
    door.view(lambda: (b"ignored", status, {"ETag": '"a"'}), "/things")
    first, again = door.send(path="/things"), door.send(path="/things")
    assert (first.status_code, again.status_code, again.data) == (status, status, b"")
    assert again.headers.get("Content-Length", "0") == "0"
    assert len(door.runs) == 1


def test_a_body_that_somebody_else_stored_under_a_status_without_content_is_not_sent(door: Door) -> None:
    door.view(lambda: (b"", 205), "/things")
    door.send(path="/things")
    door.store.hset(door.row_name(), "response_body", "a body")
    again = door.send(path="/things")
    assert (again.status_code, again.data, again.headers["Content-Length"]) == (205, b"", "0")


def test_a_stream_under_a_status_without_content_is_stored_as_nothing(door: Door) -> None:
    door.view(lambda: Stream([b"a", b"b"], 204), "/things")
    assert (door.send(path="/things").status_code, door.send(path="/things").data) == (204, b"")
    assert (door.row()["response_body"], len(door.runs)) == (b"", 1)


@pytest.mark.parametrize("status", [408, 425, 429])
def test_a_request_to_send_it_again_is_not_stored(status: int, door: Door) -> None:
    door.view(lambda: ("later", status), "/things")
    assert [door.send(path="/things").status_code for _ in range(3)] == [status] * 3
    assert (len(door.runs), door.row()["generation"], door.row()["status"]) == (3, b"3", b"pending")


@pytest.mark.parametrize("status", [200, 429, 500])
def test_the_view_can_have_an_answer_stored(status: int, door: Door) -> None:
    def view() -> Any:
        current_reservation.outcome = "store"
        return "kept", status

    door.view(view, "/things")
    first, again = door.send(path="/things"), door.send(path="/things")
    _assert_replayed(door, first, again)
    assert door.row()["status"] == (b"failed" if status >= 500 else b"completed")


@pytest.mark.parametrize("refused", [False, True])
def test_the_view_can_keep_a_secret_out_of_redis(refused: bool, door: Door) -> None:
    def view() -> Any:
        current_reservation.outcome = "omit"
        return "SECRET-1", 422 if refused else 201, {"Location": "/SECRET-1"}

    door.view(view, "/things")
    first, again = door.send(path="/things"), door.send(path="/things")
    assert "SECRET-1" in first.text
    assert (again.status_code, again.get_json()["original_status"], len(door.runs)) == (500, first.status_code, 1)
    assert again.get_json()["error"] == "idempotency_response_not_stored"
    assert not any(b"SECRET-1" in value for value in door.row().values())
    assert door.omitted() == b"not_wanted"


@pytest.mark.parametrize("status", [200, 422, 500])
def test_the_view_can_give_the_key_up(status: int, door: Door) -> None:
    def view() -> Any:
        current_reservation.outcome = "release"
        return "again", status

    door.view(view, "/things")
    assert [door.send(path="/things").status_code for _ in range(2)] == [status] * 2
    assert len(door.runs) == 2


def test_the_view_can_hold_the_key(door: Door) -> None:
    def view() -> Any:
        current_reservation.outcome = "hold"
        return "wait", 202

    door.view(view, "/things")
    assert [door.send(path="/things").status_code for _ in range(2)] == [202, 409]
    assert len(door.runs) == 1


def test_the_view_can_take_its_decision_back_and_a_wrong_one_is_refused(door: Door) -> None:
    def view() -> Any:
        current_reservation.outcome = "release"
        current_reservation.outcome = None
        with pytest.raises(ValueError, match="outcome must be one of store, omit, release, hold"):
            current_reservation.outcome = "start_heartbeat"  # type: ignore[assignment]
        return "done"

    door.view(view, "/things")
    _assert_replayed(door, door.send(path="/things"), door.send(path="/things"))


def test_a_cap_of_zero_keeps_only_empty_answers(make_door: MakeDoor) -> None:
    door = make_door(policy=Policy(max_body=0))
    door.view(lambda: "")
    door.view(lambda: "x", "/x")
    assert [door.send(path=path).status_code for path in ("/charges", "/charges")] == [200, 200]
    assert [door.send("k2", path="/x").status_code for _ in range(2)] == [200, 500]


@pytest.mark.parametrize("status", [401, 403, 407])
def test_a_right_that_the_view_missed_is_asked_for_again(status: int, door: Door) -> None:
    door.view(lambda: ("step up", status) if len(door.runs) == 1 else ("done", 200), "/things")
    assert [door.send(path="/things").status_code for _ in range(3)] == [status, 200, 200]
    assert len(door.runs) == 2


@pytest.mark.parametrize("status", [400, 404, 409, 413, 422, 423])
@pytest.mark.parametrize("header", ["Retry-After", "retry-after"])
def test_a_refusal_that_asks_to_be_sent_again_is_not_stored(status: int, header: str, door: Door) -> None:
    """Such as the in-progress answer of another idempotent service behind this one."""
    door.view(lambda: ("busy", status, {header: "1"}) if len(door.runs) == 1 else ("charged", 201), "/things")
    assert [door.send(path="/things").status_code for _ in range(3)] == [status, 201, 201]
    assert len(door.runs) == 2


@pytest.mark.parametrize("status", [202, 301])
def test_a_success_with_retry_after_is_stored_with_it(status: int, door: Door) -> None:
    door.view(lambda: ("accepted", status, {"Retry-After": "30"}), "/things")
    first, again = door.send(path="/things"), door.send(path="/things")
    assert (again.status_code, again.headers["Retry-After"], len(door.runs)) == (first.status_code, "30", 1)


KEPT = {
    "Content-Security-Policy": "default-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Vary": "Accept",
    "Allow": "GET, PUT",
    "Accept-Ranges": "bytes",
    "Content-Range": "bytes 0-3/10",
    "Retry-After": "30",
}


@pytest.mark.parametrize("name", KEPT)
def test_what_a_response_says_about_its_use_is_replayed(name: str, door: Door) -> None:
    door.view(lambda: ("made", 206 if name == "Content-Range" else 201, {name: KEPT[name]}), "/things")
    first, again = door.send(path="/things"), door.send(path="/things")
    assert first.headers[name] == again.headers[name] == KEPT[name]
    assert again.headers["Idempotent-Replayed"] == "true"


def test_an_outcome_that_is_set_after_the_decision_is_an_error(door: Door) -> None:
    kept: list[Any] = []

    def view() -> str:
        from idemredis.ledger.current import _find

        kept.append(_find())
        return "made"

    door.view(view, "/things")
    door.send(path="/things")
    with pytest.raises(RuntimeError, match="outcome was set after the response was settled"):
        kept[0].outcome = "omit"
    assert kept[0].outcome is None
    assert door.omitted() == b""


@pytest.mark.parametrize("failure", ["exception", "status", "429", "403", "Retry-After"])
def test_an_omitted_body_does_not_make_a_failure_final(failure: str, door: Door) -> None:
    def view() -> Any:
        current_reservation.outcome = "omit"
        match failure if len(door.runs) == 1 else "":
            case "exception":
                raise LookupError
            case "status":
                return "broken", 503
            case "Retry-After":
                return "busy", 409, {"Retry-After": "1"}
            case "":
                return "SECRET", 201
            case status:
                return "later", int(status)

    door.view(view, "/things")
    assert door.send(path="/things").status_code >= 400
    assert door.send(path="/things").data == b"SECRET"
    assert (door.omitted(), len(door.runs)) == (b"not_wanted", 2)


def test_an_error_of_the_ledger_in_the_view_is_never_stored(make_door: MakeDoor) -> None:
    """As in a worker: it says nothing about the operation."""
    door = make_door(ON_ERROR="store")

    def view() -> str:
        if len(door.runs) == 1:
            raise FencedOut("stop")
        return "made"

    door.view(view)
    assert (door.send().status_code, door.send().data) == (500, b"made")


# Failures

FAILURES = {"500": 500, "503": 503, "599": 599, "abort": 503, "exception": 500}


def _failing(door: Door, failure: str, **options: Any) -> int:
    """Add a view that fails; return the status that its client sees."""

    def view() -> Any:
        if failure == "exception":
            raise LookupError("an error of the application's own")
        if failure == "abort":
            door.abort(503)
        return "broken", int(failure)

    door.view(view, **options)
    return FAILURES[failure]


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("per_view", [False, True])
def test_under_release_a_failure_is_run_again_at_once(failure: str, per_view: bool, make_door: MakeDoor) -> None:
    door = make_door(ON_ERROR="hold") if per_view else make_door()
    status = _failing(door, failure, **({"on_error": "release"} if per_view else {}))
    assert [door.send().status_code for _ in range(3)] == [status] * 3
    assert (len(door.runs), door.row()["generation"], door.row()["owner"]) == (3, b"3", b"")


@pytest.mark.parametrize("failure", FAILURES)
def test_under_hold_a_failure_keeps_the_key_until_the_lease_ends(
    failure: str, make_door: MakeDoor, clock: TurnedClock
) -> None:
    door = make_door(ON_ERROR="hold")
    _failing(door, failure)
    door.send()
    busy = door.send()
    assert (busy.status_code, len(door.runs)) == (409, 1)
    assert 30_000 - SLACK * 1000 < busy.get_json()["lease_ms"] <= 30_000
    clock.turn(30)
    door.send()
    assert (len(door.runs), door.row()["generation"]) == (2, b"2")


@pytest.mark.parametrize("failure", FAILURES)
def test_under_store_a_failure_is_final_and_replayed(failure: str, make_door: MakeDoor) -> None:
    door = make_door(ON_ERROR="store")
    status = _failing(door, failure)
    first, again = door.send(), door.send()
    assert (first.status_code, again.status_code, len(door.runs)) == (status, status, 1)
    assert again.headers["Idempotent-Replayed"] == "true"
    assert (door.row()["status"], door.omitted()) == (b"failed", b"")


@pytest.mark.parametrize("where", ["view", "stream"])
def test_a_view_can_hold_its_row_for_a_person(where: str, door: Door) -> None:
    def pieces() -> Iterator[str]:
        yield ""
        raise HoldForReview

    def view() -> Any:
        if where == "view":
            raise HoldForReview
        return Stream(pieces())

    door.view(view, "/things")
    try:
        door.send(path="/things")
    except HoldForReview:
        assert (door.kind, where) == ("flask", "stream")  # the response had begun for Flask
    assert (door.told()[-1], door.row()["status"], door.row()["owner"] != b"") == ("held_for_review", b"pending", True)
    assert (door.send(path="/things").status_code, len(door.runs)) == (409, 1)


# Streams


@pytest.mark.parametrize("announced", [False, True])
def test_a_short_stream_is_stored_whole(announced: bool, door: Door) -> None:
    pieces = ["caf\xe9 ".encode(), b"\xff", b"end"]
    headers = {"Content-Length": str(sum(map(len, pieces)))} if announced else {}
    door.view(lambda: Stream(pieces, 200, headers), "/things")
    first, again = door.send(path="/things"), door.send(path="/things")
    assert first.data == again.data == b"caf\xc3\xa9 \xffend"
    assert len(door.runs) == 1
    assert again.headers["Content-Length"] == str(len(again.data))


@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize(("size", "omitted"), [(CAP, b""), (CAP + 1, b"too_large")])
@pytest.mark.parametrize("kind", ["stream", "whole"])
def test_an_answer_over_the_cap_is_a_tombstone_and_its_first_caller_gets_it_whole(
    kind: str, size: int, omitted: bytes, announced: bool, door: Door
) -> None:
    def view() -> Any:
        if kind == "whole":
            return b"x" * size
        headers = {"Content-Length": str(size)} if announced else {}
        return Stream(itertools.chain([b"x"] * 10, [b"x" * (size - 10)]), 200, headers)

    door.view(view, "/things")
    assert door.send(path="/things").data == b"x" * size
    again = door.send(path="/things")
    assert door.omitted() == omitted
    assert (again.status_code, len(door.runs)) == (500 if omitted else 200, 1)
    if omitted:
        assert (door.row()["response_body"], again.get_json()["original_status"]) == (b"", 200)


@pytest.mark.parametrize("begun", [False, True])
def test_a_stream_that_breaks_is_a_tombstone_only_if_something_of_it_was_sent(begun: bool, door: Door) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"begun" if begun else b""
        raise OSError("the source broke")

    door.view(lambda: Stream(pieces(), 201), "/things")
    try:
        door.send(path="/things")
    except OSError:
        assert door.kind == "flask"
    if begun:
        again = door.send(path="/things")
        assert (again.status_code, again.get_json()["original_status"], len(door.runs)) == (500, 201, 1)
        assert door.omitted() == b"broken_off"
    else:
        assert (door.row()["owner"], len(door.runs)) == (b"", 1)


@pytest.mark.parametrize("outcome", ["omit", "release", "hold"])
def test_what_a_stream_decides_while_it_is_sent_counts(outcome: Any, make_door: MakeDoor) -> None:
    door = make_door()
    seen: list[Any] = []

    def pieces() -> Iterator[str]:
        yield "the "
        seen[0].outcome = outcome
        yield "SECRET"

    def view() -> Any:
        from idemredis.ledger.current import _find

        seen.append(_find())
        return Stream(pieces(), 201)

    door.view(view, "/things")
    assert door.send(path="/things").data == b"the SECRET"
    if outcome == "omit":
        assert door.omitted() == b"not_wanted"
    else:
        assert (door.row()["status"], door.row()["owner"] == b"") == (b"pending", outcome == "release")
    assert not any(b"SECRET" in value for value in door.row().values())


# Effects that were committed before


@pytest.mark.parametrize("kind", ["effect", "tombstone", "other request"])
@pytest.mark.parametrize("mode", ["protected", "unprotected"])
def test_an_effect_that_was_committed_before_is_the_answer(mode: str, kind: str, make_door: MakeDoor) -> None:
    door = make_door(REQUIRED=False)
    made = StoredResponse(201, (("Location", "/7"),), b"made before")

    def view() -> Any:
        row = digest(current_reservation.row)
        if kind == "other request":
            raise KeyReused(row)
        raise EffectDone(made if kind == "effect" else made.without_body("not_wanted"), row)

    door.view(view)
    key = "k1" if mode == "protected" else None
    first, again = door.send(key), door.send(key)
    if kind == "effect":
        assert (first.status_code, first.data, first.headers["Location"]) == (201, b"made before", "/7")
        assert (again.status_code, again.data) == (201, b"made before")
        assert ("Idempotent-Replayed" in again.headers) == (mode == "protected")
    else:
        code = {"tombstone": "idempotency_response_not_stored", "other request": "idempotency_key_reused"}[kind]
        assert [answer.get_json()["error"] for answer in (first, again)] == [code] * 2
    assert len(door.runs) == (1 if mode == "protected" and kind != "other request" else 2)
    if mode == "protected":
        assert door.row()["status"] == (b"pending" if kind == "other request" else b"completed")
