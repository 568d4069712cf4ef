"""What doctor says of servers that refuse commands, forget scripts, or count TTLs in their own way."""

from __future__ import annotations

import pytest

from idemredis import Ledger, Policy, Reservation
from idemredis.inspection.diagnosis import Report
from tests.support.reports import of
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


def examine(server: Server, namespace: str, *restrictions: Restriction, policy: Policy | None = None) -> Report:
    """Check a ledger of three rows through the proxy. Nothing else is left on the server, and each row has a TTL."""
    with server.client() as direct, RestrictingProxy(server.port, *restrictions) as proxy:
        rows = Ledger(direct, namespace=namespace)
        for i in range(3):
            assert isinstance(rows.claim("a", f"k{i}", "f"), Reservation)
        ledger = Ledger.from_url(proxy.url, policy, namespace)
        report = ledger.check()
        ledger.close()
        assert sorted(direct.keys()) == [f"{namespace}:a:k{i}".encode() for i in range(3)]
    return report


@pytest.mark.parametrize("restriction", [no_time_in_scripts, forgetful_scripts, no_wait])
def test_what_the_ledger_does_not_need_is_no_problem(
    restriction: Restriction, real_server: Server, namespace: str
) -> None:
    report = examine(real_server, namespace, restriction)
    assert report.healthy
    for check in ("scripts", "clock", "rows", "expiry"):
        assert of(report, check).verdict == "ok", check


def test_a_managed_server_is_unknown_where_it_does_not_tell(real_server: Server, namespace: str) -> None:
    report = examine(real_server, namespace, managed)
    assert report.reachable
    assert report.healthy
    for check in ("engine", "eviction", "memory", "persistence", "replication", "packing"):
        assert of(report, check).verdict == "unknown", check
    assert "INFO" in of(report, "eviction").reason
    for check in ("scripts", "clock", "rows", "expiry"):
        assert of(report, check).verdict == "ok", check


@pytest.mark.parametrize("restrictions", [(no_wait,), (no_wait, managed)], ids=["no_wait", "managed"])
def test_a_server_without_wait_cannot_promise_replicas(
    restrictions: tuple[Restriction, ...], real_server: Server, namespace: str
) -> None:
    report = examine(real_server, namespace, *restrictions, policy=Policy(min_replicas=1))
    assert not report.healthy
    refused = [f for f in report.findings if f.check == "replication" and "refuses WAIT" in f.reason]
    assert [f.verdict for f in refused] == ["problem"]
    assert "MIN_REPLICAS" in refused[0].fix


@pytest.mark.slow
def test_ttls_in_whole_seconds_are_a_warning(real_server: Server, namespace: str) -> None:
    report = examine(real_server, namespace, whole_seconds)
    assert of(report, "clock").verdict == "warning"
    assert "coarse" in of(report, "clock").reason
    assert of(report, "scripts").verdict == "ok"
    assert report.healthy


def test_a_ttl_that_does_not_run_is_a_problem(real_server: Server, namespace: str) -> None:
    report = examine(real_server, namespace, frozen_ttl)
    assert of(report, "clock").verdict == "problem"
    assert "does not run" in of(report, "clock").reason


@pytest.mark.slow
def test_with_every_restriction_at_once_doctor_still_answers(real_server: Server, namespace: str) -> None:
    report = examine(real_server, namespace, no_time_in_scripts, managed, no_wait, whole_seconds, forgetful_scripts)
    assert report.healthy
    assert {of(report, check).verdict for check in ("scripts", "rows", "expiry")} == {"ok"}
    assert of(report, "clock").verdict == "warning"
