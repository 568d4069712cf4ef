"""`Effects`: record, find and prune. An `AsyncSession` runs the same sync code through `run_sync`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, overload

from sqlalchemy import MetaData, delete, inspect, select
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.orm import Session, scoped_session

from ..core.as_response import as_response
from ..core.reservation import Reservation
from ..core.response import StoredResponse
from ..errors import ConfigurationError, EffectDone
from ..events import digest
from ..policy import LONGEST_RETENTION
from .block import EffectBlock
from .sessions import abandon, makes_async, opened, session_of
from .table import check_dialect, check_transactional, effects_table, find, insert, now_ms, of_row, values

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session

__all__ = ["Effects"]

S = TypeVar("S", bound=Session)
A = TypeVar("A", bound="AsyncSession")
T = TypeVar("T")

PRUNE_BATCH = 500
"""Records that `prune` deletes in one transaction: it ends within milliseconds, and SQLite before 3.32 takes no more
than 999 values in a statement."""


class Effects:
    """Record the response of an operation in the transaction that makes its effect, so that both happen exactly once.

    The table is in PostgreSQL, MySQL, MariaDB (InnoDB) or SQLite. It outlives the rows of the ledger: an attempt whose
    row was lost, or that was stopped while another took over, cannot commit its effect a second time. Every method
    takes a sync session or an `AsyncSession`; with an `AsyncSession`, await the result.

    Args:
        metadata: the `MetaData` that the table is added to, such as `Base.metadata`, so that `create_all` and Alembic
            see it; a new one by default.
        table: the table's name.

    Attributes:
        table: the SQLAlchemy `Table`.

    Raises:
        ConfigurationError: the name is not a str, or the metadata has another table of this name.
    """

    def __init__(self, metadata: MetaData | None = None, table: str = "idemredis_effects") -> None:
        self.table = effects_table(MetaData() if metadata is None else metadata, table)
        self._insert, self._of_row = insert(self.table), of_row(self.table)

    @overload
    def create(self, engine: Engine | Connection) -> None: ...

    @overload
    def create(self, engine: AsyncEngine | AsyncConnection) -> Awaitable[None]: ...

    def create(self, engine: Any) -> Awaitable[None] | None:
        """Create the table if it does not exist; several processes may do so at once.

        Args:
            engine: an `Engine` or `Connection`, or their async forms, for which the result is awaited.
        """
        if isinstance(engine, (Engine, Connection)):
            self._create(engine)
            return None
        if hasattr(engine, "sync_connection"):
            created: Awaitable[None] = engine.run_sync(self._create)
            return created
        return self._create_async(engine)

    @overload
    def record(
        self, session: Session | scoped_session[Any], reservation: Reservation, response: object
    ) -> StoredResponse: ...

    @overload
    def record(
        self, session: AsyncSession | async_scoped_session[Any], reservation: Reservation, response: object
    ) -> Awaitable[StoredResponse]: ...

    def record(
        self, session: Any, reservation: Reservation, response: object
    ) -> StoredResponse | Awaitable[StoredResponse]:
        """Record the response in the session's open transaction; commit it together with the effect.

        If another attempt has inserted the record and not committed yet, this waits for its transaction to end. If the
        record exists, or the insert fails in another way, the session's transaction is rolled back before this raises.
        If a view runs without a claim and without a fingerprint, as under `MODE = "observe"`, nothing is recorded.

        Args:
            session: the session that makes the effect.
            reservation: the attempt; `current_reservation` in a view or a `once` function.
            response: a `StoredResponse`, or a JSON value, or `(value, status)` or `(value, status, headers)`.

        Returns:
            The recorded response, without headers that are meant for one delivery, such as `Set-Cookie`. Return it
            after the commit.

        Raises:
            EffectDone: an earlier attempt committed the effect; `response` is what it recorded.
            KeyReused: the record belongs to another request under the same key. The error reveals nothing of it.
            InvalidResponse: the response is none of these kinds; nothing was sent.
            ConfigurationError: the session or its database is not supported, or commits each statement by itself.
            CorruptRow: the record was edited and cannot be read.
            sqlalchemy.exc.IntegrityError: this transaction has recorded the reservation before, or there is a record
                that cannot be read now.
            sqlalchemy.exc.DBAPIError: a deadlock, serialization failure, lock timeout or lost connection, as the
                driver reports it. It is not retried here, because the whole transaction must be retried.
        """
        what = as_response(response)
        session = session_of(session)
        if isinstance(session, Session):
            self.insert(session, reservation, what)
            return what
        return self._record_async(session, reservation, what)

    @overload
    def once(
        self, session: Callable[[], A], reservation: Reservation
    ) -> AbstractAsyncContextManager[EffectBlock[A]]: ...

    @overload
    def once(self, session: Callable[[], S], reservation: Reservation) -> AbstractContextManager[EffectBlock[S]]: ...

    def once(self, session: Any, reservation: Reservation) -> Any:
        """Run a block in a transaction that is committed with the record of its response; use `with` or `async with`.

        The block gets an `EffectBlock`. It makes the effect with `session` and sets `response`. After the block, return
        `answer`. If an earlier attempt has committed the effect, the transaction is rolled back, and `answer` is that
        attempt's response. If the connection is lost during the commit, the table is read to find out what happened.

        Args:
            session: makes the session, such as a `sessionmaker`; it is closed at the end. With a `scoped_session`, the
                current session is used, and what it has open is committed with the effect.
            reservation: the attempt; `current_reservation` in a view or a `once` function.

        Raises:
            KeyReused, InvalidResponse, ConfigurationError, CorruptRow, sqlalchemy.exc.DBAPIError: as `record` raises
                them; the transaction has been rolled back.
        """
        return EffectBlock(self, session, reservation)

    def recover(self, session: Callable[[], Any]) -> Callable[[Reservation], Any]:
        """Return a function for `recover=` that looks for a record before the work is run again after a takeover.

        Args:
            session: makes a session, such as a `sessionmaker`. For an `async_sessionmaker`, the function is async.

        Returns:
            A function of the reservation. It returns the recorded response, or None if there is none, and raises
            `KeyReused` if the record belongs to another request.
        """
        if makes_async(session):

            async def look_async(r: Reservation) -> StoredResponse | None:
                found: StoredResponse | None = await self._look(session, r)
                return found

            return look_async
        return lambda r: self._look(session, r)

    @overload
    def prune(self, session: Session | scoped_session[Any], older_than: float | timedelta) -> int: ...

    @overload
    def prune(
        self, session: AsyncSession | async_scoped_session[Any], older_than: float | timedelta
    ) -> Awaitable[int]: ...

    def prune(self, session: Any, older_than: float | timedelta) -> int | Awaitable[int]:
        """Delete old records in small batches, each committed by itself; run it from a cron job.

        A key whose record is gone names a new operation. So keep records for longer than the ledger keeps its rows,
        and for longer than any client retries. Age is measured by the database's clock.

        Args:
            session: it is committed after each batch, with anything that it has open.
            older_than: seconds, or a timedelta.

        Returns:
            How many records were deleted.

        Raises:
            ConfigurationError: the age is not a number of seconds from 0 to ten years.
            sqlalchemy.exc.DBAPIError: a batch failed and was rolled back; those before it are deleted.
        """
        age = _milliseconds(older_than)
        session = session_of(session)
        if isinstance(session, Session):
            return self._prune(session, age)
        pruned: Awaitable[int] = session.run_sync(self._prune, age)
        return pruned

    # What both kinds of session run

    def insert(self, session: Session, r: Reservation, response: StoredResponse) -> None:
        """Insert the record, as `record` does; for `EffectBlock`."""
        if not r.fingerprint:
            return
        statement = self._insert
        try:
            check_dialect(session.get_bind(clause=statement).dialect)
            connection = session.connection(bind_arguments={"clause": statement})
            check_transactional(connection)
            # Not through the session, which would flush the application's objects now.
            connection.execute(statement, values(r, response))
        except DBAPIError as error:
            abandon(session)
            error.hide_parameters = True  # the row's name has the principal and the key
            if (done := self._done(session, r, error)) is not None:
                raise EffectDone(done, digest(r.row)) from None
            raise
        except BaseException:
            abandon(session)
            raise

    def look(self, session: Session, r: Reservation) -> StoredResponse | None:
        """Return the recorded response, or None; for `EffectBlock`. A session without a transaction begins none."""
        if not r.fingerprint:
            return None
        bind = session.get_bind(clause=self._insert)  # where it writes, also if it reads from replicas
        check_dialect(bind.dialect)
        if session.in_transaction():  # use its connection: the pool may have no other one to give
            bind = session.connection(bind_arguments={"clause": self._insert})
        return find(bind, self._of_row, r)

    def _done(self, session: Session, r: Reservation, error: DBAPIError) -> StoredResponse | None:
        """Return what is recorded; None if nothing is, or it cannot be read. The caller has an error to raise then."""
        try:
            done = self.look(session, r)
        except SQLAlchemyError:
            return None
        if done is None and isinstance(error, IntegrityError):
            error.add_note(
                "No record of this operation is committed: the transaction has recorded it twice, or a trigger refuses "
                "the record. Record it once, after its last effect."
            )
        return done

    def _create(self, bind: Engine | Connection) -> None:
        check_dialect(bind.dialect)
        try:
            self.table.create(bind, checkfirst=True)
        except DBAPIError:
            if isinstance(bind, Connection) or not inspect(bind).has_table(self.table.name, schema=self.table.schema):
                raise  # otherwise another process has created it since

    async def _create_async(self, engine: AsyncEngine) -> None:
        check_dialect(engine.dialect)
        try:
            async with engine.begin() as connection:
                await connection.run_sync(self._create)
        except DBAPIError:
            async with engine.connect() as connection:
                there = await connection.run_sync(
                    lambda plain: inspect(plain).has_table(self.table.name, schema=self.table.schema)
                )
            if not there:
                raise

    async def _record_async(self, session: AsyncSession, r: Reservation, response: StoredResponse) -> StoredResponse:
        await session.run_sync(self.insert, r, response)
        return response

    def _look(self, given: Any, r: Reservation) -> Any:
        session, owned = opened(given)
        if not isinstance(session, Session):
            return session.run_sync(self._look_once, r, owned)
        return self._look_once(session, r, owned)

    def _look_once(self, session: Session, r: Reservation, owned: bool) -> StoredResponse | None:
        try:
            return self.look(session, r)
        except BaseException:
            abandon(session)
            raise
        finally:
            if owned:
                session.close()

    def _prune(self, session: Session, age: int) -> int:
        table, pruned = self.table, 0
        name, created_at = table.c.row_name, table.c.created_at
        clause = delete(table)
        dialect = session.get_bind(clause=clause).dialect
        check_dialect(dialect)
        # Under SERIALIZABLE, what is read here could make a transaction beside it fail.
        apart = {"isolation_level": "READ COMMITTED"} if dialect.name == "postgresql" else {}
        before: int | None = None
        try:
            while True:
                options = {} if session.in_transaction() else apart
                connection = session.connection(bind_arguments={"clause": clause}, execution_options=options)
                if before is None:
                    before = int(connection.execute(select(now_ms())).scalar_one()) - age
                old = select(name).where(created_at <= before).order_by(created_at).limit(PRUNE_BATCH)
                names = sorted(connection.execute(old).scalars())
                if names:
                    pruned += connection.execute(clause.where(name.in_(names), created_at <= before)).rowcount
                session.commit()
                if len(names) < PRUNE_BATCH:
                    return pruned
        except BaseException:
            abandon(session)
            raise


def _milliseconds(age: float | timedelta) -> int:
    seconds = age.total_seconds() if isinstance(age, timedelta) else age
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds <= LONGEST_RETENTION:
        raise ConfigurationError(
            f"older_than must be a timedelta, or a number of seconds from 0 to {LONGEST_RETENTION:g}, not {age!r}"
        )
    return round(seconds * 1000)
