"""What a row costs the server: CPU, memory, and how both grow with the number of rows and of primaries."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import redis

from idemredis import Ledger
from idemredis.core.scripts import load
from tests.support.clusters import Cluster
from tests.support.servers import Server, start

from .calls import CREATED_AT, FINGERPRINT, HEADERS, LEASE, OWNER, RETENTION, Raw, key
from .turns import Figure, in_turns

__all__ = ["cluster", "hot_key", "io_threads", "many_rows", "memory", "server_cpu"]

ROWS = 100_000
MANY = 1_000_000
BATCH = 1000

PLAIN_WRITE = """
redis.call('HSET', KEYS[1], 'status', 'pending', 'generation', '1', 'owner', ARGV[1], 'fingerprint', ARGV[2],
  'lease', ARGV[3], 'retention', ARGV[4], 'created_at', ARGV[5])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return {'claimed', ARGV[1], '1'}
"""

LEAST_CLAIM = """
redis.call('HMGET', KEYS[1], 'status', 'generation', 'owner', 'fingerprint', 'lease', 'retention')
if redis.call('PTTL', KEYS[1]) ~= -2 then return {} end
redis.call('HSET', KEYS[1], 'status', 'pending', 'generation', '1', 'owner', ARGV[1], 'fingerprint', ARGV[2],
  'lease', ARGV[3], 'retention', ARGV[4], 'created_at', ARGV[5])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return {'claimed', ARGV[1], '1'}
"""

FORMER_RENEW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local current = redis.call('HMGET', KEYS[1], 'status', 'generation', 'owner')
if current[1] ~= 'pending' or current[2] ~= ARGV[1] or current[3] ~= ARGV[2] then return {'fenced'} end
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('HSET', KEYS[1], 'lease_until', string.format('%.0f', now + ARGV[3]),
  'updated_at', string.format('%.0f', now))
return {'renewed', ARGV[3]}
"""
"""Of the first version of the row, which kept absolute times."""

FILL = """
for i = ARGV[1], ARGV[2] do
  local row = 'idem:filled:8e03978e-40d5-43dd-bc93-' .. string.format('%012x', i)
  redis.call('HSET', row, 'status', 'pending', 'generation', '1', 'owner', ARGV[3], 'fingerprint', ARGV[4],
    'lease', ARGV[7], 'retention', ARGV[8], 'created_at', ARGV[5])
  redis.call('PEXPIREAT', row, ARGV[6])
end
"""


