"""Which views are protected and which are exempt, also where a decorator hides it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

from flask import Flask, Request

if TYPE_CHECKING:
    from ._state import Options

__all__ = ["EXEMPT", "OPTIONS", "Marks", "Views", "wrapped_by"]

OPTIONS = "__idemredis_options__"
"""Attribute of a protected view that has its options."""

EXEMPT = "__idemredis_exempt__"
"""Attribute of a view, a class of views or a blueprint that is exempt."""

MOST_WRAPPED = 100
"""Functions that are looked at to find what a view wraps; more than any stack of decorators has."""


class Marks(NamedTuple):
    """What is known of one view and method.

    Attributes:
        exempt: it is exempt.
        protected: it protects itself, with its own options.
        hidden_exempt: something that it wraps is exempt, but a decorator without `functools.wraps` hides that.
        hidden: the options of protected functions that it wraps and whose decorators hide them.
    """

    exempt: bool
    protected: bool
    hidden_exempt: bool
    hidden: tuple[Options, ...]


class Views:
    """The marks of an application's views; found once a view and method."""

    def __init__(self) -> None:
        self._marks: dict[tuple[str, str], tuple[object, Marks]] = {}
        self._learned: set[str] = set()

    def marks(self, app: Flask, endpoint: str, method: str) -> Marks:
        """Return the marks of the view of an endpoint, for one method."""
        view = app.view_functions.get(endpoint)
        of_view, marks = self._marks.get((endpoint, method), (None, None))
        if marks is None or of_view is not view:
            marks = _marks_of(view, method)
            self._marks[endpoint, method] = view, marks
        return marks

    def are_protected(self, app: Flask, request: Request, protect_all: bool) -> bool:
        """Return True if the view of this request is protected, as far as can be known before it runs."""
        endpoint = request.endpoint
        if endpoint is None:
            return False
        marks = self.marks(app, endpoint, request.method.upper())
        if marks.protected or marks.hidden or endpoint in self._learned:
            return True
        return protect_all and not marks.exempt and not exempt_blueprint(app, request)

    def learn(self, endpoint: str | None) -> None:
        """Note that the view of an endpoint is protected, which could not be seen from outside."""
        if endpoint is not None:
            self._learned.add(endpoint)


def exempt_blueprint(app: Flask, request: Request) -> bool:
    """Return True if the view belongs to an exempt blueprint."""
    return any(hasattr(app.blueprints[name], EXEMPT) for name in request.blueprints)


def wrapped_by(view: Any) -> Iterator[Any]:
    """Yield a view and the functions that it wraps, whether or not its decorators use `functools.wraps`."""
    seen: set[int] = set()
    waiting = [view]
    while waiting and len(seen) < MOST_WRAPPED:
        found = waiting.pop(0)
        if id(found) in seen or isinstance(found, type) or not callable(found):
            continue
        seen.add(id(found))
        yield found
        waiting += _within(found)


def _within(view: Any) -> list[Any]:
    if isinstance(view, functools.partial):
        return [view.func, *view.args]
    if isinstance(view, MethodType):
        return [view.__func__, view.__self__]
    if isinstance(view, FunctionType):
        return [view.__dict__.get("__wrapped__"), *_cells(view)]
    return list(getattr(view, "__dict__", {}).values())


def _cells(function: FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    return found


def _marks_of(view: Any, method: str) -> Marks:
    direct = _places(view, method)
    exempt = any(hasattr(place, EXEMPT) for place in direct)
    protected = any(hasattr(place, OPTIONS) for place in direct)
    if exempt or protected:
        return Marks(exempt, protected and not exempt, False, ())
    hidden_exempt, hidden = False, []
    for place in direct:
        for inner in wrapped_by(place):
            for found in _places(inner, method):
                hidden_exempt |= hasattr(found, EXEMPT)
                options = getattr(found, OPTIONS, None)
                if options is not None and options not in hidden:
                    hidden.append(options)
    return Marks(False, False, hidden_exempt, tuple(hidden))


def _places(view: Any, method: str) -> list[Any]:
    """Return where a mark can be: the view, its `MethodView` class, and the method that serves the request."""
    view_class = getattr(view, "view_class", None)
    served = getattr(view_class, method.lower(), None)
    return [place for place in (view, view_class, served) if place is not None]
