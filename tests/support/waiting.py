"""Waiting for another thread or process, with a deadline and without a fixed sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["wait_until"]

T = TypeVar("T")


def wait_until(predicate: Callable[[], T], seconds: float = 20.0) -> T:
    """Call a function until its result is true, and return the result.

    Raises:
        AssertionError: it was not true within `seconds`.
    """
    until = time.monotonic() + seconds
    while True:
        if answer := predicate():
            return answer
        if time.monotonic() > until:
            raise AssertionError(f"not within {seconds:g} s: {predicate}")
        time.sleep(0.005)
