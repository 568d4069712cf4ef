"""The commands of `idemredis` and `flask idempotency`; `cli` and `in_flask` have their groups."""

from __future__ import annotations

import json
import os
import shlex
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import click

from ..core import scripts as lua
from ..core.keys import Identity
from ..core.response import StoredResponse, storable_names
from ..core.text import escaped
from ..errors import IdempotencyError, LedgerUnavailable
from ..inspection import doctor, survey
from ..inspection.rows import STATUSES, RowSummary, Status
from ..inspection.suggestions import URL_VARIABLE, command_line, redis_cli, where
from ..store.clients import is_cluster
from ..store.nodes import ask, holder, primaries
from . import acl as acl_lines
from . import interventions
from . import tail as tailing
from .interventions import FINAL_STATUSES
from .session import COMMANDS, Session, by_digest, command, count_keys, row_command
from .tables import (
    COLUMNS,
    Column,
    as_dict,
    as_line,
    duration,
    in_words,
    paragraph,
    print_coloured,
    print_event,
    print_fact,
    print_json,
    printable,
    scanning,
    several,
    show_table,
    size,
)

__all__ = ["COMMANDS", "Aborted", "note_password"]

DEFAULT_LIMIT = 100
"""Rows that `ls` lists by default; more do not fit a screen."""

DEFAULT_SAMPLE = 1000
"""Rows that `doctor` checks by default, in a fraction of a second."""

RECONNECT_GAP = 0.5
"""Seconds between two tries of `tail` to connect again."""

NAMES = 16
"""Width of the names of facts."""


class Aborted(IdempotencyError):
    """The person did not confirm the action."""

    def __init__(self) -> None:
        super().__init__("aborted; the row was not changed")


_YES = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")


@command(
    click.option("--principal", default="", help="Only rows of this principal."),
    click.option("--status", type=click.Choice(STATUSES), help="Only rows with this status."),
    click.option("--all", "everything", is_flag=True, help="Finished rows too, after all others."),
    click.option("--digest", default="", help="Only the row with this digest, as in logs and events."),
    click.option(
        "--limit", type=click.IntRange(1), default=DEFAULT_LIMIT, show_default=True, help="List at most this many rows."
    ),
)
def ls(
    session: Session, as_json: bool, principal: str, status: Status | None, everything: bool, digest: str, limit: int
) -> None:
    """List the rows that need attention, those that need it most first.

    All rows are scanned. First come corrupt rows, then stale ones, whose attempt died, then those that have been
    running for longer than their lease lasts, then released ones, and all others that are running. Finished rows are
    listed with --all or --status.
    """
    if digest:
        found = interventions.find(session.ledger, by_digest(session, digest).row)
        _list([found] if found else [], as_json)
        return
    wanted = frozenset([status] if status else STATUSES) - (frozenset() if status or everything else survey.FINISHED)
    keys = count_keys(session)
    began = time.monotonic()
    with scanning(keys) as advance:
        listing = survey.worst(
            session.ledger.client, session.namespace, principal, limit=limit, statuses=wanted, advance=advance
        )
    _list(listing.rows, as_json)
    _note(session, listing, wanted, principal, keys, time.monotonic() - began)


def _list(found: list[RowSummary], as_json: bool) -> None:
    if as_json:
        print_json([as_dict(row) for row in found])
    else:
        show_table(COLUMNS, [as_line(row) for row in found])


def _note(
    session: Session, listing: survey.Listing, wanted: frozenset[Status], principal: str, keys: int, seconds: float
) -> None:
    """Print what was scanned, and why rows are missing from the list, to stderr."""
    total = sum(listing.counts.values())
    if not total:
        of = f" of principal {principal!r}" if principal else ""
        place = f"namespace {session.namespace!r} in {where(session.ledger.client)}, which has {several(keys, 'key')}"
        cause = "if there should be some, the application uses another namespace, database, or server"
        click.echo(paragraph(f"there are no rows{of} in {place}; {cause}", err=True), err=True)
        return
    counted = ", ".join(f"{listing.counts[status]:,} {status}" for status in STATUSES if listing.counts[status])
    rate = f", {keys / seconds:,.0f} keys/s" if seconds > 1 else ""
    click.echo(paragraph(f"{several(total, 'row')} scanned in {seconds:.1f} s{rate}: {counted}", err=True), err=True)
    matching = sum(listing.counts[status] for status in wanted)
    if matching > len(listing.rows) >= 1:
        more = f"more than {len(listing.rows)} rows; use --principal or --status, or raise --limit"
        click.echo(paragraph(more, err=True), err=True)
    elif not matching:
        click.echo("none of them is to be listed; use --all for finished rows", err=True)


