"""Release, resolve or forget a row by hand; each acts only on the row as it was shown to the person.

Each writes one line to the log `idemredis.audit`: the user, the action, the row's digest and the result, but no key and
no principal.
"""

from __future__ import annotations

import logging
import os
import pwd
import secrets
from collections.abc import Callable
from contextlib import closing
from typing import Literal, TypeAlias

from ..core import operations
from ..core.keys import Identity
from ..core.outcomes import Lost, Row
from ..core.reservation import Lease, Reservation
from ..core.response import StoredResponse
from ..core.text import escaped
from ..errors import CorruptRow, FencedOut, IdempotencyError, LedgerUnavailable
from ..events import digest
from ..inspection.rows import RowSummary, look
from ..ledger import Ledger
from ..policy import LONGEST_RETENTION, Policy
from ..store.cluster import wire
from ..store.errors import ERRORS, WatchError, map_error, note_unsent
from ..store.evaluate import evaluate, raised
from ..store.nodes import holder, watching

__all__ = [
    "FINAL_STATUSES",
    "Confirm",
    "NoSuchRow",
    "Refused",
    "find",
    "forget",
    "read",
    "release",
    "reservation_of",
    "resolve",
]

audit = logging.getLogger("idemredis.audit")

Confirm: TypeAlias = Callable[[RowSummary], bool]
"""Shows the row to the person, and returns whether they confirm."""

Action: TypeAlias = Literal["release", "resolve", "forget"]

MAX_USER = 32
"""Characters of a user's name, as on Linux."""

LEASE = 30.0
"""Seconds between taking a row over and storing its response; both follow at once."""


FINAL_STATUSES = range(200, 600)
"""Statuses of a final response (RFC 9110 §15.2: a 1xx is not one). Every retry gets the one that a person supplies."""


class Refused(IdempotencyError):
    """The row's state does not allow the action. Nothing was changed.

    Attributes:
        instead: the action that the message names as the alternative; "" if there is none.
    """

    def __init__(self, message: str, instead: Literal["release", "forget", ""] = "") -> None:
        super().__init__(message, instead)
        self.instead = instead

    def __str__(self) -> str:
        return str(self.args[0])


class NoSuchRow(Refused):
    """There is no such row."""

    def __init__(self, message: str = "there is no such row: it was never claimed, or it has expired") -> None:
        super().__init__(message)


def find(ledger: Ledger, row: str) -> RowSummary | None:
    """Return the summary of one row, or None if there is none.

    Raises:
        LedgerUnavailable: Redis was unreachable, refused the call, or was too slow.
    """
    return look(ledger.client, holder(ledger.client, row), [row])[0]


def read(ledger: Ledger, identity: Identity) -> Row | None:
    """Return one row with its body, or None if there is none.

    Raises:
        LedgerUnavailable: Redis was unreachable, refused the call, or was too slow.
        CorruptRow: the row was not written by this ledger, or was edited.
    """
    row: Row | None = raised(evaluate(wire(ledger.client), [operations.read(identity)])[0])
    return row


def reservation_of(row: Row) -> Reservation:
    """Return the reservation that owns a row; whoever can read the row has its owner token."""
    return Reservation(
        row.identity, row.fingerprint, row.generation, row.owner, row.last_checkpoint, Lease(LEASE, 0.0), row.route
    )


def release(ledger: Ledger, identity: Identity, confirm: Confirm) -> bool:
    """End the lease of the attempt that was shown, so that its writes are refused and the next retry runs at once.

    Returns:
        False if the person did not confirm.

    Raises:
        Refused: the row is not pending.
        FencedOut: the row changed after it was shown; nothing was changed.
        LedgerUnavailable: Redis was unreachable, refused the call, or was too slow.
        CorruptRow: the row was not written by this ledger, or was edited.
    """
    found, row = _shown(ledger, identity)
    if row.status != "pending":
        raise Refused(
            f"the row is {row.status}, so no attempt holds it; forget it to let a retry run it again", "forget"
        )
    if not confirm(found):
        return False
    with _Audit("release", identity, row.generation), closing(_with_retention_of(row, ledger)) as own:
        own.release(reservation_of(row))
    return True


