"""Effects of `once` and `reserve`, sync and asyncio: what the caller gets, and what becomes of the row."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import NullPool
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import sessionmaker

from idemredis import (
    AlreadyCompleted,
    AsyncLedger,
    ConfigurationError,
    EffectDone,
    FencedOut,
    KeyReused,
    Ledger,
    Policy,
    Reservation,
    StoredResponse,
    current_reservation,
    fingerprint_value,
)
from tests.support.databases import Database
from tests.support.orders import Order, Orders, effects
from tests.support.servers import Server
from tests.support.subject import Mode

JSON = (("content-type", "application/json"),)


class Shop:
    """A worker that makes orders under `once`, in one mode; `call` calls the function.

    Attributes:
        after: called after the commit, before the row is completed.
    """

    def __init__(self, mode: Mode, server: Server, namespace: str, database: Database) -> None:
        self.mode = mode
        self.after: Callable[[], object] = lambda: None
        self.events: list[str] = []
        self.runs = 0
        self._server, self._namespace = server, namespace
        self._engine = database.engine()
        self._database = database

    def call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a function of (shop, session maker, arguments) under `once`; keys are the first argument."""
        options = {"principal": "alice", "key": lambda key, *rest: key, "operation": "order", **options}
        note = [lambda event: self.events.append(event.name)]
        if self.mode == "sync":
            client = self._server.client()
            ledger = Ledger(client, namespace=self._namespace, observers=note, socket_timeout=5.0)
            make: Any = sessionmaker(self._engine)
            if callable(options.get("recover")) and getattr(options["recover"], "of_maker", False):
                options["recover"] = options["recover"](make)
            try:
                return ledger.once(**options)(lambda key, *rest: _now(function(self, make, key, *rest)))(*args)
            finally:
                ledger.close()
                client.close()

        async def run() -> Any:
            client = self._server.async_client()
            ledger = AsyncLedger(client, namespace=self._namespace, observers=note, socket_timeout=5.0)
            make = async_sessionmaker(self._database.async_engine(poolclass=NullPool))
            if callable(options.get("recover")) and getattr(options["recover"], "of_maker", False):
                options["recover"] = options["recover"](make)

            async def later(key: str, *rest: Any) -> Any:
                return await function(self, make, key, *rest)

            try:
                return await ledger.once(**options)(later)(*args)
            finally:
                await ledger.close()
                await client.aclose()

        return asyncio.run(run())

    def close(self) -> None:
        self._engine.dispose()


