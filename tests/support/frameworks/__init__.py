"""The same application in each framework, in a module of its own: a server imports only the framework that it serves.

Each has `POST /charges/{order}`, `POST /streams`, both protected, and `GET /up`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from importlib import import_module
from typing import Any, TypeAlias

from idemredis.asgi import Idempotency

__all__ = ["FRAMEWORKS", "PIECES", "Charge", "build", "pieces"]

FRAMEWORKS = ("fastapi", "starlette", "litestar", "quart", "django")

Charge: TypeAlias = Callable[[], dict[str, Any]]
"""What a protected endpoint does; it returns what is sent as JSON."""

PIECES = [f"piece {n}\n".encode() for n in range(50)]
"""What `POST /streams` answers, one after the other."""


def build(framework: str, idempotency: Idempotency, charge: Charge, sync: bool = False) -> Any:
    """Return the application in a framework, without the middleware.

    The endpoint of the charges is a plain function if `sync`; otherwise it also returns the request's body.
    """
    return import_module(f"{__name__}.in_{framework}").build(idempotency, charge, sync)


async def pieces(charge: Charge) -> AsyncIterator[bytes]:
    charge()
    for piece in PIECES:
        yield piece
