"""FastAPI, with a guard."""

from __future__ import annotations

from typing import Any

from fastapi import Depends, FastAPI, Request
from starlette.responses import StreamingResponse

from idemredis.asgi import Idempotency
from idemredis.fastapi import guard
from tests.support.frameworks import Charge, pieces

__all__ = ["build"]


def build(idempotency: Idempotency, charge: Charge, sync: bool) -> Any:
    app = FastAPI(openapi_url=None)
    claim = [Depends(guard(idempotency))]
    app.get("/up")(lambda: "up")
    if sync:

        @app.post("/charges/{order}", dependencies=claim)
        def charged(order: str) -> dict[str, Any]:
            return charge()
    else:

        @app.post("/charges/{order}", dependencies=claim)
        async def charged_async(order: str, request: Request) -> dict[str, Any]:
            return {**charge(), "body": (await request.body()).decode()}

    @app.post("/streams", dependencies=claim)
    async def streamed() -> StreamingResponse:
        return StreamingResponse(pieces(charge))

    return app
