"""A ledger's events as Flask (blinker) signals.

    from idemredis.telemetry.signals import send, signals

    idempotency = Idempotency(app, principal=…, observers=[send])
    signals["fenced"].connect(page_somebody)        # page_somebody(sender, event)

The sender is the application, or None for events in the background.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from blinker import NamedSignal, Namespace
from flask import current_app, has_app_context

from ..events import Event, EventName, serving

__all__ = ["send", "signals"]

_namespace = Namespace()

signals: Mapping[str, NamedSignal] = {
    name: _namespace.signal(f"idempotency-{name.replace('_', '-')}") for name in get_args(EventName)
}
"""The signal of each event, by the event's name."""


def send(event: Event) -> None:
    """Send an event as a signal; pass this function as an observer. It costs nothing without receivers."""
    signal = signals[event.name]
    if signal.receivers:
        application: Any = current_app
        sender = application._get_current_object() if has_app_context() else serving.get()
        signal.send(sender, event=event)
