"""A broken connection means "unknown", never "not done": whatever was lost can be asked again."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis.asyncio.retry
from redis.backoff import NoBackoff
from redis.retry import Retry

from idemredis import Event, FencedOut, LedgerUnavailable, Policy, Replay, Reservation, StoredResponse
from idemredis.core.scripts import load
from tests.support.clock import TurnedClock
from tests.support.proxy import Fate, Proxy
from tests.support.servers import Server
from tests.support.subject import AnyServer, MakeSubject, Mode, Subject
from tests.support.waiting import wait_until

ROW = ("acct_1", "key-1")
LEASE = Policy().lease
ANSWER = StoredResponse(201, (("content-type", "application/octet-stream"),), b"\xff\x00\xfe")


PATIENT = {"socket_timeout": 5.0}  # what is lost closes its connection: only a busy machine is waited for


def no_retries(mode: Mode) -> dict[str, Any]:
    retry = Retry(NoBackoff(), 0) if mode == "sync" else redis.asyncio.retry.Retry(NoBackoff(), 0)
    return {"retry": retry}


@dataclass
class Wire:
    """A ledger behind a proxy, and another one straight at the server."""

    far: Subject
    near: Subject
    proxy: Proxy
    events: list[Event] = field(default_factory=list)

    def row(self) -> dict[bytes, bytes]:
        return self.near.fields(self.near.row(*ROW))

    def names(self) -> list[str]:
        return [event.name for event in self.events]


Wired = Callable[..., Wire]


@pytest.fixture
def wired(make_subject: MakeSubject, mode: Mode, real_server: Server) -> Iterator[Wired]:
    """Make a `Wire` that loses requests or replies of one script.

    The server knows the scripts, and the client is connected unless `cold`.
    """
    proxies = []

    def make(script: str = "claim", *, ours: bool = False, cold: bool = False, **options: Any) -> Wire:
        warm(real_server)
        proxies.append(proxy := Proxy(real_server.port, load()[script].sha.encode()))
        events: list[Event] = []
        rest: dict[str, Any] = {"observers": [events.append]}
        if ours:
            far = make_subject(mode, real_server, url=proxy.url, **rest, **PATIENT | options)
        else:
            far = make_subject(mode, real_server, port=proxy.port, **rest, **no_retries(mode) | PATIENT | options)
        if not cold:
            far.read(*ROW)
        return Wire(far, make_subject(mode, real_server), proxy, events)

    yield make
    for proxy in proxies:
        proxy.close()


def warm(server: Server) -> None:
    with server.client() as client:
        for script in load().values():
            client.script_load(script.text)


@contextmanager
def unchanged(subject: Subject, clock: TurnedClock) -> Iterator[None]:
    """Neither a field of the row nor its TTL changes within; the row is a second older, so a TTL set anew shows."""
    name = subject.row(*ROW)
    clock.turn(1)
    before, left = subject.fields(name), subject.pttl(name)
    yield
    assert subject.fields(name) == before
    assert subject.pttl(name) <= left


WHOSE = pytest.mark.parametrize("ours", [True, False], ids=["client_of_ours", "client_without_retries"])
"""The ledger asks once more, whatever retries its client was made with."""


@WHOSE
@pytest.mark.parametrize("how", ["drop_replies", "drop_requests"])
def test_a_claim_whose_reply_was_lost_is_a_reservation(wired: Wired, ours: bool, how: str) -> None:
    wire = wired("claim", ours=ours)
    getattr(wire.proxy, how)(1)
    r = wire.far.claimed(*ROW, "f")

    assert (r.generation, r.held) == (1, True)
    assert wire.row()[b"owner"] == r.owner.encode()
    assert wire.names() == ["claimed"]


@WHOSE
def test_a_takeover_whose_reply_was_lost_is_a_reservation(wired: Wired, clock: TurnedClock, ours: bool) -> None:
    wired().near.claimed(*ROW, "f")
    clock.turn(LEASE)
    wire = wired("takeover", ours=ours)
    wire.proxy.drop_replies(1)
    r = wire.far.claimed(*ROW, "f")

    assert r.generation == 2
    assert (wire.row()[b"owner"], wire.row()[b"generation"]) == (r.owner.encode(), b"2")


@WHOSE
@pytest.mark.parametrize("script", ["complete", "fail", "release", "renew", "checkpoint"])
def test_a_transition_whose_reply_was_lost_is_made_once(wired: Wired, ours: bool, script: str) -> None:
    wire = wired(script, ours=ours)
    r = wire.near.claimed(*ROW, "f")
    wire.proxy.drop_replies(1)
    args: dict[str, tuple[Any, ...]] = {"complete": (ANSWER,), "fail": (ANSWER,), "checkpoint": ("charged", [1])}
    getattr(wire.far, script)(r, *args.get(script, ()))

    row = wire.row()
    assert row[b"generation"] == b"1"
    match script:
        case "complete" | "fail":
            assert wire.near.claim(*ROW, "f") == Replay(ANSWER, 1, script == "fail")
        case "release":
            assert wire.near.claimed(*ROW, "f").generation == 2
        case "checkpoint":
            assert (row[b"checkpoint_data"], row[b"checkpoint_seq"]) == (b"[1]", b"1")
    assert "unavailable" not in wire.names()


def test_a_claim_that_stays_unknown_is_released_so_that_the_next_retry_runs(wired: Wired) -> None:
    wire = wired("claim")
    wire.proxy.drop_replies(2)
    with pytest.raises(LedgerUnavailable, match="not known") as unavailable:
        wire.far.claim(*ROW, "f")
    assert unavailable.value.unknown
    assert wire.names() == ["unavailable"]

    wait_until(lambda: wire.row()[b"owner"] == b"")
    assert wire.near.claimed(*ROW, "f").generation == 2


CLIENTS: list[Callable[[Mode], dict[str, Any]]] = [
    no_retries,
    lambda mode: {"retry": Retry(NoBackoff(), 5) if mode == "sync" else redis.asyncio.retry.Retry(NoBackoff(), 5)},
    lambda mode: {},
]


@pytest.mark.parametrize("options", CLIENTS, ids=["without_retries", "with_retries", "as_redis_py_makes_it"])
def test_a_claim_whose_reply_was_lost_is_unknown_whatever_the_next_reply_says(
    wired: Wired, mode: Mode, options: Callable[[Mode], dict[str, Any]]
) -> None:
    """The first try ran. The second one gets an error, which says only that the second did not run."""
    wire = wired("claim", **options(mode))
    admin = wire.near.client
    sent: list[Fate] = []

    def choose() -> Fate:
        sent.append("pass" if sent else "lose reply")
        if sent[-1] == "pass":
            admin.config_set("min-replicas-to-write", 1)
        return sent[-1]

    wire.proxy.choose(choose)
    try:
        with pytest.raises(LedgerUnavailable, match=r"NOREPLICAS|Not enough good replicas") as unavailable:
            wire.far.claim(*ROW, "f")
        assert unavailable.value.unknown
        assert "the reply to an earlier try was lost; it is not known whether it ran" in str(unavailable.value)
        assert sent == ["lose reply", "pass"]
        assert wire.row()[b"owner"] != b""
    finally:
        admin.config_set("min-replicas-to-write", 0)
    wait_until(lambda: wire.row()[b"owner"] == b"")
    assert wire.near.claimed(*ROW, "f").generation == 2


def test_a_takeover_that_stays_unknown_is_released_so_that_the_next_retry_runs(
    wired: Wired, clock: TurnedClock
) -> None:
    wired().near.claimed(*ROW, "f")
    clock.turn(LEASE)
    wire = wired("takeover")
    wire.proxy.drop_replies(2)
    with pytest.raises(LedgerUnavailable):
        wire.far.claim(*ROW, "f")

    wait_until(lambda: wire.row()[b"owner"] == b"")
    assert wire.near.claimed(*ROW, "f").generation == 3


def test_a_claim_that_never_arrived_leaves_the_row_to_whoever_comes_next(wired: Wired, clock: TurnedClock) -> None:
    wire = wired("claim")
    wire.proxy.drop_requests(2)
    with pytest.raises(LedgerUnavailable):
        wire.far.claim(*ROW, "f")
    assert wire.row() == {}
    r = wire.near.claimed(*ROW, "f")
    with unchanged(wire.near, clock):
        wire.far.flush()  # it would release its own claim, and finds another attempt's

    assert wire.row()[b"owner"] == r.owner.encode()


def test_a_claim_that_reaches_nobody_is_refused_and_nothing_runs(wired: Wired) -> None:
    wire = wired("claim")
    wire.proxy.refuse()
    with pytest.raises(LedgerUnavailable):
        wire.far.claim(*ROW, "f")
    assert wire.row() == {}


@pytest.mark.parametrize("script", ["complete", "fail"])
def test_an_answer_is_stored_in_the_background_when_the_server_is_back_also_past_the_lease(
    wired: Wired, clock: TurnedClock, script: str
) -> None:
    wire = wired(script)
    r = wire.near.claimed(*ROW, "f")
    wire.proxy.refuse()
    with pytest.raises(LedgerUnavailable):
        getattr(wire.far, script)(r, ANSWER)
    assert wire.names() == ["unavailable"]
    assert not r.held
    clock.turn(LEASE * 2)
    wire.proxy.refuse(False)

    status = {"complete": "completed", "fail": "failed"}[script]
    wait_until(lambda: wire.names()[1:] == [status])
    assert wire.near.claim(*ROW, "f") == Replay(ANSWER, 1, script == "fail")


def test_an_answer_that_comes_too_late_is_fenced_in_the_background_too(wired: Wired, clock: TurnedClock) -> None:
    wire = wired("complete")
    a = wire.near.claimed(*ROW, "f")
    wire.proxy.refuse()
    with pytest.raises(LedgerUnavailable):
        wire.far.complete(a, ANSWER)
    clock.turn(LEASE)
    b = wire.near.claimed(*ROW, "f")
    with unchanged(wire.near, clock):
        wire.proxy.refuse(False)
        wait_until(lambda: wire.names() == ["unavailable", "fenced"])

    assert (b.generation, wire.row()[b"owner"]) == (2, b.owner.encode())


def test_a_release_is_made_in_the_background_when_the_server_is_back(wired: Wired) -> None:
    wire = wired("release")
    r = wire.near.claimed(*ROW, "f")
    wire.proxy.refuse()
    with pytest.raises(LedgerUnavailable):
        wire.far.release(r)
    wire.proxy.refuse(False)

    wait_until(lambda: wire.row()[b"owner"] == b"")
    assert wire.near.claimed(*ROW, "f").generation == 2


@pytest.mark.parametrize("script", ["renew", "checkpoint"])
def test_a_renewal_that_stays_unknown_does_not_end_the_attempt(wired: Wired, script: str) -> None:
    wire = wired(script)
    r = wire.near.claimed(*ROW, "f")
    wire.proxy.drop_replies(2)
    with pytest.raises(LedgerUnavailable):
        getattr(wire.far, script)(*(r, "charged")[: 2 if script == "checkpoint" else 1])
    assert r.held
    wire.far.renew(r)
    wire.far.complete(r, ANSWER)

    assert wire.near.claim(*ROW, "f") == Replay(ANSWER, 1, False)


@pytest.mark.slow
def test_a_completion_that_timed_out_can_be_made_again_with_the_same_token(wired: Wired) -> None:
    wire = wired("complete", socket_timeout=1.0)
    r = wire.far.claimed(*ROW, "f")
    wire.proxy.hold()
    with pytest.raises(LedgerUnavailable) as unavailable:
        wire.far.complete(r, ANSWER)
    assert unavailable.value.unknown
    wire.proxy.hold(False)
    wire.far.complete(r, ANSWER)

    assert wire.near.claim(*ROW, "f") == Replay(ANSWER, 1, False)


def test_a_completion_that_was_lost_on_the_way_can_be_made_again_with_the_same_token(wired: Wired) -> None:
    wire = wired("complete")
    r = wire.far.claimed(*ROW, "f")
    wire.proxy.drop_requests(2)
    with pytest.raises(LedgerUnavailable):
        wire.far.complete(r, ANSWER)
    wire.far.complete(r, ANSWER)

    assert wire.near.claim(*ROW, "f") == Replay(ANSWER, 1, False)


@pytest.mark.slow
@WHOSE
def test_a_server_that_hangs_is_given_up_after_two_timeouts(wired: Wired, ours: bool) -> None:
    wire = wired(ours=ours, socket_timeout=1.0)
    wire.proxy.hold()
    began = time.monotonic()
    with pytest.raises(LedgerUnavailable):
        wire.far.claim(*ROW, "f")

    assert 1.9 < time.monotonic() - began < 5.0
    wire.proxy.hold(False)
    wait_until(lambda: wire.row().get(b"owner") == b"")


# Cancelled


class TestCancelled:
    """Only asyncio has this; a KeyboardInterrupt takes the same way."""

    @pytest.fixture
    def mode(self) -> Mode:
        return "async"

    def test_a_claim_that_is_cancelled_on_its_way_is_released_in_the_background(self, wired: Wired) -> None:
        wire = wired("claim")
        wire.proxy.hold()
        future = wire.far.begin("claim", *ROW, "f")
        wait_until(wire.row)
        assert wire.row()[b"owner"]
        cancel(future)
        wire.proxy.hold(False)

        wait_until(lambda: wire.row()[b"owner"] == b"")
        assert wire.near.claimed(*ROW, "f").generation == 2

    def test_a_completion_that_is_cancelled_on_its_way_can_be_made_again(self, wired: Wired) -> None:
        wire = wired("complete")
        r = wire.far.claimed(*ROW, "f")
        wire.proxy.hold()
        future = wire.far.begin("complete", r, ANSWER)
        wait_until(lambda: wire.row()[b"status"] == b"completed")
        cancel(future)
        wire.proxy.hold(False)
        wire.far.complete(r, ANSWER)

        assert wire.near.claim(*ROW, "f") == Replay(ANSWER, 1, False)

    def test_a_completion_that_is_cancelled_before_it_arrived_is_made_in_the_background(self, wired: Wired) -> None:
        wire = wired("complete", cold=True)
        r = wire.near.claimed(*ROW, "f")
        wire.proxy.hold()
        future = wire.far.begin("complete", r, ANSWER)
        with pytest.raises(concurrent.futures.TimeoutError):
            future.result(0.05)  # it connects, and waits for the answer to its greeting
        assert wire.row()[b"status"] == b"pending"
        cancel(future)
        wire.proxy.hold(False)

        wait_until(lambda: wire.row()[b"status"] == b"completed")

    def test_a_release_that_is_cancelled_on_its_way_is_made_in_the_background(self, wired: Wired) -> None:
        wire = wired("release")
        r = wire.near.claimed(*ROW, "f")
        wire.proxy.hold()
        future = wire.far.begin("release", r)
        wait_until(lambda: wire.row()[b"owner"] == b"")
        cancel(future)
        wire.proxy.hold(False)

        assert wire.near.claimed(*ROW, "f").generation == 2

    def test_a_waiter_that_is_cancelled_leaves_the_row_alone(
        self, make_subject: MakeSubject, real_server: Server, clock: TurnedClock
    ) -> None:
        subject = make_subject("async", real_server)
        r = subject.claimed(*ROW, "f")
        waiter = subject.begin("claim", *ROW, "f", wait=30.0)
        with unchanged(subject, clock):
            cancel(waiter)
            subject.flush()
        subject.complete(r, ANSWER)


def cancel(future: concurrent.futures.Future[Any]) -> None:
    assert future.cancel()
    with pytest.raises((concurrent.futures.CancelledError, asyncio.CancelledError)):
        future.result(5)


# Servers and clients as they come


def test_a_server_that_lost_its_scripts_is_not_noticed(
    make_subject: MakeSubject, mode: Mode, real_server: Server
) -> None:
    subject = make_subject(mode, real_server)

    def forgotten() -> Subject:
        subject.client.script_flush()
        return subject

    a = forgotten().claimed(*ROW, "f")
    forgotten().checkpoint(a, "charged")
    forgotten().renew(a)
    forgotten().release(a)
    b = forgotten().claimed(*ROW, "f")
    with pytest.raises(FencedOut):
        forgotten().complete(a, ANSWER)
    forgotten().complete(b, ANSWER)
    assert forgotten().claim(*ROW, "f") == Replay(ANSWER, 2, False)
    c = forgotten().claimed("acct_1", "key-2", "f")
    forgotten().fail(c, ANSWER)
    assert forgotten().read(*ROW) is not None
    assert len(load().keys() - {"survey"}) == 8  # all but what people's commands alone call


@pytest.mark.parametrize(
    "options", [{"decode_responses": True}, {"protocol": 3}, {"decode_responses": True, "protocol": 3}], ids=str
)
def test_a_client_that_decodes_replies_or_speaks_resp3_gives_the_same(
    make_subject: MakeSubject, mode: Mode, server: AnyServer, clock: TurnedClock, options: dict[str, Any]
) -> None:
    subject = make_subject(mode, server, **options)
    a = subject.claimed("acct_\u00e9", "key-1", "f")
    subject.checkpoint(a, "ch\u00e9", {"a": "\u00e9"})
    clock.turn(LEASE)
    b = subject.claimed("acct_\u00e9", "key-1", "f")
    assert b.last_checkpoint == ("ch\u00e9", {"a": "\u00e9"})
    with pytest.raises(FencedOut):
        subject.renew(a)
    subject.complete(b, ANSWER)

    assert subject.claim("acct_\u00e9", "key-1", "f") == Replay(ANSWER, 2, False)
    row = subject.read("acct_\u00e9", "key-1")
    assert row is not None
    assert (row.response, row.owner, row.last_checkpoint) == (ANSWER, b.owner, b.last_checkpoint)


def test_a_server_that_was_restarted_is_used_again(make_subject: MakeSubject, mode: Mode, real_server: Server) -> None:
    subject = make_subject(mode, real_server, url=real_server.url)
    subject.claimed(*ROW, "f")
    real_server.kill()
    with pytest.raises(LedgerUnavailable):
        subject.claim("acct_1", "key-2", "f")
    real_server.start()

    outcome = subject.claim(*ROW, "f")  # nothing was on disk
    assert isinstance(outcome, Reservation)
