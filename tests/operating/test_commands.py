"""What the commands show, what they change, and what they refuse."""

from __future__ import annotations

import json
import logging
import os
import pty
import pwd
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from flask import Flask
from flask.cli import FlaskGroup

from idemredis import Event, FencedOut, Ledger, Policy, Replay, Reservation, StoredResponse
from idemredis.core import scripts
from idemredis.events import digest
from idemredis.flask import Idempotency
from idemredis.inspection.rows import RowSummary
from idemredis.operating import interventions
from idemredis.operating.cli import main
from idemredis.operating.in_flask import commands
from tests.support.place import Place, Run
from tests.support.servers import Server

USER = pwd.getpwuid(os.getuid()).pw_name

ODD = ("a*b:c", "k {1} ?[x] % :", "op:1")
ANSWER = StoredResponse(201, (("content-type", "text/plain"),), b"the secret")


def claimed(ledger: Ledger, *args: Any, **options: Any) -> Reservation:
    outcome = ledger.claim(*args, **options)
    assert isinstance(outcome, Reservation)
    return outcome


def released(ledger: Ledger, principal: str, key: str, operation: str = "") -> Reservation:
    r = claimed(ledger, principal, key, "f", operation)
    ledger.release(r)
    return r


def died(ledger: Ledger, principal: str, key: str, operation: str = "") -> Reservation:
    """Leave a row as a killed worker leaves it, after its lease has ended."""
    r = claimed(ledger, principal, key, "f", operation, lease=0.01)
    ledger.claim(principal, key, "f", operation, wait=5.0, takeover=False)
    return r


def whole(place: Place, r: Reservation) -> Any:
    return place.client.hgetall(r.identity.row)


# Looking


def test_ls_shows_every_row_with_its_parts_those_first_that_want_a_look(place: Place, run: Run, ledger: Ledger) -> None:
    done = claimed(ledger, "acct_1", "done", "f")
    ledger.complete(done, ANSWER)
    ledger.fail(claimed(ledger, "acct_1", "failed", "f"), StoredResponse(500))
    claimed(ledger, "acct_2", "running", "f", lease=60)
    released(ledger, *ODD)
    died(ledger, "acct_3", "died")
    place.client.set(f"{ledger.namespace}:acct_1:strange", "x", ex=60)

    rows = run("ls", "--all", "--json").json
    shown = [(row["principal"], row["key"], row["operation"], row["status"], row["generation"]) for row in rows]
    assert shown == [
        ("acct_1", "strange", "", "corrupt", 0),
        ("acct_3", "died", "", "stale", 1),
        (*ODD, "released", 1),
        ("acct_2", "running", "", "pending", 1),
        ("acct_1", "failed", "", "failed", 1),
        ("acct_1", "done", "", "completed", 1),
    ]
    assert [row["key"] for row in run("ls", "--json").json] == ["strange", "died", ODD[1], "running"]
    assert 50 < rows[3]["lease"] <= 60
    assert all(0 < row["ttl"] <= 86400 for row in rows)
    assert rows[5]["body_bytes"] == len(ANSWER.body)
    assert rows[0]["why"] == "it is not a hash"
    table = run("ls", "--all").out
    assert "the secret" not in table
    assert len({line.index("24 h") for line in table.splitlines()[2:]}) == 1


def test_ls_narrows_down_by_principal_status_digest_and_number(place: Place, run: Run, ledger: Ledger) -> None:
    for principal in ("a*", "ab", "abc"):
        claimed(ledger, principal, "one", "f")
        released(ledger, principal, "two")
    assert {row["principal"] for row in run("ls", "--principal", "a*", "--json").json} == {"a*"}
    assert {row["principal"] for row in run("ls", "--principal", "ab", "--json").json} == {"ab"}
    assert {row["key"] for row in run("ls", "--status", "released", "--json").json} == {"two"}
    name = digest(f"{ledger.namespace}:ab:two")
    [row] = run("ls", "--digest", name[:8], "--json").json
    assert (row["principal"], row["key"], row["digest"]) == ("ab", "two", name)
    few = run("ls", "--limit", "2")
    assert len(few.out.splitlines()) == 3
    assert "more than 2 rows" in few.err


