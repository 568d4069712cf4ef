"""The HTTP contract and its settings, which all doors share."""
