"""Output of the command line: tables, times, sizes, progress and JSON."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import shutil
import sys
import textwrap
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import click

from ..core.text import escaped
from ..inspection.rows import RowSummary
from .tail import TailEvent

__all__ = [
    "COLUMNS",
    "as_dict",
    "as_line",
    "at",
    "duration",
    "in_words",
    "paragraph",
    "print_coloured",
    "print_event",
    "print_fact",
    "print_json",
    "printable",
    "scanning",
    "several",
    "show_table",
    "size",
]

LONGEST = 48
"""Characters of a cell on a terminal; a key may have 255."""

SHORTEST = 8
"""Characters to which a cell is cut on a narrow terminal, unless it is shorter anyway."""

GAP = "  "


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        name: its heading.
        elastic: whether its cells may be cut.
        dispensable: on a narrow terminal, columns with higher numbers are left out first; 0: never.
    """

    name: str
    elastic: bool = False
    dispensable: int = 0


COLUMNS = (
    Column("STATUS"),
    Column("GEN"),
    Column("AGE"),
    Column("LEASE"),
    Column("TTL", dispensable=4),
    Column("DIGEST"),
    Column("ROUTE", elastic=True, dispensable=1),
    Column("OPERATION", elastic=True, dispensable=3),
    Column("CHECKPOINT", elastic=True, dispensable=2),
    Column("PRINCIPAL", elastic=True),
    Column("KEY", elastic=True),
)

_COLOURS = {
    "stale": "yellow",
    "warning": "yellow",
    "failed": "red",
    "corrupt": "red",
    "problem": "red",
    "completed": "green",
    "ok": "green",
}


def show_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], *, heading: bool = True) -> None:
    """Print a table, without columns that are empty.

    On a terminal it fits the width: cells are cut, and if that is not enough, columns are left out.
    """
    if not rows:
        return
    used = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    width = terminal_width()
    widths = _fit(columns, rows, used, width, heading)
    cut = [[_cut(row[i] or "-", size) for i, size in widths.items()] for row in rows]
    if heading:
        names = [columns[i].name for i in widths]
        click.secho(_aligned(names, list(widths.values())), bold=True, color=_in_colour())
    for cells in cut:
        print_coloured(_aligned(cells, list(widths.values())), cells[0])


def print_coloured(text: str, word: str) -> None:
    """Print a text that begins with this word, which is coloured on a terminal."""
    colour = _COLOURS.get(word)
    if colour and text.startswith(word):
        text = click.style(word, fg=colour) + text.removeprefix(word)
    click.echo(text, color=_in_colour())


def terminal_width(*, err: bool = False) -> int | None:
    """Return the columns of the terminal that stdout, or stderr, is; None if it is not one."""
    stream = sys.stderr if err else sys.stdout
    return shutil.get_terminal_size().columns if stream.isatty() else None


def _in_colour() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _fit(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], used: Sequence[int], width: int | None, heading: bool
) -> dict[int, int]:
    """Return the width of each column that is shown."""
    headings = [len(column.name) if heading else 1 for column in columns]
    natural = {i: max(headings[i], *(_cells(row[i]) for row in rows)) for i in used}
    if width is None:
        return natural
    natural = {i: min(size, LONGEST) if columns[i].elastic else size for i, size in natural.items()}
    least = {i: min(size, max(SHORTEST, headings[i])) if columns[i].elastic else size for i, size in natural.items()}
    shown = list(used)
    for i in sorted(used, key=lambda i: -columns[i].dispensable):
        if _total(least[i] for i in shown) <= width or not columns[i].dispensable:
            break
        shown.remove(i)
    widths = {i: natural[i] for i in shown}
    while _total(widths.values()) > width:
        wide = [i for i in shown if widths[i] > least[i]]
        if not wide:
            break
        widths[max(wide, key=lambda i: widths[i])] -= 1
    return widths


