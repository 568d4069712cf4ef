"""A node of a cluster that hangs: what goes on in the background for rows on the other nodes does not wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import islice

import pytest

from idemredis import Event, LedgerUnavailable, Policy, Replay, Reservation, StoredResponse
from tests.support.clusters import SLOTS, Cluster, keys_in, moving
from tests.support.servers import Server
from tests.support.subject import MakeSubject, Mode, Subject
from tests.support.waiting import wait_until

LEASE = 6.0
"""Long enough for a heartbeat to be in time on a machine that is busy with other tests."""

ROWS = 4
"""On each node."""

ANSWER = StoredResponse(201, (), b"done")


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack, tmp_path_factory.mktemp("hung"), node_timeout=120_000)  # no node is thought to be dead


@pytest.fixture
def cluster(started: Cluster) -> Iterator[Cluster]:
    yield started
    for node in started.nodes:
        node.thaw()
    for node in started.nodes:
        with node.client() as admin:
            admin.flushall()


def keys_on(cluster: Cluster, node: Server, namespace: str) -> Iterator[str]:
    """Yield keys of acct's whose rows are on the node."""
    return keys_in(SLOTS * cluster.nodes.index(node) // len(cluster.nodes) + 1, namespace)


def test_no_lease_on_another_node_lapses_while_one_node_hangs(
    make_subject: MakeSubject, mode: Mode, cluster: Cluster, namespace: str
) -> None:
    """Each call to the hung node takes 5 s until it is given up, and then it is made again."""
    subject = make_subject(mode, cluster, policy=Policy(lease=LEASE), socket_timeout=5.0)
    hung, *others = cluster.nodes
    rows = {
        node: [subject.claimed("acct", key, "f") for key in islice(keys_on(cluster, node, namespace), ROWS)]
        for node in cluster.nodes
    }
    for turn in range(ROWS):  # not all at once, and not one node after the other
        for node in cluster.nodes:
            subject.start_heartbeat(rows[node][turn])
    stopped = time.monotonic()
    hung.freeze()
    healthy = [r for node in others for r in rows[node]]
    while time.monotonic() - stopped < 3 * LEASE:
        assert all(r.held for r in healthy), time.monotonic() - stopped
        assert not any(isinstance(subject.claim("acct", r.key, "f"), Reservation) for r in healthy[::3])
        time.sleep(0.02)
    hung.thaw()
    wait_until(lambda: all(r.held for node in cluster.nodes for r in rows[node]))  # nobody took them over
    for r in rows[hung]:
        subject.complete(r, ANSWER)


def test_completions_on_another_node_are_stored_while_one_node_hangs(
    make_subject: MakeSubject, mode: Mode, cluster: Cluster, namespace: str
) -> None:
    stored: set[str | None] = set()

    def note(event: Event) -> None:
        if event.name == "completed":
            stored.add(event.key)

    subject = make_subject(mode, cluster, socket_timeout=5.0, observers=[note], log_keys=True)
    hung, briefly, _ = cluster.nodes
    rows = {
        node: [subject.claimed("acct", key, "f") for key in islice(keys_on(cluster, node, namespace), ROWS)]
        for node in (hung, briefly)
    }
    for node in rows:
        node.freeze()
    completions = [subject.begin("complete", r, ANSWER) for node in rows for r in rows[node]]
    for completion in completions:
        with pytest.raises(LedgerUnavailable):
            completion.result(30)
    briefly.thaw()
    thawed = time.monotonic()
    wait_until(lambda: stored == {r.key for r in rows[briefly]})
    assert time.monotonic() - thawed < 5.0 + 5.0  # a call under way, and a margin; the hung node takes both again
    hung.thaw()
    wait_until(lambda: len(stored) == 2 * ROWS)
    for node in rows:
        for r in rows[node]:
            assert subject.claim("acct", r.key, "f") == Replay(ANSWER, 1, False)


def test_a_ledger_that_closes_while_a_node_hangs_still_stores_what_the_others_have_to(
    make_subject: MakeSubject, mode: Mode, cluster: Cluster, namespace: str
) -> None:
    events: list[tuple[str, str | None]] = []
    subject = make_subject(
        mode,
        cluster,
        socket_timeout=1.0,
        observers=[lambda event: events.append((event.name, event.key))],
        log_keys=True,
    )
    hung, briefly, _ = cluster.nodes
    lost, kept = (subject.claimed("acct", next(keys_on(cluster, node, namespace)), "f") for node in (hung, briefly))
    for node in (hung, briefly):
        node.freeze()
    for completion in [subject.begin("complete", r, ANSWER) for r in (lost, kept)]:
        with pytest.raises(LedgerUnavailable):
            completion.result(30)
    briefly.thaw()
    subject.flush()
    ends = {key: name for name, key in events if name in ("completed", "completion_lost")}
    assert ends == {kept.key: "completed", lost.key: "completion_lost"}


def test_a_row_whose_slot_has_moved_is_renewed_at_its_new_node_while_the_old_one_hangs(
    make_subject: MakeSubject, mode: Mode, cluster: Cluster, namespace: str
) -> None:
    subject = make_subject(mode, cluster, policy=Policy(lease=LEASE), socket_timeout=5.0)
    old, new, _ = cluster.nodes
    moved, stays = islice(keys_on(cluster, old, namespace), 2), keys_on(cluster, new, namespace)
    r, other = (subject.claimed("acct", key, "f") for key in moved)
    beside = subject.claimed("acct", next(stays), "f")
    for each in (r, other, beside):
        subject.start_heartbeat(each)
    slot = 1
    with moving(slot, old, new):
        pass
    try:
        wait_until(lambda: knows(subject, r, new))
        ends = [r.lease.expires_at, other.lease.expires_at]
        wait_until(
            lambda: r.lease.expires_at > ends[0] and other.lease.expires_at > ends[1]
        )  # at home in their new lane
        old.freeze()
        stopped = time.monotonic()
        while time.monotonic() - stopped < 2 * LEASE:
            assert all(each.held for each in (r, other, beside)), time.monotonic() - stopped
            time.sleep(0.02)
        old.thaw()
    finally:
        old.thaw()
        with moving(slot, new, old):
            pass


def knows(subject: Subject, r: Reservation, node: Server) -> bool:
    return bool(subject.ledger.client.get_node_from_key(r.row).port == node.port)


def test_calls_in_the_foreground_reach_the_other_nodes_while_one_hangs(
    make_subject: MakeSubject, mode: Mode, cluster: Cluster, namespace: str
) -> None:
    """Also while the client asks anew who has which slot, and asks the node that hangs."""
    subject = make_subject(mode, cluster, socket_timeout=3.0)
    hung, *others = cluster.nodes
    keys = {node: keys_on(cluster, node, namespace) for node in cluster.nodes}
    for node in cluster.nodes:
        subject.claimed("acct", next(keys[node]), "f")
    hung.freeze()
    over = threading.Event()

    def trouble() -> None:
        while not over.is_set():
            with suppress(LedgerUnavailable):
                subject.claim("acct", next(keys[hung]), "f")

    thread = threading.Thread(target=trouble)
    thread.start()
    until = time.monotonic() + 8.0
    while time.monotonic() < until:
        for node in others:
            assert isinstance(subject.claim("acct", next(keys[node]), "f"), Reservation)
        time.sleep(0.05)
    over.set()
    hung.thaw()
    thread.join(20.0)
