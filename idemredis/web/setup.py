"""Check the arguments of an adapter, and create its ledger from the settings."""

from __future__ import annotations

from typing import Any, TypeVar

from ..core.keys import valid_principal
from ..errors import ConfigurationError, InvalidPrincipal
from ..events import Observer
from ..ledger import AsyncLedger, Ledger
from .settings import LEDGER_SETTINGS, PREFIX, Settings, in_settings

__all__ = ["check_given", "constant", "make_ledger"]

L = TypeVar("L", Ledger, AsyncLedger)


def check_given(
    kind: type[Ledger] | type[AsyncLedger],
    client: object,
    ledger: object,
    observers: tuple[Observer, ...],
    problem: object,
) -> None:
    """Refuse arguments that do not go together.

    Raises:
        ConfigurationError: the ledger is of another kind, a client or observers are given besides a ledger, or
            `problem` is not a function.
    """
    if client is not None and ledger is not None:
        raise ConfigurationError("pass a client or a ledger, not both; a ledger has its own client")
    if ledger is not None and not isinstance(ledger, kind):
        article = "an" if kind.__name__[0] == "A" else "a"
        raise ConfigurationError(f"ledger must be {article} {kind.__name__}, not {type(ledger).__name__}")
    if ledger is not None and observers:
        raise ConfigurationError(f"pass observers to the {kind.__name__}, not here; a ledger has its own observers")
    if problem is not None and not callable(problem):
        raise ConfigurationError(f"problem must be a function, not {problem!r}")


def constant(principal: object) -> object:
    """Return a constant principal, once it is checked.

    Raises:
        ConfigurationError: it is not a valid principal.
    """
    try:
        valid_principal(principal)
    except InvalidPrincipal as error:
        raise ConfigurationError(f"{error}; pass a function, or a constant for a single-tenant service") from None
    return principal


def make_ledger(kind: type[L], settings: Settings, client: Any, ledger: L | None, observers: tuple[Observer, ...]) -> L:
    """Return the ledger that was passed, or make one from the settings.

    Raises:
        ConfigurationError: a setting belongs to the ledger that was passed, or both a URL and a client are given, or
            neither is.
    """
    if ledger is not None:
        if doubled := sorted(settings.configured & LEDGER_SETTINGS):
            raise ConfigurationError(
                f"{PREFIX}{doubled[0]} is the ledger's own setting; set it where the ledger is made"
            )
        return ledger
    if client is not None and settings.url is not None:
        raise ConfigurationError(f"{PREFIX}URL and a client are both given; remove one")
    how = (settings.policy, settings.namespace, observers)
    options: dict[str, Any] = {"socket_timeout": settings.socket_timeout, "log_keys": settings.log_keys}
    try:
        if client is not None:
            return kind(client, *how, **options)
        if settings.url is None:
            raise ConfigurationError(f"{PREFIX}URL is not set; use a redis:// URL, or memory:// for a first try")
        return kind.from_url(settings.url, *how, **options)
    except ConfigurationError as error:
        raise in_settings(error) from None
