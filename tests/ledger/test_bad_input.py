"""What cannot work is refused with an error that says so, and nothing is written."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

import pytest
import redis
import redis.asyncio

from idemredis import (
    AsyncLedger,
    ConfigurationError,
    CorruptRow,
    InvalidKey,
    InvalidPrincipal,
    InvalidResponse,
    Ledger,
    LedgerUnavailable,
    Policy,
    Replay,
    Reused,
    StoredResponse,
)
from tests.support.clock import SLACK, TurnedClock, in_progress
from tests.support.servers import Server
from tests.support.subject import MakeSubject, Mode, Subject

ROW = ("acct_1", "key-1")
ANSWER = StoredResponse(201, (("content-type", "text/plain"),), b"done")


@contextmanager
def nothing_written(subject: Subject) -> Iterator[None]:
    """No key appears, goes or changes within, and no TTL is set, set anew or removed."""

    def content(key: bytes) -> object:
        hashed = subject.client.type(key) == b"hash"  # a DUMP of one is in the order of a table that grows meanwhile
        return subject.client.hgetall(key) if hashed else subject.client.dump(key)

    def contents() -> dict[bytes, object]:
        return {key: content(key) for key in subject.client.scan_iter()}

    before = contents()
    ttls: dict[bytes, int] = {key: subject.client.pttl(key) for key in before}
    yield
    assert contents() == before
    for key, ttl in ttls.items():
        assert ttl - SLACK * 1000 < subject.client.pttl(key) <= ttl


@pytest.fixture
def unsent(make_subject: MakeSubject, mode: Mode, valkey_server: Server) -> Subject:
    """For what is refused before anything is sent: any server will do."""
    return make_subject(mode, valkey_server)


# Keys and principals

BAD_KEYS = {
    "empty": "",
    "too_long": "secret-" + "k" * 249,
    "far_too_long": "secret-" + "k" * 99_993,
    "nul": "secret\x00",
    "tab": "secret\tsecret",
    "newline_at_the_end": "secret-key\n",
    "newline_at_the_start": "\nsecret-key",
    "return": "secret\r\nkey",
    "del": "secret\x7f",
    "not_ascii": "secr\u00e9t",
    "obs_text": "secret\x80",
    "not_latin": "secret\u20ac",
    "surrogate": "secret\udc80",
}


@pytest.mark.parametrize("key", BAD_KEYS.values(), ids=BAD_KEYS)
def test_a_key_that_is_not_1_to_255_printable_ascii_characters_is_refused_and_not_repeated(
    unsent: Subject, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    with nothing_written(unsent):
        for attempt in (lambda: unsent.claim("acct_1", key, "f"), lambda: unsent.read("acct_1", key)):
            with pytest.raises(InvalidKey) as refused:
                attempt()
            assert "secr" not in str(refused.value)
            assert "kkk" not in str(refused.value)
    assert "secr" not in caplog.text


@pytest.mark.parametrize("key", [None, b"key", 1, True, ["key"]], ids=repr)
def test_a_key_that_is_not_text_is_refused(unsent: Subject, key: Any) -> None:
    with nothing_written(unsent), pytest.raises(InvalidKey, match=f"not {type(key).__name__}"):
        unsent.claim("acct_1", key, "f")


@pytest.mark.parametrize("key", ["k", "k" * 255, " ", "~", "a b", '"quoted"', "{x}:%0a*?[y]\\", "0"], ids=repr)
def test_the_longest_and_oddest_valid_keys_work(subject: Subject, key: str) -> None:
    subject.complete(subject.claimed("acct_1", key, "f"), ANSWER)

    row = subject.read("acct_1", key)
    assert row is not None
    assert (row.identity.key, row.response) == (key, ANSWER)


@pytest.mark.parametrize(
    "principal", [None, True, False, b"acct", "", "  ", "\t\n", "\u2003", 1.5, object, ["a"], "a\ud800"], ids=repr
)
def test_a_principal_that_names_nobody_is_refused(unsent: Subject, principal: object) -> None:
    with nothing_written(unsent):
        with pytest.raises(InvalidPrincipal):
            unsent.claim(principal, "key-1", "f")
        with pytest.raises(InvalidPrincipal):
            unsent.read(principal, "key-1")


# Settings and arguments

NOT_SECONDS = [0, 0.0, -1, -0.001, 0.0009, math.nan, math.inf, -math.inf, True, False, "30", None, Decimal(30), 1e12]


@pytest.mark.parametrize("lease", [value for value in NOT_SECONDS if value is not None], ids=repr)
def test_a_lease_that_is_no_time_is_refused(unsent: Subject, lease: Any) -> None:
    with nothing_written(unsent), pytest.raises(ConfigurationError, match="lease"):
        unsent.claim(*ROW, "f", lease=lease)


@pytest.mark.parametrize("lease", [86400, 86400.0, 86401])
def test_a_lease_that_is_not_shorter_than_the_retention_is_refused_with_both_values(
    unsent: Subject, lease: float
) -> None:
    with nothing_written(unsent), pytest.raises(ConfigurationError, match=f"lease={lease:g} s, retention=86400 s"):
        unsent.claim(*ROW, "f", lease=lease)
    with pytest.raises(ConfigurationError, match="lease must be shorter than retention"):
        Policy(lease=lease)


@pytest.mark.parametrize("setting", ["lease", "retention", "max_hold", "replica_timeout"])
@pytest.mark.parametrize("value", NOT_SECONDS, ids=repr)
def test_a_policy_refuses_a_time_that_is_none_and_names_the_setting(setting: str, value: Any) -> None:
    with pytest.raises(ConfigurationError) as refused:
        Policy(**{setting: value})
    assert str(refused.value).startswith(setting)
    assert str(refused.value).endswith(repr(value))


@pytest.mark.parametrize("setting", ["max_body", "min_replicas"])
@pytest.mark.parametrize("value", [-1, 1.0, True, None, "1", math.nan], ids=repr)
def test_a_policy_refuses_a_number_that_is_not_whole_and_names_the_setting(setting: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{setting} must be a whole number"):
        Policy(**{setting: value})


@pytest.mark.parametrize("value", [0, 1, None, "yes"], ids=repr)
def test_a_policy_refuses_a_heartbeat_that_is_not_true_or_false(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="heartbeat must be True or False"):
        Policy(heartbeat=value)


def test_a_policy_is_frozen_and_its_settings_are_named() -> None:
    with pytest.raises(AttributeError):
        Policy().lease = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        Policy(30)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="leese"):
        Policy(leese=30)  # type: ignore[call-arg]


@pytest.mark.parametrize("wait", [-1, math.nan, math.inf, True, "1"], ids=repr)
def test_a_wait_that_is_no_time_is_refused(unsent: Subject, wait: Any) -> None:
    with nothing_written(unsent), pytest.raises(ConfigurationError, match="wait"):
        unsent.claim(*ROW, "f", wait=wait)


@pytest.mark.parametrize("fingerprint", [None, "", b"f", 1], ids=repr)
def test_a_fingerprint_that_is_not_text_is_refused(unsent: Subject, fingerprint: Any) -> None:
    with nothing_written(unsent), pytest.raises(ConfigurationError, match="fingerprint must be a non-empty str"):
        unsent.claim(*ROW, fingerprint)


@pytest.mark.parametrize("operation", [None, 1, b"charge"], ids=repr)
def test_an_operation_that_is_not_text_is_refused(unsent: Subject, operation: Any) -> None:
    with nothing_written(unsent), pytest.raises(ConfigurationError, match="operation must be a str"):
        unsent.claim(*ROW, "f", operation=operation)


@pytest.mark.parametrize("route", [None, 1, b"POST /charges"], ids=repr)
def test_a_route_that_is_not_text_is_refused(unsent: Subject, route: Any) -> None:
    with nothing_written(unsent), pytest.raises(ConfigurationError, match="route must be a str"):
        unsent.claim(*ROW, "f", route=route)


@pytest.mark.parametrize("name", ["", None, 1], ids=repr)
def test_a_checkpoint_without_a_name_is_refused(unsent: Subject, name: Any) -> None:
    r = unsent.claimed(*ROW, "f")
    with nothing_written(unsent), pytest.raises(ConfigurationError, match="name must be a non-empty str"):
        unsent.checkpoint(r, name)


@pytest.mark.parametrize("namespace", ["", None, b"idem", 1], ids=repr)
def test_a_namespace_that_is_no_text_is_refused(make_subject: MakeSubject, mode: Mode, namespace: Any) -> None:
    client: Any = redis.Redis() if mode == "sync" else redis.asyncio.Redis()
    with pytest.raises(ConfigurationError, match="namespace must be a non-empty str"):
        (Ledger if mode == "sync" else AsyncLedger)(client, namespace=namespace)


# Clients and URLs


@pytest.mark.parametrize("client", [None, "redis://localhost", object(), redis.Redis], ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("made", [Ledger, AsyncLedger])
def test_what_is_no_client_is_refused(made: Callable[[Any], object], client: object) -> None:
    with pytest.raises(ConfigurationError, match=r"redis-py client|sync client|asyncio client"):
        made(client)


def test_a_client_of_the_other_kind_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigurationError, match="use AsyncLedger"):
        Ledger(redis.asyncio.Redis())  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"use redis\.asyncio\.Redis"):
        AsyncLedger(redis.Redis())  # type: ignore[arg-type]


@pytest.mark.parametrize("made", [Ledger.from_url, AsyncLedger.from_url])
@pytest.mark.parametrize("url", ["", "localhost:6379", "http://localhost", "redis://localhost:port/0"])
def test_a_url_that_cannot_be_used_is_refused(made: Callable[[str], object], url: str) -> None:
    with pytest.raises(ConfigurationError, match="URL"):
        made(url)


# Answers


@pytest.mark.parametrize(
    "body", ["text", None, bytearray(b"x"), memoryview(b"x"), 1], ids=lambda body: type(body).__name__
)
def test_a_body_that_is_not_bytes_is_refused(body: Any) -> None:
    with pytest.raises(InvalidResponse, match="body must be bytes"):
        StoredResponse(200, (), body)


@pytest.mark.parametrize("status", [99, 1000, 0, -200, True, "200", 200.0, None], ids=repr)
def test_a_status_that_http_has_not_is_refused(status: Any) -> None:
    with pytest.raises(InvalidResponse, match="status must be an int"):
        StoredResponse(status)


@pytest.mark.parametrize(
    "headers",
    [
        [("a", "b")],
        {"a": "b"},
        None,
        (("a",),),
        (["a", "b"],),
        (("a", 1),),
        ((b"a", "b"),),
        ("ab",),
        (("a", "b\r\nset-cookie: x"),),
        (("a", "b\n"),),
        (("a", "b\x00"),),
        (("a", "\u20ac"),),
        (("", "b"),),
        (("a b", "c"),),
        (("a:", "c"),),
        (("a\r\n", "c"),),
    ],
    ids=repr,
)
def test_headers_that_could_not_be_sent_are_refused(headers: Any) -> None:
    with pytest.raises(InvalidResponse, match="header"):
        StoredResponse(200, headers)


@pytest.mark.parametrize("omitted", ["because", None, 1, "TOO_LARGE"], ids=repr)
def test_an_unknown_reason_for_a_tombstone_is_refused(omitted: Any) -> None:
    with pytest.raises(InvalidResponse, match="omitted must be one of"):
        StoredResponse(200, omitted=omitted)


# Rows that are not ours


def assert_corrupt(subject: Subject, why: str) -> None:
    """Neither claiming nor reading gets anywhere, both say why in the same words, and the key stays as it is."""
    said = set()
    with nothing_written(subject):
        for ask in (
            lambda: subject.claim(*ROW, "f"),
            lambda: subject.claim(*ROW, "f", takeover=False),
            lambda: subject.read(*ROW),
        ):
            for _ in range(2):
                with pytest.raises(CorruptRow) as found:
                    ask()
                said.add(found.value.why)
    assert len(said) == 1, said
    assert re.search(why, said.pop())


def spoil(subject: Subject, field: str, value: bytes | None) -> None:
    if value is None:
        subject.client.hdel(subject.row(*ROW), field)
    else:
        subject.client.hset(subject.row(*ROW), field, value)


@contextmanager
def lasting(subject: Subject) -> Iterator[None]:
    """The row has no TTL within, and is gone afterwards."""
    subject.client.persist(subject.row(*ROW))
    yield
    assert subject.pttl(subject.row(*ROW)) == -1
    subject.client.delete(subject.row(*ROW))


OTHER_TYPES: dict[str, Callable[[redis.Redis, str], object]] = {
    "string": lambda client, name: client.set(name, "x"),
    "list": lambda client, name: client.rpush(name, "x"),
    "set": lambda client, name: client.sadd(name, "x"),
    "zset": lambda client, name: client.zadd(name, {"x": 1}),
    "stream": lambda client, name: client.xadd(name, {"status": "pending"}),
}


@pytest.mark.parametrize("kind", OTHER_TYPES)
def test_a_key_of_another_type_is_a_corrupt_row(subject: Subject, kind: str) -> None:
    name = subject.row(*ROW)
    OTHER_TYPES[kind](subject.client, name)
    subject.client.pexpire(name, 5_000_000)
    assert_corrupt(subject, "^it is not a hash$")
    assert subject.client.type(name) == kind.encode()
    with lasting(subject):
        assert_corrupt(subject, "^it is not a hash$")


def test_another_kind_of_hash_is_a_corrupt_row(subject: Subject) -> None:
    subject.client.hset(subject.row(*ROW), mapping={"name": "somebody", "email": "x@example.org"})
    subject.client.pexpire(subject.row(*ROW), 5_000_000)
    assert_corrupt(subject, "^status is missing$")
    with lasting(subject):
        assert_corrupt(subject, "^status is missing$")


POSITIVE = "is not a positive integer"


def spoiled_fields() -> list[Any]:
    cases: list[tuple[str, bytes | None, str]] = [
        ("status", None, "status is missing"),
        ("status", b"", "status is unknown"),
        ("status", b"running", "status is unknown"),
        ("status", b"Pending", "status is unknown"),
        ("generation", None, f"generation {POSITIVE}"),
        ("generation", b"", f"generation {POSITIVE}"),
        ("generation", b"0", f"generation {POSITIVE}"),
        ("generation", b"-1", f"generation {POSITIVE}"),
        ("generation", b"one", f"generation {POSITIVE}"),
        ("generation", b"1.5", f"generation {POSITIVE}"),
        ("generation", b"0x1", f"generation {POSITIVE}"),
        ("generation", b" 1", f"generation {POSITIVE}"),
        ("generation", b"1\n", f"generation {POSITIVE}"),
        ("generation", b"1\x00", f"generation {POSITIVE}"),
        ("generation", b"1_0", f"generation {POSITIVE}"),
        ("generation", "\u0661".encode(), f"generation {POSITIVE}"),  # a digit to Python
        ("generation", b"9" * 16, f"generation {POSITIVE}"),
        ("generation", b"9" * 5_000, f"generation {POSITIVE}"),  # more than Python's int takes
        ("owner", None, "owner is missing"),
        ("fingerprint", None, "fingerprint is missing"),
        ("retention", b"0", f"retention {POSITIVE}"),
    ]
    for name, wrong in (("lease", "lease is not an integer"), ("retention", f"retention {POSITIVE}")):
        cases += [(name, value, wrong) for value in (None, b"", b"soon", b"-1", b"1e3", b"nan", b"0x1f", b"9" * 400)]
    return [pytest.param(field, value, f"^{why}$", id=f"{field}={value!r:.12}") for field, value, why in cases]


@pytest.mark.parametrize("finished", [False, True], ids=["pending", "finished"])
@pytest.mark.parametrize(("field", "value", "why"), spoiled_fields())
def test_a_row_with_a_field_missing_or_malformed_is_never_run_and_never_overwritten(
    subject: Subject, clock: TurnedClock, finished: bool, field: str, value: bytes | None, why: str
) -> None:
    r = subject.claimed(*ROW, "f")
    if finished:
        subject.complete(r, ANSWER)
    spoil(subject, field, value)
    assert_corrupt(subject, why)
    clock.turn(31)
    assert_corrupt(subject, why)


@pytest.mark.parametrize("value", [b"200", b"x", b""], ids=repr)
def test_a_pending_row_with_a_response_is_never_run_and_never_overwritten(
    subject: Subject, clock: TurnedClock, value: bytes
) -> None:
    subject.claimed(*ROW, "f")
    spoil(subject, "response_status", value)
    assert_corrupt(subject, "^it is pending and has a response$")
    clock.turn(31)
    assert_corrupt(subject, "^it is pending and has a response$")


@pytest.mark.parametrize("released", [False, True], ids=["running", "released"])
def test_a_pending_row_without_a_ttl_has_no_clock_and_is_never_run_and_never_overwritten(
    subject: Subject, clock: TurnedClock, released: bool
) -> None:
    r = subject.claimed(*ROW, "f")
    if released:
        subject.release(r)
    with lasting(subject):
        assert_corrupt(subject, "^it is pending and has no TTL$")
        clock.turn(31)
        assert_corrupt(subject, "^it is pending and has no TTL$")


@pytest.mark.parametrize("failed", [False, True], ids=["completed", "failed"])
def test_a_finished_row_without_a_ttl_is_still_replayed_and_read(subject: Subject, failed: bool) -> None:
    r = subject.claimed(*ROW, "f")
    (subject.fail if failed else subject.complete)(r, ANSWER)
    with lasting(subject), nothing_written(subject):
        assert subject.claim(*ROW, "f") == Replay(ANSWER, 1, failed)
        assert subject.claim(*ROW, "g") == Reused()
        row = subject.read(*ROW)
        assert row is not None
        assert (row.response, row.ttl, row.age, row.lease_left, row.stale) == (ANSWER, None, 0.0, 0.0, False)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("response_status", None, "^response_status is not an integer$"),
        ("response_status", b"ok", "^response_status is not an integer$"),
        ("response_status", b"", "^response_status is not an integer$"),
        ("response_status", b"9" * 5_000, "^response_status is not an integer$"),
        ("response_status", b"99", "status must be"),
        ("response_status", b"12345", "status must be"),
        ("response_headers", None, "^response_headers is missing$"),
        ("response_headers", b"", "stored response"),
        ("response_headers", b"not json", "stored response"),
        ("response_headers", b"{}", "stored response"),
        ("response_headers", b"null", "stored response"),
        ("response_headers", b"1", "stored response"),
        ("response_headers", b'["ab"]', "stored response"),
        ("response_headers", b'[["a"]]', "stored response"),
        ("response_headers", b'[["a","b","c"]]', "stored response"),
        ("response_headers", b'[["a",1]]', "stored response"),
        ("response_headers", b'[["a","b\\r\\nset-cookie: x"]]', "control character"),
        ("response_headers", b'[["a\\r\\nset-cookie","x"]]', "token"),
        ("response_headers", b'[["a","\xff"]]', "stored response"),
        ("response_headers", b"[" * 100_000, "stored response"),
        ("response_body", None, "^response_body is missing$"),
        ("response_omitted", b"because", "omitted must be"),
        ("response_omitted", b"\xff", "stored response"),
    ],
    ids=lambda part: f"{part!r:.20}",
)
def test_a_stored_answer_that_somebody_edited_is_never_given(
    subject: Subject, clock: TurnedClock, field: str, value: bytes | None, why: str
) -> None:
    subject.complete(subject.claimed(*ROW, "f"), ANSWER)
    spoil(subject, field, value)
    clock.turn(31)

    assert_corrupt(subject, why)
    assert subject.read(*ROW[:1], "another") is None


@pytest.mark.parametrize("released", [False, True], ids=["stale", "released"])
@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("checkpoint", None, "^the checkpoint is incomplete$"),
        ("checkpoint", b"\xff", "^the checkpoint cannot be read"),
        ("checkpoint_data", None, "^the checkpoint is incomplete$"),
        ("checkpoint_data", b"", "^the checkpoint cannot be read"),
        ("checkpoint_data", b"not json", "^the checkpoint cannot be read"),
        ("checkpoint_data", b"\xff", "^the checkpoint cannot be read"),
        ("checkpoint_data", b"9" * 5_000, "^the checkpoint cannot be read"),
        ("checkpoint_data", b"[" * 100_000, "^the checkpoint cannot be read"),
        ("checkpoint_seq", None, "^checkpoint_seq is not an integer$"),
        ("checkpoint_seq", b"x", "^checkpoint_seq is not an integer$"),
        ("checkpoint_seq", b"", "^checkpoint_seq is not an integer$"),
        ("checkpoint_seq", b"9" * 16, "^checkpoint_seq is not an integer$"),
    ],
    ids=lambda part: f"{part!r:.20}",
)
def test_a_checkpoint_that_somebody_edited_is_not_handed_on_and_nobody_takes_the_row_over(
    subject: Subject, clock: TurnedClock, released: bool, field: str, value: bytes | None, why: str
) -> None:
    r = subject.claimed(*ROW, "f")
    subject.checkpoint(r, "charged", 1)
    if released:
        subject.release(r)
    spoil(subject, field, value)
    clock.turn(31)

    assert_corrupt(subject, why)
    fields = subject.fields(subject.row(*ROW))
    assert (fields[b"generation"], fields[b"owner"]) == (b"1", b"" if released else r.owner.encode())


@pytest.mark.parametrize("field", ["checkpoint", "checkpoint_data", "checkpoint_seq"])
@pytest.mark.parametrize("finished", [False, True], ids=["pending", "finished"])
def test_a_lone_part_of_a_checkpoint_makes_a_row_corrupt(
    subject: Subject, clock: TurnedClock, finished: bool, field: str
) -> None:
    r = subject.claimed(*ROW, "f")
    if finished:
        subject.complete(r, ANSWER)
    spoil(subject, field, b"1")
    assert_corrupt(subject, "^the checkpoint is incomplete$")
    clock.turn(31)
    assert_corrupt(subject, "^the checkpoint is incomplete$")


@pytest.mark.parametrize("field", ["status", "generation", "owner", "fingerprint", "lease", "retention"])
def test_reading_says_which_field_is_missing(subject: Subject, field: str) -> None:
    subject.claimed(*ROW, "f")
    spoil(subject, field, None)

    with nothing_written(subject), pytest.raises(CorruptRow, match=field) as found:
        subject.read(*ROW)
    assert found.value.ttl is not None
    assert Policy().retention - SLACK < found.value.ttl <= Policy().retention


@pytest.mark.parametrize(
    "value", [None, b"", b"soon", b"-1", b"1e3", b"\xff", b"9" * 16, b"9" * 5_000], ids="{!r:.12}".format
)
def test_a_row_whose_time_of_the_claim_is_missing_or_odd_is_a_row_all_the_same(
    subject: Subject, clock: TurnedClock, value: bytes | None
) -> None:
    """It is for people, and nothing decides by it."""
    subject.claimed(*ROW, "f")
    spoil(subject, "created_at", value)
    with nothing_written(subject):
        assert in_progress(subject.claim(*ROW, "f"), 30)
        pending = subject.read(*ROW)
    assert pending is not None
    assert (pending.status, pending.created_at) == ("pending", None)
    clock.turn(31)
    subject.complete(subject.claimed(*ROW, "f"), ANSWER)
    with nothing_written(subject):
        assert subject.claim(*ROW, "f") == Replay(ANSWER, 2, False)
        finished = subject.read(*ROW)
    assert finished is not None
    assert (finished.response, finished.created_at) == (ANSWER, None)
    assert subject.fields(subject.row(*ROW)).get(b"created_at") == value


def test_a_route_and_an_owner_that_are_no_text_are_read_all_the_same(subject: Subject) -> None:
    subject.claimed(*ROW, "f")
    for field in ("route", "owner"):
        spoil(subject, field, b"\xff")
    with nothing_written(subject):
        assert in_progress(subject.claim(*ROW, "f"), 30)
        row = subject.read(*ROW)
    assert row is not None
    assert (row.route, row.owner) == (r"\xff", r"\xff")


def test_a_field_that_this_version_does_not_know_is_left_alone(subject: Subject, clock: TurnedClock) -> None:
    a = subject.claimed(*ROW, "f")
    theirs = {b"of_the_next_version": b"\xff\x00", b"lease_until": b"soon"}
    for field, value in theirs.items():
        spoil(subject, field.decode(), value)

    def kept() -> bool:
        return theirs.items() <= subject.fields(subject.row(*ROW)).items()

    with nothing_written(subject):
        assert in_progress(subject.claim(*ROW, "f"), 30)
        assert subject.read(*ROW) is not None
    subject.checkpoint(a, "charged", 1)
    subject.renew(a)
    assert kept()
    clock.turn(31)
    b = subject.claimed(*ROW, "f")
    assert (b.generation, b.last_checkpoint, kept()) == (2, ("charged", 1), True)
    subject.release(b)
    assert kept()
    c = subject.claimed(*ROW, "f")
    subject.complete(c, ANSWER)
    assert kept()
    with nothing_written(subject):
        assert subject.claim(*ROW, "f") == Replay(ANSWER, 3, False)
        row = subject.read(*ROW)
    assert row is not None
    assert (row.response, row.last_checkpoint) == (ANSWER, ("charged", 1))


def test_a_row_of_another_fingerprint_reveals_nothing_even_when_its_answer_is_spoiled(subject: Subject) -> None:
    subject.complete(subject.claimed(*ROW, "f"), ANSWER)
    spoil(subject, "response_headers", b"not json")

    with nothing_written(subject):
        assert subject.claim(*ROW, "g") == Reused()


@contextmanager
def user(server: Server, *rights: str) -> Iterator[dict[str, str]]:
    """A user of these rights; gives the client's options."""
    known = [*rights, "+client|setinfo"] if server.kind == "valkey" else rights  # Redis has it from 7.2 on
    admin: Any
    with server.client() as admin:
        admin.acl_setuser("limited", enabled=True, reset=True, passwords=["+pw"])
        admin.execute_command("ACL", "SETUSER", "limited", *known)
        try:
            yield {"username": "limited", "password": "pw"}
        finally:
            admin.acl_deluser("limited")