def resolve(ledger: Ledger, identity: Identity, response: StoredResponse, confirm: Confirm) -> bool:
    """Take a stale row over at the generation that was shown, and store the response that a person supplies.

    Returns:
        False if the person did not confirm.

    Raises:
        Refused: the row is finished, or an attempt still holds it.
        FencedOut: the row changed after it was shown; nothing was changed.
        LedgerUnavailable: the response may or may not have been stored; look at the row again.
        CorruptRow: the row was not written by this ledger, or was edited.
    """
    if response.status not in FINAL_STATUSES:
        raise Refused(f"{response.status} is not the status of a final response; give one from 200 to 599")
    found, row = _shown(ledger, identity)
    if found.status == "pending":
        raise Refused(
            f"an attempt holds the row for {row.lease_left:.1f} s more; release the row first if it is dead or hung",
            "release",
        )
    if found.status not in ("stale", "released"):
        raise Refused(f"the row is {row.status} already; its response is never replaced")
    if not confirm(found):
        return False
    with _Audit("resolve", identity, row.generation), closing(_with_retention_of(row, ledger)) as own:
        take = operations.takeover(
            identity,
            row.generation,
            secrets.token_hex(8),
            row.fingerprint,
            own.policy.lease,
            own.policy.retention,
            row.route,
        )
        taken = raised(evaluate(wire(ledger.client), [take])[0])
        if isinstance(taken, Lost):
            raise FencedOut("the row changed after it was shown; nothing was changed: look at the row again")
        own.complete(taken, response)
    return True


def forget(ledger: Ledger, identity: Identity, confirm: Confirm) -> bool:
    """Delete a row that no attempt holds, so that a retry runs as a new claim at generation 1.

    Returns:
        False if the person did not confirm.

    Raises:
        Refused: there is no such row, or an attempt holds it.
        FencedOut: the row changed after it was shown; nothing was changed.
        LedgerUnavailable: Redis was unreachable, refused the call, or was too slow.
    """
    try:
        with watching(ledger.client, identity.row) as watched:
            found = find(ledger, identity.row)
            if found is None:
                raise NoSuchRow
            if found.row is not None and found.status == "pending":
                left = found.row.lease_left
                message = f"an attempt holds the row for {left:.1f} s more; release the row first, or wait"
                raise Refused(message, "release")
            if not confirm(found):
                return False
            with _Audit("forget", identity, found.generation):
                try:
                    watched.delete()
                except WatchError:
                    raise FencedOut(
                        "the row changed after it was shown; nothing was deleted: look at the row again"
                    ) from None
                except ERRORS as error:
                    raise map_error(error, 0.0) from error
    except ERRORS as error:
        note_unsent(error)  # it was only to be watched
        raise map_error(error, 0.0) from error
    return True


def _shown(ledger: Ledger, identity: Identity) -> tuple[RowSummary, Row]:
    row = read(ledger, identity)
    found = find(ledger, identity.row)
    if row is None or found is None:
        raise NoSuchRow
    if found.row is None:
        raise CorruptRow(found.why, found.ttl)
    return found, row


def _with_retention_of(row: Row, ledger: Ledger) -> Ledger:
    """Return a ledger with the row's own retention, which may differ from this host's policy."""
    retention = min(max(row.retention, 1.0), LONGEST_RETENTION)
    policy = Policy(lease=min(LEASE, retention / 2), retention=retention, min_replicas=ledger.policy.min_replicas)
    return Ledger(ledger.client, policy, ledger.namespace)


class _Audit:
    """Write the audit line when the action ends, whether it succeeds or raises."""

    def __init__(self, action: Action, identity: Identity, generation: int) -> None:
        self._facts = (action, digest(identity.row), generation)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        if error is None:
            ended = "done"
        elif isinstance(error, LedgerUnavailable) and error.unknown:
            ended = "unknown, the reply was lost"
        else:
            ended = f"refused ({type(error).__name__})"
        action, row, generation = self._facts
        audit.info(
            "%s by %s: row %s generation %d: %s",
            action,
            _who(),
            row,
            generation,
            ended,
            extra={"audit": {"action": action, "who": _who(), "row": row, "generation": generation, "ended": ended}},
        )


def _who() -> str:
    """Return the process's user, and `SUDO_USER` in parentheses if it is set.

    The user comes from the kernel, because anybody can set LOGNAME and USER. Anybody can set SUDO_USER, too, so it is
    only added to the user, cut to the length of a user's name.
    """
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's user has no name
        user = f"uid {os.getuid()}"
    before = os.environ.get("SUDO_USER", "")[:MAX_USER]
    return escaped(f"{user} (SUDO_USER {before})" if before else user)
