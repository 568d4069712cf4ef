"""The Idempotency-Key ledger: claim an operation in Redis before it runs, and replay its answer to every retry."""

from .errors import (
    AlreadyCompleted,
    ConfigurationError,
    CorruptRow,
    FencedOut,
    HoldForReview,
    IdempotencyError,
    InvalidKey,
    InvalidPrincipal,
    InvalidResponse,
    KeyInProgress,
    KeyReused,
    LedgerUnavailable,
    NotDurable,
    PreviousAttemptFailed,
)
from .events import Event
from .fingerprint import fingerprint_request, fingerprint_value
from .operations import InProgress, Replay, Reservation, Reused, Row
from .policy import Policy
from .responses import StoredResponse
from .worker import AsyncLedger, Ledger

__all__ = [
    "AlreadyCompleted",
    "AsyncLedger",
    "ConfigurationError",
    "CorruptRow",
    "Event",
    "FencedOut",
    "HoldForReview",
    "IdempotencyError",
    "InProgress",
    "InvalidKey",
    "InvalidPrincipal",
    "InvalidResponse",
    "KeyInProgress",
    "KeyReused",
    "Ledger",
    "LedgerUnavailable",
    "NotDurable",
    "Policy",
    "PreviousAttemptFailed",
    "Replay",
    "Reservation",
    "Reused",
    "Row",
    "StoredResponse",
    "fingerprint_request",
    "fingerprint_value",
]
