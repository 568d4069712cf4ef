"""The HTTP contract: every refusal in both protocols, every shape of key, and the order of the checks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pytest
import redis
from flask import abort, request
from redis.backoff import NoBackoff
from redis.retry import Retry
from werkzeug.test import TestResponse

from idemredis import InProgress, Ledger, Policy
from idemredis.flask import current_reservation
from idemredis.web.contract import Contract
from tests.support.clock import SLACK, TurnedClock
from tests.support.site import MakeSite, Site

PROTOCOLS = ("default", "ietf")
Request: TypeAlias = dict[str, Any]
"""What `Site.send` takes."""

DOCS = "https://shop.example/docs/keys"


class LosingLedger(Ledger):
    """Loses every race for a stale row."""

    def claim(self, *args: Any, **kwargs: Any) -> Any:
        return InProgress(0.0, stale=True)


def _hold(site: Site) -> None:
    """Leave a row pending, as a view that runs does."""

    def held() -> str:
        current_reservation.outcome = "hold"
        return "held"

    site.view(held, "/held")
    assert site.send(path="/held").status_code == 200


def _key_missing(site: Site, clock: TurnedClock) -> Request:
    return {"key": None}


def _key_invalid(site: Site, clock: TurnedClock) -> Request:
    return {"key": ""}


def _key_reused(site: Site, clock: TurnedClock) -> Request:
    site.send()
    return {"json": {"amount": 1001}}


def _in_progress(site: Site, clock: TurnedClock) -> Request:
    _hold(site)
    clock.turn(10)
    return {"path": "/held"}


def _as_it_comes(site: Site, clock: TurnedClock) -> Request:
    return {}


def _cut_off(site: Site, clock: TurnedClock) -> Request:
    return {"data": b"12345", "environ_overrides": {"CONTENT_LENGTH": "6"}}


def _chunked(site: Site, clock: TurnedClock) -> Request:
    return {"data": b"12345", "environ_overrides": {"HTTP_TRANSFER_ENCODING": "chunked"}}


def _corrupt(site: Site, clock: TurnedClock) -> Request:
    site.send()
    site.store.hset(site.row_name(), "generation", "many")
    return {}


def _tombstone(site: Site, clock: TurnedClock) -> Request:
    def secret() -> Any:
        current_reservation.outcome = "omit"
        return "the secret", 201

    site.view(secret, "/secrets")
    assert site.send(path="/secrets").data == b"the secret"
    return {"path": "/secrets"}


@dataclass(frozen=True)
class Refusal:
    """`arrange` brings about the situation and returns the request that is then refused."""

    code: str
    status: int
    arrange: Callable[[Site, TurnedClock], Request]
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
    Refusal("idempotency_key_retry", 409, _as_it_comes, retry_after="1", site={"ledger": LosingLedger}),
    Refusal("idempotency_principal_required", 401, _as_it_comes, site={"principal": lambda: None}),
    Refusal("idempotency_body_incomplete", 400, _cut_off),
    Refusal("idempotency_length_required", 411, _chunked),
    Refusal("idempotency_row_corrupt", 500, _corrupt),
    Refusal("idempotency_unavailable", 503, _as_it_comes, retry_after="2", site={"client": "unreachable"}),
    Refusal("idempotency_response_not_stored", 500, _tombstone, facts={"original_status": 201}),
)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.code)
def test_a_refusal_has_its_status_code_and_fields_and_runs_and_writes_nothing(
    refusal: Refusal, protocol: str, make_site: MakeSite, clock: TurnedClock
) -> None:
    options = dict(refusal.site)
    if options.get("client"):
        options["client"] = redis.Redis(port=1, retry=Retry(NoBackoff(), 0))
    site = make_site(PROTOCOL=protocol, **options)
    site.view()
    refused = refusal.arrange(site, clock)
    rows, runs = site.rows(), list(site.runs)

    answer = site.send(**refused)

    assert (site.rows(), site.runs) == (rows, runs)
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
    refusal: Refusal, make_site: MakeSite, clock: TurnedClock
) -> None:
    site = make_site(PROTOCOL="ietf", DOCS_URL=DOCS)
    site.view()
    answer = site.send(**refusal.arrange(site, clock))
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
    turned: float, at_most: float, make_site: MakeSite, clock: TurnedClock
) -> None:
    site = make_site(RETRY_AFTER_SECONDS=20)
    _hold(site)
    clock.turn(turned)
    body = site.send(path="/held").get_json()
    assert at_most - SLACK < body["lease_ms"] / 1000 <= at_most
    assert body["retry_after_ms"] == min(body["lease_ms"], 20_000)


def test_retry_after_is_capped_by_the_setting_and_in_whole_seconds(make_site: MakeSite) -> None:
    site = make_site(RETRY_AFTER_SECONDS=0.2)
    _hold(site)
    answer = site.send(path="/held")
    assert (answer.get_json()["retry_after_ms"], answer.headers["Retry-After"]) == (200, "1")


def test_a_lease_that_ended_is_taken_over_at_generation_2(make_site: MakeSite, clock: TurnedClock) -> None:
    site = make_site()
    generations: list[int] = []

    def view() -> str:
        generations.append(current_reservation.generation)
        current_reservation.outcome = "hold" if len(generations) == 1 else None
        return f"run {len(generations)}"

    site.view(view)
    site.send()
    clock.turn(30)
    assert site.send().data == b"run 2"
    assert site.send().data == b"run 2"
    assert generations == [1, 2]


def test_another_request_on_a_pending_or_stale_key_learns_only_that_the_key_was_reused(
    make_site: MakeSite, clock: TurnedClock
) -> None:
    site = make_site()
    _hold(site)
    before = site.rows()
    for turned in (0, 31):
        clock.turn(turned)
        answer = site.send(path="/held", json={"amount": 9})
        assert answer.status_code == 409
        assert set(answer.get_json()) == {"error", "message"}
        assert answer.get_json()["error"] == "idempotency_key_reused"
        assert "Retry-After" not in answer.headers
    assert site.rows() == before


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
    name: str, protocol: str, make_site: MakeSite, caplog: pytest.LogCaptureFixture
) -> None:
    site = make_site(PROTOCOL=protocol)
    site.view()
    key = INVALID[name]
    answer = site.send(None, environ_overrides={"HTTP_IDEMPOTENCY_KEY": key})
    assert (answer.status_code, answer.get_json()["error"]) == (400, "idempotency_key_invalid")
    assert (site.runs, site.sent, site.rows()) == ([], [], {})
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
def test_the_longest_and_oddest_valid_keys_are_different_keys(protocol: str, make_site: MakeSite) -> None:
    site = make_site(PROTOCOL=protocol)
    site.view()
    first = [site.send(key).data for key in VALID]
    assert len(set(first)) == len(VALID) == len(site.runs)
    assert [site.send(key).data for key in VALID] == first
    assert len(site.store.keys()) == len(VALID)


@pytest.mark.parametrize("key", ['"quoted"', "a,b", "a, b", "with space", "a;p=1", "back\\slash", '"', '""'])
def test_by_default_every_printable_character_is_part_of_the_key(key: str, site: Site) -> None:
    assert site.send(key).status_code == 201
    assert set(site.rows()) == {site.row_name(key).encode()}


def test_spaces_and_tabs_around_the_header_are_not_part_of_the_key(site: Site) -> None:
    first = site.send("k1")
    again = site.send(None, environ_overrides={"HTTP_IDEMPOTENCY_KEY": " \tk1\t "})
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
def test_under_ietf_a_quoted_key_and_a_bare_one_name_the_same_row(header: str, key: str, make_site: MakeSite) -> None:
    site = make_site(PROTOCOL="ietf")
    site.view()
    assert site.send(None, environ_overrides={"HTTP_IDEMPOTENCY_KEY": header}).status_code == 201
    assert set(site.rows()) == {site.row_name(key).encode()}


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
def test_under_ietf_anything_but_one_string_or_one_bare_key_is_refused(header: str, make_site: MakeSite) -> None:
    site = make_site(PROTOCOL="ietf")
    site.view()
    answer = site.send(None, environ_overrides={"HTTP_IDEMPOTENCY_KEY": header})
    assert (answer.status_code, answer.get_json()["error"]) == (400, "idempotency_key_invalid")
    assert (site.runs, site.sent) == ([], [])


def test_upper_and_lower_case_are_two_keys(site: Site) -> None:
    assert site.send("ABC").data != site.send("abc").data


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("key", ["k1", "", None])
@pytest.mark.parametrize("protect_all", [False, True])
def test_a_safe_method_passes_untouched_with_a_key_and_without(
    method: str, key: str | None, protect_all: bool, make_site: MakeSite
) -> None:
    site = make_site(PROTECT_ALL=protect_all, principal=lambda: abort(500))

    def look() -> str:
        site.runs.append(bool(current_reservation))
        return "seen"

    site.app.add_url_rule("/look", "look", site.idempotency.protect(look), methods=[method])
    answer = site.send(key, "/look", method, data=b"")
    assert (answer.status_code, site.runs, site.sent) == (200, [False], [])
    assert "Idempotent-Replayed" not in answer.headers


def test_a_preflight_has_no_key_and_is_answered(site: Site) -> None:
    answer = site.client.options("/charges", headers={"Origin": "https://x", "Access-Control-Request-Method": "POST"})
    assert (answer.status_code, site.sent) == (200, [])


@pytest.mark.parametrize("method", ["post", "Post", "pOsT"])
def test_a_method_in_another_case_is_protected_too(method: str, site: Site) -> None:
    """Werkzeug's development server hands on the method as sent, and routing folds its case."""
    overrides = {"REQUEST_METHOD": method}
    assert site.send(None, environ_overrides=overrides).status_code == 400
    first = site.send(environ_overrides=overrides)
    again = site.send()
    assert (first.status_code, again.data, len(site.runs)) == (201, first.data, 1)


