"""Starlette."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from idemredis.asgi import Idempotency
from tests.support.frameworks import Charge, pieces

__all__ = ["build"]


def build(idempotency: Idempotency, charge: Charge, sync: bool) -> Any:
    async def up(request: Request) -> Response:
        return PlainTextResponse("up")

    def charged(request: Request) -> Response:
        return JSONResponse(charge())

    async def charged_async(request: Request) -> Response:
        return JSONResponse({**charge(), "body": (await request.body()).decode()})

    async def streamed(request: Request) -> Response:
        return StreamingResponse(pieces(charge))

    protect = idempotency.protect
    return Starlette(
        routes=[
            Route("/up", up),
            Route("/charges/{order}", protect(charged if sync else charged_async), methods=["POST"]),
            Route("/streams", protect(streamed), methods=["POST"]),
        ]
    )
