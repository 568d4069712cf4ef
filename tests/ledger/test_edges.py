"""Work that is interrupted, or blocks its loop, at the edges of a block: no row stays held by nobody."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from idemredis import AsyncLedger, FencedOut, InProgress, Ledger, LedgerUnavailable, Policy, Reservation
from tests.support.proxy import Proxy
from tests.support.servers import Server
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
LEASE = 1.5


def block(seconds: float) -> None:
    """Do what no other task can run beside."""
    time.sleep(seconds)


@pytest.mark.slow
def test_signals_at_the_edges_of_blocks_leave_no_row_held_and_no_heartbeat_beating(
    valkey_server: Server, namespace: str
) -> None:
    """Each row is stored, released, or stale after one lease; and the process goes on as before."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.support.edges", valkey_server.url, namespace, "1500", str(LEASE)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    counts = json.loads(ran.stdout)
    assert counts["interrupted"] > 300
    assert counts["held"] == []
    assert counts["completed"] > 0
    assert counts["released"] > 0


@pytest.mark.slow
def test_a_block_that_blocks_its_loop_for_longer_than_the_lease_is_taken_over_and_told(
    valkey_server: Server, namespace: str
) -> None:
    with valkey_server.client() as client:
        other = Ledger(client, Policy(lease=60.0), namespace)
        taken: list[Reservation] = []

        def take_over() -> None:
            def is_taken() -> bool:
                outcome = other.claim("worker", "k", "f")
                if isinstance(outcome, Reservation):
                    taken.append(outcome)
                return bool(taken)

            wait_until(is_taken)

        async def main() -> None:
            ledger = AsyncLedger(valkey_server.async_client(), Policy(lease=LEASE), namespace)
            held: list[Reservation] = []

            async def work() -> None:
                async with ledger.reserve("worker", "k", "f") as r:
                    held.append(r)
                    thread = threading.Thread(target=take_over)
                    thread.start()
                    thread.join()  # which blocks the loop, and so the heartbeat
                    assert not r.held

            with pytest.raises(FencedOut):
                await work()
            [r] = held
            ends = client.pexpiretime(r.row)
            await asyncio.sleep(LEASE)  # in which a heartbeat would beat three times
            assert client.pexpiretime(r.row) == ends
            await ledger.close()
            await ledger.client.aclose()

        asyncio.run(main())
        [r] = taken
        other.renew(r)
        other.close()


@pytest.mark.slow
def test_a_block_that_blocks_its_loop_for_longer_than_the_lease_keeps_a_row_that_nobody_wants(
    valkey_server: Server, namespace: str
) -> None:
    async def main() -> None:
        ledger = AsyncLedger(valkey_server.async_client(), Policy(lease=LEASE), namespace)
        async with ledger.reserve("worker", "k", "f") as r:
            block(LEASE + 0.5)
            assert not r.held
            while not r.held:  # noqa: ASYNC110  # its heartbeat goes on
                await asyncio.sleep(0.01)
        await ledger.close()
        await ledger.client.aclose()

    asyncio.run(asyncio.wait_for(main(), 30.0))
    with valkey_server.client() as client:
        assert client.hget(f"{namespace}:worker:k", "status") == b"completed"


@pytest.mark.slow
@pytest.mark.parametrize("then", ["returns", "is cancelled"])
def test_a_claim_under_way_while_the_loop_is_blocked_for_longer_than_the_lease_holds_nothing_up(
    valkey_server: Server, namespace: str, then: str
) -> None:
    """Whatever its caller gets: if nobody has the row, it can be claimed after one lease."""

    async def main() -> None:
        ledger = AsyncLedger.from_url(proxy.url, Policy(lease=LEASE), namespace, socket_timeout=1.0)
        await ledger.read("worker", "k")  # connects
        proxy.hold()
        claim = asyncio.create_task(ledger.claim("worker", "k", "f"))
        while not client.exists(f"{namespace}:worker:k"):  # noqa: ASYNC110
            await asyncio.sleep(0)
        proxy.hold(False)
        block(LEASE + 0.5)
        if then == "is cancelled":
            claim.cancel()
        with suppress(LedgerUnavailable, asyncio.CancelledError):
            await claim
        await asyncio.sleep(0)  # whoever claimed forgets it

        def is_free() -> bool:
            outcome = other.claim("worker", "k", "f", takeover=False)
            return not isinstance(outcome, InProgress) or outcome.stale

        await asyncio.to_thread(wait_until, is_free)
        await ledger.close()

    with Proxy(valkey_server.port) as proxy, valkey_server.client() as client:
        other = Ledger(client, namespace=namespace)
        asyncio.run(asyncio.wait_for(main(), 60.0))
        other.close()
