"""One row: found by what a log line says of it, and settled with the commands that are printed."""

from __future__ import annotations

import logging
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from idemredis import CorruptRow, FencedOut, Ledger, LedgerUnavailable, Reservation, StoredResponse
from idemredis.core.keys import identify
from idemredis.events import digest
from idemredis.inspection.suggestions import command_line, redis_cli
from idemredis.operating import interventions
from idemredis.operating.cli import main
from idemredis.store.clients import client as make_client
from idemredis.store.nodes import connect, primaries
from tests.support.clusters import keys_in, move_rows, moving, slot_of
from tests.support.place import Place, Ran, Run
from tests.support.reports import of
from tests.support.servers import Server

ANSWER = StoredResponse(201, (("content-type", "text/plain"),), b"the secret")
ROOT = Path(__file__).parents[2]
SERVED = pytest.mark.parametrize("place", ["valkey", "redis", "cluster"], indirect=True)
REAL = pytest.mark.parametrize("place", ["valkey", "redis"], indirect=True)


def claimed(ledger: Ledger, key: str, operation: str = "", **options: Any) -> Reservation:
    outcome = ledger.claim("acct", key, "f", operation, **options)
    assert isinstance(outcome, Reservation)
    return outcome


def pasted(said: str) -> list[list[str]]:
    """The commands in what was said, as a shell takes them."""
    return [
        shlex.split(line.strip().removeprefix("-> "))
        for line in said.splitlines()
        if re.match(r" +(-> )?(idemredis|redis-cli) ", line)
    ]


def paste(words: list[str], **options: Any) -> Ran:
    """Run a suggested command as it is, with no other options."""
    assert words[0] == "idemredis"
    ran = CliRunner().invoke(main, words[1:], **options)
    assert ran.exception is None or isinstance(ran.exception, SystemExit), ran.exception
    return Ran(ran.exit_code, ran.stdout, ran.stderr)


# By digest, from a log line


def test_each_command_takes_the_digest_of_a_log_line(
    place: Place, run: Run, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    held = claimed(ledger, "held", "charge", route="POST /charges")
    with caplog.at_level(logging.ERROR, "idemredis"):
        ledger.hold(held, for_review=True)
    line = re.fullmatch(r"held_for_review: row (\w{12}) generation 1, POST /charges: .*", caplog.messages[-1])
    assert line
    way = ("--digest", line[1])
    shown = run("show", *way, "--json").json
    assert (shown["principal"], shown["operation"], shown["key"]) == ("acct", "charge", "held")
    assert run("show", *way, "--downstream", "gateway", "--json").json["downstream_key"] == held.downstream_key(
        "gateway"
    )
    assert run("release", *way, "--yes").code == 0
    assert run("show", "--digest", line[1][:6], "--json").json["status"] == "released"
    assert run("resolve", *way, "--status", "204", "--yes").code == 0
    assert run("show", *way, "--json").json["response_status"] == 204
    assert run("forget", *way, "--yes").code == 0
    gone = run("show", *way)
    assert (gone.code, gone.out) == (1, "")
    assert line[1] in gone.err
    assert repr(ledger.namespace) in gone.err


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("acct",),
        ("acct", "k", "--digest", "0" * 12),
        ("--operation", "x", "--digest", "0" * 12),
        ("--digest", "xyz"),
        ("--digest", "12"),
        ("--digest", "0" * 12, "--row", "idem:a:b"),
    ],
)
@pytest.mark.parametrize("verb", ["show", "release", "forget"])
def test_a_command_wants_one_row_named_in_one_way(verb: str, words: tuple[str, ...]) -> None:
    ran = CliRunner().invoke(main, ["--url", "redis://127.0.0.1:1", verb, *words])
    assert ran.exit_code == 2
    assert "--digest" in ran.stderr


