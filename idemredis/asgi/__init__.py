"""The ASGI middleware: claim before the endpoint runs, store its response, and replay it to every retry.

`_setup` has what an application sets up. `_middleware` runs the application, `_claim` claims, and `_outgoing` records
and settles. Nothing here imports a framework; FastAPI's own conveniences are in `idemredis.fastapi`.
"""

from typing import cast

from .. import ledger
from ..core.reservation import AsyncReservation
from ._middleware import IdempotencyMiddleware
from ._setup import Idempotency

__all__ = ["Idempotency", "IdempotencyMiddleware", "current_reservation"]

current_reservation: AsyncReservation = cast(AsyncReservation, ledger.current_reservation)
"""`idemredis.current_reservation`, typed for ASGI: await its `checkpoint`, which in a plain function blocks instead."""
