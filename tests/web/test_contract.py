"""The HTTP contract: every refusal in both protocols, every shape of key, and the order of the checks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pytest
from werkzeug.test import TestResponse

from idemredis import InProgress, Policy, current_reservation
from idemredis.web.contract import Contract
from tests.support.clock import SLACK, TurnedClock
from tests.support.doors import MakeDoor
from tests.support.site import Door

PROTOCOLS = ("default", "ietf")
Request: TypeAlias = dict[str, Any]
"""What `Door.send` takes."""

DOCS = "https://shop.example/docs/keys"


def _hold(door: Door) -> None:
    """Leave a row pending, as a view that runs does."""

    def held() -> str:
        current_reservation.outcome = "hold"
        return "held"

    door.view(held, "/held")
    assert door.send(path="/held").status_code == 200


def _key_missing(door: Door, clock: TurnedClock) -> Request:
    return {"key": None}


def _key_invalid(door: Door, clock: TurnedClock) -> Request:
    return {"key": ""}


def _key_reused(door: Door, clock: TurnedClock) -> Request:
    door.send()
    return {"json": {"amount": 1001}}


def _in_progress(door: Door, clock: TurnedClock) -> Request:
    _hold(door)
    clock.turn(10)
    return {"path": "/held"}


def _as_it_comes(door: Door, clock: TurnedClock) -> Request:
    return {}


def _cut_off(door: Door, clock: TurnedClock) -> Request:
    return {"data": b"12345", "announced": 6}


def _corrupt(door: Door, clock: TurnedClock) -> Request:
    door.send()
    door.store.hset(door.row_name(), "generation", "many")
    return {}


def _tombstone(door: Door, clock: TurnedClock) -> Request:
    def secret() -> Any:
        current_reservation.outcome = "omit"
        return "the secret", 201

    door.view(secret, "/secrets")
    assert door.send(path="/secrets").data == b"the secret"
    return {"path": "/secrets"}


@dataclass(frozen=True)
class Refusal:
    """`arrange` brings about the situation and returns the request that is then refused."""

    code: str
    status: int
    arrange: Callable[[Door, TurnedClock], Request]
    ietf: int = 0
    facts: dict[str, int] = field(default_factory=dict)
    retry_after: str | None = None
    site: dict[str, Any] = field(default_factory=dict)


REFUSALS = (
    Refusal("idempotency_key_required", 400, _key_missing),
    Refusal("idempotency_key_invalid", 400, _key_invalid),
    Refusal("idempotency_key_reused", 409, _key_reused, ietf=422),
    Refusal(
        "idempotency_key_in_progress",
        409,
        _in_progress,
        facts={"lease_ms": 20_000, "retry_after_ms": 2000},
        retry_after="2",
    ),
    Refusal("idempotency_key_retry", 409, _as_it_comes, retry_after="1", site={"outcome": InProgress(0.0, stale=True)}),
    Refusal("idempotency_principal_required", 401, _as_it_comes, site={"principal": lambda: None}),
    Refusal("idempotency_body_incomplete", 400, _cut_off),
    Refusal("idempotency_row_corrupt", 500, _corrupt),
    Refusal("idempotency_unavailable", 503, _as_it_comes, retry_after="2", site={"port": 1}),
    Refusal("idempotency_response_not_stored", 500, _tombstone, facts={"original_status": 201}),
)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.code)
def test_a_refusal_has_its_status_code_and_fields_and_runs_and_writes_nothing(
    refusal: Refusal, protocol: str, make_door: MakeDoor, clock: TurnedClock
) -> None:
    door = make_door(PROTOCOL=protocol, **refusal.site)
    door.view()
    refused = refusal.arrange(door, clock)
    rows, runs = door.rows(), list(door.runs)

    answer = door.send(**refused)

    assert (door.rows(), door.runs) == (rows, runs)
    body = answer.get_json()
    assert body.pop("error") == refusal.code
    if protocol == "ietf":
        assert answer.status_code == (refusal.ietf or refusal.status)
        assert answer.headers["Content-Type"] == "application/problem+json"
        assert (body.pop("type"), body.pop("status")) == ("about:blank", answer.status_code)
        assert len(body.pop("title")) > 10
        assert len(body.pop("detail")) > 10
    else:
        assert answer.status_code == refusal.status
        assert answer.headers["Content-Type"] == "application/json"
        assert len(body.pop("message")) > 10
    if "lease_ms" in refusal.facts:  # real time goes on
        assert refusal.facts["lease_ms"] - SLACK * 1000 < body["lease_ms"] <= refusal.facts["lease_ms"]
        body["lease_ms"] = refusal.facts["lease_ms"]
    assert body == refusal.facts
    assert answer.headers.get("Retry-After") == refusal.retry_after
    assert "Idempotent-Replayed" not in answer.headers
    assert "Link" not in answer.headers


@pytest.mark.parametrize("refusal", REFUSALS[:3], ids=lambda refusal: refusal.code)
def test_a_problem_links_to_the_documentation_where_there_is_one(
    refusal: Refusal, make_door: MakeDoor, clock: TurnedClock
) -> None:
    door = make_door(PROTOCOL="ietf", DOCS_URL=DOCS)
    door.view()
    answer = door.send(**refusal.arrange(door, clock))
    assert answer.get_json()["type"] == DOCS
    assert answer.headers["Link"] == f'<{DOCS}>; rel="describedby"'


@pytest.mark.parametrize(
    ("left", "lease_ms", "retry_after_ms", "header"),
    [
        (30.0, 30_000, 2000, "2"),
        (2.0, 2000, 2000, "2"),
        (1.999, 1999, 1999, "2"),
        (1.0, 1000, 1000, "1"),
        (0.001, 1, 1, "1"),
    ],
)
def test_a_duplicate_is_told_when_to_ask_again_to_the_millisecond(
    left: float, lease_ms: int, retry_after_ms: int, header: str
) -> None:
    answer = Contract("default", None, 2.0).in_progress(left)
    body = json.loads(answer.body)
    assert (body["lease_ms"], body["retry_after_ms"], dict(answer.headers)["Retry-After"]) == (
        lease_ms,
        retry_after_ms,
        header,
    )


@pytest.mark.parametrize(("turned", "at_most"), [(0, 30.0), (12.5, 17.5)])
def test_a_duplicate_is_told_what_is_left_of_the_lease(
    turned: float, at_most: float, make_door: MakeDoor, clock: TurnedClock
) -> None:
    door = make_door(RETRY_AFTER_SECONDS=20)
    _hold(door)
    clock.turn(turned)
    body = door.send(path="/held").get_json()
    assert at_most - SLACK < body["lease_ms"] / 1000 <= at_most
    assert body["retry_after_ms"] == min(body["lease_ms"], 20_000)


def test_retry_after_is_capped_by_the_setting_and_in_whole_seconds(make_door: MakeDoor) -> None:
    door = make_door(RETRY_AFTER_SECONDS=0.2)
    _hold(door)
    answer = door.send(path="/held")
    assert (answer.get_json()["retry_after_ms"], answer.headers["Retry-After"]) == (200, "1")


def test_a_lease_that_ended_is_taken_over_at_generation_2(make_door: MakeDoor, clock: TurnedClock) -> None:
    door = make_door()
    generations: list[int] = []

    def view() -> str:
        generations.append(current_reservation.generation)
        current_reservation.outcome = "hold" if len(generations) == 1 else None
        return f"run {len(generations)}"

    door.view(view)
    door.send()
    clock.turn(30)
    assert door.send().data == b"run 2"
    assert door.send().data == b"run 2"
    assert generations == [1, 2]


def test_another_request_on_a_pending_or_stale_key_learns_only_that_the_key_was_reused(
    make_door: MakeDoor, clock: TurnedClock
) -> None:
    door = make_door()
    _hold(door)
    before = door.rows()
    for turned in (0, 31):
        clock.turn(turned)
        answer = door.send(path="/held", json={"amount": 9})
        assert answer.status_code == 409
        assert set(answer.get_json()) == {"error", "message"}
        assert answer.get_json()["error"] == "idempotency_key_reused"
        assert "Retry-After" not in answer.headers
    assert door.rows() == before


INVALID = {
    "empty": "",
    "blank": "  \t ",
    "256": "k" * 256,
    "100000": "k" * 100_000,
    "nul": "a\0b",
    "tab": "a\tb",
    "del": "a\x7fb",
    "e-acute": "caf\xe9",
    "obs-text": "a\x80\xffb",
    "vertical tab": "a\x0bb",
    "newline at the end": "abc\n",
    "carriage return": "abc\r",
    "newline in the middle": "a\nSet-Cookie: b",
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_key_is_refused_before_anything_is_sent(
    name: str, protocol: str, make_door: MakeDoor, caplog: pytest.LogCaptureFixture
) -> None:
    door = make_door(PROTOCOL=protocol)
    door.view()
    key = INVALID[name]
    answer = door.send(None, raw_key=key)
    assert (answer.status_code, answer.get_json()["error"]) == (400, "idempotency_key_invalid")
    assert (door.runs, door.sent, door.rows()) == ([], [], {})
    if key.strip():
        assert key not in answer.text
        assert key not in caplog.text


VALID = (
    "k" * 255,
    "~",
    "!#$%&'()*+-./:<=>?@[]^_`{|}~",
    "{slot}",
    "*?[a-z]",
    "%0a%00",
    "x:result",
    "lock:x",
    "idem:acme:k1",
    "../../etc/passwd",
    "ABC",
    "abc",
)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_longest_and_oddest_valid_keys_are_different_keys(protocol: str, make_door: MakeDoor) -> None:
    door = make_door(PROTOCOL=protocol)
    door.view()
    first = [door.send(key).data for key in VALID]
    assert len(set(first)) == len(VALID) == len(door.runs)
    assert [door.send(key).data for key in VALID] == first
    assert len(door.store.keys()) == len(VALID)


@pytest.mark.parametrize("key", ['"quoted"', "a,b", "a, b", "with space", "a;p=1", "back\\slash", '"', '""'])
def test_by_default_every_printable_character_is_part_of_the_key(key: str, door: Door) -> None:
    assert door.send(key).status_code == 201
    assert set(door.rows()) == {door.row_name(key).encode()}


def test_spaces_and_tabs_around_the_header_are_not_part_of_the_key(door: Door) -> None:
    first = door.send("k1")
    again = door.send(None, raw_key=" \tk1\t ")
    assert (again.data, again.headers["Idempotent-Replayed"]) == (first.data, "true")


@pytest.mark.parametrize(
    ("header", "key"),
    [
        ("8e03", "8e03"),
        ('"8e03"', "8e03"),
        (' "8e03" ', "8e03"),
        ('"8e03";a=1; b="x;y" ;c', "8e03"),
        ('"a\\"b\\\\c"', 'a"b\\c'),
        ('"' + '\\"' * 255 + '"', '"' * 255),
        ('"a b, c"', "a b, c"),
        ('" a "', " a "),
    ],
)
def test_under_ietf_a_quoted_key_and_a_bare_one_name_the_same_row(header: str, key: str, make_door: MakeDoor) -> None:
    door = make_door(PROTOCOL="ietf")
    door.view()
    assert door.send(None, raw_key=header).status_code == 201
    assert set(door.rows()) == {door.row_name(key).encode()}


@pytest.mark.parametrize(
    "header",
    [
        '""',
        '"a',
        'a"',
        '"a" b',
        '"a","b"',
        "a,b",
        "a b",
        "a;p=1",
        '"a\\b"',
        '"a";',
        '"a";=1',
        "a\\",
        '"' + "k" * 256 + '"',
    ],
)
def test_under_ietf_anything_but_one_string_or_one_bare_key_is_refused(header: str, make_door: MakeDoor) -> None:
    door = make_door(PROTOCOL="ietf")
    door.view()
    answer = door.send(None, raw_key=header)
    assert (answer.status_code, answer.get_json()["error"]) == (400, "idempotency_key_invalid")
    assert (door.runs, door.sent) == ([], [])


def test_upper_and_lower_case_are_two_keys(door: Door) -> None:
    assert door.send("ABC").data != door.send("abc").data


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("key", ["k1", "", None])
@pytest.mark.parametrize("protect_all", [False, True])
def test_a_safe_method_passes_untouched_with_a_key_and_without(
    method: str, key: str | None, protect_all: bool, make_door: MakeDoor
) -> None:
    door: Door = make_door(PROTECT_ALL=protect_all, principal=lambda: door.abort(500))

    held: list[bool] = []

    def look() -> str:
        held.append(bool(current_reservation))
        return "seen"

    door.view(look, "/look", methods=[method])
    answer = door.send(key, "/look", method, data=b"")
    assert (answer.status_code, held, door.sent) == (200, [False], [])
    assert "Idempotent-Replayed" not in answer.headers


def test_the_checks_come_in_the_order_principal_key_body_claim(make_door: MakeDoor) -> None:
    principals: list[object] = []
    door = make_door(principal=lambda: principals.pop() if principals else None)
    door.view()
    cut: dict[str, Any] = {"data": b"1", "announced": 5}

    def code(answer: TestResponse) -> str:
        error: str = answer.get_json()["error"]
        return error

    assert code(door.send(None, **cut)) == "idempotency_principal_required"
    principals.append("acme")
    assert code(door.send(None, **cut)) == "idempotency_key_required"
    principals.append("acme")
    assert code(door.send("\t", **cut)) == "idempotency_key_invalid"
    principals.append("acme")
    door.sent.clear()
    assert code(door.send(**cut)) == "idempotency_body_incomplete"
    assert (door.sent, door.runs, door.rows()) == ([], [], {})


@pytest.mark.parametrize("principal", [None, "", "  ", True, b"acme", 1.5, ["acme"], "\ud800"])
def test_a_request_whose_principal_cannot_be_one_is_refused_and_never_shares_a_row(
    principal: object, make_door: MakeDoor
) -> None:
    door = make_door(principal=lambda: principal)
    door.view()
    answer = door.send(headers=[("X-Forwarded-For", "10.0.0.1"), ("X-Principal", "acme")])
    assert (answer.status_code, door.runs, door.rows()) == (401, [], {})


def test_two_principals_with_one_key_run_twice_and_see_their_own_answers(make_door: MakeDoor) -> None:
    door: Door = make_door(principal=lambda: door.header("Authorization"))
    door.view()
    first = [door.send(headers=[("Authorization", who)]).data for who in ("alice", "bob")]
    again = [door.send(headers=[("Authorization", who)]).data for who in ("alice", "bob")]
    assert first == again == [b"charge 1", b"charge 2"]


def test_the_row_is_pending_in_redis_before_the_view_begins(make_door: MakeDoor) -> None:
    door = make_door()
    seen: list[bytes] = []

    def look() -> str:
        seen.append(door.row()["status"])
        return "done"

    door.view(look)
    door.send()
    assert seen == [b"pending"]
    assert door.row()["status"] == b"completed"


def test_a_first_run_costs_two_calls_and_a_replay_or_refusal_one(door: Door) -> None:
    door.send()
    door.sent.clear()
    door.send("k2")
    assert door.sent == ["EVALSHA", "EVALSHA"]
    door.sent.clear()
    door.send("k2")
    door.send("k2", json={"amount": 2})
    assert door.sent == ["EVALSHA", "EVALSHA"]


def test_operations_of_their_own_do_not_meet(make_door: MakeDoor) -> None:
    door = make_door()
    door.view(path="/charges", operation="charge")
    door.view(path="/refunds", operation="refund")
    assert door.send().data != door.send(path="/refunds").data
    assert door.row(operation="charge")
    assert door.row(operation="refund")


def test_a_row_has_the_policys_retention_and_an_answer_the_same_anew(make_door: MakeDoor) -> None:
    door = make_door(policy=Policy(lease=5, retention=600))
    left: list[int] = []

    def look() -> str:
        left.append(door.pttl())
        return "done"

    door.view(look)
    door.send()
    left.append(door.pttl())
    assert all(599_000 < each <= 600_000 for each in left)
