"""What happens is seen as it happens; who does not look pays nothing, and who publishes is never held up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from idemredis import Event, Ledger, Reservation, StoredResponse
from idemredis.operating.tables import print_event
from idemredis.operating.tail import Tail, TailEvent
from idemredis.telemetry import Publisher
from tests.support.place import Place, Run
from tests.support.proxy import Proxy
from tests.support.servers import Server, start
from tests.support.waiting import wait_until

ANSWER = StoredResponse(201, (), b"done")
REAL = pytest.mark.parametrize("place", ["valkey", "redis", "cluster"], indirect=True)


@contextmanager
def tailing(place: Place, namespace: str) -> Iterator[Callable[[str], TailEvent]]:
    """Give a function that waits for the next thing to be seen, which is of that kind."""
    with Tail(place.client, namespace) as tail:
        seen: list[TailEvent] = []

        def next_is(what: str) -> TailEvent:
            if not seen:
                seen.extend(wait_until(lambda: list(tail.look())))
            first = seen.pop(0)
            assert first.what == what
            return first

        yield next_is


@REAL
def test_every_transition_is_seen_in_the_row_itself(place: Place, ledger: Ledger, namespace: str) -> None:
    with tailing(place, namespace) as next_is:
        for i in range(3):  # on a cluster: on several nodes
            r = ledger.claim(f"acct_{i}", "k", "f", route="POST /charges/<id>")
            assert isinstance(r, Reservation)
            first = next_is("claimed")
            assert first.row is not None
            assert (first.row.identity, first.generation, first.route) == (r.identity, 1, "POST /charges/<id>")
            ledger.renew(r)
            next_is("renewed")
            ledger.checkpoint(r, "charged", 1)
            next_is("checkpointed")
            ledger.release(r)
            next_is("released")
            again = claimed(ledger, f"acct_{i}", "k")
            assert next_is("retried").generation == 2
            (ledger.fail if i else ledger.complete)(again, ANSWER)
            next_is("failed" if i else "completed")
            place.client.delete(r.identity.row)
            assert next_is("gone").row is None


@REAL
def test_refusals_are_seen_where_they_are_published_and_nothing_twice(place: Place, namespace: str) -> None:
    publisher = Publisher(place.client, namespace)
    ledger = Ledger(place.client, namespace=namespace, observers=[publisher])
    with tailing(place, namespace) as next_is:
        r = claimed(ledger, "a", "k")
        next_is("claimed")
        ledger.claim("a", "k", "g")
        next_is("reused")
        ledger.claim("a", "k", "f")
        next_is("in_progress")
        ledger.complete(r, ANSWER)
        next_is("completed")
        ledger.claim("a", "k", "f")
        assert next_is("replayed").digest
    publisher.close()
    ledger.close()


ROW = "0123456789ab"
GOOD = {"name": "fenced", "digest": ROW, "generation": 1, "operation": "", "route": "POST /x"}

FORGED: dict[str, bytes] = {
    "ESC in the name": json.dumps({**GOOD, "name": "\x1b[2Jfenced"}).encode(),
    "ESC in the digest": json.dumps({**GOOD, "digest": "\x1b]0;owned\x07"}).encode(),
    "a line break in the digest": json.dumps({**GOOD, "digest": "0123456789ab\n12:00:00.000  released"}).encode(),
    "a line break at the digest's end": json.dumps({**GOOD, "digest": f"{ROW}\n"}).encode(),
    "a line break at the name's end": json.dumps({**GOOD, "name": "fenced\n"}).encode(),
    "a name of another kind": json.dumps({**GOOD, "name": ["fenced"]}).encode(),
    "a digest of another kind": json.dumps({**GOOD, "digest": 7}).encode(),
    "an operation of another kind": json.dumps({**GOOD, "operation": {"a": 1}}).encode(),
    "a route that is null": json.dumps({**GOOD, "route": None}).encode(),
    "a long route": json.dumps({**GOOD, "route": "x" * 5000}).encode(),
    "a very long message": json.dumps({**GOOD, "more": "x" * 100_000}).encode(),
    "an infinite generation": json.dumps(GOOD).replace('"generation": 1', '"generation": 1e999').encode(),
    "NaN": json.dumps({**GOOD, "generation": float("nan")}).encode(),
    "a fraction": json.dumps({**GOOD, "generation": 1.5}).encode(),
    "a negative generation": json.dumps({**GOOD, "generation": -1}).encode(),
    "true": json.dumps({**GOOD, "generation": True}).encode(),
    "a huge generation": json.dumps({**GOOD, "generation": 10**400}).encode(),
    "digits without end": b'{"generation": ' + b"9" * 10_000 + b"}",
    "deep lists": b"[" * 10_000,
    "deep objects": b'{"generation":' * 3000,
    "no object": b"[]",
    "null": b"null",
    "no JSON": b"\x1b[2J",
    "no UTF-8": b"\xff\xfe" + json.dumps(GOOD).encode(),
    "empty": b"",
    "facts that are missing": b'{"name": "fenced"}',
}


@REAL
@pytest.mark.parametrize("as_json", [False, True])
def test_what_a_stranger_publishes_ends_nothing_and_is_not_shown(
    place: Place, namespace: str, as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with Tail(place.client, namespace) as tail:
        for message in FORGED.values():
            place.client.publish(f"{namespace}:idemredis-events", message)
        good = {**GOOD, "route": "POST /\x1b[2J\u202e", "operation": "a\nb"}
        place.client.publish(f"{namespace}:idemredis-events", json.dumps(good))
        [seen] = wait_until(lambda: list(tail.look()))
    assert (seen.what, seen.digest, seen.generation) == ("fenced", ROW, 1)
    print_event(seen, as_json)
    print_event(replace(seen, what="\x1b[2J", digest="\n"), as_json)  # escaped once more where it is printed
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == 2
    assert all(char.isprintable() or char == "\n" for char in printed)


@pytest.mark.parametrize("place", ["fakeredis"], indirect=True)
def test_where_rows_are_not_told_the_published_events_are_shown_alone(place: Place, run: Run, namespace: str) -> None:
    publisher = Publisher(place.client, namespace)
    ledger = Ledger(place.client, namespace=namespace, observers=[publisher])
    with Tail(place.client, namespace) as tail:
        assert not tail.sees_rows
        assert tail.why_not
        claimed(ledger, "a", "k")
        assert wait_until(lambda: [seen.what for seen in tail.look()]) == ["claimed"]
    assert "does not report which rows are written" in run("tail", "--seconds", "0").err
    publisher.close()
    ledger.close()


@pytest.mark.slow
@REAL
@pytest.mark.parametrize("verbose", [False, True])
def test_the_command_prints_a_line_for_each_and_renewals_only_when_asked(
    place: Place, ledger: Ledger, namespace: str, verbose: bool
) -> None:
    words = ["--url", place.url, "--namespace", namespace, "tail", "--json", *(["--verbose"] if verbose else [])]
    command = [sys.executable, "-c", "from idemredis.operating.cli import main; main()", *words]
    with ended(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)) as tail:
        assert tail.stdout is not None
        assert tail.stderr is not None
        assert "listening" in tail.stderr.readline()
        r = claimed(ledger, "acct_1", "order 1")
        told = [json.loads(tail.stdout.readline())]
        ledger.renew(r)
        if verbose:
            told.append(json.loads(tail.stdout.readline()))
        ledger.complete(r, ANSWER)
        told.append(json.loads(tail.stdout.readline()))
        tail.send_signal(signal.SIGINT)
        assert tail.wait(10.0) == 0
    assert [line["what"] for line in told] == ["claimed", *(["renewed"] if verbose else []), "completed"]
    assert all((line["principal"], line["key"]) == ("acct_1", "order 1") for line in told)


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_nobody_pays_while_nobody_listens(valkey_server: Server, namespace: str) -> None:
    """Without a tail no connection tracks; after one, none still does."""
    with valkey_server.client() as client:
        with Tail(client, namespace):
            wait_until(lambda: client.info("clients")["tracking_clients"] == 1)
        wait_until(lambda: client.info("clients")["tracking_clients"] == 0)


def test_a_publisher_drops_events_rather_than_hold_up_a_request(
    valkey_server: Server, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Proxy(valkey_server.port) as proxy, valkey_server.client() as client:
        away = redis.Redis.from_url(proxy.url)
        publisher = Publisher(away, namespace)
        ledger = Ledger(client, namespace=namespace, observers=[publisher])
        made: list[Reservation] = []

        def is_quick() -> bool:
            began = time.monotonic()
            for _ in range(20):
                made.append(claimed(ledger, "a", f"k{len(made)}"))
            return time.monotonic() - began < 2.0

        proxy.refuse()
        assert any(is_quick() for _ in range(3))  # a busy machine is slow once, a publisher that holds up each time
        wait_until(lambda: publisher.dropped == len(made))
        proxy.refuse(False)
        with client.pubsub(ignore_subscribe_messages=True) as listener:
            listener.subscribe(f"{namespace}:idemredis-events")
            listener.get_message(timeout=1.0)
            claimed(ledger, "a", "back")
            told = wait_until(lambda: listener.get_message(timeout=0.1))
        assert json.loads(told["data"])["name"] == "claimed"
        assert "back" not in str(told["data"])
        publisher.close()
        ledger.close()
        away.close()
    assert len([record for record in caplog.records if "cannot be published" in record.getMessage()]) == 1


def test_a_publisher_queues_no_more_than_it_may(namespace: str) -> None:
    started, go_on = threading.Event(), threading.Event()

    class Slow:
        def execute_command(self, *words: Any) -> None:
            started.set()
            go_on.wait(10.0)

    slow: Any = Slow()
    publisher = Publisher(slow, namespace)
    for _ in range(1500):
        publisher(Event("claimed", "0" * 12, "", 1, "", 0.0))
    assert started.wait(5.0)
    assert 400 <= publisher.dropped <= 500
    go_on.set()
    publisher.close()


def test_a_forked_child_publishes_too(valkey_server: Server, namespace: str) -> None:
    with valkey_server.client() as client, client.pubsub(ignore_subscribe_messages=True) as listener:
        listener.subscribe(f"{namespace}:idemredis-events")
        listener.get_message(timeout=1.0)
        publisher = Publisher(valkey_server.client(), namespace)
        publisher(Event("claimed", "0" * 12, "", 1, "", 0.0))
        wait_until(lambda: listener.get_message(timeout=0.1))
        child = os.fork()
        if child == 0:
            publisher(Event("completed", "0" * 12, "", 1, "", 0.0))
            publisher.close(30.0)
            os._exit(0)
        os.waitpid(child, 0)
        told = wait_until(lambda: listener.get_message(timeout=0.1))
        assert json.loads(told["data"])["name"] == "completed"
        publisher.close()


def claimed(ledger: Ledger, principal: str, key: str) -> Reservation:
    outcome = ledger.claim(principal, key, "f")
    assert isinstance(outcome, Reservation)
    return outcome


@pytest.mark.slow
def test_it_goes_on_after_the_server_was_started_again(tmp_path: Path, namespace: str) -> None:
    server = start("valkey", tmp_path / "server")
    command = [sys.executable, "-u", "-c", "from idemredis.operating.cli import main; main()"]
    words = ["--url", server.url, "--namespace", namespace, "tail"]
    with subprocess.Popen([*command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        try:
            assert "listening" in process.stderr.readline()
            with server.client() as client:
                claimed(Ledger(client, namespace=namespace), "a", "before")
            assert "claimed" in process.stdout.readline()
            server.kill()
            assert "connection lost" in process.stderr.readline()
            server.start()
            assert "connected again" in process.stderr.readline()
            with server.client() as client:
                claimed(Ledger(client, namespace=namespace), "a", "after")
            assert "claimed" in process.stdout.readline()
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 0
        finally:
            process.kill()
            server.stop()


@REAL
def test_a_retry_after_a_release_is_told_from_a_takeover_after_a_death(
    place: Place, ledger: Ledger, namespace: str
) -> None:
    with tailing(place, namespace) as next_is:
        for what in ("retried", "taken_over"):
            first = ledger.claim("a", what, "f", lease=0.3)
            assert isinstance(first, Reservation)
            next_is("claimed")
            if what == "retried":
                ledger.release(first)
                next_is("released")
            assert isinstance(ledger.claim("a", what, "f", wait=5.0), Reservation)
            assert next_is(what).generation == 2
