"""Ledgers whose calls to the server are recorded, and workers that use them at random."""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import redis
import redis.asyncio
import redis.asyncio.retry
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError
from redis.retry import Retry

from idemredis import AsyncLedger, FencedOut, Ledger, LedgerUnavailable, Policy, Reservation, StoredResponse
from idemredis.core import operations
from idemredis.core.keys import identify
from idemredis.core.scripts import Script, load
from idemredis.testing import Clock
from tests.support.linearizability import Entry
from tests.support.model import VANISH
from tests.support.proxy import Fate
from tests.support.watching import Seen, ran, watched
from tests.support.wiretap import Words, tap

__all__ = ["KEYS", "Recording", "play", "play_async", "settled", "troubled"]

KEYS = ("key-1", "key-2", "key-3")
POLICY = Policy(lease=1.0, retention=6000.0)
"""No row expires during a run, whose clock turns and pauses are far shorter. Some rows are deleted."""

TIMEOUT = 0.15

SCRIPTS = (b"EVALSHA", b"EVAL")

LONGEST_NUMBER = 16
"""Owners are 16 hex digits, which may all be decimal ones."""


class Recording(Mapping[str, Script]):
    """Scripts for a ledger that report the row's TTL before and after, and record that they ran."""

    def __init__(self, scripts: Mapping[str, Script], namespace: str) -> None:
        self.entries: list[Entry] = []
        self._starts: dict[bytes, float] = {}
        self._scripts = {name: watched(script, _log(namespace)) for name, script in scripts.items()}
        self._names = {script.sha: name for name, script in self._scripts.items()}

    def __getitem__(self, name: str) -> Script:
        return self._scripts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._scripts)

    def __len__(self) -> int:
        return len(self._scripts)

    def sent(self, words: Words) -> Words:
        """Give a call the number under which it is recorded; a call that is sent again gets another number."""
        if words[0] not in SCRIPTS:
            return words
        words = (*words, secrets.token_hex(8).encode())
        self._starts[words[-1]] = time.monotonic()
        return words

    def replied(self, words: Words, reply: Any) -> Any:
        """Record a call with its reply, and return the reply; an error of the server means that it did not run."""
        if words[0] not in SCRIPTS or isinstance(reply, ResponseError):
            return reply
        _, _, _, row, *args, call = words
        known = tuple(int(arg) if arg.isdigit() and len(arg) < LONGEST_NUMBER else arg.decode() for arg in args)
        entry = Entry(row.decode(), self.name_of(words), known, self._starts[call], math.inf, None, None, call.decode())
        if not isinstance(reply, BaseException):
            *seen, reply = reply
            entry = entry._replace(end=time.monotonic(), reply=tuple(reply), seen=Seen(*seen))
        self.entries.append(entry)
        return reply

    def name_of(self, words: Words) -> str:
        """Return which script a call runs."""
        sha = words[1].decode()
        if words[0] == b"EVAL":
            sha = hashlib.sha1(words[1], usedforsecurity=False).hexdigest()
        return self._names[sha]

    def run(self, client: redis.Redis, script: str, row: bytes, *args: str | bytes | int) -> None:
        """Run a script on the server, without the proxy, and record it."""
        plain = ("EVAL", self[script].text, 1, row, *args)
        words = self.sent(tuple(word if isinstance(word, bytes) else str(word).encode() for word in plain))
        self.replied(words, client.execute_command(*words))  # type: ignore[no-untyped-call]

    def vanish(self, client: redis.Redis, row: str) -> None:
        """Delete the row on the server, without the proxy."""
        start = time.monotonic()
        gone = client.delete(row)
        self.entries.append(Entry(row, VANISH, (), start, time.monotonic(), (b"%d" % gone,), None))


class Racing:
    """Between a client and its recording: often a stale row changes just before its takeover arrives.

    Its owner renews the lease; or the row vanishes, is claimed with another fingerprint, and becomes stale again.
    """

    def __init__(self, near: redis.Redis, recording: Recording, clock: Clock, dice: random.Random) -> None:
        self._near = near
        self._recording = recording
        self._clock = clock
        self._dice = dice

    def sent(self, words: Words) -> Words:
        if words[0] in SCRIPTS and self._recording.name_of(words) == "takeover":
            self._race(words)
        return self._recording.sent(words)

    def replied(self, words: Words, reply: Any) -> Any:
        return self._recording.replied(words, reply)

    def _race(self, words: Words) -> None:
        _, _, _, row, generation, _, fingerprint, lease, retention, *_ = words
        match self._dice.choice(("none", "renew", "another")):
            case "renew":
                if owner := self._near.hget(row.decode(), "owner"):  # "" once it was released
                    self._recording.run(self._near, "renew", row, generation, owner, lease, retention)
            case "another":
                other = b"g" if fingerprint == b"f" else b"f"
                self._recording.vanish(self._near, row.decode())
                self._recording.run(self._near, "claim", row, secrets.token_hex(8), other, lease, retention, 0, "")
                self._clock.turn(POLICY.lease)


def settled(near: redis.Redis, namespace: str, entries: Sequence[Entry]) -> list[Entry]:
    """Return the history with the replies that were lost, and without the calls that never ran.

    Call it once all workers are done. A call that runs after the last reply cannot have changed any recorded reply.
    """
    noted = ran(near, _log(namespace))
    history = []
    for entry in entries:
        if entry.reply is None and entry.call in noted:
            entry = entry._replace(reply=noted[entry.call].reply, seen=noted[entry.call].seen)
        if entry.reply is not None:
            history.append(entry)
    return history