@pytest.mark.parametrize("place", ["fakeredis"], indirect=True)
def test_a_digest_that_begins_several_is_refused(
    place: Place, run: Run, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed(ledger, "one")
    claimed(ledger, "two")
    monkeypatch.setattr("idemredis.inspection.rows.digest", lambda row: "abcd0000" + digest(row)[:4])
    refused = run("forget", "--digest", "abcd", "--yes")
    assert refused.code == 1
    assert "2 rows" in refused.err
    assert len(run("ls", "--json").json) == 2


# Under another operation


def test_a_wrong_operation_is_answered_with_the_right_ones(place: Place, run: Run, ledger: Ledger) -> None:
    key = "k %:{}*"
    for operation in ("charge", "re fund"):
        claimed(ledger, key, operation)
    claimed(ledger, key + "x", "other")
    for verb in ("show", "release", "forget", "resolve"):
        words = (verb, "acct", key, *(("--status", "201") if verb == "resolve" else ()))
        refused = run(*words, "--operation", "chrage")
        assert refused.code == 1
        assert "with --operation charge and with --operation 're fund'" in refused.err
        assert "other" not in refused.err
        assert "with --operation charge" in run(*words).err
    claimed(ledger, key)
    assert "without --operation and with --operation charge" in run("show", "acct", key, "--operation", "x").err
    assert "never claimed, or it has expired" in run("show", "acct", "another").err


# Commands to paste


@SERVED
def test_what_a_refusal_suggests_can_be_pasted_and_run(place: Place, run: Run, ledger: Ledger) -> None:
    r = claimed(ledger, "-k 'x'", "op $HOME")
    refused = run("resolve", "--status", "201", "--operation", r.operation, "--", "acct", r.key)
    assert refused.code == 1
    [words] = pasted(refused.err)
    assert "release" in words
    assert (
        paste([*words[:-2], "--yes", *words[-2:]] if "--" not in words else [*words[:6], "--yes", *words[6:]]).code == 0
    )
    assert run("show", "--digest", digest(r.row), "--json").json["status"] == "released"
    assert run("resolve", "--digest", digest(r.row), "--status", "201", "--yes").code == 0
    [words] = pasted(run("release", "--digest", digest(r.row)).err)
    assert words[-3:] == ["forget", "--digest", digest(r.row)]
    assert paste([*words, "--yes"]).code == 0


@SERVED
def test_what_doctor_suggests_about_rows_can_be_pasted_and_run(place: Place, run: Run, ledger: Ledger) -> None:
    lasting, corrupt = claimed(ledger, "a b"), claimed(ledger, "corrupt")
    ledger.complete(lasting, ANSWER)
    place.client.persist(lasting.row)
    place.client.hset(corrupt.row, "status", "perhaps")
    commands = pasted(run("doctor").out)
    [look_at_lasting] = [words for words in commands if words[-1] == digest(lasting.row)]
    shown = paste(look_at_lasting)
    assert shown.code == 0
    [restoring] = [words for words in pasted(shown.err) if words[0] == "redis-cli" and "PEXPIRE" in words]
    port = restoring[restoring.index("-p") + 1]
    [node] = [node for node in primaries(place.client) if str(node.get_connection_kwargs()["port"]) == port]
    node.execute_command(*restoring[restoring.index("PEXPIRE") :])
    assert 0 < place.client.pttl(lasting.row) <= 86_400_000
    of_corrupt = [words for words in commands if words[-1] == digest(corrupt.row)]
    assert [words[-3] for words in of_corrupt] == ["show", "forget"]
    assert [paste(words, input="y\n").code for words in of_corrupt] == [0, 0]
    assert not place.client.exists(corrupt.row)
    assert not [words for words in pasted(run("doctor").out) if "--digest" in words]


@pytest.mark.parametrize(
    ("url", "idemredis", "cli"),
    [
        ("redis://h:7/3", "idemredis --url redis://h:7/3 --namespace 'a b'", "redis-cli -h h -p 7 -n 3"),
        ("rediss://h:7", "idemredis --url rediss://h:7/0 --namespace 'a b'", "redis-cli -h h -p 7 --tls"),
        ("unix:///run/r.sock?db=2", "idemredis --url 'unix:///run/r.sock?db=2'", "redis-cli -s /run/r.sock -n 2"),
        (
            "redis://me:s3cret@h/1",
            'idemredis --url "$IDEMREDIS_URL"',
            "redis-cli -h h -p 6379 -n 1 --user me --askpass",
        ),
        ("redis://:s3cret@h/1", 'idemredis --url "$IDEMREDIS_URL"', "redis-cli -h h -p 6379 -n 1 --askpass"),
    ],
)
def test_a_suggested_command_names_the_server_and_never_a_password(url: str, idemredis: str, cli: str) -> None:
    client = make_client(url)
    assert command_line(client, "a b").startswith(idemredis)
    assert redis_cli(client) == cli
    assert "s3cret" not in command_line(client, "a b") + redis_cli(client)


@REAL
def test_with_a_password_a_suggestion_says_where_to_put_the_url(place: Place, run: Run, ledger: Ledger) -> None:
    ledger.complete(claimed(ledger, "k"), ANSWER)
    place.client.execute_command("ACL", "SETUSER", "someone", "on", ">s3cret", "~*", "&*", "+@all")
    url = place.url.replace("://", "://someone:s3cret@")
    refused = run("release", "acct", "k", url=url)
    place.client.acl_deluser("someone")
    assert 'idemredis --url "$IDEMREDIS_URL" ' in refused.err
    assert "put it into IDEMREDIS_URL" in refused.err
    assert "s3cret" not in refused.err + refused.out


# What else is said


@REAL
def test_a_wrong_password_is_not_a_server_that_cannot_be_reached(place: Place, run: Run) -> None:
    url = place.url.replace("://", "://someone:wrong@")
    for words in (("ls",), ("show", "a", "k"), ("tail", "--seconds", "0")):
        refused = run(*words, url=url)
        assert refused.code == 2
        assert "refuses the user or password" in refused.err
        assert "cannot reach" not in refused.err
    said = run("doctor", url=url).out
    assert said.startswith("problem  reachable    the server replied, and refuses the user or password")


def test_a_refused_connection_did_not_run_anything() -> None:
    url = "redis://127.0.0.1:1/0"
    ledger = Ledger.from_url(url)
    identity = identify("idem", "a", "k")
    for call in (
        lambda: ledger.claim("a", "k", "f"),
        lambda: connect(url),
        lambda: interventions.forget(ledger, identity, lambda found: True),
        lambda: interventions.find(ledger, "idem:a:k"),
    ):
        with pytest.raises(LedgerUnavailable) as refused:
            call()
        assert not refused.value.unknown
        assert str(refused.value).endswith("it did not run")
    ran = CliRunner().invoke(main, ["--url", url, "ls"])
    assert ran.exit_code == 2
    assert "not known whether" not in ran.stderr


def test_times_are_shown_as_date_and_time_too(place: Place, run: Run, ledger: Ledger) -> None:
    claimed(ledger, "k", lease=60)
    facts = dict(line.split(None, 1) for line in run("show", "acct", "k").out.splitlines())
    moment = r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4}"
    assert re.fullmatch(rf"\d+ \w+ since the last change, {moment}", facts["age"])
    assert re.fullmatch(rf"[56]\d s; ends {moment}", facts["lease"])
    assert re.fullmatch(rf"24 h; expires {moment}", facts["ttl"])
    assert re.fullmatch(rf"\d+ m?s ago, {moment} by the clock of .*", facts["created_at"])
    assert run("release", "acct", "k", "--yes").code == 0
    assert re.search(rf"lease +given up \d+ m?s ago, {moment}", run("show", "acct", "k").out)


