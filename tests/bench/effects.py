"""What a record costs a transaction that makes an order, on each database."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from sqlalchemy.orm import Session, sessionmaker

from idemredis import Ledger, Reservation
from tests.support.databases import KINDS, Databases
from tests.support.orders import Order, effects, prepared
from tests.support.servers import Server

from .turns import Figure, in_turns

__all__ = ["records"]


def records(server: Server) -> Iterator[Figure]:
    """The same transaction without a record, with `record`, and in a block of `once`."""
    claimed = Ledger(server.client()).claim("bench", "k", "f")
    assert isinstance(claimed, Reservation)
    numbers = itertools.count()

    def attempt() -> Reservation:
        identity = claimed.identity._replace(row=f"idem:bench:{next(numbers)}")
        return Reservation(identity, "f" * 64, 1, claimed.owner, None, claimed.lease)

    databases = Databases()
    try:
        for kind in KINDS:
            engine = prepared(databases, kind).engine()
            make = sessionmaker(engine)

            def plain(make: sessionmaker[Session] = make) -> None:
                with make() as session:
                    session.add(Order(made_by=1))
                    session.flush()
                    session.commit()

            def record(make: sessionmaker[Session] = make) -> None:
                with make() as session:
                    session.add(Order(made_by=1))
                    session.flush()
                    effects.record(session, attempt(), ({"order": 1}, 201))
                    session.commit()

            def once(make: sessionmaker[Session] = make) -> None:
                with effects.once(make, attempt()) as e:
                    e.session.add(Order(made_by=1))
                    e.session.flush()
                    e.response = {"order": 1}, 201

            calls: dict[str, Callable[[], object]] = {"plain": plain, "record": record, "once": once}
            turns = in_turns(calls, rounds=20, calls=50)
            engine.dispose()
            for name in ("plain", "record", "once"):
                note = "" if name == "plain" else f"{turns.ratio(name, 'plain'):.2f} times the plain one"
                yield Figure(f"{kind}: a transaction, {name}, p50", turns.p50(name), "µs", note=note)
    finally:
        databases.close()
