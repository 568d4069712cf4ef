"""The ASGI door: what only ASGI has. What is said of every door is in `tests/web`."""
