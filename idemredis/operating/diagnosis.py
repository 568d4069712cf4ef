"""What facts about a server and a client mean for the ledger. Pure: facts in, findings out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from ..policy import Policy
from .rows import Found

__all__ = [
    "Finding",
    "Report",
    "Server",
    "TTLs",
    "Verdict",
    "client_findings",
    "clock_finding",
    "row_findings",
    "server_findings",
]

Verdict: TypeAlias = Literal["ok", "unknown", "warning", "problem"]

_WORST: Mapping[Verdict, int] = {"ok": 0, "unknown": 1, "warning": 2, "problem": 3}

SLOW_TRIP = 0.05
"""Seconds of p99 from which a round trip is worth a look: each protected request waits for two."""

EXACT = 0.05
"""Seconds by which a TTL may miss what was set, beside the time the calls took: a server that counts seconds misses by
more."""

ROW_BYTES = 1500.0
"""A completed row with a 500-byte answer, where the server does not tell."""

FEW_ROWS = 100_000
"""Room for fewer rows than this is worth a look."""

PACKED = 8192
"""`hash-max-listpack-value` that keeps nearly every row packed."""

NAMED = 3
"""Rows, or reasons, that a finding names."""

LAG = 1.0
"""Seconds behind from which a replica would lose acknowledged claims in a failover."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a report.

    Attributes:
        check: what was looked at; one of a closed set.
        verdict: `ok`, `unknown` (the server does not tell), `warning`, or `problem` (the ledger breaks its promise).
        reason: what was found, and what it means.
        fix: the command that mends it, or what to change; "" where there is nothing to do.
        node: host:port on a cluster; else "".
    """

    check: str
    verdict: Verdict
    reason: str
    fix: str = ""
    node: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What `check` found.

    Attributes:
        findings: in the order in which they were looked at.
        reachable: whether the server answered at all.
    """

    findings: tuple[Finding, ...]
    reachable: bool

    @property
    def verdict(self) -> Verdict:
        """The worst of all."""
        return max((finding.verdict for finding in self.findings), key=_WORST.__getitem__, default="ok")

    @property
    def healthy(self) -> bool:
        """Whether there is no problem; warnings and unknowns are none."""
        return self.verdict != "problem"

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        return {
            "verdict": self.verdict,
            "reachable": self.reachable,
            "findings": [asdict(finding) for finding in self.findings],
        }


@dataclass(slots=True)
class Server:
    """What one server told; what it did not is missing, and `refused` says why.

    Attributes:
        address: host:port.
        trips: seconds of each PING.
    """

    address: str
    trips: Sequence[float] = ()
    info: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)
    refused: str = ""
    wait_refused: str = ""

    @property
    def of_cluster(self) -> bool:
        """Whether it is one of a cluster, as far as it tells."""
        return bool(_number(self.info, "cluster_enabled"))

    def command(self, words: str) -> str:
        """Return a command for this server, for a shell."""
        host, _, port = self.address.rpartition(":")
        return f"redis-cli -h {host} -p {port} {words}" if host else f"redis-cli -s {self.address} {words}"


def server_findings(server: Server, policy: Policy, row_bytes: float | None) -> list[Finding]:
    """Judge one server."""
    findings = [_round_trip(server)]
    if server.info:
        findings += [
            _engine(server),
            _eviction(server),
            _memory(server, row_bytes),
            _persistence(server),
            *_replication(server, policy),
        ]
    else:
        names = ("engine", "eviction", "memory", "persistence", "replication")
        findings += [Finding(name, "unknown", f"the server does not tell: INFO: {server.refused}") for name in names]
    if server.wait_refused:
        findings.append(
            Finding(
                "replication",
                "problem",
                f"the server refuses WAIT ({server.wait_refused}): with min_replicas={policy.min_replicas} every "
                "claim is refused",
                "lower IDEMREDIS_MIN_REPLICAS to 0, and read docs/servers.md on what a failover can lose",
            )
        )
    findings.append(_packing(server))
    return findings


def client_findings(options: Mapping[str, Any], policy: Policy) -> list[Finding]:
    """Judge the ledger's own client by its connection options."""
    timeout, connect = options.get("socket_timeout"), options.get("socket_connect_timeout")
    retry: Any = options.get("retry")
    retries = retry.get_retries() if hasattr(retry, "get_retries") else 0  # redis-py 5 does not tell
    if timeout is None:
        return [
            Finding(
                "client",
                "problem",
                "the client has no socket_timeout: a server that hangs hangs every request",
                "make it with socket_timeout=1, or by Ledger.from_url",
            )
        ]
    longest = timeout * (retries + 1)
    reason = f"an answer is waited for {timeout:g} s, with up to {retries} retries"
    if longest > 5:
        return [
            Finding(
                "client",
                "warning",
                f"{reason}: a server that hangs can hold a request for about {longest:.0f} s",
                "make it with socket_timeout=1 and Retry(…, 2), or by Ledger.from_url",
            )
        ]
    if connect is None and "socket_connect_timeout" in options:
        return [Finding("client", "warning", "the client has no socket_connect_timeout", "socket_connect_timeout=1")]
    if policy.lease < 3 * longest:
        return [
            Finding("client", "warning", f"{reason}, and a lease of {policy.lease:g} s leaves no room for renewals")
        ]
    return [Finding("client", "ok", reason)]


