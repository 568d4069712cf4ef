"""Requests a second of gunicorn, protected against unprotected, under wrk."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import httpx

from tests.support.servers import Server, free_port
from tests.support.waiting import wait_until

from .turns import Figure

__all__ = ["gunicorn"]

SECONDS = 3
ROUNDS = 4

ORDER = '{"amount":1000}'
ALWAYS = {"Content-Type": "application/json", "Idempotency-Key": "always"}

APPLICATION = """
import os
from itertools import count
from flask import Flask
from idemredis import Ledger
from idemredis.flask import Idempotency

app = Flask(__name__)
ledger = Ledger.from_url(os.environ["BENCH_URL"])
idempotency = Idempotency(app, principal="acct_1", ledger=ledger)
numbers = count()
BODY = b'{"id":"ch_1","amount":1000}'.ljust(500)

def charge():
    return BODY, 201, {"Content-Type": "application/json"}

def set_twice():
    row = f"bench:{os.getpid()}:{next(numbers)}"
    ledger.client.set(row, "pending", nx=True, px=30000)
    ledger.client.set(row, BODY, px=86400000)
    return charge()

app.add_url_rule("/plain", "plain", charge, methods=["POST"])
app.add_url_rule("/set_twice", "set_twice", set_twice, methods=["POST"])
app.add_url_rule("/protected", "protected", idempotency.protect(charge), methods=["POST"])
"""

SCRIPT = """
local number, thread = 0, 0
function setup(each) thread = thread + 1; each:set("name", thread) end
function request()
  number = number + 1
  local key = KEY or string.format("8e03978e-40d5-%s-%d-%010d", RUN, name, number)
  return wrk.format("POST", PATH, {["Content-Type"] = "application/json", ["Idempotency-Key"] = key}, '{"amount":1000}')
end
"""


def gunicorn(server: Server) -> Iterable[Figure]:
    """2 workers of gthread with 4 threads, 8 connections, a new key a request; and replays of one key."""
    wrk = shutil.which("wrk")
    if wrk is None:
        yield Figure("gunicorn under wrk", 0.0, "", note="not measured: there is no wrk on PATH")
        return
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "bench_app.py").write_text(APPLICATION)
        port = free_port()
        words = [
            sys.executable,
            "-m",
            "gunicorn",
            "-b",
            f"127.0.0.1:{port}",
            "-w",
            "2",
            "-k",
            "gthread",
            "--threads",
            "4",
        ]
        words += ["--log-level", "error", "--chdir", name, "bench_app:app"]
        process = subprocess.Popen(words, env={**os.environ, "BENCH_URL": server.url})
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until(lambda: _answers(url), 20.0)
            httpx.post(f"{url}/protected", content=ORDER, headers=ALWAYS).raise_for_status()
            served: dict[str, list[float]] = {"plain": [], "protected": [], "replay": [], "set_twice": []}
            for turn in range(ROUNDS):
                for kind, rates in served.items():
                    path = "protected" if kind == "replay" else kind
                    key = f'"{ALWAYS["Idempotency-Key"]}"' if kind == "replay" else "nil"
                    script = directory / "request.lua"
                    script.write_text(f'PATH, KEY, RUN = "/{path}", {key}, "{turn}{kind}"\n{SCRIPT}')
                    rates.append(_rate(wrk, url, script))
        finally:
            process.terminate()
            process.wait(10.0)
    for kind, aim in (("protected", 0.6), ("replay", None), ("set_twice", None)):
        ratio = statistics.median(a / b for a, b in zip(served[kind][1:], served["plain"][1:], strict=True))
        note = f"{statistics.median(served[kind][1:]):.0f} and {statistics.median(served['plain'][1:]):.0f} requests/s"
        what = {"set_twice": "a view that sends SET NX and SET itself"}.get(kind, kind)
        yield Figure(f"gunicorn: {what} : unprotected", ratio, "x", aim, at_least=True, note=note)


def _rate(wrk: str, url: str, script: Path) -> float:
    ran = subprocess.run(
        [wrk, "-t", "1", "-c", "8", "-d", f"{SECONDS}s", "-s", str(script), url],
        capture_output=True,
        text=True,
        check=True,
    )
    if "Non-2xx" in ran.stdout:
        raise RuntimeError(ran.stdout)
    found = re.search(r"Requests/sec: +([\d.]+)", ran.stdout)
    assert found is not None, ran.stdout
    return float(found[1])


def _answers(url: str) -> bool:
    try:
        return httpx.post(f"{url}/plain").status_code == 201
    except httpx.TransportError:
        return False
