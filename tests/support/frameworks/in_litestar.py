"""Litestar."""

from __future__ import annotations

from typing import Any

from litestar import Litestar, Request, get, post
from litestar.params import FromPath
from litestar.response import Stream

from idemredis.asgi import Idempotency
from tests.support.frameworks import Charge, pieces

__all__ = ["build"]


def build(idempotency: Idempotency, charge: Charge, sync: bool) -> Any:
    charged: Any
    if sync:

        @post("/charges/{order:str}", sync_to_thread=True)
        @idempotency.protect
        def charge_(order: FromPath[str], request: Request[Any, Any, Any]) -> dict[str, Any]:
            return charge()

        charged = charge_
    else:

        @post("/charges/{order:str}")
        @idempotency.protect
        async def charge_async(order: FromPath[str], request: Request[Any, Any, Any]) -> dict[str, Any]:
            return {**charge(), "body": (await request.body()).decode()}

        charged = charge_async

    @get("/up")
    async def up() -> str:
        return "up"

    @post("/streams")
    @idempotency.protect
    async def streamed() -> Stream:
        return Stream(pieces(charge))

    return Litestar([up, charged, streamed], openapi_config=None)