@SERVED
def test_the_servers_options_may_stand_after_the_command(place: Place, ledger: Ledger) -> None:
    claimed(ledger, "k")
    for words in (
        ["ls", "--url", place.url, "--namespace", ledger.namespace, "--timeout", "5", "--json"],
        ["--namespace", "another", "ls", "--json", "--url", place.url, "--namespace", ledger.namespace],
    ):
        ran = CliRunner().invoke(main, words)
        assert ran.exit_code == 0, ran.output
        assert '"key": "k"' in ran.stdout


@REAL
def test_an_empty_ledger_says_where_it_looked(place: Place, run: Run, namespace: str) -> None:
    url = place.url.removesuffix("/0") + "/3"
    for verb in ("ls", "stats"):
        said = run(verb, url=url)
        assert said.code == 0
        assert f"no rows in namespace {namespace!r} in database 3 of 127.0.0.1:{place.nodes[0].port}" in said.err
        assert "another namespace, database, or server" in said.err
    assert run("ls", url=url).out == ""
    report = Ledger(place.client, namespace=namespace).check()
    assert of(report, "expiry").reason == of(report, "rows").reason == "there are no rows"


@pytest.mark.parametrize("status", [99, 100, 103, 199, 600, 999])
def test_a_final_answer_has_a_final_status(place: Place, run: Run, ledger: Ledger, status: int) -> None:
    r = claimed(ledger, "k")
    ledger.release(r)
    before = place.client.hgetall(r.row)
    refused = run("resolve", "acct", "k", "--status", str(status), "--yes")
    assert refused.code == 2
    assert "200 to 599" in refused.err
    if status >= 100:
        with pytest.raises(interventions.Refused, match="200 to 599"):
            interventions.resolve(ledger, r.identity, StoredResponse(status), lambda found: True)
    assert place.client.hgetall(r.row) == before


