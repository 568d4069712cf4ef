"""A ping is one call that reads, and tells whether the ledger can be reached."""

from __future__ import annotations

import pytest

from idemredis import LedgerUnavailable
from tests.support.servers import Server
from tests.support.subject import MakeSubject, Mode


def test_a_ping_takes_one_script_and_writes_nothing(make_subject: MakeSubject, mode: Mode, real_server: Server) -> None:
    subject = make_subject(mode, real_server)
    subject.ping()
    with real_server.client() as client:
        client.config_resetstat()
        before = client.info("persistence")["rdb_changes_since_last_save"]
        assert 0 < subject.ping() < 10
        assert client.info("commandstats")["cmdstat_evalsha"]["calls"] == 1
        assert client.info("persistence")["rdb_changes_since_last_save"] == before


def test_a_ping_fails_where_calls_would(make_subject: MakeSubject, mode: Mode, real_server: Server) -> None:
    subject = make_subject(mode, real_server)
    with real_server.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "-pttl")
        try:
            with pytest.raises(LedgerUnavailable) as refused:
                subject.ping()
        finally:
            client.execute_command("ACL", "SETUSER", "default", "+@all")
    assert refused.value.reason == "denied"
