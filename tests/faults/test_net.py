"""The net has no holes: each mistake made in the scripts on purpose is found."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from idemredis.core.scripts import load
from tests.support.broken import MISTAKES, Broken, TwoTrips
from tests.support.linearizability import Entry, TooHard, violations
from tests.support.machine import Machine
from tests.support.proxy import Proxy
from tests.support.recording import play, settled, troubled
from tests.support.servers import Server

SEEDS = range(30)
"""Games played until the checker finds the mistake; most take one or two."""

SEEN_FROM_OUTSIDE = (
    "no fence at the completion",
    "the fence is the generation alone",
    "no fence at renewals",
    "the owner is ignored by renewals",
    "a takeover does not raise the generation",
    "a lease that has not ended is taken over",
    "a claim takes a running lease for stale",
    "a claim does not know its own row",
    "a completion is stored twice",
    "a claim does not compare the fingerprint",
    "a takeover does not compare the fingerprint",
    "a takeover does not look at the lease",
    "a transition writes the retention without the TTL",
    "a renewal sets the TTL to the lease",
    "the elapsed time may be negative",
    "a read makes the row younger",
    "a renewal answers with the token of another call",
)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_state_machine_finds_a_broken_script(mistake: str, valkey_server: Server) -> None:
    class Spoilt(Machine):
        scripts = Broken(load(), *MISTAKES[mistake])

    with valkey_server.client() as client:
        Spoilt.client = client
        with pytest.raises(AssertionError):
            run_state_machine_as_test(
                Spoilt,
                settings=settings(
                    max_examples=300,
                    stateful_step_count=25,
                    database=None,
                    derandomize=True,
                    phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                    report_multiple_bugs=False,
                ),
            )


@pytest.mark.parametrize("mistake", SEEN_FROM_OUTSIDE)
def test_the_history_checker_finds_a_broken_script(mistake: str, valkey_server: Server, namespace: str) -> None:
    scripts = Broken(load(), *MISTAKES[mistake])
    with Proxy(valkey_server.port) as proxy, valkey_server.client() as near:
        for seed in SEEDS:
            proxy.choose(troubled(seed))
            name = f"{namespace}-{seed}"
            if is_wrong(settled(near, name, play(proxy.port, near, name, seed, scripts=scripts))):
                return
    pytest.fail(f"{mistake}: not found in {len(SEEDS)} games")


def test_the_history_checker_finds_a_claim_of_two_round_trips(valkey_server: Server, namespace: str) -> None:
    with valkey_server.client() as near:
        for seed in SEEDS:
            name = f"{namespace}-{seed}"
            if is_wrong(
                settled(
                    near,
                    name,
                    play(valkey_server.port, near, name, seed, tap=lambda recording: TwoTrips(near, recording)),
                )
            ):
                return
    pytest.fail(f"not found in {len(SEEDS)} games")


def is_wrong(history: list[Entry]) -> bool:
    """What takes too long to be decided proves nothing: the next game may."""
    with suppress(TooHard):
        return bool(violations(history))
    return False
