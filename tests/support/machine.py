"""A hypothesis state machine: the real scripts change a row as the model does, field for field.

The clock stands still until a rule advances it: before each script, the row's TTL is set to that of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any, ClassVar

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from idemredis import Reservation, StoredResponse
from idemredis.core import operations
from idemredis.core.keys import Identity
from idemredis.core.operations import Call
from idemredis.core.reservation import Lease
from idemredis.core.scripts import Script, load
from tests.support.model import Broken, Row, fields, transition, ttl
from tests.support.watching import run_at

__all__ = ["Machine"]

OWNERS = ("aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb", "cccccccccccccccc")
HOLDER = "whoever holds the row"
FINGERPRINTS = ("f" * 64, "e" * 64)
LEASES = (1.0, 3.0)
RETENTIONS = (600.0, 6000.0)
ANSWERS = (
    StoredResponse(201, (("content-type", "application/json"),), b"{}"),
    StoredResponse(404, (), b"\xff\x00"),
    StoredResponse(200, omitted="too_large"),
)
BROKEN = (
    Broken(b"status", None, b"status is missing"),
    Broken(b"status", b"done", b"status is unknown"),
    Broken(b"generation", b"0", b"generation is not a positive integer"),
    Broken(b"owner", None, b"owner is missing"),
    Broken(b"fingerprint", None, b"fingerprint is missing"),
    Broken(b"lease", b"-1", b"lease is not an integer"),
    Broken(b"retention", b"1e3", b"retention is not a positive integer"),
)
SOON = 10_000
"""Milliseconds of TTL below which a row counts as expired, since Redis's own clock does not stand still."""

_rows = count(1)

steps = st.sampled_from((0, 0, 0, 0, -1, 1))
owners = st.sampled_from(OWNERS)
attempts = st.tuples(steps, st.sampled_from((HOLDER, HOLDER, HOLDER, *OWNERS)))
fingerprints = st.sampled_from((FINGERPRINTS[0], FINGERPRINTS[0], FINGERPRINTS[0], FINGERPRINTS[1]))
leases = st.sampled_from(LEASES)
retentions = st.sampled_from(RETENTIONS)