def test_the_checks_come_in_the_order_principal_key_body_claim(make_site: MakeSite) -> None:
    principals: list[object] = []
    site = make_site(principal=lambda: principals.pop() if principals else None)
    site.view()
    cut: dict[str, Any] = {"data": b"1", "environ_overrides": {"CONTENT_LENGTH": "5"}}

    def code(answer: TestResponse) -> str:
        error: str = answer.get_json()["error"]
        return error

    assert code(site.send(None, **cut)) == "idempotency_principal_required"
    principals.append("acme")
    assert code(site.send(None, **cut)) == "idempotency_key_required"
    principals.append("acme")
    assert code(site.send("\t", **cut)) == "idempotency_key_invalid"
    principals.append("acme")
    site.sent.clear()
    assert code(site.send(**cut)) == "idempotency_body_incomplete"
    assert (site.sent, site.runs, site.rows()) == ([], [], {})


@pytest.mark.parametrize("principal", [None, "", "  ", True, b"acme", 1.5, ["acme"], "\ud800"])
def test_a_request_whose_principal_cannot_be_one_is_refused_and_never_shares_a_row(
    principal: object, make_site: MakeSite
) -> None:
    site = make_site(principal=lambda: principal)
    site.view()
    answer = site.send(headers=[("X-Forwarded-For", "10.0.0.1"), ("X-Principal", "acme")])
    assert (answer.status_code, site.runs, site.rows()) == (401, [], {})


