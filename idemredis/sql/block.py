"""The one-step form: a block whose transaction is committed with the record of its response."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from sqlalchemy import event
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session

from ..core.as_response import as_response
from ..core.reservation import Reservation
from ..core.response import StoredResponse
from ..core.settle import of_effect
from ..errors import ConfigurationError, EffectDone
from .sessions import abandon, is_async, opened

if TYPE_CHECKING:
    from .effects import Effects

__all__ = ["EffectBlock"]

S = TypeVar("S")


class EffectBlock(Generic[S]):
    """What `Effects.once` gives to its block.

    Attributes:
        session: the session to make the effect with. Do not commit it: it is committed when the block ends.
        done: the response that an earlier attempt has recorded, or None. If it is not None, everything that the block
            does in the session is rolled back, so the block may skip it.
        response: what to record: a `StoredResponse`, or a JSON value, or `(value, status)` or
            `(value, status, headers)`; None by default, which is recorded as `null`.
    """

    session: S
    done: StoredResponse | None
    response: object

    def __init__(self, effects: Effects, given: Any, reservation: Reservation) -> None:
        self.done = self.response = None
        self._answer: StoredResponse | None = None
        self._effects = effects
        self._given = given
        self._reservation = reservation

    @property
    def answer(self) -> StoredResponse:
        """The recorded response, whichever attempt made it; return it after the block.

        Raises:
            RuntimeError: the block has not ended, or it raised.
        """
        if self._answer is None:
            raise RuntimeError("the answer is known when the block of Effects.once has ended")
        return self._answer

    def __enter__(self) -> Self:
        session, self._owned = opened(self._given)
        if not isinstance(session, Session):
            raise ConfigurationError("an AsyncSession needs `async with`")
        self.session = session  # type: ignore[assignment]  # S is the kind of session that was given
        try:
            self._begin(session)
        except BaseException:
            self._close(session)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        session: Any = self.session
        try:
            return self._end(session, error)
        finally:
            self._close(session)

    async def __aenter__(self) -> Self:
        session, self._owned = opened(self._given)
        if not is_async(session):
            raise ConfigurationError("a sync Session needs `with`, not `async with`")
        self.session = session
        try:
            await session.run_sync(self._begin)
        except BaseException:
            await self._close_async(session)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        session: Any = self.session
        try:
            swallowed: bool = await session.run_sync(self._end, error)
            return swallowed
        finally:
            await self._close_async(session)

    def _close(self, session: Session) -> None:
        if self._owned:
            session.close()

    async def _close_async(self, session: Any) -> None:
        if self._owned:
            await asyncio.shield(asyncio.ensure_future(session.close()))  # also when the task is cancelled again

    # What both kinds of session run

    def _begin(self, session: Session) -> None:
        try:
            self.done = self._effects.look(session, self._reservation)
        except BaseException:
            abandon(session)
            raise
        event.listen(session, "before_commit", self._refuse_commit)

    def _end(self, session: Session, error: BaseException | None) -> bool:
        """End the transaction; return True if the recorded response replaces the error that left the block."""
        event.remove(session, "before_commit", self._refuse_commit)
        failed: Exception | None = None
        if error is None and self.done is None:
            failed = self._commit(session)
            if failed is None:
                return False
        else:
            abandon(session)
        if self.done is None:
            self.done = self._recorded(session, failed or error)
        if self.done is not None and isinstance(failed or error, DBAPIError | EffectDone | None):
            self._answer = self.done
            return True
        if failed is not None:
            raise failed
        return False

    def _commit(self, session: Session) -> Exception | None:
        """Record the response and commit; return the error, after a rollback, if that fails."""
        try:
            response = as_response(self.response)
            self._effects.insert(session, self._reservation, response)
            session.commit()
        except Exception as failed:
            abandon(session)
            return failed
        except BaseException:
            abandon(session)
            raise
        self._answer = response
        return None

    def _recorded(self, session: Session, error: BaseException | None) -> StoredResponse | None:
        """Return the response if the effect was committed: by another attempt, or by a commit whose reply was lost."""
        if error is not None and (found := of_effect(error, self._reservation)) is not None:
            return found.response
        if not isinstance(error, DBAPIError):
            return None
        try:
            return self._effects.look(session, self._reservation)
        except SQLAlchemyError:
            return None  # the database cannot be read; `error` is raised

    def _refuse_commit(self, session: Session) -> None:
        if not session.in_nested_transaction():
            raise ConfigurationError("Effects.once commits when its block ends; do not commit the session inside")
