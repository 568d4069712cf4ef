"""Run a throw-away PostgreSQL on a unix socket while an example runs; a SQLite file where it is not installed."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from embedded import running, wait_until_up

PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: int(folder.parent.name))
"""Where Debian's package puts them, by version."""


@contextmanager
def database(kind: str = "") -> Iterator[str]:
    """Yield the SQLAlchemy URL of a new database: "postgresql", "sqlite", or by default what there is."""
    initdb = shutil.which("initdb", path=str(PROGRAMS[-1]) if PROGRAMS else None)
    with tempfile.TemporaryDirectory(prefix="idemredis-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        if kind == "sqlite" or (not kind and initdb is None):
            yield f"sqlite:///{folder}/shop.db?timeout=30"
        elif initdb is None:
            raise SystemExit("there is no PostgreSQL here; install Debian's postgresql, or use --database sqlite")
        else:
            yield from _postgresql(folder, initdb)


def _postgresql(folder: str, initdb: str) -> Iterator[str]:
    as_user = []
    if os.getuid() == 0:  # PostgreSQL refuses to run as root
        owner = pwd.getpwnam("postgres")
        os.chown(folder, owner.pw_uid, owner.pw_gid)
        as_user = ["setpriv", f"--reuid={owner.pw_uid}", f"--regid={owner.pw_gid}", "--clear-groups", "--pdeathsig=INT"]
    data = f"{folder}/data"
    make = [initdb, "-D", data, "--no-sync", "--auth=trust", "--username=shop", "--encoding=UTF8", "--locale=C"]
    subprocess.run([*as_user, *make], check=True, capture_output=True)
    run = [initdb.replace("initdb", "postgres"), "-D", data, f"--unix_socket_directories={folder}"]
    run += ["--listen_addresses=", "--log_min_messages=panic"]  # that clients are killed is what an example is about
    with running([*as_user, *run]) as server:
        wait_until_up(server, lambda: _connect(f"{folder}/.s.PGSQL.5432"))
        try:
            yield f"postgresql+psycopg://shop@/postgres?host={folder}"
        finally:
            server.send_signal(signal.SIGINT)  # does not wait for clients


def _connect(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(path)