def server_cpu(server: Server) -> Iterable[Figure]:
    """CPU of the server a call, by its own count, against a script that writes the same fields and sets the TTL."""
    with server.client() as client:
        raw: Any = client
        ours, plain, least = Raw(client), client.script_load(PLAIN_WRITE), client.script_load(LEAST_CLAIM)
        now = str(time.time_ns() // 1_000_000)
        args = (OWNER, FINGERPRINT, LEASE, RETENTION, now)
        held = f"idem:acct_1:{key()}"
        ours.claim(held)
        former, former_row = client.script_load(FORMER_RENEW), f"idem:acct_1:{key()}"
        ours.claim(former_row)
        done = key()
        ours.claim(f"idem:acct_1:{done}")
        ours.complete(f"idem:acct_1:{done}")
        replayed = f"idem:acct_1:{done}"
        kinds: dict[str, Callable[[], object]] = {
            "claim": lambda: ours.claim(f"idem:acct_1:{key()}"),
            "plain": lambda: raw.evalsha(plain, 1, f"idem:acct_1:{key()}", *args),
            "replay": lambda: ours.claim(replayed),
            "least": lambda: raw.evalsha(least, 1, f"idem:acct_1:{key()}", *args),
            "renew": lambda: ours.renew(held),
            "former renew": lambda: raw.evalsha(former, 1, former_row, "1", OWNER, LEASE, RETENTION),
        }
        spent: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(21):
            for name, run in kinds.items():
                client.config_resetstat()
                for _ in range(300):
                    run()
                spent[name].append(client.info("commandstats")["cmdstat_evalsha"]["usec_per_call"])
    claim, plain_write, replay, _, renew, former_renew = (statistics.median(spent[name][1:]) for name in kinds)

    def ratio(name: str) -> float:
        return statistics.median(a / b for a, b in zip(spent[name][1:], spent["plain"][1:], strict=True))

    note = f"claim {claim:.1f} µs, plain {plain_write:.1f}, replay {replay:.1f}, renew {renew:.1f}"
    aim = 1.35 if server.kind == "redis" else 1.4
    yield Figure("server CPU: claim : HSET of the same fields + PEXPIRE", ratio("claim"), "x", aim, note=note)
    yield Figure("server CPU: with HMGET and PTTL too : that (the least)", ratio("least"), "x")
    yield Figure("server CPU: renew : one that writes absolute times", renew / former_renew, "x", 0.75)
    yield Figure("server CPU: claims a second of one core", 1e6 / claim, "/s")


def hot_key(server: Server) -> Iterable[Figure]:
    """10 000 duplicates of one key."""
    with server.client() as client:
        ours = Ledger(client)
        ours.claim("acct_1", "hot", FINGERPRINT)
        ours.claim("acct_1", "hot", FINGERPRINT)
        client.config_resetstat()
        turns = in_turns({"refusal": lambda: ours.claim("acct_1", "hot", FINGERPRINT)}, rounds=99, calls=100)
        stats = client.info("commandstats")["cmdstat_evalsha"]
        ours.close()
    note = f"{turns.note('refusal')}; server {stats['usec_per_call']:.1f} µs each"
    yield Figure("10 000 duplicates of one key: a refusal", turns.p50("refusal"), "µs", note=note)


def memory(server: Server) -> Iterable[Figure]:
    """Bytes a row, all in, against the same data packed in one string."""
    with server.client() as client:
        for listpack, name in ((None, "default"), (8192, "hash-max-listpack-value 8192")):
            if listpack is not None:
                client.config_set("hash-max-listpack-value", listpack)
            for what, size in (("pending", None), ("completed 500 B", 500), ("completed 4 KB", 4096)):
                if listpack is not None and size is None:
                    continue
                row, packed = _bytes_each(client, size, pack=False), _bytes_each(client, size, pack=True)
                aim = 1.9 if size is None else 1.1 if listpack else None
                note = f"{row:.0f} B a row, packed {packed:.0f} B"
                yield Figure(f"memory, {name}: {what} : packed", row / packed, "x", aim, note=note)


def _bytes_each(client: redis.Redis, size: int | None, *, pack: bool) -> float:
    _empty(client)
    before = client.info("memory")["used_memory"]
    now = str(time.time_ns() // 1_000_000)
    claim, complete = load()["claim"], load()["complete"]
    for script in (claim, complete):
        client.script_load(script.text)
    body = b"x" * (size or 0)
    for first in range(0, ROWS, BATCH):
        pipeline: Any = client.pipeline(transaction=False)
        for _ in range(first, min(first + BATCH, ROWS)):
            row = f"idem:acct_1:{key()}"
            if not pack:
                pipeline.evalsha(claim.sha, 1, row, OWNER, FINGERPRINT, LEASE, RETENTION, now, "")
                if size is not None:
                    pipeline.evalsha(complete.sha, 1, row, 1, OWNER, RETENTION, 201, HEADERS, body, "")
                continue
            fields = ["1", "pending", OWNER, FINGERPRINT, str(LEASE), str(RETENTION), now]
            if size is not None:
                fields += ["201", HEADERS]
            pipeline.set(row, "\n".join(fields).encode() + body, px=RETENTION)
        pipeline.execute()
    used = client.info("memory")["used_memory"] - before
    _empty(client)
    return float(used / ROWS)


def _empty(client: redis.Redis) -> None:
    """By default Valkey goes on freeing in the background, and counts what is not freed yet as used."""
    raw: Any = client
    raw.execute_command("FLUSHALL", "SYNC")


def many_rows(server: Server) -> Iterable[Figure]:
    """Claims beside a thousand rows and, on a server of its own, beside a million; and while the million expires."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        other = start(server.kind, directory)
        stack.callback(other.stop)
        few, many = (stack.enter_context(each.client(socket_timeout=60.0)) for each in (server, other))
        _fill(few, 1000, expire_at=_seconds_from_now(600))
        _fill(many, MANY, expire_at=_seconds_from_now(600))
        beside_few, beside_many = Ledger(few), Ledger(many)
        turns = in_turns(
            {
                "a thousand": lambda: beside_few.claim("acct_1", key(), FINGERPRINT),
                "a million": lambda: beside_many.claim("acct_1", key(), FINGERPRINT),
            }
        )
        ratio = turns.ratio("a million", "a thousand")
        yield Figure("claim: a million rows : a thousand", ratio, "x", 1.1, note=turns.note("a million", "a thousand"))
        used = many.info("memory")["used_memory_human"]
        yield Figure("rows beside it", float(many.dbsize()), "", note=f"used_memory {used}")

        _empty(many)
        due = _seconds_from_now(30)
        _fill(many, MANY, expire_at=due)
        while time.time() * 1000 < due:
            time.sleep(0.05)
        times: list[float] = []
        began = time.perf_counter()
        gone_before = many.info("stats")["expired_keys"]
        while time.perf_counter() - began < 20 and many.dbsize() > len(times) + 1:
            for _ in range(100):
                sent = time.perf_counter()
                beside_many.claim("acct_1", key(), FINGERPRINT)
                times.append((time.perf_counter() - sent) * 1e6)
        drained = time.perf_counter() - began
        gone = many.info("stats")["expired_keys"] - gone_before
        cuts = statistics.quantiles(times, n=1000)
        note = f"p50 {cuts[499]:.0f}, p99.9 {cuts[998]:.0f} µs; {gone} rows gone in {drained:.1f} s"
        yield Figure("claim p99 while a million rows expire at once", cuts[989], "µs", note=note)


def _fill(client: redis.Redis, many: int, *, expire_at: int) -> None:
    script: Any = client.register_script(FILL)
    now = str(time.time_ns() // 1_000_000)
    for first in range(0, many, 20 * BATCH):
        last = min(first + 20 * BATCH, many) - 1
        script(args=[first, last, OWNER, FINGERPRINT, now, expire_at, LEASE, RETENTION])


def _seconds_from_now(seconds: float) -> int:
    return round((time.time() + seconds) * 1000)


def cluster(server: Server) -> Iterable[Figure]:
    """Server CPU a claim on clusters of 1, 2 and 3 primaries, in turns; one key a script, so it must not grow.

    The primaries are pinned to the cores in turn, where the system can do that.
    """
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        clusters = {}
        for primaries in (1, 2, 3):
            made = Cluster(stack, directory / str(primaries), server=server.kind, primaries=primaries)
            if sys.platform == "linux":
                cores = sorted(os.sched_getaffinity(0))
                for i, node in enumerate(made.nodes):
                    os.sched_setaffinity(node.pid, {cores[i % len(cores)]})
            client = redis.RedisCluster(host="127.0.0.1", port=made.nodes[0].port)
            stack.callback(client.close)
            masters = {f"127.0.0.1:{node.port}": stack.enter_context(node.client()) for node in made.nodes}
            for master in masters.values():
                master.script_load(load()["claim"].text)
            clusters[primaries] = client, masters
        spent: dict[int, list[float]] = {primaries: [] for primaries in clusters}
        for _ in range(16):
            for primaries, (client, masters) in clusters.items():
                spent[primaries].append(_claim_cpu(client, masters))
    for primaries, each in spent.items():
        ratio = statistics.median(a / b for a, b in zip(each[1:], spent[1][1:], strict=True))
        note = f"{statistics.median(each[1:]):.1f} µs"
        aim = None if primaries == 1 else 1.1
        yield Figure(f"cluster of {primaries}: server CPU a claim : of 1", ratio, "x", aim, note=note)


def io_threads(server: Server) -> Iterable[Figure]:
    """Claims a second under redis-benchmark (50 connections) with 1, 2 and 4 `io-threads`, in turns."""
    benchmark = shutil.which("redis-benchmark")
    if benchmark is None:
        yield Figure("io-threads", 0.0, "", note="not measured: there is no redis-benchmark on PATH")
        return
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {}
        for threads in (1, 2, 4):
            servers[threads] = start(server.kind, directory / str(threads), "--io-threads", str(threads))
            stack.callback(servers[threads].stop)
        rates: dict[int, list[float]] = {threads: [] for threads in servers}
        for _ in range(6):
            for threads, each in servers.items():
                rates[threads].append(_claims_a_second(benchmark, each))
    for threads, each_rate in rates.items():
        note = f"of {os.cpu_count()} cores, which redis-benchmark shares" if threads > 1 else ""
        yield Figure(f"io-threads {threads}: claims a second", statistics.median(each_rate[1:]), "/s", note=note)


def _claims_a_second(benchmark: str, server: Server, claims: int = 50_000) -> float:
    claim = load()["claim"]
    with server.client() as client:
        _empty(client)
        client.script_load(claim.text)
    words = [benchmark, "-p", str(server.port), "-c", "50", "-n", str(claims), "-r", "1000000000", "--csv"]
    words += ["EVALSHA", claim.sha, "1", "idem:acct_1:8e03978e-40d5-43dd-__rand_int__"]
    words += [OWNER, FINGERPRINT, str(LEASE), str(RETENTION), str(CREATED_AT), ""]
    ran = subprocess.run(words, capture_output=True, text=True, check=True)
    return float(ran.stdout.splitlines()[-1].rsplit('","', 7)[1])


def _claim_cpu(cluster: Any, masters: dict[str, redis.Redis], claims: int = 300) -> float:
    """Microseconds a claim, by the servers' own count. Each primary gets as many, back to back: all are as warm."""
    claim = load()["claim"]
    pipelines: dict[str, Any] = {name: master.pipeline(transaction=False) for name, master in masters.items()}
    while any(len(pipeline) < claims for pipeline in pipelines.values()):
        row = f"idem:acct_1:{key()}"
        pipeline = pipelines[cluster.get_node_from_key(row).name]
        if len(pipeline) < claims:
            pipeline.evalsha(claim.sha, 1, row, OWNER, FINGERPRINT, LEASE, RETENTION, CREATED_AT, "")
    for name, master in masters.items():
        master.config_resetstat()
        pipelines[name].execute()
    stats = [master.info("commandstats")["cmdstat_evalsha"] for master in masters.values()]
    return float(sum(each["usec"] for each in stats) / sum(each["calls"] for each in stats))
