"""The users of `idemredis acl` may do all that they are for, and nothing else."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.exceptions

from idemredis import AsyncLedger, Ledger, Policy, Replay, Reservation, StoredResponse
from idemredis.store.nodes import connect, holder, primaries
from idemredis.telemetry import Publisher
from idemredis.telemetry.publisher import channel
from tests.support.place import Place, Ran, Run
from tests.support.waiting import wait_until

pytestmark = pytest.mark.parametrize("place", ["valkey", "redis", "cluster"], indirect=True)

ANSWER = StoredResponse(201, (), b"done")


class Users:
    """The three users on every node, and each one's URL."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.nodes = primaries(place.client)

    def url(self, role: str) -> str:
        return self.place.url.replace("redis://", f"redis://idemredis-{role}:pw-{role}@")

    def denied(self) -> list[Any]:
        """What was refused to any of them, as the servers logged it; but CONFIG GET, which doctor tries."""
        logged = [entry for node in self.nodes for entry in node.acl_log()]
        return [entry for entry in logged if entry["object"] != "config|get"]

    def add(self, lines: list[str]) -> None:
        """Run the lines on every node, each with a password of its role's."""
        assert len(lines) == 3
        for node in self.nodes:
            node.acl_log_reset()
            for line in lines:
                words = shlex.split(line)
                role = words[2].removeprefix("idemredis-")
                node.execute_command(*(word.replace("PASSWORD", f"pw-{role}") for word in words))

    def remove(self) -> None:
        for node in self.nodes:
            node.acl_deluser("idemredis-app", "idemredis-viewer", "idemredis-operator")

    def forgive(self) -> None:
        for node in self.nodes:
            node.acl_log_reset()


@pytest.fixture
def users(place: Place, run: Run) -> Iterator[Users]:
    made = Users(place)
    made.add([line for line in run("acl").out.splitlines() if line.startswith("ACL SETUSER")])
    yield made
    made.remove()


def app(users: Users) -> Any:
    """The client that an application would make."""
    make = redis.RedisCluster if users.place.kind == "cluster" else redis.Redis
    return make.from_url(users.url("app"), socket_timeout=5.0)


def test_the_app_leads_rows_through_their_whole_life(users: Users, namespace: str) -> None:
    client: Any = app(users)
    publisher = Publisher(client, namespace)
    ledger = Ledger(client, Policy(), namespace, [publisher])
    for i in range(6):
        r = ledger.claim(f"acct_{i}", "k", "f")
        assert isinstance(r, Reservation)
        ledger.renew(r)
        ledger.checkpoint(r, "charged", i)
        ledger.release(r)
        again = ledger.claim(f"acct_{i}", "k", "f")
        assert isinstance(again, Reservation)
        (ledger.fail if i % 2 else ledger.complete)(again, ANSWER)
        assert isinstance(ledger.claim(f"acct_{i}", "k", "f"), Replay)
        assert ledger.read(f"acct_{i}", "k") is not None
    publisher.close()
    ledger.close()
    client.close()
    assert publisher.dropped == 0
    assert users.denied() == []


def test_the_async_app_does_too(users: Users, namespace: str) -> None:
    async def live() -> None:
        make: Any = redis.asyncio.RedisCluster if users.place.kind == "cluster" else redis.asyncio.Redis
        client = make.from_url(users.url("app"))
        ledger = AsyncLedger(client, namespace=namespace)
        r = await ledger.claim("a", "k", "f")
        assert isinstance(r, Reservation)
        await ledger.renew(r)
        await ledger.complete(r, ANSWER)
        assert isinstance(await ledger.claim("a", "k", "f"), Replay)
        await ledger.close()
        await client.aclose()

    asyncio.run(live())
    assert users.denied() == []


def test_the_app_may_wait_for_replicas(users: Users, namespace: str) -> None:
    if users.place.kind == "cluster":
        with pytest.raises(Exception, match="cluster"):
            Ledger(app(users), Policy(min_replicas=1), namespace)
        return
    client = app(users)
    assert client.execute_command("WAIT", 0, 1) == 0
    client.close()


