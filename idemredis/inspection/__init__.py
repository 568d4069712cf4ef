"""Looks at servers and rows, and changes nothing but scratch rows of its own: `doctor`, and rows as people read them.

`Ledger.check`, the command line and `tail` stand on it. A change here must not need more rights than `idemredis acl`
gives to those who look.
"""

SAMPLE = 200
"""Rows that a check looks at, where nobody asks for more."""
