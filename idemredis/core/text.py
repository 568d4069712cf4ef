"""Make text from outside safe to print and to log."""

from __future__ import annotations

__all__ = ["escaped"]


def escaped(text: str) -> str:
    """Escape all characters that are not printable, so that the text cannot control a terminal or forge a log line."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
