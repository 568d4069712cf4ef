"""Which endpoints are exempt, and which protect themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..web.options import Options

__all__ = ["EXEMPT", "OPTIONS", "Marks", "mark", "marks_of"]

EXEMPT = "__idemredis_exempt__"
"""Attribute of an endpoint, or a class of them, that is exempt."""

OPTIONS = "__idemredis_options__"
"""Attribute of a protected endpoint, or a dependency that guards one, that has its options."""


class Marks(NamedTuple):
    """What is known of one endpoint and method.

    Attributes:
        exempt: it is exempt.
        protected: it protects itself.
        missing: its class does not have the method, and answers 405.
    """

    exempt: bool
    protected: bool
    missing: bool


def mark(function: Callable[..., Any], options: Options) -> Callable[..., Any]:
    """Mark a function that protects itself."""
    setattr(function, OPTIONS, options)
    return function


def marks_of(route: Any, method: str) -> Marks:
    """Return the marks of the endpoint of a Starlette or FastAPI route, of its method, and of its dependencies."""
    endpoint = getattr(route, "endpoint", None)
    places = [endpoint, getattr(endpoint, "func", None), getattr(endpoint, method.lower(), None)]
    exempt = any(hasattr(place, EXEMPT) for place in places)
    protected = any(hasattr(place, OPTIONS) for place in (*places, *_dependencies(getattr(route, "dependant", None))))
    missing = hasattr(endpoint, "method_not_allowed") and not hasattr(endpoint, method.lower())
    return Marks(exempt, protected, missing)


def _dependencies(dependant: Any) -> Iterator[Any]:
    waiting = [dependant] if dependant is not None else []
    while waiting:
        found = waiting.pop()
        yield getattr(found, "call", None)
        waiting += getattr(found, "dependencies", ())