@row_command(
    click.option("--body", is_flag=True, help="Print the stored body too; it may have the client's private data."),
    click.option("--downstream", metavar="NAME", help="Print the row's downstream key for the service NAME."),
)
def show(session: Session, as_json: bool, identity: Identity, body: bool, downstream: str | None) -> None:
    """Show one row, decoded."""
    summary = interventions.find(session.ledger, identity.row)
    if summary is None:
        raise interventions.NoSuchRow
    facts = as_dict(summary)
    if summary.status != "corrupt":
        row = interventions.read(session.ledger, identity)
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
    unknown = {"since_claim"} | ({"body_bytes"} if facts["response_status"] is None else set())
    unknown |= {"generation", "age"} if summary.status == "corrupt" or summary.ttl is None else set()
    for name, value in facts.items():
        if name == "ttl" and value is None:
            print_fact(name, "never expires, since somebody removed the TTL", NAMES)
        elif value not in ("", None) and name not in unknown:
            print_fact(name, in_words(name, value, summary.status), NAMES)
    if summary.status == "corrupt" or summary.ttl is None:
        _suggest_for_strange(session, summary)


def _suggest_for_strange(session: Session, summary: RowSummary) -> None:
    """Print commands for a row that the ledger does not use, or that never expires, to stderr."""
    cli = redis_cli(holder(session.ledger.client, summary.identity.row))
    name = shlex.quote(summary.identity.row)
    click.echo("\nto look at it, and to delete it once you know who wrote it:", err=True)
    reading = "TYPE" if summary.why == "it is not a hash" else "HGETALL"
    forgetting = f"{session.command} forget --digest {summary.digest}"
    click.echo(f"  {cli} {reading} {name}\n  {forgetting}", err=True)
    note_password(forgetting)
    if summary.row is not None:
        milliseconds = round(summary.row.retention * 1000)
        click.echo(f"to let it expire:\n  {cli} PEXPIRE {name} {milliseconds}", err=True)


@command()
def stats(session: Session, as_json: bool) -> None:
    """Count rows by status, and estimate the memory they need."""
    keys = count_keys(session)
    with scanning(keys) as advance:
        totals = survey.stats(session.ledger.client, session.namespace, advance)
    if as_json:
        print_json(asdict(totals))
        return
    if not any(totals.counts.values()):
        _note(session, survey.Listing([], totals.counts), frozenset(), "", keys, 0.0)
    show_table((Column("STATUS"), Column("ROWS")), [(status, str(totals.counts[status])) for status in STATUSES])
    click.echo()
    running, dead = totals.oldest_pending, totals.oldest_stale
    lines = {
        "longest running": "none" if running is None else f"claimed {duration(running)} ago",
        "longest stale": "none" if dead is None else f"last change {duration(dead)} ago",
        "bytes per row": "unknown" if totals.row_bytes is None else f"{totals.row_bytes:.0f} (sampled)",
        "rate": f"{totals.rate * 60:.1f} new rows a minute",
        "memory per day": f"{'unknown' if totals.day_bytes is None else size(totals.day_bytes)} at that rate",
    }
    for name, value in lines.items():
        click.echo(f"{name:<16} {value}")
    if totals.lasting:
        click.echo(f"{'without a TTL':<16} {totals.lasting}; find them with\n  {session.command} doctor")
        note_password(session.command)


@row_command(_YES)
def release(session: Session, as_json: bool, identity: Identity, yes: bool) -> None:
    """End the lease of the attempt that holds a row.

    The attempt's writes are refused from now on, and the client's next retry runs at once.
    """
    prompt = "Release this row? If its attempt is still alive, the work may be done twice."
    done = interventions.release(session.ledger, identity, _confirm(prompt, yes))
    _print_result(done, as_json, "released", "the client's next retry takes the row over at the next generation")


def _final(context: click.Context, parameter: click.Parameter, status: int) -> int:
    if status not in FINAL_STATUSES:
        raise click.BadParameter(f"{status} is not the status of a final response; give one from 200 to 599")
    return status


@row_command(
    click.option("--status", type=int, callback=_final, required=True, help="Status of the response, from 200 to 599."),
    click.option("--body-file", type=click.File("rb"), help="File with the body; - for stdin."),
    click.option("--header", "headers", multiple=True, metavar="'NAME: VALUE'", help="A header; may be repeated."),
    _YES,
)
def resolve(
    session: Session,
    as_json: bool,
    identity: Identity,
    status: int,
    body_file: Any,
    headers: tuple[str, ...],
    yes: bool,
) -> None:
    """Store the response of a stale or released row by hand.

    Every retry gets this response, and nothing runs. Use it for a row that is held for review, or whose work is known
    to be done. Check with the downstream service first; `show --downstream` prints the key that it received.
    """
    response = _response(status, body_file.read() if body_file else b"", headers)
    prompt = f"Store status {status} and a body of {len(response.body)} bytes as the final response of this row?"
    done = interventions.resolve(session.ledger, identity, response, _confirm(prompt, yes))
    _print_result(done, as_json, "completed", f"every retry gets status {status} from now on, and nothing runs")


