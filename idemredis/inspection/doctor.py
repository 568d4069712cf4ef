"""Check whether a Redis deployment is fit for the ledger: query its servers, and run every script on scratch rows.

The checks are generators, as in `flows`; `check` and `check_async` run them on a sync or an asyncio client.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ..core import operations
from ..core.keys import identify, row_prefix, row_text
from ..core.operations import Call
from ..core.outcomes import Fenced, Replay, Row, Stale
from ..core.reservation import Reservation
from ..core.response import StoredResponse
from ..core.scripts import load
from ..errors import CorruptRow, IdempotencyError, LedgerUnavailable
from ..policy import Policy
from ..store import clients
from ..store.cluster import wire
from ..store.errors import ERRORS, is_denied, is_wrong_password, map_error, was_redirected
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
from .rows import SCAN_COUNT, RowSummary, identity_of, summarise
from .suggestions import command_line, redis_cli
from .survey import BATCH

__all__ = ["SCRATCH", "Finding", "Report", "check", "check_async", "unreachable"]

T = TypeVar("T")

SCRATCH = "idemredis-doctor"
"""Principal of the scratch rows. They are removed at the end; if that fails, they expire."""

SCRATCH_LEASE, SCRATCH_RETENTION = 5.0, 60.123
"""Seconds. The retention is not a whole number, so that a server which counts whole seconds is detected."""

TICK, COARSE_TICK = 0.02, 1.1
"""Seconds after which a TTL must be lower; the second is for servers that seem to count whole seconds."""

TRIPS = 20
"""Number of PINGs. Enough to show a bad network, and done in a few milliseconds on a good one."""

_CHECK_URL = "check that the server is up and that the URL is right"

_CHECK_LOGIN = "check the user and the password of the URL, redis://USER:PASSWORD@HOST:PORT/DATABASE"

SCAN_ROUNDS = 20
"""SCAN calls for the sample on each server; among many foreign keys, fewer rows are found than asked for."""

_CONFIG = ("appendfsync", "min-replicas-to-write", "hash-max-listpack-value", "hash-max-ziplist-value")


class _Send(NamedTuple):
    """Commands to send in one round trip to one server."""

    where: Any
    commands: Sequence[Words]


class _Run(NamedTuple):
    """Scripts, run as a ledger runs them."""

    where: Any
    calls: Sequence[Call[Any]]


class _Pause(NamedTuple):
    """A pause, in seconds."""

    seconds: float


_Steps: TypeAlias = Generator[_Send | _Run | _Pause, list[Any], T]


def check(
    client: Any, policy: Policy, namespace: str, seconds: float, *, sample: int = SAMPLE, scratch: bool = True
) -> Report:
    """Check the servers, the client and a sample of rows; an unreachable server is a finding, not an exception.

    Args:
        client: a sync redis-py client.
        policy: the ledger's policy.
        namespace: first part of the rows' names.
        seconds: the deadline of each round trip.
        sample: how many rows to look at, at most.
        scratch: run the scripts on two scratch rows, which are removed afterwards; False writes nothing.
    """
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
                case _Send(where, commands):
                    replies = send(where, commands)
                case _Run(where, calls):
                    replies = evaluate(where, calls)
                case _Pause(seconds):
                    time.sleep(seconds)
            step = steps.send(replies)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # the generator's return value


async def check_async(
    client: Any, policy: Policy, namespace: str, seconds: float, *, sample: int = SAMPLE, scratch: bool = True
) -> Report:
    """Check the servers, the client and a sample of rows; an unreachable server is a finding, not an exception.

    Args:
        client: an asyncio redis-py client.
        policy: the ledger's policy.
        namespace: first part of the rows' names.
        sample: how many rows to look at, at most.
        scratch: run the scripts on two scratch rows, which are removed afterwards; False writes nothing.
    """
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
                case _Send(where, commands):
                    replies = await send_async(where, commands)
                case _Run(where, calls):
                    replies = await evaluate_async(where, calls)
                case _Pause(seconds):
                    await asyncio.sleep(seconds)
            step = steps.send(replies)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # the generator's return value


def unreachable(error: IdempotencyError) -> Report:
    """Return the report for a server that cannot be reached."""
    return Report((_unreachable(error),), reachable=False)


def _unreachable(error: IdempotencyError, node: str = "") -> Finding:
    why = str(error.__cause__ or error)
    if is_wrong_password(error.__cause__):
        reason = f"the server replied, and refuses the user or password: {why}"
        return Finding("reachable", "problem", reason, _CHECK_LOGIN, node)
    return Finding("reachable", "problem", why, _CHECK_URL, node)


def _request(where: Any, *commands: Words) -> _Steps[list[Any]]:
    """Send commands and return their replies; a command that failed has its `IdempotencyError` as its reply."""
    sent = time.monotonic()
    replies = yield _Send(where, commands)
    seconds = time.monotonic() - sent
    return [map_error(reply, seconds) if isinstance(reply, ERRORS) else reply for reply in replies]


def _examine(
    client: Any, policy: Policy, namespace: str, nodes: Sequence[Node], seconds: float, sample: int, scratch: bool
) -> _Steps[Report]:
    findings: list[Finding] = []
    command = command_line(nodes[0], namespace)
    rows: list[RowSummary] = []
    scanned = 0
    servers: list[tuple[Any, Server]] = []
    complete, sizes = True, list[int]()
    for node in (wire(node, seconds) for node in nodes):
        server = Server(clients.address(node.client), redis_cli=redis_cli(node.client))
        error = yield from _query(node, server, policy)
        if error is not None:
            findings.append(_unreachable(error, server.address))
            continue
        servers.append((node, server))
    if not servers:
        return Report(tuple(findings), reachable=False)
    findings.append(Finding("reachable", "ok", f"{', '.join(server.address for _, server in servers)} replied"))
    for node, _ in servers:
        try:
            keys, whole = yield from _sample(node, namespace, sample, rows, sizes)
            scanned, complete = scanned + keys, complete and whole
        except IdempotencyError as refused:
            complete = False
            findings.append(Finding("rows", "unknown", f"rows cannot be read: {refused}"))
            break
    else:
        findings += row_findings(rows, None if complete else scanned, command)
    row_bytes = sum(sizes) / len(sizes) if sizes else None
    several = len(nodes) > 1
    for _, server in servers:
        own = server_findings(server, policy, row_bytes)
        findings += [replace(finding, node=server.address) for finding in own] if several else own
    findings += yield from _topology(client, servers)
    findings += client_findings(servers[0][0].timeout, policy)
    if scratch:
        findings += yield from _try_scripts(wire(client, seconds), namespace)
    else:
        for name in ("scripts", "clock"):
            findings.append(Finding(name, "unknown", "not tried because of --read-only or scratch=False"))
    return Report(tuple(findings), reachable=True)


def _query(node: Any, server: Server, policy: Policy) -> _Steps[IdempotencyError | None]:
    """Query one server and fill in its facts; return the error if it cannot be reached."""
    trips = []
    for _ in range(TRIPS):
        sent = time.monotonic()
        [pong] = yield from _request(node, ("PING",))
        if isinstance(pong, LedgerUnavailable) and not is_denied(pong.__cause__ or pong):
            return pong
        trips.append(time.monotonic() - sent)
    server.trips = trips
    [info] = yield from _request(node, ("INFO",))
    if isinstance(info, Exception):
        server.refused = str(info.__cause__ or info)
    else:
        server.info = info
    if policy.min_replicas:
        [wait] = yield from _request(node, ("WAIT", 0, 1))
        if isinstance(wait, Exception):
            server.wait_refused = str(wait.__cause__ or wait)
    config: dict[str, str] = {}
    for reply in (yield from _request(node, *(("CONFIG GET", name) for name in _CONFIG))):
        if isinstance(reply, dict):
            config.update({_text(name): _text(value) for name, value in reply.items()})
    server.config = config
    return None


def _sample(
    node: Any, namespace: str, limit: int, rows: list[RowSummary], sizes: list[int]
) -> _Steps[tuple[int, bool]]:
    """Add some rows of a server and their memory to the lists, after few calls, however many other keys there are.

    Returns:
        About how many keys were scanned, and True if the rows are all of the server's.
    """
    cursor, keys = 0, 0
    waiting: list[str] = []
    pattern = f"{row_prefix(namespace)}*"
    while len(rows) < limit and (waiting or keys < SCAN_ROUNDS * SCAN_COUNT):
        if not waiting:
            [reply] = yield from _request(node, ("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_COUNT))
            if isinstance(reply, Exception):
                raise reply
            cursor, waiting = int(reply[0]), [row_text(name) for name in reply[1]]
            keys += SCAN_COUNT
        at_once = min(limit - len(rows), BATCH)
        names, waiting = waiting[:at_once], waiting[at_once:]
        identities = [identity_of(name) for name in names]
        outcomes = yield from _call_all(node, [operations.read(identity, body=False) for identity in identities])
        memory = yield from _request(node, *(("MEMORY USAGE", name) for name in names))
        for identity, outcome, size in zip(identities, outcomes, memory, strict=True):
            if was_redirected(outcome):
                continue  # its slot is being moved; the sample does not need this row
            summary = summarise(identity, outcome)
            if summary is not None and summary.identity.principal != SCRATCH:
                rows.append(summary)
                sizes += [size] if isinstance(size, int) else []
        if not cursor and not waiting:
            return keys, True
    return keys, False


def _topology(client: Any, servers: Sequence[tuple[Any, Server]]) -> _Steps[list[Finding]]:
    """Return the findings about the cluster or Sentinel, if there is one."""
    node, server = servers[0]
    if clients.is_cluster(client):
        [info] = yield from _request(node, ("CLUSTER INFO",))
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
                "the server belongs to a cluster, and the client is not a cluster client: it cannot reach all rows",
                "use a redis.RedisCluster",
            )
        ]
    pool = getattr(client, "connection_pool", None)
    sentinels = getattr(getattr(pool, "sentinel_manager", None), "sentinels", None)
    if not sentinels:
        return []
    votes = []
    for sentinel in sentinels:
        way = wire(sentinel, servers[0][0].timeout)
        [vote] = yield from _request(way, ("SENTINEL CKQUORUM", pool.service_name))  # type: ignore[union-attr]
        votes.append(vote)
    refused = [str(vote.__cause__ or vote) for vote in votes if isinstance(vote, Exception)]
    if refused:
        reason = f"{len(refused)} of {len(votes)} sentinels report no quorum for a failover: {refused[0]}"
        fix = f"{redis_cli(sentinels[0])} SENTINEL SENTINELS {pool.service_name}"  # type: ignore[union-attr]
        return [Finding("sentinel", "warning", reason, fix)]
    return [Finding("sentinel", "ok", f"{len(votes)} sentinels report a quorum for a failover")]


def _try_scripts(client: Any, namespace: str) -> _Steps[list[Finding]]:
    """Run two scratch rows through every transition, check that the TTL of one runs, and remove both."""
    done = identify(namespace, SCRATCH, secrets.token_hex(8))
    failed = identify(namespace, SCRATCH, secrets.token_hex(8))
    owner, lease, keep, now = secrets.token_hex(8), SCRATCH_LEASE, SCRATCH_RETENTION, time.time()
    step = "EVAL"
    findings: list[Finding] = []
    try:
        by_text = operations.read(done)  # by EVAL, which a user may lack even if EVALSHA works
        [reply] = yield from _request(client, ("EVAL", load()[by_text.script].text, 1, by_text.row, *by_text.args))
        if isinstance(reply, Exception):
            raise reply
        step = "claim"
        r = _expect(Reservation, (yield from _call(client, operations.claim(done, owner, "f", lease, keep, now, ""))))
        rest: list[tuple[str, Call[Any]]] = [
            ("renew", operations.renew(r, keep)),
            ("checkpoint", operations.checkpoint(r, "tried", "null", keep)),
            ("complete", operations.complete(r, StoredResponse(204), keep)),
        ]
        for step, call in rest:
            set_at = time.monotonic()
            if isinstance((yield from _call(client, call)), Fenced):
                raise CorruptRow(f"{step} of the row's owner was fenced")
        step = "read"
        row = _expect(Row, (yield from _call(client, operations.read(done))))
        read_at = time.monotonic()
        step = "replay"
        _expect(Replay, (yield from _call(client, operations.claim(done, "another", "f", lease, keep, now, ""))))

        step = "claim"
        r = _expect(Reservation, (yield from _call(client, operations.claim(failed, owner, "f", lease, keep, now, ""))))
        step = "release"
        yield from _call(client, operations.release(failed, 1, owner, keep))
        step = "claim of a stale row"
        _expect(Stale, (yield from _call(client, operations.claim(failed, "another", "f", lease, keep, now, ""))))
        step = "takeover"
        taken = yield from _call(client, operations.takeover(failed, 1, "another", "f", lease, keep, ""))
        step = "fail"
        yield from _call(client, operations.fail(_expect(Reservation, taken), StoredResponse(500), keep))
        findings.append(Finding("scripts", "ok", "claimed, renewed, completed, replayed, released, taken over, failed"))
        step = "read"
        ttls = TTLs(keep, row.ttl or 0.0, read_at - set_at)
        yield _Pause(COARSE_TICK if ttls.coarse else TICK)
        between = time.monotonic() - read_at
        row = _expect(Row, (yield from _call(client, operations.read(done))))
        findings.append(clock_finding(replace(ttls, second=row.ttl or 0.0, between=between)))
    except IdempotencyError as refused:
        why = refused.__cause__ or refused
        fix = "give the user the rules that `idemredis acl` prints for the app" if is_denied(why) else ""
        findings.append(Finding("scripts", "problem", f"{step} does not work: {why}", fix))
    yield from _request(client, ("DEL", done.row))
    yield from _request(client, ("DEL", failed.row))
    return findings


def _call(client: Any, call: Call[T]) -> _Steps[T]:
    [outcome] = yield from _call_all(client, [call])
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _call_all(client: Any, calls: Sequence[Call[T]]) -> _Steps[list[T | IdempotencyError]]:
    """Run scripts in the way that a ledger does; a call that failed has its error in place of an outcome."""
    if not calls:
        return []
    return (yield _Run(client, calls))


def _expect(kind: type[T], outcome: object) -> T:
    if not isinstance(outcome, kind):
        raise CorruptRow(f"got {type(outcome).__name__}, expected {kind.__name__}")
    return outcome


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
