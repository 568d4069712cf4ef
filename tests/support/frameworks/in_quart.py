"""Quart."""

from __future__ import annotations

from typing import Any

from quart import Quart, request

from idemredis.asgi import Idempotency
from tests.support.frameworks import Charge, pieces

__all__ = ["build"]


def build(idempotency: Idempotency, charge: Charge, sync: bool) -> Any:
    app = Quart("shop")

    @app.get("/up")
    async def up() -> str:
        return "up"

    if sync:

        @app.post("/charges/<order>")
        @idempotency.protect
        def charged(order: str) -> Any:
            return charge()
    else:

        @app.post("/charges/<order>")
        @idempotency.protect
        async def charged_async(order: str) -> Any:
            return {**charge(), "body": await request.get_data(as_text=True)}

    @app.post("/streams")
    @idempotency.protect
    async def streamed() -> Any:
        return pieces(charge), 200

    return app
