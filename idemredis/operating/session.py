"""Shared parts of the commands: the ledger, the row that a command is about, and the common options."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Callable
from functools import cached_property
from typing import Any

import click

from ..core.keys import Identity, identify, row_prefix
from ..core.tracebacks import Hidden
from ..errors import LedgerUnavailable
from ..inspection import rows
from ..inspection.rows import ALL_OF_DIGEST
from ..inspection.suggestions import command_line, where
from ..ledger import Ledger
from ..store.clients import client, options
from ..store.errors import is_refusal
from ..store.nodes import ask, connect, primaries
from . import interventions
from .tables import scanning

__all__ = ["COMMANDS", "EXIT_CODES", "Session", "by_digest", "command", "count_keys", "row_command"]

COMMANDS: list[click.Command] = []

EXIT_CODES = (
    "Exit codes: 0 done; 1 a problem was found, or the action was refused; 2 server unreachable, or usage error."
)


class Session:
    """The ledger that the commands use; it connects when a command first needs it.

    Attributes:
        namespace: first part of the rows' names.
        chosen: the row that a command is about, as its arguments in a shell; "" if there is none.
    """

    def __init__(self, url: str, namespace: str, timeout: float) -> None:
        self.namespace = namespace
        self.chosen = ""
        self._url = Hidden(url)
        self._timeout = timeout

    @cached_property
    def ledger(self) -> Ledger:
        """The ledger."""
        return Ledger(connect(self._url.value, self._timeout), namespace=self.namespace)

    def change(self, *, url: str | None = None, namespace: str | None = None, timeout: float | None = None) -> None:
        """Use another server, namespace or timeout; before the first use of the ledger."""
        self._url = self._url if url is None else Hidden(url)
        self._timeout = self._timeout if timeout is None else timeout
        self.namespace = self.namespace if namespace is None else namespace

    @property
    def command(self) -> str:
        """The beginning of a command for this ledger that can be pasted into a shell."""
        return command_line(self.ledger.client, self.namespace)

    @property
    def client_options(self) -> dict[str, Any]:
        """The options of the client's connections; known even if no server can be reached."""
        return options(self.ledger.client if "ledger" in self.__dict__ else client(self._url.value, self._timeout))

    def close(self) -> None:
        """Close the connections that this session opened."""
        if "ledger" in self.__dict__:
            self.ledger.close()
            self.ledger.client.close()

    def identity(self, principal: str, operation: str, key: str) -> Identity:
        """Return the identity of a row."""
        return identify(self.namespace, principal, key, operation)


def command(*options: Callable[[Any], Any]) -> Callable[[Callable[..., None]], click.Command]:
    """Make a command with these options and `--json`, and add it to `COMMANDS`."""

    def decorate(function: Callable[..., None]) -> click.Command:
        decorated: Any = click.pass_obj(function)
        for option in (click.option("--json", "as_json", is_flag=True, help="Print JSON."), *reversed(options)):
            decorated = option(decorated)
        command = click.command(function.__name__.rstrip("_"), epilog=EXIT_CODES)(decorated)
        COMMANDS.append(command)
        return command

    return decorate


_WHICH = (
    click.argument("principal", default=""),
    click.argument("key", default=""),
    click.option("--operation", default="", help="Operation of the row, if it has one."),
    click.option("--digest", default="", help="The row with this digest, as in logs and events, in place of its key."),
    click.option(
        "--row", "name", default="", metavar="NAME", help="The row with this name in Redis, in place of its key."
    ),
)


def row_command(*options: Callable[[Any], Any]) -> Callable[[Callable[..., None]], click.Command]:
    """Make a command about one row: by principal and key, by digest, or by its name in Redis."""

    def decorate(function: Callable[..., None]) -> click.Command:
        @functools.wraps(function)
        def run(
            session: Session, principal: str, key: str, operation: str, digest: str, name: str, **given: Any
        ) -> None:
            identity = _chosen(session, principal, key, operation, digest, name)
            try:
                function(session, identity=identity, **given)
            except interventions.NoSuchRow as error:
                if identity.key and not digest and not name:
                    raise interventions.NoSuchRow(_elsewhere(session, identity, str(error))) from None
                raise

        return command(*_WHICH, *options)(run)

    return decorate


def _chosen(session: Session, principal: str, key: str, operation: str, digest: str, name: str) -> Identity:
    """Return the identity of the row that the arguments name."""
    ways = [bool(principal or key), bool(digest), bool(name)]
    if sum(ways) != 1 or (ways[0] and not key) or (operation and not ways[0]):
        raise click.UsageError("name one row: PRINCIPAL KEY [--operation NAME], or --digest DIGEST, or --row NAME")
    if digest:
        session.chosen = f"--digest {shlex.quote(digest)}"
        return by_digest(session, digest)
    if name:
        session.chosen = f"--row {shlex.quote(name)}"
        if not name.startswith(prefix := row_prefix(session.namespace)):
            raise click.BadParameter(
                f"it is not in the namespace {session.namespace!r}; the names of its rows begin with {prefix!r}",
                param_hint="--row",
            )
        return rows.identity_of(name)
    words = ["--operation", operation] if operation else []
    words += ["--"] if principal.startswith("-") or key.startswith("-") else []
    session.chosen = shlex.join([*words, principal, key])
    return session.identity(principal, operation, key)


def by_digest(session: Session, digest: str) -> Identity:
    if not re.fullmatch(f"[0-9a-f]{{4,{ALL_OF_DIGEST}}}", digest):
        raise click.BadParameter(f"a digest has {ALL_OF_DIGEST} hex digits; 4 or more will do", param_hint="--digest")
    with scanning(count_keys(session)) as advance:
        found = rows.find_digest(session.ledger.client, session.namespace, digest, advance)
    if not found:
        raise interventions.NoSuchRow(
            f"no row has the digest {digest}: it has expired, or is not in namespace {session.namespace!r} in "
            f"{where(session.ledger.client)}"
        )
    if len(found) > 1:
        raise interventions.Refused(f"{len(found)} rows have a digest that begins with {digest}; give more digits")
    return rows.identity_of(found[0])


def _elsewhere(session: Session, identity: Identity, message: str) -> str:
    """Return the message that there is no such row, with the operations under which its key exists."""
    operations = rows.find_operations(session.ledger.client, session.namespace, identity.principal, identity.key)
    if not operations:
        return message
    names = [f"with --operation {shlex.quote(name)}" if name else "without --operation" for name in operations]
    asked = f"with operation {identity.operation!r}" if identity.operation else "without an operation"
    return f"there is no such row {asked}; this key exists {' and '.join(names)}"


def count_keys(session: Session) -> int:
    """Return the number of keys on all servers; servers that refuse DBSIZE are not counted."""
    total = 0
    for node in primaries(session.ledger.client):
        try:
            total += ask(node, "DBSIZE")
        except LedgerUnavailable as error:
            if not is_refusal(error.__cause__):
                raise
    return total
