"""Turn facts about servers, clients and rows into findings. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from ..policy import Policy
from .rows import RowSummary

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
"""Seconds of p99 round trip above which there is a warning: each protected request waits for two round trips."""

TTL_TOLERANCE = 0.05
"""Seconds by which a TTL may differ from the value set, beyond the duration of the calls. A server that counts whole
seconds exceeds it."""

ROW_BYTES = 1500.0
"""Bytes of a completed row with a 500-byte body; assumed if the server does not report MEMORY USAGE."""

FEW_ROWS = 100_000
"""A warning is given if there is room for fewer rows than this."""

PACKED = 8192
"""Value of `hash-max-listpack-value` that keeps nearly every row packed."""

MAX_EXAMPLES = 3
"""Rows, or reasons, that a finding gives as examples."""

MAX_LAG = 1.0
"""Seconds of replication lag above which there is a warning: a failover loses that much."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a report.

    Attributes:
        check: name of the check; one of a closed set.
        verdict: `ok`, `unknown` (the server does not report it), `warning`, or `problem` (the ledger cannot keep its
            guarantees).
        reason: what was found, and what it means.
        fix: commands that fix it or show more, a line each, to be pasted into a shell; or what to change; "" if there
            is nothing to do.
        node: host:port of the server on a cluster; else "".
    """

    check: str
    verdict: Verdict
    reason: str
    fix: str = ""
    node: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of `Ledger.check` and `idemredis doctor`.

    Attributes:
        findings: the findings, in the order of the checks.
        reachable: False if no server could be reached.
    """

    findings: tuple[Finding, ...]
    reachable: bool

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all findings; "ok" if there are none."""
        return max((finding.verdict for finding in self.findings), key=_WORST.__getitem__, default="ok")

    @property
    def healthy(self) -> bool:
        """True if no finding is a `problem`; warnings and unknowns are accepted."""
        return self.verdict != "problem"

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict for JSON."""
        return {
            "verdict": self.verdict,
            "reachable": self.reachable,
            "findings": [asdict(finding) for finding in self.findings],
        }


@dataclass(slots=True)
class Server:
    """Facts about one server; what the server did not report is missing.

    Attributes:
        address: host:port, or the path of a unix socket.
        trips: duration of each PING, in seconds.
        info: reply of INFO; empty if it was refused.
        config: settings that CONFIG GET returned.
        refused: error message of a refused INFO.
        wait_refused: error message of a refused WAIT.
        redis_cli: the beginning of a redis-cli command for the server.
    """

    address: str
    trips: Sequence[float] = ()
    info: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)
    refused: str = ""
    wait_refused: str = ""
    redis_cli: str = "redis-cli"

    @property
    def of_cluster(self) -> bool:
        """True if the server reports that it belongs to a cluster."""
        return bool(_number(self.info, "cluster_enabled"))

    def command(self, words: str) -> str:
        """Return a redis-cli command line for this server."""
        return f"{self.redis_cli} {words}"


def server_findings(server: Server, policy: Policy, row_bytes: float | None) -> list[Finding]:
    """Return the findings about one server."""
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
        findings += [Finding(name, "unknown", f"the server refuses INFO: {server.refused}") for name in names]
    if server.wait_refused:
        findings.append(
            Finding(
                "replication",
                "problem",
                f"the server refuses WAIT ({server.wait_refused}): with min_replicas={policy.min_replicas} every "
                "claim is refused",
                "set IDEMREDIS_MIN_REPLICAS to 0, and read docs/servers.md on what a failover can lose",
            )
        )
    findings.append(_packing(server))
    return findings


def client_findings(seconds: float, policy: Policy) -> list[Finding]:
    """Return the findings about the ledger's own limits: a call may take so many seconds, and is made at most twice."""
    reason = f"a call ends within {seconds:g} s, whatever the client's own timeouts are, and is made once more"
    if policy.lease < 6 * seconds:
        return [
            Finding(
                "client",
                "warning",
                f"{reason}: a lease of {policy.lease:g} s is too short for three renewals",
                "use a longer lease or a shorter socket_timeout",
            )
        ]
    return [Finding("client", "ok", reason)]


@dataclass(frozen=True, slots=True)
class TTLs:
    """Two readings of a scratch row's TTL; times are in seconds.

    Attributes:
        expected: the TTL that was set.
        first, second: the TTLs that the server reported.
        took: time from before the TTL was set until after the first reading.
        between: time from after the first reading until before the second.
    """

    expected: float
    first: float
    took: float
    second: float = 0.0
    between: float = 0.0

    @property
    def coarse(self) -> bool:
        """True if the server does not keep TTLs in milliseconds."""
        return not self.expected - self.took - TTL_TOLERANCE <= self.first <= self.expected + TTL_TOLERANCE


