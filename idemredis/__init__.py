"""Idempotency-Key for Python services: claim an operation in Redis before it runs, replay its response to retries."""

from .core.fingerprint import fingerprint_request, fingerprint_value
from .core.outcomes import InProgress, Replay, Reused, Row
from .core.reservation import AsyncReservation, Reservation
from .core.response import StoredResponse
from .errors import (
    AlreadyCompleted,
    ConfigurationError,
    CorruptRow,
    EffectDone,
    FencedOut,
    HoldForReview,
    IdempotencyError,
    InvalidKey,
    InvalidPrincipal,
    InvalidResponse,
    KeyInProgress,
    KeyReused,
    LedgerUnavailable,
    NoReservation,
    NotDurable,
    PreviousAttemptFailed,
)
from .events import Event
from .ledger import AsyncLedger, Ledger, current_reservation
from .policy import Policy

__all__ = [
    "AlreadyCompleted",
    "AsyncLedger",
    "AsyncReservation",
    "ConfigurationError",
    "CorruptRow",
    "EffectDone",
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
    "NoReservation",
    "NotDurable",
    "Policy",
    "PreviousAttemptFailed",
    "Replay",
    "Reservation",
    "Reused",
    "Row",
    "StoredResponse",
    "current_reservation",
    "fingerprint_request",
    "fingerprint_value",
]
