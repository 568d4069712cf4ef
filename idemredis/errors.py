"""Every error this package raises, drawn once.

IdempotencyError
├── ConfigurationError     a setting, or how the ledger was made
├── InvalidKey             the key cannot name an operation
├── InvalidPrincipal       there is no principal to scope the key to
├── InvalidResponse        an answer that cannot be stored
├── LedgerUnavailable      Redis was unreachable, refused or too slow
│   └── NotDurable         too few replicas acknowledged in time
├── CorruptRow             what is stored under the name is not a row of ours
├── FencedOut              another attempt owns the row now, or the row is gone
├── KeyInProgress          another attempt is running          (raised by adapters only)
├── KeyReused              same key, another fingerprint       (raised by adapters only)
├── AlreadyCompleted       it was done before                  (raised by adapters only)
├── PreviousAttemptFailed  it failed for good before           (raised by adapters only)
├── HoldForReview          raised by a recover function: a person must decide
└── NoReservation          `current_reservation` is used where nothing is reserved
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .core.response import StoredResponse

__all__ = [
    "AlreadyCompleted",
    "ConfigurationError",
    "CorruptRow",
    "FencedOut",
    "HoldForReview",
    "IdempotencyError",
    "InvalidKey",
    "InvalidPrincipal",
    "InvalidResponse",
    "KeyInProgress",
    "KeyReused",
    "LedgerUnavailable",
    "NoReservation",
    "NotDurable",
    "PreviousAttemptFailed",
]


class IdempotencyError(Exception):
    """The root of every error of this package. All can be pickled: worker pools do that with what a task raises."""

    def __reduce__(self) -> tuple[object, ...]:
        return _revive, (type(self), self.args, self.__dict__)


class ConfigurationError(IdempotencyError, ValueError):
    """A setting that cannot work; the message names it, its value and the fix."""


class InvalidKey(IdempotencyError, ValueError):
    """A key that is empty, longer than 255 characters, or not printable ASCII. The message does not repeat it."""


class InvalidPrincipal(IdempotencyError, ValueError):
    """A principal that is missing, blank, or not a str, int or UUID."""


class InvalidResponse(IdempotencyError, TypeError, ValueError):
    """An answer that cannot be stored: a body that is not bytes, no HTTP status, a header that is not text."""


class LedgerUnavailable(IdempotencyError):
    """Redis was unreachable, refused, or too slow.

    Attributes:
        seconds: how long the call took until it failed.
        unknown: True when the script may have run all the same, or may still run (a lost reply looks like a lost
            request); False when Redis answered that it did not.
    """

    def __init__(self, message: str, *, seconds: float = 0.0, unknown: bool = True) -> None:
        super().__init__(message)
        self.seconds = seconds
        self.unknown = unknown

    def __str__(self) -> str:
        verdict = "it is not known whether it ran" if self.unknown else "it did not run"
        return f"{super().__str__()}; {verdict}"


class NotDurable(LedgerUnavailable):
    """The write was made, but fewer replicas than `min_replicas` acknowledged it in time.

    Attributes:
        acknowledged: how many did.
        required: how many had to.
    """

    def __init__(self, message: str, *, acknowledged: int, required: int, seconds: float = 0.0) -> None:
        super().__init__(message, seconds=seconds, unknown=True)
        self.acknowledged = acknowledged
        self.required = required


class CorruptRow(IdempotencyError):
    """What is stored under the row's name is not a row of this ledger. It is never run and never overwritten.

    Attributes:
        why: which field is wrong, and how.
        ttl: seconds until it expires; None where it never does, or where that was not read.
    """

    def __init__(self, why: str, ttl: float | None = None) -> None:
        super().__init__(
            f"the row is corrupt ({why}); look at it with redis-cli, and delete it once you know what it is"
        )
        self.why = why
        self.ttl = ttl


class FencedOut(IdempotencyError):
    """This attempt no longer owns its row: it was taken over, has expired, or is finished. Nothing was changed.

    What the attempt did elsewhere may have been done twice.
    """


class KeyInProgress(IdempotencyError):
    """Another attempt of the same operation is running, or waits for its lease to end.

    Attributes:
        retry_after: seconds left on its lease; 0.0 when there are none.
    """

    def __init__(self, retry_after: float) -> None:
        super().__init__(f"another attempt holds this key; its lease has {retry_after:.3f} s left")
        self.retry_after = retry_after


class KeyReused(IdempotencyError):
    """The key was used before for something else: its fingerprint differs."""

    def __init__(self) -> None:
        super().__init__("this key was used before with another fingerprint; a new operation needs a new key")


class AlreadyCompleted(IdempotencyError):
    """The operation was done before.

    Attributes:
        response: what it answered.
    """

    def __init__(self, response: StoredResponse) -> None:
        kept = f"; its result was not kept ({response.omitted})" if response.omitted else ""
        super().__init__(f"this operation was completed before{kept}")
        self.response = response


class PreviousAttemptFailed(IdempotencyError):
    """The operation failed for good before, and is not run again.

    Attributes:
        response: the stored failure.
    """

    def __init__(self, response: StoredResponse) -> None:
        super().__init__(f"this operation failed before: {response.body[:200].decode('utf-8', 'replace')}")
        self.response = response


class HoldForReview(IdempotencyError):
    """Raise it in a recover function to leave the row pending until a person has looked."""


class NoReservation(IdempotencyError, LookupError, RuntimeError):
    """`current_reservation` is used where no protected view and no `once` function is running."""


def _revive(kind: type[IdempotencyError], args: tuple[object, ...], facts: dict[str, object]) -> IdempotencyError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(facts)
    return error