def test_two_principals_with_one_key_run_twice_and_see_their_own_answers(make_site: MakeSite) -> None:
    site = make_site(principal=lambda: request.headers["Authorization"])
    site.view()
    first = [site.send(headers=[("Authorization", who)]).data for who in ("alice", "bob")]
    again = [site.send(headers=[("Authorization", who)]).data for who in ("alice", "bob")]
    assert first == again == [b"charge 1", b"charge 2"]


def test_the_row_is_pending_in_redis_before_the_view_begins(make_site: MakeSite) -> None:
    site = make_site()
    seen: list[bytes] = []

    def look() -> str:
        seen.append(site.row()["status"])
        return "done"

    site.view(look)
    site.send()
    assert seen == [b"pending"]
    assert site.row()["status"] == b"completed"


def test_a_first_run_costs_two_calls_and_a_replay_or_refusal_one(site: Site) -> None:
    site.send()
    site.sent.clear()
    site.send("k2")
    assert site.sent == ["EVALSHA", "EVALSHA"]
    site.sent.clear()
    site.send("k2")
    site.send("k2", json={"amount": 2})
    assert site.sent == ["EVALSHA", "EVALSHA"]


def test_operations_of_their_own_do_not_meet(make_site: MakeSite) -> None:
    site = make_site()
    site.view(path="/charges", operation="charge")
    site.view(path="/refunds", operation="refund")
    assert site.send().data != site.send(path="/refunds").data
    assert site.row(operation="charge")
    assert site.row(operation="refund")


def test_a_row_has_the_policys_retention_and_an_answer_the_same_anew(make_site: MakeSite) -> None:
    site = make_site(policy=Policy(lease=5, retention=600))
    left: list[int] = []

    def look() -> str:
        left.append(site.pttl())
        return "done"

    site.view(look)
    site.send()
    left.append(site.pttl())
    assert all(599_000 < each <= 600_000 for each in left)
