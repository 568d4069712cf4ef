"""A client to copy: it saves an operation with its key before sending it, and retries until the result is known.

    make serve                                              # in one terminal; it prints its URL
    python examples/client.py URL order-1001 1999           # in another; repeat it, and the card is charged once

Copy the transport that you use, `Outbox`, `send` or `send_async`, and the two functions under "decisions".
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import random
import sqlite3
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TypeAlias

import httpx
import requests
import urllib3

CONNECT_WITHIN, ANSWER_WITHIN = 3.0, 30.0
"""Seconds for one attempt. A client without a timeout waits forever for a response that was lost."""

ALL_TRIES_WITHIN = 90.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 8.0

SENT_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
STILL_OPEN = frozenset({"idempotency_key_in_progress", "idempotency_key_retry"})


@dataclass(frozen=True, slots=True)
class Answer:
    """A response of the server; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def error(self) -> str:
        """The code of a refusal; "" for other responses."""
        try:
            body = json.loads(self.body)
        except ValueError:
            return ""
        return str(body.get("error", "")) if isinstance(body, dict) else ""


@dataclass(frozen=True, slots=True)
class Operation:
    """A request and its key; every attempt sends the same key and the same bytes, and for the same account."""

    name: str
    key: str
    method: str
    url: str
    body: bytes
    answer: Answer | None = None
    account: str = ""

    @property
    def headers(self) -> dict[str, str]:
        return {"Idempotency-Key": self.key, "Content-Type": "application/json"}


class FateUnknown(Exception):
    """There was no final response in time. The work may be done, so the operation stays in the outbox with its key."""

    def __init__(self, operation: Operation) -> None:
        super().__init__(f"{operation.name} has no answer yet; send it again later")
        self.operation = operation


class AnotherAccount(Exception):
    """The operation was begun for another account. Nothing was sent: log in as that account to finish it.

    A key belongs to the account that sends it. For another account the same key is another operation, so sending it
    after another login would charge both accounts.
    """

    def __init__(self, operation: Operation) -> None:
        super().__init__(f"{operation.name} was begun for the account {operation.account!r}; log in as that account")
        self.operation = operation


class Outbox:
    """Operations in a SQLite file, so that a client that dies can send them again later with the same keys.

    Make it anew at each login, with the account whose credentials the transport sends.
    """

    def __init__(self, path: str | Path, account: str = "") -> None:
        self._path = path
        self.account = account
        with closing(sqlite3.connect(path)) as db, db:
            db.execute(
                "CREATE TABLE IF NOT EXISTS operations (name TEXT PRIMARY KEY, key TEXT NOT NULL, method TEXT NOT NULL,"
                " url TEXT NOT NULL, body BLOB NOT NULL, account TEXT NOT NULL,"
                " status INTEGER, headers TEXT, answer BLOB)"
            )

    def intend(self, name: str, method: str, url: str, value: object) -> Operation:
        """Save an operation under a name before sending it, or return the one saved under that name.

        Raises:
            ValueError: another operation was saved under that name.
            AnotherAccount: it was saved for another account.
        """
        new = (name, str(uuid.uuid4()), method, url, json.dumps(value).encode(), self.account)
        with closing(sqlite3.connect(self._path)) as db, db:
            db.execute(
                "INSERT INTO operations (name, key, method, url, body, account) VALUES (?, ?, ?, ?, ?, ?)"
                " ON CONFLICT DO NOTHING",
                new,
            )
            found = _operation(*db.execute("SELECT * FROM operations WHERE name = ?", (name,)).fetchone())
        self.check(found)
        if (found.method, found.url, found.body) != new[2:5]:
            raise ValueError(f"{name} was meant to be {found.method} {found.url} {found.body!r}")
        return found

    def check(self, operation: Operation) -> None:
        """Raise `AnotherAccount` if the operation is not of the account that is logged in."""
        if operation.account != self.account:
            raise AnotherAccount(operation)

    def settle(self, operation: Operation, answer: Answer) -> None:
        """Save the final response."""
        kept = (answer.status, json.dumps(dict(answer.headers)), answer.body, operation.name)
        with closing(sqlite3.connect(self._path)) as db, db:
            db.execute("UPDATE operations SET status = ?, headers = ?, answer = ? WHERE name = ?", kept)

    def unsettled(self) -> list[Operation]:
        """Return this account's operations without a final response, oldest first, to send again at the start."""
        query = "SELECT * FROM operations WHERE status IS NULL AND account = ? ORDER BY rowid"
        with closing(sqlite3.connect(self._path)) as db:
            rows = db.execute(query, (self.account,)).fetchall()
        return [_operation(*row) for row in rows]


def _operation(
    name: str,
    key: str,
    method: str,
    url: str,
    body: bytes,
    account: str,
    status: int | None,
    headers: str,
    answer: bytes,
) -> Operation:
    settled = None if status is None else Answer(status, json.loads(headers), answer)
    return Operation(name, key, method, url, body, settled, account)


# --- decisions ------------------------------------------------------------------------------------------------------


def may_be_sent_again(answer: Answer) -> bool:
    """Return True if the same request can get another response later; stored responses and final refusals stay."""
    if answer.headers.get("idempotent-replayed") == "true":
        return False
    if answer.status == 409:
        return answer.error in STILL_OPEN
    if answer.status == 500:
        return not answer.error.startswith("idempotency_")
    return answer.status in SENT_AGAIN


