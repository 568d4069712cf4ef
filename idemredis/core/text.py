"""Text that comes from outside, made safe to print and to log."""

from __future__ import annotations

__all__ = ["escaped"]


def escaped(text: str) -> str:
    """Return text with all but printable characters escaped: it cannot control a terminal, nor forge a log line."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
