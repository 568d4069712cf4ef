"""The table of effects: its columns on each database, how a reservation is found in it, and the database's clock."""

from __future__ import annotations

import hashlib
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Integer,
    LargeBinary,
    MetaData,
    Select,
    String,
    Table,
    Text,
    bindparam,
    select,
)
from sqlalchemy.dialects import mysql, postgresql
from sqlalchemy.engine import Connection, Dialect, Engine, Row
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.dml import Insert
from sqlalchemy.sql.functions import FunctionElement

from ..core.reservation import Reservation
from ..core.response import StoredResponse
from ..errors import ConfigurationError, KeyReused
from ..events import digest

__all__ = [
    "DIALECTS",
    "NAME_LENGTH",
    "check_dialect",
    "check_transactional",
    "effects_table",
    "find",
    "insert",
    "now_ms",
    "of_row",
    "record_name",
    "values",
]

DIALECTS = ("postgresql", "mysql", "mariadb", "sqlite")
"""What the tests run on. Another database may compare names without regard to case, and so mix up two keys."""

NAME_LENGTH = 255
"""Characters of a row's name that are stored as they are. The index limit of MySQL's older row formats is 767 bytes."""

_DIGEST = "sha256:"
_INFO = "idemredis.effects"


class now_ms(FunctionElement[int]):  # a SQL function
    """The database's clock in milliseconds since the epoch; the clocks of the application's hosts decide nothing."""

    type = BigInteger()
    inherit_cache = True


@compiles(now_ms, "postgresql")
def _now_postgresql(element: now_ms, compiler: Any, **options: Any) -> str:
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)"


@compiles(now_ms, "mysql")
@compiles(now_ms, "mariadb")
def _now_mysql(element: now_ms, compiler: Any, **options: Any) -> str:
    return "(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(3)) DIV 1000)"


@compiles(now_ms, "sqlite")
def _now_sqlite(element: now_ms, compiler: Any, **options: Any) -> str:
    return "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"


def effects_table(metadata: MetaData, name: str) -> Table:
    """Return the table, which is defined only once in each metadata.

    Raises:
        ConfigurationError: the name is not a non-empty str, or the metadata has another table of this name.
    """
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"table must be a non-empty str, not {name!r}")
    full = f"{metadata.schema}.{name}" if metadata.schema else name
    if (table := metadata.tables.get(full)) is not None:
        if not table.info.get(_INFO):
            raise ConfigurationError(f"the metadata has another table that is named {full!r}; pass table= to Effects")
        return table
    return Table(
        name,
        metadata,
        Column("row_name", _text(NAME_LENGTH), primary_key=True),
        Column("fingerprint", _text(NAME_LENGTH), nullable=False),
        Column("generation", BigInteger, nullable=False),
        Column("response_status", Integer, nullable=False),
        Column("response_headers", Text().with_variant(mysql.MEDIUMTEXT(), *_MYSQL), nullable=False),
        Column("response_body", LargeBinary().with_variant(mysql.LONGBLOB(), *_MYSQL), nullable=False),
        Column("response_omitted", _text(16), nullable=False),
        Column("created_at", BigInteger, nullable=False, index=True),
        info={_INFO: True},
        mysql_engine="InnoDB",
        mariadb_engine="InnoDB",
    )


_MYSQL = ("mysql", "mariadb")


def _text(length: int) -> String:
    """Return a type of ASCII text that is compared byte by byte."""
    return (
        String(length)
        .with_variant(mysql.VARCHAR(length, charset="ascii", collation="ascii_bin"), *_MYSQL)
        .with_variant(postgresql.VARCHAR(length, collation="C"), "postgresql")
    )


def record_name(text: str) -> str:
    """Return a row's name or fingerprint as the table stores it; one that is long or not ASCII is hashed."""
    if len(text) <= NAME_LENGTH and text.isascii() and text.isprintable() and not text.startswith(_DIGEST):
        return text
    return _DIGEST + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def insert(table: Table) -> Insert:
    """Return the statement that inserts a record of `values`; it fails if the row has a record."""
    return table.insert().values(created_at=now_ms())


def values(r: Reservation, response: StoredResponse) -> dict[str, Any]:
    """Return the columns of a record, except `created_at`."""
    status, headers, body, omitted = response.encode()
    return {
        "row_name": record_name(r.row),
        "fingerprint": record_name(r.fingerprint),
        "generation": r.generation,
        "response_status": status,
        "response_headers": headers,
        "response_body": body,
        "response_omitted": omitted,
    }


def of_row(table: Table) -> Select[Any]:
    """Return the statement that reads the record of `name`."""
    names = ("fingerprint", "response_status", "response_headers", "response_body", "response_omitted")
    return select(*(table.c[name] for name in names)).where(table.c.row_name == bindparam("name"))


def find(bind: Engine | Connection, statement: Select[Any], r: Reservation) -> StoredResponse | None:
    """Return the recorded response for this reservation, or None; `statement` comes from `of_row`.

    On an engine, this reads what is committed. On a connection, it reads what the open transaction sees.

    Raises:
        KeyReused: the record belongs to another request under the same key.
        CorruptRow: the record cannot be read.
        sqlalchemy.exc.DBAPIError: the database could not be read.
    """
    name = {"name": record_name(r.row)}
    try:
        if isinstance(bind, Connection):
            began = not bind.in_transaction()
            try:
                row = bind.execute(statement, name).one_or_none()
            finally:
                if began:
                    bind.rollback()
        else:
            with bind.connect() as connection:
                connection = connection.execution_options(isolation_level="AUTOCOMMIT")
                row = connection.execute(statement, name).one_or_none()
    except DBAPIError as error:
        error.hide_parameters = True  # the row's name has the principal and the key
        raise
    return None if row is None else _read(row, r)


def _read(row: Row[Any], r: Reservation) -> StoredResponse:
    if row.fingerprint != record_name(r.fingerprint):
        raise KeyReused(digest(r.row)) from None  # the error of the insert shows the key
    return StoredResponse.decode(
        str(row.response_status).encode(),
        row.response_headers.encode(),
        bytes(row.response_body),
        row.response_omitted.encode(),
    )


def check_dialect(dialect: Dialect) -> None:
    """Raise `ConfigurationError` for a database that the table does not support."""
    if dialect.name not in DIALECTS:
        raise ConfigurationError(f"effects cannot be recorded in {dialect.name}; use {', '.join(DIALECTS)}")


def check_transactional(connection: Connection) -> None:
    """Raise `ConfigurationError` if the connection commits each statement by itself."""
    if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT" or _commits_by_itself(connection):
        raise ConfigurationError(
            "the session commits each statement by itself (isolation_level AUTOCOMMIT), so an effect and its record "
            "cannot be committed together; use a session with transactions"
        )


def _commits_by_itself(connection: Connection) -> bool:
    """Return True if the driver says that it commits each statement; nothing is sent to the database."""
    if connection.dialect.name == "sqlite":  # an application may send BEGIN itself, and then this is no autocommit
        driver: Any = connection.connection.driver_connection
        return driver.isolation_level is None and not driver.in_transaction
    detect = getattr(connection.dialect, "detect_autocommit_setting", None)  # since SQLAlchemy 2.0.43
    return detect is not None and bool(detect(connection.connection.dbapi_connection))
