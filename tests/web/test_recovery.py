"""`recover` after an attempt that died, and duplicates that wait for a running one."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from idemredis import HoldForReview, Reservation, current_reservation
from tests.support.clock import SLACK, TurnedClock
from tests.support.doors import MakeDoor
from tests.support.site import Door
from tests.support.waiting import wait_until


def _stale(door: Door, clock: TurnedClock, **options: Any) -> None:
    """Add a view whose first attempt dies after a checkpoint, and let its lease end."""

    def view() -> tuple[str, int]:
        if len(door.runs) == 1:
            current_reservation.checkpoint("charged", {"charge": "ch_1"})
            current_reservation.outcome = "hold"
        return f"run {len(door.runs)} {current_reservation.last_checkpoint}", 201

    door.view(view, **options)
    door.send()
    clock.turn(31)


def test_recover_can_give_the_answer_instead_of_the_view(make_door: MakeDoor, clock: TurnedClock) -> None:
    door = make_door()
    seen: list[Reservation] = []

    def recover(reservation: Reservation) -> Any:
        seen.append(reservation)
        assert current_reservation.generation == 2
        return {"recovered": reservation.last_checkpoint}, 202, {"Location": "/charges/ch_1"}

    _stale(door, clock, recover=recover)
    first, again = door.send(), door.send()
    assert (first.status_code, first.get_json()) == (202, {"recovered": ["charged", {"charge": "ch_1"}]})
    assert (again.status_code, again.data, again.headers["Location"]) == (202, first.data, "/charges/ch_1")
    assert (len(door.runs), seen[0].generation, seen[0].taken_over) == (1, 2, True)


def test_recover_can_have_the_view_run(make_door: MakeDoor, clock: TurnedClock) -> None:
    door = make_door()
    calls: list[int] = []
    _stale(door, clock, recover=lambda reservation: calls.append(reservation.generation))
    assert [door.send().text for _ in range(2)] == ["run 2 ('charged', {'charge': 'ch_1'})"] * 2
    assert calls == [2]


def test_recover_is_not_asked_on_a_first_run(make_door: MakeDoor) -> None:
    door = make_door()
    door.view(recover=lambda reservation: pytest.fail("nothing to recover"))
    assert door.send().status_code == 201


def test_recover_can_hold_the_row_for_a_person(make_door: MakeDoor, clock: TurnedClock) -> None:
    door = make_door()

    def recover(reservation: Reservation) -> None:
        raise HoldForReview("ask the gateway")

    _stale(door, clock, recover=recover)
    held = door.send()
    assert (held.status_code, held.get_json()["error"]) == (409, "idempotency_key_in_progress")
    assert 30_000 - SLACK * 1000 < held.get_json()["lease_ms"] <= 30_000
    assert (door.row()["status"], len(door.runs), door.told()[-1]) == (b"pending", 1, "held_for_review")
    assert 30_000 - SLACK * 1000 < door.send().get_json()["lease_ms"] <= 30_000


def test_a_recover_that_fails_gives_the_key_up_and_the_view_does_not_run(
    make_door: MakeDoor, clock: TurnedClock
) -> None:
    door = make_door()

    def recover(reservation: Reservation) -> None:
        raise LookupError

    _stale(door, clock, recover=recover)
    assert door.send().status_code == 500
    assert (len(door.runs), door.row()["owner"], door.row()["generation"]) == (1, b"", b"2")


@pytest.mark.parametrize("per_view", [False, True])
def test_a_duplicate_can_wait_for_the_running_one(per_view: bool, make_door: MakeDoor) -> None:
    door = make_door(WAIT_SECONDS=0 if per_view else 20)
    running, go_on = threading.Event(), threading.Event()

    def view() -> str:
        running.set()
        assert go_on.wait(20)
        return f"run {len(door.runs)}"

    options: dict[str, Any] = {"wait": 20} if per_view else {}
    door.view(view, **options)
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(door.send())) for _ in range(3)]
    threads[0].start()
    assert running.wait(20)
    door.sent.clear()
    for thread in threads[1:]:
        thread.start()
    wait_until(lambda: len(door.sent) >= 4)  # both have asked more than once
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert [answer.text for answer in answers] == ["run 1"] * 3
    assert sorted(answer.headers.get("Idempotent-Replayed", "") for answer in answers) == ["", "true", "true"]