def test_settling_a_corrupt_row_says_what_is_wrong_and_how_to_look_at_it(
    place: Place, run: Run, ledger: Ledger
) -> None:
    r = claimed(ledger, "k")
    place.client.hset(r.row, "generation", "x")
    refused = run("release", "acct", "k", "--yes")
    assert refused.code == 1
    assert "generation is not a positive integer" in refused.err
    assert refused.err.rstrip().endswith("show acct k")
    with pytest.raises(CorruptRow):
        interventions.release(ledger, r.identity, lambda found: True)


# On a cluster whose slots move


@pytest.mark.parametrize("place", ["cluster"], indirect=True)
def test_a_row_is_forgotten_while_its_slot_is_being_moved(place: Place, ledger: Ledger, namespace: str) -> None:
    slot = slot_of(namespace, "k")
    there, moved, fresh = [key for key, _ in zip(keys_in(slot, namespace), range(3), strict=False)]
    port = place.client.nodes_manager.get_node_from_slot(slot).port
    [source] = [node for node in place.nodes if node.port == port]
    target = next(node for node in place.nodes if node is not source)
    ledger.complete(claimed(ledger, moved), ANSWER)
    with moving(slot, source, target):
        move_rows(slot, source, target)
        for key in (there, fresh):
            ledger.complete(claimed(ledger, key), ANSWER)
        for key in (moved, fresh, there):
            identity = identify(namespace, "acct", key)
            assert interventions.forget(ledger, identity, lambda found: True), key
            assert ledger.read("acct", key) is None


@pytest.mark.parametrize("place", ["cluster"], indirect=True)
def test_a_row_that_moves_or_changes_after_it_was_shown_is_not_forgotten(
    place: Place, ledger: Ledger, namespace: str
) -> None:
    slot = slot_of(namespace, "k")
    key, other = [key for key, _ in zip(keys_in(slot, namespace), range(2), strict=False)]
    port = place.client.nodes_manager.get_node_from_slot(slot).port
    [source] = [node for node in place.nodes if node.port == port]
    target = next(node for node in place.nodes if node is not source)
    r = claimed(ledger, key)
    ledger.complete(r, ANSWER)

    def moves(found: object) -> bool:
        move_rows(slot, source, target)
        return True

    with moving(slot, source, target):
        with pytest.raises(FencedOut):
            interventions.forget(ledger, r.identity, moves)
        row = ledger.read("acct", key)
        assert row is not None
        assert row.response == ANSWER
        new = claimed(ledger, other)
        ledger.release(new)

        def changes(found: object) -> bool:
            assert isinstance(ledger.claim("acct", other, "f"), Reservation)
            return True

        with pytest.raises(FencedOut):
            interventions.forget(ledger, new.identity, changes)
        assert ledger.read("acct", other) is not None


# Started as a program


@pytest.mark.slow
def test_the_page_of_each_command_says_how_a_row_is_named(valkey_server: Server) -> None:
    for verb in ("show", "release", "resolve", "forget"):
        ran = subprocess.run(
            [sys.executable, "-c", "from idemredis.operating.cli import main; main()", verb, "--help"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert {"--digest", "--row", "--operation", "--namespace", "--url"} <= set(ran.stdout.split())
