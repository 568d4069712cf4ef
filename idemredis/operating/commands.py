"""The commands of `idemredis` and `flask idempotency`; `cli` and `in_flask` have their groups."""

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
from ..core.text import escaped
from ..core.tracebacks import Hidden
from ..errors import IdempotencyError, LedgerUnavailable
from ..inspection import doctor, rows
from ..inspection.rows import STATUSES, RowSummary
from ..ledger import Ledger
from ..store.clients import client, is_cluster, options
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

EXIT_CODES = (
    "Exit codes: 0 done; 1 a problem was found, or the action was refused; 2 server unreachable, or usage error."
)

DEFAULT_LIMIT = 100
"""Rows that `ls` lists by default; more do not fit a screen."""

DEFAULT_SAMPLE = 1000
"""Rows that `doctor` checks by default, in a fraction of a second."""


class Aborted(IdempotencyError):
    """The person did not confirm the action."""

    def __init__(self) -> None:
        super().__init__("aborted; the row was not changed")


class Session:
    """The ledger that the commands use; it connects when a command first needs it."""

    def __init__(self, url: str, namespace: str, timeout: float) -> None:
        self.namespace = namespace
        self._url = Hidden(url)
        self._timeout = timeout

    @cached_property
    def ledger(self) -> Ledger:
        """The ledger."""
        return Ledger(connect(self._url.value, self._timeout), namespace=self.namespace)

    @property
    def client_options(self) -> dict[str, Any]:
        """What the client's connections are made of; known even if no server can be reached."""
        return options(self.ledger.client if "ledger" in self.__dict__ else client(self._url.value, self._timeout))

    def close(self) -> None:
        """Close the connections that this session opened."""
        if "ledger" in self.__dict__:
            self.ledger.close()
            self.ledger.client.close()

    def identity(self, principal: str, operation: str, key: str) -> Identity:
        """Return the identity of a row."""
        return identify(self.namespace, principal, key, operation)


def _command(*options: Callable[[Any], Any]) -> Callable[[Callable[..., None]], click.Command]:
    """Make a command with these options and `--json`, and add it to `COMMANDS`."""

    def decorate(function: Callable[..., None]) -> click.Command:
        decorated: Any = click.pass_obj(function)
        for option in (click.option("--json", "as_json", is_flag=True, help="Print JSON."), *reversed(options)):
            decorated = option(decorated)
        command = click.command(function.__name__.rstrip("_"), epilog=EXIT_CODES)(decorated)
        COMMANDS.append(command)
        return command

    return decorate


_PRINCIPAL = click.argument("principal")
_KEY = click.argument("key")
_OPERATION = click.option("--operation", default="", help="Operation of the row, if it has one.")
_YES = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")


@_command(
    click.option("--principal", default="", help="Only rows of this principal."),
    click.option("--status", type=click.Choice(STATUSES), help="Only rows with this status."),
    click.option(
        "--digest", default="", help="Only the row with this digest, as in logs and events; a prefix will do."
    ),
    click.option(
        "--limit", type=click.IntRange(1), default=DEFAULT_LIMIT, show_default=True, help="List at most so many rows."
    ),
)
def ls(session: Session, as_json: bool, principal: str, status: str | None, digest: str, limit: int) -> None:
    """List rows, those that need attention first."""
    with scanning(_count_names(session)) as advance:
        wanted = (
            row
            for row in rows.scan(session.ledger.client, session.namespace, principal, advance)
            if status in (None, row.status) and row.digest.startswith(digest)
        )
        scanned = {row.identity.row: row for row in islice(wanted, limit + 1)}
    listed = sorted(scanned.values(), key=lambda row: (STATUSES.index(row.status), row.claimed_at or 0.0))[:limit]
    if as_json:
        print_json([as_dict(row) for row in listed])
        return
    show_table(COLUMNS, [as_line(row) for row in listed])
    if len(scanned) > limit:
        click.echo(f"more than {limit} rows; use --principal or --status, or raise --limit", err=True)


