"""What a user of effects writes; mypy checks it, and nothing runs it."""

from __future__ import annotations

from datetime import timedelta
from typing import assert_type

from sqlalchemy import Engine, MetaData
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from idemredis import AsyncLedger, EffectDone, Ledger, Reservation, StoredResponse, current_reservation
from idemredis.flask import Idempotency
from idemredis.sql import Effects

effects = Effects(MetaData(), table="done")


class Own(Session):
    """A session class of the application."""


def sync(engine: Engine, make: sessionmaker[Session], own: sessionmaker[Own], scoped: scoped_session[Session]) -> None:
    effects.create(engine)
    with make() as session:
        assert_type(effects.record(session, current_reservation, ({"a": 1}, 201)), StoredResponse)
        assert_type(effects.prune(session, timedelta(days=1)), int)
    assert_type(effects.record(scoped, current_reservation, None), StoredResponse)
    with effects.once(make, current_reservation) as e:
        assert_type(e.session, Session)
        assert_type(e.done, StoredResponse | None)
        e.response = {"a": 1}, 201
    assert_type(e.answer, StoredResponse)
    with effects.once(own, current_reservation) as mine:
        assert_type(mine.session, Own)
    with effects.once(scoped, current_reservation) as current:
        assert_type(current.session, Session)
    effects.record("session", current_reservation, None)  # type: ignore[call-overload]


async def asynchronous(
    engine: AsyncEngine, make: async_sessionmaker[AsyncSession], scoped: async_scoped_session[AsyncSession]
) -> None:
    await effects.create(engine)
    async with make() as session:
        assert_type(await effects.record(session, current_reservation, None), StoredResponse)
        assert_type(await effects.prune(session, 3600), int)
    async with effects.once(make, current_reservation) as e:
        assert_type(e.session, AsyncSession)
    assert_type(e.answer, StoredResponse)
    async with effects.once(scoped, current_reservation) as current:
        assert_type(current.session, AsyncSession)


def recovering(ledger: Ledger, later: AsyncLedger, make: sessionmaker[Session], idempotency: Idempotency) -> None:
    ledger.once(principal="a", key="k", recover=effects.recover(make))
    later.once(principal="a", key="k", recover=effects.recover(make))
    idempotency.protect(recover=effects.recover(make))


def told(r: Reservation, session: Session) -> bytes:
    try:
        effects.record(session, r, None)
    except EffectDone as done:
        return done.response.body
    return b""
