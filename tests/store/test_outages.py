"""Whatever a server refuses with, a claim that did not run says so, nothing is written, and nothing is locked out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from idemredis import LedgerUnavailable, StoredResponse
from tests.support.outages import OUTAGES, Outage
from tests.support.servers import Server, free_port, start, valkey
from tests.support.started import Servers
from tests.support.subject import MakeSubject, Mode

ROW = ("acct_1", "key-1")
ANSWER = StoredResponse(201)


@pytest.fixture(scope="module", params=["valkey", "redis"])
def victim(
    request: pytest.FixtureRequest, all_servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server of these tests alone, so that what they do to it does no harm elsewhere."""
    all_servers.get(request.param)  # or skip
    server = start(request.param, tmp_path_factory.mktemp("victim"))
    yield server
    server.stop()


@pytest.mark.parametrize("outage", OUTAGES, ids=lambda outage: outage.__name__)
def test_a_server_that_refuses_is_unavailable_and_nothing_is_written(
    make_subject: MakeSubject, mode: Mode, victim: Server, outage: Outage
) -> None:
    subject = make_subject(mode, victim, url=victim.url)
    r = subject.claimed("acct_1", "running", "f")
    before = subject.fields(r.identity.row)
    fresh = make_subject(mode, victim, url=victim.url)
    with victim.client(single_connection_client=True) as admin, outage(admin):
        with pytest.raises(LedgerUnavailable, match=outage.__doc__) as unavailable:
            fresh.claim(*ROW, "f")
        assert not unavailable.value.unknown

    assert subject.fields(r.identity.row) == before
    assert subject.fields(subject.row(*ROW)) == {}
    subject.complete(r, ANSWER)
    assert fresh.claimed(*ROW, "f").generation == 1


def test_a_wrong_password_is_unavailable(make_subject: MakeSubject, mode: Mode, real_server: Server) -> None:
    subject = make_subject(mode, real_server, url=f"redis://nobody:wrong@127.0.0.1:{real_server.port}/0")
    with pytest.raises(LedgerUnavailable, match=r"invalid|WRONGPASS") as unavailable:
        subject.claim(*ROW, "f")
    assert not unavailable.value.unknown


def test_a_cluster_node_without_slots_is_unavailable(make_subject: MakeSubject, mode: Mode, tmp_path: Path) -> None:
    with valkey(tmp_path, "--cluster-enabled", "yes", "--cluster-port", str(free_port())) as node:
        subject = make_subject(mode, node)
        with pytest.raises(LedgerUnavailable, match="Hash slot not served") as unavailable:
            subject.claim(*ROW, "f")
        assert not unavailable.value.unknown
        subject.close()


def test_nobody_listens(make_subject: MakeSubject, mode: Mode, valkey_server: Server) -> None:
    subject = make_subject(mode, valkey_server, url=f"redis://127.0.0.1:{free_port()}/0")
    with pytest.raises(LedgerUnavailable):
        subject.claim(*ROW, "f")
    with pytest.raises(LedgerUnavailable):
        subject.read(*ROW)