def pause_after(answer: Answer | None, tries: int) -> float:
    """Return the seconds to wait: longer with each attempt, random, and never less than the server asks for."""
    asked = _retry_after(answer)
    longest = FIRST_PAUSE if asked else min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(tries - 1, 10))
    return asked + longest * random.uniform(0.5, 1.0)


def _retry_after(answer: Answer | None) -> float:
    value = answer.headers.get("retry-after", "") if answer else ""
    if value.isdecimal():
        return float(value)
    try:
        return max(email.utils.parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except ValueError:
        return 0.0


# --- sending --------------------------------------------------------------------------------------------------------

Transport: TypeAlias = Callable[[Operation], Answer | None]
AsyncTransport: TypeAlias = Callable[[Operation], Awaitable[Answer | None]]
"""Sends once; returns None if the connection broke or timed out, so that the result is unknown."""


def send(
    operation: Operation, outbox: Outbox, transport: Transport, sleep: Callable[[float], object] = time.sleep
) -> Answer:
    """Send an operation until there is a final response, and save it.

    Raises:
        FateUnknown: there was no final response in time.
        AnotherAccount: the operation is of another account than the outbox, whose account is logged in.
    """
    outbox.check(operation)
    if operation.answer:
        return operation.answer
    until = time.monotonic() + ALL_TRIES_WITHIN
    for tries in count(1):
        answer = transport(operation)
        if answer and not may_be_sent_again(answer):
            outbox.settle(operation, answer)
            return answer
        pause = pause_after(answer, tries)
        if time.monotonic() + pause > until:
            break
        sleep(pause)
    raise FateUnknown(operation)


async def send_async(
    operation: Operation,
    outbox: Outbox,
    transport: AsyncTransport,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> Answer:
    """Send an operation until there is a final response, and save it.

    Raises:
        FateUnknown: there was no final response in time.
        AnotherAccount: the operation is of another account than the outbox, whose account is logged in.
    """
    outbox.check(operation)
    if operation.answer:
        return operation.answer
    until = time.monotonic() + ALL_TRIES_WITHIN
    for tries in count(1):
        answer = await transport(operation)
        if answer and not may_be_sent_again(answer):
            outbox.settle(operation, answer)
            return answer
        pause = pause_after(answer, tries)
        if time.monotonic() + pause > until:
            break
        await sleep(pause)
    raise FateUnknown(operation)


def over_requests(session: requests.Session) -> Transport:
    def transport(operation: Operation) -> Answer | None:
        try:
            answer = session.request(
                operation.method,
                operation.url,
                data=operation.body,
                headers=operation.headers,
                timeout=(CONNECT_WITHIN, ANSWER_WITHIN),
                allow_redirects=False,  # a redirect would turn the POST into a GET
            )
        except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError):
            return None
        return _answer(answer.status_code, answer.headers, answer.content)

    return transport


def over_urllib3(pool: urllib3.PoolManager, headers: Mapping[str, str]) -> Transport:
    def transport(operation: Operation) -> Answer | None:
        try:
            answer = pool.request(
                operation.method,
                operation.url,
                body=operation.body,
                headers={**headers, **operation.headers},
                timeout=urllib3.Timeout(connect=CONNECT_WITHIN, read=ANSWER_WITHIN),
                retries=False,  # urllib3's own retries do not know about keys
            )
        except (
            urllib3.exceptions.TimeoutError,
            urllib3.exceptions.NewConnectionError,
            urllib3.exceptions.ProtocolError,
        ):
            return None
        return _answer(answer.status, answer.headers, answer.data)

    return transport


def over_httpx(client: httpx.Client) -> Transport:
    def transport(operation: Operation) -> Answer | None:
        try:
            answer = client.request(
                operation.method,
                operation.url,
                content=operation.body,
                headers=operation.headers,
                timeout=httpx.Timeout(ANSWER_WITHIN, connect=CONNECT_WITHIN),
            )
        except (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError):
            return None
        return _answer(answer.status_code, answer.headers, answer.content)

    return transport


def over_async_httpx(client: httpx.AsyncClient) -> AsyncTransport:
    async def transport(operation: Operation) -> Answer | None:
        try:
            answer = await client.request(
                operation.method,
                operation.url,
                content=operation.body,
                headers=operation.headers,
                timeout=httpx.Timeout(ANSWER_WITHIN, connect=CONNECT_WITHIN),
            )
        except (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError):
            return None
        return _answer(answer.status_code, answer.headers, answer.content)

    return transport


def _answer(status: int, headers: Mapping[str, str], body: bytes) -> Answer:
    return Answer(status, {name.lower(): value for name, value in headers.items()}, body)


def main(url: str, name: str, amount: str) -> None:
    outbox = Outbox("outbox.sqlite3", "alice")
    meant = (name, "POST", f"{url.rstrip('/')}/charges", {"card": "tok_visa", "amount": int(amount)})
    outbox.intend(*meant)
    with httpx.Client(headers={"Authorization": "Bearer alice-token"}) as client:
        for operation in outbox.unsettled():  # including those of an earlier run
            send(operation, outbox, over_httpx(client))
    if answer := outbox.intend(*meant).answer:
        print(answer.status, answer.body.decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
