"""Runs scripts: EVALSHA, then EVAL where the server has not seen the text; WAIT where replicas must have the write.

Decided once, in a generator that yields what one round trip asks and is sent the replies; driven over sync and asyncio.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Mapping, Sequence
from functools import cache
from itertools import chain
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

__all__ = ["encode_call", "evaluate", "evaluate_async", "evaluate_call", "evaluate_call_async", "evaluation", "raised"]

Scripts: TypeAlias = Mapping[str, Script] | None
Steps: TypeAlias = Generator[Trip, "list[Any] | Exception", Any]
"""Yields round trips, and is sent their replies, or the error that came instead."""

_SIZES = [f"\r\n${size}\r\n" for size in range(1024)]
"""What stands before a word of each size, and ends the word before. Made once, since formatting a number is slow."""


def evaluation(call: Call[Any], scripts: Scripts, until: float, policy: Policy | None = None) -> Steps:
    """Yield the round trips that run a script, and return its outcome, or the error of ours that it comes to.

    A call whose connection was out of step is sent again, on another one: each script has the same effect twice.

    Args:
        call: the call.
        scripts: the scripts by name; by default those of the package.
        until: when it is no longer sent again, by the local monotonic clock.
        policy: says how many replicas must acknowledge it; None for none.
    """
    script = (load() if scripts is None else scripts)[call.script]
    tokens: list[bytes | None] = [call.token.encode()]
    replicas, wait = 0, b""
    if call.durable and policy is not None and policy.min_replicas:
        replicas, wait = policy.min_replicas, _wait(policy)
        tokens.append(None)
    by_text = False
    while True:
        sent = time.monotonic()
        replies = yield call.row, encode_call(script, call, by_text) + wait, tokens
        try:
            if isinstance(replies, Exception):
                if isinstance(replies, OutOfStep) and time.monotonic() < until:
                    continue
                raise map_error(replies, time.monotonic() - sent)
            reply = replies[0]
            if isinstance(reply, Exception):
                if isinstance(reply, NoScriptError) and not by_text:
                    by_text = True
                    continue
                raise map_error(reply, time.monotonic() - sent)
            outcome = call.decode(reply, sent)  # its token was compared while the connection was in hand
            return _acknowledged(outcome, replies[1], replicas, sent) if replicas else outcome
        except IdempotencyError as error:
            return error


def _together(calls: Sequence[Call[Any]], scripts: Scripts, policy: Policy | None, until: float) -> Steps:
    """Run several at once: what they send next goes out in one round trip. Return the outcome of each.

    There is one WAIT in a trip, after all scripts: it waits for everything that the connection wrote.
    """
    evaluations = [evaluation(call, scripts, until) for call in calls]
    outcomes: list[Any] = [None] * len(calls)
    replies: dict[int, Any] = dict.fromkeys(range(len(calls)))  # sending None starts a generator
    required = 0 if policy is None else policy.min_replicas
    by_replicas, sent = None, 0.0
    while True:
        trips = {}
        for i, reply in replies.items():
            try:
                trips[i] = evaluations[i].send(reply)
            except StopIteration as end:
                outcomes[i] = end.value
                if required and calls[i].durable and not isinstance(end.value, IdempotencyError):
                    outcomes[i] = capture_error(_acknowledged, end.value, by_replicas, required, sent)
        if not trips:
            return outcomes
        rows, packed, of_calls = map(list, zip(*trips.values(), strict=True))
        tokens = list(chain.from_iterable(of_calls))
        if policy is not None and required and any(calls[i].durable for i in trips):
            packed.append(_wait(policy))
            tokens.append(None)
        sent = time.monotonic()
        found = yield rows[0], b"".join(packed), tokens
        if isinstance(found, Exception):
            replies = dict.fromkeys(trips, found)
        else:
            by_replicas = found[-1]
            replies = {i: [reply] for i, reply in zip(trips, found, strict=False)}


def _wait(policy: Policy) -> bytes:
    return encode([("WAIT", policy.min_replicas, operations.milliseconds(policy.replica_timeout))])


def _acknowledged(outcome: Any, by_replicas: Any, replicas: int, sent: float) -> Any:
    if isinstance(by_replicas, Exception):  # WAIT is refused, but the script has run
        raise map_error(by_replicas, time.monotonic() - sent, unknown=True)
    return operations.acknowledged(outcome, by_replicas, replicas)


def encode_call(script: Script, call: Call[Any], by_text: bool = False) -> bytes:
    """Return the EVALSHA of a call, or its EVAL, as Redis reads it."""
    # One character stands for each byte: text is put together in half the time that bytes take.
    parts = [_head(script.text if by_text else script.sha, by_text, len(call.args))]
    for word in (call.row, *call.args):
        if type(word) is str:
            text = word if word.isascii() else word.encode("utf-8", "surrogateescape").decode("latin-1")
        else:
            text = word.decode("latin-1") if type(word) is bytes else str(word)
        try:
            parts.append(_SIZES[len(text)])
        except IndexError:
            parts.append(f"\r\n${len(text)}\r\n")
        parts.append(text)
    parts.append("\r\n")
    return "".join(parts).encode("latin-1")


@cache
def _head(script: str, by_text: bool, arguments: int) -> str:
    words = (bulk("EVAL" if by_text else "EVALSHA"), bulk(script), bulk(1))
    return f"*{len(words) + 1 + arguments}\r\n{b''.join(words).decode('latin-1')}".removesuffix("\r\n")


def evaluate_call(wire: Wire | Routed, call: Call[Any], scripts: Scripts = None, policy: Policy | None = None) -> Any:
    """Run a script and return its outcome: in one round trip, or in two where the server has not seen it."""
    until = time.monotonic() + wire.timeout
    return _run(wire, evaluation(call, scripts, until, policy), until)


def evaluate(
    wire: Wire | Routed, calls: Sequence[Call[Any]], scripts: Scripts = None, policy: Policy | None = None
) -> list[Any]:
    """Run scripts, in one round trip to each server (two where one has not been seen), and return their outcomes."""
    if isinstance(wire, Routed) and len(calls) > 1:
        return _evaluate_by_node(wire, calls, scripts, policy)
    until = time.monotonic() + wire.timeout
    return _run(wire, _together(calls, scripts, policy, until), until)  # type: ignore[no-any-return]  # a list, as `_together` says


async def evaluate_call_async(
    wire: AsyncWire | AsyncRouted, call: Call[Any], scripts: Scripts = None, policy: Policy | None = None
) -> Any:
    """Run a script over an asyncio client, as `evaluate_call` does."""
    until = time.monotonic() + wire.timeout
    return await _run_async(wire, evaluation(call, scripts, until, policy), until)


async def evaluate_async(
    wire: AsyncWire | AsyncRouted,
    calls: Sequence[Call[Any]],
    scripts: Scripts = None,
    policy: Policy | None = None,
) -> list[Any]:
    """Run scripts over an asyncio client: in one round trip, or side by side on a cluster."""
    if isinstance(wire, AsyncRouted):
        return list(await asyncio.gather(*(evaluate_call_async(wire, call, scripts, policy) for call in calls)))
    until = time.monotonic() + wire.timeout
    return await _run_async(wire, _together(calls, scripts, policy, until), until)  # type: ignore[no-any-return]


def _run(wire: Wire | Routed, steps: Steps, until: float) -> Any:
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
        return end.value


async def _run_async(wire: AsyncWire | AsyncRouted, steps: Steps, until: float) -> Any:
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
        return end.value


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
        outcomes[i] = evaluate_call(routed, calls[i], *how)
    return outcomes


def raised(outcome: Any) -> Any:
    """Return an outcome of `evaluate`, or raise the error that it is."""
    if isinstance(outcome, IdempotencyError):
        raise outcome
    return outcome
