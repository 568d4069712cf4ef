"""Two attempts at one operation at the same time, in both orders, at every isolation level."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy.exc import DBAPIError

from idemredis import EffectDone, Reservation, StoredResponse
from tests.support.databases import KINDS, Databases
from tests.support.orders import Orders, prepared
from tests.support.subject import Mode
from tests.support.waiting import wait_until

LEVELS: list[tuple[Mode, str, str]] = [
    *(("sync", kind, level) for kind in ("postgresql", "mariadb") for level in ("READ COMMITTED", "REPEATABLE READ")),
    *(("sync", kind, "SERIALIZABLE") for kind in KINDS),  # SQLite has no other
    ("async", "postgresql", "READ COMMITTED"),
    ("async", "postgresql", "SERIALIZABLE"),
    ("async", "mariadb", "REPEATABLE READ"),
    ("async", "sqlite", "SERIALIZABLE"),
]
PATIENCE = 60.0


class Attempt:
    """An attempt in a thread, which waits after each step until it is told to go on."""

    def __init__(self, pool: concurrent.futures.Executor, place: Callable[..., StoredResponse], r: Reservation) -> None:
        self.reached: list[str] = []
        self._stops = {step: threading.Event() for step in ("begun", "made", "recorded", "committed")}
        self.future = pool.submit(place, r, pause=self._pause)

    def go_on_after(self, *steps: str) -> None:
        """Let the attempt pass these steps."""
        for step in steps:
            self._stops[step].set()

    def wait_for(self, step: str) -> None:
        """Wait until the attempt has taken a step."""
        wait_until(lambda: step in self.reached or self.future.done(), PATIENCE)
        assert step in self.reached

    def result(self) -> StoredResponse | BaseException:
        """Let the attempt go on to its end, and return its response or its error."""
        self.go_on_after(*self._stops)
        error = self.future.exception(PATIENCE)
        return self.future.result() if error is None else error

    def _pause(self, step: str) -> None:
        self.reached.append(step)
        assert self._stops[step].wait(PATIENCE)


@pytest.fixture
def pool() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture(params=LEVELS, ids="-".join)
def isolated(request: pytest.FixtureRequest, databases: Databases) -> Iterator[Orders]:
    mode, kind, isolation = request.param
    orders = Orders(mode, prepared(databases, kind), isolation)
    yield orders
    orders.database.assert_none_is_left_open()
    orders.close()


@pytest.fixture(params=["the first attempt commits first", "its successor commits first"])
def in_order(request: pytest.FixtureRequest, claim: Any) -> tuple[Reservation, Reservation]:
    attempts = claim(), claim()
    assert [r.generation for r in attempts] == [1, 2]
    return attempts if request.param.startswith("the first") else (attempts[1], attempts[0])


@pytest.mark.parametrize("look", [False, True], ids=["blind", "looked"])
def test_the_one_that_records_second_waits_and_then_cannot_commit(
    isolated: Orders, pool: Any, in_order: tuple[Reservation, Reservation], look: bool
) -> None:
    """If both have read what both write, PostgreSQL may also find that the two transactions have no serial order."""
    database = isolated.database

    def place(r: Reservation, pause: Callable[[str], object]) -> StoredResponse:
        return isolated.place(r, look=look, pause=pause)

    winner, loser = Attempt(pool, place, in_order[0]), Attempt(pool, place, in_order[1])
    for attempt in (winner, loser):
        attempt.wait_for("begun")
    if look and database.kind == "mariadb" and isolated.isolation == "SERIALIZABLE":
        # Each has locked what it has read, and so neither can write before the other is rolled back.
        winner.go_on_after("begun", "made", "recorded", "committed")
        loser.go_on_after("begun", "made", "recorded", "committed")
        results = winner.result(), loser.result()
        refused, answer = sorted(results, key=lambda result: isinstance(result, StoredResponse))
        in_order = in_order if answer is results[0] else (in_order[1], in_order[0])
    else:
        winner.go_on_after("begun", "made")
        winner.wait_for("recorded")
        loser.go_on_after("begun", "made")
        if database.kind != "sqlite":
            wait_until(lambda: database.waiting() == 1 or loser.future.done(), PATIENCE)
        answer, refused = winner.result(), loser.result()

    assert isinstance(answer, StoredResponse), answer
    if not look or isolated.database.kind == "sqlite":
        assert isinstance(refused, EffectDone), refused
    assert isinstance(refused, (EffectDone, DBAPIError)), refused
    assert isolated.count() == len(isolated.recorded()) == 1
    database.assert_none_is_left_open()
    with pytest.raises(EffectDone) as again:
        isolated.place(in_order[1])
    assert again.value.response == answer


def test_one_that_was_stopped_before_its_record_comes_too_late(
    isolated: Orders, pool: Any, in_order: tuple[Reservation, Reservation]
) -> None:
    """SQLite lets only one transaction write, so there the late one is stopped before its first write."""
    late, prompt = in_order
    stopped = Attempt(pool, isolated.place, late)
    stopped.wait_for("begun")
    if isolated.database.kind != "sqlite":
        stopped.go_on_after("begun")
        stopped.wait_for("made")
    answer = isolated.place(prompt)
    refused = stopped.result()

    assert isinstance(refused, EffectDone)
    assert refused.response == answer
    assert isolated.count() == 1
    assert [record.generation for record in isolated.recorded()] == [prompt.generation]


def test_the_one_step_form_answers_both_with_the_same_response(
    isolated: Orders, pool: Any, in_order: tuple[Reservation, Reservation]
) -> None:
    if isolated.database.kind == "sqlite":  # where the second one waits for the first at its first write
        answers = [isolated.place_once(r) for r in in_order]
    else:
        stopped = Attempt(pool, isolated.place_once, in_order[0])
        stopped.wait_for("made")
        answers = [isolated.place_once(in_order[1]), stopped.result()]  # type: ignore[list-item]

    assert answers[0] == answers[1]
    assert isinstance(answers[0], StoredResponse)
    assert isolated.count() == 1


def test_of_many_attempts_at_once_one_commits(isolated: Orders, pool: Any, claim: Any) -> None:
    """A deadlock or serialization failure is possible in between: its attempt is made again, as by a client's retry."""
    r = claim()

    def keep_trying(number: int) -> StoredResponse:
        while True:
            try:
                return isolated.place_once(r) if number % 2 else isolated.place(r)
            except EffectDone as done:
                return done.response
            except DBAPIError:
                continue

    answers = {future.result(PATIENCE) for future in [pool.submit(keep_trying, number) for number in range(8)]}

    assert len(answers) == 1
    assert isolated.count() == len(isolated.recorded()) == 1