@dataclass(frozen=True, slots=True)
class TTLs:
    """What the TTL of a scratch row was, twice. Times in seconds.

    Attributes:
        given: what it was set to.
        first, second: what the server then said, once and once more.
        took: from before it was set until after the first reading.
        between: from after the first reading until before the second.
    """

    given: float
    first: float
    took: float
    second: float = 0.0
    between: float = 0.0

    @property
    def coarse(self) -> bool:
        """Whether the server does not keep milliseconds."""
        return not self.given - self.took - EXACT <= self.first <= self.given + EXACT


def clock_finding(ttls: TTLs) -> Finding:
    """Judge the server's TTLs, which are the clock of every row."""
    if ttls.first <= 0 or ttls.second >= ttls.first:
        return Finding(
            "clock",
            "problem",
            f"the TTL of a row does not run: {ttls.first:g} s, and {ttls.second:g} s after {ttls.between:.2f} s more; "
            "leases never end here, so a dead attempt blocks its key",
            "use a server that expires keys as Redis does; see docs/servers.md",
        )
    if ttls.coarse:
        return Finding(
            "clock",
            "warning",
            f"TTLs are coarse: {ttls.given:g} s set, {ttls.first:g} s read; leases can end a second early or late",
            "use leases of 5 s or more here",
        )
    return Finding("clock", "ok", "the TTL of a row runs, in milliseconds: leases are exact")


def row_findings(found: Sequence[Found], namespace: str, complete: bool) -> list[Finding]:
    """Judge the rows that were looked at; `complete` when those were all."""
    among = f"{'all' if complete else 'the first'} {len(found)} rows looked at"
    lasting = [row for row in found if row.ttl is None]
    strange = [row for row in found if row.status == "corrupt"]
    findings = [Finding("expiry", "ok", f"each of {among} expires")]
    if lasting:
        findings = [
            Finding(
                "expiry",
                "problem",
                f"{len(lasting)} of {among} never expire, such as {_named(lasting)}: no script of ours leaves one so",
                f"look at each (idemredis --namespace {namespace} show), then forget it, or give it its own retention "
                "again: redis-cli PEXPIRE ROW $(redis-cli HGET ROW retention)",
            )
        ]
    if strange:
        reasons = "; ".join(sorted({row.why for row in strange})[:NAMED])
        reason = f"{len(strange)} of {among} are not of this version, such as {_named(strange)} ({reasons})"
        findings.append(
            Finding(
                "rows",
                "warning",
                f"{reason}; their keys answer 500 and never run",
                "find out who wrote them (another version, another program in this namespace); then forget them",
            )
        )
    else:
        findings.append(Finding("rows", "ok", f"{among} are of this version"))
    return findings


def _named(rows: Iterable[Found]) -> str:
    return ", ".join(f"row {row.digest}" for row in list(rows)[:NAMED])


