"""`Effects.record`: the effect and its record are committed together, or neither is."""

from __future__ import annotations

import asyncio
import concurrent.futures
import traceback
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import MetaData, create_engine, event, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from idemredis import (
    AlreadyCompleted,
    ConfigurationError,
    CorruptRow,
    EffectDone,
    InvalidResponse,
    KeyReused,
    Ledger,
    Reservation,
    StoredResponse,
    current_reservation,
)
from idemredis.errors import NoReservation
from idemredis.events import digest
from idemredis.sql import Effects
from tests.support.databases import Database
from tests.support.orders import Base, Order, Orders, effects

JSON = (("content-type", "application/json"),)


def test_a_second_attempt_cannot_commit_its_effect_and_gets_the_first_one_s_response(
    orders: Orders, claim: Any
) -> None:
    first = orders.place(claim())
    second = claim()
    with pytest.raises(EffectDone) as done:
        orders.place(second)

    assert second.generation == 2
    assert done.value.response == first
    assert done.value.digest == digest(second.row)
    assert orders.count() == 1
    assert [record.generation for record in orders.recorded()] == [1]


def test_an_attempt_that_was_rolled_back_leaves_nothing_and_the_next_one_commits(orders: Orders, claim: Any) -> None:
    def die(step: str) -> None:
        if step == "recorded":
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        orders.place(claim(), pause=die)
    assert (orders.count(), orders.recorded()) == (0, [])
    orders.place(claim())
    assert [record.generation for record in orders.recorded()] == [2]


def test_the_record_is_of_another_request_and_nothing_of_it_is_revealed(
    orders: Orders, claim: Any, ledger: Ledger
) -> None:
    orders.place(claim("secret-key", principal="alice-secret"))
    ledger.client.flushall()
    other = claim("secret-key", "other", principal="alice-secret")
    with pytest.raises(KeyReused) as refused:
        orders.place(other)

    assert refused.value.digest == digest(other.row)
    shown = "".join(traceback.format_exception(refused.value)) + repr(refused.value.__dict__)
    assert "secret" not in shown
    assert "order" not in repr(refused.value.args)
    assert orders.count() == 1


def test_the_transaction_is_over_before_the_error_is_raised_and_cannot_be_committed_by_mistake(
    orders: Orders, claim: Any
) -> None:
    orders.place(claim())
    r = claim()

    async def swallow(session: Any) -> None:
        session.add(Order(made_by=7))
        with pytest.raises(EffectDone):
            await orders.value(effects.record(session, r, None))
        assert not session.in_transaction()
        orders.database.assert_none_is_left_open()
        await orders.value(session.commit())

    orders.run(swallow)
    assert orders.count() == 1


@pytest.mark.parametrize("form", ["savepoint", "begin", "both"])
def test_a_savepoint_or_a_block_around_it_does_not_save_the_effect(orders: Orders, claim: Any, form: str) -> None:
    orders.place(claim())
    r = claim()

    def place(session: Session) -> None:
        if form == "savepoint":
            session.add(Order(made_by=1))
            session.flush()
            try:
                with session.begin_nested():
                    effects.record(session, r, None)
            except EffectDone:
                session.commit()
            return
        with session.begin(), session.begin_nested():
            session.add(Order(made_by=2))
            effects.record(session, r, None)

    def begin(session: Session) -> None:
        with session.begin():
            session.add(Order(made_by=1))
            session.flush()
            effects.record(session, r, None)

    def work(session: Any) -> Any:
        what = begin if form == "begin" else place
        return session.run_sync(what) if orders.mode == "async" else what(session)

    if form == "savepoint":
        orders.run(work)
    else:
        with pytest.raises(EffectDone):
            orders.run(work)
    assert orders.count() == 1


