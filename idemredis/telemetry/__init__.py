"""Observers that give a ledger's events to others: OpenTelemetry, Flask signals, Redis's own PUBLISH.

Each imports what it needs when it is made. A change here must not slow down a ledger that has no such observer.
"""

from .otel import Telemetry
from .publisher import Publisher

__all__ = ["Publisher", "Telemetry"]