def _round_trip(server: Server) -> Finding:
    trips = sorted(server.trips)
    if not trips:
        return Finding("round trip", "unknown", "PING is refused")
    median, slow = trips[len(trips) // 2], trips[min(len(trips) * 99 // 100, len(trips) - 1)]
    reason = f"p50 {median * 1000:.2f} ms, p99 {slow * 1000:.2f} ms over {len(trips)} PINGs"
    if slow > SLOW_TRIP:
        return Finding(
            "round trip", "warning", f"{reason}: each protected request waits for two", server.command("--latency")
        )
    return Finding("round trip", "ok", reason)


def _engine(server: Server) -> Finding:
    info = server.info
    name = "Valkey" if "valkey_version" in info else "Redis"
    version = str(info.get("valkey_version") or info.get("redis_version", "?"))
    parts = version.split(".")
    numbers = tuple(int(part) for part in parts[:2] if part.isdecimal())
    if name == "Redis" and numbers and numbers < (6, 2):
        return Finding("engine", "problem", f"Redis {version} is older than 6.2, the oldest that is tested", "upgrade")
    return Finding("engine", "ok", f"{name} {version}{', of a cluster' if server.of_cluster else ''}")


def _eviction(server: Server) -> Finding:
    policy = _told(server, "maxmemory_policy", "maxmemory-policy")
    if policy is None:
        return Finding("eviction", "unknown", "the server does not tell its maxmemory-policy")
    if policy != "noeviction":
        return Finding(
            "eviction",
            "problem",
            f"maxmemory-policy is {policy}: when memory is short, live rows are dropped and their operations run again",
            server.command("CONFIG SET maxmemory-policy noeviction"),
        )
    return Finding("eviction", "ok", "maxmemory-policy is noeviction: a full server refuses claims, and drops nothing")


def _memory(server: Server, row_bytes: float | None) -> Finding:
    used, limit = _number(server.info, "used_memory"), _number(server.info, "maxmemory")
    if used is None:
        return Finding("memory", "unknown", "the server does not tell how much memory it uses")
    each = row_bytes or ROW_BYTES
    total = limit or _number(server.info, "total_system_memory")
    if not total:
        return Finding("memory", "unknown", "the server tells neither maxmemory nor the host's memory")
    left = int(max(total - used, 0) / each)
    of = "maxmemory" if limit else "the host's memory (maxmemory is not set)"
    reason = f"room for about {left:,} more rows of {each:.0f} bytes within {of}"
    if not left:
        return Finding(
            "memory", "problem", f"{reason}: claims are refused", server.command("CONFIG SET maxmemory BYTES")
        )
    if left < FEW_ROWS:
        return Finding("memory", "warning", reason, server.command("CONFIG SET maxmemory BYTES"))
    return Finding("memory", "ok", reason)


def _persistence(server: Server) -> Finding:
    aof = _number(server.info, "aof_enabled")
    if aof is None:
        return Finding("persistence", "unknown", "the server does not tell whether its append-only file is on")
    if not aof:
        return Finding(
            "persistence",
            "warning",
            "the append-only file is off: a restart loses every row since the last snapshot, and what those guard can "
            "run twice",
            server.command("CONFIG SET appendonly yes"),
        )
    how = server.config.get("appendfsync")
    if how == "always":
        return Finding("persistence", "ok", "append-only file, appendfsync always: nothing acknowledged is lost")
    if how == "no":
        return Finding(
            "persistence",
            "warning",
            "appendfsync is no: a power loss loses up to half a minute of claims and answers",
            server.command("CONFIG SET appendfsync everysec"),
        )
    known = f"appendfsync {how}" if how else "appendfsync not told (everysec by default)"
    return Finding(
        "persistence",
        "ok",
        f"append-only file, {known}: a crash of the server loses nothing; a power loss the last second: claims "
        "vanish, and answers come back as pending",
    )


def _replication(server: Server, policy: Policy) -> list[Finding]:
    info = server.info
    if info.get("role") == "slave":
        return [
            Finding(
                "replication",
                "problem",
                f"this is a replica (of {info.get('master_host')}:{info.get('master_port')}): it refuses every claim",
                "give the ledger the primary's URL, or a client from Sentinel.master_for",
            )
        ]
    replicas = [value for name, value in info.items() if name.startswith("slave") and isinstance(value, dict)]
    online = [replica for replica in replicas if replica.get("state") == "online"]
    asked = _number(server.config, "min-replicas-to-write")
    floor = "" if asked is None else f"; min-replicas-to-write is {asked}"
    if len(online) < policy.min_replicas:
        return [
            Finding(
                "replication",
                "problem",
                f"{len(online)} replicas are online, and min_replicas={policy.min_replicas} are required: every "
                "claim is refused",
                "bring a replica back, or lower IDEMREDIS_MIN_REPLICAS",
            )
        ]
    if not replicas:
        return [Finding("replication", "ok", f"a primary without replicas{floor}: with it the ledger is away")]
    lag = max(float(replica.get("lag", 0)) for replica in replicas)
    reason = f"{len(online)} of {len(replicas)} replicas online, at most {lag:.0f} s behind{floor}"
    if lag > LAG or len(online) < len(replicas):
        return [
            Finding(
                "replication", "warning", f"{reason}: a failover now loses claims", server.command("INFO replication")
            )
        ]
    if not policy.min_replicas:
        reason += "; without IDEMREDIS_MIN_REPLICAS a failover can lose the claims of its last moments"
    return [Finding("replication", "ok", reason)]


def _packing(server: Server) -> Finding:
    value = _number(server.config, "hash-max-listpack-value")
    if value is None:
        value = _number(server.config, "hash-max-ziplist-value")
    if value is None:
        return Finding("packing", "unknown", "the server does not tell its hash-max-listpack-value")
    if value >= PACKED:
        return Finding("packing", "ok", f"hash-max-listpack-value is {value}: rows with answers up to that are packed")
    return Finding(
        "packing",
        "ok",
        f"hash-max-listpack-value is {value}: a finished row with a 500-byte answer takes 1500 bytes; packed, 930",
        server.command(f"CONFIG SET hash-max-listpack-value {PACKED}"),
    )


def _told(server: Server, info: str, config: str) -> str | None:
    value = server.info.get(info, server.config.get(config))
    return None if value is None else str(value)


def _number(facts: Mapping[str, Any], name: str) -> int | None:
    value = facts.get(name)
    try:
        return None if value is None else int(value)
    except (TypeError, ValueError):
        return None
