"""`reserve` and `once`, waiting, long work, and the examples."""