def test_the_digest_is_the_one_that_events_have(place: Place, namespace: str) -> None:
    told: list[Event] = []
    r = claimed(Ledger(place.client, namespace=namespace, observers=[told.append]), "a", "k", "f")
    assert [event.digest for event in told] == [digest(r.identity.row)]


def test_rows_of_other_namespaces_are_not_seen(place: Place, run: Run, ledger: Ledger, namespace: str) -> None:
    claimed(Ledger(place.client, namespace=f"{namespace}x"), "a", "k", "f")
    claimed(Ledger(place.client, namespace=f"{namespace}:a"), "a", "k", "f")
    assert run("ls", "--json").json == []
    assert len(run("ls", "--json", namespace=f"{namespace}:a").json) == 1


def test_looking_never_sends_keys_and_writes_nothing(real_server: Server, namespace: str) -> None:
    with real_server.client() as client:
        ledger = Ledger(client, namespace=namespace)
        for i in range(1200):
            claimed(ledger, f"acct_{i}", "k", "f")
        client.config_resetstat()
        before = client.info("persistence")["rdb_changes_since_last_save"]
        for words in (["ls", "--limit", "2000"], ["stats"], ["show", "acct_1", "k"], ["doctor", "--read-only"]):
            ran = CliRunner().invoke(main, ["--url", real_server.url, "--namespace", namespace, *words])
            assert ran.exit_code == 0, ran.output
        used: Any = client.info("commandstats")
        assert "cmdstat_keys" not in used
        assert used["cmdstat_scan"]["calls"] >= 6
        assert client.info("persistence")["rdb_changes_since_last_save"] == before
        ledger.close()


def test_show_gives_the_size_of_a_body_and_the_body_only_when_asked(place: Place, run: Run, ledger: Ledger) -> None:
    r = claimed(ledger, *ODD[:2], "f", ODD[2])
    ledger.checkpoint(r, "charged", {"charge": "ch_1"})
    ledger.complete(r, ANSWER)
    words = ("show", *ODD[:2], "--operation", ODD[2])
    shown = run(*words)
    assert "the secret" not in shown.out
    assert "the secret" not in run(*words, "--json").out
    facts = dict(line.split(None, 1) for line in shown.out.splitlines())
    assert facts["body_bytes"] == "10"
    assert facts["response_status"] == "201"
    assert facts["checkpoint_data"] == '{"charge": "ch_1"}'
    assert run(*words, "--body", "--json").json["body"] == "the secret"


def test_show_gives_the_key_that_the_next_service_was_given(place: Place, run: Run, ledger: Ledger) -> None:
    r = claimed(ledger, "a", "k", "f")
    shown = run("show", "a", "k", "--downstream", "gateway", "--json").json
    assert shown["downstream_key"] == r.downstream_key("gateway")


def test_what_is_stored_cannot_steer_a_terminal(place: Place, run: Run, ledger: Ledger) -> None:
    r = claimed(ledger, "a\x1b[2Jb", "k", "f")
    ledger.checkpoint(r, "c\x1b[2Jd")
    for words in (("ls",), ("show", "a\x1b[2Jb", "k")):
        assert "\x1b" not in run(*words).out
        assert r"c\x1b[2Jd" in run(*words).out


EVIL = "\x1b[2J\x07\r\u202e"


