"""SQL databases of a test run: throw-away servers on unix sockets, and SQLite files."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from tests.support.processes import mortal
from tests.support.waiting import wait_until

__all__ = ["KINDS", "Database", "Databases"]

KINDS = ("postgresql", "mariadb", "sqlite")

START_WITHIN = 60.0

FRESH_AFTER = 0.11
"""Seconds that nobody may have read InnoDB's table of transactions before it is made anew."""


class Database:
    """One database, and what is left open in it.

    Attributes:
        kind: one of `KINDS`.
        url: for a sync driver, also in other processes.
        async_url: for an asyncio driver.
    """

    def __init__(self, kind: str, url: str, async_url: str, process: subprocess.Popen[bytes] | None = None) -> None:
        self.kind = kind
        self.url = url
        self.async_url = async_url
        self.process = process
        self._watcher: Engine | None = None

    def engine(self, **options: Any) -> Engine:
        """Return a new engine, which the caller disposes of."""
        return create_engine(self.url, **options)

    def async_engine(self, **options: Any) -> AsyncEngine:
        """Return a new asyncio engine, which the caller disposes of."""
        return create_async_engine(self.async_url, **options)

    def assert_none_is_left_open(self) -> None:
        """Fail if a session is left idle in a transaction; MariaDB's table of transactions is up to 0.1 s old."""
        wait_until(lambda: self.open_transactions() == 0)

    def open_transactions(self) -> int:
        """Return how many sessions are in a transaction and do nothing; always 0 for SQLite, which has no sessions."""
        statements = {
            "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'",
            "mariadb": "SELECT count(*) FROM information_schema.innodb_trx t JOIN information_schema.processlist p "
            "ON p.id = t.trx_mysql_thread_id WHERE p.command = 'Sleep'",
        }
        return self._ask(statements[self.kind]) if self.kind in statements else 0

    def waiting(self) -> int:
        """Return how many sessions wait for a lock of another; always 0 for SQLite."""
        statements = {
            "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'",
            "mariadb": "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'",
        }
        return self._ask(statements[self.kind]) if self.kind in statements else 0

    def close(self) -> None:
        """Close the connection that watches, and end the server."""
        if self._watcher is not None:
            self._watcher.dispose()
        if self.process is not None:
            self.process.send_signal(signal.SIGQUIT if self.kind == "postgresql" else signal.SIGKILL)
            self.process.wait(30)

    def _ask(self, statement: str) -> int:
        if self.kind == "mariadb":
            time.sleep(FRESH_AFTER)
        if self._watcher is None:
            self._watcher = self.engine(isolation_level="AUTOCOMMIT", pool_size=1)
        with self._watcher.connect() as connection:
            return int(connection.execute(text(statement)).scalar_one())


