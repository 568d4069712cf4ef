"""The Flask door: claim before the view, store what the client saw, replay it to every retry.

`_extension` sets an application up, `_request` serves one request. What both doors share is in `web/`.
"""

from ..ledger import current_reservation
from ._extension import Idempotency

__all__ = ["Idempotency", "current_reservation"]
