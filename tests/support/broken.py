"""Scripts with one deliberate mistake each, to check that the tests of tests/faults/ find it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import redis

from idemredis.core.scripts import NAMES, Script
from tests.support.wiretap import Tap, Words

__all__ = ["MISTAKES", "Broken", "TwoTrips"]

_HOLDS = "if current[1] == 'pending' and current[2] == generation and current[3] == owner then"
_FINISH = "if current[2] ~= generation or current[3] ~= owner then return {'fenced', owner} end"
_STALE = "lease_left(attempt[5], attempt[6], ttl) <= 0"
_EXTEND = "set_clock(row, kept, retention, 'lease', lease)"
_RESTART = "redis.call('PEXPIRE', row, retention)"

MISTAKES: Mapping[str, tuple[str, str]] = {
    "no fence at the completion": (_FINISH, ""),
    "the fence is the owner alone": (_FINISH, "if current[3] ~= owner then return {'fenced', owner} end"),
    "the fence is the generation alone": (_FINISH, "if current[2] ~= generation then return {'fenced', owner} end"),
    "no fence at renewals": (_HOLDS, "if current[1] == 'pending' then"),
    "a renewal revives a finished row": (_HOLDS, "if current[2] == generation and current[3] == owner then"),
    "the owner is ignored by renewals": (_HOLDS, "if current[1] == 'pending' and current[2] == generation then"),
    "a takeover does not raise the generation": ("string.format('%.0f', generation + 1)", "generation"),
    "a lease that has not ended is taken over": (_STALE, "lease_left(attempt[5], attempt[6], ttl) >= 0"),
    "a takeover does not look at the lease": (_STALE, "true"),
    "a lease is compared without its last millisecond": (_STALE, "lease_left(attempt[5], attempt[6], ttl) < 0"),
    "a claim takes a running lease for stale": ("if left > 0 then", "if left < 0 then"),
    "a claim does not know its own row": ("if current_owner == owner then", "if false then"),
    "a takeover does not know its own row": (
        "local own = attempt[2] == following and attempt[3] == owner",
        "local own = false",
    ),
    "a completion is stored twice": ("if current[1] == outcome then", "if false then"),
    "a completion overwrites a failure": ("if current[1] ~= 'pending' then return {'fenced', owner} end", ""),
    "a takeover does not compare the fingerprint": (
        "if attempt[4] ~= fingerprint then return {'lost', owner} end",
        "",
    ),
    "a claim does not compare the fingerprint": (
        "if current_fingerprint ~= fingerprint then return {'reused', owner} end",
        "",
    ),
    "a claim does not set the TTL": ("redis.pcall('PEXPIRE', row, retention)", "1"),
    "a release leaves the lease": ("'owner', '', 'lease', '0'", "'owner', ''"),
    "a released row is not known again": ("local _, kept = held_by(row, generation, '')", "local kept"),
    "an older checkpoint replaces a later one": ("if tonumber(checkpoint_seq) > noted then", "if true then"),
    "a renewal writes the lease without the clock": (_EXTEND, "redis.call('HSET', row, 'lease', lease)"),
    "a renewal writes the lease and the retention without the TTL": (
        _EXTEND,
        "redis.call('HSET', row, 'retention', retention, 'lease', lease)",
    ),
    "a transition writes the retention without the TTL": (_RESTART, ""),
    "a transition writes the TTL without the retention": ("kept ~= retention or select", "select"),
    "a completion sent twice leaves the TTL": ("set_clock(row, current[4], retention)", ""),
    "a release sent twice leaves the TTL": (
        "set_clock(row, kept, retention)\n  return {'released'",
        "return {'released'",
    ),
    "a renewal sets the TTL to the lease": (
        "lease, retention)\nreturn {'renewed'",
        "lease, lease)\nreturn {'renewed'",
    ),
    "the elapsed time may be negative": ("math.max(retention - ttl, 0)", "(retention - ttl)"),
    "PTTL is not asked whether there is a row": (
        "if ttl == -2 then\n  local refused",
        "if not attempt[1] then\n  local refused",
    ),
    "a read does not ask PTTL whether there is a row": ("if ttl == -2 then return {'none', token} end", ""),
    "a pending row without a TTL is run": ("if ttl < 0 then return 'it is pending and has no TTL' end", ""),
    "a takeover runs a corrupt row": ("or fault(attempt, progress, ttl) then", "then"),
    "a read makes the row younger": (
        "local for_people =",
        "if ttl > 0 then redis.call('PEXPIRE', row, ttl + 1) end\nlocal for_people =",
    ),
    "a renewal answers with the token of another call": ("{'renewed', owner}", "{'renewed', generation}"),
}


class Broken(Mapping[str, Script]):
    """Return the scripts with every occurrence of a text replaced."""

    def __init__(self, scripts: Mapping[str, Script], right: str, wrong: str) -> None:
        self._scripts = scripts
        self._right = right
        self._wrong = wrong
        assert any(right in scripts[name].text for name in NAMES), f"no script has {right!r} any more"

    def __getitem__(self, name: str) -> Script:
        text = self._scripts[name].text.replace(self._right, self._wrong)
        return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())

    def __iter__(self) -> Iterator[str]:
        return iter(self._scripts)

    def __len__(self) -> int:
        return len(self._scripts)


CLAIM = 10
"""Number of words of a claim, and of no other script: EVALSHA, the digest, 1, the row and six arguments."""


class TwoTrips:
    """Between a client and its tap: a claim of a new row is a GET and then a SET, as many libraries have it."""

    def __init__(self, near: redis.Redis, tap: Tap) -> None:
        self._near = near
        self._tap = tap

    def sent(self, words: Words) -> Words:
        if words[0] in (b"EVALSHA", b"EVAL") and len(words) == CLAIM and not self._near.exists(words[3]):
            time.sleep(0.002)  # what a round trip takes
            self._near.delete(words[3])
        return self._tap.sent(words)

    def replied(self, words: Words, reply: Any) -> Any:
        return self._tap.replied(words, reply)