@pytest.mark.parametrize("role", ["app", "viewer", "operator"])
def test_nobody_reaches_other_rows_or_commands(users: Users, namespace: str, role: str) -> None:
    client: Any = connect(users.url(role), 5.0)
    node = primaries(client)[0]
    words: list[tuple[Any, ...]] = [
        ("FLUSHALL",),
        ("KEYS", "*"),
        ("CONFIG SET", "maxmemory", 0),
        ("ACL LIST",),
        ("SHUTDOWN",),
    ]
    words += [("HGETALL", f"{namespace}x:a:k"), ("PUBLISH", "other", "x"), ("SET", f"{namespace}:a:k", "x")]
    if role == "viewer":
        words += [("DEL", f"{namespace}:a:k"), ("PEXPIRE", f"{namespace}:a:k", 1)]
        words += [("PUBLISH", channel(namespace), "x")]
    for denied in words:
        with pytest.raises(redis.exceptions.NoPermissionError):
            node.execute_command(*denied)
    name = f"{namespace}:a:k"
    writes: tuple[str, ...] = (
        "'SET', KEYS[1], 1",
        "'LPUSH', KEYS[1], 1",
        "'FLUSHALL'",
        "'CONFIG', 'SET', 'maxmemory', 0",
    )
    if role == "viewer":
        writes += ("'DEL', KEYS[1]", "'HSET', KEYS[1], 1, 2", "'PEXPIRE', KEYS[1], 1")
    for write in writes:
        with pytest.raises(redis.exceptions.ResponseError, match=r"permissions|can't run this command|not allowed"):
            holder(client, name).eval(f"return redis.call({write})", 1, name)
    client.close()
    assert len(users.denied()) > 0
    users.forgive()


SECRET = "the-server-s-own-password"

TAKING_OVER: list[tuple[Any, ...]] = [
    *(("CONFIG GET", name) for name in ("requirepass", "masterauth", "*", "hash-max-listpack-value")),
    ("CONFIG SET", "requirepass", "mine"),
    ("CONFIG SET", "dir", "/tmp"),
    ("CONFIG RESETSTAT",),
    ("CONFIG REWRITE",),
    ("ACL LIST",),
    ("ACL GETUSER", "default"),
    ("ACL SETUSER", "mine", "on", "nopass", "+@all", "~*"),
    ("ACL GENPASS",),
    ("ACL LOG",),
    ("CLIENT LIST",),
    ("CLIENT KILL", "TYPE", "normal"),
    ("CLIENT PAUSE", 1),
    ("CLIENT NO-EVICT", "on"),
    ("MONITOR",),
    ("SLOWLOG", "GET"),
    ("LATENCY", "LATEST"),
    ("MODULE LIST",),
    ("REPLICAOF", "NO", "ONE"),
    ("SLAVEOF", "NO", "ONE"),
    ("SYNC",),
    ("PSYNC", "?", -1),
    ("FAILOVER",),
    ("SAVE",),
    ("BGREWRITEAOF",),
    ("SHUTDOWN", "NOSAVE"),
    ("FLUSHDB",),
    ("SWAPDB", 0, 1),
    ("SELECT", 1),
    ("SCRIPT", "FLUSH"),
    ("SCRIPT", "KILL"),
    ("FUNCTION", "LOAD", "#!lua name=x"),
    ("KEYS", "*"),
    ("RANDOMKEY",),
    ("DUMP", "other"),
    ("GET", "other"),
    ("MIGRATE", "127.0.0.1", 1, "other", 0, 1),
    ("PSUBSCRIBE", "*"),
]


@pytest.mark.parametrize("role", ["app", "viewer", "operator"])
def test_nobody_can_take_the_server_over(users: Users, namespace: str, role: str) -> None:
    """With CONFIG GET the viewer could read `requirepass`, and log in as the default user."""
    node = users.nodes[0]
    other = f"{namespace}x:a:k"  # in another namespace
    users.place.client.set(other, "not yours", px=60_000)
    node.config_set("masterauth", SECRET)
    try:
        client: Any = connect(users.url(role), 5.0)
        mine = primaries(client)[0]
        for words in TAKING_OVER:
            with pytest.raises(redis.exceptions.NoPermissionError):
                mine.execute_command(*words)
            with pytest.raises(redis.exceptions.ResponseError) as refused:
                mine.eval(
                    f"return redis.call({', '.join(repr(str(word)) for word in ' '.join(map(str, words)).split())})", 0
                )
            assert SECRET not in str(refused.value)
        for read in (f"'HGETALL', '{other}'", f"'HMGET', '{other}', 'status'", f"'PTTL', '{other}'"):
            with pytest.raises(redis.exceptions.ResponseError, match=r"permission|can't"):
                holder(client, other).eval(f"return redis.call({read})", 0)
        client.close()
    finally:
        node.config_set("masterauth", "")
        users.place.client.delete(other)
        users.forgive()


def test_only_packing_is_unknown_to_the_people(users: Users, ledger: Ledger, run: Run, place: Place) -> None:
    row(place, ledger, "held")
    for role in ("viewer", "operator"):
        report = as_(users, role, run)("doctor", "--json", *(["--read-only"] if role == "viewer" else [])).json
        unknown = {f["check"] for f in report["findings"] if f["verdict"] == "unknown"}
        assert unknown == {"packing", *(("scripts", "clock") if role == "viewer" else ())}
    users.forgive()


