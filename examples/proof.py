"""Functions that the examples share: report a result, wait for another process, and serve an application."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from embedded import free_port, running, wait_until_up

T = TypeVar("T")

HERE = Path(__file__).parent


def prove(what: str, holds: bool) -> None:
    """Print what was checked; exit with status 1 if it does not hold."""
    print("proved:" if holds else "NOT SO:", what, flush=True)
    if not holds:
        sys.exit(1)


def wait_for(what: Callable[[], T | None], seconds: float = 20.0) -> T:
    """Call a function until its result is true, and return the result."""
    until = time.monotonic() + seconds
    while not (answer := what()):
        if time.monotonic() > until:
            sys.exit(f"it did not happen within {seconds:g} s")
        time.sleep(0.02)
    return answer


@contextmanager
def script(name: str, *words: str, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run an example's file as another process, with arguments on its command line."""
    with running([sys.executable, str(HERE / name), *words], env={**os.environ, **env}) as process:
        yield process


@contextmanager
def serving(app: str, server: str = "gunicorn", **env: str) -> Iterator[str]:
    """Serve an application of this folder with two workers, under gunicorn or uvicorn, and yield its URL."""
    port = free_port()
    if server == "gunicorn":
        words = ["--bind", f"127.0.0.1:{port}", "--threads", "4", "--log-level", "critical"]
        words += ["--no-control-socket", "--graceful-timeout", "1", "--pythonpath", str(HERE)]
    else:
        words = ["--port", str(port), "--log-level", "critical", "--app-dir", str(HERE)]
        words += ["--timeout-graceful-shutdown", "1", "--timeout-worker-healthcheck", "60"]
    command = [sys.executable, "-m", server, "--workers", "2", *words, app]
    with running(command, env={**os.environ, **env}) as process:
        wait_until_up(process, lambda: socket.create_connection(("127.0.0.1", port), 1).close())
        yield f"http://127.0.0.1:{port}"
