"""`Effects.prune`: old records go in small batches, beside traffic."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event, select

from idemredis import ConfigurationError, StoredResponse
from idemredis.sql.table import now_ms
from tests.support.databases import Databases
from tests.support.orders import Orders, effects, prepared

DAY = 86400.0


def fill(orders: Orders, count: int, age: float, prefix: str = "old") -> None:
    """Insert records that are `age` seconds old."""
    with orders.looking.begin() as session:
        now = session.scalar(select(now_ms()))
        assert now is not None
        status, headers, body, omitted = StoredResponse(200).encode()
        session.execute(
            effects.table.insert(),
            [
                {
                    "row_name": f"idem:{prefix}:{number}",
                    "fingerprint": "f",
                    "generation": 1,
                    "response_status": status,
                    "response_headers": headers,
                    "response_body": body,
                    "response_omitted": omitted,
                    "created_at": now - round(age * 1000),
                }
                for number in range(count)
            ],
        )


def prune(orders: Orders, age: Any) -> int:
    pruned: int = orders.run(lambda session: effects.prune(session, age))
    return pruned


def names(orders: Orders) -> set[str]:
    return {record.row_name for record in orders.recorded()}


def test_old_records_go_and_young_ones_stay(orders: Orders, claim: Any) -> None:
    fill(orders, 1234, 8 * DAY)
    fill(orders, 3, 6 * DAY, "young")
    r = claim()
    orders.place(r)
    young = {f"idem:young:{number}" for number in range(3)} | {r.row}

    assert prune(orders, timedelta(days=7)) == 1234
    assert names(orders) == young
    assert prune(orders, 7 * DAY) == 0
    assert prune(orders, 0) == 4
    assert orders.recorded() == []


def test_each_batch_is_committed_by_itself_and_small(databases: Databases) -> None:
    orders = Orders("sync", prepared(databases, "sqlite"))
    fill(orders, 1100, DAY)
    seen: list[int] = []
    with orders.looking() as session:
        event.listen(session, "after_commit", lambda session: seen.append(len(orders.recorded())))
        assert effects.prune(session, 60) == 1100
        assert not session.in_transaction()
    assert seen == [600, 100, 0]
    orders.close()


def test_the_clock_is_the_database_s(orders: Orders, claim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose clock is a year ahead neither prunes what is young nor makes records that are old too late."""
    import time

    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 365 * DAY)
    orders.place(claim())
    assert prune(orders, 60) == 0
    monkeypatch.undo()
    with orders.looking() as session:
        now = session.scalar(select(now_ms()))
    assert now is not None
    assert abs(now / 1000 - real()) < 60
    assert abs(orders.recorded()[0].created_at / 1000 - real()) < 60


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "SERIALIZABLE"])
@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_attempts_beside_it_and_other_prunes_do_not_fail(
    databases: Databases, kind: str, isolation: str, claim: Any
) -> None:
    orders = Orders("sync", prepared(databases, kind), isolation)
    fill(orders, 2000, 8 * DAY)
    failures: list[BaseException] = []
    pruned: list[int] = []
    ended = threading.Event()
    attempts = [claim(f"k{number}") for number in range(200)]

    def work() -> None:
        try:
            while not ended.is_set() and attempts:
                orders.place_once(attempts.pop())
        except BaseException as error:
            failures.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    for _ in range(2):
        pruned.append(prune(orders, 7 * DAY))
    ended.set()
    worker.join()

    assert failures == []
    assert pruned == [2000, 0]
    assert len(orders.recorded()) == orders.count() > 0
    orders.close()


@pytest.mark.parametrize("age", [-1, float("nan"), float("inf"), None, "7", True, timedelta(days=-1), 1e12])
def test_an_age_that_is_none_is_refused(databases: Databases, age: Any) -> None:
    orders = Orders("sync", prepared(databases, "sqlite"))
    with pytest.raises(ConfigurationError, match="older_than"):
        prune(orders, age)
    orders.close()