def clock_finding(ttls: TTLs) -> Finding:
    """Return the finding about the server's TTLs, which are the clock of every row."""
    if ttls.first <= 0 or ttls.second >= ttls.first:
        return Finding(
            "clock",
            "problem",
            f"the TTL of a row does not run: it was {ttls.first:g} s, and {ttls.second:g} s another "
            f"{ttls.between:.2f} s later; leases never end on this server, so a dead attempt blocks its key",
            "use a server that expires keys as Redis does; see docs/servers.md",
        )
    if ttls.coarse:
        return Finding(
            "clock",
            "warning",
            f"TTLs are coarse: {ttls.expected:g} s set, {ttls.first:g} s read; leases can end a second early or late",
            "use leases of 5 s or more on this server",
        )
    return Finding("clock", "ok", "the TTL of a row runs in milliseconds: leases are exact")


def row_findings(sample: Sequence[RowSummary], scanned: int | None, command: str) -> list[Finding]:
    """Return the findings about a sample of rows.

    Args:
        sample: the rows.
        scanned: about how many keys were scanned for them; None if they are all rows.
        command: the beginning of an `idemredis` command for this ledger.
    """
    if not sample:
        where = "" if scanned is None else f" among the first {scanned:,} keys"
        return [Finding(check, "ok", f"there are no rows{where}") for check in ("expiry", "rows")]
    one = len(sample) == 1
    rows = f"{len(sample)} row{'' if one else 's'}"
    among = f"all {rows}" if scanned is None else f"the first {rows} (of {scanned:,} keys scanned)"
    among = "the only row" if one and scanned is None else among
    lasting = [row for row in sample if row.ttl is None]
    corrupt = [row for row in sample if row.status == "corrupt"]
    findings = [Finding("expiry", "ok", f"{among} {'has' if one else 'have'} a TTL")]
    if lasting:
        verb = "has" if len(lasting) == 1 else "have"
        findings = [
            Finding(
                "expiry",
                "problem",
                f"{len(lasting)} of {among} {verb} no TTL and will not expire, such as {_examples(lasting)}; somebody "
                "removed the TTL. Look at it; that also prints a command that restores the TTL:",
                f"{command} show --digest {lasting[0].digest}",
            )
        ]
    if corrupt:
        reasons = "; ".join(sorted({row.why for row in corrupt})[:MAX_EXAMPLES])
        verb = "is" if len(corrupt) == 1 else "are"
        findings.append(
            Finding(
                "rows",
                "warning",
                f"{len(corrupt)} of {among} {verb} corrupt, such as {_examples(corrupt)} ({reasons}); requests with "
                "their keys get 500 and never run. Find out who wrote them (another version, or another program in "
                "this namespace), then forget them:",
                f"{command} show --digest {corrupt[0].digest}\n{command} forget --digest {corrupt[0].digest}",
            )
        )
    else:
        findings.append(Finding("rows", "ok", f"{among} can be read"))
    return findings


def _examples(rows: Iterable[RowSummary]) -> str:
    return ", ".join(f"row {row.digest}" for row in list(rows)[:MAX_EXAMPLES])


