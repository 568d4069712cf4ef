"""For the person on call: what is in the ledger, is this Redis fit for it, and what is happening now."""

SAMPLE = 200
"""Rows that a check looks at, where nobody asks for more."""
