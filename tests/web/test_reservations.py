"""`current_reservation` in views, whose key it is, and which requests are claimed."""

from __future__ import annotations

import threading
from typing import Any
from uuid import UUID

import pytest

from idemredis import Policy, current_reservation
from tests.support.clock import TurnedClock, expires_at
from tests.support.doors import MakeDoor
from tests.support.servers import Server
from tests.support.site import Door
from tests.support.waiting import wait_until


def test_the_reservation_shows_itself(door: Door) -> None:
    def view() -> dict[str, Any]:
        assert current_reservation
        current_reservation.ensure_held()
        return {
            name: getattr(current_reservation, name)
            for name in ("principal", "key", "operation", "generation", "taken_over", "held", "last_checkpoint")
        } | {"downstream": current_reservation.downstream_key("gateway")}

    door.view(view, "/shown", operation="show")
    shown = door.send(path="/shown").get_json()
    downstream = shown.pop("downstream")
    assert shown == {
        "principal": "acme",
        "key": "k1",
        "operation": "show",
        "generation": 1,
        "taken_over": False,
        "held": True,
        "last_checkpoint": None,
    }
    assert len(downstream) == 64


def test_a_request_within_a_request_has_a_reservation_of_its_own(door: Door) -> None:
    def outer() -> str:
        before = current_reservation.key
        inner = door.send("inner").text
        return f"{before} {inner} {current_reservation.key}"

    door.view(outer, "/outer")
    assert door.send("outer", "/outer").text == "outer charge 2 outer"
    assert (door.row("inner")["status"], door.row("outer")["status"]) == (b"completed", b"completed")


def test_threads_of_one_application_see_their_own_reservations(door: Door) -> None:
    barrier = threading.Barrier(4)  # no more than the smallest pool of threads has

    def view() -> str:
        barrier.wait(20)
        return current_reservation.key

    door.view(view, "/own")
    answers: dict[str, str] = {}

    def send(key: str) -> None:
        answers[key] = door.send(key, "/own").text

    threads = [threading.Thread(target=send, args=(f"k{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert answers == {f"k{n}": f"k{n}" for n in range(4)}


@pytest.mark.slow
def test_a_long_view_keeps_its_lease(make_door: MakeDoor, valkey_server: Server) -> None:
    door = make_door(valkey_server, policy=Policy(lease=0.3, retention=60))

    def view() -> str:
        first = expires_at(door.store, door.row_name())
        wait_until(lambda: expires_at(door.store, door.row_name()) > first + 600 and current_reservation.held)
        return "done"

    door.view(view)
    assert (door.send().text, door.row()["generation"]) == ("done", b"1")


def test_a_view_that_was_fenced_out_answers_its_own_client_and_changes_nothing(
    make_door: MakeDoor, clock: TurnedClock, caplog: pytest.LogCaptureFixture
) -> None:
    door = make_door()

    def view() -> str:
        mine = f"run {len(door.runs)}"
        if mine == "run 1":
            clock.turn(31)
            assert door.send().text == "run 2"
        return mine

    door.view(view)
    assert door.send().text == "run 1"
    assert door.row()["response_body"] == b"run 2"
    assert door.send().text == "run 2"
    assert door.told().count("fenced") == 1
    assert "may have been done twice" in caplog.text


@pytest.mark.parametrize(
    ("principal", "text"),
    [("acme", "acme"), (7, "7"), (0, "0"), (UUID(int=1), "00000000-0000-0000-0000-000000000001"), ("a:b", "a:b")],
)
@pytest.mark.parametrize("called", [False, True])
def test_a_principal_may_be_text_a_number_or_a_uuid_and_a_function_or_not(
    principal: object, text: str, called: bool, make_door: MakeDoor
) -> None:
    door = make_door(principal=(lambda: principal) if called else principal)
    door.view(lambda: current_reservation.principal)
    assert door.send().text == text
    assert door.row(principal=text)


@pytest.mark.parametrize(("setting", "option", "status"), [(False, None, 201), (False, True, 400), (True, False, 201)])
def test_a_view_says_for_itself_whether_a_key_is_required(
    setting: bool, option: bool | None, status: int, make_door: MakeDoor
) -> None:
    door = make_door(REQUIRED=setting)
    door.view(required=option)
    assert door.send(None).status_code == status


def test_the_methods_to_protect_can_be_chosen(make_door: MakeDoor) -> None:
    door = make_door(METHODS=("POST",))
    door.view()
    assert [door.send(method="PUT").text for _ in range(2)] == ["charge 1", "charge 2"]
    assert [door.send(method="POST").text for _ in range(2)] == ["charge 3", "charge 3"]
