"""The ledger on servers that restrict their clients, and the restrictions themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, TypeAlias

import pytest
import redis
from flask import Flask

from idemredis import FencedOut, InProgress, LedgerUnavailable, Policy, Replay, Reused, StoredResponse
from idemredis.flask import Idempotency
from tests.support.clock import SLACK, TurnedClock
from tests.support.restricting import (
    RestrictingProxy,
    Restriction,
    forgetful_scripts,
    frozen_ttl,
    managed,
    no_time_in_scripts,
    no_wait,
    whole_seconds,
)
from tests.support.servers import Server
from tests.support.subject import MakeSubject, Mode, Subject
from tests.support.waiting import wait_until

LEASE, RETENTION = Policy().lease, Policy().retention
ROW = ("acct_1", "key-1")
ANSWER = StoredResponse(201, (("content-type", "application/json"),), b'{"id":1}')
LARGE = StoredResponse(200, (("content-type", "application/octet-stream"),), b"\r\n$5\r\n\x00\xff" * 30_000)

ALL: tuple[Restriction, ...] = (no_time_in_scripts, managed, no_wait, whole_seconds, forgetful_scripts)
SERVERS = {restriction.__name__: (restriction,) for restriction in ALL} | {"all": ALL}

SOCKET_TIMEOUT = 10.0
"""Seconds; the proxy is in this process, and slow when the machine is busy."""

Connect: TypeAlias = Callable[..., redis.Redis]


@pytest.fixture(params=list(SERVERS.values()), ids=list(SERVERS))
def proxy(request: pytest.FixtureRequest, real_server: Server) -> Iterator[RestrictingProxy]:
    with RestrictingProxy(real_server.port, *request.param) as proxy:
        yield proxy


@pytest.fixture
def subject(proxy: RestrictingProxy, make_subject: MakeSubject, mode: Mode, real_server: Server) -> Subject:
    return make_subject(mode, real_server, url=proxy.url, socket_timeout=SOCKET_TIMEOUT)


@pytest.fixture(params=[2, 3], ids=["resp2", "resp3"])
def connect(request: pytest.FixtureRequest, real_server: Server) -> Iterator[Connect]:
    """Make plain clients: `connect(restriction, …)`."""
    with ExitStack() as opened:

        def make(*restrictions: Restriction) -> redis.Redis:
            proxy = opened.enter_context(RestrictingProxy(real_server.port, *restrictions))
            client: redis.Redis = real_server.client(port=proxy.port, protocol=request.param)
            opened.enter_context(client)
            return client

        yield make


def expires(subject: Subject) -> bool:
    """Whether the row lives for its retention, give or take the time that a test takes."""
    return RETENTION * 1000 - 60_000 < subject.pttl(subject.row(*ROW)) <= RETENTION * 1000


# The ledger


def test_a_duplicate_is_in_progress_and_then_gets_the_stored_response(subject: Subject) -> None:
    r = subject.claimed(*ROW, "f")
    assert r.generation == 1
    assert expires(subject)
    for _ in range(3):
        duplicate = subject.claim(*ROW, "f")
        assert isinstance(duplicate, InProgress)
        assert 0 < duplicate.retry_after <= LEASE
    subject.complete(r, ANSWER)
    assert expires(subject)

    for _ in range(3):
        assert subject.claim(*ROW, "f") == Replay(ANSWER, generation=1, failed=False)
    assert expires(subject)


def test_a_large_response_is_replayed_to_the_last_byte(subject: Subject) -> None:
    subject.complete(subject.claimed(*ROW, "f"), LARGE)

    assert subject.claim(*ROW, "f") == Replay(LARGE, generation=1, failed=False)


def test_a_key_used_for_something_else_is_reused(subject: Subject) -> None:
    r = subject.claimed(*ROW, "f")
    assert subject.claim(*ROW, "g") == Reused()
    subject.complete(r, ANSWER)

    assert subject.claim(*ROW, "g") == Reused()


def test_a_failure_is_stored_and_replayed_as_one(subject: Subject) -> None:
    subject.fail(subject.claimed(*ROW, "f"), ANSWER)
    assert expires(subject)

    assert subject.claim(*ROW, "f") == Replay(ANSWER, generation=1, failed=True)


def test_an_attempt_renews_its_lease_and_saves_checkpoints(subject: Subject) -> None:
    r = subject.claimed(*ROW, "f")
    for number in range(3):
        subject.renew(r)
        assert expires(subject)
        subject.checkpoint(r, "charged", number)
        assert expires(subject)
    assert subject.fields(subject.row(*ROW))[b"checkpoint_data"] == b"2"

    assert r.held
    assert isinstance(subject.claim(*ROW, "f"), InProgress)


def test_a_released_row_is_taken_over_at_generation_2(subject: Subject) -> None:
    a = subject.claimed(*ROW, "f")
    subject.release(a)
    assert expires(subject)
    b = subject.claimed(*ROW, "f")
    assert (b.generation, b.taken_over) == (2, True)
    assert expires(subject)

    with pytest.raises(FencedOut):
        subject.complete(a, ANSWER)
    subject.complete(b, ANSWER)
    assert subject.claim(*ROW, "f") == Replay(ANSWER, generation=2, failed=False)


def test_a_row_is_read_in_every_state(subject: Subject) -> None:
    assert subject.read(*ROW) is None
    r = subject.claimed(*ROW, "f")
    row = subject.read(*ROW)
    assert row is not None
    assert (row.status, row.generation, row.owner, row.response) == ("pending", 1, r.owner, None)
    subject.complete(r, ANSWER)
    row = subject.read(*ROW)

    assert row is not None
    assert (row.status, row.generation, row.response) == ("completed", 1, ANSWER)


def test_a_lease_that_has_run_out_is_taken_over_and_not_before(subject: Subject, clock: TurnedClock) -> None:
    a = subject.claimed(*ROW, "f")
    clock.turn(LEASE - SLACK)
    assert isinstance(subject.claim(*ROW, "f"), InProgress)
    clock.turn(SLACK + 1.0)  # where TTLs are in whole seconds, some take the lease for longer
    b = subject.claimed(*ROW, "f")
    assert (b.generation, b.taken_over) == (2, True)
    assert expires(subject)

    with pytest.raises(FencedOut):
        subject.renew(a)
    subject.complete(b, ANSWER)
    assert subject.claim(*ROW, "f") == Replay(ANSWER, generation=2, failed=False)


# Durability without WAIT


def durable(make_subject: MakeSubject, mode: Mode, server: Server, proxy: RestrictingProxy, replicas: int) -> Subject:
    policy = Policy(min_replicas=replicas)
    return make_subject(mode, server, url=proxy.url, policy=policy, socket_timeout=SOCKET_TIMEOUT)


def test_without_wait_no_claim_is_durable(make_subject: MakeSubject, mode: Mode, real_server: Server) -> None:
    with RestrictingProxy(real_server.port, no_wait) as proxy:
        subject = durable(make_subject, mode, real_server, proxy, replicas=1)
        for key in ("key-1", "key-2"):
            with pytest.raises(LedgerUnavailable, match="WAIT"):
                subject.claim("acct_1", key, "f")
            row = subject.row("acct_1", key)
            wait_until(lambda row=row: subject.fields(row)[b"owner"] == b"")  # type: ignore[misc]  # and so nobody waits
        subject.close()


@pytest.mark.parametrize(("replicas", "status", "runs"), [(1, 503, 0), (0, 201, 1)])
def test_without_wait_a_view_runs_only_where_it_needs_no_replica(
    make_subject: MakeSubject, real_server: Server, replicas: int, status: int, runs: int
) -> None:
    ran: list[str] = []

    def charge() -> tuple[str, int]:
        ran.append("charge")
        return "charged", 201

    with RestrictingProxy(real_server.port, no_wait) as proxy:
        subject = durable(make_subject, "sync", real_server, proxy, replicas)
        app = Flask("shop")
        idempotency = Idempotency(app, principal="acct_1", ledger=subject.ledger)
        app.add_url_rule("/charges", view_func=idempotency.protect(charge), methods=["POST"])
        answer = app.test_client().post("/charges", headers={"Idempotency-Key": "key-1"})
        subject.close()

    assert (answer.status_code, len(ran)) == (status, runs)


# The proxy


@pytest.mark.parametrize("text", ["return redis.call('TIME')", 'local t =\n redis.pcall ( "time" )\nreturn t[1]'])
def test_a_script_that_calls_time_is_refused(connect: Connect, text: str) -> None:
    client = connect(no_time_in_scripts)
    sha = client.script_load(text)
    for run, script in ((client.evalsha, sha), (client.eval, text), (client.evalsha, sha)):
        with pytest.raises(redis.ResponseError, match=rf"^This Redis command is not allowed from script script: {sha}"):
            run(script, 0)

    assert client.eval("-- TIME is not called\nreturn 'TIME'", 0) == b"TIME"


@pytest.mark.parametrize(
    ("restriction", "words"),
    [
        (managed, "CONFIG GET maxmemory"),
        (managed, "CLIENT TRACKING ON"),
        (managed, "client no-evict on"),
        (managed, "ACL WHOAMI"),
        (managed, "info"),
        (managed, "INFO server"),
        (no_wait, "WAIT 0 1"),
    ],
)
def test_a_command_that_is_refused_keeps_its_place_among_others(
    connect: Connect, restriction: Restriction, words: str
) -> None:
    client = connect(restriction)
    pipeline: Any = client.pipeline(transaction=False)
    pipeline.echo("before").execute_command(*words.split()).eval("return {1, {'a', false}}", 0).echo(LARGE.body)
    before, refused, nested, large = pipeline.execute(raise_on_error=False)

    assert (before, nested, large) == (b"before", [1, [b"a", None]], LARGE.body)
    assert isinstance(refused, redis.ResponseError)
    assert str(refused).startswith(("unknown command '", "unknown subcommand '"))


def test_every_third_evalsha_finds_no_script(connect: Connect) -> None:
    client = connect(forgetful_scripts)
    sha = client.script_load("return 1")
    pipeline: Any = client.pipeline(transaction=False)
    for _ in range(6):
        pipeline.evalsha(sha, 0)
    replies = pipeline.execute(raise_on_error=False)

    assert [isinstance(reply, redis.exceptions.NoScriptError) for reply in replies] == [False, False, True] * 2


SET_AND_ASK = "redis.call('PEXPIRE', KEYS[1], ARGV[1]) return redis.call('PTTL', KEYS[1])"


def test_ttls_are_whole_seconds(connect: Connect, real_server: Server) -> None:
    client = connect(whole_seconds)
    with real_server.client() as direct:
        direct.hset("row", "field", "x")
        sha = client.script_load(SET_AND_ASK)
        for ask in (
            lambda: client.eval(SET_AND_ASK, 1, "row", 100_999),
            lambda: client.evalsha(sha, 1, "row", 100_999),
            lambda: client.pexpire("row", 100_999) and client.pttl("row"),
        ):
            left = ask()
            assert left % 1000 == 0
            assert 0 < left <= 100_000
            assert 0 < direct.pttl("row") <= 100_000
        assert client.eval("return redis.call('PTTL', KEYS[1])", 1, "none") == client.pttl("none") == -2
        client.persist("row")
        assert client.eval("return redis.pcall('PTTL', KEYS[1])", 1, "row") == client.pttl("row") == -1
        client.delete("row")


@pytest.mark.parametrize("restriction", [whole_seconds, frozen_ttl])
def test_a_script_behind_a_shadow_gets_the_errors_of_the_server(connect: Connect, restriction: Restriction) -> None:
    client = connect(restriction)
    client.set("text", "x", ex=100)
    for call in ("call", "pcall"):
        with pytest.raises(redis.ResponseError, match="WRONGTYPE Operation against a key"):
            client.eval(f"return redis.{call}('HSET', KEYS[1], 'a', 1)", 1, "text")
        with pytest.raises(redis.ResponseError, match="value is not an integer or out of range"):
            client.eval(f"return redis.{call}('PEXPIRE', KEYS[1], 'x')", 1, "text")


def test_a_frozen_ttl_is_the_one_that_was_set_last(connect: Connect) -> None:
    client = connect(frozen_ttl)
    client.hset("row", "retention", 100_000)
    assert client.pttl("row") == -1
    client.pexpire("row", 90_000)

    assert client.pttl("row") == client.eval("return redis.call('PTTL', KEYS[1])", 1, "row") == 100_000
    assert client.pttl("none") == -2
