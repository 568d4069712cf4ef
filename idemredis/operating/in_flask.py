"""`flask idempotency …`: the commands of `idemredis`, for the ledger of a Flask application."""

from __future__ import annotations

import click
from flask import current_app
from flask.cli import with_appcontext

from ..ledger import Ledger
from ..store.clients import SOCKET_TIMEOUT
from .cli import Commands, audit_log_option, log_audit
from .commands import COMMANDS, EXIT_CODES, Session

__all__ = ["commands"]


class _AppSession(Session):
    def __init__(self, ledger: Ledger) -> None:
        super().__init__("", ledger.namespace, SOCKET_TIMEOUT)
        self.ledger = ledger

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
