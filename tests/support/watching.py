"""Run the unmodified scripts inside a script that records the row's TTL before and after.

A row's TTL is its clock, so these are the time that the script read and the time that it set.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from idemredis.core.scripts import Script

__all__ = ["Run", "Seen", "ran", "run_at", "watched"]

_WATCHED = """
local function script()
{text}
end
redis.call('SET', 'stopwatch', '', 'PX', 1000000)
{first}
local before = redis.call('PTTL', KEYS[1])
local reply = script()
local after = redis.call('PTTL', KEYS[1])
local passed = 1000000 - redis.call('PTTL', 'stopwatch')
redis.call('DEL', 'stopwatch')
{last}
"""

_CALL = """
local call = table.remove(ARGV)
"""

_LOG = """
redis.call('HSET', '{log}', call, cjson.encode({{before, after, passed, reply}}))
redis.call('PEXPIRE', '{log}', 6000000)
return {{before, after, passed, reply}}
"""

_SET_TTL = """
local ttl = tonumber(table.remove(ARGV))
if ttl > 0 then redis.call('PEXPIRE', KEYS[1], ttl) elseif ttl == -2 then redis.call('DEL', KEYS[1]) end
"""

_RESET_TTL = """
local fields = redis.call('HGETALL', KEYS[1])
if after ~= -1 then redis.call('PEXPIRE', KEYS[1], 1000000) end
return {before, after, passed, reply, fields}
"""


class Seen(NamedTuple):
    """A row's PTTL before and after a script.

    `passed` is the number of milliseconds between the two. It is 0 on most servers, where time stands still in a
    script; on Redis before 7.2 it does not.
    """

    before: int
    after: int
    passed: int


class Run(NamedTuple):
    """A script's reply and the TTLs around it; `fields` is the row afterwards, if requested."""

    reply: tuple[bytes | int, ...]
    seen: Seen
    fields: dict[bytes, bytes]


def watched(script: Script, log: str) -> Script:
    """Wrap a script so that it takes a call number as its last argument and records under it that it ran.

    The wrapped script replies (before, after, passed, reply).
    """
    text = _WATCHED.format(text=script.text, first=_CALL, last=_LOG.format(log=log))
    return Script(script.name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def ran(client: Any, log: str) -> dict[str, Run]:
    """Return the replies of all calls that have run, including those whose replies were lost."""
    found: dict[bytes, bytes] = client.hgetall(log)
    return {call.decode(): _run(json.loads(noted)) for call, noted in found.items()}


def _run(noted: Sequence[Any]) -> Run:
    *seen, reply = noted
    return Run(tuple(part.encode() if isinstance(part, str) else part for part in reply), Seen(*seen), {})


def run_at(client: Any, script: Script, row: str, args: Sequence[object], ttl: int) -> Run:
    """Run a script on a row whose TTL is first set to so many milliseconds; -2 is no row, -1 no TTL.

    Afterwards the row's TTL is read for the result, and then set far into the future, so that a pause of this process
    cannot make the row expire.
    """
    text = _WATCHED.format(text=script.text, first=_SET_TTL, last=_RESET_TTL)
    *seen, reply, fields = client.eval(text, 1, row, *args, ttl)
    return Run(tuple(reply), Seen(*seen), dict(zip(fields[::2], fields[1::2], strict=True)))