def _log(namespace: str) -> str:
    return f"calls of {namespace}"


def troubled(seed: int, share: float = 0.15) -> Callable[[], Fate]:
    """Return a function that chooses the fate of a proxy's requests: a share is lost, cut off, slow or late."""
    dice = random.Random(seed)

    def choose() -> Fate:
        if dice.random() > share:
            return "pass"
        fates: list[Fate] = ["lose request", "lose reply", "cut reply", 0.02, TIMEOUT * 2]
        return dice.choice(fates)

    return choose


def play(
    port: int, near: redis.Redis, namespace: str, seed: int, *, workers: int = 6, rounds: int = 25, **how: Any
) -> list[Entry]:
    """Let threads claim, renew, finish, release and abandon a few keys at random; return the calls and replies.

    `port` is the port of the proxy, `near` a client of the server itself. `how` can have another class as `client`, and
    `scripts` with deliberate mistakes.
    """
    game = _Game(near, namespace, seed, rounds, how.get("scripts", load()))
    far = redis.Redis(port=port, socket_timeout=TIMEOUT, retry=Retry(NoBackoff(), 0))
    tap(far, how.get("tap", game.racing)(game.recording))
    ledger = Ledger(far, POLICY, namespace, scripts=game.recording)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        steps = game.steps(number)
        outcome: object = None
        try:
            while True:
                method, *args = steps.send(outcome)
                try:
                    outcome = getattr(ledger, method)(*args)
                except (LedgerUnavailable, FencedOut) as error:
                    outcome = error
        except StopIteration:
            pass
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    ledger.close()
    far.close()
    assert not failures, failures
    return game.end()


def play_async(
    port: int, near: redis.Redis, namespace: str, seed: int, *, workers: int = 6, rounds: int = 25
) -> list[Entry]:
    """Let tasks of one event loop use a few keys at random; return the calls and replies."""
    game = _Game(near, namespace, seed, rounds, load())

    async def work(ledger: AsyncLedger, number: int) -> None:
        steps = game.steps(number)
        outcome: object = None
        while True:
            try:
                method, *args = steps.send(outcome)
            except StopIteration:
                return
            try:
                outcome = await getattr(ledger, method)(*args)
            except (LedgerUnavailable, FencedOut) as error:
                outcome = error

    async def main() -> None:
        retry = redis.asyncio.retry.Retry(NoBackoff(), 0)
        far = redis.asyncio.Redis(port=port, socket_timeout=TIMEOUT, retry=retry)
        tap(far, game.racing(game.recording))
        ledger = AsyncLedger(far, POLICY, namespace, scripts=game.recording)
        await asyncio.gather(*(work(ledger, number) for number in range(workers)))
        await ledger.close()
        await far.aclose()

    asyncio.run(main())
    return game.end()


class _Game:
    """The workers' choices, which are random but repeatable by their seed."""

    def __init__(
        self,
        near: redis.Redis,
        namespace: str,
        seed: int,
        rounds: int,
        scripts: Mapping[str, Script],
    ) -> None:
        self.clock = Clock(Ledger(near, namespace=namespace))
        self.recording = Recording(scripts, namespace)
        self._near = near
        self._namespace = namespace
        self._seed = seed
        self._rounds = rounds

    def racing(self, recording: Recording) -> Racing:
        """Return what makes takeovers of this game race."""
        return Racing(self._near, recording, self.clock, random.Random(f"{self._seed}/races"))

    def steps(self, number: int) -> Generator[tuple[Any, ...], Any, None]:
        dice = random.Random(f"{self._seed}/{number}")
        for turn in range(self._rounds):
            if dice.random() < 0.5:
                self.clock.turn(dice.choice((0.001, 0.5, POLICY.lease, -0.2)))
            key = dice.choice(KEYS)
            if dice.random() < 0.1:
                yield "read", "acct", key
            if dice.random() < 0.2:
                self.recording.vanish(self._near, identify(self._namespace, "acct", key).row)
            r = yield "claim", "acct", key, dice.choice("ffffg")
            if not isinstance(r, Reservation):
                continue
            if dice.random() < 0.3:
                yield "renew", r
            if dice.random() < 0.3:
                yield "checkpoint", r, f"step-{number}-{turn}", turn
            if dice.random() < 0.3:
                self.clock.turn(POLICY.lease)  # stall, so that another worker can take over
            answer = StoredResponse(dice.choice((200, 201)), (), f"{number}/{turn}".encode())
            end = dice.choice(("complete", "complete", "fail", "release", "abandon", "twice"))
            if end == "twice":
                yield "complete", r, answer
                yield "complete", r, answer
            elif end in ("complete", "fail"):
                yield end, r, answer
            elif end == "release":
                yield "release", r

    def end(self) -> list[Entry]:
        """Read each row once more, and return all recorded calls."""
        for key in KEYS:
            call = operations.claim(identify(self._namespace, "acct", key), "last", "f", 1.0, 6000.0, 0.0, "")
            self.recording.run(self._near, call.script, call.row.encode(), *call.args)
        return self.recording.entries
