"""What the extension keeps for one application."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..ledger import Ledger
from ..web.settings import Settings
from ._views import Views

if TYPE_CHECKING:
    from ._extension import Idempotency

__all__ = ["EXTENSION", "State"]

EXTENSION = "idemredis"
"""Key of the application's `State` in `app.extensions`."""


@dataclass(frozen=True, slots=True)
class State:
    """What the extension keeps for one application."""

    extension: Idempotency
    ledger: Ledger
    settings: Settings
    views: Views = field(default_factory=Views)