_RECORDED = "an effect that `Effects` has recorded in a database is not made again"


@row_command(_YES)
def forget(session: Session, as_json: bool, identity: Identity, yes: bool) -> None:
    """Delete a row that no attempt holds.

    A retry then runs the operation as a new claim, even if it was done before. An effect that `Effects` has recorded in
    a database is not made again.
    """
    prompt = "Delete this row? A retry will run the operation again, even if it was done before."
    done = interventions.forget(session.ledger, identity, _confirm(prompt, yes))
    _print_result(done, as_json, "forgotten", f"a retry runs the operation again, at generation 1; {_RECORDED}")


@command(
    click.option("--verbose", is_flag=True, help="Print renewals too."),
    click.option("--seconds", type=click.FloatRange(0), help="Stop after this time; default: at Ctrl-C."),
)
def tail(session: Session, as_json: bool, verbose: bool, seconds: float | None) -> None:
    """Print events as they happen.

    Events that write nothing, such as replays and fenced attempts, are shown if the application has a Publisher.
    """
    until = None if seconds is None else time.monotonic() + seconds
    listening = tailing.Tail(session.ledger.client, session.namespace)
    try:
        click.echo(paragraph(f"idemredis: {_listening_to(listening)}; Ctrl-C to stop", err=True), err=True)
        while until is None or time.monotonic() < until:
            try:
                for event in listening.look():
                    if event.what != "renewed" or verbose:
                        print_event(event, as_json)
            except LedgerUnavailable as error:
                click.echo(f"idemredis: connection lost ({error.__cause__ or error}); trying again", err=True)
                listening.close()
                again = _listen_again(session, until)
                if again is None:
                    return
                listening = again
                click.echo("idemredis: connected again; what happened meanwhile is not shown", err=True)
    except KeyboardInterrupt:
        pass
    finally:
        listening.close()


def _listen_again(session: Session, until: float | None) -> tailing.Tail | None:
    """Return a new tail once the servers reply again; None if the time is over before."""
    while until is None or time.monotonic() < until:
        with suppress(LedgerUnavailable):
            return tailing.Tail(session.ledger.client, session.namespace)
        time.sleep(RECONNECT_GAP)
    return None


@command(click.argument("name", default=""))
def scripts(session: Session, as_json: bool, name: str) -> None:
    """List the Lua scripts, or print one.

    NAME is a script's name or the first characters of its SHA1, as in SLOWLOG. Lines are numbered as in error messages.
    """
    loaded = lua.load()
    if not name:
        if as_json:
            print_json({script.name: script.sha for script in loaded.values()})
        else:
            show_table((Column("NAME"), Column("SHA1")), [(script.name, script.sha) for script in loaded.values()])
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


@command(click.option("--cluster", is_flag=True, help="Print the lines for a cluster, even if none can be reached."))
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


@command(
    click.option("--read-only", is_flag=True, help="Do not run the scripts on scratch rows."),
    click.option(
        "--sample",
        type=click.IntRange(0),
        default=DEFAULT_SAMPLE,
        show_default=True,
        help="Maximum number of rows to check.",
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
            _print_finding(session, finding)
    raise SystemExit(0 if report.healthy else 1 if report.reachable else 2)


def _print_finding(session: Session, finding: doctor.Finding) -> None:
    where_ = f" ({finding.node})" if finding.node else ""
    text = paragraph(f"{escaped(finding.reason)}{where_}", 22, f"{finding.verdict:<8} {finding.check:<12} ")
    print_coloured(text, finding.verdict)
    for line in map(escaped, finding.fix.split("\n") if finding.fix else ()):
        if line.startswith("idemredis "):
            ours = command_line(session.ledger.client, session.namespace)
            click.echo(f"{'':21} -> {line.replace(ours, session.command)}")
            note_password(line)
        elif line.startswith("redis-cli "):  # to be pasted too, so it is not broken into lines
            click.echo(f"{'':21} -> {line}")
        else:
            click.echo(paragraph(line, 25, f"{'':21} -> "))


def note_password(command: str) -> None:
    """Say on stderr that a suggested command needs the URL in the environment, if it does and there is none."""
    if f"${URL_VARIABLE}" in command and not os.environ.get(URL_VARIABLE):
        click.echo(f"(the URL has a password: put it into {URL_VARIABLE} before you run this)", err=True)


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
