"""Runs scripts: EVALSHA, then EVAL where the server has not seen the text; WAIT where replicas must have the write.

Decided once, in a generator that yields what one round trip asks and is sent the replies; driven over sync and asyncio.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

from redis.exceptions import NoScriptError

from ..core import operations
from ..core.operations import Call
from ..core.scripts import Script, load
from ..errors import IdempotencyError, LedgerUnavailable
from ..policy import Policy
from .cluster import AsyncRouted, Routed
from .errors import ERRORS, OutOfStep, capture_error, map_error, was_redirected
from .wire import AsyncWire, Trip, Wire, bulk, encode

__all__ = ["encode_call", "evaluate", "evaluate_async", "evaluation", "raised"]


Evaluation: TypeAlias = Generator[Trip, "list[Any] | Exception", list[Any]]


def evaluation(
    calls: Sequence[Call[Any]],
    scripts: Mapping[str, Script] | None = None,
    policy: Policy | None = None,
    until: float = 0.0,
) -> Evaluation:
    """Yield the round trips for these calls, and be sent their replies, or the error that came instead.

    A call whose connection was out of step is sent again, on another one: each script has the same effect twice.

    Returns:
        For each call its outcome, or the error of ours that it comes to.
    """
    loaded = load() if scripts is None else scripts
    replicas = policy.min_replicas if policy is not None else 0
    wait = _wait(policy) if policy is not None and replicas else b""
    outcomes: list[Any] = [None] * len(calls)
    unseen: Sequence[int] = range(len(calls))
    by_text = False
    while unseen:
        parts: list[bytes] = []
        tokens: list[bytes | None] = []
        for i in unseen:
            call = calls[i]
            script = loaded[call.script]
            tokens.append(call.token.encode())
            parts.append(encode_call(script, call, by_text))
        waits = replicas and any(calls[i].durable for i in unseen)
        if waits:  # once, after the last call: it waits for all that this connection wrote
            parts.append(wait)
            tokens.append(None)
        sent = time.monotonic()
        replies = yield Trip(calls[unseen[0]].row, b"".join(parts), tokens)
        if isinstance(replies, OutOfStep) and time.monotonic() < until:
            continue
        found = [replies] * len(tokens) if isinstance(replies, Exception) else replies
        by_replicas = found[-1] if waits else replicas
        left = []
        for i, reply in zip(unseen, found, strict=False):
            call = calls[i]
            acknowledged = by_replicas if call.durable else replicas
            if isinstance(reply, NoScriptError) and not by_text:
                left.append(i)
            else:
                outcomes[i] = capture_error(_outcome, call, reply, acknowledged, replicas, sent)
        unseen, by_text = left, True
    return outcomes


def encode_call(script: Script, call: Call[Any], by_text: bool = False) -> bytes:
    """Return the EVALSHA of a call, or its EVAL, as Redis reads it."""
    head = _head(script.text if by_text else script.sha, by_text, len(call.args))
    words = (call.row, *call.args)
    parts = []
    for word in words:  # all but a body is text, which is quicker to put together, and encoded at once
        if type(word) is bytes or not (text := str(word)).isascii():
            return head + b"".join(map(bulk, words))
        parts.append(f"${len(text)}\r\n{text}\r\n")
    return head + "".join(parts).encode()


@cache
def _head(script: str, by_text: bool, arguments: int) -> bytes:
    name = b"EVAL" if by_text else b"EVALSHA"
    text = script.encode()
    return b"*%d\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$1\r\n1\r\n" % (4 + arguments, len(name), name, len(text), text)


def _wait(policy: Policy) -> bytes:
    return encode([("WAIT", policy.min_replicas, operations.milliseconds(policy.replica_timeout))])


def evaluate(
    wire: Wire | Routed,
    calls: Sequence[Call[Any]],
    scripts: Mapping[str, Script] | None = None,
    policy: Policy | None = None,
) -> list[Any]:
    """Run scripts, in one round trip to each server (two where one has not been seen). See `evaluation`."""
    if isinstance(wire, Routed) and len(calls) > 1:
        return _evaluate_by_node(wire, calls, scripts, policy)
    until = time.monotonic() + wire.timeout
    steps = evaluation(calls, scripts, policy, until)
    replies: list[Any] | Exception
    try:
        trip = next(steps)
        while True:
            try:
                replies = wire.exchange(trip, until)
            except ERRORS as error:
                replies = error
            trip = steps.send(replies)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # what the generator returns, which its type says


async def evaluate_async(
    wire: AsyncWire | AsyncRouted,
    calls: Sequence[Call[Any]],
    scripts: Mapping[str, Script] | None = None,
    policy: Policy | None = None,
) -> list[Any]:
    """Run scripts over an asyncio client: in one round trip, or side by side on a cluster."""
    if isinstance(wire, AsyncRouted) and len(calls) > 1:
        found = await asyncio.gather(*(evaluate_async(wire, [call], scripts, policy) for call in calls))
        return [outcome for [outcome] in found]
    until = time.monotonic() + wire.timeout
    steps = evaluation(calls, scripts, policy, until)
    replies: list[Any] | Exception
    try:
        trip = next(steps)
        while True:
            try:
                replies = await wire.exchange(trip, until)
            except ERRORS as error:
                replies = error
            trip = steps.send(replies)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def _evaluate_by_node(routed: Routed, calls: Sequence[Call[Any]], *how: Any) -> list[Any]:
    """Run scripts in one round trip to each node; a redirected one is sent again by itself."""
    outcomes: list[Any] = [None] * len(calls)
    alone = set(range(len(calls)))
    for wire, places in routed.by_node([call.row for call in calls]):
        for i, outcome in zip(places, evaluate(wire, [calls[i] for i in places], *how), strict=True):
            outcomes[i] = outcome
            if isinstance(outcome, LedgerUnavailable) and outcome.unknown:
                routed.doubt(calls[i].row)
            if not was_redirected(outcome):
                alone.discard(i)
    for i in alone:
        [outcomes[i]] = evaluate(routed, [calls[i]], *how)
    return outcomes


def _outcome(call: Call[Any], reply: Any, acknowledged: Any, required: int, sent: float) -> Any:
    if isinstance(reply, Exception):
        raise map_error(reply, time.monotonic() - sent)
    outcome = call.decode(reply, sent)  # its token was compared while the connection was in hand
    if isinstance(acknowledged, Exception):  # WAIT is refused, but the script has run
        raise map_error(acknowledged, time.monotonic() - sent, unknown=True)
    return operations.acknowledged(outcome, acknowledged, required)


def raised(outcome: Any) -> Any:
    """Return an outcome of `evaluate`, or raise the error that it is."""
    if isinstance(outcome, IdempotencyError):
        raise outcome
    return outcome
