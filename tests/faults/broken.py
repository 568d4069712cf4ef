"""The scripts broken on purpose, one mistake at a time, to see that the tests of this folder find it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from idemredis.scripts import NAMES, Script

__all__ = ["MISTAKES", "Broken", "TwoTrips"]

_HOLDS = "return current[1] == 'pending' and current[2] == generation and current[3] == owner"
_FINISH = "if current[2] ~= generation or current[3] ~= owner then return {'fenced'} end"
_STALE = "integer(current[5]) <= now"

MISTAKES: Mapping[str, tuple[str, str]] = {
    "no fence at the completion": (_FINISH, ""),
    "the fence is the owner alone": (_FINISH, "if current[3] ~= owner then return {'fenced'} end"),
    "the fence is the generation alone": (_FINISH, "if current[2] ~= generation then return {'fenced'} end"),
    "no fence at renewals": (_HOLDS, "return current[1] == 'pending'"),
    "a renewal revives a finished row": (_HOLDS, "return current[2] == generation and current[3] == owner"),
    "the owner is ignored by renewals": (_HOLDS, "return current[1] == 'pending' and current[2] == generation"),
    "a takeover does not raise the generation": (
        "local following = text(generation + 1)",
        "local following = generation",
    ),
    "a lease that has not ended is taken over": (_STALE, "integer(current[5]) >= now"),
    "a lease is compared without its last millisecond": (_STALE, "integer(current[5]) < now"),
    "a claim takes a running lease for stale": ("if left > 0 then", "if left < 0 then"),
    "a claim does not know its own row": ("if current[3] == owner then", "if false then"),
    "a takeover does not know its own row": (
        "local own = current[2] == following and current[3] == owner",
        "local own = false",
    ),
    "a completion is stored twice": ("if current[1] == outcome then", "if false then"),
    "a completion overwrites a failure": ("if current[1] ~= 'pending' then return {'fenced'} end", ""),
    "a takeover does not compare the fingerprint": ("if current[4] ~= fingerprint then return {'lost'} end", ""),
    "a claim does not compare the fingerprint": ("if current[4] ~= fingerprint then return {'reused'} end", ""),
    "a claim does not set the TTL": ("redis.pcall('PEXPIRE', row, retention)", "1"),
    "a release leaves the lease": ("'owner', '', 'lease_until', text(now), 'updated_at'", "'owner', '', 'updated_at'"),
    "a released row is not known again": ("local before = holds(row, generation, '')", "local before = false"),
    "an older checkpoint replaces a later one": ("if tonumber(checkpoint_seq) > noted then", "if true then"),
}


class Broken(Mapping[str, Script]):
    """Scripts with one piece of text replaced wherever it is."""

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


class TwoTrips:
    """Before a client: a claim of a new row is GET, then SET, as many a library has it."""

    def execute_command(self, *words: Any, **options: Any) -> Any:
        client: Any = super()
        if words[0] not in ("EVALSHA", "EVAL") or len(words) != 8 or client.execute_command("EXISTS", words[3]):
            return client.execute_command(*words, **options)
        time.sleep(0.002)  # what a round trip takes
        client.execute_command("DEL", words[3])
        return client.execute_command(*words, **options)
