"""Is this Redis fit to hold the ledger? Asks the servers, and tries a whole life of a row for real.

What to ask is a generator, as in `flows`; `check` and `check_async` drive it over either client.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from redis.exceptions import NoPermissionError, NoScriptError

from . import clients, operations
from .clients import ERRORS
from .cluster import routed, was_redirected
from .errors import CorruptRow, IdempotencyError, LedgerUnavailable
from .keys import identify
from .operating import SAMPLE
from .operating.diagnosis import (
    Finding,
    Report,
    Server,
    TTLs,
    client_findings,
    clock_finding,
    row_findings,
    server_findings,
)
from .operating.nodes import Node, Words, address, primaries
from .operating.rows import Found, identity_of, prefix, summarise
from .operations import Call, Fenced, Replay, Reservation, Row, Stale
from .policy import Policy
from .responses import StoredResponse
from .scripts import load

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


class AnyLedger(Protocol):
    """What a check needs of a `Ledger` or `AsyncLedger`."""

    @property
    def client(self) -> Any: ...

    @property
    def policy(self) -> Policy: ...

    @property
    def namespace(self) -> str: ...


class _Ask(NamedTuple):
    """Commands for one server (or, for rows, the client that finds it), in one round trip; errors are answers."""

    where: Node
    commands: Sequence[Words]


class _Pause(NamedTuple):
    """Wait so many seconds."""

    seconds: float


_Questions: TypeAlias = Generator[_Ask | _Pause, list[Any], T]


def check(ledger: AnyLedger, *, sample: int = SAMPLE, scratch: bool = True) -> Report:
    """Examine the server, the client and some rows of a ledger.

    Args:
        ledger: a `Ledger`.
        sample: rows to look at, at most.
        scratch: try the scripts on rows of its own, which are removed; False changes nothing.
    """
    try:
        questions = _examine(ledger, primaries(ledger.client), sample, scratch)
    except ERRORS as error:
        return unreachable(clients.ours(error, 0.0))
    answers: list[Any] | None = None
    try:
        while True:
            match questions.send(answers):  # type: ignore[arg-type]  # the first is None, as for any generator
                case _Ask(where, commands):
                    answers = _send(where, commands)
                case _Pause(seconds):
                    time.sleep(seconds)
                    answers = []
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # what the generator returns, which its type says


async def check_async(ledger: AnyLedger, *, sample: int = SAMPLE, scratch: bool = True) -> Report:
    """Examine the server, the client and some rows of an `AsyncLedger`; see `check`."""
    nodes: list[Node] = [ledger.client]
    if clients.is_cluster(ledger.client):
        try:
            await ledger.client.initialize()
        except ERRORS as error:
            return unreachable(clients.ours(error, 0.0))
        nodes = ledger.client.get_primaries()
    questions = _examine(ledger, nodes, sample, scratch)
    answers: list[Any] | None = None
    try:
        while True:
            match questions.send(answers):  # type: ignore[arg-type]  # as above
                case _Ask(where, commands):
                    answers = await _send_async(where, commands)
                case _Pause(seconds):
                    await asyncio.sleep(seconds)
                    answers = []
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def unreachable(error: IdempotencyError) -> Report:
    """Return what there is to say where nothing can be asked."""
    why = str(error.__cause__ or error)
    return Report((Finding("reachable", "problem", why, "is it up, and is the URL right?"),), reachable=False)


def _send(where: Node, commands: Sequence[Words]) -> list[Any]:
    sent = time.monotonic()
    try:
        if len(commands) == 1:
            return _answers([where.execute_command(*commands[0], NEVER_DECODE=True)], sent)
        pipeline = where.pipeline(transaction=False)
        for words in commands:
            pipeline.execute_command(*words, NEVER_DECODE=True)
        return _answers(pipeline.execute(raise_on_error=False), sent)
    except ERRORS as error:
        return _answers([error] * len(commands), sent)


async def _send_async(where: Node, commands: Sequence[Words]) -> list[Any]:
    sent = time.monotonic()
    try:
        if len(commands) == 1:
            return _answers([await where.execute_command(*commands[0], NEVER_DECODE=True)], sent)
        if not hasattr(where, "pipeline"):  # a cluster's node
            each = (where.execute_command(*words, NEVER_DECODE=True) for words in commands)
            return _answers(await asyncio.gather(*each, return_exceptions=True), sent)
        pipeline = where.pipeline(transaction=False)
        for words in commands:
            pipeline.execute_command(*words, NEVER_DECODE=True)
        return _answers(await pipeline.execute(raise_on_error=False), sent)
    except ERRORS as error:
        return _answers([error] * len(commands), sent)


def _answers(answers: Sequence[Any], sent: float) -> list[Any]:
    seconds = time.monotonic() - sent
    return [_refusal(answer, seconds) if isinstance(answer, Exception) else answer for answer in answers]


def _refusal(error: Exception, seconds: float) -> IdempotencyError:
    refused = clients.ours(error, seconds)
    refused.__cause__ = error
    return refused


def _examine(ledger: AnyLedger, nodes: Sequence[Node], sample: int, scratch: bool) -> _Questions[Report]:
    client, policy = ledger.client, ledger.policy
    findings: list[Finding] = []
    found: list[Found] = []
    servers: list[tuple[Node, Server]] = []
    complete, sizes = True, list[int]()
    for node in nodes:
        server = Server(address(node))
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
            complete = (yield from _sample(node, ledger.namespace, sample, found, sizes)) and complete
        except IdempotencyError as refused:
            complete = False
            findings.append(Finding("rows", "unknown", f"rows cannot be looked at: {refused}"))
            break
    else:
        findings += row_findings(found, ledger.namespace, complete)
    row_bytes = sum(sizes) / len(sizes) if sizes else None
    several = len(nodes) > 1
    for _, server in servers:
        judged = server_findings(server, policy, row_bytes)
        findings += [replace(finding, node=server.address) for finding in judged] if several else judged
    findings += yield from _topology(client, servers)
    findings += client_findings(client.get_connection_kwargs(), policy)
    if scratch:
        findings += yield from _try_scripts(routed(client), ledger.namespace)
    else:
        for name in ("scripts", "clock"):
            findings.append(Finding(name, "unknown", "not tried, as was asked; without --read-only it is"))
    return Report(tuple(findings), reachable=True)


def _meet(node: Node, server: Server, policy: Policy) -> _Questions[IdempotencyError | None]:
    """Ask one server what it is; return what went wrong where it does not answer at all."""
    trips = []
    for _ in range(TRIPS):
        sent = time.monotonic()
        [pong] = yield _Ask(node, [("PING",)])
        if isinstance(pong, LedgerUnavailable) and not isinstance(pong.__cause__, NoPermissionError):
            return pong
        trips.append(time.monotonic() - sent)
    server.trips = trips
    [info] = yield _Ask(node, [("INFO",)])
    if isinstance(info, Exception):
        server.refused = str(info.__cause__ or info)
    else:
        server.info = info
    if policy.min_replicas:
        [wait] = yield _Ask(node, [("WAIT", 0, 1)])
        if isinstance(wait, Exception):
            server.wait_refused = str(wait.__cause__ or wait)
    config: dict[str, str] = {}
    for answer in (yield _Ask(node, [("CONFIG GET", name) for name in _CONFIG])):
        if isinstance(answer, dict):
            config.update({_text(name): _text(value) for name, value in answer.items()})
    server.config = config
    return None


def _sample(node: Node, namespace: str, most: int, found: list[Found], sizes: list[int]) -> _Questions[bool]:
    """Look at some rows of a server; return whether those were all."""
    cursor = 0
    while len(found) < most:
        [answer] = yield _Ask(node, [("SCAN", cursor, "MATCH", f"{prefix(namespace)}*", "COUNT", most)])
        if isinstance(answer, Exception):
            raise answer
        cursor, names = int(answer[0]), [name.decode("ascii", "replace") for name in answer[1]]
        identities = [identity_of(name) for name in names]
        rows = yield from _call_all(node, [operations.read(identity, body=False) for identity in identities])
        memory = yield _Ask(node, [("MEMORY USAGE", name) for name in names])
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


def _topology(client: Any, servers: Sequence[tuple[Node, Server]]) -> _Questions[list[Finding]]:
    """Cluster and Sentinel, where the client or the server says that there is one."""
    node, server = servers[0]
    if clients.is_cluster(client):
        [info] = yield _Ask(node, [("CLUSTER INFO",)])
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
        [vote] = yield _Ask(sentinel, [("SENTINEL CKQUORUM", pool.service_name)])  # type: ignore[union-attr]
        votes.append(vote)
    refused = [str(vote.__cause__ or vote) for vote in votes if isinstance(vote, Exception)]
    if refused:
        reason = f"{len(refused)} of {len(votes)} sentinels see no quorum for a failover: {refused[0]}"
        return [Finding("sentinel", "warning", reason, "redis-cli -p 26379 SENTINEL SENTINELS NAME")]
    return [Finding("sentinel", "ok", f"{len(votes)} sentinels agree that they could fail over")]


def _try_scripts(client: Any, namespace: str) -> _Questions[list[Finding]]:
    """Lead two rows through every transition, watch the TTL of one, and remove them."""
    done = identify(namespace, SCRATCH, secrets.token_hex(8))
    failed = identify(namespace, SCRATCH, secrets.token_hex(8))
    owner, lease, keep, now = secrets.token_hex(8), SCRATCH_LEASE, SCRATCH_RETENTION, time.time()
    step = "claim"
    findings: list[Finding] = []
    try:
        first = operations.claim(done, owner, "f", lease, keep, now, "")
        r = _sure(Reservation, (yield from _call(client, first, cached=False)))
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
        fix = "give the user what `idemredis acl` prints for the app" if clients.is_denied(why) else ""
        findings.append(Finding("scripts", "problem", f"{step} does not work: {why}", fix))
    yield _Ask(client, [("DEL", done.row)])
    yield _Ask(client, [("DEL", failed.row)])
    return findings


def _call(client: Any, call: Call[T], *, cached: bool = True) -> _Questions[T]:
    [answer] = yield from _call_all(client, [call], cached=cached)
    if isinstance(answer, Exception):
        raise answer
    return answer


def _call_all(client: Any, calls: Sequence[Call[T]], *, cached: bool = True) -> _Questions[list[T | IdempotencyError]]:
    """Run scripts in one round trip; in a second one those that the server has not seen, or all at once by text."""
    scripts = load()
    sent = time.monotonic()
    replies: list[Any] = []
    if cached and calls:
        replies = yield _Ask(client, [("EVALSHA", scripts[c.script].sha, 1, c.row, *c.args) for c in calls])
    unseen = [i for i in range(len(calls)) if not replies or _is_unseen(replies[i])]
    if unseen:
        texts = [("EVAL", scripts[calls[i].script].text, 1, calls[i].row, *calls[i].args) for i in unseen]
        by_text = dict(zip(unseen, (yield _Ask(client, texts)), strict=True))
        replies = [by_text.get(i, replies[i] if replies else None) for i in range(len(calls))]
    return [
        reply if isinstance(reply, IdempotencyError) else clients.attempt(call.outcome, reply, sent)
        for call, reply in zip(calls, replies, strict=True)
    ]


def _is_unseen(reply: object) -> bool:
    return isinstance(getattr(reply, "__cause__", None), NoScriptError)


def _sure(kind: type[T], outcome: object) -> T:
    if not isinstance(outcome, kind):
        raise CorruptRow(f"{type(outcome).__name__} where {kind.__name__} was due")
    return outcome


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