RESPONSES: list[tuple[object, StoredResponse]] = [
    ({"a": 1}, StoredResponse(200, JSON, b'{"a":1}')),
    (None, StoredResponse(200, JSON, b"null")),
    ([1, "é"], StoredResponse(200, JSON, b'[1,"\\u00e9"]')),
    (({"a": 1}, 201), StoredResponse(201, JSON, b'{"a":1}')),
    (("x", 202, {"Location": "/1"}), StoredResponse(202, (*JSON, ("Location", "/1")), b'"x"')),
    (
        (1, 200, [("Content-Type", "application/vnd.a+json"), ("Set-Cookie", "s=1")]),
        StoredResponse(200, (("Content-Type", "application/vnd.a+json"),), b"1"),
    ),
    (StoredResponse(204), StoredResponse(204)),
    (
        StoredResponse(200, (("set-cookie", "s=1"), ("link", "a"), ("link", "b")), b"\x00\xff"),
        StoredResponse(200, (("link", "a"), ("link", "b")), b"\x00\xff"),
    ),
    (StoredResponse(201, omitted="not_wanted"), StoredResponse(201, omitted="not_wanted")),
    (StoredResponse(200, JSON, b"x" * 1_000_000), StoredResponse(200, JSON, b"x" * 1_000_000)),
]


def test_a_response_comes_back_to_the_last_byte(orders: Orders, claim: Any) -> None:
    async def record(session: Any) -> None:
        for number, (given, expected) in enumerate(RESPONSES):
            r = claim(f"k{number}")
            assert await orders.value(effects.record(session, r, given)) == expected
            await orders.value(session.commit())
            with pytest.raises(EffectDone) as done:
                await orders.value(effects.record(session, r, None))
            assert done.value.response == expected

    orders.run(record)


NO_RESPONSES = [
    object(),
    float("nan"),
    (1, 2, 3, 4),
    ((1, 2), 200),
    ({}, 99),
    ({}, "201"),
    ({}, 200, {"a b": "c"}),
    ({}, 200, 5),
    b"x",
]


def test_what_is_no_response_is_refused_before_anything_is_sent(orders: Orders, claim: Any) -> None:
    r = claim()

    def refuse(session: Any) -> None:
        for given in NO_RESPONSES:
            with pytest.raises(InvalidResponse):
                effects.record(session, r, given)
        assert not session.in_transaction()

    orders.run(refuse)
    assert orders.recorded() == []


NAMES = {
    "long key": {"key": "k" * 255, "principal": "alice" * 20},
    "long principal": {"principal": "p" * 5000},
    "encoded": {"key": "%/:é"[:3] * 85, "principal": "zoë"},
    "digest": {"principal": "x", "operation": "sha256"},
}


@pytest.mark.parametrize("which", NAMES)
def test_a_row_s_name_of_any_length_is_found_again_and_is_not_mixed_up_with_others(
    orders: Orders, claim: Any, which: str
) -> None:
    mine = claim(**NAMES[which])
    orders.place(mine)
    others = [claim(**{**NAMES[which], "key": "other"}), claim(**{**NAMES[which], "principal": "mallory" * 60})]
    for other in others:
        orders.place(other)
    with pytest.raises(EffectDone):
        orders.place(claim(**NAMES[which]))

    assert orders.count() == len(orders.recorded()) == 3
    for record in orders.recorded():
        assert len(record.row_name) <= 255
        assert len(mine.row) <= 255 or record.row_name != mine.row


def test_keys_that_differ_in_case_or_by_a_space_at_the_end_are_two_keys(orders: Orders, claim: Any) -> None:
    for key in ("abc", "ABC", "abc ", "abç".replace("ç", "c.")):
        orders.place(claim(key))
    assert orders.count() == 4


def test_a_fingerprint_may_be_any_text(orders: Orders, claim: Any) -> None:
    for number, fingerprint in enumerate(["f" * 5000, "naïve\x00", "sha256:" + "0" * 64, "\ud800", "A"]):
        r = claim(f"k{number}")

        def attempt(text: str, r: Reservation = r) -> Reservation:  # the ledger itself would refuse another text
            return Reservation(r.identity, text, r.generation, r.owner, None, r.lease)

        orders.place(attempt(fingerprint))
        with pytest.raises(EffectDone):
            orders.place(attempt(fingerprint))
        with pytest.raises(KeyReused):
            orders.place(attempt(fingerprint.lower() if fingerprint == "A" else fingerprint + "x"))


