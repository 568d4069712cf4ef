"""The application behind the real servers, which echoes its request and records each run in a file."""

from __future__ import annotations

import hashlib
import os
import resource
import time
from collections.abc import Iterator
from typing import Any

from flask import Flask, Response, request, send_file, stream_with_context

from idemredis.flask import Idempotency, current_reservation

__all__ = ["create_app"]

UNSAFE = ["POST", "PUT", "PATCH", "DELETE"]


def pieces(number: int, pause: float = 0.0, last: Exception | None = None) -> Iterator[str]:
    for n in range(number):
        time.sleep(pause)
        yield f"piece {n}\n"
    if last is not None:
        raise last


def create_app(url: str, namespace: str, runs: str) -> Flask:
    app = Flask("shop")
    app.config.update(IDEMREDIS_URL=url, IDEMREDIS_NAMESPACE=namespace, IDEMREDIS_SOCKET_TIMEOUT_SECONDS=5)
    idempotency = Idempotency(app, principal="acme")

    @app.get("/up")
    def up() -> str:
        return "up"

    @app.route("/", defaults={"path": ""}, methods=UNSAFE)
    @app.route("/<path:path>", methods=UNSAFE)
    @idempotency.protect
    def echo(path: str) -> tuple[dict[str, Any], int]:
        with open(runs, "a") as file:
            file.write(f"{current_reservation.key}\n")
        digest, size = hashlib.sha256(), 0
        while piece := request.stream.read(65536):
            digest.update(piece)
            size += len(piece)
        return {
            "path": path,
            "size": size,
            "sha256": digest.hexdigest(),
            "generation": current_reservation.generation,
            "server": os.getpid(),
            "peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        }, 201

    @app.post("/answers/<kind>")
    @idempotency.protect
    def answer(kind: str) -> Any:
        with open(runs, "a") as file:
            file.write(f"{current_reservation.key}\n")
        match kind:
            case "stream":
                return Response(stream_with_context(pieces(100)), 201)
            case "slow":
                return Response(pieces(20, 0.05), 201)
            case "broken":
                return Response(pieces(3, last=LookupError("the source broke")), 201)
            case "broken-first":
                return Response(pieces(0, last=LookupError("the source broke")), 201)
            case "file":
                return send_file(__file__)
            case _:
                return kind, 201

    @app.teardown_request
    def commit(error: BaseException | None) -> None:
        if request.path == "/answers/uncommitted" and current_reservation and current_reservation.generation == 1:
            raise LookupError("the commit failed")

    return app
