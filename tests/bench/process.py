"""What the package costs its process: imports, large uploads, heartbeats."""

from __future__ import annotations

import compileall
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import idemredis
from idemredis import Ledger, Policy, Reservation
from tests.support.servers import Server

from .calls import FINGERPRINT, key
from .turns import Figure

__all__ = ["heartbeats", "imports", "uploads"]

HELD = 1000

IMPORT = "import time; began = time.perf_counter(); import {0}; print(time.perf_counter() - began)"

UPLOAD = """
import hashlib, io, json, resource, sys, tempfile, time
from flask import Flask
from werkzeug.test import EnvironBuilder
from idemredis import Ledger
from idemredis.flask import Idempotency

SIZE, CHUNK = 200_000_000, bytes(64 * 1024)

class Upload(io.RawIOBase):
    left = SIZE
    def readable(self): return True
    def readinto(self, buffer):
        size = min(len(buffer), self.left, len(CHUNK))
        buffer[:size] = CHUNK[:size]
        self.left -= size
        return size

app = Flask("uploads")
ledger = Ledger.from_url(sys.argv[1])
idempotency = Idempotency(app, principal="acct_1", ledger=ledger)
app.add_url_rule("/files", view_func=idempotency.protect(lambda: "stored"), methods=["POST"])
environ = EnvironBuilder("/files", method="POST").get_environ()

def send(number, size=SIZE):
    body = Upload()
    body.left = size
    sent = {**environ, "wsgi.input": body, "CONTENT_LENGTH": str(size), "HTTP_IDEMPOTENCY_KEY": str(number)}
    answer = app.wsgi_app(sent, lambda status, headers, info=None: None)
    assert b"".join(answer) == b"stored"
    answer.close()

def digest():
    hashed = hashlib.sha256()
    body = Upload()
    while piece := body.read(64 * 1024):
        hashed.update(piece)

def digest_to_file():
    hashed = hashlib.sha256()
    body = Upload()
    with tempfile.TemporaryFile() as file:
        while piece := body.read(64 * 1024):
            hashed.update(piece)
            file.write(piece)

def timed(run, *args):
    began = time.perf_counter()
    run(*args)
    return time.perf_counter() - began

def rss():
    if sys.platform == "linux":  # ru_maxrss would begin with that of the parent
        return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

send("small", 1000)
digest()
before = rss()
times = [(timed(send, number), timed(digest), timed(digest_to_file)) for number in range(5)]
ledger.close()
print(json.dumps({"times": times, "more": rss() - before}))
"""


def imports(server: Server) -> Iterable[Figure]:
    """`import idemredis` against `import redis`, a process each, in turns; both compiled, as pip leaves them."""
    compileall.compile_dir(Path(idemredis.__file__).parent, quiet=1)
    times: dict[str, list[float]] = {"redis": [], "idemredis": []}
    for _ in range(12):
        for name, taken in times.items():
            ran = subprocess.run(
                [sys.executable, "-c", IMPORT.format(name)], capture_output=True, text=True, check=True
            )
            taken.append(float(ran.stdout) * 1000)
    redis, ours = (statistics.median(taken[1:]) for taken in times.values())
    note = f"redis {redis:.0f} ms, idemredis {ours:.0f} ms"
    yield Figure("import idemredis less import redis", ours - redis, "ms", 30, note=note)


def uploads(server: Server) -> Iterable[Figure]:
    """200 MB through `protect` against the SHA-256 of the same bytes."""
    ran = subprocess.run(
        [sys.executable, "-c", UPLOAD, server.url], capture_output=True, text=True, check=True, timeout=120
    )
    result = json.loads(ran.stdout)
    ours, sha, kept = (statistics.median(times) for times in zip(*result["times"], strict=True))
    ratio = statistics.median(a / b for a, b, _ in result["times"])
    least = statistics.median(c / b for _, b, c in result["times"])
    yield Figure("200 MB upload : SHA-256", ratio, "x", 1.5, note=f"{ours:.2f} s and {sha:.2f} s")
    yield Figure("200 MB: SHA-256 and a temporary file : SHA-256 (the least)", least, "x", note=f"{kept:.2f} s")
    yield Figure("200 MB upload: more resident memory at the peak", result["more"], "MB", 32)


def heartbeats(server: Server) -> Iterable[Figure]:
    """CPU of a process that holds 1 000 reservations, their leases renewed at a third of the default 30 s."""
    lease, beats = 1.5, 8
    with server.client() as client:
        ours = Ledger(client, Policy(lease=lease))
        held = [ours.claim("acct_1", key(), FINGERPRINT) for _ in range(HELD)]
        began = time.process_time()
        client.config_resetstat()
        for r in held:
            assert isinstance(r, Reservation)
            ours.start_heartbeat(r)
        began = time.process_time()
        time.sleep(lease / 3 * beats)
        spent = time.process_time() - began
        renewed = client.info("commandstats")["cmdstat_evalsha"]["calls"]
        lost = sum(not (isinstance(r, Reservation) and r.held) for r in held)
        for r in held:
            assert isinstance(r, Reservation)
            ours.hold(r)
        ours.close()
    each = spent / renewed
    share = each * HELD / (Policy().lease / 3) * 100
    note = f"{each * 1e6:.0f} µs a renewal; {renewed} renewed at a lease of {lease} s, {lost} lost"
    yield Figure("heartbeat of 1 000 reservations: share of a core", share, "%", 5, note=note)
