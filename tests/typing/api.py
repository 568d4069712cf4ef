"""What a user writes, checked by mypy --strict and never run."""

from __future__ import annotations

from typing import assert_never, assert_type
from uuid import UUID

import redis
import redis.asyncio

from idemredis import (
    AsyncLedger,
    AsyncReservation,
    Event,
    FencedOut,
    InProgress,
    Ledger,
    LedgerUnavailable,
    Policy,
    Replay,
    Reservation,
    Reused,
    Row,
    StoredResponse,
    fingerprint_request,
    fingerprint_value,
)


def observe(event: Event) -> None:
    assert_type(event.generation, int)
    assert_type(event.principal, str | None)


def make() -> Ledger:
    policy = Policy(lease=30, retention=86400, min_replicas=1, replica_timeout=0.5)
    with_client = Ledger(redis.Redis(), policy=policy, namespace="idem", observers=(observe,))
    with_cluster = Ledger(redis.RedisCluster(host="localhost"), policy)
    assert_type(with_client, Ledger)
    assert_type(with_cluster.policy.lease, float)
    return Ledger.from_url("redis://localhost:6379/0", policy=Policy(lease=30), socket_timeout=0.5)


def charge(ledger: Ledger, account: str | int | UUID, key: str, body: bytes) -> StoredResponse:
    fingerprint = fingerprint_request("POST", "/charges", {"content-type": "application/json"}, body)
    match ledger.claim(account, key, fingerprint, operation="charge", lease=60, wait=2.0, takeover=True):
        case Reservation() as r:
            assert_type(r.generation, int)
            assert_type(r.held, bool)
            assert_type(r.downstream_key("stripe"), str)
            ledger.start_heartbeat(r)
            ledger.checkpoint(r, "charged", {"charge": "ch_1"})
            r.ensure_held()
            answer = StoredResponse(status=201, headers=(("content-type", "application/json"),), body=b"{}")
            try:
                ledger.complete(r, answer)
            except (FencedOut, LedgerUnavailable):
                ledger.release(r)
            return answer
        case Replay() as done:
            assert_type(done.failed, bool)
            return done.response
        case InProgress() as busy:
            assert_type(busy.retry_after, float)
            return StoredResponse(409, (("retry-after", f"{busy.retry_after:.0f}"),))
        case Reused():
            return StoredResponse(409)
        case other:
            assert_never(other)


def look(ledger: Ledger) -> str:
    row = ledger.read("acct_1", "key-1", operation="charge")
    assert_type(row, Row | None)
    if row is None or row.response is None:
        return "nothing"
    assert_type(row.last_checkpoint and row.last_checkpoint[0], str | None)
    assert_type(row.lease_left, float)
    assert_type(row.age, float)
    assert_type(row.route, str)
    return row.status


async def consume(url: str) -> None:
    ledger = AsyncLedger.from_url(url)
    again = AsyncLedger(redis.asyncio.Redis(), Policy())
    assert_type(again, AsyncLedger)
    outcome = await ledger.claim("worker", "email:42", fingerprint_value({"to": 42}))
    assert_type(outcome, AsyncReservation | Replay | InProgress | Reused)
    if isinstance(outcome, Reservation):
        await ledger.start_heartbeat(outcome)
        await ledger.renew(outcome)
        await ledger.fail(outcome, StoredResponse(500))
    await ledger.close()


def wrong(ledger: Ledger, r: Reservation) -> None:
    """Each of these is an error that mypy finds; were it none, the ignore would be one."""
    ledger.claim("acct_1", b"key", "f")  # type: ignore[arg-type]
    ledger.claim("acct_1", "key")  # type: ignore[call-arg]
    ledger.complete(r, b"{}")  # type: ignore[arg-type]
    StoredResponse(200, [("a", "b")])  # type: ignore[arg-type]
    StoredResponse(200, body="text")  # type: ignore[arg-type]
    StoredResponse(200, omitted="because")  # type: ignore[arg-type]
    Policy(30)  # type: ignore[call-arg]
    r.generation = 2  # type: ignore[misc]
    Ledger(redis.asyncio.Redis())  # type: ignore[arg-type]
    AsyncLedger(redis.Redis())  # type: ignore[arg-type]
