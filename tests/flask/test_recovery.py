"""`recover` after an attempt that died, and duplicates that wait for a running one."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from idemredis import HoldForReview, Reservation
from idemredis.flask import current_reservation
from tests.support.clock import SLACK, TurnedClock
from tests.support.site import MakeSite, Site
from tests.support.waiting import wait_until


def _stale(site: Site, clock: TurnedClock, **options: Any) -> None:
    """Add a view whose first attempt dies after a checkpoint, and let its lease end."""

    def view() -> tuple[str, int]:
        if len(site.runs) == 1:
            current_reservation.checkpoint("charged", {"charge": "ch_1"})
            current_reservation.outcome = "hold"
        return f"run {len(site.runs)} {current_reservation.last_checkpoint}", 201

    site.view(view, **options)
    site.send()
    clock.turn(31)


def test_recover_can_give_the_answer_instead_of_the_view(make_site: MakeSite, clock: TurnedClock) -> None:
    site = make_site()
    seen: list[Reservation] = []

    def recover(reservation: Reservation) -> Any:
        seen.append(reservation)
        assert current_reservation.generation == 2
        return {"recovered": reservation.last_checkpoint}, 202, {"Location": "/charges/ch_1"}

    _stale(site, clock, recover=recover)
    first, again = site.send(), site.send()
    assert (first.status_code, first.get_json()) == (202, {"recovered": ["charged", {"charge": "ch_1"}]})
    assert (again.status_code, again.data, again.headers["Location"]) == (202, first.data, "/charges/ch_1")
    assert (len(site.runs), seen[0].generation, seen[0].taken_over) == (1, 2, True)


def test_recover_can_have_the_view_run(make_site: MakeSite, clock: TurnedClock) -> None:
    site = make_site()
    calls: list[int] = []
    _stale(site, clock, recover=lambda reservation: calls.append(reservation.generation))
    assert [site.send().text for _ in range(2)] == ["run 2 ('charged', {'charge': 'ch_1'})"] * 2
    assert calls == [2]


def test_recover_is_not_asked_on_a_first_run(make_site: MakeSite) -> None:
    site = make_site()
    site.view(recover=lambda reservation: pytest.fail("nothing to recover"))
    assert site.send().status_code == 201


def test_recover_can_hold_the_row_for_a_person(make_site: MakeSite, clock: TurnedClock) -> None:
    site = make_site()

    def recover(reservation: Reservation) -> None:
        raise HoldForReview("ask the gateway")

    _stale(site, clock, recover=recover)
    held = site.send()
    assert (held.status_code, held.get_json()["error"]) == (409, "idempotency_key_in_progress")
    assert 30_000 - SLACK * 1000 < held.get_json()["lease_ms"] <= 30_000
    assert (site.row()["status"], len(site.runs), site.told()[-1]) == (b"pending", 1, "held_for_review")
    assert 30_000 - SLACK * 1000 < site.send().get_json()["lease_ms"] <= 30_000


@pytest.mark.parametrize("error", [LookupError, SystemExit])
def test_a_recover_that_fails_gives_the_key_up_and_the_view_does_not_run(
    error: type[BaseException], make_site: MakeSite, clock: TurnedClock
) -> None:
    site = make_site()

    def recover(reservation: Reservation) -> None:
        raise error

    _stale(site, clock, recover=recover)
    if error is SystemExit:
        with pytest.raises(SystemExit):
            site.send()
    else:
        assert site.send().status_code == 500
    assert (len(site.runs), site.row()["owner"], site.row()["generation"]) == (1, b"", b"2")


@pytest.mark.parametrize("per_view", [False, True])
def test_a_duplicate_can_wait_for_the_running_one(per_view: bool, make_site: MakeSite) -> None:
    site = make_site(WAIT_SECONDS=0 if per_view else 20)
    running, go_on = threading.Event(), threading.Event()

    def view() -> str:
        running.set()
        assert go_on.wait(20)
        return f"run {len(site.runs)}"

    options: dict[str, Any] = {"wait": 20} if per_view else {}
    site.view(view, **options)
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(site.send())) for _ in range(3)]
    threads[0].start()
    assert running.wait(20)
    site.sent.clear()
    for thread in threads[1:]:
        thread.start()
    wait_until(lambda: len(site.sent) >= 4)  # both have asked more than once
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert [answer.text for answer in answers] == ["run 1"] * 3
    assert sorted(answer.headers.get("Idempotent-Replayed", "") for answer in answers) == ["", "true", "true"]
