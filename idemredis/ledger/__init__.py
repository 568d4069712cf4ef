"""`Ledger` and `AsyncLedger`, which run the flows of `core` on the clients of `store`.

Decisions belong in `core`. A change to one ledger needs the same change to the other; `base` and `agenda` are shared.
"""

from .aio import AsyncLedger
from .current import current_reservation
from .sync import Ledger

__all__ = ["AsyncLedger", "Ledger", "current_reservation"]
