"""What a terminal shows: at 80 and 200 columns, with and without colour, and what a pipe gets."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from idemredis import Ledger, Policy, Reservation, StoredResponse
from idemredis.operating.cli import main
from tests.support.servers import Server

LONG = "order-" + "0123456789" * 24 + "-end42"
WIDE = "アカウント一覧表示用の長い名前です"
ANSWER = StoredResponse(201, (("content-type", "application/json"), ("location", "/orders/1")), b'{"paid": true}')

PASTED = ("  idemredis ", "  redis-cli ", "-> idemredis ", "-> redis-cli ")
"""Lines that are to be pasted are not broken, however long they are."""


def claimed(ledger: Ledger, *args: Any, **options: Any) -> Reservation:
    outcome = ledger.claim(*args, **options)
    assert isinstance(outcome, Reservation)
    return outcome


@pytest.fixture
def served(valkey_server: Server, namespace: str) -> Iterator[tuple[list[str], Any]]:
    """Return the options of a ledger with rows of each kind, and a client."""
    with valkey_server.client() as client:
        ledger = Ledger(client, Policy(heartbeat=False), namespace)
        ledger.complete(
            claimed(ledger, "acct_1", "8e03978e-40d5-43dd-bc93-6894a57f9324", "f", route="POST /orders"), ANSWER
        )
        r = claimed(
            ledger, "someone@example.org", LONG, "f", "charge", route="POST /v1/payments/<int:id>/captures/<other>"
        )
        ledger.checkpoint(r, "charging", {"amount": 4200})
        ledger.release(claimed(ledger, WIDE, "k", "f", route="mail.send"))
        claimed(ledger, "acct_2", "died", "f", lease=0.001)
        ledger.claim("acct_2", "died", "f", wait=5.0, takeover=False)
        strange = claimed(ledger, "acct_3", "strange", "f").row
        client.hset(strange, "status", "perhaps")
        lasting = claimed(ledger, "acct_4", "lasting", "f")
        ledger.complete(lasting, ANSWER)
        client.persist(lasting.row)
        yield ["--url", valkey_server.url, "--namespace", namespace], client
        client.flushall()


VERBS: list[list[str]] = [
    ["ls"],
    ["ls", "--all"],
    ["ls", "--status", "failed"],
    ["stats"],
    ["show", "--operation", "charge", "someone@example.org", LONG],
    ["show", "acct_3", "strange"],
    ["show", "acct_4", "lasting"],
    ["show", "acct_4", "gone"],
    ["release", "acct_4", "lasting"],
    ["resolve", "--status", "201", "someone@example.org", LONG, "--operation", "charge"],
    ["doctor"],
    ["scripts"],
    ["tail", "--seconds", "0"],
    ["ls", "--help"],
    ["ls", "--namespace", "nobody"],
    ["stats", "--namespace", "nobody"],
]


def on_a_terminal(words: list[str], columns: int, **environment: str) -> str:
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), **environment}
    command = [sys.executable, "-c", "from idemredis.operating.cli import main; main()", *words]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        said = b""
        try:
            while part := os.read(ours, 4096):
                said += part
        except OSError:  # how Linux says that the other end is closed
            pass
        os.close(ours)
    assert process.returncode in (0, 1), said
    return said.decode()


def lines_of(said: str) -> list[str]:
    """What is left on the screen, without colours and progress."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said)
    return [line.rpartition("\r")[2] for line in plain.replace("\r\n", "\n").split("\n")]


def cells(line: str) -> int:
    return sum(1 + (unicodedata.east_asian_width(char) in "WF") for char in line)


@pytest.mark.slow
@pytest.mark.parametrize("words", VERBS, ids=lambda words: " ".join(words)[:20])
def test_nothing_is_wider_than_the_terminal(served: tuple[list[str], Any], words: list[str]) -> None:
    options, _ = served
    for columns in (80, 200):
        lines = lines_of(on_a_terminal([*options, *words], columns))
        assert [line for line in lines if cells(line) > columns and not any(mark in line for mark in PASTED)] == []
        assert len(lines) < 45


@pytest.mark.slow
def test_at_80_columns_a_table_has_whole_headings_and_no_column_without_values(served: tuple[list[str], Any]) -> None:
    options, client = served
    heading, *rows = [line for line in lines_of(on_a_terminal([*options, "ls", "--all"], 80)) if "  " in line]
    columns = heading.split()
    assert columns[:4] == ["STATUS", "GEN", "AGE", "LEASE"]
    assert {"DIGEST", "ROUTE", "PRINCIPAL", "KEY"} <= set(columns)
    assert len(rows) == 6
    starts = [heading.index(name) for name in columns]
    for start, end in zip(starts, [*starts[1:], 80], strict=True):
        if not any("ア" in row for row in rows):
            assert {row[start:end].strip() for row in rows} - {"", "-"}, heading[start:end]
    assert sum(re.search(r"\b[0-9a-f]{12}\b", row) is not None for row in rows) == 6
    [cut] = [row for row in rows if row.endswith("d42")]
    assert "…" in cut
    wide = lines_of(on_a_terminal([*options, "ls"], 200))
    assert "8e03978e" not in "".join(wide)
    assert any("POST /v1/payments/<int:id>/captures/<other>" in line for line in wide)
    client.flushdb()


@pytest.mark.slow
def test_colour_is_for_terminals_that_want_it(served: tuple[list[str], Any]) -> None:
    options, _ = served
    assert "\x1b[33mstale" in on_a_terminal([*options, "ls"], 80)
    assert "\x1b[31mproblem" in on_a_terminal([*options, "doctor"], 80)
    for variable in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert "\x1b[3" not in on_a_terminal([*options, "doctor"], 80, **variable)


def test_a_pipe_gets_whole_values_in_aligned_columns_and_no_colour(served: tuple[list[str], Any]) -> None:
    options, _ = served
    ran = CliRunner().invoke(main, [*options, "ls", "--all"])
    assert "\x1b" not in ran.output
    heading, *rows = ran.stdout.splitlines()
    [long] = [row for row in rows if LONG in row]
    assert long.endswith(LONG)
    start = heading.index("DIGEST")
    assert all(re.fullmatch("[0-9a-f]{12}", row[start : start + 12]) for row in rows)
    assert "scanned" not in ran.stdout
    assert "scanned" in ran.stderr
    doctor = CliRunner().invoke(main, [*options, "doctor"]).stdout.splitlines()
    assert all(line.startswith(("ok ", "unknown ", "warning ", "problem ", " ")) for line in doctor)
    assert not [line for line in doctor if line.startswith(" ") and "-> " not in line]
