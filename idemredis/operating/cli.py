"""The command `idemredis`: inspect a ledger, check its server, and change single rows.

Exit codes: 0 success; 1 a problem was found, or the action was refused; 2 the server cannot be reached, or usage error.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import click

from ..core.text import escaped
from ..errors import (
    ConfigurationError,
    CorruptRow,
    IdempotencyError,
    InvalidKey,
    InvalidPrincipal,
    InvalidResponse,
    LedgerUnavailable,
)
from ..store.clients import SOCKET_TIMEOUT
from ..store.errors import is_denied, is_refusal, is_wrong_password
from .commands import COMMANDS, note_password
from .interventions import Refused
from .session import EXIT_CODES, Session
from .tables import paragraph

__all__ = ["Commands", "audit_log_option", "log_audit", "main"]

_audit = logging.getLogger("idemredis.audit")


class Commands(click.Group):
    """A group whose commands print errors as one line and exit with the documented codes."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command, turning errors into a message and an exit code."""
        try:
            return super().invoke(ctx)
        except LedgerUnavailable as error:
            cause = error.__cause__ or error
            if is_wrong_password(cause):
                _end(2, f"the server replied, and refuses the user or password of the URL: {cause}")
            if is_denied(cause):
                _end(1, f"this user may not do that: {cause}; these rules allow it:", ctx, "acl")
            if is_refusal(cause):
                _end(1, f"refused: {cause}")
            _end(2, f"cannot reach the server: {cause}")
        except Refused as error:
            _end(1, f"{error}{':' if error.instead else ''}", ctx, error.instead, chosen=True)
        except CorruptRow as error:
            _end(
                1,
                f"the row is corrupt ({error.why}); look at it, and forget it once you know who wrote it:",
                ctx,
                "show",
                chosen=True,
            )
        except (ConfigurationError, InvalidKey, InvalidPrincipal, InvalidResponse) as error:
            _end(2, str(error))
        except IdempotencyError as error:
            _end(1, str(error))


def _end(code: int, message: str, ctx: click.Context | None = None, verb: str = "", chosen: bool = False) -> None:
    """Print a message, and a command to paste if there is a verb, and exit."""
    click.echo(paragraph(f"idemredis: {escaped(message)}", 2, err=True), err=True)
    session = ctx.find_object(Session) if ctx is not None else None
    if verb and session is not None:
        command = f"{session.command} {verb} {session.chosen if chosen else ''}".rstrip()
        click.echo(f"  {command}", err=True)
        note_password(command)
    raise SystemExit(code)


audit_log_option = click.option(
    "--audit-log",
    envvar="IDEMREDIS_AUDIT_LOG",
    show_envvar=True,
    type=click.Path(dir_okay=False),
    help="File to which each release, resolve and forget adds a line; default: stderr.",
)


_CONNECTION = (
    click.option(
        "--url",
        envvar="IDEMREDIS_URL",
        show_envvar=True,
        default="redis://127.0.0.1:6379/0",
        show_default=True,
        help="URL of the server, or of any server of a cluster: redis://, rediss:// or unix://.",
    ),
    click.option(
        "--namespace",
        envvar="IDEMREDIS_NAMESPACE",
        show_envvar=True,
        default="idem",
        show_default=True,
        help="First part of every row's name.",
    ),
    click.option(
        "--timeout",
        type=click.FloatRange(0.01),
        default=SOCKET_TIMEOUT,
        show_default=True,
        help="Seconds to wait for a reply from the server.",
    ),
)


def _connection_options(function: Any) -> Any:
    for option in reversed(_CONNECTION):
        function = option(function)
    return function


@click.group(cls=Commands, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@_connection_options
@audit_log_option
@click.version_option(package_name="idemredis")
@click.pass_context
def main(ctx: click.Context, url: str, namespace: str, timeout: float, audit_log: str | None) -> None:
    """Inspect an Idempotency-Key ledger, and settle its rows by hand."""
    ctx.obj = Session(url, namespace, timeout)
    del url  # it may have a password in it, and an error reporter would send it
    ctx.call_on_close(ctx.obj.close)
    log_audit(ctx, audit_log)


def log_audit(ctx: click.Context, path: str | None) -> None:
    """Send the audit log to a file, or to stderr, while the command runs."""
    handler = logging.FileHandler(path) if path else logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
    _audit.addHandler(handler)
    _audit.setLevel(logging.INFO)
    ctx.call_on_close(lambda: _audit.removeHandler(handler))
    ctx.call_on_close(handler.close)


def _set_after_verb(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    session = ctx.find_object(Session)
    if session is not None:
        session.change(**{str(parameter.name): value})


def _with_connection_options(command: click.Command) -> click.Command:
    """Return a command that also takes the options of the server after its name."""
    again = copy.copy(command)
    kinds: dict[str, Any] = {"--url": str, "--namespace": str, "--timeout": click.FloatRange(0.01)}
    again.params = [
        *command.params,
        *(
            click.Option(
                [name],
                type=kind,
                expose_value=False,
                is_eager=True,
                callback=_set_after_verb,
                help="As before the command.",
            )
            for name, kind in kinds.items()
        ),
    ]
    return again


for _command in COMMANDS:
    main.add_command(_with_connection_options(_command))
