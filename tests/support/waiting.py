"""Waiting for what another thread or process does, with a deadline and never a fixed sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["wait_until"]

T = TypeVar("T")


def wait_until(predicate: Callable[[], T], seconds: float = 20.0) -> T:
    """Ask until the answer is true, and return it.

    Raises:
        AssertionError: it was not, for `seconds`.
    """
    until = time.monotonic() + seconds
    while True:
        if answer := predicate():
            return answer
        if time.monotonic() > until:
            raise AssertionError(f"not within {seconds:g} s: {predicate}")
        time.sleep(0.005)
