"""Reading the reports of `doctor`."""

from __future__ import annotations

from idemredis.inspection.diagnosis import Finding, Report

__all__ = ["of"]


def of(report: Report, check: str) -> Finding:
    """Return the worst finding of a check."""
    order = ("ok", "unknown", "warning", "problem")
    return max((f for f in report.findings if f.check == check), key=lambda f: order.index(f.verdict))