def test_no_verb_prints_what_others_wrote_as_it_is(place: Place, run: Run, ledger: Ledger, namespace: str) -> None:
    """Whoever may write to this Redis can make up every text of a row, and names that are not a row's."""
    r = claimed(ledger, f"a{EVIL}", "k", "f", f"op{EVIL}", route=f"POST {EVIL}")
    ledger.checkpoint(r, f"c{EVIL}", {"data": EVIL})
    done = claimed(ledger, "a", "done", "f")
    ledger.complete(done, StoredResponse(201, (("content-type", "text/plain"),), EVIL.encode()))
    odd = [f"{namespace}:{EVIL}:k", f"{namespace}:a:{EVIL}", f"{namespace}:a:b:c:{EVIL}"]
    for name in odd:
        place.client.hset(name, EVIL, EVIL)
        place.client.expire(name, 60)
    of_row = ("--operation", f"op{EVIL}")
    for words in (
        ("ls",),
        ("ls", "--status", "corrupt"),
        ("ls", "--status", "completed"),
        ("show", f"a{EVIL}", "k", *of_row),
        ("show", f"a{EVIL}", "k"),
        ("show", "a", "done", "--body"),
        ("show", EVIL, "nothing"),
        ("stats",),
        ("doctor",),
        ("release", f"a{EVIL}", "k", *of_row),
        ("release", f"a{EVIL}", "k", *of_row, "--yes"),
        ("resolve", f"a{EVIL}", "k", *of_row, "--status", "204", "--yes"),
        ("resolve", f"a{EVIL}", "k", *of_row, "--status", "204", "--yes"),
        ("forget", f"a{EVIL}", "k", *of_row),
        ("forget", f"a{EVIL}", "k", *of_row, "--yes"),
        ("forget", f"a{EVIL}", "k", *of_row, "--yes"),
        *(("ls", "--json", "--status", status) for status in ("corrupt", "completed")),
        ("scripts", EVIL),
    ):
        ran = run(*words)
        for printed in (ran.out, ran.err):
            assert all(char.isprintable() or char == "\n" for char in printed), (words, printed)
    for name in odd:
        place.client.delete(name)


def test_stats_count_rows_and_say_what_a_day_needs(place: Place, run: Run, ledger: Ledger) -> None:
    for i in range(6):
        ledger.complete(claimed(ledger, "a", f"k{i}", "f"), ANSWER)
    claimed(ledger, "a", "running", "f")
    released(ledger, "a", "released")
    died(ledger, "a", "died")
    place.client.hset(claimed(ledger, "a", "corrupt", "f").row, "generation", "x")
    told = run("stats", "--json").json
    assert told["counts"] == {"corrupt": 1, "stale": 1, "released": 1, "pending": 1, "failed": 0, "completed": 6}
    assert next(iter(told["counts"])) == "corrupt"
    assert told["rate"] == pytest.approx(9 / 60)
    assert 0 <= told["oldest_pending"] < 60
    assert 0 <= told["oldest_stale"] < 60
    if place.kind == "fakeredis":
        assert told["row_bytes"] is None
        assert "bytes per row    unknown" in run("stats").out
    else:
        assert 100 < told["row_bytes"] < 2000
        assert told["day_bytes"] == pytest.approx(told["row_bytes"] * 9 * 1440)


def test_scripts_are_printed_as_they_are_sent_and_found_by_their_sha(run: Run) -> None:
    claim = scripts.load()["claim"]
    for name in ("claim", claim.sha[:6]):
        head, *lines = run("scripts", name).out.splitlines()
        assert head == f"claim  {claim.sha}"
        assert [line[6:] for line in lines] == claim.text.splitlines()
        assert [int(line[:4]) for line in lines] == list(range(1, len(lines) + 1))
    assert run("scripts", "--json").json["renew"] == scripts.load()["renew"].sha
    assert run("scripts", "nonsense").code == 2


def test_the_acl_lines_can_be_had_without_a_server() -> None:
    ran = CliRunner().invoke(main, ["--url", "redis://127.0.0.1:1", "--namespace", "shop", "acl", "--cluster"])
    assert ran.exit_code == 0
    assert "no server reachable" in ran.stderr
    assert ran.stdout.count("'~shop:*'") == 3
    assert ran.stdout.count("'+cluster|slots'") == 3


def test_on_a_terminal_rows_are_a_coloured_table_and_a_long_scan_says_how_far_it_is(
    valkey_server: Server, namespace: str
) -> None:
    with valkey_server.client() as client:
        died(Ledger(client, namespace=namespace), "acct_1", "order-1")
        client.mset({f"other-{i}": "" for i in range(20_000)})
        words = ["--url", valkey_server.url, "--namespace", namespace, "ls"]
        shown = on_a_terminal([sys.executable, "-c", "from idemredis.operating.cli import main; main()", *words])
        client.flushall()
    assert "acct_1" in shown
    assert "\x1b[33mstale" in shown
    assert re.search(r"scanning .*100%.* of 20,001 keys, [0-9,]+/s", shown)
    assert "\x1b[2K" in shown.rpartition("keys, ")[2]