class Databases:
    """Each kind of database, started when a test first asks for it."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._started: dict[str, Database] = {}

    def get(self, kind: str) -> Database:
        """Return the database of one kind; skip the test where it is not installed, and fail it in CI."""
        if kind not in self._started:
            try:
                self._started[kind] = self._stack.enter_context(_STARTERS[kind]())
            except FileNotFoundError as missing:
                if os.environ.get("CI"):
                    pytest.fail(str(missing))
                pytest.skip(str(missing))
        return self._started[kind]

    def close(self) -> None:
        """End every server, and remove its files."""
        self._stack.close()


def binary(name: str) -> str:
    """Return the path of a server's program, where Debian puts it or on PATH.

    Raises:
        FileNotFoundError: it is not installed.
    """
    versions = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[4]))
    found = str(versions[-1]) if versions else shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if found is None:
        raise FileNotFoundError(f"there is no {name} on this machine")
    return found


@contextmanager
def _folder(user: str) -> Iterator[tuple[Path, list[str]]]:
    """Yield a folder for a server with a short path, and the words that run a command as its user.

    The servers refuse to run as root. setpriv has the process killed with its parent, which a change of user forgets.
    """
    with tempfile.TemporaryDirectory(prefix="idemredis-", dir="/tmp", ignore_cleanup_errors=True) as name:
        if os.getuid() != 0:
            yield Path(name), []
            return
        who = pwd.getpwnam(user)
        os.chown(name, who.pw_uid, who.pw_gid)
        as_user = [f"--reuid={user}", f"--regid={who.pw_gid}", "--clear-groups", "--pdeathsig=KILL"]
        yield Path(name), [str(shutil.which("setpriv")), *as_user]


@contextmanager
def _postgresql() -> Iterator[Database]:
    initdb, postgres = binary("initdb"), binary("postgres")
    with _folder("postgres") as (folder, as_user):
        make = [initdb, "-D", str(folder / "data"), "--no-sync", "-A", "trust", "-U", "postgres", "-E", "UTF8"]
        subprocess.run([*as_user, *make, "--locale=C"], check=True, capture_output=True, timeout=START_WITHIN)
        settings = {"listen_addresses": "", "unix_socket_directories": str(folder), "fsync": "off"}
        settings |= {"max_connections": "60", "shared_buffers": "32MB"}
        run = [postgres, "-D", str(folder / "data"), *(f"--{name}={value}" for name, value in settings.items())]
        where = f"/postgres?host={folder}"
        urls = f"postgresql+psycopg://postgres@{where}", f"postgresql+asyncpg://postgres@{where}"
        yield from _running("postgresql", [*as_user, *run], folder, *urls)


@contextmanager
def _mariadb() -> Iterator[Database]:
    mariadbd = binary("mariadbd")
    with _folder("mysql") as (folder, as_user):
        (folder / "data").mkdir()
        shutil.chown(folder / "data", folder.owner(), folder.group())
        # Without its system tables, which take seconds to make, the server needs no accounts either.
        run = [mariadbd, "--no-defaults", f"--datadir={folder}/data", f"--socket={folder}/socket", "--skip-networking"]
        run += ["--skip-grant-tables", "--innodb-flush-log-at-trx-commit=0", f"--pid-file={folder}/pid"]
        run += ["--innodb-lock-wait-timeout=20"]
        where = f"root@localhost/effects?unix_socket={folder}/socket"
        urls = f"mysql+pymysql://{where}", f"mysql+asyncmy://{where}"
        yield from _running("mariadb", [*as_user, *run], folder, *urls)


@contextmanager
def _sqlite() -> Iterator[Database]:
    with tempfile.TemporaryDirectory(prefix="idemredis-") as folder:
        yield Database("sqlite", f"sqlite:///{folder}/effects.db", f"sqlite+aiosqlite:///{folder}/effects.db")


def _running(kind: str, words: list[str], folder: Path, url: str, async_url: str) -> Iterator[Database]:
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(words if os.getuid() == 0 else mortal(words), stdout=log, stderr=log)
    database = Database(kind, url, async_url, process)
    try:
        _wait(database, folder)
        yield database
    finally:
        database.close()


def _wait(database: Database, folder: Path) -> None:
    """Wait until the server replies, and make MariaDB's database."""
    assert database.process is not None
    path = str(folder / (".s.PGSQL.5432" if database.kind == "postgresql" else "socket"))
    until = time.monotonic() + START_WITHIN
    while not (_listens(path) and _answers(database)):
        if database.process.poll() is not None or time.monotonic() > until:
            log = (folder / "log").read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{database.kind} did not start: {log}")
        time.sleep(0.05)


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


def _answers(database: Database) -> bool:
    engine = create_engine(database.url.replace("/effects?", "/?"), poolclass=sqlalchemy.NullPool)
    try:
        with engine.begin() as connection:
            if database.kind == "mariadb":
                connection.execute(text("CREATE DATABASE effects"))
        return True
    except sqlalchemy.exc.OperationalError:
        return False


_STARTERS = {"postgresql": _postgresql, "mariadb": _mariadb, "sqlite": _sqlite}