def test_an_insert_that_fails_otherwise_ends_the_transaction_too_and_shows_no_key(
    orders: Orders, claim: Any, database: Database
) -> None:
    elsewhere = Effects(table="missing_table")
    r = claim("-".join(["very", "secret", "key"]))

    async def fail(session: Any) -> None:
        session.add(Order(made_by=1))
        await orders.value(session.flush())
        with pytest.raises(DBAPIError) as failed:
            await orders.value(elsewhere.record(session, r, {"body": r.key}))
        assert "missing_table" in str(failed.value)
        assert r.key not in "".join(traceback.format_exception(failed.value))
        assert not session.in_transaction()
        database.assert_none_is_left_open()
        await orders.value(session.commit())

    orders.run(fail)
    assert orders.count() == 0


def test_an_edited_record_is_never_answered(orders: Orders, claim: Any) -> None:
    orders.place(claim())
    with orders.looking.begin() as session:
        session.execute(effects.table.update().values(response_headers='[["a","b\\r\\nc"]]'))
    with pytest.raises(CorruptRow):
        orders.place(claim())
    assert orders.count() == 1


def test_a_session_that_commits_each_statement_by_itself_is_refused(database: Database, claim: Any, mode: str) -> None:
    r = claim()
    orders = Orders(mode, database, "AUTOCOMMIT")  # type: ignore[arg-type]
    try:
        with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
            orders.place(r)
        assert orders.recorded() == []
    finally:
        orders.close()


