"""Output of the command line: tables, times, sizes, progress and JSON."""

from __future__ import annotations

import base64
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from ..core.text import escaped
from ..inspection.rows import RowSummary
from .tail import TailEvent

__all__ = [
    "COLUMNS",
    "as_dict",
    "as_line",
    "duration",
    "escaped",
    "in_words",
    "print_event",
    "print_json",
    "printable",
    "scanning",
    "show_table",
    "size",
]

COLUMNS = ("PRINCIPAL", "OPERATION", "KEY", "ROUTE", "STATUS", "GEN", "AGE", "LEASE", "TTL", "CHECKPOINT", "DIGEST")

_COLOURS = {
    "stale": "yellow",
    "warning": "yellow",
    "failed": "red",
    "corrupt": "red",
    "problem": "red",
    "completed": "green",
    "ok": "green",
}


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: with rich on a terminal if it is installed, otherwise in plain aligned columns."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(*columns, box=None, pad_edge=False, header_style="bold")
        for row in rows:
            table.add_row(*(Text(cell, style=_COLOURS.get(cell, ""), overflow="fold") for cell in row))
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def duration(seconds: float) -> str:
    """Return a time in seconds with one rounded unit: 85 ms, 12 s, 5 min, 3 h, 2 d, or -12 s."""
    sign, left = ("-", -seconds) if seconds < 0 else ("", seconds)
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if left >= 2 * length:
            return f"{sign}{left / length:.0f} {unit}"
    return f"{sign}{left:.0f} s" if left >= 1 else f"{sign}{left * 1000:.0f} ms"


def size(count: float) -> str:
    """Return a number of bytes with a unit, such as 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


@contextmanager
def scanning(total: int) -> Iterator[Callable[[int], object]]:
    """Show the progress of a scan, on a terminal with rich.

    Yields:
        A function to call with the number of names scanned since the last call.
    """
    if not (sys.stderr.isatty() and importlib.util.find_spec("rich")):
        yield lambda names: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (TextColumn("scanning"), BarColumn(), TaskProgressColumn(), TextColumn("of {task.total:,} names"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("scanning", total=max(total, 1))
        yield lambda names: progress.advance(task, names)


def as_line(found: RowSummary) -> tuple[str, ...]:
    """Return a row's cells in the order of `COLUMNS`."""
    who, row = found.identity, found.row
    return (
        escaped(who.principal),
        escaped(who.operation) or "-",
        escaped(who.key) or escaped(who.row),
        (escaped(row.route) if row else "") or "-",
        found.status,
        str(found.generation),
        duration(found.age),
        duration(row.lease_left) if row and row.status == "pending" else "-",
        "never" if found.ttl is None else duration(found.ttl),
        (escaped(row.last_checkpoint[0]) if row and row.last_checkpoint else "") or "-",
        found.digest,
    )


def as_dict(found: RowSummary) -> dict[str, Any]:
    """Return a row as a dict for JSON; times are in seconds."""
    who, row = found.identity, found.row
    facts: dict[str, Any] = {
        "principal": who.principal,
        "operation": who.operation,
        "key": who.key,
        "row": who.row,
        "digest": found.digest,
        "status": found.status,
        "route": row.route if row else "",
        "generation": found.generation,
        "age": round(found.age, 3),
        "lease": round(row.lease_left, 3) if row and row.status == "pending" else None,
        "ttl": None if found.ttl is None else round(found.ttl, 3),
        "created_at": found.claimed_at,
        "checkpoint": row.last_checkpoint[0] if row and row.last_checkpoint else "",
        "response_status": row.response.status if row and row.response else None,
        "omitted": row.response.omitted if row and row.response else "",
        "body_bytes": row.body_bytes if row else 0,
    }
    return facts | ({"why": found.why} if found.why else {})


def in_words(name: str, value: Any) -> str:
    """Return one value of `as_dict` as text for people."""
    if name in ("age", "lease", "ttl", "retention"):
        return duration(value)
    if name == "created_at":
        return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(value))} by the clock of the caller that claimed it"
    if isinstance(value, str):
        return escaped(value)
    return json.dumps(value) if isinstance(value, (list, dict)) else str(value)


def printable(body: bytes) -> str | dict[str, str]:
    """Return a body as text, or in base64 if it is not UTF-8."""
    try:
        return body.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(body).decode()}


def print_event(event: TailEvent, as_json: bool) -> None:
    """Print one event on a line."""
    who = event.row.identity if event.row else None
    if as_json:
        facts = {"at": round(event.at, 3), "what": event.what, "digest": event.digest, "generation": event.generation}
        names = {"principal": who.principal, "key": who.key} if who else {}
        print_json({**facts, "operation": event.operation, "route": event.route, **names})
        return
    at = time.strftime("%H:%M:%S", time.localtime(event.at)) + f".{int(event.at % 1 * 1000):03}"
    name = " ".join(escaped(part) for part in (who.principal, who.operation, who.key) if part) if who else ""
    words = (f"generation {event.generation}", escaped(event.route), name)
    click.echo(f"{at}  {escaped(event.what):<15} {escaped(event.digest)}  {'  '.join(filter(None, words))}")


def print_json(value: object) -> None:
    """Print a value as JSON on one line."""
    click.echo(json.dumps(value))
