"""The generation as a fencing token in SQL: the database refuses the write of an owner that was paused for too long.

    python examples/sql_fencing.py                         # demonstrates it on an embedded server and SQLite
    python examples/sql_fencing.py close MONTH [paused]    # the process that it starts

Checking the lease with `ensure_held` is not enough: a process can be paused between the check and the write. So the
write carries the generation, and the database keeps the highest generation that it has received.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
import tempfile
from contextlib import closing

from embedded import valkey
from proof import prove, script, wait_for

from idemredis import FencedOut, Ledger, fingerprint_value

REDIS = os.environ.get("SHOP_REDIS", "redis://127.0.0.1:6379/0")
BOOKS = os.environ.get("SHOP_BOOKS", "books.sqlite3")

TOO_LATE = 3
"""The exit status of a process whose write was refused."""


def close(month: str, *, paused: bool) -> None:
    ledger = Ledger.from_url(REDIS)
    asked = fingerprint_value({"close": month})
    with ledger.reserve("accounting", month, asked, lease=1, wait=5) as r, closing(sqlite3.connect(BOOKS)) as db, db:
        r.ensure_held()
        if paused:
            os.kill(os.getpid(), signal.SIGSTOP)  # as when a virtual machine is suspended
        written = db.execute(
            "UPDATE months SET closed_by = :process, fence = :generation WHERE month = :month AND fence < :generation",
            {"process": os.getpid(), "month": month, "generation": r.generation},
        )
        if not written.rowcount:
            raise FencedOut(f"generation {r.generation} came too late to close {month}")
        r.result = {"closed_by": os.getpid()}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, valkey() as url:
        books = f"{folder}/books.sqlite3"
        with closing(sqlite3.connect(books)) as db, db:
            db.execute("CREATE TABLE months (month TEXT PRIMARY KEY, closed_by INTEGER, fence INTEGER NOT NULL)")
            db.execute("INSERT INTO months VALUES ('2026-10', NULL, 0)")
        env = {"SHOP_REDIS": url, "SHOP_BOOKS": books}

        with script(__file__, "close", "2026-10", "paused", **env) as first:
            wait_for(lambda: os.waitid(os.P_PID, first.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT))
            prove("the first owner was paused after it had looked at its lease", _closed_by(books) == (None, 0))
            with script(__file__, "close", "2026-10", **env) as second:
                second.wait()
            prove("the second took over and closed the month", _closed_by(books) == (second.pid, 2))
            first.send_signal(signal.SIGCONT)
            status = first.wait()
        prove("the first one's late write was refused by the database", status == TOO_LATE)
        prove("the month is as the second left it", _closed_by(books) == (second.pid, 2))
        row = Ledger.from_url(url).read("accounting", "2026-10")
        stored = row.response.body if row and row.response else b""
        prove("and so is the row of the ledger", stored == b'{"closed_by":%d}' % second.pid)


def _closed_by(books: str) -> tuple[int | None, int]:
    with closing(sqlite3.connect(books)) as db:
        found: tuple[int | None, int] = db.execute("SELECT closed_by, fence FROM months").fetchone()
        return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["close"]:
        try:
            close(sys.argv[2], paused=sys.argv[3:] == ["paused"])
        except FencedOut as late:
            print(late, flush=True)
            sys.exit(TOO_LATE)
    else:
        main()
