"""`make demo` and `make serve`, run as their users run them."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.processes import mortal
from tests.support.waiting import wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"

SCENES = """\
1. A first charge
2. Its retry gets the same bytes, and charges nothing
3. Two at once: one runs, the other is told when to ask again
4. The same key with another amount is refused
5. The same key from another account is another operation
6. No key: nothing runs
7. A worker is killed after the card was charged, and before the order was recorded
8. Its retry is told to wait while the dead worker's lease lasts
9. After the lease it takes over at generation 2; the gateway knows its key, and does not charge again
10. What alice has ordered, and paid for, once each"""


@contextmanager
def running(example: str, directory: Path, **env: str) -> Iterator[subprocess.Popen[str]]:
    command = mortal([sys.executable, "-u", str(EXAMPLES / example)])
    with subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": str(directory), **env},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def served(output: str) -> list[int]:
    """The ports of the shop and of its ledger, as the output names them."""
    ports = {int(port) for port in re.findall(r"://127\.0\.0\.1:(\d+)", output)}
    assert len(ports) == 2
    return sorted(ports)


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def read_until(process: subprocess.Popen[str], line: str) -> str:
    output = ""
    assert process.stdout is not None
    while line not in output:
        more = process.stdout.readline()
        assert more, f"it ended without {line!r}:\n{output}"
        output += more
    return output


@pytest.mark.timeout(90)
def test_the_demo_plays_every_scene_and_ends_with_status_0(tmp_path: Path) -> None:
    with running("demo.py", tmp_path) as demo:
        output, _ = demo.communicate(timeout=75)

    assert demo.returncode == 0, output
    assert re.findall(r"^\d+\. .*$", output, re.MULTILINE) == SCENES.splitlines()
    assert output.endswith("Every answer was right.\n")
    assert not any(map(listening, served(output)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(90)
def test_the_demo_shows_requests_answers_and_rows_as_curl_and_redis_cli_do(tmp_path: Path) -> None:
    with running("demo.py", tmp_path) as demo:
        output = read_until(demo, "3. Two at once")

    for line in (
        "> POST /charges",
        "> Idempotency-Key: order-1001",
        '> {"card":"tok_visa","amount":1999}',
        "< 201 CREATED",
        "< Idempotent-Replayed: true",
        "$ redis-cli HGETALL idem:acct_alice:order-1001",
    ):
        assert line in output.splitlines()
    assert re.search(r'^ ?\d+\) "status"\n ?\d+\) "completed"$', output, re.MULTILINE)
    assert re.search(r'^ ?\d+\) "\[\[\\"Content-Type\\",\\"application/json\\"\]', output, re.MULTILINE)


@pytest.mark.timeout(90)
def test_the_demo_names_the_answer_that_is_not_what_it_should_be_and_ends_with_status_1(tmp_path: Path) -> None:
    with running("demo.py", tmp_path, SHOP_IDEMREDIS_PROTOCOL="ietf") as demo:  # where reuse is a 422
        output, _ = demo.communicate(timeout=75)

    assert demo.returncode == 1
    _, verdict = output.split("Not every answer was right:\n")
    assert "4. The same key with another amount is refused: expected status 409" in verdict.splitlines()
    assert "1. A first charge" not in verdict
    assert not any(map(listening, served(output)))


@pytest.mark.timeout(90)
def test_the_demo_finds_out_when_each_worker_has_a_ledger_of_its_own(tmp_path: Path) -> None:
    with running("demo.py", tmp_path, SHOP_IDEMREDIS_URL="memory://") as demo:
        output, _ = demo.communicate(timeout=75)

    assert demo.returncode == 1
    assert "3. Two at once: one runs, the other is told when to ask again: expected status 409 for the other" in output


@pytest.mark.timeout(90)
def test_nothing_goes_on_when_the_demo_is_killed_half_way(tmp_path: Path) -> None:
    with running("demo.py", tmp_path) as demo:
        output = read_until(demo, "3. Two at once")
        ports = served(output)
        assert all(map(listening, ports))
        demo.kill()
        wait_until(lambda: not any(map(listening, ports)), seconds=10)


@pytest.mark.timeout(90)
def test_the_shop_is_served_until_ctrl_c_and_its_curl_lines_work(tmp_path: Path) -> None:
    with running("serve.py", tmp_path) as shop:
        output = read_until(shop, "redis-cli -u")
        command = shlex.split(re.findall(r"curl -i .*\\\n.*", output)[0].replace("\\\n", ""))
        url = command[2]
        headers = dict(command[i + 1].split(": ") for i, word in enumerate(command) if word == "-H")
        content = command[command.index("-d") + 1]
        answers = [httpx.post(url, headers=headers, content=content, timeout=30) for _ in range(2)]
        shop.send_signal(signal.SIGINT)
        status = shop.wait(10)

    assert [answer.status_code for answer in answers] == [201, 201]
    assert answers[1].content == answers[0].content
    assert answers[1].headers["Idempotent-Replayed"] == "true"
    assert status == 0
    assert not any(map(listening, served(output)))
    assert list(tmp_path.iterdir()) == []
