"""Every order in which small cases can go: the flows are stepped through all of them over the model of the row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import pytest

from idemredis import FencedOut, InProgress, LedgerUnavailable, Policy, Replay, Reservation, StoredResponse
from idemredis.core import flows
from idemredis.core.flows import Emit, Flow, InBackground, Sleep
from idemredis.core.keys import Identity
from idemredis.core.operations import Call
from idemredis.core.outcomes import Done
from tests.support.model import Reply, Row, transition, ttl

IDENTITY = Identity("acct", "", "key", "idem:acct:key")
POLICY = Policy(lease=0.5, retention=1000.0)
MOST_RUNS = 400_000
Choice: TypeAlias = int


class World:
    """One row, and attempts at it. Each step of the run is a choice: who goes on, and what becomes of its call."""

    def __init__(
        self,
        choices: Sequence[Choice],
        work: Sequence[str],
        *,
        faults: int = 0,
        turns: int = 0,
        late: bool = False,
        vanish: int = 0,
    ) -> None:
        self.row: Row | None = None
        self.now = 1_000_000
        self.choices = list(choices)
        self.widths: list[int] = []
        self.faults, self.turns, self.vanishes = faults, turns, vanish
        self.late_allowed = late
        self.undelivered: list[Call[Any]] = []
        self.owners: dict[int, set[str]] = {}
        self.stored: list[tuple[bytes, ...]] = []
        self.replays: list[StoredResponse] = []
        self.outcomes: dict[str, str] = {}
        self.told: list[str] = []
        self.slept: dict[Flow[Any], float] = {}
        self.background: set[Flow[Any]] = set()
        self.gave_up = self.came_late = False
        self.actors: list[tuple[Flow[Any], Call[Any]]] = []
        for name, what in zip("abc", work, strict=False):
            self.go_on(self.attempt(name, what), None)

    def attempt(self, name: str, what: str) -> Flow[None]:
        """Claim, do the work and settle it, as a view does; note what came of it."""
        owner = name * 16
        try:
            outcome = yield from flows.claim(
                IDENTITY,
                owner,
                "f",
                lease=POLICY.lease,
                wait=0.0,
                takeover=True,
                policy=POLICY,
                created_at=0.0,
                route="",
            )
        except LedgerUnavailable:
            self.outcomes[name] = "unavailable"
            return
        match outcome:
            case Reservation():
                self.owners.setdefault(outcome.generation, set()).add(owner)
                self.outcomes[name] = "ran"
                answer = StoredResponse(200, (), name.encode())
                try:
                    match what:
                        case "renew":
                            yield from flows.renew(outcome, POLICY)
                            yield from flows.complete(outcome, answer, POLICY)
                        case "release":
                            yield from flows.release(outcome, POLICY)
                        case "fail":
                            yield from flows.fail(outcome, answer, POLICY)
                        case "complete":
                            yield from flows.complete(outcome, answer, POLICY)
                    self.outcomes[name] = "stored" if what in ("complete", "fail", "renew") else what
                except FencedOut:
                    self.outcomes[name] = "fenced"
                except LedgerUnavailable:
                    self.outcomes[name] = "release" if what == "release" else "later"
            case Replay():
                self.replays.append(outcome.response)
                self.outcomes[name] = "replay"
            case InProgress():
                self.outcomes[name] = "in progress"

    def go_on(self, flow: Flow[Any], result: object) -> None:
        """Let a flow go on to its next call."""
        while True:
            try:
                step = flow.throw(result) if isinstance(result, BaseException) else flow.send(result)
            except StopIteration:
                self.gave_up = self.gave_up or (flow in self.background and not isinstance(result, Done))
                return
            result = None
            match step:
                case Call():
                    self.actors.append((flow, step))
                    return
                case Sleep():
                    self.slept[flow] = self.slept.get(flow, 0.0) + step.seconds
                    result = self.now / 1000 + self.slept[flow]
                case InBackground():
                    self.background.add(step.flow)
                    self.go_on(step.flow, None)
                case Emit():
                    self.told.append(step.event)

    def run(self) -> None:
        """Make choices until nobody wants anything any more."""
        while moves := self.moves():
            moves[self.choose(len(moves))]()

    def moves(self) -> list[Callable[[], None]]:
        moves: list[Callable[[], None]] = []
        for i, _ in enumerate(self.actors):
            moves.append(partial(self.served, i))
            if self.faults:
                moves.append(partial(self.lost_reply, i))
                moves.append(partial(self.lost_request, i))
                moves.append(partial(self.refused, i))
                if self.late_allowed:
                    moves.append(partial(self.delayed, i))
        for i, _ in enumerate(self.undelivered):
            moves.append(partial(self.delivered_late, i))
        if self.actors and self.turns:
            moves.append(self.turn)
        if self.actors and self.vanishes and self.row:
            moves.append(self.vanish)
        return moves

    def choose(self, width: int) -> int:
        at = len(self.widths)
        self.widths.append(width)
        if at == len(self.choices):
            self.choices.append(0)
        return self.choices[at]

    def served(self, i: int) -> None:
        flow, call = self.actors.pop(i)
        self.go_on(flow, call.decode(self.execute(call), self.now / 1000))

    def lost_reply(self, i: int) -> None:
        flow, call = self.actors.pop(i)
        self.faults -= 1
        self.execute(call)
        self.go_on(flow, LedgerUnavailable("lost", unknown=True))

    def lost_request(self, i: int) -> None:
        flow, _ = self.actors.pop(i)
        self.faults -= 1
        self.go_on(flow, LedgerUnavailable("lost", unknown=True))

    def refused(self, i: int) -> None:
        flow, _ = self.actors.pop(i)
        self.faults -= 1
        self.go_on(flow, LedgerUnavailable("the server says no", unknown=False))

    def delayed(self, i: int) -> None:
        flow, call = self.actors.pop(i)
        self.faults -= 1
        self.undelivered.append(call)
        self.go_on(flow, LedgerUnavailable("timed out", unknown=True))

    def delivered_late(self, i: int) -> None:
        self.came_late = True
        self.execute(self.undelivered.pop(i))

    def turn(self) -> None:
        self.turns -= 1
        self.now += round(POLICY.lease * 1000)

    def vanish(self) -> None:
        self.vanishes -= 1
        self.row = None
        self.owners.clear()

    def execute(self, call: Call[Any]) -> Reply:
        before = self.row
        self.row, reply = transition(before, call.script, call.args, self.now)
        answer = self.row and self.row.answer
        if answer and not (before and before.answer):
            self.stored.append(answer)
        if self.row is not None and self.row != before:
            assert ttl(self.row, self.now) == self.row.retention, "the lease and the TTL do not begin together"
        if before and before.answer:
            assert self.row is not None
            assert self.row.answer == before.answer, "a stored answer was changed"
        if before and self.row:
            assert self.row.generation >= before.generation
            assert self.row.generation > before.generation or self.row.owner in (before.owner, b"")
        return reply


def explore(work: Sequence[str], **case: Any) -> Iterator[World]:
    """Run the case once for every sequence of choices."""
    choices: list[Choice] = []
    for _ in range(MOST_RUNS):
        world = World(choices, work, **case)
        world.run()
        yield world
        choices = world.choices
        while choices and choices[-1] + 1 >= world.widths[len(choices) - 1]:
            choices.pop()
        if not choices:
            return
        choices[-1] += 1
    raise AssertionError(f"more than {MOST_RUNS} orders; make the case smaller")


# The work of each attempt ("dies" claims and does no more), the faults, and how many orders there are at the least:
# with fewer, the case has shrunk.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "two attempts": ({"work": ("complete", "complete"), "turns": 3}, 186),
    "three attempts": ({"work": ("complete", "complete", "complete"), "turns": 1}, 324),
    "a renewal, a failure and a completion": ({"work": ("renew", "fail", "complete"), "turns": 1}, 602),
    "one that dies and two that come after": ({"work": ("dies", "complete", "release"), "turns": 1}, 286),
    "two attempts, a message lost or late": (
        {"work": ("complete", "complete"), "faults": 1, "turns": 2, "late": True},
        4816,
    ),
    "a release and a completion, a message lost or late": (
        {"work": ("release", "complete"), "faults": 1, "turns": 1, "late": True},
        1234,
    ),
    "two attempts, two messages lost or late": ({"work": ("complete", "complete"), "faults": 2, "late": True}, 4258),
    "one attempt, three messages lost or late": (
        {"work": ("complete",), "faults": 3, "turns": 1, "late": True},
        6914,
    ),
    "one that dies, and two messages lost or late": (
        {"work": ("dies", "complete"), "faults": 2, "turns": 1, "late": True},
        23836,
    ),
    "a row that vanishes": ({"work": ("complete", "complete"), "turns": 1, "vanish": 1}, 96),
}


@pytest.mark.parametrize("name", CASES)
def test_in_every_order_at_most_one_answer_is_stored_and_no_generation_is_given_twice(name: str) -> None:
    case, at_least = CASES[name]
    runs = 0
    for world in explore(**case):
        runs += 1
        check(world, case)
    print(f"{name}: {runs} orders")
    assert runs >= at_least


def test_a_lost_claim_is_given_up_often_enough_that_nobody_waits_for_two_seconds_once_redis_is_back() -> None:
    lease = 60.0
    claim = flows.claim(
        IDENTITY, "a" * 16, "f", lease=lease, wait=0.0, takeover=True, policy=POLICY, created_at=0.0, route=""
    )
    step = claim.send(None)
    while not isinstance(step, InBackground):
        assert isinstance(step, Call)
        step = claim.throw(LedgerUnavailable("lost", unknown=True))
    release, now, gaps = step.flow, 0.0, [0.0]
    step = release.send(None)
    while isinstance(step, Sleep):
        gaps.append(step.seconds)
        now += step.seconds
        try:
            step = release.send(now)
            if isinstance(step, Call):
                step = release.throw(LedgerUnavailable("still away", unknown=True))
        except StopIteration:
            break
    assert now >= lease
    assert max(gaps) <= 1.0  # and as much again for the call itself


def check(world: World, case: dict[str, Any]) -> None:
    at = f"choices {world.choices}, outcomes {world.outcomes}, row {world.row}"
    for generation, owners in world.owners.items():
        assert len(owners) == 1, f"generation {generation} was given to {owners}; {at}"
    if "vanish" in case:
        return
    assert len(world.stored) <= 1, at
    for replay in world.replays:
        assert [replay.body] == [answer[2] for answer in world.stored], at
    if "stored" in world.outcomes.values():
        stored = [name.encode() for name, outcome in world.outcomes.items() if outcome == "stored"]
        assert stored == [world.stored[0][2]], at
    if world.row is not None and "dies" not in case["work"] and "completed" not in world.told:
        assert "later" not in world.outcomes.values() or {"fenced", "failed"} & set(world.told), at
    assert "completion_lost" not in world.told, at
    assert_nobody_is_locked_out(world, at)


def assert_nobody_is_locked_out(world: World, at: str) -> None:
    """Once all is settled, in the background too, the next retry runs or has the answer, and waits for no lease."""
    if world.row is None or (world.gave_up and world.came_late):  # by more than a lease, in which it was asked for
        return
    _, reply = transition(world.row, "claim", ("z" * 16, "f", 10_000, 1_000_000, 0, ""), world.now)
    if reply[0] == b"in_progress":  # by one that died, and by nobody else
        assert world.outcomes[world.row.owner[:1].decode()] == "dies", f"the next retry is told {reply}; {at}"
