"""Which views are protected and which are exempt, also where a decorator hides it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from flask import Flask, Request
from flask.views import http_method_funcs
from werkzeug.local import LocalProxy

from ..web.options import Options

__all__ = ["EXEMPT", "OPTIONS", "Marks", "Views", "wrapped_by"]

logger = logging.getLogger("idemredis")

OPTIONS = "__idemredis_options__"
"""Attribute of a protected view that has its options."""

EXEMPT = "__idemredis_exempt__"
"""Attribute of a view, a class of views or a blueprint that is exempt."""

_SERVED = "__idemredis_served__"

_ALL = {name.upper() for name in http_method_funcs}

MOST_WRAPPED = 100
"""Functions that are looked at to find what a view wraps; more than any stack of decorators has."""


class Marks(NamedTuple):
    """What is known of one view and method.

    Attributes:
        exempt: it is exempt, or its blueprint is.
        protected: it protects itself, with its own options.
        hidden_exempt: something that it wraps is exempt, but a decorator without `functools.wraps` hides that.
        hidden: the options of protected functions that it wraps and whose decorators hide them.
    """

    exempt: bool
    protected: bool
    hidden_exempt: bool
    hidden: tuple[Options, ...]


class Views:
    """The marks of an application's views; found once a view and method.

    Attributes:
        checked: True once the protected functions that no route serves have been named.
    """

    def __init__(self) -> None:
        self.checked = False
        self._marks: dict[tuple[str, str], tuple[object, Marks]] = {}
        self._learned: set[str] = set()

    def marks(self, app: Flask, endpoint: str, method: str) -> Marks:
        """Return the marks of the view of an endpoint, for one method."""
        view = app.view_functions.get(endpoint)
        of_view, marks = self._marks.get((endpoint, method), (None, None))
        if marks is None or of_view is not view:
            marks = _marks_of(view, method, _exempt_blueprint(app, endpoint))
            self._marks[endpoint, method] = view, marks
        return marks

    def are_protected(self, app: Flask, request: Request, protect_all: bool) -> bool:
        """Return True if the view of this request is protected, as far as can be known before it runs."""
        endpoint = request.endpoint
        if endpoint is None:
            return False
        marks = self.marks(app, endpoint, request.method.upper())
        return bool(marks.protected or marks.hidden or endpoint in self._learned or (protect_all and not marks.exempt))

    def learn(self, endpoint: str | None) -> None:
        """Note that the view of an endpoint is protected, which could not be seen from outside."""
        if endpoint is not None:
            self._learned.add(endpoint)

    def check(self, app: Flask, protected: Iterable[Any], methods: frozenset[str]) -> None:
        """Warn of each function that `protect` returned and that protects nothing; once, at the first request.

        Either no route serves it, or only for methods that are not in `methods`.
        """
        self.checked = True
        served = _served(app)
        for function in protected:
            by = served.get(id(function))
            if by is not None and by & methods:
                setattr(function, _SERVED, True)
            elif not hasattr(function, _SERVED):
                logger.warning(
                    "protect of %s.%s protects nothing: %s",
                    function.__module__,
                    function.__qualname__,
                    "no route serves the function that it returned; put @protect below the route's decorator, next to "
                    "the function"
                    if by is None
                    else f"it is served for {', '.join(sorted(by))} only, which IDEMREDIS_METHODS does not have",
                )

    def routes(self, app: Flask, methods: frozenset[str], protect_all: bool) -> list[tuple[str, str, str, str]]:
        """Return method, rule, endpoint and protection of each route with an unsafe method, in their order."""
        found = []
        for rule in app.url_map.iter_rules():
            for method in sorted((rule.methods or set()) & methods):
                marks = self.marks(app, rule.endpoint, method)
                found.append((method, rule.rule, rule.endpoint, _protection(marks, protect_all)))
        return found


def _served(app: Flask) -> dict[int, set[str]]:
    """Return by which methods each function is served; by its id."""
    of_endpoint: dict[str, set[str]] = {}
    for rule in app.url_map.iter_rules():
        of_endpoint.setdefault(rule.endpoint, set()).update(rule.methods or _ALL)
    served: dict[int, set[str]] = {}
    for endpoint, view in app.view_functions.items():
        methods = of_endpoint.get(endpoint, _ALL)
        for function in wrapped_by(view):
            served.setdefault(id(function), set()).update(methods)
            for of_class in getattr(_get(function, "view_class"), "__mro__", ()):
                for name, member in vars(of_class).items():
                    by = {name.upper()} if name in http_method_funcs else methods
                    for inner in wrapped_by(member):
                        served.setdefault(id(inner), set()).update(by)
    return served


def wrapped_by(view: Any) -> Iterator[Any]:
    """Yield a view and the functions that it wraps, whether or not its decorators use `functools.wraps`."""
    seen: set[int] = set()
    waiting = [view]
    while waiting and len(seen) < MOST_WRAPPED:
        found = waiting.pop(0)
        if id(found) in seen or type(found) is LocalProxy or isinstance(found, type) or not callable(found):
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
    within = _get(view, "__dict__")
    return list(within.values()) if isinstance(within, dict) else []


def _get(thing: Any, name: str) -> Any:
    """Return an attribute, or None; a view may wrap anything, such as a proxy that has nothing to stand for yet."""
    try:
        return getattr(thing, name, None)
    except Exception:
        return None


def _cells(function: FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    return found


def _protection(marks: Marks, protect_all: bool) -> str:
    if marks.protected:
        return "protected"
    if marks.exempt:
        return "exempt"
    if marks.hidden_exempt or len(marks.hidden) > 1:
        return "UNCLEAR: a decorator without functools.wraps hides its options or its exemption"
    return "protected" if protect_all or marks.hidden else "NOT protected"


def _exempt_blueprint(app: Flask, endpoint: str) -> bool:
    names = endpoint.split(".")[:-1]
    around = (".".join(names[: n + 1]) for n in range(len(names)))
    return any(hasattr(app.blueprints.get(name), EXEMPT) for name in around)


def _marks_of(view: Any, method: str, exempt_blueprint: bool) -> Marks:
    direct = _places(view, method)
    exempt = exempt_blueprint or any(_get(place, EXEMPT) is not None for place in direct)
    protected = any(_get(place, OPTIONS) is not None for place in direct)
    if protected or exempt:
        return Marks(exempt, protected, False, () if protected else _hidden(direct, method)[1])
    return Marks(False, False, *_hidden(direct, method))


def _hidden(direct: list[Any], method: str) -> tuple[bool, tuple[Options, ...]]:
    hidden_exempt, hidden = False, list[Any]()
    for place in direct:
        for inner in wrapped_by(place):
            for found in _places(inner, method):
                hidden_exempt |= _get(found, EXEMPT) is not None
                options = _get(found, OPTIONS)
                if options is not None and options not in hidden:
                    hidden.append(options)
    return hidden_exempt, tuple(hidden)


def _places(view: Any, method: str) -> list[Any]:
    """Return where a mark can be: the view, its `MethodView` class, and the method that serves the request."""
    view_class = _get(view, "view_class")
    served = _get(view_class, method.lower())
    return [place for place in (view, view_class, served) if place is not None]
