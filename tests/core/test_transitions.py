"""The life of a row: what each transition does, what it refuses, and what it leaves alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import Any, TypeAlias

import pytest

from idemredis import ConfigurationError, FencedOut, InProgress, Policy, Replay, Reservation, Reused, StoredResponse
from idemredis.core import flows, operations
from idemredis.core.keys import identify
from idemredis.core.operations import Call
from idemredis.core.outcomes import Lost, Stale
from idemredis.core.scripts import load
from tests.support.clock import SLACK, TurnedClock, in_progress
from tests.support.servers import Server
from tests.support.subject import AnyServer, MakeSubject, Mode, Subject
from tests.support.waiting import wait_until

LEASE, RETENTION = Policy().lease, Policy().retention
ODD_TTL = 5_000_000
"""Milliseconds that no transition sets, so that one which touches the TTL is found out."""

ANSWER = StoredResponse(201, (("content-type", "application/json"), ("location", "/charges/1")), b'{"id":1}')
OTHER = StoredResponse(500, (("content-type", "text/plain"),), b"other")

Transition: TypeAlias = Callable[[Subject, Reservation], None]

TRANSITIONS: dict[str, Transition] = {
    "complete": lambda subject, r: subject.complete(r, OTHER),
    "fail": lambda subject, r: subject.fail(r, OTHER),
    "release": lambda subject, r: subject.release(r),
    "renew": lambda subject, r: subject.renew(r),
    "checkpoint": lambda subject, r: subject.checkpoint(r, "late", {"late": True}),
}
every_transition = pytest.mark.parametrize("transition", TRANSITIONS.values(), ids=TRANSITIONS)

ROW = ("acct_1", "key-1")


@contextmanager
def unchanged(subject: Subject, name: str) -> Iterator[None]:
    """Neither a field of the row nor its TTL changes within. The row is as old as before, of an odd retention."""
    age = int(subject.fields(name)[b"retention"]) - subject.pttl(name)
    subject.client.hset(name, "retention", ODD_TTL + age)
    subject.client.pexpire(name, ODD_TTL)
    before = subject.fields(name)
    yield
    assert subject.fields(name) == before
    assert ODD_TTL - SLACK * 1000 < subject.pttl(name) <= ODD_TTL


def refused(subject: Subject, r: Reservation, transitions: Iterator[Transition] | None = None) -> None:
    """Each transition of this attempt is fenced out, and the row stays as it is."""
    name = subject.row(*ROW)
    for transition in transitions or iter(TRANSITIONS.values()):
        with unchanged(subject, name), pytest.raises(FencedOut):
            transition(subject, r)
    assert not r.held


def ask(subject: Subject, call: Call[Any]) -> Any:
    """Send one call as a client would that has no ledger."""
    return call.decode(subject.client.eval(load()[call.script].text, 1, call.row, *call.args), time.monotonic())


# The answer


@pytest.mark.parametrize(
    "answer",
    [
        ANSWER,
        StoredResponse(200, (), b""),
        StoredResponse(204),
        StoredResponse(200, (("content-type", "text/plain"),), b"0"),
        StoredResponse(200, (("content-type", "application/json"),), b"null"),
        StoredResponse(200, (("content-type", "application/octet-stream"),), bytes(range(256)) + b"\r\n\x00"),
        StoredResponse(302, (("link", "<a>"), ("Link", "<b>"), ("link", "<a>"), ("x", ""), ("y", "caf\xe9 \t=")), b"x"),
        StoredResponse(599, (("content-type", "x/y"),), b"z" * 300_000),
        StoredResponse(201, omitted="too_large"),
    ],
    ids=["json", "empty", "no_content", "zero", "null", "not_utf8", "repeated_headers", "large", "tombstone"],
)
def test_an_identical_retry_gets_the_stored_answer_to_the_last_byte(subject: Subject, answer: StoredResponse) -> None:
    r = subject.claimed(*ROW, "f")
    subject.complete(r, answer)

    for _ in range(2):
        replay = subject.claim(*ROW, "f")

        assert replay == Replay(answer, generation=1, failed=False)
        assert isinstance(replay, Replay)
        assert (replay.response.status, replay.response.headers) == (answer.status, answer.headers)
        assert replay.response.body == answer.body
        assert type(replay.response.body) is bytes


def test_a_stored_failure_is_replayed_as_one_and_never_run_again(subject: Subject, clock: TurnedClock) -> None:
    r = subject.claimed(*ROW, "f")
    subject.fail(r, ANSWER)

    clock.turn(LEASE * 100)
    assert subject.claim(*ROW, "f") == Replay(ANSWER, generation=1, failed=True)


# The row


def test_a_claim_writes_the_row_that_the_design_names(subject: Subject) -> None:
    r = subject.claimed(*ROW, "f")

    fields = subject.fields(subject.row(*ROW))
    created_at = int(fields.pop(b"created_at")) / 1000
    assert fields == {
        b"status": b"pending",
        b"generation": b"1",
        b"owner": r.owner.encode(),
        b"fingerprint": b"f",
        b"lease": b"%d" % (LEASE * 1000),
        b"retention": b"%d" % (RETENTION * 1000),
    }
    assert abs(created_at - time.time()) < SLACK
    assert about_retention(subject, subject.row(*ROW))
    assert (r.principal, r.key, r.operation, r.fingerprint, r.route) == (*ROW, "", "f", "")
    assert (r.generation, r.taken_over, r.last_checkpoint, r.held) == (1, False, None, True)
    assert len(r.owner) == 16
    int(r.owner, 16)


@pytest.mark.parametrize("status", ["completed", "failed"])
def test_a_finished_row_keeps_what_it_was_claimed_with(subject: Subject, clock: TurnedClock, status: str) -> None:
    r = subject.claimed(*ROW, "f")
    name = subject.row(*ROW)
    claimed = subject.fields(name)
    clock.turn(1.5)
    (subject.complete if status == "completed" else subject.fail)(r, ANSWER)

    assert subject.fields(name) == claimed | {
        b"status": status.encode(),
        b"response_status": b"201",
        b"response_headers": b'[["content-type","application/json"],["location","/charges/1"]]',
        b"response_body": b'{"id":1}',
    }


def test_a_tombstone_has_its_reason_and_an_empty_body(subject: Subject) -> None:
    r = subject.claimed(*ROW, "f")
    subject.complete(r, ANSWER.without_body("not_wanted"))

    fields = subject.fields(subject.row(*ROW))
    assert (fields[b"response_status"], fields[b"response_body"]) == (b"201", b"")
    assert fields[b"response_omitted"] == b"not_wanted"


def test_a_row_is_read_back_as_it_is_and_reading_changes_nothing(subject: Subject, clock: TurnedClock) -> None:
    assert subject.read(*ROW) is None
    r = subject.claimed(*ROW, "f")
    subject.checkpoint(r, "charged", {"charge": "ch_1"})
    clock.turn(10)
    with unchanged(subject, subject.row(*ROW)):
        pending = subject.read(*ROW)
    assert pending is not None
    assert (pending.status, pending.generation, pending.owner, pending.fingerprint) == ("pending", 1, r.owner, "f")
    assert (pending.lease, pending.stale, pending.route) == (LEASE, False, "")
    assert 10 <= pending.age < 10 + SLACK
    assert LEASE - 10 - SLACK < pending.lease_left <= LEASE - 10
    assert pending.ttl is not None
    assert pending.created_at is not None
    assert abs(pending.created_at - time.time()) < SLACK
    assert (pending.response, pending.last_checkpoint) == (None, ("charged", {"charge": "ch_1"}))
    assert pending.identity == r.identity

    clock.turn(LEASE)
    with unchanged(subject, subject.row(*ROW)):
        stale = subject.read(*ROW)
    assert stale is not None
    assert (stale.status, stale.stale) == ("pending", True)
    assert -10 - SLACK < stale.lease_left <= -10

    subject.complete(r, ANSWER)
    with unchanged(subject, subject.row(*ROW)):
        finished = subject.read(*ROW)
    assert finished is not None
    assert (finished.status, finished.response, finished.lease_left) == ("completed", ANSWER, 0.0)
    assert finished.body_bytes == len(ANSWER.body)
    assert finished.age < SLACK


@pytest.mark.parametrize(
    ("route", "stored"),
    [
        ("POST /orders/<id>", "POST /orders/<id>"),
        ("shop.billing.send_invoice", "shop.billing.send_invoice"),
        ("x" * 64, "x" * 64),
        ("POST /" + "a" * 60 + "/refunds", "POST /" + "a" * 24 + "..." + "a" * 22 + "/refunds"),
    ],
    ids=["rule", "function", "longest", "longer"],
)
def test_a_row_says_which_route_it_belongs_to(subject: Subject, route: str, stored: str) -> None:
    r = subject.claimed(*ROW, "f", route=route)
    assert subject.fields(r.identity.row)[b"route"].decode() == r.route == stored
    assert len(stored.encode()) <= 64
    subject.claim(*ROW, "f", route="POST /elsewhere")
    subject.complete(r, ANSWER)
    assert subject.claim(*ROW, "f", route="POST /elsewhere") == Replay(ANSWER, 1, False)

    row = subject.read(*ROW)
    assert row is not None
    assert row.route == stored


def test_two_identities_never_share_a_row(subject: Subject) -> None:
    identities = [
        ("a", "b:c", ""),
        ("a:b", "c", ""),
        ("a", "c", "b"),
        ("a", "b", "c"),
        ("a", "b", ""),
        ("A", "b", ""),
        ("a", "B", ""),
        ("a", " b", ""),
        ("a ", "b", ""),
        ("a%3Ab", "c", ""),
        ("a", "b%3Ac", ""),
        ("a", "{b}", ""),
        ("a", "b:result", ""),
    ]
    owners = {subject.claimed(who, key, "f", operation=what).owner for who, key, what in identities}

    assert len(owners) == len(identities)
    names = {subject.row(*identity) for identity in identities}
    assert set(map(str.encode, names)) == set(subject.client.keys())
    assert len(names) == len(identities)


def test_two_namespaces_never_share_a_row(make_subject: MakeSubject, mode: Mode, server: AnyServer) -> None:
    subjects = [make_subject(mode, server, namespace=namespace) for namespace in ("a", "b", "a:b")]

    assert all(isinstance(subject.claim(*ROW, "f"), Reservation) for subject in subjects)


# Who gets the row


def test_a_running_attempt_is_reported_with_the_time_left(subject: Subject, clock: TurnedClock) -> None:
    subject.claimed(*ROW, "f")
    assert in_progress(subject.claim(*ROW, "f"), 30.0)

    clock.turn(12.345)
    assert in_progress(subject.claim(*ROW, "f"), 17.655)


def claim_at(subject: Subject, age: int) -> object:
    """Claim the row when it is so many milliseconds old, as its TTL says before and after the claim."""
    call = operations.claim(identify(subject.namespace, *ROW), "another", "f", LEASE, RETENTION, 0.0, "")
    ttl = int(RETENTION * 1000) - age

    def asked() -> object:
        with subject.client.pipeline() as transaction:
            transaction.pexpire(call.row, ttl)
            transaction.eval(load()["claim"].text, 1, call.row, *call.args)
            transaction.pttl(call.row)
            _, reply, left = transaction.execute()
        return call.decode(reply, time.monotonic()) if left == ttl else None

    return wait_until(asked)


def test_a_lease_goes_stale_on_the_millisecond_it_ends(subject: Subject) -> None:
    subject.claimed(*ROW, "f", lease=2.5)

    assert claim_at(subject, 0) == InProgress(2.5)
    assert claim_at(subject, 2499) == InProgress(0.001)
    assert claim_at(subject, 2500) == Stale(1)
    assert claim_at(subject, 2501) == Stale(1)


def test_a_server_clock_that_steps_back_makes_no_lease_longer(subject: Subject, clock: TurnedClock) -> None:
    """The TTL is then longer than the retention."""
    r = subject.claimed(*ROW, "f")
    clock.turn(-3600)
    assert in_progress(subject.claim(*ROW, "f"), 30.0)
    row = subject.read(*ROW)
    assert row is not None
    assert (row.age, row.lease_left) == (0.0, LEASE)

    subject.release(r)
    clock.turn(-3600)
    assert subject.claimed(*ROW, "f").generation == 2


def test_a_takeover_writes_the_new_attempt_and_keeps_the_rest(subject: Subject, clock: TurnedClock) -> None:
    subject.claimed(*ROW, "f")
    name = subject.row(*ROW)
    claimed = subject.fields(name)
    clock.turn(LEASE)
    second = subject.claimed(*ROW, "f", lease=7)

    assert subject.fields(name) == claimed | {
        b"generation": b"2",
        b"owner": second.owner.encode(),
        b"lease": b"7000",
    }
    assert about_retention(subject, name)


def test_each_takeover_adds_one_to_the_generation(subject: Subject, clock: TurnedClock) -> None:
    generations = []
    for _ in range(12):
        generations.append(subject.claimed(*ROW, "f").generation)
        clock.turn(LEASE)

    assert generations == list(range(1, 13))


def test_a_stale_row_is_left_to_others_when_the_caller_says_so(subject: Subject, clock: TurnedClock) -> None:
    subject.claimed(*ROW, "f")
    clock.turn(LEASE + 5)

    with unchanged(subject, subject.row(*ROW)):
        assert subject.claim(*ROW, "f", takeover=False) == InProgress(0.0, stale=True)


def test_a_loser_changes_nothing_of_the_row_or_its_ttl(subject: Subject, clock: TurnedClock) -> None:
    r = subject.claimed(*ROW, "f")
    name = subject.row(*ROW)
    clock.turn(1)
    with unchanged(subject, name):
        assert in_progress(subject.claim(*ROW, "f", lease=77), 29.0)
        assert subject.claim(*ROW, "g", lease=77) == Reused()
    subject.complete(r, ANSWER)
    clock.turn(1)
    with unchanged(subject, name):
        assert isinstance(subject.claim(*ROW, "f", lease=77), Replay)
        assert subject.claim(*ROW, "g", lease=77) == Reused()


STATES: dict[str, Callable[[Subject, TurnedClock, Reservation], object]] = {
    "pending": lambda subject, clock, r: None,
    "stale": lambda subject, clock, r: clock.turn(LEASE),
    "released": lambda subject, clock, r: subject.release(r),
    "completed": lambda subject, clock, r: subject.complete(r, ANSWER),
    "failed": lambda subject, clock, r: subject.fail(r, ANSWER),
}


@pytest.mark.parametrize("reach", STATES.values(), ids=STATES)
@pytest.mark.parametrize("takeover", [True, False], ids=["takeover", "no_takeover"])
def test_another_fingerprint_is_told_reused_and_nothing_else(
    subject: Subject, clock: TurnedClock, reach: Callable[[Subject, TurnedClock, Reservation], object], takeover: bool
) -> None:
    r = subject.claimed(*ROW, "f")
    reach(subject, clock, r)

    with unchanged(subject, subject.row(*ROW)):
        assert subject.claim(*ROW, "another", takeover=takeover) == Reused()
        assert subject.claim(*ROW, "F", takeover=takeover) == Reused()


def test_a_takeover_of_a_row_that_is_not_stale_any_more_loses(subject: Subject, clock: TurnedClock) -> None:
    """Between its look and its takeover, another attempt completed, took over, renewed, or asked for something else."""
    identity = identify(subject.namespace, *ROW)
    late = operations.takeover(identity, 1, "owner-of-late", "f", LEASE, RETENTION, "")

    first = subject.claimed(*ROW, "f")
    with unchanged(subject, identity.row):
        assert ask(subject, late) == Lost()  # it was never stale
    subject.complete(first, ANSWER)
    clock.turn(LEASE)
    with unchanged(subject, identity.row):
        assert ask(subject, late) == Lost()  # it is finished
    subject.client.delete(identity.row)
    assert ask(subject, late) == Lost()  # it is gone
    assert subject.fields(identity.row) == {}

    subject.claimed(*ROW, "g")
    clock.turn(LEASE)
    with unchanged(subject, identity.row):
        assert ask(subject, late) == Lost()  # it was claimed for something else
    subject.client.delete(identity.row)
    subject.claimed(*ROW, "f")
    clock.turn(LEASE)
    subject.claimed(*ROW, "f")
    clock.turn(LEASE)
    with unchanged(subject, identity.row):
        assert ask(subject, late) == Lost()  # it is stale, but at a later generation


def test_a_caller_that_loses_every_race_is_told_that_the_row_is_stale() -> None:
    identity = identify("idem", *ROW)
    flow = flows.claim(identity, "me", "f", lease=30, wait=0, takeover=True, policy=Policy(), created_at=0, route="")
    asked = []
    step: Any = next(flow)
    while isinstance(step, operations.Call):
        asked.append(step.script)
        step = flow.send(Stale(7) if step.script == "claim" else Lost())
    assert step == flows.Emit("in_progress", identity)
    with pytest.raises(StopIteration) as end:
        flow.send(None)

    assert end.value.value == InProgress(0.0, stale=True)
    assert asked == ["claim", "takeover"] * 3


# The fence


def test_a_stalled_owner_is_fenced_out_and_the_row_stays_what_its_successor_wrote(
    subject: Subject, clock: TurnedClock
) -> None:
    a = subject.claimed(*ROW, "f")
    assert a.generation == 1
    clock.turn(LEASE)
    b = subject.claimed(*ROW, "f")
    assert b.generation == 2
    refused(subject, a)

    subject.complete(b, ANSWER)
    refused(subject, a)

    assert subject.claim(*ROW, "f") == Replay(ANSWER, generation=2, failed=False)


def test_a_late_owner_that_nobody_replaced_may_still_finish(subject: Subject, clock: TurnedClock) -> None:
    a = subject.claimed(*ROW, "f")
    clock.turn(LEASE * 3)
    subject.complete(a, ANSWER)

    assert subject.claim(*ROW, "f") == Replay(ANSWER, generation=1, failed=False)


@pytest.mark.parametrize("how", ["deleted", "expired"])
def test_the_owner_of_a_row_that_is_gone_cannot_touch_the_one_claimed_anew(subject: Subject, how: str) -> None:
    a = subject.claimed(*ROW, "f")
    name = subject.row(*ROW)
    lose(subject, name, how)
    for transition in TRANSITIONS.values():
        with pytest.raises(FencedOut):
            transition(subject, a)
        assert subject.client.exists(name) == 0
    b = subject.claimed(*ROW, "f")
    assert b.generation == a.generation == 1
    refused(subject, a)

    subject.complete(b, ANSWER)
    refused(subject, a)


def lose(subject: Subject, name: str, how: str) -> None:
    if how == "deleted":
        subject.client.delete(name)
    else:
        subject.client.pexpire(name, 1)
        wait_until(lambda: not subject.client.exists(name))


def test_an_answer_stored_twice_is_the_first_one(subject: Subject) -> None:
    r = subject.claimed(*ROW, "f")
    subject.complete(r, ANSWER)
    stored = subject.fields(subject.row(*ROW))
    subject.complete(r, ANSWER)
    subject.complete(r, OTHER)

    assert subject.fields(subject.row(*ROW)) == stored


def test_a_failure_stored_twice_is_the_first_one(subject: Subject) -> None:
    r = subject.claimed(*ROW, "f")
    subject.fail(r, ANSWER)
    stored = subject.fields(subject.row(*ROW))
    subject.fail(r, OTHER)

    assert subject.fields(subject.row(*ROW)) == stored


@pytest.mark.parametrize("first", ["complete", "fail"])
def test_a_finished_attempt_can_only_finish_again_in_the_same_way(subject: Subject, first: str) -> None:
    r = subject.claimed(*ROW, "f")
    TRANSITIONS[first](subject, r)

    refused(subject, r, iter(transition for name, transition in TRANSITIONS.items() if name != first))


def test_a_released_row_is_taken_over_at_once(subject: Subject, clock: TurnedClock) -> None:
    a = subject.claimed(*ROW, "f")
    claimed = subject.fields(subject.row(*ROW))
    clock.turn(1)
    subject.release(a)
    assert subject.fields(subject.row(*ROW)) == claimed | {b"owner": b"", b"lease": b"0"}
    assert about_retention(subject, subject.row(*ROW))
    assert not a.held

    b = subject.claimed(*ROW, "f")
    assert b.generation == 2
    refused(subject, a)


def test_a_release_asked_again_answers_the_same(subject: Subject, clock: TurnedClock) -> None:
    r = subject.claimed(*ROW, "f")
    subject.release(r)
    released = subject.fields(subject.row(*ROW))
    clock.turn(1)
    subject.release(r)

    assert subject.fields(subject.row(*ROW)) == released
    refused(subject, r, iter(transition for name, transition in TRANSITIONS.items() if name != "release"))


def test_a_claim_asked_again_by_its_owner_is_still_its_own(subject: Subject, clock: TurnedClock) -> None:
    identity = identify(subject.namespace, *ROW)
    claim = operations.claim(identity, "0123456789abcdef", "f", LEASE, RETENTION, 0.0, "")
    first = ask(subject, claim)
    assert isinstance(first, Reservation)
    subject.checkpoint(first, "charged", 1)
    before = subject.fields(identity.row)
    clock.turn(LEASE - 1)
    again = ask(subject, claim)

    assert isinstance(again, Reservation)
    assert (again.generation, again.owner, again.last_checkpoint) == (1, first.owner, ("charged", 1))
    assert subject.fields(identity.row) == before
    assert about_retention(subject, identity.row)


def test_a_takeover_asked_again_by_its_winner_is_still_its_own(subject: Subject, clock: TurnedClock) -> None:
    subject.claimed(*ROW, "f")
    clock.turn(LEASE)
    identity = identify(subject.namespace, *ROW)
    takeover = operations.takeover(identity, 1, "0123456789abcdef", "f", LEASE, RETENTION, "")
    for _ in range(2):
        r = ask(subject, takeover)

        assert isinstance(r, Reservation)
        assert (r.generation, r.owner) == (2, "0123456789abcdef")
        fields = subject.fields(identity.row)
        assert (fields[b"generation"], fields[b"owner"]) == (b"2", r.owner.encode())
        assert fields[b"lease"] == b"%d" % (LEASE * 1000)
        assert about_retention(subject, identity.row)
        clock.turn(10)


@pytest.mark.parametrize(("field", "value"), [("generation", b"2"), ("generation", b"01"), ("owner", b"another")])
def test_the_fence_is_the_generation_and_the_owner(subject: Subject, field: str, value: bytes) -> None:
    r = subject.claimed(*ROW, "f")
    subject.client.hset(r.identity.row, field, value)

    refused(subject, r)


def test_a_release_asked_again_after_a_later_attempt_released_too_is_fenced(subject: Subject) -> None:
    a = subject.claimed(*ROW, "f")
    subject.release(a)
    subject.release(subject.claimed(*ROW, "f"))

    refused(subject, a)


# Leases, checkpoints and retention


def test_renewing_begins_the_lease_anew(subject: Subject, clock: TurnedClock) -> None:
    r = subject.claimed(*ROW, "f", lease=10)
    before = subject.fields(subject.row(*ROW))
    clock.turn(9.999)
    subject.renew(r)

    assert subject.fields(subject.row(*ROW)) == before
    assert in_progress(subject.claim(*ROW, "f"), 10.0)


def test_a_renewal_that_changes_neither_lease_nor_retention_writes_the_ttl_alone(
    make_subject: MakeSubject, mode: Mode, real_server: Server
) -> None:
    subject = make_subject(mode, real_server)
    r = subject.claimed(*ROW, "f")
    subject.client.config_resetstat()
    subject.renew(r)
    calls = {name: each["calls"] for name, each in subject.client.info("commandstats").items()}
    assert (calls["cmdstat_pexpire"], calls.get("cmdstat_hset", 0)) == (1, 0)

    longer = make_subject(mode, real_server, policy=Policy(retention=RETENTION * 2))
    longer.renew(r)
    assert subject.fields(r.identity.row)[b"retention"] == b"%d" % (RETENTION * 2000)
    assert about_retention(subject, r.identity.row, RETENTION * 2)
    assert in_progress(subject.claim(*ROW, "f"), LEASE)


def test_a_checkpoint_is_noted_and_extends_the_lease(subject: Subject, clock: TurnedClock) -> None:
    r = subject.claimed(*ROW, "f")
    before = subject.fields(subject.row(*ROW))
    clock.turn(20)
    subject.checkpoint(r, "charged", {"charge": "ch_1"})

    assert subject.fields(subject.row(*ROW)) == before | {
        b"checkpoint": b"charged",
        b"checkpoint_data": b'{"charge":"ch_1"}',
        b"checkpoint_seq": b"1",
    }
    assert in_progress(subject.claim(*ROW, "f"), LEASE)


@pytest.mark.parametrize("data", [None, {}, 0, "", [1, {"a": None}], "\u00e9\U0001f600", 1.5], ids=repr)
def test_the_last_checkpoint_reaches_the_next_owner(subject: Subject, clock: TurnedClock, data: object) -> None:
    a = subject.claimed(*ROW, "f")
    subject.checkpoint(a, "first")
    subject.checkpoint(a, "second", data)
    clock.turn(LEASE)
    b = subject.claimed(*ROW, "f")
    assert b.last_checkpoint == ("second", data)

    subject.checkpoint(b, "third", "of b")
    subject.release(b)
    assert subject.claimed(*ROW, "f").last_checkpoint == ("third", "of b")


def test_a_checkpoint_that_comes_late_does_not_replace_a_later_one(subject: Subject, clock: TurnedClock) -> None:
    r = subject.claimed(*ROW, "f")
    early = operations.checkpoint(r, "early", "1", RETENTION)
    subject.checkpoint(r, "later", 2)
    clock.turn(5)
    ask(subject, early)

    fields = subject.fields(early.row)
    assert (fields[b"checkpoint"], fields[b"checkpoint_data"], fields[b"checkpoint_seq"]) == (b"later", b"2", b"2")
    assert in_progress(subject.claim(*ROW, "f"), LEASE)


def test_a_checkpoint_holds_4096_bytes_of_json_and_not_one_more(subject: Subject) -> None:
    r = subject.claimed(*ROW, "f")
    subject.checkpoint(r, "full", "x" * 4094)
    with unchanged(subject, subject.row(*ROW)):
        with pytest.raises(ConfigurationError, match="4097 bytes"):
            subject.checkpoint(r, "over", "x" * 4095)
        with pytest.raises(ConfigurationError, match="4096"):
            subject.checkpoint(r, "over", "\u00e9" * 1000)


@pytest.mark.parametrize(
    "data", [float("nan"), float("inf"), object(), {1, 2}, b"bytes"], ids=lambda d: type(d).__name__
)
def test_a_checkpoint_that_is_not_json_is_refused(subject: Subject, data: object) -> None:
    r = subject.claimed(*ROW, "f")
    with unchanged(subject, subject.row(*ROW)), pytest.raises((TypeError, ValueError)):
        subject.checkpoint(r, "charged", data)


def about_retention(subject: Subject, name: str, retention: float = RETENTION) -> bool:
    return retention * 1000 - 5000 < subject.pttl(name) <= retention * 1000


@every_transition
def test_every_transition_begins_the_retention_anew(subject: Subject, transition: Transition) -> None:
    r = subject.claimed(*ROW, "f")
    name = subject.row(*ROW)
    assert about_retention(subject, name)
    for _ in range(2):  # also when it is asked again
        subject.client.pexpire(name, ODD_TTL)
        transition(subject, r)
        assert about_retention(subject, name)


@every_transition
def test_every_transition_writes_the_retention_that_it_gives(
    make_subject: MakeSubject, mode: Mode, server: AnyServer, transition: Transition
) -> None:
    """The TTL without its field would move the end of the lease."""
    subject, longer = make_subject(mode, server), make_subject(mode, server, policy=Policy(retention=RETENTION * 2))
    r = subject.claimed(*ROW, "f")
    for other, retention in ((longer, RETENTION * 2), (subject, RETENTION)):  # the second asks again
        transition(other, r)
        assert subject.fields(r.identity.row)[b"retention"] == b"%d" % (retention * 1000)
        assert about_retention(subject, r.identity.row, retention)


def test_a_takeover_near_the_end_of_retention_does_not_expire_in_mid_run(subject: Subject, clock: TurnedClock) -> None:
    subject.claimed(*ROW, "f")
    clock.turn(RETENTION - 20)
    subject.claimed(*ROW, "f")

    assert about_retention(subject, subject.row(*ROW))


@pytest.mark.parametrize("retention", [10.0, 0.5 * 86400, 10 * 366 * 86400.0], ids=["seconds", "half_day", "ten_years"])
def test_a_row_lives_for_its_retention_in_every_state(
    make_subject: MakeSubject, mode: Mode, server: AnyServer, retention: float
) -> None:
    subject = make_subject(mode, server, policy=Policy(lease=0.5, retention=retention))
    r = subject.claimed(*ROW, "f")
    assert about_retention(subject, subject.row(*ROW), retention)
    subject.complete(r, ANSWER)
    assert about_retention(subject, subject.row(*ROW), retention)


def test_a_row_past_its_retention_is_claimed_anew(
    make_subject: MakeSubject, mode: Mode, server: AnyServer, clock: TurnedClock
) -> None:
    subject = make_subject(mode, server, policy=Policy(retention=100.0))
    subject.complete(subject.claimed(*ROW, "f"), ANSWER)
    clock.turn(100.0 - SLACK)
    assert subject.claim(*ROW, "g") == Reused()
    clock.turn(SLACK)

    assert subject.claimed(*ROW, "g").generation == 1


def test_the_clock_of_the_caller_decides_nothing(
    make_subject: MakeSubject, mode: Mode, real_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = make_subject(mode, real_server)
    right.claimed(*ROW, "f")
    for off in (-7200, 7200):
        now = time.time() + off
        monkeypatch.setattr(time, "time", lambda now=now: now)
        monkeypatch.setattr(time, "time_ns", lambda now=now: int(now * 1e9))
        wrong = make_subject(mode, real_server)
        assert in_progress(wrong.claim(*ROW, "f"), LEASE)
        wrong.claimed("acct_1", f"key{off}", "f")
        assert in_progress(right.claim("acct_1", f"key{off}", "f"), LEASE)
        assert about_retention(wrong, wrong.row("acct_1", f"key{off}"))
        monkeypatch.undo()


# Waiting


def test_a_waiting_duplicate_gets_the_answer_when_it_is_there(
    make_subject: MakeSubject, mode: Mode, server: AnyServer
) -> None:
    subject = make_subject(mode, server)
    r = subject.claimed(*ROW, "f")
    waiter = subject.begin("claim", *ROW, "f", wait=10.0)
    other = subject.begin("claim", *ROW, "g", wait=10.0)
    assert other.result(5) == Reused()
    assert not waiter.done()
    subject.complete(r, ANSWER)

    assert waiter.result(5) == Replay(ANSWER, 1, False)


def test_a_waiting_duplicate_runs_at_once_when_the_owner_releases(
    make_subject: MakeSubject, mode: Mode, server: AnyServer
) -> None:
    subject = make_subject(mode, server)
    r = subject.claimed(*ROW, "f")
    waiter = subject.begin("claim", *ROW, "f", wait=10.0)
    subject.release(r)
    outcome = waiter.result(5)

    assert isinstance(outcome, Reservation)
    assert outcome.generation == 2


def test_waiting_ends_when_its_time_is_over(make_subject: MakeSubject, mode: Mode, server: AnyServer) -> None:
    subject = make_subject(mode, server)
    subject.claimed(*ROW, "f")
    began = time.monotonic()
    outcome = subject.claim(*ROW, "f", wait=0.15)

    assert isinstance(outcome, InProgress)
    assert 0.15 <= time.monotonic() - began < 2


def test_the_downstream_key_is_the_same_for_every_generation_and_differs_by_all_else(
    subject: Subject, clock: TurnedClock
) -> None:
    a = subject.claimed(*ROW, "f")
    clock.turn(LEASE)
    b = subject.claimed(*ROW, "f")
    assert a.downstream_key("stripe") == b.downstream_key("stripe")

    others = [
        a.downstream_key("stripe"),
        a.downstream_key("adyen"),
        subject.claimed("acct_2", "key-1", "f").downstream_key("stripe"),
        subject.claimed("acct_1", "key-2", "f").downstream_key("stripe"),
        subject.claimed(*ROW, "f", operation="charge").downstream_key("stripe"),
    ]
    assert all(one != other for one, other in combinations(others, 2))
    assert all("acct_1" not in key and "key-1" not in key for key in others)
