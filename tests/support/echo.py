"""The application behind the real servers, which echoes its request and records each run in a file."""

from __future__ import annotations

import hashlib
import os
import resource
from typing import Any

from flask import Flask, request

from idemredis.flask import Idempotency, current_reservation

__all__ = ["create_app"]

UNSAFE = ["POST", "PUT", "PATCH", "DELETE"]


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

    return app
