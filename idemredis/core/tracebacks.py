"""Keep passwords out of tracebacks: error reporters send the local variables of every frame to other systems."""

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
    """Holds a value that its `repr` does not show, because error reporters print the objects in local variables."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "<hidden>"


def without_frames(error: E) -> E:
    """Remove the frames of an error and of its causes and contexts, and return it.

    A context that `from None` suppresses is removed as well. While redis-py connects, the user's name and password are
    local variables of its frames.
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
            one.__context__ = None  # its message may quote the URL
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
    return error


def hides_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that takes a URL or password, so that errors leave it without the frames that have them.

    The error's traceback ends at the caller.
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