def test_a_client_of_another_database_and_with_a_name_gets_lines_of_its_own(
    place: Place, run: Run, namespace: str
) -> None:
    assert not any("+select" in line or "setname" in line for line in run("acl").out.splitlines())
    made = Users(place)
    database = 0 if place.kind == "cluster" else 3
    url = f"{place.url.removesuffix('/0')}/{database}?client_name=shop"
    lines = [line for line in run("acl", url=url).out.splitlines() if line.startswith("ACL SETUSER")]
    try:
        made.add(lines)
        make: Any = redis.RedisCluster if place.kind == "cluster" else redis.Redis
        mine = make.from_url(url.replace("redis://", "redis://idemredis-app:pw-app@"), socket_timeout=5.0)
        ledger = Ledger(mine, namespace=namespace)
        r = ledger.claim("a", "k", "f")
        assert isinstance(r, Reservation)
        ledger.complete(r, ANSWER)
        ledger.close()
        mine.close()
        for role in ("viewer", "operator"):
            of_role = url.replace("redis://", f"redis://idemredis-{role}:pw-{role}@")
            assert [row["key"] for row in run("ls", "--status", "completed", "--json", url=of_role).json] == ["k"]
        assert run("forget", "a", "k", "--yes", url=of_role).code == 0
        assert made.denied() == []
    finally:
        made.remove()


def row(place: Place, ledger: Ledger, key: str) -> Reservation:
    r = ledger.claim("acct_1", key, "f")
    assert isinstance(r, Reservation)
    return r


def as_(users: Users, role: str, run: Run) -> Any:
    def run_it(*words: str) -> Ran:
        return run(*words, url=users.url(role))

    return run_it


def look(ran: Any) -> None:
    for words in (
        ("ls",),
        ("show", "acct_1", "held"),
        ("stats",),
        ("tail", "--seconds", "0.2"),
        ("doctor", "--read-only"),
    ):
        answer = ran(*words)
        assert answer.code == 0, (words, answer)
        assert "unknown  eviction" not in answer.out
    assert ran("stats", "--json").json["row_bytes"] is not None
    assert "does not tell" not in ran("tail", "--seconds", "0.2").err


def test_a_viewer_sees_everything_and_settles_nothing(users: Users, ledger: Ledger, run: Run, place: Place) -> None:
    held, stale = row(place, ledger, "held"), row(place, ledger, "stale")
    ledger.release(stale)
    viewer = as_(users, "viewer", run)
    look(viewer)
    assert users.denied() == []
    before = [place.client.hgetall(r.identity.row) for r in (held, stale)]
    for words in (
        ("release", "acct_1", "held", "--yes"),
        ("resolve", "acct_1", "stale", "--status", "200", "--yes"),
        ("forget", "acct_1", "stale", "--yes"),
    ):
        refused = viewer(*words)
        assert refused.code == 1
        assert "may not" in refused.err
    assert [place.client.hgetall(r.identity.row) for r in (held, stale)] == before
    assert viewer("doctor").code == 1


def test_an_operator_sees_everything_and_settles_everything(
    users: Users, ledger: Ledger, run: Run, place: Place
) -> None:
    for key in ("held", "one", "two"):
        row(place, ledger, key)
    operator = as_(users, "operator", run)
    look(operator)
    for key in ("held", "one", "two"):
        assert operator("release", "acct_1", key, "--yes").code == 0
    assert operator("resolve", "acct_1", "one", "--status", "200", "--yes").code == 0
    assert operator("forget", "acct_1", "two", "--yes").code == 0
    assert operator("doctor").code == 0
    assert {row["key"]: row["status"] for row in operator("ls", "--all", "--json").json} == {
        "held": "released",
        "one": "completed",
    }
    assert users.denied() == []


def test_the_app_may_examine_its_own_server(users: Users, run: Run) -> None:
    report = as_(users, "app", run)("doctor", "--json").json
    assert {"scripts": "ok"}.items() <= {f["check"]: f["verdict"] for f in report["findings"]}.items()
    assert report["verdict"] in ("unknown", "warning")


def test_a_wrong_password_is_a_server_that_cannot_be_reached(users: Users, run: Run) -> None:
    refused = run("ls", url=users.url("viewer").replace("pw-viewer", "wrong"))
    assert refused.code == 2
    assert "wrong" not in refused.err.replace("wrong number", "")
    wait_until(lambda: run("ls", url=users.url("viewer")).code == 0)