class Machine(RuleBasedStateMachine):
    """Three attempts at two requests on one row; they also use generations and tokens of others."""

    client: ClassVar[Any]
    scripts: ClassVar[Mapping[str, Script]] = load()
    """The scripts to run; the test of this machine overrides it with broken ones."""

    @initialize(claimed=st.booleans())
    def begin(self, claimed: bool) -> None:
        self.now = 1_000_000
        self.identity = Identity("acct", "", "key", f"model:{next(_rows)}")
        self.model: Row | None = None
        self.perhaps_claimed(claimed)

    @rule(
        owner=owners,
        fingerprint=fingerprints,
        lease=leases,
        retention=retentions,
        created_at=st.sampled_from((0.0, 5.0, 1e9)),
        route=st.sampled_from(("", "POST /orders/<id>")),
    )
    def claim(
        self, owner: str, fingerprint: str, lease: float, retention: float, created_at: float, route: str
    ) -> None:
        self.ask(operations.claim(self.identity, owner, fingerprint, lease, retention, created_at, route))

    @rule(
        step=steps,
        owner=owners,
        fingerprint=fingerprints,
        lease=leases,
        retention=retentions,
        turn=st.sampled_from((0.0, 1.0, 3.0, 3.0)),
        again=st.booleans(),
    )
    def takeover(
        self, step: int, owner: str, fingerprint: str, lease: float, retention: float, turn: float, again: bool
    ) -> None:
        self.turn(turn)
        call = operations.takeover(self.identity, self.generation(step), owner, fingerprint, lease, retention, "")
        for _ in range(1 + again):
            self.ask(call)

    @rule(
        attempt=attempts,
        answer=st.sampled_from(ANSWERS),
        retention=retentions,
        failed=st.booleans(),
        again=st.sampled_from((0, 0, 1)),
    )
    def finish(
        self, attempt: tuple[int, str], answer: StoredResponse, retention: float, failed: bool, again: int
    ) -> None:
        finish = operations.fail if failed else operations.complete
        call = finish(self.attempt(attempt), answer, retention)
        for _ in range(1 + again):
            self.ask(call)
            self.turn(0.5)

    @rule(attempt=attempts, retention=retentions, again=st.booleans())
    def release(self, attempt: tuple[int, str], retention: float, again: bool) -> None:
        r = self.attempt(attempt)
        for _ in range(1 + again):
            self.ask(operations.release(self.identity, r.generation, r.owner, retention))

    @rule(attempt=attempts, lease=leases, retention=retentions)
    def renew(self, attempt: tuple[int, str], lease: float, retention: float) -> None:
        self.ask(operations.renew(self.attempt(attempt, lease), retention))

    @rule(attempt=attempts, noted=st.integers(0, 3), name=st.sampled_from(("charged", "sent")), retention=retentions)
    def checkpoint(self, attempt: tuple[int, str], noted: int, name: str, retention: float) -> None:
        self.ask(operations.checkpoint(self.attempt(attempt, 1.0, noted), name, '{"a":1}', retention))

    @rule(body=st.booleans())
    def read(self, body: bool) -> None:
        self.ask(operations.read(self.identity, body=body))

    @rule(seconds=st.sampled_from((0.001, 0.999, 1.0, 3.0, -0.001, -2.0, RETENTIONS[0])))
    def turn(self, seconds: float) -> None:
        """Move the clock, also backwards; a row that is about to expire is expired, so that real time plays no part."""
        self.now += round(seconds * 1000)
        if self.model is not None and not self.model.lasting and ttl(self.model, self.now) <= SOON:
            self.now = max(self.now, self.model.since + self.model.retention)
            self.model = None

    @rule(always=st.booleans(), claimed=st.booleans())
    def vanish(self, always: bool, claimed: bool) -> None:
        if always or (self.model is not None and self.model.answer):
            self.client.delete(self.identity.row)
            self.model = None
            self.perhaps_claimed(claimed)

    @precondition(lambda self: self.model is not None)
    @rule()
    def persist(self) -> None:
        """Remove the TTL, as PERSIST does; the row's age is unknown until its owner's next call."""
        assert self.model is not None
        self.client.persist(self.identity.row)
        self.model = self.model._replace(lasting=True)
        for call in self.by_a_stranger():
            self.ask(call)

    @precondition(lambda self: self.model is not None)
    @rule(broken=st.sampled_from(BROKEN))
    def spoil(self, broken: Broken) -> None:
        """Break a field, check that no call changes the row, and repair it."""
        assert self.model is not None
        whole, row = self.model, self.identity.row
        if broken.value is None:
            self.client.hdel(row, broken.field)
        else:
            self.client.hset(row, broken.field, broken.value)
        self.model = whole._replace(broken=broken)
        for call in self.by_a_stranger():
            self.ask(call)
        self.client.hset(row, broken.field, fields(whole)[broken.field])
        self.model = whole

    def perhaps_claimed(self, claimed: bool) -> None:
        if claimed:
            self.ask(operations.claim(self.identity, OWNERS[0], FINGERPRINTS[0], LEASES[0], RETENTIONS[0], 5.0, ""))

    def by_a_stranger(self) -> list[Call[Any]]:
        """Call a script that any attempt may call on a row of another attempt."""
        stranger = (OWNERS[2], FINGERPRINTS[0], LEASES[0], RETENTIONS[0])
        return [
            operations.claim(self.identity, *stranger, 5.0, ""),
            operations.takeover(self.identity, self.generation(0), *stranger, ""),
            operations.read(self.identity),
        ]

    def ask(self, call: Call[Any]) -> None:
        """Run a call on the server and on the model, and compare their replies, rows and TTLs.

        If time passed meanwhile, they must agree for one of the milliseconds at which the script may have read the TTL.
        """
        ran = run_at(self.client, self.scripts[call.script], call.row, call.args, ttl(self.model, self.now))
        passed = ran.seen.passed
        for at in range(self.now, self.now + passed + 1):
            after, right = transition(self.model, call.script, call.args, at)
            if ran.reply == right:
                break
        assert ran.reply == right, (call.script, call.args)
        assert ran.fields == fields(after), (call.script, call.args)
        assert 0 <= ttl(after, at) - ran.seen.after <= passed, (call.script, call.args)
        self.model, self.now = after, at

    def generation(self, step: int) -> int:
        return max(1, (1 if self.model is None else self.model.generation) + step)

    def attempt(self, attempt: tuple[int, str], lease: float = 1.0, noted: int = 0) -> Reservation:
        step, owner = attempt
        if owner == HOLDER:
            owner = (self.model and self.model.owner.decode()) or OWNERS[0]
        hold = Lease(lease, 0.0, noted)
        return Reservation(self.identity, FINGERPRINTS[0], self.generation(step), owner, None, hold)

    def teardown(self) -> None:
        if hasattr(self, "identity"):
            self.client.delete(self.identity.row)
