"""`Effects.once`: a block whose transaction is committed with the record of its response."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from sqlalchemy import NullPool, event, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from idemredis import (
    ConfigurationError,
    EffectDone,
    HoldForReview,
    InvalidResponse,
    KeyReused,
    Ledger,
    Reservation,
    StoredResponse,
)
from idemredis.sql import Effects
from tests.support.databases import Database
from tests.support.orders import Order, Orders, effects

JSON = (("content-type", "application/json"),)


async def block(orders: Orders, r: Reservation, work: Any = None, given: Any = None) -> Any:
    """Run a block in the mode of the orders; `work` is called with the block, and may be a coroutine function."""
    given = given or orders.make
    manager: Any = effects.once(given, r)
    if orders.mode == "async":
        async with manager as e:
            if work is not None:
                await orders.value(work(e))
        return e
    with manager as e:
        if work is not None:
            await orders.value(work(e))
    return e


def run(*args: Any) -> Any:
    return asyncio.run(block(*args))


def add(e: Any) -> None:
    e.session.add(Order(made_by=1))
    e.response = {"done": True}, 201


def test_the_effect_and_the_record_are_committed_and_the_answer_is_the_response(orders: Orders, claim: Any) -> None:
    e = run(orders, claim(), add)
    assert e.done is None
    assert e.answer == StoredResponse(201, JSON, b'{"done":true}')
    assert orders.count() == len(orders.recorded()) == 1


def test_an_earlier_effect_is_known_in_the_block_and_what_the_block_does_is_rolled_back(
    orders: Orders, claim: Any
) -> None:
    first = run(orders, claim(), add).answer

    def again(e: Any) -> None:
        assert e.done == first
        add(e)
        e.response = "another"

    e = run(orders, claim(), again)
    assert (e.done, e.answer) == (first, first)
    assert orders.count() == 1


def test_the_answer_is_not_known_inside(orders: Orders, claim: Any) -> None:
    def ask(e: Any) -> None:
        with pytest.raises(RuntimeError, match="has ended"):
            _ = e.answer

    assert run(orders, claim(), ask).answer == StoredResponse(200, JSON, b"null")


def test_another_request_under_the_key_does_not_run(orders: Orders, claim: Any, ledger: Ledger) -> None:
    run(orders, claim(), add)
    ledger.client.flushall()
    ran: list[Any] = []
    with pytest.raises(KeyReused):
        run(orders, claim(fingerprint="other"), ran.append)
    assert (ran, orders.count()) == ([], 1)


@pytest.mark.parametrize("error", [ValueError("x"), HoldForReview("x"), asyncio.CancelledError(), SystemExit(3)])
def test_an_exception_of_the_block_rolls_back_and_passes(orders: Orders, claim: Any, error: BaseException) -> None:
    async def fail(e: Any) -> None:
        add(e)
        await orders.value(e.session.flush())
        raise error

    with pytest.raises(type(error)):
        run(orders, claim(), fail)
    assert (orders.count(), orders.recorded()) == (0, [])
    orders.database.assert_none_is_left_open()
    run(orders, claim(), add)


def test_a_response_that_cannot_be_recorded_rolls_back(orders: Orders, claim: Any) -> None:
    def spoil(e: Any) -> None:
        add(e)
        e.response = object()

    with pytest.raises(InvalidResponse):
        run(orders, claim(), spoil)
    assert orders.count() == 0


def test_a_commit_inside_the_block_is_refused(orders: Orders, claim: Any) -> None:
    """It would commit the effect without its record. The release of a savepoint is no commit."""

    async def commit(e: Any) -> None:
        add(e)
        await orders.value(e.session.commit())

    async def with_savepoint(e: Any) -> None:
        savepoint = e.session.begin_nested()
        if orders.mode == "async":
            async with savepoint:
                add(e)
        else:
            with savepoint:
                add(e)

    with pytest.raises(ConfigurationError, match="do not commit"):
        run(orders, claim(), commit)
    assert orders.count() == 0
    run(orders, claim("another"), with_savepoint)
    assert orders.count() == 1


def test_an_error_of_the_database_in_the_block_is_answered_if_the_effect_is_done(orders: Orders, claim: Any) -> None:
    """As when the application's own unique column, or a serialization failure, stops the second attempt first."""
    r, late = claim(), claim()

    async def collide(e: Any) -> None:
        assert e.done is None
        await asyncio.to_thread(orders.place, late)
        await orders.value(e.session.execute(text("SELECT no_such_column FROM orders")))

    e = run(orders, r, collide)
    assert e.answer.status == 201
    assert e.answer == e.done
    assert orders.count() == 1

    async def fail(e: Any) -> None:
        await orders.value(e.session.execute(text("SELECT no_such_column FROM orders")))

    with pytest.raises(DBAPIError):
        run(orders, claim("another"), fail)


