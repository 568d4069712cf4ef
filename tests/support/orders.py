"""Orders in a SQL database, made by attempts over sync or asyncio sessions, so that each behaviour has one test."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, cast

from sqlalchemy import NullPool, func, select, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

from idemredis import Reservation, StoredResponse
from idemredis.sql import Effects
from tests.support.databases import Database, Databases
from tests.support.subject import Mode

__all__ = ["Base", "Order", "Orders", "effects", "prepared"]


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    made_by: Mapped[int]
    """The generation of the attempt. Nothing in this table keeps an operation from being done twice."""


effects = Effects(Base.metadata)


def prepared(databases: Databases, kind: str) -> Database:
    """Return a database with the tables in it."""
    database = databases.get(kind)
    engine = database.engine()
    Base.metadata.create_all(engine)
    engine.dispose()
    return database


class Orders:
    """Make orders in a database, and look at what has been committed there.

    Attributes:
        database: where the orders are.
        mode: "sync" or "async": the sessions that make orders.
        isolation: the isolation level, if it is not the database's own.
        make: makes a session of this kind.
        looking: a plain `sessionmaker`, whatever the mode is.
    """

    def __init__(self, mode: Mode, database: Database, isolation: str | None = None) -> None:
        self.mode = mode
        self.database = database
        self.isolation = isolation
        options: dict[str, Any] = {} if isolation is None else {"isolation_level": isolation}
        patient = {"connect_args": {"timeout": 30}} if database.kind == "sqlite" else {}
        self._engine = database.engine(**options, **patient)
        self._async_options = {**options, **patient, "poolclass": NullPool}
        self.looking = sessionmaker(self._engine)
        self.make: Any = self.looking if mode == "sync" else self._make_async

    def place(self, r: Reservation, *, look: bool = False, pause: Callable[[str], object] = str) -> StoredResponse:
        """Make an order, record its response and commit both; `pause` is called with the name of each step so far.

        Args:
            r: the attempt.
            look: read the table of orders first, as work does that decides by what there is.
            pause: called after "begun", "made", "recorded" and "committed".
        """
        answer: StoredResponse = self._run(self._place(r, look, pause))
        return answer

    def place_once(self, r: Reservation, *, pause: Callable[[str], object] = str) -> StoredResponse:
        """Make an order in a block of `Effects.once`, which makes it again if it is done, and return its answer."""
        answer: StoredResponse = self._run(self._place_once(r, pause))
        return answer

    def count(self) -> int:
        """Return how many orders there are."""
        with self.looking() as session:
            return session.scalar(select(func.count()).select_from(Order)) or 0

    def recorded(self) -> list[Any]:
        """Return all records of effects."""
        with self.looking() as session:
            return list(session.execute(select(effects.table)))

    def run(self, work: Callable[[Any], Any]) -> Any:
        """Call `work` with a new session, which is closed afterwards; an awaitable result is awaited."""
        return self._run(self._with_session(work))

    def close(self) -> None:
        """Drop the tables' rows and close the connections."""
        with self._engine.begin() as connection:
            for table in reversed(Base.metadata.sorted_tables):
                connection.execute(table.delete())
        self._engine.dispose()

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run(coroutine)

    def _make_async(self) -> AsyncSession:
        """Make a session with an engine of its own, since an asyncio engine belongs to one event loop."""
        return AsyncSession(self.database.async_engine(**self._async_options))

    async def _with_session(self, work: Callable[[Any], Any]) -> Any:
        session = self.make()
        try:
            return await self.value(work(session))
        finally:
            await self.value(session.close())

    async def _place(self, r: Reservation, look: bool, pause: Callable[[str], object]) -> StoredResponse:
        session = self.make()
        try:
            await self.value(session.execute(text("SELECT count(*) FROM orders" if look else "SELECT 1")))
            await self._pause(pause, "begun")
            order = Order(made_by=r.generation)
            session.add(order)
            await self.value(session.flush())
            await self._pause(pause, "made")
            answer: StoredResponse = await self.value(effects.record(session, r, ({"order": order.id}, 201)))
            await self._pause(pause, "recorded")
            await self.value(session.commit())
            await self._pause(pause, "committed")
            return answer
        finally:
            await self.value(session.close())

    async def _place_once(self, r: Reservation, pause: Callable[[str], object]) -> StoredResponse:
        manager: Any = effects.once(self.make, r)
        if self.mode == "async":
            async with manager as e:
                order = Order(made_by=r.generation)
                e.session.add(order)
                await e.session.flush()
                await self._pause(pause, "made")
                e.response = {"order": order.id}, 201
            return cast(StoredResponse, e.answer)
        with manager as e:
            order = Order(made_by=r.generation)
            e.session.add(order)
            e.session.flush()
            await self._pause(pause, "made")
            e.response = {"order": order.id}, 201
        return cast(StoredResponse, e.answer)

    async def value(self, value: Any) -> Any:
        """Return what a session's method returns, which is awaited if it is a coroutine."""
        return await value if inspect.isawaitable(value) else value

    async def _pause(self, pause: Callable[[str], object], step: str) -> None:
        await asyncio.to_thread(pause, step)
