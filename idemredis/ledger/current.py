"""`current_reservation`: a proxy for the reservation of the running view or function."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, cast

from ..core.reservation import Reservation
from ..errors import NoReservation

__all__ = ["current_reservation", "look_also_in", "running"]

_current: ContextVar[Reservation | None] = ContextVar("idemredis_reservation", default=None)

_elsewhere: list[Callable[[], Reservation | None]] = []


class running:  # used like a function; a generator as a context manager costs three times as much
    """Make `r` the current reservation for the block; None hides one that is around the block."""

    __slots__ = ("_reservation", "_token")

    def __init__(self, r: Reservation | None) -> None:
        self._reservation = r

    def __enter__(self) -> None:
        self._token = _current.set(self._reservation)

    def __exit__(self, *error: object) -> None:
        _current.reset(self._token)


def look_also_in(find: Callable[[], Reservation | None]) -> None:
    """Call `find` when no `running` block is active; an adapter finds its request's reservation after the view, too."""
    _elsewhere.append(find)


def _find() -> Reservation | None:
    r = _current.get()
    if r is None:
        for find in _elsewhere:
            if (r := find()) is not None:
                return r
    return r


def _get() -> Reservation:
    r = _find()
    if r is None:
        raise NoReservation(
            "there is no reservation: no protected view or `once` function is running, or it runs without a "
            "key; check `if current_reservation` first"
        )
    return r


class _CurrentReservation:
    """A proxy for the current reservation; falsy if there is none."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(_get(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(_get(), name, value)

    def __bool__(self) -> bool:
        return bool(_find())

    def __eq__(self, other: object) -> bool:
        return _find() == other

    def __hash__(self) -> int:
        return hash(_get())

    def __repr__(self) -> str:
        r = _find()
        return "<no current reservation>" if r is None else repr(r)

    def __dir__(self) -> list[str]:
        return dir(Reservation)

    @property  # type: ignore[misc]  # makes isinstance(current_reservation, Reservation) true
    def __class__(self) -> type:
        r = _find()
        return _CurrentReservation if r is None else type(r)


current_reservation: Reservation = cast(Reservation, _CurrentReservation())
"""The `Reservation` of the protected view or `once` function that is running; falsy if there is none.

Where a protected view runs unprotected, it is falsy too, and its attributes still work: see `Unprotected`.

Raises:
    NoReservation: an attribute is accessed, and there is no current reservation.
"""