def test_a_record_that_the_block_makes_itself_is_found(orders: Orders, claim: Any) -> None:
    run(orders, claim(), add)
    other, r = claim("another"), claim()

    async def record(e: Any) -> None:
        e.done = None  # as if the first one had committed after this look
        await orders.value(effects.record(e.session, r, None))

    assert run(orders, r, record).answer.status == 201

    async def of_another_row(e: Any) -> None:
        await orders.value(effects.record(e.session, r, None))

    with pytest.raises(EffectDone):
        run(orders, other, of_another_row)


def test_an_error_at_the_commit_is_raised_and_nothing_is_committed(orders: Orders, claim: Any) -> None:
    def twice(e: Any) -> None:
        e.session.add_all([Order(id=5, made_by=1), Order(id=5, made_by=2)])

    with pytest.raises(IntegrityError):
        run(orders, claim(), twice)
    assert (orders.count(), orders.recorded()) == (0, [])


def test_a_commit_whose_reply_was_lost_is_looked_up(orders: Orders, claim: Any) -> None:
    lost: list[str] = []

    def lose(e: Any) -> None:
        add(e)
        session = e.session.sync_session if orders.mode == "async" else e.session
        dialect = session.get_bind().dialect
        commit = dialect.do_commit

        def commit_and_lose(connection: Any) -> None:
            del dialect.do_commit
            commit(connection)
            lost.append("reply")
            raise OperationalError("COMMIT", {}, Exception("server closed the connection"))

        dialect.do_commit = commit_and_lose

    e = run(orders, claim(), lose)
    assert lost == ["reply"]
    assert e.answer == StoredResponse(201, JSON, b'{"done":true}')
    assert orders.count() == 1


def test_a_commit_that_fails_before_it_reaches_the_server_is_raised(orders: Orders, claim: Any) -> None:
    def lose(e: Any) -> None:
        add(e)
        session = e.session.sync_session if orders.mode == "async" else e.session
        dialect = session.get_bind().dialect

        def fail(connection: Any) -> None:
            del dialect.do_commit
            raise OperationalError("COMMIT", {}, Exception("server closed the connection"))

        dialect.do_commit = fail

    with pytest.raises(OperationalError):
        run(orders, claim(), lose)
    assert (orders.count(), orders.recorded()) == (0, [])


def test_connections_go_back_to_the_pool(database: Database, claim: Any) -> None:
    """With one connection, whatever is not given back makes the next attempt wait for ever."""
    engine = database.engine(pool_size=1, max_overflow=0, pool_timeout=5)
    make = sessionmaker(engine)
    first = claim()
    for _ in range(3):
        with effects.once(make, first) as e:
            e.response = 1
        with pytest.raises(ZeroDivisionError), effects.once(make, claim("another")) as e:
            _ = 1 / 0
        assert effects.recover(make)(first) == StoredResponse(200, JSON, b"1")
        with make() as session, pytest.raises(EffectDone):
            effects.record(session, first, 2)
    with make() as session:
        assert effects.prune(session, 0) == 1
    engine.dispose()


