"""The application behind the real servers: it echoes what its view saw, notes each run, and dies where its key says.

`python -m tests.support.served '{"kind": "waitress", …}'` is such a server, with a `Setup` in JSON.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flask import Flask, Response, request, send_file, stream_with_context

from idemredis import Ledger, Policy, Reservation
from idemredis.core.outcomes import Outcome
from idemredis.core.settle import Ending
from idemredis.flask import Idempotency, current_reservation

__all__ = ["KINDS", "LET_GO", "PRINCIPAL", "SETUP", "Mortal", "Setup"]

KINDS = ("gunicorn-sync", "gunicorn-gthread", "gunicorn-gevent", "waitress", "uwsgi", "werkzeug", "gevent")
"""Servers; "uwsgi" has what docs/flask.md has for chunked bodies, and "uwsgi-bare" does not. "uwsgi-gevent" patches the
threads after the application was loaded."""

ROOT = Path(__file__).parents[2]

PRINCIPAL = "acct-secret-1"
LET_GO = "let go"
"""Noted by the test of a key whose view, at the path "held", may go on."""

SETUP = "SERVEDSETUP"
"""Environment variable with the `Setup`, for a server that imports this module itself."""

UNSAFE = ["POST", "PUT", "PATCH", "DELETE"]


@dataclass(frozen=True)
class Setup:
    """What a server is started with.

    `address` is its unix socket and `notes` the file of what ran. `workers` and `timeout` are gunicorn's and uWSGI's,
    `preload` is gunicorn's; `threads` are those of a worker that has them. `enable_threads` and `uwsgi_threads`, for
    several in one worker, are uWSGI's. With a `framework`, an ASGI server has the application of `frameworks` instead.
    """

    kind: str
    address: str
    notes: str
    url: str
    namespace: str
    lease: float = Policy().lease
    socket_timeout: float = 5.0
    workers: int = 2
    threads: int = 8
    wait: float = 0.0
    timeout: int = 60
    preload: bool = False
    enable_threads: bool = True
    uwsgi_threads: int = 1
    framework: str = ""

    @property
    def loads(self) -> int:
        """How many processes load the application."""
        return self.workers if self.kind.startswith(("gunicorn", "uvicorn")) and not self.preload else 1


class Mortal:
    """What a ledger has whose process dies where the key says, once."""

    notes: str

    def note(self, key: str, what: str) -> None:
        with open(self.notes, "a") as file:
            file.write(f"{key}\t{what}\n")

    def is_let_go(self, key: str) -> bool:
        return f"{key}\t{LET_GO}\n" in Path(self.notes).read_text()

    def die(self, where: str, key: str) -> None:
        if key.startswith(where):
            self.note(key, f"died {where}")
            os.kill(os.getpid(), signal.SIGKILL)


class _MortalLedger(Mortal, Ledger):
    """A ledger whose process dies where the key says, once."""

    def claim(self, principal: object, key: str, *args: Any, **kwargs: Any) -> Outcome:
        outcome = super().claim(principal, key, *args, **kwargs)
        if isinstance(outcome, Reservation) and outcome.generation == 1:
            self.die("in-the-claim", key)
        return outcome

    def settle(self, r: Reservation, ending: Ending) -> None:
        if r.generation == 1:
            self.die("before-the-completion", r.key)
        super().settle(r, ending)


def _create_app(setup: Setup) -> Flask:
    logging.basicConfig(format="%(name)s %(levelname)s %(message)s")
    logging.getLogger("idemredis").setLevel(logging.DEBUG)
    policy = Policy(lease=setup.lease)
    ledger = _MortalLedger.from_url(setup.url, policy, setup.namespace, socket_timeout=setup.socket_timeout)
    ledger.notes = setup.notes
    ledger.note("server", "loaded")
    app = Flask("shop")
    app.config["IDEMREDIS_WAIT_SECONDS"] = setup.wait
    idempotency = Idempotency(app, principal=PRINCIPAL, ledger=ledger)
    if setup.preload:
        before = ledger.claim(PRINCIPAL, f"before-the-fork-{os.getpid()}", "f")
        assert isinstance(before, Reservation)
        ledger.start_heartbeat(before)  # its thread runs when the workers are forked

    @app.get("/up")
    def up() -> str:
        return "up"

    @app.route("/", defaults={"path": ""}, methods=UNSAFE)
    @app.route("/<path:path>", methods=UNSAFE)
    @idempotency.protect
    def echo(path: str) -> tuple[dict[str, Any], int]:
        r = current_reservation
        ledger.note(r.key, "begun")
        digest, size = hashlib.sha256(), 0
        while piece := request.stream.read(65536):
            digest.update(piece)
            size += len(piece)
        if r.generation == 1:
            ledger.die("in-the-view", r.key)
            time.sleep(request.args.get("seconds", 0.0, float) if path == "slow" else 0.0)
            while path == "held" and not ledger.is_let_go(r.key):
                time.sleep(0.02)
        ledger.note(r.key, "done")
        return {
            "path": path,
            "size": size,
            "sha256": digest.hexdigest(),
            "generation": r.generation,
            "server": os.getpid(),
            "peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        }, 201

    @app.post("/answers/<kind>")
    @idempotency.protect
    def answer(kind: str) -> Any:
        ledger.note(current_reservation.key, "begun")
        match kind:
            case "stream":
                return Response(stream_with_context(_pieces(100)), 201)
            case "slow":
                return Response(_pieces(20, 0.05), 201)
            case "broken":
                return Response(_pieces(3, last=LookupError("the source broke")), 201)
            case "broken-first":
                return Response(_pieces(0, last=LookupError("the source broke")), 201)
            case "file":
                return send_file(__file__)
            case _:
                return kind, 201

    @app.teardown_request
    def commit(error: BaseException | None) -> None:
        if request.path == "/answers/uncommitted" and current_reservation and current_reservation.generation == 1:
            raise LookupError("the commit failed")

    return app


def under_uwsgi() -> Any:
    """Return the application; uWSGI calls this in its master process, before it forks its workers."""
    setup = Setup(**json.loads(os.environ[SETUP]))
    app = _create_app(setup)
    if setup.kind == "uwsgi":
        app.wsgi_app = _of_document("docs/flask.md", "UwsgiChunks")(app.wsgi_app)  # type: ignore[method-assign]
    return app


def _of_document(name: str, what: str) -> Any:
    """Return what a snippet of a document defines."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "document"}
    exec(next(block for block in blocks if what in block), names)
    return names[what]


