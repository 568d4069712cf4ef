"""The ledger tells how long each script took, to observers that want to know."""

from __future__ import annotations

import pytest

from idemredis import Event, LedgerUnavailable, Policy, StoredResponse
from tests.support.proxy import Proxy
from tests.support.servers import Server
from tests.support.subject import MakeSubject, Mode


class Timer:
    def __init__(self) -> None:
        self.calls: list[tuple[str, float, str]] = []

    def __call__(self, event: Event) -> None:
        """Events do not matter here."""

    def timed(self, script: str, seconds: float, answer: str) -> None:
        self.calls.append((script, seconds, answer))


@pytest.mark.parametrize("replicas", [0, 1])
def test_each_script_is_timed_by_its_name_and_answer(
    make_subject: MakeSubject, mode: Mode, valkey_server: Server, replicas: int
) -> None:
    timer = Timer()
    policy = Policy(min_replicas=replicas, replica_timeout=0.01, heartbeat=False)
    subject = make_subject(mode, valkey_server, policy=policy, observers=[timer])
    if replicas:
        with pytest.raises(LedgerUnavailable):
            subject.claim("a", "k", "f")
        assert timer.calls[0][0::2] == ("claim", "NotDurable")
        assert timer.calls[0][1] >= 0.01
        return
    r = subject.claimed("a", "k", "f")
    subject.claim("a", "k", "g")
    subject.renew(r)
    subject.complete(r, StoredResponse(204))
    assert [(script, answer) for script, _, answer in timer.calls] == [
        ("claim", "Reservation"),
        ("claim", "Reused"),
        ("renew", "Renewed"),
        ("complete", "Done"),
    ]
    assert all(0 < seconds < 5 for _, seconds, _ in timer.calls)


def test_a_call_that_fails_is_timed_too(make_subject: MakeSubject, mode: Mode, valkey_server: Server) -> None:
    timer = Timer()
    with Proxy(valkey_server.port) as proxy:
        subject = make_subject(mode, valkey_server, url=proxy.url, observers=[timer])
        proxy.refuse()
        with pytest.raises(LedgerUnavailable):
            subject.claim("a", "k", "f")
    assert {(script, answer) for script, _, answer in timer.calls} >= {("claim", "LedgerUnavailable")}


def test_a_timer_that_fails_breaks_nothing(make_subject: MakeSubject, mode: Mode, valkey_server: Server) -> None:
    class Broken(Timer):
        def timed(self, script: str, seconds: float, answer: str) -> None:
            raise RuntimeError

    subject = make_subject(mode, valkey_server, observers=[Broken()])
    assert subject.claimed("a", "k", "f").generation == 1
