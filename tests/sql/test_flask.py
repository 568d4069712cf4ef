"""Effects of protected views: each client gets the response of the effect that is in the table."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flask import Response, abort
from flask.typing import ResponseReturnValue
from sqlalchemy import NullPool
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import sessionmaker

from idemredis import EffectDone, KeyReused, StoredResponse
from idemredis.flask import current_reservation
from tests.support.clock import TurnedClock
from tests.support.databases import Database, Databases
from tests.support.orders import Order, Orders, effects, prepared
from tests.support.servers import free_port
from tests.support.site import MakeSite

JSON = (("content-type", "application/json"),)


@pytest.fixture
def database(databases: Databases) -> Database:
    return prepared(databases, "postgresql")


@pytest.fixture
def orders(database: Database) -> Iterator[Orders]:
    orders = Orders("sync", database)
    yield orders
    database.assert_none_is_left_open()
    orders.close()


class Shop:
    """Views that make orders, in both forms, with something that happens between the effect and the completion."""

    def __init__(self, orders: Orders, form: str) -> None:
        self.after: Callable[[], object] = lambda: None
        self._orders = orders
        self._form = form

    def view(self) -> ResponseReturnValue:
        if self._form == "once":
            with effects.once(self._orders.looking, current_reservation) as e:
                order = Order(made_by=current_reservation.generation)
                e.session.add(order)
                e.session.flush()
                e.response = {"order": order.id}, 201, {"Location": f"/orders/{order.id}"}
            self.after()
            return e.answer  # type: ignore[return-value]  # a StoredResponse, which `protect` takes
        with self._orders.looking() as session:
            order = Order(made_by=current_reservation.generation)
            session.add(order)
            session.flush()
            location = {"Location": f"/orders/{order.id}"}
            effects.record(session, current_reservation, ({"order": order.id}, 201, location))
            session.commit()
            self.after()
            return {"order": order.id}, 201, location


@pytest.fixture(params=["once", "record"])
def shop(request: pytest.FixtureRequest, orders: Orders) -> Shop:
    return Shop(orders, request.param)


def fail() -> None:
    raise ConnectionError("the mail server is down")


def answers(*responses: Any) -> set[tuple[int, Any, str]]:
    return {(response.status_code, response.data.strip(), response.headers["Location"]) for response in responses}


def test_a_retry_after_a_failure_behind_the_commit_gets_the_effect_s_response(
    make_site: MakeSite, shop: Shop, orders: Orders
) -> None:
    site = make_site()
    site.view(shop.view)
    shop.after = fail
    assert site.send().status_code == 500
    shop.after = lambda: None
    retry, replay = site.send(), site.send()

    assert len(answers(retry, replay)) == 1
    assert retry.status_code == 201
    assert "Idempotent-Replayed" not in retry.headers
    assert replay.headers["Idempotent-Replayed"] == "true"
    assert (orders.count(), len(site.runs)) == (1, 2)
    assert site.row()["status"] == b"completed"


def test_a_ledger_that_forgets_the_row_between_effect_and_completion(
    make_site: MakeSite, shop: Shop, orders: Orders
) -> None:
    site = make_site()
    site.view(shop.view)
    shop.after = site.store.flushall
    first = site.send()
    shop.after = lambda: None
    retry, replay = site.send(), site.send()

    assert len(answers(first, retry, replay)) == 1
    assert site.row()["generation"] == b"1"
    assert orders.count() == 1


@pytest.mark.parametrize(("protocol", "status"), [("default", 409), ("ietf", 422)])
def test_another_request_under_the_key_of_a_forgotten_row_is_refused_as_reused(
    make_site: MakeSite, shop: Shop, orders: Orders, protocol: str, status: int
) -> None:
    site = make_site(PROTOCOL=protocol, ON_ERROR="store")
    site.view(shop.view)
    site.send()
    site.store.flushall()
    for _ in range(2):
        refused = site.send(json={"amount": 7})
        assert (refused.status_code, refused.get_json()["error"]) == (status, "idempotency_key_reused")
        assert b"order" not in refused.data.replace(b"idempotency", b"").replace(b"/orders", b"")
        assert "Location" not in refused.headers
    assert site.row()["status"] == b"pending"
    assert site.row()["owner"] == b""
    assert orders.count() == 1


def test_a_takeover_looks_in_the_table_before_the_view_runs_again(
    make_site: MakeSite, shop: Shop, orders: Orders, clock: TurnedClock
) -> None:
    site = make_site()

    def view() -> ResponseReturnValue:
        returned = shop.view()
        current_reservation.outcome = "hold"  # as if the worker had died here
        return returned

    site.view(view, recover=effects.recover(orders.looking))
    first = site.send()
    clock.turn(31)
    assert len(answers(first, site.send(), site.send())) == 1
    assert (orders.count(), len(site.runs)) == (1, 1)


def test_recover_with_an_asyncio_session(make_site: MakeSite, orders: Orders, clock: TurnedClock) -> None:
    site = make_site()
    make = async_sessionmaker(orders.database.async_engine(poolclass=NullPool))

    async def view() -> Any:
        async with effects.once(make, current_reservation) as e:
            e.response = {"by": current_reservation.generation}
        current_reservation.outcome = "hold"
        return e.answer

    site.view(lambda: asyncio.run(view()), recover=effects.recover(make))
    first = site.send()
    clock.turn(31)
    again = site.send()
    assert (again.status_code, again.data) == (200, first.data)
    assert (len(site.runs), site.row()["status"]) == (1, b"completed")


def test_a_stalled_view_answers_with_its_successor_s_effect(
    make_site: MakeSite, orders: Orders, clock: TurnedClock
) -> None:
    """Its completion is refused, and its client gets the response that every other client gets."""
    site = make_site()
    shop = Shop(orders, "record")
    nested: list[Any] = []

    def view() -> ResponseReturnValue:
        if not nested:
            clock.turn(31)
            nested.append(None)
            nested[0] = site.send()
        return shop.view()

    site.view(view)
    stalled = site.send()
    assert len(answers(stalled, nested[0], site.send())) == 1
    assert orders.count() == 1


RAISED = EffectDone(StoredResponse(201, (("Location", "/1"), ("Set-Cookie", "s=1")), b"made"))


def _raise(error: BaseException = RAISED) -> Any:
    raise error


def test_a_done_effect_reaches_the_client_as_it_is_whatever_the_application_does_with_errors(
    make_site: MakeSite,
) -> None:
    site = make_site(ON_ERROR="hold")
    site.view(_raise)

    @site.app.errorhandler(Exception)
    def every_error(error: Exception) -> ResponseReturnValue:
        return "caught", 200

    @site.app.after_request
    def break_it(response: Response) -> Response:
        if response.headers.get("Idempotent-Replayed") is None:
            abort(503)
        return response

    first, again = site.send(), site.send()
    assert first.status_code in (200, 503)  # what the after_request function does to it is its own
    assert (again.status_code, again.data, again.headers["Location"]) == (201, b"made", "/1")
    assert "Set-Cookie" not in again.headers
    assert site.row()["status"] == b"completed"


def test_a_done_effect_that_a_decorator_outside_raises_is_answered_too(make_site: MakeSite) -> None:
    site = make_site()

    def outer(view: Any) -> Any:
        def wrapper() -> Any:
            view()
            _raise()

        wrapper.__wrapped__ = view  # type: ignore[attr-defined]
        return wrapper

    site.app.add_url_rule("/x", "x", outer(site.idempotency.protect(lambda: "view")), methods=["POST"])
    site.app.testing = False
    site.app.config["PROPAGATE_EXCEPTIONS"] = False
    for _ in range(2):
        response = site.send(path="/x")
        assert (response.status_code, response.data) == (201, b"made")


def test_a_done_effect_in_a_stream_completes_the_row(make_site: MakeSite) -> None:
    site = make_site()

    def stream() -> Iterator[str]:
        _raise()
        yield "x"

    site.view(lambda: stream())
    with pytest.raises(EffectDone):
        site.send()
    assert site.send().data == b"made"


@pytest.mark.parametrize("error", [EffectDone(StoredResponse(201), "0" * 12), KeyReused("0" * 12), KeyReused()])
def test_an_error_about_another_row_is_the_view_s_own_failure(make_site: MakeSite, error: Exception) -> None:
    site = make_site()
    site.view(lambda: _raise(error))
    assert site.send().status_code == 500
    assert site.row()["status"] == b"pending"


@pytest.mark.parametrize("raises", [True, False], ids=["raised", "returned"])
def test_a_tombstone_is_refused_to_everybody_and_completes_the_row(make_site: MakeSite, raises: bool) -> None:
    site = make_site(ON_ERROR="release")
    tombstone = StoredResponse(201, omitted="not_wanted")
    site.view(lambda: _raise(EffectDone(tombstone)) if raises else tombstone)
    for _ in range(2):
        refused = site.send()
        assert (refused.status_code, refused.get_json()["original_status"]) == (500, 201)
    assert (site.row()["status"], site.omitted(), len(site.runs)) == (b"completed", b"not_wanted", 1)


@pytest.mark.parametrize("way", ["view", "recover", "GET", "no key", "off", "observe", "PROTECT_ALL"])
def test_a_stored_response_may_be_returned_wherever_a_view_s_response_may(
    make_site: MakeSite, clock: TurnedClock, way: str
) -> None:
    stored = StoredResponse(201, (("Content-Type", "text/x"), ("Link", "a"), ("Link", "b"), ("Date", "x")), b"\x00\xff")
    returned: Any = lambda: stored  # noqa: E731  # Flask's own types do not know it
    settings: dict[str, Any] = {"MODE": way} if way in ("off", "observe") else {}
    site = make_site(REQUIRED=way != "no key", PROTECT_ALL=way == "PROTECT_ALL", **settings)
    if way == "PROTECT_ALL":
        site.app.add_url_rule("/charges", "charges", returned, methods=["POST"])
    elif way == "GET":
        site.app.add_url_rule("/charges", "charges", site.idempotency.protect(returned), methods=["GET"])
    elif way == "recover":

        def hold() -> str:
            current_reservation.outcome = "hold"
            return "x"

        site.view(hold, recover=lambda r: stored)
        site.send()
        clock.turn(31)
    else:
        site.view(lambda: stored)
    for _ in range(2):
        response = site.send(key=None if way == "no key" else "k1", method="GET" if way == "GET" else "POST")
        assert (response.status_code, response.data) == (201, b"\x00\xff")
        assert response.headers.getlist("Link") == ["a", "b"]
        assert response.headers["Content-Type"] == "text/x"
        assert response.headers.get("Date") != "x"


def test_while_redis_is_down_effects_are_still_made_once(make_site: MakeSite, orders: Orders) -> None:
    """`FAIL_OPEN` runs the view without a claim; the key and the request are known, and so is the record."""
    shop = Shop(orders, "record")
    site = make_site(url=f"redis://127.0.0.1:{free_port()}/0", FAIL_OPEN=True)
    site.view(shop.view)
    first, again, other = site.send(), site.send(), site.send(json={"amount": 7})

    assert len(answers(first, again)) == 1
    assert first.headers["Idempotency-Status"] == "unprotected"
    assert (other.status_code, other.get_json()["error"]) == (409, "idempotency_key_reused")
    assert site.send("another").status_code == 201
    assert orders.count() == 2


@pytest.mark.parametrize("form", ["record", "once"])
def test_where_nothing_is_claimed_nothing_is_recorded_and_the_view_works(
    make_site: MakeSite, orders: Orders, form: str
) -> None:
    shop = Shop(orders, form)
    site = make_site(MODE="observe", REQUIRED=False)
    site.view(shop.view)
    assert {site.send().status_code, site.send().status_code, site.send(None).status_code} == {201}
    assert orders.count() == 3
    assert orders.recorded() == []


def test_a_view_of_an_application_with_sqlalchemy_s_scoped_session(make_site: MakeSite, database: Database) -> None:
    from sqlalchemy.orm import scoped_session

    engine = database.engine(pool_size=1, max_overflow=0, pool_timeout=5)
    current = scoped_session(sessionmaker(engine))
    site = make_site()
    site.app.teardown_appcontext(lambda error: current.remove())

    @site.app.before_request
    def load_account() -> None:
        current.query(Order).count()

    def view() -> Any:
        with effects.once(current, current_reservation) as e:
            e.session.add(Order(made_by=1))
            e.response = {"made": True}
        return e.answer

    site.view(view)
    first = site.send()
    site.store.flushall()
    again = site.send()
    assert (first.status_code, first.data) == (again.status_code, again.data) == (200, b'{"made":true}')
    with sessionmaker(engine).begin() as session:
        assert session.query(Order).count() == 1
        session.execute(Order.__table__.delete())  # type: ignore[attr-defined]
        session.execute(effects.table.delete())
    engine.dispose()