def on_a_terminal(command: list[str]) -> str:
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "140"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        said = b""
        try:
            while part := os.read(ours, 4096):
                said += part
        except OSError:  # how Linux says that the other end is closed
            pass
        os.close(ours)
    assert process.returncode == 0, said
    return said.decode()


# Settling


def changed_meanwhile(ledger: Ledger) -> Callable[[RowSummary], bool]:
    """Agree, but only after somebody else took the row over."""

    def agree(found: RowSummary) -> bool:
        identity = found.identity
        r = ledger.claim(identity.principal, identity.key, "f", identity.operation)
        assert isinstance(r, Reservation)
        return True

    return agree


@pytest.mark.parametrize("action", ["release", "resolve", "forget"])
def test_a_row_that_changed_after_it_was_shown_is_left_alone(
    place: Place, ledger: Ledger, action: str, caplog: pytest.LogCaptureFixture
) -> None:
    r = released(ledger, *ODD)
    agree = changed_meanwhile(ledger)
    seen: list[Any] = []

    def note(found: RowSummary) -> bool:
        agreed = agree(found)
        seen.append(whole(place, r))
        return agreed

    settle: dict[str, Callable[[], bool]] = {
        "release": lambda: interventions.release(ledger, r.identity, note),
        "resolve": lambda: interventions.resolve(ledger, r.identity, ANSWER, note),
        "forget": lambda: interventions.forget(ledger, r.identity, note),
    }
    with caplog.at_level(logging.INFO, "idemredis.audit"), pytest.raises(FencedOut):
        settle[action]()
    assert seen == [whole(place, r)]
    assert seen[0][b"generation"] == b"2"
    [line] = [record.getMessage() for record in caplog.records if record.name == "idemredis.audit"]
    assert line.endswith("refused (FencedOut)")


@pytest.mark.parametrize(
    "words", [("release", "a", "k"), ("resolve", "a", "k", "--status", "201"), ("forget", "a", "k")]
)
def test_a_person_who_says_no_changes_nothing(place: Place, run: Run, ledger: Ledger, words: tuple[str, ...]) -> None:
    r = released(ledger, "a", "k")
    before = whole(place, r)
    ran = run(*words, input="n\n")
    assert ran.code == 1
    assert digest(r.identity.row) in ran.out
    assert whole(place, r) == before
    assert run(*words, input="y\n").code == 0


def test_release_ends_the_lease_and_keeps_the_retention_of_the_application(
    place: Place, run: Run, namespace: str
) -> None:
    ledger = Ledger(place.client, Policy(lease=600, retention=7 * 86400), namespace)
    r = claimed(ledger, "a", "k", "f")
    assert run("release", "a", "k", "--yes").code == 0
    assert 6.99 * 86400 < place.client.pttl(r.identity.row) / 1000 <= 7 * 86400 + 1
    taken = claimed(ledger, "a", "k", "f")
    assert taken.generation == 2
    ledger.complete(taken, ANSWER)
    refused = run("release", "a", "k", "--yes")
    assert refused.code == 1
    assert "completed" in refused.err
    ledger.close()


