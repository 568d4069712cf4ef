"""What the extension keeps for one application, and the options of one view."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..core.reservation import Reservation
from ..core.settle import OnError
from ..ledger import Ledger
from ..web.settings import Settings
from ._views import Views

if TYPE_CHECKING:
    from ._extension import Idempotency

__all__ = ["EXTENSION", "Options", "State"]

EXTENSION = "idemredis"
"""Key of the application's `State` in `app.extensions`."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `protect` for one view; None means the application's setting."""

    required: bool | None = None
    lease: float | None = None
    wait: float | None = None
    operation: str = ""
    on_error: OnError | None = None
    fingerprint: Callable[[], object] | None = None
    recover: Callable[[Reservation], Any] | None = None


@dataclass(frozen=True, slots=True)
class State:
    """What the extension keeps for one application."""

    extension: Idempotency
    ledger: Ledger
    settings: Settings
    views: Views = field(default_factory=Views)
