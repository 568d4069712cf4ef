"""A row is found, and can be mended, while its slot is on its way from one server of a cluster to another."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import islice

import pytest
import redis.asyncio
from redis.crc import key_slot

from idemredis import AsyncLedger, Ledger, Replay, Reservation, StoredResponse
from idemredis.core.keys import identify
from idemredis.events import digest
from idemredis.inspection import doctor, survey
from idemredis.operating import interventions
from idemredis.operating.tail import Tail
from tests.support.clusters import keys_in, move_rows, moving, slot_of
from tests.support.place import Place
from tests.support.servers import Server
from tests.support.waiting import wait_until

pytestmark = pytest.mark.parametrize("place", ["cluster"], indirect=True)

ANSWER = StoredResponse(201, (), b"a person's")


def ends(place: Place, slot: int) -> tuple[Server, Server]:
    """Return the server that has the slot, and another."""
    port = place.client.nodes_manager.get_node_from_slot(slot).port
    [from_] = [node for node in place.nodes if node.port == port]
    return from_, next(node for node in place.nodes if node is not from_)


@pytest.fixture
def rows(place: Place, ledger: Ledger, namespace: str) -> Iterator[list[Reservation]]:
    """One row that is where it was, and one that is where the slot goes."""
    slot = slot_of(namespace, "k")
    there, fresh = islice(keys_in(slot, namespace), 2)
    old = claimed(ledger, there)
    with moving(slot, *ends(place, slot)):
        yield [old, claimed(ledger, fresh)]


def claimed(ledger: Ledger, key: str) -> Reservation:
    outcome = ledger.claim("acct", key, "f")
    assert isinstance(outcome, Reservation)
    return outcome


def test_rows_are_listed_and_found(place: Place, ledger: Ledger, namespace: str, rows: list[Reservation]) -> None:
    identities = {r.identity for r in rows}
    listed = survey.worst(place.client, namespace, limit=10)
    assert {found.identity for found in listed.rows} == identities
    for identity in identities:
        found = interventions.find(ledger, identity.row)
        assert found is not None
        assert found.status == "pending"


def test_a_person_mends_them(ledger: Ledger, rows: list[Reservation]) -> None:
    for r in rows:
        assert interventions.release(ledger, r.identity, lambda found: True)
        assert interventions.resolve(ledger, r.identity, ANSWER, lambda found: True)
        assert ledger.claim("acct", r.identity.key, "f") == Replay(ANSWER, 2, False)


def test_they_are_watched_also_as_they_move(
    place: Place, ledger: Ledger, namespace: str, rows: list[Reservation]
) -> None:
    slot = slot_of(namespace, "k")
    seen: list[tuple[str, str]] = []

    with Tail(place.client, namespace) as tail:

        def completed(r: Reservation) -> bool:
            seen.extend((each.what, each.digest) for each in tail.look())
            return ("completed", digest(r.identity.row)) in seen

        for r in rows:
            ledger.complete(r, ANSWER)
            wait_until(lambda: completed(r))  # noqa: B023
        move_rows(slot, *ends(place, slot))
        last = claimed(ledger, next(islice(keys_in(slot, namespace), 2, None)))
        ledger.complete(last, ANSWER)
        wait_until(lambda: completed(last))
    assert "gone" not in dict(seen)


def test_a_check_finds_nothing_wrong(
    place: Place, ledger: Ledger, namespace: str, rows: list[Reservation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither with the rows that move, nor with its own in a slot that moves."""
    assert troubles(ledger.check()) == []
    slot = 5000
    names = (name for name in map("{:016x}".format, range(10_000_000)) if scratch_slot(namespace, name) == slot)
    monkeypatch.setattr("idemredis.inspection.doctor.secrets.token_hex", lambda size: next(names))

    async def check() -> doctor.Report:
        async with redis.asyncio.RedisCluster.from_url(place.url, socket_timeout=1) as client:
            return await AsyncLedger(client, namespace=namespace).check()

    with moving(slot, *ends(place, slot)):
        assert troubles(ledger.check()) == []
        assert troubles(asyncio.run(check())) == []


def scratch_slot(namespace: str, name: str) -> int:
    return key_slot(identify(namespace, doctor.SCRATCH, name).row.encode())


def troubles(report: doctor.Report) -> list[doctor.Finding]:
    return [found for found in report.findings if found.verdict in ("problem", "unknown")]
