"""What a row is, and its transitions.

Pure code: no client, no thread, no framework. A change here affects every ledger and adapter, so start with the Lua or
with the tests in `tests/core/`.
"""
