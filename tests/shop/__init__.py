"""The shop in a real browser."""
