"""What docs/operations.md says of a person's data that remain after `forget`, and of how to erase them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from idemredis import Ledger, Reservation, StoredResponse
from idemredis.operating.cli import main
from tests.support.servers import Server, redis_server, valkey
from tests.support.waiting import wait_until

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
SECRET = "the-person-s-secret"


@pytest.fixture(params=["valkey", "redis"])
def on_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A server that writes to disk, and logs every call as slow."""
    words = ("--appendonly", "yes", "--slowlog-log-slower-than", "0", "--save", "3600 1000000")
    with (valkey if request.param == "valkey" else redis_server)(tmp_path, *words) as server:
        yield server


def commands() -> list[list[str]]:
    section = PAGE.read_text().split("## Erasing a person's data\n", 1)[1].split("\n## ", 1)[0]
    return [shlex.split(line) for line in re.findall(r"^\$ (.+)$", section, re.MULTILINE)]


def copies(server: Server, client: Any) -> set[str]:
    """Where the secret still is: in memory, in files, or in what the server remembers of calls."""
    found = {path.name.split(".")[-1] for path in server.directory.rglob("*") if path.is_file() and has_secret(path)}
    if any(SECRET.encode() in client.hvals(name) for name in client.scan_iter() if client.type(name) == b"hash"):
        found.add("memory")
    if SECRET in str(client.execute_command("SLOWLOG", "GET", -1)):
        found.add("slowlog")
    return found


def has_secret(path: Path) -> bool:
    return SECRET.encode() in path.read_bytes()


def test_the_commands_of_the_page_leave_no_copy(on_disk: Server) -> None:
    with on_disk.client() as client:
        ledger = Ledger(client)
        r = ledger.claim("acct_alice", "order-1001", "f")
        assert isinstance(r, Reservation)
        ledger.complete(r, StoredResponse(201, (), SECRET.encode()))
        before = copies(on_disk, client)
        assert {"memory", "slowlog", "aof"} <= before

        run = commands()
        for words in run:
            if words[0] == "idemredis":
                ran = CliRunner().invoke(main, ["--url", on_disk.url, *words[1:]])
                assert ran.exit_code == 0, ran.output
                assert words[1] != "ls" or "order-1001" in ran.output
                if words[1] == "forget":
                    assert copies(on_disk, client) >= {"slowlog", "aof"}  # forgotten, and still there
            else:
                assert words[0] == "redis-cli"
                client.execute_command(*words[1:])
                wait_until(lambda: not is_writing(client))
        assert ["redis-cli", "BGREWRITEAOF"] in run
        assert copies(on_disk, client) == set()
        ledger.close()


def is_writing(client: Any) -> bool:
    info = client.info("persistence")
    names = ("aof_rewrite_in_progress", "aof_rewrite_scheduled", "rdb_bgsave_in_progress")
    return any(int(info[name]) for name in names)
