"""`ls` and `stats` look at every row, show those that need attention most, and need little for it."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from idemredis import Ledger, Policy, Reservation, StoredResponse
from idemredis.core.response import OMISSIONS
from idemredis.events import digest
from idemredis.inspection import rows, survey
from idemredis.inspection.rows import STATUSES
from idemredis.store.nodes import holder
from tests.support.place import Place, Run
from tests.support.servers import Server

ANSWER = StoredResponse(201, (("content-type", "application/json"), ("location", "/orders/1")), b'{"paid": true}')

MANY = 20_000

FILL = """
for i = ARGV[1], ARGV[2] do
  local row = KEYS[1] .. ':acct_' .. (i % 100) .. ':8e03978e-40d5-43dd-bc93-' .. string.format('%012x', i)
  redis.call('HSET', row, 'status', 'completed', 'generation', '1', 'owner', '0123456789abcdef', 'fingerprint',
    string.rep('a', 64), 'lease', '30000', 'retention', '600000', 'created_at', ARGV[3], 'response_status', '201',
    'response_headers', '[["content-type","application/json"],["location","/orders/' .. i .. '"]]',
    'response_body', '{}')
  redis.call('PEXPIRE', row, 600000 - i % 1000)
end
"""


def fill(client: Any, namespace: str, many: int) -> None:
    created_at = str(time.time_ns() // 1_000_000)
    for first in range(0, many, 2000):
        client.eval(FILL, 1, namespace, first, min(first + 2000, many) - 1, created_at)


def claimed(ledger: Ledger, key: str, **options: Any) -> Reservation:
    outcome = ledger.claim("acct", key, "f", **options)
    assert isinstance(outcome, Reservation)
    return outcome


def died(ledger: Ledger, key: str) -> Reservation:
    r = claimed(ledger, key, lease=0.001)
    ledger.claim("acct", key, "f", wait=5.0, takeover=False)
    return r


@pytest.fixture
def full(real_server: Server, namespace: str) -> Iterator[tuple[Any, Ledger]]:
    """A server with many finished rows of one ledger, and as many keys of others."""
    with real_server.client(socket_timeout=30.0) as client:
        fill(client, namespace, MANY)
        fill(client, "other", MANY // 2)
        ledger = Ledger(client, Policy(heartbeat=False), namespace)
        yield client, ledger
        ledger.close()
        client.flushall()


@pytest.mark.slow
def test_ten_stuck_rows_among_many_are_what_is_shown_the_worst_first(
    full: tuple[Any, Ledger], real_server: Server, namespace: str
) -> None:
    client, ledger = full
    dead = [died(ledger, f"died-{i}").row for i in range(3)]
    given_up = [claimed(ledger, f"released-{i}") for i in range(2)]
    for r in given_up:
        ledger.release(r)
    running = claimed(ledger, "running").row
    overdue = [claimed(ledger, f"overdue-{i}").row for i in range(2)]
    for row in overdue:
        client.hset(row, "created_at", str(round(time.time() - 3600) * 1000))
    broken = [claimed(ledger, f"broken-{i}").row for i in range(2)]
    client.hset(broken[0], "status", "perhaps")
    client.hset(broken[1], mapping={"status": "completed", "response_status": "201", "response_body": "x"})
    client.hset(broken[1], "response_headers", '[["content-type",5]]')  # what only its reader can tell

    client.config_resetstat()
    tracemalloc.start()
    listing = survey.worst(client, namespace, limit=10)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    shown = [row.identity.row for row in listing.rows]
    assert [set(shown[:2]), set(shown[2:5]), set(shown[5:7]), set(shown[7:9]), set(shown[9:])] == [
        set(broken),
        set(dead),
        set(overdue),
        {r.row for r in given_up},
        {running},
    ]
    assert [row.status for row in listing.rows] == ["corrupt"] * 2 + ["stale"] * 3 + ["pending"] * 2 + [
        "released"
    ] * 2 + ["pending"]
    assert listing.counts == {
        "corrupt": 2,
        "stale": 3,
        "released": 2,
        "pending": 3,
        "failed": 0,
        "completed": MANY,
    }
    assert peak < 2_000_000  # a summary of each row would take tens of megabytes
    used: Any = client.info("commandstats")
    assert used["cmdstat_evalsha"]["calls"] < MANY / survey.BATCH * 1.5
    assert used["cmdstat_scan"]["calls"] < MANY * 1.5 / rows.SCAN_COUNT * 1.5

    few = survey.worst(client, namespace, limit=4)
    assert {row.identity.row for row in few.rows[:2]} == set(broken)
    assert {row.identity.row for row in few.rows[2:]} < set(dead)
    assert few.counts == listing.counts

    totals = survey.stats(client, namespace)
    assert totals.counts == listing.counts
    assert totals.oldest_pending == pytest.approx(3600, abs=60)
    assert totals.oldest_stale == pytest.approx(0, abs=60)
    assert totals.rate == pytest.approx(MANY / 3600, rel=0.1)
    assert totals.row_bytes
    assert totals.row_bytes > 300


def test_no_call_holds_the_server_for_long(real_server: Server, namespace: str) -> None:
    """By what is in a call, not by the clock of a busy machine: few rows, few keys, and bodies up to a megabyte."""
    with real_server.client(socket_timeout=30.0) as client:
        fill(client, namespace, 600)
        ledger = Ledger(client, namespace=namespace)
        for i in range(40):
            ledger.complete(claimed(ledger, f"large-{i}"), StoredResponse(200, (), b"x" * 600_000))
        ledger.close()
        client.config_set("slowlog-max-len", 10_000)
        client.config_set("slowlog-log-slower-than", 0)
        client.slowlog_reset()
        listing = survey.worst(client, namespace, limit=100)
        calls = [entry["command"].split() for entry in client.slowlog_get(10_000)]
        client.config_set("slowlog-log-slower-than", 10_000)
        client.config_set("slowlog-max-len", 128)
        client.slowlog_reset()
    assert listing.counts["completed"] == 640
    named = {call[0].upper() for call in calls}
    assert {b"EVALSHA", b"SCAN"} <= named
    assert named <= {b"EVALSHA", b"EVAL", b"SCAN", b"CONFIG", b"SLOWLOG", b"HMGET", b"PTTL"}
    surveys = [call for call in calls if call[0].upper() == b"EVALSHA"]
    assert max(int(call[2]) for call in surveys) <= survey.BATCH
    assert len(surveys) > 640 / survey.BATCH + 6  # those with large bodies ended early
    assert {call[call.index(b"COUNT") + 1] for call in calls if call[0].upper() == b"SCAN"} == {b"500"}


HEADERS = [
    "[]",
    '[["a","b"]]',
    '[["a","b"],["c","d e"]]',
    '[["a","/x?y=1&z=%20;~"]]',
    '[["x-!#$%&\'*+.^_`|~0","v"]]',
    '[["a",""]]',
    '[ ["a", "b"] ]',
    '[["a","b\\u00e9"]]',
    '[["a","é"]]',
    '[["é","b"]]',
    '[["a","b\\n"]]',
    '[["a","b\x7f"]]',
    '[["a","b\t"]]',
    '[["a b","c"]]',
    '[["a:","c"]]',
    '[["","c"]]',
    '[["a","b"],]',
    '[["a","b"]]]',
    '[["a","b"]',
    '[["a","b"]] []',
    '[["a"]]',
    '[["a","b","c"]]',
    '[["a",1]]',
    '["a","b"]',
    '{"a":"b"}',
    "null",
    "",
    "[",
    "\xff",
    "[" * 5000,
]

CHECKPOINTS: list[str | bytes] = [
    *("null", "true", "false", "nul", "nulll", "True", "NaN", "Infinity", "-Infinity", "nan", ""),
    *("0", "-0", "1", "-12", "01", "-", "+1", "1.5", "1.", ".5", "1e5", "0x10", "9" * 5000),
    *('"x"', '"a b~"', '"', '"x', '"\x01"', '"\x7f"', '"\\u00e9"', '"\\"', '"é"', b'"\xff"', b"\xff"),
    *("[]", "[1]", "[1, 2]", "[1,2]", "[1,]", "[,]", "[1 ,2]", "[1,  2]", "[1", "]", "[1]]", "[1] ", " [1]"),
    *(
        "{}",
        '{"a": 1}',
        '{"a":1,"b":null}',
        '{"a": [1, {"b": "c"}]}',
        '{"a"}',
        '{"a": }',
        "{a: 1}",
        "{1: 2}",
        '{"a": 1,}',
    ),
    *("[" * 8 + "]" * 8, "[" * 40 + "]" * 40, "[" * 5000, "[" * 5000 + "]" * 5000, "[}", "{]"),
]

SPOILED: list[dict[str, Any]] = [
    *({"response_headers": text.encode("latin-1") if text == "\xff" else text} for text in HEADERS),
    *({"response_status": text} for text in ("99", "100", "201", "999", "1000", "0201", "007", "-1", "2e2", "")),
    *({"response_omitted": text} for text in (*OMISSIONS, "because", "too_large\n")),
    *({"checkpoint": "c", "checkpoint_data": text, "checkpoint_seq": "1"} for text in CHECKPOINTS),
    *({"checkpoint": "c", "checkpoint_data": "1", "checkpoint_seq": text} for text in ("", "x", "1.5")),
    *({"generation": text} for text in ("0", "1", " 1", "1_0", "9" * 16)),
    *({"created_at": text} for text in ("", "x", "9" * 16, "-5")),
    {"owner": "", "lease": "0"},
    {"checkpoint": "c"},
    *({"checkpoint": name, "checkpoint_data": "1", "checkpoint_seq": "1"} for name in ("", "é", b"\xff")),
]


@pytest.mark.parametrize("finished", [True, False])
def test_the_survey_judges_every_row_as_its_reader_does(
    place: Place, ledger: Ledger, namespace: str, finished: bool
) -> None:
    """`claim`, `read`, `show` and `doctor` all go by the same definition of a corrupt row."""
    names = []
    for i, fields in enumerate(SPOILED):
        r = claimed(ledger, f"k{i}", lease=600)
        if finished:
            ledger.complete(r, ANSWER)
        place.client.hset(r.row, mapping=fields)
        names.append(r.row)
    for i in range(3):
        place.client.rpush(f"{namespace}:acct:list{i}", "x")
        place.client.pexpire(f"{namespace}:acct:list{i}", 60_000)
        names.append(f"{namespace}:acct:list{i}")
    read = {}
    for name in names:
        [summary] = rows.look(place.client, holder(place.client, name), [name])
        assert summary is not None
        read[name] = summary.status
    for statuses in (frozenset(STATUSES), frozenset(STATUSES) - survey.FINISHED):
        listing = survey.worst(place.client, namespace, limit=1000, statuses=statuses)
        listed = {row.identity.row: row.status for row in listing.rows}
        assert listed == {name: status for name, status in read.items() if status in statuses}
        assert listing.counts == {status: list(read.values()).count(status) for status in STATUSES}
    assert survey.stats(place.client, namespace).counts == listing.counts
    assert len(set(read.values())) >= 2


STRANGE = [
    b"a",
    b"a:b:c:d",
    b"a:%zz",
    b"a:%6b",
    b"a:k%3a",
    b":k",
    b"a:",
    b"a:b:",
    "a:é".encode(),
    b"a:\xff\xfe",
    b"a:" + b"k" * 256,
]


def test_a_name_that_is_not_a_rows_is_found_shown_and_forgotten_by_its_digest_or_name(
    place: Place, run: Run, ledger: Ledger, namespace: str
) -> None:
    claimed(ledger, "k")
    dump = place.client.hgetall(claimed(ledger, "pattern").row)
    strange = {namespace.encode() + b":" + rest for rest in STRANGE}
    for name in strange:
        place.client.hset(name, mapping=dump)
        place.client.pexpire(name, 86_400_000)
    listed = [row for row in run("ls", "--json").json if row["status"] == "corrupt"]
    assert {row["row"].encode("utf-8", "surrogateescape") for row in listed} == strange
    assert {row["why"] for row in listed} == {"its name is not that of a ledger's row"}
    assert run("stats", "--json").json["counts"] == {
        **dict.fromkeys(STATUSES, 0),
        "pending": 2,
        "corrupt": len(strange),
    }
    for at, row in enumerate(listed):
        name = row["row"].encode("utf-8", "surrogateescape")
        assert row["digest"] == digest(row["row"])
        way = ("--digest", row["digest"]) if at % 2 or not row["row"].isascii() else ("--row", row["row"])
        assert run("show", *way, "--json").json["status"] == "corrupt"
        if at < 2:
            for words in (("release", *way), ("resolve", *way, "--status", "201")):
                assert run(*words, "--yes").code == 1
        assert place.client.exists(name)
        assert run("forget", *way, "--yes").code == 0
        assert not place.client.exists(name)
    assert run("forget", "--row", "somebody:elses:key", "--yes").code == 2


@pytest.mark.parametrize("place", ["cluster"], indirect=True)
def test_a_proxy_that_wants_rows_of_different_slots_apart_gets_them_apart(
    place: Place, ledger: Ledger, namespace: str
) -> None:
    """A client that takes a cluster's node for a single server meets the same refusal, CROSSSLOT."""
    for i in range(60):
        claimed(ledger, f"k{i}")
    total = 0
    for node in place.nodes:
        client = redis.Redis(port=node.port, socket_timeout=5.0)
        listing = survey.worst(client, namespace, limit=100)
        total += sum(listing.counts.values())
        assert len(listing.rows) == listing.counts["pending"]
        client.close()
    assert total == 60


def test_the_latest_of_the_finished_rows_are_shown_when_asked_for(place: Place, run: Run, ledger: Ledger) -> None:
    for i in range(5):
        r = claimed(ledger, f"k{i}")
        (ledger.fail if i % 2 else ledger.complete)(r, ANSWER)
        place.client.pexpire(r.row, 80_000_000 + i * 100_000)
    assert run("ls", "--json").json == []
    assert "none of them is to be listed" in run("ls").err
    assert [row["key"] for row in run("ls", "--status", "completed", "--json").json] == ["k4", "k2", "k0"]
    assert [row["key"] for row in run("ls", "--all", "--limit", "3", "--json").json] == ["k3", "k1", "k4"]
