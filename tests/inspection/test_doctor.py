"""The doctor finds each thing that is wrong with a server, and invents none."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.retry import Retry

from idemredis import AsyncLedger, Ledger, Policy, Reservation, StoredResponse
from idemredis.events import digest
from idemredis.inspection.diagnosis import Report, Server, TTLs, client_findings, clock_finding, server_findings
from idemredis.store.nodes import primaries
from tests.support import servers
from tests.support.place import Place, Run
from tests.support.reports import of
from tests.support.servers import valkey
from tests.support.waiting import wait_until

CHECKS = {
    "reachable",
    "expiry",
    "rows",
    "round trip",
    "clock",
    "engine",
    "eviction",
    "memory",
    "persistence",
    "replication",
    "packing",
    "client",
    "scripts",
}


@pytest.fixture
def restored(place: Place) -> Iterator[None]:
    """Put the settings back that a test changes."""
    yield
    for node in primaries(place.client):
        for name, value in (("maxmemory", 0), ("appendonly", "no"), ("appendfsync", "everysec")):
            node.config_set(name, value)
        node.config_set("hash-max-listpack-value", 64)


def test_a_server_that_is_fit_has_no_problem_and_nothing_is_left_on_it(
    place: Place, ledger: Ledger, namespace: str
) -> None:
    for i in range(10):
        assert isinstance(ledger.claim("a", f"k{i}", "f"), Reservation)
    before = {row for node in primaries(place.client) for row in node.scan_iter()}
    report = ledger.check()
    assert report.healthy
    assert report.reachable
    expected = CHECKS | ({"cluster"} if place.kind == "cluster" else set())
    assert {finding.check for finding in report.findings} == expected
    unknown = {finding.check for finding in report.findings if finding.verdict == "unknown"}
    told = {"engine", "eviction", "memory", "persistence", "replication", "packing"}
    assert unknown == (told if place.kind == "fakeredis" else set())
    assert {row for node in primaries(place.client) for row in node.scan_iter()} == before


def test_the_same_is_found_through_an_async_ledger(place: Place, namespace: str) -> None:
    async def check() -> Report:
        client: Any
        if place.kind == "fakeredis":
            client = AsyncLedger.from_url(place.url).client
        elif place.kind == "cluster":
            client = redis.asyncio.RedisCluster(host="127.0.0.1", port=place.nodes[0].port, socket_timeout=5.0)
        else:
            client = place.nodes[0].async_client(socket_timeout=5.0)
        try:
            return await AsyncLedger(client, namespace=namespace).check()
        finally:
            await client.aclose()

    report = asyncio.run(check())
    same = Ledger(place.client, namespace=namespace).check()
    aside = {"client", "round trip"}  # the client is another one, and the machine may be busy
    summary, others = (
        sorted((f.check, f.verdict, f.node) for f in each.findings if f.check not in aside) for each in (report, same)
    )
    assert summary == others
    assert report.healthy


def test_json_has_every_finding_and_the_exit_code_is_the_verdict(place: Place, run: Run) -> None:
    ran = run("doctor", "--json")
    assert ran.code == 0
    assert ran.json["reachable"]
    assert {"check", "verdict", "reason", "fix", "node"} == set(ran.json["findings"][0])
    if place.kind != "fakeredis":
        primaries(place.client)[0].config_set("maxmemory-policy", "volatile-ttl")
        ran = run("doctor", "--json")
        assert ran.code == 1
        [bad] = [finding for finding in ran.json["findings"] if finding["verdict"] == "problem"]
        assert bad["check"] == "eviction"
        host, port = bad["fix"].split()[2:5:2]
        assert (host, int(port)) in [("127.0.0.1", node.port) for node in place.nodes]


@pytest.mark.parametrize("place", ["valkey", "redis", "cluster"], indirect=True)
@pytest.mark.usefixtures("restored")
def test_what_a_server_is_set_to_is_judged(place: Place, ledger: Ledger) -> None:
    nodes = primaries(place.client)
    assert "the append-only file is off" in of(ledger.check(), "persistence").reason
    for node in nodes:
        node.config_set("appendonly", "yes")
    assert "the last second" in of(ledger.check(), "persistence").reason
    for node in nodes:
        node.config_set("appendfsync", "always")
    assert "nothing acknowledged is lost" in of(ledger.check(), "persistence").reason
    nodes[0].config_set("appendfsync", "no")
    assert of(ledger.check(), "persistence").verdict == "warning"

    assert "8192" in of(ledger.check(), "packing").fix
    for node in nodes:
        node.config_set("hash-max-listpack-value", 8192)
    assert of(ledger.check(), "packing").fix == ""

    used = nodes[0].info("memory")["used_memory"]
    nodes[0].config_set("maxmemory", used + 10_000_000)
    assert of(ledger.check(), "memory").verdict == "warning"
    nodes[0].config_set("maxmemory", 1)
    full = ledger.check()
    assert of(full, "memory").verdict == "problem"


def test_a_full_server_is_found_out_by_a_claim(real_server: servers.Server, namespace: str) -> None:
    with real_server.client() as client:
        client.config_set("maxmemory", 1)
        try:
            broken = of(Ledger(client, namespace=namespace).check(), "scripts")
        finally:
            client.config_set("maxmemory", 0)
    assert broken.verdict == "problem"
    assert broken.reason.startswith("claim does not work")


def test_rows_that_never_expire_or_are_of_another_version_are_found(
    place: Place, ledger: Ledger, run: Run, namespace: str
) -> None:
    for i in range(30):
        r = ledger.claim("a", f"k{i}", "f")
    assert isinstance(r, Reservation)
    ledger.complete(r, StoredResponse(204))
    lasting, strange = f"{namespace}:a:k29", f"{namespace}:a:k7"
    place.client.persist(lasting)
    place.client.hset(strange, "status", "cancelled")
    report = ledger.check()
    assert of(report, "expiry").verdict == "problem"
    assert of(report, "expiry").reason.startswith("1 of all 30 rows")
    assert of(report, "rows").verdict == "warning"
    assert "status is unknown" in of(report, "rows").reason
    assert run("doctor").code == 1
    assert run("stats", "--json").json["lasting"] == 1
    assert of(report, "expiry").fix.endswith(f" --namespace {namespace} show --digest {digest(lasting)}")
    restoring = run("show", "--digest", digest(lasting)).err.split("to let it expire:\n")[1]
    assert restoring.split()[-3:] == ["PEXPIRE", lasting, "86400000"]
    place.client.execute_command(*restoring.split()[-3:])

    lasting = f"{namespace}:a:k3"  # without its TTL a pending row has no clock
    place.client.persist(lasting)
    report = ledger.check()
    place.client.delete(lasting)
    assert of(report, "expiry").reason.startswith("1 of all 30 rows")
    assert "it is pending and has no TTL" in of(report, "rows").reason


def test_only_as_many_rows_are_looked_at_as_asked(valkey_server: servers.Server, namespace: str) -> None:
    with valkey_server.client() as client:
        ledger = Ledger(client, namespace=namespace)
        for i in range(300):
            ledger.claim("a", f"k{i}", "f")
        looked = int(of(ledger.check(sample=50), "rows").reason.split()[2])
        assert 50 <= looked < 150
        ledger.close()


def test_what_the_server_refuses_to_tell_is_unknown_and_no_problem(real_server: servers.Server, namespace: str) -> None:
    app = ("resetkeys", "~*", "resetchannels", "-@all", "+evalsha", "+eval", "+ping", "+hmget", "+hset")
    with real_server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "mute", "on", ">pw", *app, "+pexpire", "+pttl", "+del")
        with real_server.client(username="mute", password="pw") as client:
            report = Ledger(client, namespace=namespace).check()
        admin.acl_deluser("mute")
    assert report.healthy
    assert of(report, "scripts").verdict == "ok"
    for check in ("engine", "eviction", "memory", "persistence", "replication", "packing", "rows"):
        assert of(report, check).verdict == "unknown", check


@pytest.mark.parametrize("denied", ["evalsha", "eval", "hmget", "hset", "pexpire", "pttl"])
def test_a_command_that_is_denied_is_named_and_no_row_stays(
    real_server: servers.Server, namespace: str, denied: str
) -> None:
    with real_server.client() as admin:
        admin.script_flush()
        admin.execute_command("ACL", "SETUSER", "less", "on", ">pw", "~*", "&*", "+@all", f"-{denied}")
        with real_server.client(username="less", password="pw") as client:
            broken = of(Ledger(client, namespace=namespace).check(), "scripts")
        admin.acl_deluser("less")
        assert broken.verdict == "problem"
        assert "acl" in broken.fix
        assert admin.keys() == []


@pytest.mark.slow
def test_a_replica_is_no_place_for_a_ledger(tmp_path: Path, namespace: str) -> None:
    with (
        valkey(tmp_path / "a") as primary,
        valkey(tmp_path / "b") as replica,
        replica.client() as client,
        primary.client() as main,
    ):
        client.replicaof("127.0.0.1", primary.port)
        wait_until(lambda: client.info("replication")["master_link_status"] == "up", 20.0)
        report = Ledger(client, namespace=namespace).check()
        assert of(report, "replication").verdict == "problem"
        assert str(primary.port) in of(report, "replication").reason
        assert of(report, "scripts").verdict == "problem"
        enough = Ledger(main, Policy(min_replicas=1), namespace)
        wait_until(lambda: of(enough.check(), "replication").verdict == "ok")
        few = of(Ledger(main, Policy(min_replicas=2), namespace).check(), "replication")
        assert few.verdict == "problem"
        assert "min_replicas=2" in few.reason


@pytest.mark.parametrize("place", ["cluster"], indirect=True)
def test_a_cluster_whose_client_is_none_and_one_with_slots_missing(place: Place, ledger: Ledger) -> None:
    with place.nodes[0].client() as client:
        assert of(Ledger(client).check(), "cluster").verdict == "problem"
        held = client.cluster("INFO")
        assert of(ledger.check(), "cluster").verdict == "ok"
        client.execute_command("CLUSTER", "DELSLOTS", 42)
        try:
            wait_until(lambda: client.cluster("INFO")["cluster_state"] == "fail")
            broken = of(ledger.check(), "cluster")
        finally:
            client.execute_command("CLUSTER", "ADDSLOTS", 42)
            wait_until(lambda: client.cluster("INFO")["cluster_state"] == held["cluster_state"])
    assert broken.verdict == "problem"
    assert "16383 of 16384" in broken.reason


def test_sentinels_that_see_no_quorum_are_a_warning(tmp_path: Path, namespace: str) -> None:
    with valkey(tmp_path / "primary") as primary:
        for quorum, verdict in ((1, "ok"), (2, "warning")):
            conf = tmp_path / f"sentinel-{quorum}.conf"
            conf.write_text(f"sentinel monitor ledger 127.0.0.1 {primary.port} {quorum}\n")
            watcher = servers.Server("sentinel", tmp_path / str(quorum), [primary.command[0], str(conf), "--sentinel"])
            made: Any = redis.Sentinel
            sentinel = made([("127.0.0.1", watcher.port)], socket_timeout=1.0)
            client = sentinel.master_for("ledger", socket_timeout=1.0)
            found = of(Ledger(client, namespace=namespace).check(), "sentinel")
            client.close()
            sentinel.sentinels[0].close()
            watcher.stop()
            assert found.verdict == verdict, found


def test_a_server_that_is_away_or_hangs_is_unreachable(tmp_path: Path, namespace: str, run: Run) -> None:
    with valkey(tmp_path) as server:
        options = {"socket_timeout": 0.2, "socket_connect_timeout": 0.2, "retry": Retry(NoBackoff(), 0)}
        with server.client(**options) as client:
            ledger = Ledger(client, namespace=namespace)
            os.kill(server.pid, signal.SIGSTOP)
            hung = ledger.check()
            os.kill(server.pid, signal.SIGCONT)
            server.kill()
            gone = ledger.check()
        for report in (hung, gone):
            assert not report.reachable
            assert report.verdict == "problem"
        ran = run("doctor", "--json", url=server.url)
        assert ran.code == 2
        assert ran.json["reachable"] is False


@pytest.mark.parametrize(
    ("seconds", "lease", "verdict"), [(1.0, 30.0, "ok"), (1.0, 5.0, "warning"), (6.0, 30.0, "warning")]
)
def test_a_deadline_must_leave_time_for_three_renewals(seconds: float, lease: float, verdict: str) -> None:
    assert [finding.verdict for finding in client_findings(seconds, Policy(lease=lease))] == [verdict]


@pytest.mark.parametrize(
    ("ttls", "verdict"),
    [
        (TTLs(60.123, 60.121, 0.01, 60.1, 0.02), "ok"),
        (TTLs(60.123, 58.0, 3.0, 57.9, 0.1), "ok"),
        (TTLs(60.123, 60.0, 0.001, 59.0, 1.1), "warning"),
        (TTLs(60.123, 61.0, 0.001, 60.0, 1.1), "warning"),
        (TTLs(60.123, 60.123, 0.001, 60.123, 0.02), "problem"),
        (TTLs(60.123, 60.0, 0.001, 60.0, 1.1), "problem"),
        (TTLs(60.123, 0.0, 0.001, 0.0, 1.1), "problem"),
    ],
)
def test_ttls_that_do_not_run_or_count_whole_seconds_are_judged(ttls: TTLs, verdict: str) -> None:
    assert clock_finding(ttls).verdict == verdict


def test_slow_trips_old_engines_and_lagging_replicas_are_judged() -> None:
    info = {
        "redis_version": "6.0.1",
        "role": "master",
        "slave0": {"state": "online", "lag": 9},
        "slave1": {"state": "wait_bgsave", "lag": 0},
    }
    sick = Server("h:1", trips=[0.001] * 19 + [0.3], info=info)
    verdicts = {finding.check: finding.verdict for finding in server_findings(sick, Policy(), None)}
    assert verdicts["round trip"] == "warning"
    assert verdicts["engine"] == "problem"
    assert verdicts["replication"] == "warning"
    assert verdicts["memory"] == verdicts["persistence"] == "unknown"


def test_every_check_of_the_page_is_one_that_the_doctor_makes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    section = page.split("## What doctor looks at\n")[1].split("\n\n`unknown`")[0]
    named = {name.strip("`") for line in section.splitlines()[3:] for name in line.split("|")[1].strip().split(", ")}
    assert named == CHECKS | {"cluster", "sentinel"}


def test_a_check_leaves_no_trace_in_a_ledgers_events(valkey_server: servers.Server, namespace: str) -> None:
    told: list[Any] = []
    with valkey_server.client() as client:
        ledger = Ledger(client, namespace=namespace, observers=[told.append])
        ledger.check()
        r = ledger.claim("a", "k", "f")
        assert isinstance(r, Reservation)
        ledger.complete(r, StoredResponse(204))
    assert [event.name for event in told] == ["claimed", "completed"]


@pytest.mark.slow
def test_a_sample_among_very_many_foreign_keys_takes_few_calls_and_says_what_it_saw(
    real_server: servers.Server, namespace: str
) -> None:
    with real_server.client(socket_timeout=30.0) as client:
        for first in range(0, 500_000, 50_000):
            client.eval(
                "for i = ARGV[1], ARGV[2] do redis.call('SET', 'foreign:' .. i, '') end", 0, first, first + 49_999
            )
        ledger = Ledger(client, namespace=namespace)
        client.config_resetstat()
        report = ledger.check(sample=20)
        used: Any = client.info("commandstats")
        client.flushall()
        ledger.close()
    assert of(report, "rows").reason == "there are no rows among the first 10,000 keys"
    assert used["cmdstat_scan"]["calls"] == 20
    outside_scripts = ("scan", "ping", "info", "config|get", "evalsha", "eval", "memory|usage", "del")
    assert sum(used.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in outside_scripts) < 80


def test_a_sample_is_as_large_as_asked_and_says_how_many_keys_it_saw(
    valkey_server: servers.Server, namespace: str
) -> None:
    with valkey_server.client() as client:
        ledger = Ledger(client, namespace=namespace)
        for i in range(1500):
            ledger.claim("a", f"k{i}", "f")
        assert of(ledger.check(sample=20), "rows").reason == "the first 20 rows (of 500 keys scanned) can be read"
        assert of(ledger.check(sample=5000), "rows").reason == "all 1500 rows can be read"
        client.config_resetstat()
        ledger.check(sample=1000)
        used: Any = client.info("commandstats")
        assert used["cmdstat_scan"]["calls"] <= 4
        ledger.close()