def test_the_current_session_of_a_scoped_session_is_used_with_what_it_has_open(database: Database, claim: Any) -> None:
    engine = database.engine(pool_size=1, max_overflow=0, pool_timeout=5)
    current = scoped_session(sessionmaker(engine))
    order = Order(made_by=1)
    current.add(order)
    current.flush()
    with effects.once(current, claim()) as e:
        assert e.session is current()
        e.response = {"order": order.id}
    assert not current().in_transaction()
    current.execute(select(Order))  # as an application does that loads the account first
    with effects.once(current, claim()) as e:
        assert e.done is not None
    assert e.answer == e.done
    assert not current().in_transaction()
    current.execute(Order.__table__.delete())  # type: ignore[attr-defined]
    current.execute(effects.table.delete())
    current.commit()
    current.remove()
    engine.dispose()


def test_with_and_async_with_belong_to_their_kinds_of_session(database: Database, claim: Any) -> None:
    sync, asynchronous = sessionmaker(database.engine()), async_sessionmaker(database.async_engine(poolclass=NullPool))

    async def wrong() -> None:
        async with effects.once(sync, claim()):  # type: ignore[attr-defined]
            pass

    with pytest.raises(ConfigurationError, match="`with`"):
        asyncio.run(wrong())
    with pytest.raises(ConfigurationError, match="`async with`"), effects.once(asynchronous, claim()):  # type: ignore[attr-defined]
        pass
    for given in (None, "x", lambda: 5):
        wrong_one: Any = effects.once(cast(Any, given), claim())
        with pytest.raises(ConfigurationError), wrong_one:
            pass


def test_a_cancelled_task_leaves_no_session_open(databases: Any, claim: Any) -> None:
    """Cancelled at every point of the block and of its end, as when a client hangs up."""
    database = databases.get("postgresql")
    effects.create(engine := database.engine())
    Order.metadata.create_all(engine)
    r = claim()

    async def cancelled_after(engine: Any, turns: int) -> bool:
        make = async_sessionmaker(engine)

        async def work() -> None:
            async with effects.once(make, r) as e:
                e.session.add(Order(made_by=1))
                e.response = 1

        task = asyncio.ensure_future(work())
        for _ in range(turns):
            await asyncio.sleep(0)
        if task.done():
            await task
            return False
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return True

    async def run() -> int:
        asynchronous = database.async_engine(pool_size=1, max_overflow=0, pool_timeout=10)
        turns = 0
        while await cancelled_after(asynchronous, turns):
            turns += 1
            if turns > 40:
                break
        async with asynchronous.connect() as connection:
            assert database.open_transactions() <= 1
            await connection.execute(text("SELECT 1"))
        await asynchronous.dispose()
        return turns

    assert asyncio.run(run()) > 3
    database.assert_none_is_left_open()
    with Session(engine) as session:
        orders = session.query(Order).count()
        assert orders == len(session.execute(select(effects.table)).all()) <= 1
        session.execute(Order.__table__.delete())  # type: ignore[attr-defined]
        session.execute(effects.table.delete())
        session.commit()
    engine.dispose()


def test_no_statement_but_the_look_and_the_insert_is_added(database: Database, claim: Any) -> None:
    engine = database.engine()
    sent: list[str] = []

    @event.listens_for(engine, "before_cursor_execute")
    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        sent.append(statement.split()[0])

    make = sessionmaker(engine)
    with make() as session:
        effects.record(session, claim("one"), 1)
        session.commit()
    assert sent == ["INSERT"]
    sent.clear()
    with effects.once(make, claim("two")) as e:
        e.response = 2
    assert sent == ["SELECT", "INSERT"]
    with make.begin() as session:
        session.execute(effects.table.delete())
    engine.dispose()


def test_an_effect_may_have_a_table_of_its_own_name_and_schema(databases: Any, claim: Any) -> None:
    from sqlalchemy import MetaData

    engine = databases.get("postgresql").engine()
    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA IF NOT EXISTS shop"))
    own = Effects(MetaData(schema="shop"), "done")
    own.create(engine)
    make = sessionmaker(engine)
    for _ in range(2):
        with own.once(make, claim()) as e:
            e.response = 1
        assert e.answer.body == b"1"
    own.table.drop(engine)
    engine.dispose()
