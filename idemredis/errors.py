"""Every error that this package raises.

IdempotencyError
├── ConfigurationError     a setting or an argument is not supported
├── InvalidKey             the key is empty, too long or not printable ASCII
├── InvalidPrincipal       the principal is missing, blank or of the wrong type
├── InvalidResponse        the response cannot be stored
├── LedgerUnavailable      Redis was unreachable, refused the call, or was too slow
│   └── NotDurable         too few replicas acknowledged in time
├── CorruptRow             the row was not written by this ledger, or was edited
├── FencedOut              another attempt owns the row, or the row is gone
├── KeyInProgress          another attempt is running              (`reserve` and `once` only)
├── KeyReused              same key, another fingerprint           (`reserve`, `once` and `Effects`)
├── AlreadyCompleted       an earlier attempt finished             (`reserve` and `once` only)
│   └── EffectDone         its effect is in the SQL database       (`Effects` only)
├── PreviousAttemptFailed  an earlier attempt failed for good      (`reserve` and `once` only)
├── HoldForReview          raised by the application: leave the row pending for a person
└── NoReservation          `current_reservation` is used, and there is none
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from .core.response import StoredResponse

__all__ = [
    "AlreadyCompleted",
    "ConfigurationError",
    "CorruptRow",
    "EffectDone",
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
    """Base class of all errors of this package.

    Errors keep their class and facts when they are sent to another process, as worker pools and result backends do:
    by pickle, or as the class's name and `args`, which are plain JSON and the arguments of the class.
    """

    def __reduce__(self) -> tuple[object, ...]:
        return _revive, (type(self), self.args, self.__dict__)

    def __repr__(self) -> str:
        """Return the class and the message, without a stored response."""
        return f"{type(self).__name__}({str(self)!r})"


class ConfigurationError(IdempotencyError, ValueError):
    """A setting or an argument is not supported; the message names it, its value and the fix."""


class InvalidKey(IdempotencyError, ValueError):
    """The key is empty, longer than 255 characters, or not printable ASCII. The message never contains the key."""


class InvalidPrincipal(IdempotencyError, ValueError):
    """The principal is missing, blank, or not a str, int or UUID."""


class InvalidResponse(IdempotencyError, TypeError, ValueError):
    """The response cannot be stored: its body is not bytes, or its status or a header is invalid."""


class LedgerUnavailable(IdempotencyError):
    """Redis was unreachable, refused the call, or was too slow.

    Attributes:
        seconds: how long the call took until it failed.
        unknown: True if the script may have run or may still run, since a lost reply looks like a lost request; False
            if Redis replied that it did not run, or if it was never sent.
        reason: why, in a word: `timeout`, `connection`, `tls`, `credentials`, `denied`, `moved` (the server is one of a
            cluster, and the client is not a cluster client), `refused` (an error reply), `busy_pool` (all connections
            of the client's pool are in use, which says nothing about Redis), `replicas`, or "" if unknown.
    """

    def __init__(self, message: str, seconds: float = 0.0, unknown: bool = True, reason: str = "") -> None:
        super().__init__(message, seconds, unknown, reason)
        self.seconds = seconds
        self.unknown = unknown
        self.reason = reason

    def __str__(self) -> str:
        verdict = "it is not known whether it ran" if self.unknown else "it did not run"
        return f"{self.args[0]}; {verdict}"

    def after_lost_reply(self) -> None:
        """Note that the same call was sent before this one, and that its reply was lost: the script may have run."""
        if not self.unknown:
            self.unknown = True
            message = f"{self.args[0]}; the reply to an earlier try was lost"
            self.args = (message, self.seconds, True, self.reason)


class NotDurable(LedgerUnavailable):
    """Redis made the write, but fewer replicas than `min_replicas` acknowledged it in time.

    Attributes:
        acknowledged: how many replicas acknowledged the write.
        required: how many replicas must acknowledge it.
    """

    def __init__(self, message: str, acknowledged: int, required: int, seconds: float = 0.0) -> None:
        super().__init__(message, seconds, reason="replicas")
        self.args = (message, acknowledged, required, seconds)
        self.acknowledged = acknowledged
        self.required = required


class CorruptRow(IdempotencyError):
    """The row was not written by this ledger, or was edited. It is never run and never overwritten.

    Attributes:
        why: which field is wrong, and how.
        ttl: seconds until the row expires; None if it has no TTL, or if the TTL was not read.
    """

    def __init__(self, why: str, ttl: float | None = None) -> None:
        super().__init__(why, ttl)
        self.why = why
        self.ttl = ttl

    def __str__(self) -> str:
        return f"the row is corrupt ({self.why}); inspect it with redis-cli, and delete it once you know who wrote it"


class FencedOut(IdempotencyError):
    """This attempt no longer owns its row, which was taken over, has expired, or is finished. Nothing was changed.

    The work that the attempt did elsewhere may have been done twice.
    """


class KeyInProgress(IdempotencyError):
    """Another attempt of the same operation is running, or its lease has not ended yet.

    Attributes:
        retry_after: seconds left on its lease; 0.0 if it has none left.
    """

    def __init__(self, retry_after: float) -> None:
        super().__init__(retry_after)
        self.retry_after = retry_after

    def __str__(self) -> str:
        return f"another attempt holds this key, and its lease has {self.retry_after:.3f} s left; retry after that"


class KeyReused(IdempotencyError):
    """The key was used before for a different request: the fingerprints differ.

    Attributes:
        digest: identifies the row, as in `Event.digest`, if `Effects` raised this; "" otherwise.
    """

    def __init__(self, digest: str = "") -> None:
        super().__init__(*[digest] * bool(digest))
        self.digest = digest

    def __str__(self) -> str:
        return "this key was used before with another fingerprint; use a new key for a new operation"


class Finished(IdempotencyError):
    """An earlier attempt stored a response: the base class of the two errors that carry one."""

    _read: ClassVar[staticmethod[[Mapping[str, Any]], StoredResponse]]  # set by `core.response`

    def __init__(self, response: StoredResponse | Mapping[str, Any]) -> None:
        """Take the stored response, or what `args` has in its place: a mapping of JSON values."""
        self.response = self._read(response) if isinstance(response, Mapping) else response
        super().__init__(self.response.to_plain())


class AlreadyCompleted(Finished):
    """An earlier attempt completed the operation.

    Attributes:
        response: the stored response.
    """

    def __str__(self) -> str:
        omitted = f"; its result was not stored ({self.response.omitted})" if self.response.omitted else ""
        return f"this operation was completed before{omitted}"


class EffectDone(AlreadyCompleted):
    """An earlier attempt has committed the effect, and this attempt's transaction was rolled back.

    A protected view, or a function under `once`, may let it pass: it is answered with the response.

    Attributes:
        response: the response that was recorded with the effect.
        digest: identifies the row, as in `Event.digest`; "" means the row of the attempt that raises this.
    """

    def __init__(self, response: StoredResponse | Mapping[str, Any], digest: str = "") -> None:
        super().__init__(response)
        self.args = (*self.args, digest)
        self.digest = digest

    def __str__(self) -> str:
        return "the effect of this operation was committed before, and nothing was done again"


class PreviousAttemptFailed(Finished):
    """An earlier attempt of the operation failed for good; it is not run again.

    Attributes:
        response: the stored failure.
    """

    def __str__(self) -> str:
        return f"this operation failed before: {self.response.body[:200].decode('utf-8', 'replace')}"


class HoldForReview(IdempotencyError):
    """Raise this to leave the row pending until its lease ends, so that a person can look at it first."""


class NoReservation(IdempotencyError, LookupError, RuntimeError):
    """`current_reservation` is used, and no protected view or `once` function is running."""


def _revive(kind: type[IdempotencyError], args: tuple[object, ...], facts: dict[str, object]) -> IdempotencyError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(facts)
    return error