@_command(
    _PRINCIPAL,
    _KEY,
    _OPERATION,
    click.option("--body", is_flag=True, help="Print the stored body too; it may have the client's private data."),
    click.option("--downstream", metavar="NAME", help="Print the row's downstream key for the service NAME."),
)
def show(
    session: Session, as_json: bool, principal: str, key: str, operation: str, body: bool, downstream: str | None
) -> None:
    """Show one row, decoded."""
    identity = session.identity(principal, operation, key)
    summary = interventions.find(session.ledger, identity.row)
    if summary is None:
        raise interventions.Refused("there is no such row: it was never claimed, or it has expired")
    facts = as_dict(summary)
    if summary.status != "corrupt":
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
    """Count rows by status, and estimate the memory they need."""
    with scanning(_count_names(session)) as advance:
        totals = rows.stats(session.ledger.client, session.namespace, advance)
    if as_json:
        print_json(asdict(totals))
        return
    show_table(("STATUS", "ROWS"), [(status, str(totals.counts[status])) for status in STATUSES])
    click.echo()
    oldest = "none" if totals.oldest_pending is None else f"claimed {duration(totals.oldest_pending)} ago"
    click.echo(f"oldest pending   {oldest}")
    click.echo(f"bytes per row    {'unknown' if totals.row_bytes is None else f'{totals.row_bytes:.0f} (sampled)'}")
    click.echo(f"rate             {totals.rate * 60:.1f} new rows a minute")
    click.echo(f"memory per day   {'unknown' if totals.day_bytes is None else size(totals.day_bytes)} at that rate")
    if totals.lasting:
        click.echo(f"without a TTL    {totals.lasting}; run `idemredis doctor`")


@_command(_PRINCIPAL, _KEY, _OPERATION, _YES)
def release(session: Session, as_json: bool, principal: str, key: str, operation: str, yes: bool) -> None:
    """End the lease of the attempt that holds a row.

    The attempt's writes are refused from now on, and the client's next retry runs at once.
    """
    identity = session.identity(principal, operation, key)
    prompt = "Release this row? If its attempt is still alive, the work may be done twice."
    done = interventions.release(session.ledger, identity, _confirm(prompt, yes))
    _print_result(done, as_json, "released", "the client's next retry takes the row over at the next generation")


