"""The routes of a Starlette or FastAPI application: which one serves a request, and its template.

Nothing is imported: routes are known by their attributes `matches`, `path_format`, `endpoint` and `routes`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

from ..errors import ConfigurationError
from ._types import Scope

__all__ = ["Exempt", "Matched", "Routes", "exempting"]

Exempt: TypeAlias = str | Callable[[Scope], object]
"""A path template, such as `/webhooks/{source}`, or a function of the scope."""

_FULL = "FULL"
_OTHER_TEMPLATES = ("path_template",)
"""Keys in which other frameworks leave a template in the scope: Litestar."""


class Matched(NamedTuple):
    """The route of a request, and its template; the route is None if what is mounted decides it, unseen."""

    route: Any
    template: str


class Routes:
    """The routes of one application, if it is a Starlette or FastAPI one.

    Args:
        app: the application that the middleware was given.
        by_host: the host is part of the fingerprint.
    """

    def __init__(self, app: object, by_host: bool) -> None:
        self._given = app
        self._app = app
        self._by_host = by_host
        self._templates: dict[int, list[str]] = {}
        self._checked: tuple[list[Any], int] | None = None

    def see(self, scope: Scope) -> None:
        """Remember the application in the scope: the middleware is part of it, or of what is mounted in it."""
        app = scope.get("app")
        if app is not None and app is not self._app and self._routes_of(app) is not None:
            self._app = app

    @property
    def known(self) -> bool:
        """True if the application matches its routes by `matches`."""
        return self._routes_of(self._app) is not None

    def match(self, scope: Scope, middleware: object) -> Matched | None:
        """Return the route that will serve a request; None if none will, or not with this method.

        Around one route, or around what is mounted, the application in the scope is the outer one. Its routes then
        decide only if the one that they lead to has been chosen already; otherwise the route is unknown, and None.
        """
        if self._given is not self._app and (routes := self._routes_of(self._given)) is not None:
            matched = self._match(routes, dict(scope), "")
            return None if matched is None else Matched(matched.route, self.template(scope) or matched.template)
        matched = self._match(self._routes_of(self._app) or (), dict(scope), "")
        is_first = scope.get("endpoint", self._app) is self._app  # no route has been chosen but that to the application
        if self._given is self._app or is_first or _is_part(middleware, self._app):
            return matched
        chosen = matched is not None and getattr(matched.route, "endpoint", None) is scope["endpoint"]
        return matched if chosen else Matched(None, self.template(scope))

    def template(self, scope: Scope) -> str:
        """Return the template of the route that serves a request; "" if unknown. Never the concrete path."""
        for key in _OTHER_TEMPLATES:
            if isinstance(found := scope.get(key), str):
                return found
        endpoint = scope.get("endpoint")
        if endpoint is None or not self.known:
            return ""
        templates = self._templates.get(id(endpoint))
        if templates is None:
            self._templates = {}
            for route, template in self._walk(self._routes_of(self._app) or (), ""):
                self._templates.setdefault(id(getattr(route, "endpoint", None)), []).append(template)
            templates = self._templates.setdefault(id(endpoint), [])
        if len(set(templates)) == 1:
            return templates[0]
        fresh = {key: scope[key] for key in ("type", "method", "path", "headers")}
        fresh["root_path"] = scope.get("app_root_path", scope.get("root_path", ""))
        matched = self._match(self._routes_of(self._app) or (), fresh, "")
        return "" if matched is None else matched.template

    def _routes_of(self, app: Any) -> list[Any] | None:
        routes = getattr(app, "routes", None)
        if not isinstance(routes, list):
            return None
        if self._checked is None or self._checked[0] is not routes or self._checked[1] != len(routes):
            if not all(hasattr(route, "matches") for route in routes):
                return None
            self._checked = routes, len(routes)
        return routes

    def _match(self, routes: Iterable[Any], scope: Scope, prefix: str) -> Matched | None:
        for route in _flat(routes):
            match, child_scope = route.matches(scope)
            if match.name != _FULL:
                continue
            self._check(route)
            template = prefix + _template_of(route)
            within = _mounted(route)
            if within is None:
                return Matched(route, template)
            return self._match(within, {**scope, **child_scope}, prefix + _prefix_of(route))
        return None

    def _walk(self, routes: Iterable[Any], prefix: str) -> Iterator[tuple[Any, str]]:
        for route in _flat(routes):
            self._check(route)
            within = _mounted(route)
            if within is None:
                yield route, prefix + _template_of(route)
            else:
                yield from self._walk(within, prefix + _prefix_of(route))

    def _check(self, route: Any) -> None:
        if hasattr(route, "host_regex") and not self._by_host:
            raise ConfigurationError(
                f"the application routes by host ({route!r}), so IDEMREDIS_FINGERPRINT_HEADERS must have 'host' in it"
            )


def exempting(exempt: Iterable[Exempt]) -> Callable[[Scope], bool]:
    """Return a function that returns True for an exempt request.

    Raises:
        ConfigurationError: an entry is neither a path template nor a function.
    """
    patterns, functions = [], []
    for entry in [exempt] if isinstance(exempt, str) else exempt:
        if isinstance(entry, str) and entry.startswith("/"):
            patterns.append(_pattern(entry))
        elif callable(entry):
            functions.append(entry)
        else:
            raise ConfigurationError(
                f"exempt takes path templates such as '/webhooks/{{source}}', or functions of the scope; not {entry!r}"
            )

    def is_exempt(scope: Scope) -> bool:
        path, root = scope["path"], scope.get("root_path", "")
        if root and (path == root or path.startswith(f"{root}/")):
            path = path[len(root) :]
        return any(pattern.fullmatch(path) for pattern in patterns) or any(function(scope) for function in functions)

    return is_exempt


def _pattern(template: str) -> re.Pattern[str]:
    pieces = re.split(r"[{<]([^}>]*)[}>]", template)
    found = []
    for n, piece in enumerate(pieces):
        if n % 2 == 0:
            found.append(re.escape(piece))
        else:
            found.append(".*" if "path" in re.split(r"[:,]", piece) else "[^/]+")
    return re.compile("".join(found))


def _is_part(middleware: object, app: Any) -> bool:
    """Return True if a middleware is one of those that were added to a Starlette or FastAPI application."""
    layer = getattr(app, "middleware_stack", None)
    while layer is not None and layer is not middleware:
        layer = getattr(layer, "app", None)
    return layer is not None


def _flat(routes: Iterable[Any]) -> Iterator[Any]:
    """Yield routes; those of a router that FastAPI has included, with the prefix of its inclusion."""
    for route in routes:
        contexts = getattr(route, "effective_route_contexts", None)
        if contexts is None:
            yield route
        else:
            for context in contexts():
                yield getattr(context, "starlette_route", None) or context


def _mounted(route: Any) -> list[Any] | None:
    """Return the routes of what is mounted; None if it is no mount, or a mount of something that has none."""
    return None if hasattr(route, "endpoint") else getattr(route, "routes", None) or None


def _template_of(route: Any) -> str:
    return str(getattr(route, "path_format", None) or getattr(route, "path", ""))


def _prefix_of(route: Any) -> str:
    return "" if hasattr(route, "host_regex") else str(getattr(route, "path", ""))
