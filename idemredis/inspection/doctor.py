"""Is this Redis fit to hold the ledger? Asks the servers, and tries a whole life of a row for real.

What to ask is a generator, as in `flows`; `check` and `check_async` drive it over either client.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ..core import operations
from ..core.keys import identify, row_prefix
from ..core.operations import Call
from ..core.outcomes import Fenced, Replay, Row, Stale
from ..core.reservation import Reservation
from ..core.response import StoredResponse
from ..core.scripts import load
from ..errors import CorruptRow, IdempotencyError, LedgerUnavailable
from ..policy import Policy
from ..store import clients
from ..store.cluster import wire
from ..store.errors import ERRORS, is_denied, map_error, was_redirected
from ..store.evaluate import evaluate, evaluate_async
from ..store.nodes import Node, primaries, send, send_async
from ..store.wire import Words
from . import SAMPLE
from .diagnosis import (
    Finding,
    Report,
    Server,
    TTLs,
    client_findings,
    clock_finding,
    row_findings,
    server_findings,
)
from .rows import RowSummary, identity_of, summarise

__all__ = ["SCRATCH", "Finding", "Report", "check", "check_async", "unreachable"]

T = TypeVar("T")

SCRATCH = "idemredis-doctor"
"""Principal of the rows that a check tries things on. They are removed, and expire by themselves otherwise."""

SCRATCH_LEASE, SCRATCH_RETENTION = 5.0, 60.123
"""Seconds. No whole number of them, so that a server that counts whole seconds is found out."""

TICK, COARSE_TICK = 0.02, 1.1
"""Seconds after which a TTL must have become shorter; the second where the server seems to count whole seconds."""

TRIPS = 20
"""PINGs: enough for a p99 that shows a sick network, and over in a few milliseconds on a well one."""

_CONFIG = ("appendfsync", "min-replicas-to-write", "hash-max-listpack-value", "hash-max-ziplist-value")


class _Ask(NamedTuple):
    """Commands for one server, in one round trip."""

    where: Any
    commands: Sequence[Words]


class _Run(NamedTuple):
    """Scripts, run as a ledger runs them."""

    where: Any
    calls: Sequence[Call[Any]]


class _Pause(NamedTuple):
    """Wait so many seconds."""

    seconds: float


_Steps: TypeAlias = Generator[_Ask | _Run | _Pause, list[Any], T]


def check(
    client: Any, policy: Policy, namespace: str, seconds: float, *, sample: int = SAMPLE, scratch: bool = True
) -> Report:
    """Examine the server, the client and some rows of a ledger. See `Ledger.check`."""
    try:
        nodes = primaries(client)
    except ERRORS as error:
        return unreachable(map_error(error, 0.0))
    steps = _examine(client, policy, namespace, nodes, seconds, sample, scratch)
    replies: list[Any] = []
    try:
        step = next(steps)
        while True:
            match step:
                case _Ask(where, commands):
                    replies = send(where, commands)
                case _Run(where, calls):
                    replies = evaluate(where, calls)
                case _Pause(seconds):
                    time.sleep(seconds)
            step = steps.send(replies)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # what the generator returns, which its type says


async def check_async(
    client: Any, policy: Policy, namespace: str, seconds: float, *, sample: int = SAMPLE, scratch: bool = True
) -> Report:
    """Examine the server, the asyncio client and some rows of a ledger. See `AsyncLedger.check`."""
    nodes: list[Node] = [client]
    if clients.is_cluster(client):
        try:
            await client.initialize()
        except ERRORS as error:
            return unreachable(map_error(error, 0.0))
        nodes = client.get_primaries()
    steps = _examine(client, policy, namespace, nodes, seconds, sample, scratch)
    replies: list[Any] = []
    try:
        step = next(steps)
        while True:
            match step:
                case _Ask(where, commands):
                    replies = await send_async(where, commands)
                case _Run(where, calls):
                    replies = await evaluate_async(where, calls)
                case _Pause(seconds):
                    await asyncio.sleep(seconds)
            step = steps.send(replies)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # as above


def unreachable(error: IdempotencyError) -> Report:
    """Return what there is to say where nothing can be asked."""
    why = str(error.__cause__ or error)
    return Report((Finding("reachable", "problem", why, "is it up, and is the URL right?"),), reachable=False)


def _ask(where: Any, *commands: Words) -> _Steps[list[Any]]:
    """Send commands; where one fails, our error for it stands in the place of its reply."""
    sent = time.monotonic()
    replies = yield _Ask(where, commands)
    seconds = time.monotonic() - sent
    return [map_error(reply, seconds) if isinstance(reply, ERRORS) else reply for reply in replies]


def _examine(
    client: Any, policy: Policy, namespace: str, nodes: Sequence[Node], seconds: float, sample: int, scratch: bool
) -> _Steps[Report]:
    findings: list[Finding] = []
    found: list[RowSummary] = []
    servers: list[tuple[Any, Server]] = []
    complete, sizes = True, list[int]()
    for node in (wire(node, seconds) for node in nodes):
        server = Server(clients.address(node.client))
        away = yield from _meet(node, server, policy)
        if away is not None:
            findings.append(
                Finding("reachable", "problem", str(away), "is it up, and is the URL right?", server.address)
            )
            continue
        servers.append((node, server))
    if not servers:
        return Report(tuple(findings), reachable=False)
    findings.append(Finding("reachable", "ok", f"{', '.join(server.address for _, server in servers)} answered"))
    for node, _ in servers:
        try:
            complete = (yield from _sample(node, namespace, sample, found, sizes)) and complete
        except IdempotencyError as refused:
            complete = False
            findings.append(Finding("rows", "unknown", f"rows cannot be looked at: {refused}"))
            break
    else:
        findings += row_findings(found, namespace, complete)
    row_bytes = sum(sizes) / len(sizes) if sizes else None
    several = len(nodes) > 1
    for _, server in servers:
        judged = server_findings(server, policy, row_bytes)
        findings += [replace(finding, node=server.address) for finding in judged] if several else judged
    findings += yield from _topology(client, servers)
    findings += client_findings(client.get_connection_kwargs(), policy)
    if scratch:
        findings += yield from _try_scripts(wire(client, seconds), namespace)
    else:
        for name in ("scripts", "clock"):
            findings.append(Finding(name, "unknown", "not tried, as was asked; without --read-only it is"))
    return Report(tuple(findings), reachable=True)


def _meet(node: Any, server: Server, policy: Policy) -> _Steps[IdempotencyError | None]:
    """Ask one server what it is; return what went wrong where it does not answer at all."""
    trips = []
    for _ in range(TRIPS):
        sent = time.monotonic()
        [pong] = yield from _ask(node, ("PING",))
        if isinstance(pong, LedgerUnavailable) and not is_denied(pong.__cause__ or pong):
            return pong
        trips.append(time.monotonic() - sent)
    server.trips = trips
    [info] = yield from _ask(node, ("INFO",))
    if isinstance(info, Exception):
        server.refused = str(info.__cause__ or info)
    else:
        server.info = info
    if policy.min_replicas:
        [wait] = yield from _ask(node, ("WAIT", 0, 1))
        if isinstance(wait, Exception):
            server.wait_refused = str(wait.__cause__ or wait)
    config: dict[str, str] = {}
    for answer in (yield from _ask(node, *(("CONFIG GET", name) for name in _CONFIG))):
        if isinstance(answer, dict):
            config.update({_text(name): _text(value) for name, value in answer.items()})
    server.config = config
    return None


def _sample(node: Any, namespace: str, most: int, found: list[RowSummary], sizes: list[int]) -> _Steps[bool]:
    """Look at some rows of a server; return whether those were all."""
    cursor = 0
    while len(found) < most:
        [answer] = yield from _ask(node, ("SCAN", cursor, "MATCH", f"{row_prefix(namespace)}*", "COUNT", most))
        if isinstance(answer, Exception):
            raise answer
        cursor, names = int(answer[0]), [name.decode("ascii", "replace") for name in answer[1]]
        identities = [identity_of(name) for name in names]
        rows = yield from _call_all(node, [operations.read(identity, body=False) for identity in identities])
        memory = yield from _ask(node, *(("MEMORY USAGE", name) for name in names))
        for identity, row, size in zip(identities, rows, memory, strict=True):
            if was_redirected(row):
                continue  # its slot moves; the sample can do without it
            seen = summarise(identity, row)
            if seen is not None and seen.identity.principal != SCRATCH:
                found.append(seen)
                sizes += [size] if isinstance(size, int) else []
        if not cursor:
            return True
    return False


def _topology(client: Any, servers: Sequence[tuple[Any, Server]]) -> _Steps[list[Finding]]:
    """Cluster and Sentinel, where the client or the server says that there is one."""
    node, server = servers[0]
    if clients.is_cluster(client):
        [info] = yield from _ask(node, ("CLUSTER INFO",))
        if not isinstance(info, dict):
            return [Finding("cluster", "unknown", f"CLUSTER INFO: {getattr(info, '__cause__', None) or info}")]
        facts = {_text(name): _text(value) for name, value in info.items()}
        slots, state = facts.get("cluster_slots_ok"), facts.get("cluster_state")
        reason = f"state {state}, {slots} of 16384 slots served by {len(servers)} primaries"
        if state != "ok" or slots != "16384":
            return [Finding("cluster", "problem", reason, server.command("CLUSTER NODES"))]
        return [Finding("cluster", "ok", reason)]
    if server.of_cluster:
        return [
            Finding(
                "cluster",
                "problem",
                "the server is one of a cluster, and the client is not a cluster's: other rows are out of its reach",
                "give the ledger a redis.RedisCluster",
            )
        ]
    pool = getattr(client, "connection_pool", None)
    sentinels = getattr(getattr(pool, "sentinel_manager", None), "sentinels", None)
    if not sentinels:
        return []
    votes = []
    for sentinel in sentinels:
        [vote] = yield from _ask(wire(sentinel, servers[0][0].timeout), ("SENTINEL CKQUORUM", pool.service_name))  # type: ignore[union-attr]
        votes.append(vote)
    refused = [str(vote.__cause__ or vote) for vote in votes if isinstance(vote, Exception)]
    if refused:
        reason = f"{len(refused)} of {len(votes)} sentinels see no quorum for a failover: {refused[0]}"
        return [Finding("sentinel", "warning", reason, "redis-cli -p 26379 SENTINEL SENTINELS NAME")]
    return [Finding("sentinel", "ok", f"{len(votes)} sentinels agree that they could fail over")]


def _try_scripts(client: Any, namespace: str) -> _Steps[list[Finding]]:
    """Lead two rows through every transition, watch the TTL of one, and remove them."""
    done = identify(namespace, SCRATCH, secrets.token_hex(8))
    failed = identify(namespace, SCRATCH, secrets.token_hex(8))
    owner, lease, keep, now = secrets.token_hex(8), SCRATCH_LEASE, SCRATCH_RETENTION, time.time()
    step = "EVAL"
    findings: list[Finding] = []
    try:
        by_text = operations.read(done)  # a server that knows the scripts would not show that EVAL is denied
        [reply] = yield from _ask(client, ("EVAL", load()[by_text.script].text, 1, by_text.row, *by_text.args))
        if isinstance(reply, Exception):
            raise reply
        step = "claim"
        r = _sure(Reservation, (yield from _call(client, operations.claim(done, owner, "f", lease, keep, now, ""))))
        rest: list[tuple[str, Call[Any]]] = [
            ("renew", operations.renew(r, keep)),
            ("checkpoint", operations.checkpoint(r, "tried", "null", keep)),
            ("complete", operations.complete(r, StoredResponse(204), keep)),
        ]
        for step, call in rest:
            set_at = time.monotonic()
            if isinstance((yield from _call(client, call)), Fenced):
                raise CorruptRow(f"{step} was refused to the row's own owner")
        step = "read"
        row = _sure(Row, (yield from _call(client, operations.read(done))))
        read_at = time.monotonic()
        step = "replay"
        _sure(Replay, (yield from _call(client, operations.claim(done, "another", "f", lease, keep, now, ""))))

        step = "claim"
        r = _sure(Reservation, (yield from _call(client, operations.claim(failed, owner, "f", lease, keep, now, ""))))
        step = "release"
        yield from _call(client, operations.release(failed, 1, owner, keep))
        step = "claim of a stale row"
        _sure(Stale, (yield from _call(client, operations.claim(failed, "another", "f", lease, keep, now, ""))))
        step = "takeover"
        taken = yield from _call(client, operations.takeover(failed, 1, "another", "f", lease, keep, ""))
        step = "fail"
        yield from _call(client, operations.fail(_sure(Reservation, taken), StoredResponse(500), keep))
        findings.append(Finding("scripts", "ok", "claimed, renewed, completed, replayed, released, taken over, failed"))
        step = "read"
        ttls = TTLs(keep, row.ttl or 0.0, read_at - set_at)
        yield _Pause(COARSE_TICK if ttls.coarse else TICK)
        between = time.monotonic() - read_at
        row = _sure(Row, (yield from _call(client, operations.read(done))))
        findings.append(clock_finding(replace(ttls, second=row.ttl or 0.0, between=between)))
    except IdempotencyError as refused:
        why = refused.__cause__ or refused
        fix = "give the user what `idemredis acl` prints for the app" if is_denied(why) else ""
        findings.append(Finding("scripts", "problem", f"{step} does not work: {why}", fix))
    yield from _ask(client, ("DEL", done.row))
    yield from _ask(client, ("DEL", failed.row))
    return findings


def _call(client: Any, call: Call[T]) -> _Steps[T]:
    [outcome] = yield from _call_all(client, [call])
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _call_all(client: Any, calls: Sequence[Call[T]]) -> _Steps[list[T | IdempotencyError]]:
    """Run scripts as a ledger would."""
    if not calls:
        return []
    return (yield _Run(client, calls))


def _sure(kind: type[T], outcome: object) -> T:
    if not isinstance(outcome, kind):
        raise CorruptRow(f"{type(outcome).__name__} where {kind.__name__} was due")
    return outcome


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
