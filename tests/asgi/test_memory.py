"""What 200 MB in either direction cost a process of uvicorn: neither is held in memory."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.served_asgi import LARGE, PIECE
from tests.support.servers import Server
from tests.support.serving import Served, read_answer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the peak of a process"),
]

MORE = 32 * 1024
"""KiB by which resident memory may grow at its peak."""


@pytest.fixture
def uvicorn(valkey_server: Server) -> Iterator[Served]:
    """One process that has already served a request of each kind, so that what those import is in memory."""
    with Served("uvicorn", valkey_server.url) as served:
        assert served.post("small").status == 201
        assert served.post("small-stream", "/answers/stream").status == 201
        yield served


class Peak:
    """The peak of a process's resident memory, from now on."""

    def __init__(self, pid: int) -> None:
        self._process = Path("/proc") / str(pid)
        (self._process / "clear_refs").write_text("5")  # the peak begins anew
        self._before = self._read("VmRSS")

    def more(self) -> int:
        """Return by how many KiB it has grown."""
        return self._read("VmHWM") - self._before

    def _read(self, name: str) -> int:
        found = re.search(rf"^{name}:\s+(\d+) kB$", (self._process / "status").read_text(), re.MULTILINE)
        assert found is not None
        return int(found[1])


def _pid(served: Served) -> int:
    pid: int = served.post("who").json["server"]
    return pid


def test_an_upload_of_200_mb_is_not_held_in_memory(uvicorn: Served) -> None:
    peak, piece, digest = Peak(_pid(uvicorn)), bytes(PIECE), hashlib.sha256()
    head = (
        f"POST /charges HTTP/1.1\r\nHost: shop\r\nConnection: close\r\nIdempotency-Key: up\r\nContent-Length: {LARGE}"
    )
    with uvicorn.connect() as connection:
        connection.settimeout(120)
        connection.sendall(f"{head}\r\n\r\n".encode())
        for _ in range(LARGE // PIECE):
            connection.sendall(piece)
            digest.update(piece)
        answer = read_answer(connection)
    assert (answer.status, answer.json["size"], answer.json["sha256"]) == (201, LARGE, digest.hexdigest())
    assert peak.more() < MORE


def test_a_streamed_response_of_200_mb_is_not_held_in_memory(uvicorn: Served) -> None:
    peak = Peak(_pid(uvicorn))
    with uvicorn.send("down", "/answers/large") as connection:
        connection.settimeout(120)
        answer = read_answer(connection)
    assert (answer.status, len(answer.body)) == (201, LARGE)
    assert peak.more() < MORE
    assert uvicorn.post("down", "/answers/large").error == "idempotency_response_not_stored"
