"""What a row is, and what may happen to it.

Pure code: no client, no thread, no framework. A change here changes what every ledger and every door does, so it starts
with the Lua or with the tests in `tests/core/`.
"""
