"""Sends scripts: EVALSHA, then EVAL where the server has not seen the text; WAIT where replicas must have the write.

Decided once, in a generator that yields the commands of one round trip and is sent their replies; driven over sync and
asyncio clients.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any, TypeAlias

from redis.exceptions import NoScriptError

from ..core import operations
from ..core.operations import Call
from ..core.scripts import Script, load
from ..errors import IdempotencyError
from ..policy import Policy
from .errors import ERRORS, capture_error, map_error

__all__ = ["Words", "evaluate", "evaluate_async", "evaluation", "raised", "send", "send_async"]

Words: TypeAlias = Sequence[str | bytes | int]
"""A command and its arguments."""

Evaluation: TypeAlias = Generator[list[Words], list[Any], list[Any]]


def evaluation(
    calls: Sequence[Call[Any]], scripts: Mapping[str, Script] | None = None, policy: Policy | None = None
) -> Evaluation:
    """Yield the commands for these calls, one round trip at a time, and be sent their replies; errors are values.

    Returns:
        For each call its outcome, or the error of ours that it comes to.
    """
    loaded = load() if scripts is None else scripts
    replicas = policy.min_replicas if policy is not None else 0
    outcomes: list[Any] = [None] * len(calls)
    unseen: Sequence[int] = range(len(calls))
    for by_text in (False, True):
        commands: list[Words] = []
        for i in unseen:
            call = calls[i]
            script = loaded[call.script]
            head = ("EVAL", script.text) if by_text else ("EVALSHA", script.sha)
            commands.append((*head, 1, call.row, *call.args))
            if replicas and call.durable:
                assert policy is not None
                commands.append(("WAIT", replicas, operations.milliseconds(policy.replica_timeout)))
        sent = time.monotonic()
        replies = iter((yield commands))
        left = []
        for i in unseen:
            call, reply = calls[i], next(replies)
            acknowledged = next(replies) if replicas and call.durable else replicas
            if isinstance(reply, NoScriptError) and not by_text:
                left.append(i)
            else:
                outcomes[i] = capture_error(_outcome, call, reply, acknowledged, replicas, sent)
        unseen = left
        if not unseen:
            break
    return outcomes


def evaluate(client: Any, calls: Sequence[Call[Any]], *how: Any) -> list[Any]:
    """Run scripts over a sync client, in one round trip (two where one has not been seen). See `evaluation`."""
    steps = evaluation(calls, *how)
    try:
        commands = next(steps)
        while True:
            commands = steps.send(send(client, commands))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # what the generator returns, which its type says


async def evaluate_async(client: Any, calls: Sequence[Call[Any]], *how: Any) -> list[Any]:
    """Run scripts over an asyncio client."""
    steps = evaluation(calls, *how)
    try:
        commands = next(steps)
        while True:
            commands = steps.send(await send_async(client, commands))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def send(client: Any, commands: Sequence[Words]) -> list[Any]:
    """Send commands in one round trip; what redis-py raises comes back in the place of a reply."""
    try:
        if len(commands) == 1:
            return [client.execute_command(*commands[0], NEVER_DECODE=True)]
        return list(_pipeline(client, commands).execute(raise_on_error=False))
    except ERRORS as error:
        return [error] * len(commands)


async def send_async(client: Any, commands: Sequence[Words]) -> list[Any]:
    """Send commands in one round trip over an asyncio client, or side by side to a node of a cluster."""
    try:
        if len(commands) == 1:
            return [await client.execute_command(*commands[0], NEVER_DECODE=True)]
        if not hasattr(client, "pipeline"):  # a cluster's node
            each = (client.execute_command(*words, NEVER_DECODE=True) for words in commands)
            return await asyncio.gather(*each, return_exceptions=True)
        return list(await _pipeline(client, commands).execute(raise_on_error=False))
    except ERRORS as error:
        return [error] * len(commands)


def _pipeline(client: Any, commands: Sequence[Words]) -> Any:
    pipeline = client.pipeline(transaction=False)
    for words in commands:
        pipeline.execute_command(*words, NEVER_DECODE=True)
    return pipeline


def _outcome(call: Call[Any], reply: Any, acknowledged: Any, required: int, sent: float) -> Any:
    if isinstance(reply, ERRORS):
        raise map_error(reply, time.monotonic() - sent)
    if isinstance(reply, BaseException):
        raise reply
    outcome = call.outcome(reply, sent)
    if isinstance(acknowledged, ERRORS):  # WAIT is refused, but the script has run
        raise map_error(acknowledged, time.monotonic() - sent, unknown=True)
    return operations.acknowledged(outcome, acknowledged, required)


def raised(outcome: Any) -> Any:
    """Return an outcome of `evaluate`, or raise the error that it is."""
    if isinstance(outcome, IdempotencyError):
        raise outcome
    return outcome
