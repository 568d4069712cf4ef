"""The options of `protect` for one view, and their checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..core.settle import ON_ERROR, OnError
from ..errors import ConfigurationError
from ..policy import check_seconds
from .settings import PREFIX

__all__ = ["Options", "check_lease", "misused"]


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `protect` for one view; None means the application's setting.

    Raises:
        ConfigurationError: an option is not supported.
    """

    required: bool | None = None
    lease: float | None = None
    wait: float | None = None
    operation: str = ""
    on_error: OnError | None = None
    fingerprint: Callable[..., object] | None = None
    recover: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.operation, str):
            raise ConfigurationError(f"operation must be a str, not {self.operation!r}")
        if not isinstance(self.required, bool | None):
            raise ConfigurationError(f"required must be True or False, not {self.required!r}")
        for name, function in (("fingerprint", self.fingerprint), ("recover", self.recover)):
            if function is not None and not callable(function):
                raise ConfigurationError(f"{name} must be a function, not {function!r}")
        if self.lease is not None:
            check_seconds("lease", self.lease)
        if self.wait:
            check_seconds("wait", self.wait)
        if self.on_error is not None and self.on_error not in ON_ERROR:
            raise ConfigurationError(f"on_error must be one of {', '.join(ON_ERROR)}, not {self.on_error!r}")


def check_lease(options: Options, retention: float, view: str = "") -> None:
    """Refuse a view's own lease that is not shorter than the retention.

    Raises:
        ConfigurationError: it is as long or longer.
    """
    if options.lease is not None and options.lease >= retention:
        of_view = f" of {view}" if view else ""
        raise ConfigurationError(
            f"protect(lease={options.lease:g}){of_view} must be shorter than the retention of {retention:g} s; "
            f"choose a shorter lease, or a longer {PREFIX}RETENTION_SECONDS"
        )


def misused(view: object) -> str:
    """Return the error message for something that `protect` cannot decorate."""
    if isinstance(view, type):
        return f"protect takes a function; give the class {view.__name__} `decorators = [idempotency.protect]` instead"
    if isinstance(view, str):
        return f"protect takes a function, or options by name: protect(operation={view!r})"
    return f"protect takes a function, or options by name, not {view!r}"
