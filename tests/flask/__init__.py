"""The Flask extension: in one process, and behind real servers."""
