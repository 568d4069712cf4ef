"""gunicorn with an application that can be killed at chosen points; it dies with its parent.

`python -m tests.support.mortal '{"address": …}'` runs such a server.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from flask import Flask, request

from idemredis import Ledger, Policy, Reservation, StoredResponse
from idemredis.core.outcomes import Outcome
from idemredis.flask import Idempotency, current_reservation
from tests.support.processes import die_with
from tests.support.serving import Answer, OnSocket, read_answer

__all__ = ["Gunicorn"]


class Gunicorn(OnSocket):
    """A service of two workers on a unix socket."""

    def __init__(self, url: str, namespace: str, worker: str = "sync", **settings: Any) -> None:
        folder = Path(tempfile.mkdtemp(prefix="faults"))
        self._notes = folder / "notes"
        self._loads = 1 if settings.get("preload") else 2
        given = {
            "address": str(folder / "s"),
            "parent": os.getpid(),
            "url": url,
            "namespace": namespace,
            "worker": worker,
        }
        patched = ["-m", "gevent.monkey", "--module"] if worker == "gevent" else ["-m"]  # patch before other imports
        text = json.dumps(given | {"notes": str(self._notes)} | settings)
        super().__init__([sys.executable, *patched, "tests.support.mortal", text], folder)

    def notes(self, key: str) -> list[str]:
        """Return the records of a key: "begun" and "done" for each run, and where it died."""
        lines = self._notes.read_text().splitlines() if self._notes.exists() else []
        return [line.split(" ", 1)[1] for line in lines if line.split(" ", 1)[0] == key]

    def send(self, key: str, path: str = "/charges", body: bytes = b"{}") -> socket.socket:
        """Send a request, and return the connection to read the response from."""
        connection = self.connect()
        head = f"POST {path} HTTP/1.1\r\nHost: shop\r\nConnection: close\r\nIdempotency-Key: {key}\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return connection

    def post(self, key: str, path: str = "/charges") -> Answer:
        with self.send(key, path) as connection:
            return read_answer(connection)

    def is_up(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"gunicorn did not start: {self.log[-2000:]}")
        if len(self.notes("worker")) < self._loads:
            return False  # a gunicorn worker ignores SIGTERM while it boots
        with suppress(OSError), self.connect() as connection:
            connection.sendall(b"GET /up HTTP/1.1\r\nHost: shop\r\nConnection: close\r\n\r\n")
            return read_answer(connection).status == 200
        return False


class _Mortal(Ledger):
    """A ledger whose process dies, once, at the point that the key names."""

    notes: str

    def claim(self, principal: object, key: str, *args: Any, **kwargs: Any) -> Outcome:
        outcome = super().claim(principal, key, *args, **kwargs)
        if isinstance(outcome, Reservation) and outcome.generation == 1:
            self.die("in-the-claim", key)
        return outcome

    def complete(self, r: Reservation, response: StoredResponse) -> None:
        if r.generation == 1:
            self.die("before-the-completion", r.key)
        super().complete(r, response)

    def note(self, key: str, what: str) -> None:
        with open(self.notes, "a") as file:
            file.write(f"{key} {what}\n")

    def die(self, where: str, key: str) -> None:
        if key.startswith(where):
            self.note(key, f"died {where}")
            os.kill(os.getpid(), signal.SIGKILL)


def _create_app(given: dict[str, Any]) -> Flask:
    logging.basicConfig(level=logging.DEBUG, format="%(name)s %(levelname)s %(message)s")
    logging.getLogger("idemredis").setLevel(logging.DEBUG)
    policy = Policy(lease=given.get("lease", 1.0))
    ledger = _Mortal.from_url(given["url"], policy, given["namespace"])
    ledger.notes = given["notes"]
    ledger.note("worker", "loaded")
    app = Flask("shop")
    idempotency = Idempotency(app, principal="acct-secret-1", ledger=ledger)
    if given.get("preload"):
        before = ledger.claim("acct-secret-1", f"before-the-fork-{os.getpid()}", "f")
        assert isinstance(before, Reservation)
        ledger.start_heartbeat(before)  # so that its thread is running when the workers are forked

    @app.get("/up")
    def up() -> str:
        return "up"

    @app.route("/", defaults={"path": ""}, methods=["POST", "PUT", "PATCH", "DELETE"])
    @app.route("/<path:path>", methods=["POST", "PUT", "PATCH", "DELETE"])
    @idempotency.protect
    def charge(path: str) -> tuple[dict[str, Any], int]:
        key = current_reservation.key
        ledger.note(key, "begun")
        size = len(request.get_data())
        if current_reservation.generation == 1:
            ledger.die("in-the-view", key)
            time.sleep(float(request.args.get("seconds", 0)) if path == "slow" else 0.0)
        ledger.note(key, "done")
        return {"generation": current_reservation.generation, "size": size, "worker": os.getpid()}, 201

    return app


def _serve(given: dict[str, Any]) -> None:
    die_with(given["parent"])
    from gunicorn.app.base import BaseApplication  # type: ignore[import-untyped]

    class Application(BaseApplication):  # type: ignore[misc]
        def load_config(self) -> None:
            threads = 8 if given["worker"] == "gthread" else 1
            chosen = {"bind": f"unix:{given['address']}", "workers": 2, "threads": threads}
            chosen |= {"worker_class": given["worker"], "timeout": given.get("timeout", 30), "graceful_timeout": 10}
            for name, value in {**chosen, "control_socket": "", "preload_app": bool(given.get("preload"))}.items():
                if name in self.cfg.settings:
                    self.cfg.set(name, value)

        def load(self) -> Any:
            return _create_app(given)

    Application().run()


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
