"""A ledger in a real uWSGI, which forks its workers without running Python's hooks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from tests.support.processes import mortal
from tests.support.servers import Server, free_port
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
UWSGI = Path(sys.executable).with_name("uwsgi")


@contextmanager
def uwsgi(server: Server, namespace: str, stats: Path, *options: str) -> Iterator[str]:
    """Run uWSGI with two workers, and yield its address."""
    if not UWSGI.exists():
        if os.environ.get("CI"):
            pytest.fail("uWSGI is not installed")
        pytest.skip("uWSGI is not installed")
    address = f"127.0.0.1:{free_port()}"
    command: list[str | Path] = [
        UWSGI,
        "--http-socket",
        address,
        "--module",
        "tests.support.uwsgi_app",
        "--master",
        "--processes",
        "2",
    ]
    command += ["--stats", stats, "--die-on-term", "--no-orphans", "--virtualenv", sys.prefix, *options]
    environment = {**os.environ, "LEDGER_URL": server.url, "LEDGER_NAMESPACE": namespace, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        mortal([str(word) for word in command]),
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield f"http://{address}"
        finally:
            process.terminate()
            try:
                process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()


def get(url: str) -> str:
    return httpx.get(url, timeout=40.0).text


def get_or_die(url: str) -> str:
    """Return the response, or "died" if the worker was killed."""
    with suppress(httpx.TransportError):
        return get(url)
    return "died"


def is_up(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/up/up", timeout=20.0).status_code == 200
    return False


def busy_worker(stats: Path) -> int:
    """Return the process id of the worker that runs a request, or 0 if there is none."""
    read = subprocess.run([UWSGI, "--connect-and-read", stats], capture_output=True, text=True, timeout=20, check=False)
    with suppress(ValueError):
        for worker in json.loads(read.stdout or read.stderr)["workers"]:
            if worker["status"] == "busy":
                return int(worker["pid"])
    return 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--enable-threads",)], ids=["no threads", "threads"])
def test_a_worker_of_uwsgi_renews_its_leases_and_when_it_is_killed_another_one_takes_over(
    valkey_server: Server, namespace: str, tmp_path: Path, options: tuple[str, ...]
) -> None:
    stats = tmp_path / "s"
    with uwsgi(valkey_server, namespace, stats, *options) as url, ThreadPoolExecutor() as clients:
        wait_until(lambda: is_up(url))
        both = [clients.submit(get, f"{url}/hold/k{i}") for i in range(2)]
        assert [future.result() for future in both] == ["generation 1 held True"] * 2

        dying = clients.submit(get_or_die, f"{url}/first/doomed")
        os.kill(wait_until(lambda: busy_worker(stats)), signal.SIGKILL)
        assert dying.result() == "died"
        assert get(f"{url}/first/doomed") == "generation 2 held True"
        assert get(f"{url}/first/doomed") == "replay of generation 2 held True"
