"""What is used of redis-py is public, and is all in the documents."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = re.findall(r"`(redis\.[\w.]+)`", (ROOT / "docs/redis-py.md").read_text().rpartition("| name | for |")[2])


@pytest.mark.parametrize("name", sorted(set(NAMES)))
def test_a_name_in_the_table_is_there(name: str) -> None:
    module, thing = "redis", None
    for part in name.split(".")[1:]:
        if thing is None:
            try:
                importlib.import_module(f"{module}.{part}")
            except ImportError:
                thing = getattr(importlib.import_module(module), part)
            else:
                module = f"{module}.{part}"
        else:
            thing = getattr(thing, part)


def test_there_are_names_in_the_table() -> None:
    assert len(NAMES) > 20


@pytest.mark.parametrize("path", sorted((ROOT / "idemredis/store").glob("*.py")), ids=lambda path: path.name)
def test_nothing_private_of_redis_py_is_touched(path: Path) -> None:
    """Private is only what is reached through `self`, or imported from here."""
    touched = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr != "_replace"  # of a NamedTuple
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]
    assert not touched