def _round_trip(server: Server) -> Finding:
    trips = sorted(server.trips)
    if not trips:
        return Finding("round trip", "unknown", "the server refuses PING")
    median, slow = trips[len(trips) // 2], trips[min(len(trips) * 99 // 100, len(trips) - 1)]
    reason = f"p50 {median * 1000:.2f} ms, p99 {slow * 1000:.2f} ms over {len(trips)} PINGs"
    if slow > SLOW_TRIP:
        return Finding(
            "round trip",
            "warning",
            f"{reason}: each protected request waits for two round trips",
            server.command("--latency"),
        )
    return Finding("round trip", "ok", reason)


def _engine(server: Server) -> Finding:
    info = server.info
    name = "Valkey" if "valkey_version" in info else "Redis"
    version = str(info.get("valkey_version") or info.get("redis_version", "?"))
    parts = version.split(".")
    numbers = tuple(int(part) for part in parts[:2] if part.isdecimal())
    if name == "Redis" and numbers and numbers < (6, 2):
        return Finding(
            "engine", "problem", f"Redis {version} is older than 6.2, the oldest supported version", "upgrade"
        )
    return Finding("engine", "ok", f"{name} {version}{', of a cluster' if server.of_cluster else ''}")


def _eviction(server: Server) -> Finding:
    policy = _setting(server, "maxmemory_policy", "maxmemory-policy")
    if policy is None:
        return Finding("eviction", "unknown", "the server does not report its maxmemory-policy")
    if policy != "noeviction":
        return Finding(
            "eviction",
            "problem",
            f"maxmemory-policy is {policy}: when memory is full, live rows are evicted and their operations run again",
            server.command("CONFIG SET maxmemory-policy noeviction"),
        )
    return Finding("eviction", "ok", "maxmemory-policy is noeviction: a full server refuses claims and evicts nothing")


def _memory(server: Server, row_bytes: float | None) -> Finding:
    used, limit = _number(server.info, "used_memory"), _number(server.info, "maxmemory")
    if used is None:
        return Finding("memory", "unknown", "the server does not report how much memory it uses")
    each = row_bytes or ROW_BYTES
    total = limit or _number(server.info, "total_system_memory")
    if not total:
        return Finding("memory", "unknown", "the server reports neither maxmemory nor the host's memory")
    left = int(max(total - used, 0) / each)
    of = "maxmemory" if limit else "the host's memory (maxmemory is not set)"
    reason = f"room for about {left:,} more rows of {each:.0f} bytes within {of}"
    fix = "use a server with more memory, or a shorter retention (IDEMREDIS_RETENTION_SECONDS)"
    if limit and 2 * limit <= (_number(server.info, "total_system_memory") or 0) / 2:
        fix = server.command(f"CONFIG SET maxmemory {2 * limit}")
    if not left:
        return Finding("memory", "problem", f"{reason}: claims are refused", fix)
    if left < FEW_ROWS:
        return Finding("memory", "warning", reason, fix)
    return Finding("memory", "ok", reason)


def _persistence(server: Server) -> Finding:
    aof = _number(server.info, "aof_enabled")
    if aof is None:
        return Finding("persistence", "unknown", "the server does not report whether its append-only file is on")
    if not aof:
        return Finding(
            "persistence",
            "warning",
            "the append-only file is off: a restart loses every row since the last snapshot, and their operations can "
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
            "appendfsync is no: a power loss loses up to half a minute of claims and responses",
            server.command("CONFIG SET appendfsync everysec"),
        )
    known = f"appendfsync {how}" if how else "appendfsync not reported (everysec by default)"
    return Finding(
        "persistence",
        "ok",
        f"append-only file, {known}: a crash of the server loses nothing; a power loss loses the last second, in which "
        "claims vanish and completed rows become pending again",
    )


def _replication(server: Server, policy: Policy) -> list[Finding]:
    info = server.info
    if info.get("role") == "slave":
        return [
            Finding(
                "replication",
                "problem",
                f"this is a replica (of {info.get('master_host')}:{info.get('master_port')}): it refuses every claim",
                "use the primary's URL, or a client from Sentinel.master_for",
            )
        ]
    replicas = [value for name, value in info.items() if name.startswith("slave") and isinstance(value, dict)]
    online = [replica for replica in replicas if replica.get("state") == "online"]
    asked = _number(server.config, "min-replicas-to-write")
    floor = f"; min-replicas-to-write is {asked}" if asked else ""
    if len(online) < policy.min_replicas:
        return [
            Finding(
                "replication",
                "problem",
                f"{len(online)} replicas are online, fewer than min_replicas={policy.min_replicas}: every claim is "
                "refused",
                "bring a replica back, or lower IDEMREDIS_MIN_REPLICAS",
            )
        ]
    if not replicas:
        return [
            Finding(
                "replication",
                "ok",
                f"a primary without replicas{floor}: while it is down, protected requests are refused (503)",
            )
        ]
    lag = max(float(replica.get("lag", 0)) for replica in replicas)
    reason = f"{len(online)} of {len(replicas)} replicas online, at most {lag:.0f} s behind{floor}"
    if lag > MAX_LAG or len(online) < len(replicas):
        return [
            Finding(
                "replication",
                "warning",
                f"{reason}: a failover now would lose claims",
                server.command("INFO replication"),
            )
        ]
    if not policy.min_replicas:
        reason += "; without IDEMREDIS_MIN_REPLICAS a failover can lose the most recent claims"
    return [Finding("replication", "ok", reason)]


def _packing(server: Server) -> Finding:
    value = _number(server.config, "hash-max-listpack-value")
    if value is None:
        value = _number(server.config, "hash-max-ziplist-value")
    if value is None:
        return Finding("packing", "unknown", "the server does not report its hash-max-listpack-value")
    if value >= PACKED:
        return Finding("packing", "ok", f"hash-max-listpack-value is {value}: rows with bodies up to that are packed")
    return Finding(
        "packing",
        "ok",
        f"hash-max-listpack-value is {value}: a finished row with a 500-byte body takes 1500 bytes; packed, 930",
        server.command(f"CONFIG SET hash-max-listpack-value {PACKED}"),
    )


def _setting(server: Server, info: str, config: str) -> str | None:
    value = server.info.get(info, server.config.get(config))
    return None if value is None else str(value)


def _number(facts: Mapping[str, Any], name: str) -> int | None:
    value = facts.get(name)
    try:
        return None if value is None else int(value)
    except (TypeError, ValueError):
        return None
