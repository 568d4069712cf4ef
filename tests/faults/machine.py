"""A hypothesis state machine: the real scripts do with a row what the model does, field for field."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any, ClassVar

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from idemredis import StoredResponse, operations
from idemredis.keys import Identity
from idemredis.operations import Call, Hold, Reservation
from idemredis.scripts import Script
from idemredis.testing import Clock

from .model import Row, fields, transition

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
_rows = count(1)

steps = st.sampled_from((0, 0, 0, 0, -1, 1))
owners = st.sampled_from(OWNERS)
attempts = st.tuples(steps, st.sampled_from((HOLDER, HOLDER, HOLDER, *OWNERS)))
fingerprints = st.sampled_from((FINGERPRINTS[0], FINGERPRINTS[0], FINGERPRINTS[0], FINGERPRINTS[1]))
leases = st.sampled_from(LEASES)
retentions = st.sampled_from(RETENTIONS)


class Machine(RuleBasedStateMachine):
    """Three attempts, two requests, one row. They also ask with generations and tokens that are not theirs."""

    client: ClassVar[Any]

    def scripts(self, clock: Clock) -> Mapping[str, Script]:
        """The net's own test breaks them here."""
        return clock

    @initialize(claimed=st.booleans())
    def begin(self, claimed: bool) -> None:
        self.clock = Clock()
        self.identity = Identity("acct", "", "key", f"model:{next(_rows)}")
        self.model: Row | None = None
        self.perhaps_claimed(claimed)

    @rule(owner=owners, fingerprint=fingerprints, lease=leases, retention=retentions)
    def claim(self, owner: str, fingerprint: str, lease: float, retention: float) -> None:
        self.ask(operations.claim(self.identity, owner, fingerprint, lease, retention))

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
        self.clock.turn(turn)
        call = operations.takeover(self.identity, self.generation(step), owner, fingerprint, lease, retention)
        for _ in range(1 + again):
            self.ask(call)

    @rule(attempt=attempts, answer=st.sampled_from(ANSWERS), retention=retentions, failed=st.booleans())
    def finish(self, attempt: tuple[int, str], answer: StoredResponse, retention: float, failed: bool) -> None:
        finish = operations.fail if failed else operations.complete
        self.ask(finish(self.attempt(attempt), answer, retention))

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

    @rule(seconds=st.sampled_from((0.001, 0.999, 1.0, 3.0)))
    def turn(self, seconds: float) -> None:
        self.clock.turn(seconds)

    @rule(always=st.booleans(), claimed=st.booleans())
    def vanish(self, always: bool, claimed: bool) -> None:
        if always or (self.model is not None and self.model.answer):
            self.client.delete(self.identity.row)
            self.model = None
            self.perhaps_claimed(claimed)

    def perhaps_claimed(self, claimed: bool) -> None:
        if claimed:
            self.ask(operations.claim(self.identity, OWNERS[0], FINGERPRINTS[0], LEASES[0], RETENTIONS[0]))

    def ask(self, call: Call[Any]) -> None:
        """Run the call on the server and on the model, and hold their answers and their rows against each other."""
        self.model, right = transition(self.model, call.script, call.args, self.clock.milliseconds)
        text = self.scripts(self.clock)[call.script].text
        reply = self.client.eval(text, 1, call.row, *call.args)
        assert tuple(reply) == right, (call.script, call.args)

    def generation(self, step: int) -> int:
        return max(1, (1 if self.model is None else self.model.generation) + step)

    def attempt(self, attempt: tuple[int, str], lease: float = 1.0, noted: int = 0) -> Reservation:
        step, owner = attempt
        if owner == HOLDER:
            owner = (self.model and self.model.owner.decode()) or OWNERS[0]
        hold = Hold(lease, 0.0, noted)
        return Reservation(self.identity, FINGERPRINTS[0], self.generation(step), owner, None, hold)

    @invariant()
    def the_row_is_the_models_and_expires_with_its_retention(self) -> None:
        if not hasattr(self, "identity"):
            return
        assert self.client.hgetall(self.identity.row) == fields(self.model)
        pttl = self.client.pttl(self.identity.row)
        if self.model is None:
            assert pttl == -2
        else:
            assert self.model.retention - 5000 < pttl <= self.model.retention

    def teardown(self) -> None:
        if hasattr(self, "identity"):
            self.client.delete(self.identity.row)