def test_a_claim_that_cannot_set_its_ttl_leaves_no_row(
    make_subject: MakeSubject, mode: Mode, real_server: Server
) -> None:
    """Redis has no rollback: without +pexpire the script would leave a row that never expires."""
    admin = make_subject(mode, real_server)
    with user(real_server, "~*", "-@all", "+evalsha", "+eval", "+hmget", "+hset", "+pttl", "+del") as limited:
        subject = make_subject(mode, real_server, **limited)
        with nothing_written(admin), pytest.raises(LedgerUnavailable, match="it did not run") as refused:
            subject.claim(*ROW, "f")
        assert not refused.value.unknown
        subject.close()


@pytest.mark.parametrize("left", ["released", "expired"])
def test_a_takeover_that_cannot_set_the_ttl_leaves_the_row_as_it_was(
    make_subject: MakeSubject, mode: Mode, real_server: Server, clock: TurnedClock, left: str
) -> None:
    """Redis has no rollback: the attempt before would be fenced, and nobody would run."""
    admin = make_subject(mode, real_server)
    r = admin.claimed(*ROW, "f")
    admin.checkpoint(r, "charged", {"charge": "ch_1"})
    admin.release(r) if left == "released" else clock.turn(31)
    with user(real_server, "~*", "-@all", "+evalsha", "+eval", "+hmget", "+hset", "+pttl", "+del") as limited:
        subject = make_subject(mode, real_server, **limited)
        before, expires = admin.fields(r.row), admin.client.pexpiretime(r.row)
        with pytest.raises(LedgerUnavailable, match="it did not run"):
            subject.claim(*ROW, "f")
        assert (admin.fields(r.row), admin.client.pexpiretime(r.row)) == (before, expires)
        subject.close()


