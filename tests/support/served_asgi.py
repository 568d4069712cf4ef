"""The ASGI application behind the real servers: it does what that of `served` does, and dies where its key says.

`python -m tests.support.served_asgi '{"kind": "uvicorn", …}'` is such a server, with a `Setup` of `served` in JSON.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import resource
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from idemredis import AsyncLedger, AsyncReservation, Policy, Reservation
from idemredis.asgi import Idempotency, IdempotencyMiddleware, current_reservation
from idemredis.core.settle import Ending
from tests.support.frameworks import build
from tests.support.served import PRINCIPAL, SETUP, UNSAFE, Mortal, Setup

__all__ = ["LARGE", "PIECE", "create"]

LARGE, PIECE = 200 * 1024 * 1024, 64 * 1024
"""Bytes of the largest request that is recorded and of the streamed response "large"; and of one piece of it."""


class _MortalLedger(Mortal, AsyncLedger):
    """A ledger whose process dies where the key says, once."""

    async def claim(self, principal: object, key: str, *args: Any, **kwargs: Any) -> Any:
        outcome = await super().claim(principal, key, *args, **kwargs)
        if isinstance(outcome, AsyncReservation) and outcome.generation == 1:
            self.die("in-the-claim", key)
        return outcome

    async def settle(self, r: Reservation, ending: Ending) -> None:
        if r.generation == 1:
            self.die("before-the-completion", r.key)
        await super().settle(r, ending)


def create() -> Any:
    """Return the application, with the `Setup` in the environment; servers call this in each process."""
    setup = Setup(**json.loads(os.environ[SETUP]))
    logging.basicConfig(format="%(name)s %(levelname)s %(message)s")
    logging.getLogger("idemredis").setLevel(logging.DEBUG)
    policy = Policy(lease=setup.lease)
    ledger = _MortalLedger.from_url(setup.url, policy, setup.namespace, socket_timeout=setup.socket_timeout)
    ledger.notes = setup.notes
    ledger.note("server", "loaded")
    settings = {"IDEMREDIS_WAIT_SECONDS": setup.wait, "IDEMREDIS_MAX_REQUEST_BYTES": LARGE}
    idempotency = Idempotency(principal=PRINCIPAL, ledger=ledger, settings=settings)
    if setup.framework:
        return _framework(setup.framework, idempotency, ledger)

    async def up(request: Request) -> Response:
        return PlainTextResponse("up")

    @idempotency.protect
    async def echo(request: Request) -> Response:
        r, path = current_reservation, request.path_params["path"]
        ledger.note(r.key, "begun")
        digest, size = hashlib.sha256(), 0
        async for piece in request.stream():
            digest.update(piece)
            size += len(piece)
        if r.generation == 1:
            ledger.die("in-the-view", r.key)
            await asyncio.sleep(float(request.query_params.get("seconds", 0)) if path == "slow" else 0.0)
            while path == "held" and not ledger.is_let_go(r.key):  # noqa: ASYNC110  # another process lets go
                await asyncio.sleep(0.02)
        ledger.note(r.key, "done")
        made = {
            "path": path,
            "size": size,
            "sha256": digest.hexdigest(),
            "generation": r.generation,
            "server": os.getpid(),
            "peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        }
        return JSONResponse(made, 201)

    @idempotency.protect
    async def answer(request: Request) -> Response:
        ledger.note(current_reservation.key, "begun")
        match request.path_params["kind"]:
            case "stream":
                return StreamingResponse(_pieces(100), 201, media_type="text/plain")
            case "slow":
                return StreamingResponse(_pieces(20, 0.05), 201)
            case "large":
                return StreamingResponse(_large(), 201)
            case "broken":
                return StreamingResponse(_pieces(3, last=LookupError("the source broke")), 201)
            case "broken-first":
                return StreamingResponse(_pieces(0, last=LookupError("the source broke")), 201)
            case kind:
                return PlainTextResponse(kind, 201)

    routes = [
        Route("/up", up),
        Route("/answers/{kind}", answer, methods=["POST"]),
        Route("/{path:path}", echo, methods=UNSAFE),
    ]
    app = Starlette(routes=routes, lifespan=idempotency.lifespan)
    app.add_middleware(IdempotencyMiddleware, idempotency=idempotency)
    return app


async def _large() -> AsyncIterator[bytes]:
    piece = bytes(PIECE)
    for _ in range(LARGE // PIECE):
        yield piece


def _framework(name: str, idempotency: Idempotency, ledger: _MortalLedger) -> Any:
    def charge() -> dict[str, Any]:
        ledger.note(current_reservation.key, "begun")
        return {"key": current_reservation.key}

    return IdempotencyMiddleware(build(name, idempotency, charge), idempotency)


async def _pieces(number: int, pause: float = 0.0, last: Exception | None = None) -> AsyncIterator[str]:
    for n in range(number):
        await asyncio.sleep(pause)
        yield f"piece {n}\n"
    if last is not None:
        raise last


def _serve(setup: Setup) -> None:
    os.environ[SETUP] = json.dumps(asdict(setup))
    if setup.kind == "uvicorn":
        import uvicorn

        uvicorn.run(
            "tests.support.served_asgi:create",
            factory=True,
            uds=setup.address,
            workers=setup.workers,
            timeout_graceful_shutdown=10,
            timeout_worker_healthcheck=60,  # a busy machine takes longer to import than the default of 5 s
            log_level="warning",
        )
    else:
        from hypercorn.asyncio import serve
        from hypercorn.config import Config

        config = Config()
        config.bind = [f"unix:{setup.address}"]
        config.graceful_timeout = 10.0
        asyncio.run(serve(create(), config))


if __name__ == "__main__":
    _serve(Setup(**json.loads(sys.argv[1])))