def test_an_engine_that_sends_begin_itself_is_not_taken_for_one_that_commits_each_statement(
    databases: Any, claim: Any
) -> None:
    database = databases.get("sqlite")
    engine = database.engine()

    @event.listens_for(engine, "connect")
    def connect(connection: Any, record: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN")

    Base.metadata.create_all(engine)
    with Session(engine) as session:
        effects.record(session, claim(), None)
        session.rollback()
        assert session.scalar(select(sqlalchemy.func.count()).select_from(effects.table)) == 0
    engine.dispose()


def test_the_scoped_session_of_the_thread_is_meant(database: Database, claim: Any) -> None:
    engine = database.engine()
    current = scoped_session(sessionmaker(engine))
    first, second = claim(), claim()
    effects.record(current, first, {"n": 1})
    current.commit()
    with pytest.raises(EffectDone):
        effects.record(current, second, {"n": 2})
    current.execute(effects.table.delete())
    current.commit()
    current.remove()
    engine.dispose()


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_a_session_that_has_joined_the_connection_of_a_test_suite(databases: Any, kind: str, claim: Any) -> None:
    """As SQLAlchemy's manual shows it: the suite rolls everything back, whatever the code under test commits."""
    engine = databases.get(kind).engine()
    Base.metadata.create_all(engine)
    first, second = claim(), claim()
    with engine.connect() as connection:
        outer = connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            effects.record(session, first, {"n": 1})
            session.commit()
            with pytest.raises(EffectDone) as done:
                effects.record(session, second, {"n": 2})
            assert done.value.response.body == b'{"n":1}'
        assert outer.is_active
        outer.rollback()
    with engine.connect() as connection:
        assert connection.scalar(select(sqlalchemy.func.count()).select_from(effects.table)) == 0
    engine.dispose()


def test_an_error_of_the_application_itself_is_not_taken_for_a_record(orders: Orders, claim: Any) -> None:
    orders.place(claim())
    r = claim("another")

    async def twice(session: Any) -> None:
        session.add_all([Order(id=7, made_by=1), Order(id=7, made_by=2)])
        await orders.value(effects.record(session, r, None))
        with pytest.raises(IntegrityError):
            await orders.value(session.commit())

    orders.run(twice)
    assert len(orders.recorded()) == 1


def test_a_transaction_that_records_twice_is_rolled_back_and_the_error_says_why(orders: Orders, claim: Any) -> None:
    r = claim()

    async def twice(session: Any) -> None:
        session.add(Order(id=7, made_by=1))
        await orders.value(effects.record(session, r, {"n": 1}))
        with pytest.raises(IntegrityError) as refused:
            await orders.value(effects.record(session, r, {"n": 2}))
        assert "recorded it twice" in refused.value.__notes__[0]

    orders.run(twice)
    assert orders.recorded() == []
    assert orders.count() == 0


def test_an_error_says_nothing_of_records_that_cannot_be_read(orders: Orders, claim: Any) -> None:
    """The record exists, and the connection that reads it fails."""
    orders.place(claim())
    r = claim()

    def fail(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if statement.startswith("SELECT"):
            raise OperationalError(statement, None, Exception("the server has gone away"))

    async def again(session: Any) -> None:
        bind = session.get_bind()
        event.listen(bind, "before_cursor_execute", fail)
        try:
            with pytest.raises(IntegrityError) as refused:
                await orders.value(effects.record(session, r, {"n": 2}))
        finally:
            event.remove(bind, "before_cursor_execute", fail)
        assert not hasattr(refused.value, "__notes__")

    orders.run(again)
    assert len(orders.recorded()) == 1


def test_a_record_that_a_trigger_refuses_is_not_said_to_be_a_second_one(tmp_path: Path, claim: Any) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'orders.db'}")
    Base.metadata.create_all(engine)
    refuse = f"CREATE TRIGGER refuse BEFORE INSERT ON {effects.table.name} BEGIN SELECT RAISE(ABORT, 'closed'); END"
    with engine.begin() as connection:
        connection.execute(text(refuse))
    with Session(engine) as session, pytest.raises(IntegrityError, match="closed") as refused:
        effects.record(session, claim(), None)
    assert "or a trigger" in refused.value.__notes__[0]
    engine.dispose()


def test_a_lost_connection_is_raised_as_it_is(databases: Any, claim: Any) -> None:
    database = databases.get("postgresql")
    engine = database.engine()
    Base.metadata.create_all(engine)
    r = claim()
    with Session(engine) as session:
        session.add(Order(made_by=1))
        session.flush()
        pid = session.scalar(text("SELECT pg_backend_pid()"))
        with engine.connect() as other:
            other.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
        with pytest.raises(DBAPIError):
            effects.record(session, r, None)
        assert not session.in_transaction()
        effects.record(session, r, None)  # on a new connection
    engine.dispose()


def test_what_is_no_session_or_no_reservation_is_refused(claim: Any) -> None:
    engine = create_engine("sqlite://")
    for wrong in (engine, "session", None, sessionmaker(engine)):
        with pytest.raises(ConfigurationError, match="Session"):
            effects.record(wrong, claim(), None)  # type: ignore[call-overload]
    with Session(engine) as session, pytest.raises(NoReservation):
        effects.record(session, current_reservation, None)


def test_a_database_that_is_not_supported_is_refused(claim: Any) -> None:
    class Other:
        name = "oracle"

    engine = create_engine("sqlite://")
    engine.dialect.name = "oracle"
    with Session(engine) as session:
        with pytest.raises(ConfigurationError, match="oracle"):
            effects.record(session, claim(), None)
        with pytest.raises(ConfigurationError, match="oracle"):
            effects.prune(session, 5)
        with pytest.raises(ConfigurationError, match="oracle"):
            effects.create(engine)


def test_a_table_of_the_same_name_is_refused_and_ones_own_is_used_again() -> None:
    metadata = MetaData()
    assert Effects(metadata).table is Effects(metadata).table
    sqlalchemy.Table("orders", metadata, sqlalchemy.Column("id", sqlalchemy.Integer))
    with pytest.raises(ConfigurationError, match="orders"):
        Effects(metadata, "orders")
    for wrong in ("", None, 5):
        with pytest.raises(ConfigurationError):
            Effects(metadata, wrong)  # type: ignore[arg-type]


def test_creating_the_table_again_or_from_many_threads_at_once_changes_nothing(database: Database, mode: str) -> None:
    own = Effects(table="idemredis_created")
    engine, make = database.engine(), own.create

    def create() -> None:
        if mode == "sync":
            make(engine)
            return

        async def run() -> None:
            asynchronous = database.async_engine(poolclass=sqlalchemy.NullPool)
            await make(asynchronous)
            await asynchronous.dispose()

        asyncio.run(run())

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(create) for _ in range(8)]:
            future.result(60)
    with engine.begin() as connection:
        assert connection.execute(select(own.table)).all() == []
    own.table.drop(engine)
    engine.dispose()


def test_a_done_effect_is_handled_where_a_finished_operation_is(orders: Orders, claim: Any) -> None:
    orders.place(claim())
    with pytest.raises(AlreadyCompleted) as done:
        orders.place(claim())
    assert done.value.response.status == 201
