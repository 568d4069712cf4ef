"""A new person on call, given docs/operations.md and the mess, finds and settles all four with the commands there."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from idemredis import FencedOut, Ledger, Replay, Reservation, StoredResponse, fingerprint_value
from idemredis.store.nodes import primaries
from tests.support.place import Place, Ran, Run

ROOT = Path(__file__).parents[2]
MESS = ROOT / "examples" / "mess.py"


def commands(heading: str) -> list[list[str]]:
    """The commands that a section of the page tells to run, in its order."""
    section = (ROOT / "docs" / "operations.md").read_text().split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    blocks = re.findall(r"^```console\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return [shlex.split(line[2:]) for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def make_mess(place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> str:
    """Make it as its user does, and return its log."""
    if place.kind == "fakeredis":  # lives in this process alone
        monkeypatch.syspath_prepend(str(MESS.parent))
        runpy.run_path(str(MESS))["make_mess"](place.client)
        return caplog.text
    made = subprocess.run([sys.executable, str(MESS), place.url], capture_output=True, text=True, check=True)
    return made.stderr


def test_four_things_wrong_are_found_and_settled_with_the_commands_of_the_page(
    place: Place, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = make_mess(place, monkeypatch, caplog)
    monkeypatch.chdir(tmp_path)
    Path("answer.json").write_text('{"order": 3003}')
    ran: list[tuple[list[str], Ran]] = []
    for program, *words in commands("Exercise: four problems"):
        if program == "redis-cli":
            for node in primaries(place.client):
                node.execute_command(*words)
        else:
            assert program == "idemredis"
            ran.append((words, run(*words, namespace="idem")))
    told = {" ".join(words): answer for words, answer in reversed(ran)}  # the first answer to each

    before = told["doctor"]
    if place.kind == "fakeredis":  # it has no INFO, and says nothing about its memory
        assert "unknown  eviction" in before.out
    else:
        assert before.code == 1
        assert before.out.count("problem  eviction     maxmemory-policy is allkeys-lru") == len(place.nodes)
        assert "CONFIG SET maxmemory-policy noeviction" in before.out

    held = re.search(r"held_for_review: row (\w{12}) generation 2", log)
    assert held is not None
    listed = {line.split()[-2]: line.split() for line in told["ls"].out.splitlines()[1:]}
    assert list(listed)[2] == "acct_alice"
    assert set(listed) == {"acct_carol", "acct_bob", "acct_alice"}
    page = (ROOT / "docs" / "operations.md").read_text()
    digests = {who: re.findall(r"\b[0-9a-f]{12}\b", " ".join(words)) for who, words in listed.items()}
    assert all(digest in page for [digest] in digests.values())
    assert listed["acct_carol"][:2] == ["stale", "2"]
    assert listed["acct_carol"][-3] == "charging"
    assert digests["acct_carol"] == [held[1]]
    assert listed["acct_bob"][:2] == ["stale", "1"]
    assert listed["acct_alice"][:2] == ["pending", "1"]

    assert [(words, answer.code) for words, answer in ran[1:] if answer.code] == []
    [left] = [line.split() for line in told["ls --status released"].out.splitlines()[1:]]
    assert left[-2] == "acct_alice"
    assert told["ls --status stale"].out == ""
    after = [answer for words, answer in ran if words == ["doctor"]][-1]
    assert after.code == 0

    ledger = Ledger(place.client)
    asked = retry(ledger, "acct_carol", "order-3003")
    assert isinstance(asked, Replay)
    assert (asked.generation, asked.response.status) == (3, 201)
    assert asked.response.body == b'{"order": 3003}'
    assert dict(asked.response.headers) == {"Content-Type": "application/json"}
    new = retry(ledger, "acct_bob", "order-2002")
    assert isinstance(new, Reservation)
    assert new.generation == 1
    taken = retry(ledger, "acct_alice", "order-1001")
    assert isinstance(taken, Reservation)
    assert taken.generation == 2
    ledger.close()


def retry(ledger: Ledger, principal: str, key: str) -> Any:
    """What the client's next retry finds."""
    return ledger.claim(principal, key, fingerprint_value({"order": key}))


def test_a_hung_attempt_that_wakes_up_after_its_release_changes_nothing(place: Place, run: Run, ledger: Ledger) -> None:
    hung = ledger.claim("acct_alice", "order-1001", "f", lease=900)
    assert isinstance(hung, Reservation)
    assert run("release", "acct_alice", "order-1001", "--yes").code == 0
    taken = ledger.claim("acct_alice", "order-1001", "f")
    assert isinstance(taken, Reservation)
    before = place.client.hgetall(taken.identity.row)
    with pytest.raises(FencedOut):
        ledger.complete(hung, StoredResponse(201))
    assert place.client.hgetall(taken.identity.row) == before


@pytest.mark.slow
def test_the_first_five_minutes_of_the_page_run(run: Run, place: Place) -> None:
    for program, *words in commands("The first five minutes"):
        assert program == "idemredis"
        assert run(*words).code == 0, words