def _total(widths: Any) -> int:
    sizes = list(widths)
    return int(sum(sizes)) + len(GAP) * (len(sizes) - 1)


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    return GAP.join(cell + " " * (width - _cells(cell)) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _cells(text: str) -> int:
    """Return how many columns of a terminal a text takes; East Asian characters take two."""
    return len(text) if text.isascii() else sum(1 + (unicodedata.east_asian_width(char) in "WF") for char in text)


def _cut(text: str, width: int) -> str:
    """Return a text with its middle left out if it is too wide; the ends of keys tell them apart."""
    if _cells(text) <= width:
        return text
    dots = "…" if (sys.stdout.encoding or "").lower().startswith("utf") else "~"
    tail = width // 3
    head = text
    while _cells(head) > width - 1 - tail:
        head = head[:-1]
    while _cells(ending := text[len(text) - tail :]) > width - 1 - _cells(head):
        tail -= 1
    return head + dots + (ending if tail else "")


def paragraph(text: str, indent: int = 0, first: str = "", *, err: bool = False) -> str:
    """Return a text with `first` before it, wrapped between words on a terminal, further lines indented.

    Args:
        text: what is wrapped.
        indent: spaces before the second line and those after it.
        first: what stands before the text.
        err: it is for stderr, not for stdout.
    """
    width = terminal_width(err=err)
    if width is None:
        return first + text
    return textwrap.fill(
        text,
        max(width, indent + 20),
        initial_indent=first,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def print_fact(name: str, text: str, names: int) -> None:
    """Print a name and a value; on a terminal a long value is broken, with its further lines indented."""
    width = terminal_width()
    room = max((width or 0) - names - 1, 20)
    if width is None or _cells(text) <= room:
        click.echo(f"{name:<{names}} {text}")
        return
    lines = textwrap.wrap(text, room, break_on_hyphens=False) or [""]
    for i, line in enumerate(lines):
        click.echo(f"{'' if i else name:<{names}} {line}")


def several(count: int, what: str) -> str:
    """Return a number with a noun, such as 1 row, or 1,200 rows."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return a time in seconds with one rounded unit: 85 ms, 12 s, 5 min, 3 h, 2 d, or -12 s."""
    sign, left = ("-", -seconds) if seconds < 0 else ("", seconds)
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if left >= 2 * length:
            return f"{sign}{left / length:.0f} {unit}"
    return f"{sign}{left:.0f} s" if left >= 1 else f"{sign}{left * 1000:.0f} ms"


def at(seconds: float) -> str:
    """Return a time in seconds since the epoch as date and time here, with the offset from UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(seconds))


def size(count: float) -> str:
    """Return a number of bytes with a unit, such as 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


@contextmanager
def scanning(total: int) -> Iterator[Callable[[int], object]]:
    """Show the progress of a scan and its rate, on a terminal with rich.

    Yields:
        A function to call with the number of keys scanned since the last call.
    """
    if not (sys.stderr.isatty() and importlib.util.find_spec("rich")):
        yield lambda keys: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (
        TextColumn("scanning"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("of {task.total:,} keys, {task.fields[rate]:,.0f}/s"),
    )
    began = time.monotonic()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("scanning", total=max(total, 1), rate=0.0)
        scanned = 0

        def advance(keys: int) -> None:
            nonlocal scanned
            scanned += keys
            rate = scanned / max(time.monotonic() - began, 0.001)
            progress.update(task, completed=min(scanned, max(total, 1)), rate=rate)

        yield advance


def as_line(found: RowSummary) -> tuple[str, ...]:
    """Return a row's cells in the order of `COLUMNS`; a cell is "" where the row has no such value."""
    who, row = found.identity, found.row
    return (
        found.status,
        str(found.generation) if row else "",
        duration(found.since_claim) if row else "",
        duration(row.lease_left) if row and row.status == "pending" else "",
        "never" if found.ttl is None else duration(found.ttl),
        found.digest,
        escaped(row.route) if row else "",
        escaped(who.operation),
        escaped(row.last_checkpoint[0]) if row and row.last_checkpoint else "",
        escaped(who.principal),
        escaped(who.key) or escaped(who.row),
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
        "since_claim": round(found.since_claim, 3) if row else None,
        "lease": round(row.lease_left, 3) if row and row.status == "pending" else None,
        "ttl": None if found.ttl is None else round(found.ttl, 3),
        "created_at": found.claimed_at,
        "checkpoint": row.last_checkpoint[0] if row and row.last_checkpoint else "",
        "response_status": row.response.status if row and row.response else None,
        "omitted": row.response.omitted if row and row.response else "",
        "body_bytes": row.body_bytes if row else 0,
    }
    return facts | ({"why": found.why} if found.why else {})


def in_words(name: str, value: Any, status: str = "") -> str:
    """Return one value of `as_dict` as text for people; times also as date and time, by this host's clock."""
    if name == "age":
        return f"{duration(value)} since the last change, {at(time.time() - value)}"
    if name == "lease":
        if status == "released":
            return f"given up {duration(-value)} ago, {at(time.time() + value)}"
        ends = "ends" if value > 0 else "ended"
        return f"{duration(value)}; {ends} {at(time.time() + value)}"
    if name == "ttl":
        return f"{duration(value)}; expires {at(time.time() + value)}"
    if name == "retention":
        return duration(value)
    if name == "created_at":
        ago = duration(max(time.time() - value, 0.0))
        return f"{ago} ago, {at(value)} by the clock of the caller that claimed it"
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
    """Print one event on a line; on a terminal it is cut to the width."""
    who = event.row.identity if event.row else None
    if as_json:
        facts = {"at": round(event.at, 3), "what": event.what, "digest": event.digest, "generation": event.generation}
        names = {"principal": who.principal, "key": who.key} if who else {}
        print_json({**facts, "operation": event.operation, "route": event.route, **names})
        return
    when = time.strftime("%H:%M:%S", time.localtime(event.at)) + f".{int(event.at % 1 * 1000):03}"
    name = " ".join(escaped(part) for part in (who.principal, who.operation, who.key) if part) if who else ""
    words = (f"generation {event.generation}", escaped(event.route), name)
    start = f"{when}  {escaped(event.what):<11} {escaped(event.digest)}  "
    rest = "  ".join(filter(None, words))
    width = terminal_width()
    click.echo(start + (rest if width is None else _cut(rest, max(width - len(start), SHORTEST))))


def print_json(value: object) -> None:
    """Print a value as JSON on one line."""
    click.echo(json.dumps(value))
