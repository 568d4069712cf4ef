"""`Ledger` and `AsyncLedger`: they drive the flows of `core` over the clients of `store`, and decide nothing.

A change here is made on both faces; what they share is in `base` and `agenda`.
"""

from .aio import AsyncLedger
from .current import current_reservation
from .sync import Ledger

__all__ = ["AsyncLedger", "Ledger", "current_reservation"]