def test_resolve_wants_a_stale_row_and_stores_what_it_is_given(
    place: Place, run: Run, ledger: Ledger, tmp_path: Path
) -> None:
    r = claimed(ledger, *ODD[:2], "f", ODD[2])
    (tmp_path / "answer").write_bytes(b"\xff\x00done")
    words = ["resolve", *ODD[:2], "--operation", ODD[2], "--status", "202", "--body-file", str(tmp_path / "answer")]
    before = whole(place, r)
    running = run(*words, "--header", "Content-Type: x/y", "--yes")
    assert running.code == 1
    assert "release" in running.err
    assert whole(place, r) == before

    ledger.release(r)
    assert run(*words, "--yes").code == 2  # what kind of body is it?
    assert run(*words, "--header", "Set-Cookie: a=b", "--yes").code == 2
    headers = ("--header", "Content-Type: x/y", "--header", "Link: <1>", "--header", "Link: <2>")
    assert run(*words, *headers, "--yes").code == 0
    kept = (("Content-Type", "x/y"), ("Link", "<1>"), ("Link", "<2>"))
    answer = ledger.claim(*ODD[:2], "f", ODD[2])
    assert answer == Replay(StoredResponse(202, kept, b"\xff\x00done"), 2, False)

    again = run(*words, *headers, "--yes")
    assert again.code == 1
    assert "never replaced" in again.err


def test_forget_wants_a_row_that_nobody_holds(place: Place, run: Run, ledger: Ledger) -> None:
    r = claimed(ledger, "a", "k", "f")
    before = whole(place, r)
    refused = run("forget", "a", "k", "--yes")
    assert refused.code == 1
    assert "release" in refused.err
    assert whole(place, r) == before
    ledger.complete(r, ANSWER)
    said = run("forget", "a", "k", "--yes")
    assert said.code == 0
    assert "runs the operation again" in said.out
    assert claimed(ledger, "a", "k", "g").generation == 1


def test_forget_removes_what_is_not_a_row_of_ours(place: Place, run: Run, ledger: Ledger) -> None:
    for key, spoil in (("list", lambda name: place.client.rpush(name, "x")), ("hash", hash_at(place))):
        name = f"{ledger.namespace}:a:{key}"
        spoil(name)
        place.client.pexpire(name, 60_000)
        assert run("show", "a", key, "--json").json["status"] == "corrupt"
        for words in (("release", "a", key), ("resolve", "a", key, "--status", "201")):
            assert run(*words, "--yes").code == 1
        assert place.client.exists(name)
        assert run("forget", "a", key, "--yes").code == 0
        assert not place.client.exists(name)


def hash_at(place: Place) -> Callable[[str], object]:
    return lambda name: place.client.hset(name, "status", "perhaps")


def test_each_settling_writes_one_audit_line_without_key_or_principal(
    place: Place, run: Run, ledger: Ledger, tmp_path: Path
) -> None:
    log = tmp_path / "audit.log"
    names = [released(ledger, "acct_secret", f"key-{i}").identity.row for i in range(3)]
    env = {"IDEMREDIS_AUDIT_LOG": str(log), "USER": "ops", "LOGNAME": "ops"}
    run("release", "acct_secret", "key-0", "--yes", env=env)
    run("resolve", "acct_secret", "key-1", "--status", "204", "--yes", env=env)
    run("forget", "acct_secret", "key-2", "--yes", env=env)
    run("forget", "acct_secret", "key-2", "--yes", env=env)
    lines = log.read_text().splitlines()
    for line, action, name in zip(lines, ("release", "resolve", "forget"), names, strict=True):
        assert f"{action} by {USER}: row {digest(name)} generation 1: done" in line
    assert "secret" not in log.read_text()
    assert "key-" not in log.read_text()
    assert logging.getLogger("idemredis.audit").handlers == []


FORGED = "ops: row 000000000000 generation 1: done\n2026-12-01 00:00:00,000 idemredis.audit forget by alice\x1b[2J"


@pytest.mark.parametrize("name", ["LOGNAME", "USER", "LNAME", "USERNAME", "SUDO_USER"])
def test_an_audit_line_names_the_kernels_user_and_cannot_be_forged(
    place: Place, run: Run, ledger: Ledger, tmp_path: Path, name: str
) -> None:
    log = tmp_path / "audit.log"
    released(ledger, "acct_1", "k")
    run("forget", "acct_1", "k", "--yes", env={"IDEMREDIS_AUDIT_LOG": str(log), name: FORGED})
    [line] = log.read_text().splitlines()
    assert re.search(rf"idemredis\.audit forget by {USER}(?: \(SUDO_USER .{{,32}}\))?: row ", line)
    assert "alice" not in line
    assert line.isprintable()


# When it goes wrong


