"""What a call costs the server, counted by the server; and what a full one still serves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from idemredis import InProgress, LedgerUnavailable, Policy, Replay, Reservation, Reused, StoredResponse
from idemredis.core.scripts import load
from tests.support.clock import TurnedClock, in_progress
from tests.support.servers import Server
from tests.support.subject import MakeSubject, Mode, Subject

ROW = ("acct_1", "key-1")
LEASE = Policy().lease
ANSWER = StoredResponse(201, (("content-type", "text/plain"),), b"done")


@pytest.fixture
def warm(make_subject: MakeSubject, mode: Mode, real_server: Server) -> Subject:
    """A ledger that is connected, to a server that knows the scripts."""
    subject = make_subject(mode, real_server)
    for script in load().values():
        subject.client.script_load(script.text)
    subject.read(*ROW)
    return subject


class Counted:
    """The commands that a server ran, those within scripts included."""

    def __init__(self, client: Any) -> None:
        self._client = client
        client.config_resetstat()

    def __call__(self) -> dict[str, int]:
        stats = self._client.info("commandstats")
        calls = {name.removeprefix("cmdstat_"): figures["calls"] for name, figures in stats.items()}
        self._client.config_resetstat()
        return {name: count for name, count in calls.items() if name not in ("info", "config|resetstat")}


def sent(calls: dict[str, int]) -> dict[str, int]:
    """What came over the wire: the others are what the scripts run."""
    return {name: calls[name] for name in calls if name not in ("hmget", "hset", "pexpire", "pttl", "del")}


def test_a_first_run_costs_two_round_trips_and_a_replay_or_a_refusal_one(warm: Subject) -> None:
    counted = Counted(warm.client)

    r = warm.claimed(*ROW, "f")
    assert sent(counted()) == {"evalsha": 1}
    assert isinstance(warm.claim(*ROW, "f"), InProgress)
    assert sent(counted()) == {"evalsha": 1}
    assert warm.claim(*ROW, "g") == Reused()
    assert sent(counted()) == {"evalsha": 1}
    warm.complete(r, ANSWER)
    assert sent(counted()) == {"evalsha": 1}
    assert warm.claim(*ROW, "f") == Replay(ANSWER, 1, False)
    assert sent(counted()) == {"evalsha": 1}
    r = warm.claimed("acct_1", "key-2", "f")
    counted()
    warm.renew(r)
    assert sent(counted()) == {"evalsha": 1}
    warm.checkpoint(r, "charged")
    assert sent(counted()) == {"evalsha": 1}
    warm.release(r)
    assert sent(counted()) == {"evalsha": 1}
    assert warm.read(*ROW) is not None
    assert sent(counted()) == {"evalsha": 1}


def test_a_takeover_costs_two_round_trips(warm: Subject, clock: TurnedClock) -> None:
    warm.claimed(*ROW, "f")
    clock.turn(LEASE)
    counted = Counted(warm.client)
    assert warm.claimed(*ROW, "f").generation == 2

    assert sent(counted()) == {"evalsha": 2}


def test_a_script_that_the_server_has_not_seen_costs_one_more(warm: Subject) -> None:
    warm.client.script_flush()
    counted = Counted(warm.client)
    warm.claimed(*ROW, "f")

    assert sent(counted()) == {"evalsha": 1, "ping": 1, "eval": 1}  # the PING proves that the error is this call's own


def test_a_replay_a_refusal_and_a_read_write_nothing(warm: Subject) -> None:
    r = warm.claimed(*ROW, "f")
    counted = Counted(warm.client)
    warm.claim(*ROW, "f")
    warm.claim(*ROW, "g")
    warm.read(*ROW)
    assert set(counted()) == {"evalsha", "hmget", "pttl"}
    warm.complete(r, ANSWER)
    counted()
    warm.claim(*ROW, "f")
    warm.claim(*ROW, "g")
    warm.read(*ROW)
    assert set(counted()) == {"evalsha", "hmget", "pttl"}


@pytest.fixture
def full(warm: Subject) -> Iterator[Subject]:
    """The server is made full by `full.client.config_set("maxmemory", 1)`, and has room again afterwards."""
    warm.client.config_set("maxmemory-policy", "noeviction")
    yield warm
    warm.client.config_set("maxmemory", 0)


def test_a_full_server_refuses_claims_and_takeovers_and_writes_nothing(full: Subject, clock: TurnedClock) -> None:
    stale = full.claimed("acct_1", "stale", "f").identity.row
    clock.turn(LEASE)
    before, left = full.fields(stale), full.pttl(stale)
    full.client.config_set("maxmemory", 1)

    for key in ("key-1", "stale"):
        with pytest.raises(LedgerUnavailable, match="it did not run") as refused:
            full.claim("acct_1", key, "f")
        assert not refused.value.unknown
    assert full.fields(stale) == before
    assert full.pttl(stale) <= left
    assert full.client.dbsize() == 1


def test_a_full_server_stores_what_already_ran_and_answers_what_is_there(full: Subject) -> None:
    r = {
        key: full.claimed("acct_1", key, "f") for key in ("complete", "fail", "release", "renew", "checkpoint", "busy")
    }
    full.complete(full.claimed("acct_1", "done", "f"), ANSWER)
    full.client.config_set("maxmemory", 1)

    full.checkpoint(r["checkpoint"], "charged", {"charge": "ch_1"})
    full.renew(r["renew"])
    full.complete(r["complete"], ANSWER)
    full.fail(r["fail"], ANSWER)
    full.release(r["release"])
    assert full.claim("acct_1", "complete", "f") == Replay(ANSWER, 1, False)
    assert full.claim("acct_1", "fail", "f") == Replay(ANSWER, 1, True)
    assert full.claim("acct_1", "done", "f") == Replay(ANSWER, 1, False)
    assert in_progress(full.claim("acct_1", "busy", "f"), LEASE)
    assert full.claim("acct_1", "busy", "g") == Reused()
    assert full.claim("acct_1", "release", "f", takeover=False) == InProgress(0.0, stale=True)
    row = full.read("acct_1", "checkpoint")
    assert row is not None
    assert row.last_checkpoint == ("charged", {"charge": "ch_1"})

    full.client.config_set("maxmemory", 0)
    assert isinstance(full.claim("acct_1", "release", "f"), Reservation)


def test_a_pending_row_stays_small(warm: Subject) -> None:
    """A value of more than 64 bytes would turn the row into a hash table of twice the size."""
    warm.claimed("acct_1", "8e03978e-40d5-43dd-bc93-6894a57f9324", "f" * 64)
    name = warm.row("acct_1", "8e03978e-40d5-43dd-bc93-6894a57f9324")

    assert warm.client.object("encoding", name) == b"listpack"
    assert warm.client.memory_usage(name) < 500