@_command(
    _PRINCIPAL,
    _KEY,
    _OPERATION,
    click.option("--status", type=click.IntRange(100, 999), required=True, help="Status of the response."),
    click.option("--body-file", type=click.File("rb"), help="File with the body; - for stdin."),
    click.option("--header", "headers", multiple=True, metavar="'NAME: VALUE'", help="A header; may be repeated."),
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
    """Store the response of a stale row by hand.

    Every retry gets this response, and nothing runs. Use it for a row that is held for review, or whose work is known
    to be done. Check with the downstream service first; `show --downstream` prints the key that it received.
    """
    identity = session.identity(principal, operation, key)
    response = _response(status, body_file.read() if body_file else b"", headers)
    prompt = f"Store status {status} and a body of {len(response.body)} bytes as the final response of this row?"
    done = interventions.resolve(session.ledger, identity, response, _confirm(prompt, yes))
    _print_result(done, as_json, "completed", f"every retry gets status {status} from now on, and nothing runs")


@_command(_PRINCIPAL, _KEY, _OPERATION, _YES)
def forget(session: Session, as_json: bool, principal: str, key: str, operation: str, yes: bool) -> None:
    """Delete a row that no attempt holds.

    A retry then runs the operation as a new claim, even if it was done before.
    """
    identity = session.identity(principal, operation, key)
    prompt = "Delete this row? A retry will run the operation again, even if it was done before."
    done = interventions.forget(session.ledger, identity, _confirm(prompt, yes))
    _print_result(done, as_json, "forgotten", "a retry runs the operation again, at generation 1")


@_command(
    click.option("--verbose", is_flag=True, help="Print renewals too."),
    click.option("--seconds", type=click.FloatRange(0), help="Stop after this time; default: at Ctrl-C."),
)
def tail(session: Session, as_json: bool, verbose: bool, seconds: float | None) -> None:
    """Print events as they happen.

    Events that write nothing, such as replays and fenced attempts, are shown if the application has a Publisher.
    """
    until = None if seconds is None else time.monotonic() + seconds
    with closing(tailing.Tail(session.ledger.client, session.namespace)) as listening:
        click.echo(f"idemredis: {_listening_to(listening)}; Ctrl-C to stop", err=True)
        try:
            while until is None or time.monotonic() < until:
                for event in listening.look():
                    if event.what != "renewed" or verbose:
                        print_event(event, as_json)
        except KeyboardInterrupt:
            pass


@_command(click.argument("name", default=""))
def scripts(session: Session, as_json: bool, name: str) -> None:
    """List the Lua scripts, or print one.

    NAME is a script's name or the first characters of its SHA1, as in SLOWLOG. Lines are numbered as in error messages.
    """
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
    raise click.BadParameter(f"there is no script {name!r}; the scripts are {', '.join(loaded)}", param_hint="NAME")


@_command(click.option("--cluster", is_flag=True, help="Print the lines for a cluster, even if none can be reached."))
def acl(session: Session, as_json: bool, cluster: bool) -> None:
    """Print the ACL SETUSER lines for each user.

    The users are the application, people who view rows, and people who also change them. Pass the application's URL:
    a database other than 0 and a client_name need rules of their own.
    """
    try:
        info = ask(primaries(session.ledger.client)[0], "INFO")
        cluster = cluster or is_cluster(session.ledger.client)
        setinfo = "valkey_version" in info or not info["redis_version"].startswith(("6.", "7.0."))
    except LedgerUnavailable:
        setinfo = True
        click.echo("idemredis: no server reachable; these lines are for Valkey, and Redis 7.2 or later", err=True)
    made_of = session.client_options
    users = acl_lines.users(
        session.namespace, cluster, setinfo, int(made_of.get("db") or 0), made_of.get("client_name")
    )
    if as_json:
        print_json([{"role": user.role, "for": user.what_for, "line": user.line()} for user in users])
        return
    for user in users:
        click.echo(f"# {user.what_for}\n{user.line()}\n")


@_command(
    click.option("--read-only", is_flag=True, help="Do not run the scripts on scratch rows."),
    click.option(
        "--sample", type=click.IntRange(0), default=DEFAULT_SAMPLE, show_default=True, help="Rows to check at most."
    ),
)
def doctor_(session: Session, as_json: bool, read_only: bool, sample: int) -> None:
    """Check the server, the client and some rows.

    Each finding is ok, unknown, warning or problem, with its reason and a command or setting that fixes it.
    """
    try:
        report = session.ledger.check(sample=sample, scratch=not read_only)
    except LedgerUnavailable as error:  # raised while connecting, so there is no client to check
        report = doctor.unreachable(error)
    if as_json:
        print_json(report.as_dict())
    else:
        for finding in report.findings:
            where = f" ({finding.node})" if finding.node else ""
            click.echo(f"{finding.verdict:<8} {finding.check:<12} {escaped(finding.reason)}{where}")
            if finding.fix:
                click.echo(f"{'':21} -> {escaped(finding.fix)}")
    raise SystemExit(0 if report.healthy else 1 if report.reachable else 2)


def _confirm(prompt: str, yes: bool) -> interventions.Confirm:
    def confirm(row: RowSummary) -> bool:
        if yes:
            return True
        show_table(COLUMNS, [as_line(row)])
        return click.confirm(prompt, err=True)

    return confirm


def _listening_to(listening: tailing.Tail) -> str:
    if listening.sees_rows:
        return "listening"
    return (
        f"this server does not report which rows are written ({listening.why_not}); "
        "listening to the events of applications with a Publisher only"
    )


def _print_result(done: bool, as_json: bool, what: str, next_: str) -> None:
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
            raise click.BadParameter(
                f"{header!r} is not of the form NAME: VALUE, or is a header that is never replayed",
                param_hint="--header",
            )
        pairs.append((name.strip(), value.strip()))
    if body and not any(name.lower() == "content-type" for name, _ in pairs):
        try:
            json.loads(body)
        except ValueError:
            raise click.UsageError("the body is not JSON; add its type with --header 'Content-Type: …'") from None
        pairs.append(("Content-Type", "application/json"))
    return StoredResponse(status, tuple(pairs), body)


def _count_names(session: Session) -> int:
    """Return the number of keys on all servers; servers that refuse DBSIZE are not counted."""
    total = 0
    for node in primaries(session.ledger.client):
        try:
            total += ask(node, "DBSIZE")
        except LedgerUnavailable as error:
            if not is_refusal(error.__cause__):
                raise
    return total