@pytest.mark.parametrize("words", [["ls"], ["show", "a", "k"], ["stats"], ["release", "a", "k"], ["forget", "a", "k"],
                                   ["tail"], ["doctor"], ["resolve", "a", "k", "--status", "200"]])  # fmt: skip
def test_a_server_that_is_away_is_one_line_and_exit_code_2(words: list[str]) -> None:
    ran = CliRunner().invoke(main, ["--url", "redis://:secret@127.0.0.1:1/0", *words])
    assert ran.exit_code == 2
    assert isinstance(ran.exception, SystemExit)
    assert len(ran.output.splitlines()) <= 2
    assert "secret" not in ran.output


def test_a_server_that_hangs_is_given_up_in_time(valkey_server: Server) -> None:
    valkey_server.freeze()
    try:
        ran = CliRunner().invoke(main, ["--url", valkey_server.url, "--timeout", "0.1", "ls"])
    finally:
        valkey_server.thaw()
    assert ran.exit_code == 2


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["show", "a", "k"], 1),
        (["release", "a", "k", "--yes"], 1),
        (["forget", "a", "k", "--yes"], 1),
        (["show", "a", "k\n"], 2),
        (["show", " ", "k"], 2),
        (["ls", "--status", "odd"], 2),
        (["--url", "http://x", "ls"], 2),
        (["nonsense"], 2),
    ],
)
def test_what_is_not_there_is_1_and_what_is_wrong_is_2(run: Run, words: list[str], code: int) -> None:
    ran = run(*words)
    assert ran.code == code
    assert ran.err
    assert "Traceback" not in ran.err


def test_every_command_documents_the_exit_codes_and_takes_json() -> None:
    for group, more in ((main, set[str]()), (commands, {"routes"})):
        names = "ls show stats release resolve forget tail scripts acl doctor"
        assert set(group.commands) == set(names.split()) | more
        for name, command in group.commands.items():
            text = CliRunner().invoke(command, ["--help"]).output
            assert "Exit codes: 0 done; 1" in text, name
            assert "--json" in text, name


# Inside an application


def test_flask_idempotency_has_the_applications_own_ledger(valkey_server: Server, namespace: str) -> None:
    app = Flask("shop")
    app.config.update(IDEMREDIS_URL=valkey_server.url, IDEMREDIS_NAMESPACE=namespace, IDEMREDIS_RETENTION_SECONDS=3600)
    idempotency = Idempotency(app, principal="acct_1")

    @app.post("/charges")
    @idempotency.protect
    def charge() -> Any:
        return {"paid": True}, 201

    assert app.test_client().post("/charges", headers={"Idempotency-Key": "order-1"}).status_code == 201
    group: click.Group = FlaskGroup(create_app=lambda: app)

    def flask(*words: str) -> Any:
        return CliRunner().invoke(group, ["idempotency", *words])

    [row] = json.loads(flask("ls", "--all", "--json").stdout)
    assert (row["principal"], row["key"], row["status"], row["response_status"]) == (
        "acct_1",
        "order-1",
        "completed",
        201,
    )
    assert flask("doctor").exit_code == 0
    refused = flask("release", "--digest", row["digest"])
    assert refused.stderr.splitlines()[-1] == f"  flask idempotency forget --digest {row['digest']}"
    strange = f"{namespace}:acct_1:strange"
    app.extensions["idemredis"].ledger.client.set(strange, "x", px=60_000)
    assert f"-> flask idempotency forget --digest {digest(strange)}\n" in flask("doctor").stdout
    assert flask("forget", "--row", strange, "--yes").exit_code == 0
    assert flask("forget", "acct_1", "order-1", "--yes").exit_code == 0
    assert json.loads(flask("ls", "--json").stdout) == []
    app.extensions["idemredis"].ledger.client.close()


def test_flask_idempotency_in_an_application_without_it_says_so() -> None:
    group: click.Group = FlaskGroup(create_app=lambda: Flask("other"))
    ran = CliRunner().invoke(group, ["idempotency", "ls"])
    assert ran.exit_code == 2
    assert "init_app" in ran.output
