"""WSGI and ASGI servers in processes of their own, which die with the test, and raw HTTP to speak to them."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from tests.support.processes import mortal
from tests.support.served import LET_GO, Setup
from tests.support.waiting import wait_until

__all__ = ["ASGI_KINDS", "PATIENCE", "Answer", "Served", "read_answer"]

ROOT = Path(__file__).parents[2]
ASGI_KINDS = ("uvicorn", "hypercorn")
PATIENCE = 60.0
"""Seconds for a server to start, which imports much, and to answer; the machine may be busy."""


class Answer(NamedTuple):
    """`status` is 0 where the server closed the connection without an answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> object:
        """Return the code of a refusal; None for other answers."""
        return self.json.get("error") if self.headers.get("content-type") == "application/json" else None


def read_answer(connection: socket.socket) -> Answer:
    response = http.client.HTTPResponse(connection)
    try:
        response.begin()
        body = response.read()
    except (http.client.BadStatusLine, ConnectionResetError):
        return Answer(0, {}, b"")
    finally:
        response.close()
    return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, body)


class Served:
    """The application of `tests.support.served`, or of `served_asgi`, behind a server of that kind, on a unix socket.

    Attributes:
        process: the server; of gunicorn, the process that starts the workers.
    """

    def __init__(self, kind: str, url: str, namespace: str = "served", **settings: Any) -> None:
        """Start it, with further settings of `Setup`, and return when it answers."""
        self.kind = kind
        self.namespace = namespace
        self._folder = Path(tempfile.mkdtemp(prefix="web"))  # pytest's own are too long for a socket's name
        self._log, self._notes = self._folder / "log", self._folder / "notes"
        self._setup = Setup(kind, str(self._folder / "s"), str(self._notes), url, namespace, **settings)
        self._start()

    def _start(self) -> None:
        patched = (
            ["gevent.monkey", "--module"] if self.kind in ("gevent", "gunicorn-gevent") else []
        )  # before anything is imported
        module = "tests.support.served_asgi" if self.kind in ASGI_KINDS else "tests.support.served"
        words = [sys.executable, "-m", *patched, module, json.dumps(asdict(self._setup))]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(mortal(words), cwd=ROOT, stdout=log, stderr=log)
        try:
            wait_until(self._is_up, PATIENCE)
        except BaseException:
            self.close()
            raise

    def revive(self) -> None:
        """Start the server anew if it died; gunicorn and uWSGI do that themselves for their workers."""
        if self.kind in ("waitress", "werkzeug", "gevent", "hypercorn"):
            self.process.wait(10.0)
            Path(self._setup.address).unlink(missing_ok=True)
            self._start()

    @property
    def address(self) -> str:
        """The unix socket on which it listens."""
        return self._setup.address

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def runs(self) -> list[str]:
        """Return the keys of the views that ran, in order."""
        return [key for key, what in self._noted() if what == "begun"]

    def notes(self, key: str) -> list[str]:
        """Return what was noted of the key: "begun" and "done" of each run, and where it died."""
        return [what for noted, what in self._noted() if noted == key]

    def let_go(self, key: str) -> None:
        """Have the view of the path "held" go on."""
        with self._notes.open("a") as notes:
            notes.write(f"{key}\t{LET_GO}\n")

    def forget(self) -> None:
        """Begin anew with the notes."""
        self._notes.unlink(missing_ok=True)

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(PATIENCE)
        try:
            connection.connect(self._setup.address)
        except OSError:
            connection.close()
            raise
        return connection

    def exchange(self, head: str, body: bytes = b"", *, half_close: bool = False) -> Answer:
        """Send exactly these bytes (lines ended by a bare newline get theirs), and read one answer."""
        with self.connect() as connection:
            lines = f"{head.strip()}\nHost: shop\nConnection: close\n\n".replace("\n", "\r\n")
            with suppress(BrokenPipeError):  # a server may refuse before it has read everything
                connection.sendall(lines.encode("latin-1"))
                connection.sendall(body)
                if half_close:
                    connection.shutdown(socket.SHUT_WR)
            return read_answer(connection)

    def send(self, key: str, path: str = "/charges", body: bytes = b"{}") -> socket.socket:
        """Send a request and return the connection, to read the answer from."""
        connection = self.connect()
        head = f"POST {path} HTTP/1.1\r\nHost: shop\r\nConnection: close\r\nIdempotency-Key: {key}\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return connection

    def post(self, key: str, path: str = "/charges") -> Answer:
        with self.send(key, path) as connection:
            return read_answer(connection)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10.0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _noted(self) -> list[tuple[str, str]]:
        lines = self._notes.read_text().splitlines() if self._notes.exists() else []
        return [(key, what) for key, _, what in (line.partition("\t") for line in lines)]

    def _is_up(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.kind} did not start: {self.log[-2000:]}")
        if len(self.notes("server")) < self._setup.loads:
            return False  # told to end while it boots, a worker of gunicorn's does not hear it
        with suppress(OSError):
            return self.exchange("GET /up HTTP/1.1").status == 200
        return False
