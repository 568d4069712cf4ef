"""`flask idempotency …`: the commands of `idemredis`, for the ledger of a Flask application."""

from __future__ import annotations

import click
from flask import current_app
from flask.cli import with_appcontext

from ..ledger import Ledger
from ..store.clients import SOCKET_TIMEOUT
from .cli import Commands, audit_log_option, log_audit
from .commands import COMMANDS
from .session import EXIT_CODES, Session
from .tables import Column, print_json, show_table

__all__ = ["commands"]


_COLUMNS = (
    Column("METHOD"),
    Column("RULE", elastic=True),
    Column("ENDPOINT", elastic=True, dispensable=1),
    Column("PROTECTION", elastic=True),
)


class _AppSession(Session):
    def __init__(self, ledger: Ledger) -> None:
        super().__init__("", ledger.namespace, SOCKET_TIMEOUT)
        self.ledger = ledger

    @property
    def command(self) -> str:
        """The beginning of a command for this ledger."""
        return "flask idempotency"

    def close(self) -> None:
        """Do nothing: the client belongs to the application."""


@click.group("idempotency", cls=Commands, epilog=EXIT_CODES)
@audit_log_option
@with_appcontext
@click.pass_context
def commands(ctx: click.Context, audit_log: str | None) -> None:
    """Inspect this application's Idempotency-Key ledger, and settle its rows by hand."""
    state = current_app.extensions.get("idemredis")
    if state is None:
        raise click.UsageError("this application has no Idempotency; call Idempotency.init_app(app) first")
    ctx.obj = _AppSession(state.ledger)
    log_audit(ctx, audit_log)


for _command in COMMANDS:
    commands.add_command(_command)


@commands.command("routes", epilog=EXIT_CODES)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def routes(as_json: bool) -> None:
    """List this application's routes with an unsafe method: protected, exempt, or NOT protected."""
    state = current_app.extensions["idemredis"]
    settings = state.settings
    found = state.views.routes(current_app, settings.methods, settings.protect_all)
    if as_json:
        print_json([dict(zip(("method", "rule", "endpoint", "protection"), row, strict=True)) for row in found])
        return
    if settings.mode != "enforce":
        click.echo(f"IDEMREDIS_MODE is {settings.mode!r}: no request is refused or replayed")
    show_table(_COLUMNS, found, heading=False)
