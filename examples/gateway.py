"""A fake card gateway: a SQLite file of charges that are unique by idempotency key, as those of real gateways are.

It records each request, so that one can see how often it was called, by which process, and how often it charged.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

SLOW = "tok_slow"
"""A test card that is charged at once, with a late response."""

SLOW_SECONDS = float(os.environ.get("SHOP_SLOW_SECONDS", "3"))

DECLINED = "tok_declined"

_TABLES = """
CREATE TABLE IF NOT EXISTS charges (key TEXT PRIMARY KEY, id TEXT NOT NULL, amount INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS requests (key TEXT NOT NULL, process INTEGER NOT NULL, charged INTEGER NOT NULL);
"""


class CardDeclined(Exception):
    """The bank declined the card; nothing was charged."""


class Request(NamedTuple):
    """A recorded request: its key, the process that sent it, and whether it charged the card."""

    key: str
    process: int
    charged: bool


class Gateway:
    """A client library, as a gateway would provide it."""

    def __init__(self, path: str | Path) -> None:
        self._path = path
        with closing(sqlite3.connect(path)) as db:
            db.executescript(_TABLES)

    def charge(self, card: str, amount: int, idempotency_key: str) -> str:
        """Charge a card, once per key, and return the id of the charge."""
        if card == DECLINED:
            raise CardDeclined
        new = (idempotency_key, f"ch_{secrets.token_hex(6)}", amount)
        with closing(sqlite3.connect(self._path)) as db, db:
            charged = db.execute("INSERT INTO charges VALUES (?, ?, ?) ON CONFLICT (key) DO NOTHING", new).rowcount
            db.execute("INSERT INTO requests VALUES (?, ?, ?)", (idempotency_key, os.getpid(), charged))
            charge: str = db.execute("SELECT id FROM charges WHERE key = ?", (idempotency_key,)).fetchone()[0]
        if charged and card == SLOW:
            time.sleep(SLOW_SECONDS)
        return charge

    def requests(self) -> list[Request]:
        """Return the recorded requests in their order."""
        with closing(sqlite3.connect(self._path)) as db:
            rows = db.execute("SELECT key, process, charged FROM requests ORDER BY rowid")
            return [Request(key, process, bool(charged)) for key, process, charged in rows]