def _now(coroutine: Any) -> Any:
    """Run a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


def in_thread(work: Callable[[], None]) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(work).result(60)


async def value(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


async def place_once(shop: Shop, make: Any, key: str, amount: int = 1) -> Any:
    """The one-step form."""
    shop.runs += 1
    manager: Any = effects.once(make, current_reservation)
    e = await manager.__aenter__() if shop.mode == "async" else manager.__enter__()
    order = Order(made_by=current_reservation.generation)
    e.session.add(order)
    await value(e.session.flush())
    e.response = {"order": order.id}, 201
    await value(manager.__aexit__(None, None, None) if shop.mode == "async" else manager.__exit__(None, None, None))
    shop.after()
    return e.answer


async def place(shop: Shop, make: Any, key: str, amount: int = 1) -> Any:
    """The same in single steps; it returns a plain result, as before there were effects."""
    shop.runs += 1
    session = make()
    try:
        order = Order(made_by=current_reservation.generation)
        session.add(order)
        await value(session.flush())
        result = {"order": order.id}
        await value(effects.record(session, current_reservation, result))
        await value(session.commit())
    finally:
        await value(session.close())
    shop.after()
    return result


both_forms = pytest.mark.parametrize("form", [place_once, place])


@pytest.fixture
def shop(mode: Mode, valkey_server: Server, namespace: str, orders: Orders) -> Iterator[Shop]:
    shop = Shop(mode, valkey_server, namespace, orders.database)
    yield shop
    shop.close()


def killed() -> None:
    raise KeyboardInterrupt  # releases the row; the effect has been committed


@both_forms
def test_every_caller_gets_the_same_result(shop: Shop, orders: Orders, form: Any) -> None:
    results = [shop.call(form, "k") for _ in range(3)]
    assert results[0] == results[1] == results[2]
    assert set(results[0]) == {"order"}
    assert (shop.runs, orders.count()) == (1, 1)


@both_forms
def test_an_attempt_that_ends_between_effect_and_completion_is_not_done_twice(
    shop: Shop, orders: Orders, ledger: Ledger, form: Any
) -> None:
    shop.after = killed
    with pytest.raises(KeyboardInterrupt):
        shop.call(form, "k")
    shop.after = lambda: None
    first, again = shop.call(form, "k"), shop.call(form, "k")

    assert first == again
    assert (shop.runs, orders.count()) == (2, 1)
    row = ledger.read("alice", "k", "order")
    assert row is not None
    assert (row.status, row.generation) == ("completed", 2)
    assert shop.events[-2:] == ["completed", "replayed"]


@both_forms
def test_a_ledger_that_forgets_the_row_between_effect_and_completion(
    shop: Shop, orders: Orders, ledger: Ledger, form: Any
) -> None:
    shop.after = lambda: ledger.client.flushall()
    with pytest.raises(FencedOut):
        shop.call(form, "k")
    shop.after = lambda: None
    first, again = shop.call(form, "k"), shop.call(form, "k")

    assert first == again
    assert (shop.runs, orders.count()) == (2, 1)
    row = ledger.read("alice", "k", "order")
    assert row is not None
    assert (row.status, row.generation) == ("completed", 1)


@both_forms
def test_another_request_under_the_key_of_a_forgotten_row_is_refused(
    shop: Shop, orders: Orders, ledger: Ledger, form: Any
) -> None:
    shop.call(form, "k", 1)
    ledger.client.flushall()
    for _ in range(2):
        with pytest.raises(KeyReused):
            shop.call(form, "k", 2, on_error="store")
    assert orders.count() == 1
    row = ledger.read("alice", "k", "order")
    assert row is not None
    assert (row.status, row.response) == ("pending", None)


def test_recover_looks_before_the_function_runs_again(shop: Shop, orders: Orders) -> None:
    def recover(make: Any) -> Any:
        return effects.recover(make)

    recover.of_maker = True  # type: ignore[attr-defined]
    shop.after = killed
    with pytest.raises(KeyboardInterrupt):
        shop.call(place_once, "k")
    shop.after = lambda: None
    results = [shop.call(place_once, "k", recover=recover) for _ in range(2)]
    assert results[0] == results[1]
    assert set(results[0]) == {"order"}
    assert (shop.runs, orders.count()) == (1, 1)
    shop.after = killed
    with pytest.raises(KeyboardInterrupt):
        shop.call(_die_before, "other")
    shop.after = lambda: None
    assert set(shop.call(place_once, "other", recover=recover)) == {"order"}


async def _die_before(shop: Shop, make: Any, key: str) -> Any:
    shop.after()


def test_a_stalled_attempt_gets_what_its_successor_has_committed(shop: Shop, orders: Orders, claim: Any) -> None:
    """It is fenced, but it knows the response all the same."""

    async def stall(shop: Shop, make: Any, key: str) -> Any:
        fingerprint = current_reservation.fingerprint

        def overtake() -> None:
            orders.place(claim("k", fingerprint, operation="order"))

        await asyncio.to_thread(overtake) if shop.mode == "async" else in_thread(overtake)
        return await place(shop, make, key)

    result = shop.call(stall, "k")
    assert set(result) == {"order"}
    assert orders.count() == 1
    assert "fenced" in shop.events


def test_recover_for_an_asyncio_session_is_refused_by_a_sync_ledger(ledger: Ledger, databases: Any) -> None:
    make = async_sessionmaker(databases.get("sqlite").async_engine(poolclass=NullPool))
    with pytest.raises(ConfigurationError, match="async def"):
        ledger.once(principal="a", key="k", recover=effects.recover(make))(lambda: 1)


RESPONSES = [
    (StoredResponse(201, JSON, b'{"a":1}'), {"a": 1}),
    (StoredResponse(200, (), b"[1]"), [1]),
    (StoredResponse(200, (("Content-Type", "text/plain"),), b"[1]"), None),
    (StoredResponse(200, JSON, b"no json"), None),
    (StoredResponse(204), None),
    (StoredResponse(500, JSON, b'"x"'), "x"),
]


@pytest.mark.parametrize(("response", "result"), RESPONSES)
@pytest.mark.parametrize("way", ["returned", "recovered", "raised"])
def test_a_stored_response_is_what_its_json_is_for_every_caller(
    ledger: Ledger, response: StoredResponse, result: Any, way: str
) -> None:
    """Or itself, if it is no JSON."""

    def recover(r: Reservation) -> StoredResponse:
        return response

    @ledger.once(principal="a", key="k", operation="o", recover=recover if way == "recovered" else None)
    def work() -> Any:
        if way == "raised":
            raise EffectDone(response)
        return response

    if way == "recovered":
        claimed = ledger.claim("a", "k", fingerprint_value({}), "o")
        assert isinstance(claimed, Reservation)
        ledger.release(claimed)
    expected = response if result is None else result
    assert work() == expected
    assert work() == expected
    row = ledger.read("a", "k", "o")
    assert row is not None
    assert (row.status, row.response) == ("completed", response)


def test_a_function_whose_annotation_names_it_returns_a_stored_response_to_every_caller(ledger: Ledger) -> None:
    response = StoredResponse(201, JSON, b'{"a":1}')

    @ledger.once(principal="a", key="k")
    def work() -> StoredResponse:
        return response

    assert work() == response
    assert work() == response


def test_a_response_too_large_for_the_ledger_is_returned_once_and_then_known_to_be_done(
    valkey_server: Server, namespace: str
) -> None:
    client = valkey_server.client()
    ledger = Ledger(client, Policy(max_body=10), namespace, socket_timeout=5.0)

    @ledger.once(principal="a", key="k")
    def work() -> Any:
        return StoredResponse(200, JSON, b'"123456789012"')

    assert work() == "123456789012"
    with pytest.raises(AlreadyCompleted) as done:
        work()
    assert done.value.response.omitted == "too_large"
    ledger.close()
    client.close()


def test_a_tombstone_is_known_to_be_done(ledger: Ledger) -> None:
    @ledger.once(principal="a", key="k")
    def work() -> Any:
        raise EffectDone(StoredResponse(201, omitted="not_wanted"))

    for _ in range(2):
        with pytest.raises(AlreadyCompleted) as done:
            work()
        assert done.value.response == StoredResponse(201, omitted="not_wanted")


def test_reserve_completes_its_row_with_the_response_of_an_effect_that_is_done(orders: Orders, ledger: Ledger) -> None:
    """The caller sees what it sees for any finished operation, and acknowledges its message."""
    with ledger.reserve("w", "k", "f") as r:
        answer = orders.place(r)
        ledger.release(r)  # as if it had ended before its completion
    with pytest.raises(AlreadyCompleted) as done, ledger.reserve("w", "k", "f") as r:
        orders.place(r)
    assert type(done.value) is EffectDone
    row = ledger.read("w", "k")
    assert row is not None
    assert (row.status, row.response, orders.count()) == ("completed", answer, 1)
    with pytest.raises(AlreadyCompleted), ledger.reserve("w", "k", "f"):
        pass


def test_the_effect_of_another_operation_inside_does_not_settle_this_one(orders: Orders, ledger: Ledger) -> None:
    inner = ledger.claim("w", "inner", "f")
    assert isinstance(inner, Reservation)
    orders.place(inner)

    @ledger.once(principal="w", key="outer", operation="o")
    def outer() -> Any:
        orders.place(inner)

    with pytest.raises(EffectDone):
        outer()
    row = ledger.read("w", "outer", "o")
    assert row is not None
    assert (row.status, row.owner) == ("pending", "")
    with pytest.raises(EffectDone), ledger.reserve("w", "another", "f"):
        orders.place(inner)
    row = ledger.read("w", "another")
    assert row is not None
    assert row.status == "pending"
