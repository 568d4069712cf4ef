"""Observers that forward a ledger's events: to OpenTelemetry, to Flask signals, and to Redis with PUBLISH.

Each imports its dependencies when it is made. A change here must not slow down a ledger without observers.
"""

from .otel import Telemetry
from .publisher import Publisher

__all__ = ["Publisher", "Telemetry"]
