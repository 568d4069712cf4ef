"""Set the slots of immutable values in their constructors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["slot_setters"]


def slot_setters(cls: type) -> list[Callable[[Any, Any], None]]:
    """Return a setter for each slot of the class, in their order; twice as fast as `object.__setattr__`."""
    return [vars(cls)[name].__set__ for name in vars(cls)["__slots__"] if not name.startswith("__")]
