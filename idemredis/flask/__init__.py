"""The Flask extension: claim before the view runs, store its response, and replay it to every retry.

`_extension` sets an application up. `_request` claims, refuses and replays. `_exchange` follows a request through Flask
to its end. Code without Flask is in `web/`.
"""

from ..ledger import current_reservation
from ._extension import Idempotency

__all__ = ["Idempotency", "current_reservation"]
