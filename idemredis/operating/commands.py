"""What can be asked of a ledger from a command line, and done to its rows by hand. The groups are in `cli`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from functools import cached_property
from itertools import islice
from typing import Any

import click

from ..core import scripts as lua
from ..core.keys import Identity, identify
from ..core.response import StoredResponse, storable_names
from ..errors import IdempotencyError, LedgerUnavailable
from ..inspection import doctor, rows
from ..inspection.rows import STATUSES, RowSummary
from ..ledger import Ledger
from ..store.clients import is_cluster
from ..store.errors import is_refusal
from ..store.nodes import ask, connect, primaries
from . import acl as acl_lines
from . import interventions
from . import tail as tailing
from .tables import (
    COLUMNS,
    as_dict,
    as_line,
    duration,
    in_words,
    print_event,
    print_json,
    printable,
    scanning,
    show_table,
    size,
)

__all__ = ["COMMANDS", "EXIT_CODES", "Aborted", "Session"]

COMMANDS: list[click.Command] = []

EXIT_CODES = "Exit codes: 0 done; 1 a problem was found, or it was refused; 2 cannot reach the server, or wrong usage."

LISTED = 100
"""Rows that `ls` shows, where nobody asks for more."""

EXAMINED = 1000
"""Rows that `doctor` looks at."""


class Aborted(IdempotencyError):
    """The person who was asked said no."""

    def __init__(self) -> None:
        super().__init__("left as it is")


class Session:
    """Which ledger the commands are about; reached when a command first needs it."""

    def __init__(self, url: str, namespace: str, timeout: float) -> None:
        self.namespace = namespace
        self._url = url
        self._timeout = timeout

    @cached_property
    def ledger(self) -> Ledger:
        """The ledger itself."""
        return Ledger(connect(self._url, self._timeout), namespace=self.namespace)

    def close(self) -> None:
        """Close what this session opened."""
        if "ledger" in self.__dict__:
            self.ledger.close()
            self.ledger.client.close()

    def identity(self, principal: str, operation: str, key: str) -> Identity:
        """Name a row."""
        return identify(self.namespace, principal, key, operation)


def _command(*options: Callable[[Any], Any]) -> Callable[[Callable[..., None]], click.Command]:
    """Make a command, with its options and `--json`."""

    def decorate(function: Callable[..., None]) -> click.Command:
        decorated: Any = click.pass_obj(function)
        for option in (click.option("--json", "as_json", is_flag=True, help="For machines."), *reversed(options)):
            decorated = option(decorated)
        command = click.command(function.__name__.rstrip("_"), epilog=EXIT_CODES)(decorated)
        COMMANDS.append(command)
        return command

    return decorate


_PRINCIPAL = click.argument("principal")
_KEY = click.argument("key")
_OPERATION = click.option("--operation", default="", help="Third part of the row's identity, where it has one.")
_YES = click.option("--yes", is_flag=True, help="Do not ask.")


@_command(
    click.option("--principal", default="", help="Only this one's rows."),
    click.option("--status", type=click.Choice(STATUSES), help="Only rows of this status."),
    click.option("--digest", default="", help="Only the row that logs and events call so (or whose digest begins so)."),
    click.option("--limit", type=click.IntRange(1), default=LISTED, show_default=True, help="Rows to show at most."),
)
def ls(session: Session, as_json: bool, principal: str, status: str | None, digest: str, limit: int) -> None:
    """List rows, those that want a look first."""
    with scanning(_names(session)) as passed:
        wanted = (
            found
            for found in rows.scan(session.ledger.client, session.namespace, principal, passed)
            if status in (None, found.status) and found.digest.startswith(digest)
        )
        shown = {found.identity.row: found for found in islice(wanted, limit + 1)}
    listed = sorted(shown.values(), key=lambda found: (STATUSES.index(found.status), found.claimed_at or 0.0))[:limit]
    if as_json:
        print_json([as_dict(found) for found in listed])
        return
    show_table(COLUMNS, [as_line(found) for found in listed])
    if len(shown) > limit:
        click.echo(f"more than {limit} rows; narrow it down, or raise --limit", err=True)


@_command(
    _PRINCIPAL,
    _KEY,
    _OPERATION,
    click.option("--body", is_flag=True, help="Print the stored body too: for the client's eyes, mostly."),
    click.option("--downstream", metavar="NAME", help="Print the key that the service NAME was given for this row."),
)
def show(
    session: Session, as_json: bool, principal: str, key: str, operation: str, body: bool, downstream: str | None
) -> None:
    """Show one row, decoded."""
    identity = session.identity(principal, operation, key)
    found = interventions.find(session.ledger, identity.row)
    if found is None:
        raise interventions.Refused("there is no such row: it was never claimed, or it expired")
    facts = as_dict(found)
    if found.status != "corrupt":
        row = session.ledger.read(principal, key, operation)
        if row is not None:
            facts |= {"fingerprint": row.fingerprint, "owner": row.owner, "retention": row.retention}
            facts["checkpoint_data"] = row.last_checkpoint[1] if row.last_checkpoint else None
            if row.response is not None:
                facts["headers"] = [list(pair) for pair in row.response.headers]
                if body:
                    facts["body"] = printable(row.response.body)
            if downstream:
                facts["downstream_key"] = interventions.reservation_of(row).downstream_key(downstream)
    if as_json:
        print_json(facts)
        return
    for name, value in facts.items():
        if value not in ("", None):
            click.echo(f"{name:<16} {in_words(name, value)}")


@_command()
def stats(session: Session, as_json: bool) -> None:
    """Count rows by status, and say what memory they need."""
    with scanning(_names(session)) as passed:
        found = rows.stats(session.ledger.client, session.namespace, passed)
    if as_json:
        print_json(asdict(found))
        return
    show_table(("STATUS", "ROWS"), [(status, str(found.counts[status])) for status in STATUSES])
    click.echo()
    oldest = "none" if found.oldest_pending is None else f"claimed {duration(found.oldest_pending)} ago"
    click.echo(f"oldest pending   {oldest}")
    click.echo(f"bytes per row    {'unknown' if found.row_bytes is None else f'{found.row_bytes:.0f} (sampled)'}")
    click.echo(f"rate             {found.rate * 60:.1f} new rows a minute")
    click.echo(f"a day's rows     {'unknown' if found.day_bytes is None else size(found.day_bytes)} at that rate")
    if found.lasting:
        click.echo(f"without a TTL    {found.lasting}: see `idemredis doctor`")


@_command(_PRINCIPAL, _KEY, _OPERATION, _YES)
def release(session: Session, as_json: bool, principal: str, key: str, operation: str, yes: bool) -> None:
    """End the lease of the attempt that holds a row: its writes are refused from now on, and the next retry runs."""
    identity = session.identity(principal, operation, key)
    question = "Release it? If its attempt is alive after all, the work may be done twice."
    done = interventions.release(session.ledger, identity, _confirm(question, yes))
    _settled(done, as_json, "released", "the client's next retry takes it over at once, at the next generation")


@_command(
    _PRINCIPAL,
    _KEY,
    _OPERATION,
    click.option("--status", type=click.IntRange(100, 999), required=True, help="Of the answer."),
    click.option("--body-file", type=click.File("rb"), help="Its body; - for stdin."),
    click.option("--header", "headers", multiple=True, metavar="'NAME: VALUE'", help="Of the answer; more than once."),
    _YES,
)
def resolve(
    session: Session,
    as_json: bool,
    principal: str,
    key: str,
    operation: str,
    status: int,
    body_file: Any,
    headers: tuple[str, ...],
    yes: bool,
) -> None:
    """Store the answer of a stale row by hand: every retry gets it, and nothing runs.

    For a row held for review, or one whose work you know to be done. Look downstream first (`show --downstream`).
    """
    identity = session.identity(principal, operation, key)
    response = _response(status, body_file.read() if body_file else b"", headers)
    question = f"Store {status} with {len(response.body)} bytes as its answer, for good?"
    done = interventions.resolve(session.ledger, identity, response, _confirm(question, yes))
    _settled(done, as_json, "completed", f"every retry is answered {status} from now on, and nothing runs")


@_command(_PRINCIPAL, _KEY, _OPERATION, _YES)
def forget(session: Session, as_json: bool, principal: str, key: str, operation: str, yes: bool) -> None:
    """Delete a row that no attempt holds: a retry then runs as if for the first time."""
    identity = session.identity(principal, operation, key)
    question = "Delete it? A retry will run the operation again, whatever was done before."
    done = interventions.forget(session.ledger, identity, _confirm(question, yes))
    _settled(done, as_json, "forgotten", "a retry runs the operation again, as generation 1")


@_command(
    click.option("--verbose", is_flag=True, help="Renewals too."),
    click.option("--seconds", type=click.FloatRange(0), help="End after so long; else at Ctrl-C."),
)
def tail(session: Session, as_json: bool, verbose: bool, seconds: float | None) -> None:
    """Print claims, takeovers, completions, fences and failures as they happen."""
    until = None if seconds is None else time.monotonic() + seconds
    with closing(tailing.Tail(session.ledger.client, session.namespace)) as listening:
        click.echo(f"idemredis: {_what_is_heard(listening)}; Ctrl-C ends", err=True)
        try:
            while until is None or time.monotonic() < until:
                for event in listening.look():
                    if event.what != "renewed" or verbose:
                        print_event(event, as_json)
        except KeyboardInterrupt:
            pass


@_command(click.argument("name", default=""))
def scripts(session: Session, as_json: bool, name: str) -> None:
    """Print the Lua as it is sent, numbered: all names, or the script NAME (or the one whose SHA begins so)."""
    loaded = lua.load()
    if not name:
        if as_json:
            print_json({script.name: script.sha for script in loaded.values()})
        else:
            show_table(("NAME", "SHA1"), [(script.name, script.sha) for script in loaded.values()])
        return
    for script in loaded.values():
        if name == script.name or (len(name) >= 4 and script.sha.startswith(name.lower())):
            if as_json:
                print_json(script._asdict())
                return
            click.echo(f"{script.name}  {script.sha}")
            for number, line in enumerate(script.text.splitlines(), 1):
                click.echo(f"{number:4}  {line}".rstrip())
            return
    raise click.BadParameter(f"there is no script {name!r}; there are {', '.join(loaded)}", param_hint="NAME")


@_command(click.option("--cluster", is_flag=True, help="For a cluster, where none can be reached to be asked."))
def acl(session: Session, as_json: bool, cluster: bool) -> None:
    """Print the ACL SETUSER lines for the application, and for people who look and who settle."""
    try:
        info = ask(primaries(session.ledger.client)[0], "INFO")
        cluster = cluster or is_cluster(session.ledger.client)
        setinfo = "valkey_version" in info or not info["redis_version"].startswith(("6.", "7.0."))
    except LedgerUnavailable:
        setinfo = True
        click.echo("idemredis: no server could be asked; these are for Redis 7.2 and later, and Valkey", err=True)
    users = acl_lines.users(session.namespace, cluster, setinfo)
    if as_json:
        print_json([{"role": user.role, "for": user.what_for, "line": user.line()} for user in users])
        return
    for user in users:
        click.echo(f"# {user.what_for}\n{user.line()}\n")


@_command(
    click.option("--read-only", is_flag=True, help="Do not try the scripts on scratch rows."),
    click.option("--sample", type=click.IntRange(0), default=EXAMINED, show_default=True, help="Rows to look at."),
)
def doctor_(session: Session, as_json: bool, read_only: bool, sample: int) -> None:
    """Examine the server: each line ok, unknown, warning or problem, with the reason and the command that mends it."""
    try:
        report = session.ledger.check(sample=sample, scratch=not read_only)
    except LedgerUnavailable as error:  # so early that there is no client to check
        report = doctor.unreachable(error)
    if as_json:
        print_json(report.as_dict())
    else:
        for finding in report.findings:
            where = f" ({finding.node})" if finding.node else ""
            click.echo(f"{finding.verdict:<8} {finding.check:<12} {finding.reason}{where}")
            if finding.fix:
                click.echo(f"{'':21} -> {finding.fix}")
    raise SystemExit(0 if report.healthy else 1 if report.reachable else 2)


def _confirm(question: str, yes: bool) -> interventions.Confirm:
    def confirm(found: RowSummary) -> bool:
        if yes:
            return True
        show_table(COLUMNS, [as_line(found)])
        return click.confirm(question, err=True)

    return confirm


def _what_is_heard(listening: tailing.Tail) -> str:
    if listening.sees_rows:
        return "listening"
    return (
        f"this server does not tell which rows are written ({listening.why_not}); "
        "listening to what applications with a Publisher tell"
    )


def _settled(done: bool, as_json: bool, what: str, next_: str) -> None:
    if not done:
        raise Aborted
    if as_json:
        print_json({"outcome": what})
    else:
        click.echo(f"{what}: {next_}")


def _response(status: int, body: bytes, headers: tuple[str, ...]) -> StoredResponse:
    pairs = []
    for header in headers:
        name, colon, value = header.partition(":")
        if not colon or not storable_names([name.strip()]):
            raise click.BadParameter(f"{header!r} is not NAME: VALUE, or is never replayed", param_hint="--header")
        pairs.append((name.strip(), value.strip()))
    if body and not any(name.lower() == "content-type" for name, _ in pairs):
        try:
            json.loads(body)
        except ValueError:
            raise click.UsageError("say what the body is: --header 'Content-Type: …'") from None
        pairs.append(("Content-Type", "application/json"))
    return StoredResponse(status, tuple(pairs), body)


def _names(session: Session) -> int:
    """How many keys there are on all servers, as far as they say."""
    total = 0
    for node in primaries(session.ledger.client):
        try:
            total += ask(node, "DBSIZE")
        except LedgerUnavailable as error:
            if not is_refusal(error.__cause__):
                raise
    return total
