"""Keep passwords out of tracebacks: error reporters send the local variables of every frame elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Generic, ParamSpec, TypeVar

__all__ = ["Hidden", "hides_arguments", "without_frames"]

E = TypeVar("E", bound=BaseException)
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Hidden(Generic[T]):
    """A value that is kept for later and never shown: the attributes of an object may be a local variable somewhere."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "<hidden>"


def without_frames(error: E) -> E:
    """Drop the frames of an error, and of every error behind it, and return it; one behind `from None` is dropped.

    While redis-py connects, the user's name and password are local variables of its frames.
    """
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = None
        if one.__suppress_context__ and one.__context__ is not one.__cause__:
            one.__context__ = None  # its message may quote what it was given
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
    return error


def hides_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that is given a URL or password, so that an error leaves it without its frame.

    The error's traceback ends at the caller, whose call the message explains.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            failure = without_frames(error)
        del args, kwargs
        raise failure

    return run
