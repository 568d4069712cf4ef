"""Real WSGI servers in their own processes, which die with their parent, and a raw HTTP client for them.

`python -m tests.support.serving KIND SOCKET PARENT URL NAMESPACE RUNS` runs such a server.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from tests.support.waiting import wait_until

__all__ = ["KINDS", "Answer", "OnSocket", "Served"]

KINDS = ("gunicorn-sync", "gunicorn-gthread", "gunicorn-gevent", "waitress", "werkzeug", "gevent")
ROOT = Path(__file__).parents[2]


class Answer(NamedTuple):
    """An HTTP response; `status` is 0 if the server closed the connection without one."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> object:
        """Return the code of a refusal; None for other responses."""
        return self.json.get("error") if self.headers.get("content-type") == "application/json" else None


class OnSocket(ABC):
    """A server in its own process, on a unix socket in its own folder."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self.folder = folder
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)
        try:
            wait_until(self.is_up, 20.0)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        return str(self.folder / "s")

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @abstractmethod
    def is_up(self) -> bool:
        """Return True if the server responds; raise if its process has ended."""

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(20.0)
        try:
            connection.connect(self.address)
        except OSError:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10.0)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Served(OnSocket):
    """The application of `tests.support.echo` behind a server of one kind, on a unix socket."""

    def __init__(self, kind: str, url: str, namespace: str = "served") -> None:
        self.kind = kind
        self.namespace = namespace
        folder = Path(tempfile.mkdtemp(prefix="web"))  # pytest's folders are too long for a socket's name
        self._runs = folder / "runs"
        words = [kind, str(folder / "s"), str(os.getpid()), url, namespace, str(self._runs)]
        super().__init__([sys.executable, "-m", "tests.support.serving", *words], folder)

    def runs(self) -> list[str]:
        """Return the keys of the views that ran, in order."""
        return self._runs.read_text().splitlines() if self._runs.exists() else []

    def forget_runs(self) -> None:
        self._runs.unlink(missing_ok=True)

    def exchange(self, head: str, body: bytes = b"", *, half_close: bool = False) -> Answer:
        """Send a request with this head and body, and read one response; newlines of the head become CRLF."""
        with self.connect() as connection:
            lines = f"{head.strip()}\nHost: shop\nConnection: close\n\n".replace("\n", "\r\n")
            with suppress(BrokenPipeError):  # a server may refuse before it has read everything
                connection.sendall(lines.encode("latin-1"))
                connection.sendall(body)
                if half_close:
                    connection.shutdown(socket.SHUT_WR)
            return read_answer(connection)

    def is_up(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.kind} did not start: {self.log[-2000:]}")
        with suppress(OSError):
            return self.exchange("GET /up HTTP/1.1").status == 200
        return False


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


def _serve(kind: str, address: str, parent: str, url: str, namespace: str, runs: str) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != int(parent):
        sys.exit("the parent is gone")
    if kind.endswith("gevent"):
        from gevent import monkey

        monkey.patch_all()
    from tests.support.echo import create_app

    if kind.startswith("gunicorn"):
        from gunicorn.app.base import BaseApplication  # type: ignore[import-untyped]

        class Application(BaseApplication):  # type: ignore[misc]
            def load_config(self) -> None:
                worker = kind.removeprefix("gunicorn-")
                workers, threads = (4, 25) if worker == "gthread" else (2, 1)
                chosen = {"bind": f"unix:{address}", "workers": workers, "worker_class": worker, "threads": threads}
                for name, value in {**chosen, "timeout": 60, "graceful_timeout": 1, "control_socket": ""}.items():
                    if name in self.cfg.settings:
                        self.cfg.set(name, value)

            def load(self) -> Any:
                return create_app(url, namespace, runs)

        Application().run()
    app = create_app(url, namespace, runs)
    if kind == "waitress":
        import waitress

        waitress.serve(app, unix_socket=address, threads=4)
    elif kind == "werkzeug":
        from werkzeug.serving import run_simple

        run_simple(f"unix://{address}", 0, app, threaded=True)
    elif kind == "gevent":
        from gevent.pywsgi import WSGIServer
        from gevent.socket import AF_UNIX
        from gevent.socket import socket as gsocket

        listener = gsocket(AF_UNIX)
        listener.bind(address)
        listener.listen(64)
        WSGIServer(listener, app).serve_forever()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