def _pieces(number: int, pause: float = 0.0, last: Exception | None = None) -> Iterator[str]:
    for n in range(number):
        time.sleep(pause)
        yield f"piece {n}\n"
    if last is not None:
        raise last


def _serve(setup: Setup) -> None:
    if setup.kind.startswith("uwsgi"):
        words = [
            "uwsgi",
            "--http-socket",
            setup.address,
            "--module",
            "tests.support.served:under_uwsgi()",
            "--need-app",
        ]
        words += ["--virtualenv", sys.prefix]
        words += ["--master", "--processes", str(setup.workers), "--die-on-term", "--no-orphans"]
        words += ["--enable-threads"] if setup.enable_threads else []
        words += ["--gevent", "20", "--gevent-monkey-patch"] if setup.kind == "uwsgi-gevent" else []
        words += ["--threads", str(setup.uwsgi_threads)] if setup.uwsgi_threads > 1 else []
        os.environ[SETUP] = json.dumps(asdict(setup))
        os.execv(Path(sys.executable).with_name("uwsgi"), words)
    if setup.kind.startswith("gunicorn"):
        from gunicorn.app.base import BaseApplication  # type: ignore[import-untyped]

        class Application(BaseApplication):  # type: ignore[misc]
            def load_config(self) -> None:
                worker = setup.kind.removeprefix("gunicorn-")
                chosen = {
                    "bind": f"unix:{setup.address}",
                    "worker_class": worker,
                    "workers": setup.workers,
                    "threads": setup.threads if worker == "gthread" else 1,
                    "timeout": setup.timeout,
                    "graceful_timeout": 10,
                    "preload_app": setup.preload,
                    "control_socket": "",
                }
                for name, value in chosen.items():
                    if name in self.cfg.settings:
                        self.cfg.set(name, value)

            def load(self) -> Any:
                return _create_app(setup)

        Application().run()
    app = _create_app(setup)
    if setup.kind == "waitress":
        import waitress

        waitress.serve(app, unix_socket=setup.address, threads=setup.threads)
    elif setup.kind == "werkzeug":
        from werkzeug.serving import run_simple

        run_simple(f"unix://{setup.address}", 0, app, threaded=True)
    elif setup.kind == "gevent":
        from gevent.pywsgi import WSGIServer
        from gevent.socket import AF_UNIX
        from gevent.socket import socket as gsocket

        listener = gsocket(AF_UNIX)
        listener.bind(setup.address)
        listener.listen(64)
        WSGIServer(listener, app).serve_forever()


if __name__ == "__main__":
    _serve(Setup(**json.loads(sys.argv[1])))