LEAST = (
    *("resetkeys", "~idem:*", "resetchannels", "-@all", "+evalsha", "+eval", "+ping"),
    *("+hmget", "+hset", "+pexpire", "+pttl", "+del"),
)


@pytest.mark.parametrize("right", ["+hmget", "+hset", "+pexpire", "+pttl"])
def test_a_user_without_one_of_these_rights_is_refused_at_the_first_claim_and_not_at_the_first_duplicate(
    make_subject: MakeSubject, mode: Mode, real_server: Server, right: str
) -> None:
    admin = make_subject(mode, real_server)
    with user(real_server, *(word for word in LEAST if word != right)) as limited:
        subject = make_subject(mode, real_server, namespace="idem", **limited)
        with nothing_written(admin), pytest.raises(LedgerUnavailable, match="it did not run") as refused:
            subject.claim(*ROW, "f")
        assert not refused.value.unknown
        subject.close()


def test_the_least_rights_that_a_ledger_needs_suffice(
    make_subject: MakeSubject, mode: Mode, real_server: Server
) -> None:
    with user(real_server, *LEAST) as limited:
        subject = make_subject(mode, real_server, namespace="idem", **limited)
        first = subject.claimed(*ROW, "f")
        subject.checkpoint(first, "charged", 1)
        subject.renew(first)
        subject.release(first)
        subject.complete(subject.claimed(*ROW, "f"), ANSWER)
        subject.fail(subject.claimed("acct_1", "key-2", "f"), ANSWER)
        row = subject.read(*ROW)
        assert row is not None
        assert row.response == ANSWER
        subject.close()
        elsewhere = make_subject(mode, real_server, namespace="other", **limited)
        with pytest.raises(LedgerUnavailable, match="it did not run"):
            elsewhere.claim(*ROW, "f")
        elsewhere.close()
