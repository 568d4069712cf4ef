"""What an error reporter would send: the message of an error, and the local variables of every frame behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

__all__ = ["leaks"]

TESTS = str(Path(__file__).parents[1])

DEEP = 4
"""How deep containers are looked into, as error reporters do."""


def leaks(error: BaseException, secret: str) -> list[str]:
    """Return where an error shows the secret; frames of the tests themselves are left out, since they made it."""
    found = []
    for one in _chain(error):
        shown = [str(one), repr(one), *(repr(note) for note in getattr(one, "__notes__", ()))]
        found += [f"message of {type(one).__name__}: {text}" for text in shown if secret in text]
        for where, name, value in _locals(one.__traceback__):
            found += [f"{where}: {name} = {text}" for text in _texts(value, DEEP) if secret in text]
    return found


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions


def _locals(at: TracebackType | None) -> Iterator[tuple[str, str, object]]:
    while at is not None:
        code = at.tb_frame.f_code
        if not code.co_filename.startswith(TESTS):
            for name, value in at.tb_frame.f_locals.items():
                yield f"{code.co_filename}:{at.tb_lineno} {code.co_qualname}", name, value
        at = at.tb_next


def _texts(value: object, deep: int) -> Iterator[str]:
    try:
        yield repr(value)
    except Exception as error:
        yield f"cannot be shown: {error}"
    if isinstance(value, BaseException):
        yield str(value)
    if not deep:
        return
    if isinstance(value, Mapping):
        for name, one in list(value.items()):
            yield from _texts(name, deep - 1)
            yield from _texts(one, deep - 1)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for one in value:
            yield from _texts(one, deep - 1)
