"""What a person does to a row by hand: release it, resolve it, forget it. Each is fenced to the row that was shown.

Each leaves one line in the log `idemredis.audit`: who, what, the row's digest, how it ended; no key, no principal.
"""

from __future__ import annotations

import getpass
import logging
import os
import secrets
from collections.abc import Callable
from contextlib import closing
from typing import Literal, TypeAlias

from ..core import operations
from ..core.keys import Identity
from ..core.outcomes import Lost, Row
from ..core.reservation import Lease, Reservation
from ..core.response import StoredResponse
from ..errors import FencedOut, IdempotencyError, LedgerUnavailable
from ..events import digest
from ..inspection.rows import RowSummary, look
from ..ledger import Ledger
from ..policy import LONGEST_RETENTION, Policy
from ..store.cluster import wire
from ..store.errors import ERRORS, WatchError, map_error
from ..store.evaluate import evaluate, raised
from ..store.nodes import holder

__all__ = ["Confirm", "Refused", "find", "forget", "release", "reservation_of", "resolve"]

audit = logging.getLogger("idemredis.audit")

Confirm: TypeAlias = Callable[[RowSummary], bool]
"""Shown the row, asked whether to go on."""

Action: TypeAlias = Literal["release", "resolve", "forget"]

LEASE = 30.0
"""Seconds for which a person's attempt holds a row between taking it over and storing the answer."""


class Refused(IdempotencyError):
    """The row is not in a state for it; the message says what to do instead. Nothing was changed."""


def find(ledger: Ledger, row: str) -> RowSummary | None:
    """Look at one row.

    Raises:
        LedgerUnavailable: Redis did not answer, or refused.
    """
    return look(ledger.client, holder(ledger.client, row), [row])[0]


def reservation_of(row: Row) -> Reservation:
    """Return the reservation that owns a row: its right is in the row, for whoever may read it."""
    return Reservation(
        row.identity, row.fingerprint, row.generation, row.owner, row.last_checkpoint, Lease(LEASE, 0.0), row.route
    )


def release(ledger: Ledger, identity: Identity, confirm: Confirm) -> bool:
    """End the lease of the attempt that was shown: its own writes are refused, and the next retry runs at once.

    Returns:
        False when the person did not confirm.

    Raises:
        Refused: the row is not pending.
        FencedOut: the row changed after it was shown; nothing was changed.
        LedgerUnavailable, CorruptRow: as `Ledger.read`.
    """
    found, row = _shown(ledger, identity)
    if row.status != "pending":
        raise Refused(f"the row is {row.status}, so no attempt holds it; `forget` would let a retry run it again")
    if not confirm(found):
        return False
    with _Audit("release", identity, row.generation), closing(_as_kept(ledger, row)) as kept:
        kept.release(reservation_of(row))
    return True


def resolve(ledger: Ledger, identity: Identity, response: StoredResponse, confirm: Confirm) -> bool:
    """Take a stale row over at the generation that was shown, and store the answer that a person found to be true.

    Returns:
        False when the person did not confirm.

    Raises:
        Refused: the row is finished, or an attempt still holds it.
        FencedOut: the row changed after it was shown; nothing was changed.
        LedgerUnavailable, CorruptRow: as `Ledger.read`. It may be stored all the same: look at the row again.
    """
    found, row = _shown(ledger, identity)
    if found.status == "pending":
        raise Refused(
            f"an attempt holds the row for {row.lease_left:.1f} s more; `release` it first if it is dead or hung"
        )
    if found.status != "stale":
        raise Refused(f"the row is {row.status} already; its answer is never replaced")
    if not confirm(found):
        return False
    with _Audit("resolve", identity, row.generation), closing(_as_kept(ledger, row)) as kept:
        take = operations.takeover(
            identity,
            row.generation,
            secrets.token_hex(8),
            row.fingerprint,
            kept.policy.lease,
            kept.policy.retention,
            row.route,
        )
        taken = raised(evaluate(wire(ledger.client), [take])[0])
        if isinstance(taken, Lost):
            raise FencedOut("the row changed after it was shown; nothing was changed: look at it again")
        kept.complete(taken, response)
    return True


def forget(ledger: Ledger, identity: Identity, confirm: Confirm) -> bool:
    """Delete a row that no attempt holds: a retry then runs as if for the first time, at generation 1.

    Returns:
        False when the person did not confirm.

    Raises:
        Refused: there is no such row, or an attempt holds it.
        FencedOut: the row changed after it was shown; nothing was changed.
        LedgerUnavailable: Redis did not answer, or refused.
    """
    node = holder(ledger.client, identity.row)
    try:
        with node.pipeline() as transaction:
            transaction.watch(identity.row)
            found = find(ledger, identity.row)
            if found is None:
                raise Refused("there is no such row")
            if found.row is not None and found.status == "pending":
                left = found.row.lease_left
                raise Refused(f"an attempt holds the row for {left:.1f} s more; `release` it first, or wait")
            if not confirm(found):
                return False
            with _Audit("forget", identity, found.generation):
                transaction.multi()
                transaction.delete(identity.row)
                try:
                    transaction.execute()
                except WatchError:
                    raise FencedOut(
                        "the row changed after it was shown; nothing was deleted: look at it again"
                    ) from None
                except ERRORS as error:
                    raise map_error(error, 0.0) from error
    except ERRORS as error:
        raise map_error(error, 0.0) from error
    return True


def _shown(ledger: Ledger, identity: Identity) -> tuple[RowSummary, Row]:
    row = ledger.read(identity.principal, identity.key, identity.operation)
    found = find(ledger, identity.row)
    if row is None or found is None:
        raise Refused("there is no such row")
    return found, row


def _as_kept(ledger: Ledger, row: Row) -> Ledger:
    """Return a ledger that keeps the row as long as its application does."""
    retention = min(max(row.retention, 1.0), LONGEST_RETENTION)
    policy = Policy(lease=min(LEASE, retention / 2), retention=retention, min_replicas=ledger.policy.min_replicas)
    return Ledger(ledger.client, policy, ledger.namespace)


class _Audit:
    """Writes the line when the action ends, however it ends."""

    def __init__(self, action: Action, identity: Identity, generation: int) -> None:
        self._facts = (action, digest(identity.row), generation)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        if error is None:
            ended = "done"
        elif isinstance(error, LedgerUnavailable) and error.unknown:
            ended = "not known whether done"
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
    """The user of the operating system, and who they were before sudo."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user has no name
        user = f"uid {os.getuid()}"
    before = os.environ.get("SUDO_USER")
    return f"{user} (as {before} before sudo)" if before else user
