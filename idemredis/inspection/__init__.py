"""Inspect servers and rows: `doctor`, and row summaries for people. Nothing is written except scratch rows.

`Ledger.check`, the command line and `tail` use it. It must not need more rights than `idemredis acl` gives to the
viewer.
"""

PINGED = "idemredis-ping"
"""Principal and key of the row that `ping` reads; there is none."""

SAMPLE = 200
"""Rows that `check` looks at by default; enough to notice rows without a TTL, and read in a few milliseconds."""
