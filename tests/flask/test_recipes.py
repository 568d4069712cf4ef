"""What an attacker would try on the recipes, whose own checks `tests/test_readme.py` runs."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from tests.support.servers import Server

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"


def recipe(heading: str, server: Server) -> dict[str, Any]:
    """Run the snippet of a recipe, and return its names."""
    section = PAGE.read_text().split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    code = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[0]
    names: dict[str, Any] = {"__name__": "recipe"}
    exec(code.replace("redis://localhost:6379/0", server.url), names)
    return names


def test_nobody_can_compute_the_name_of_a_file_from_what_a_stranger_may_know(valkey_server: Server) -> None:
    names = recipe("Files as responses", valkey_server)
    rows = [f"idem:{principal}:report-1" for principal in ("alice", "bob", "shop")]
    computed = {hashlib.sha256(f"{row}\n{name}".encode()).hexdigest() for row in rows for name in ("reports", "report")}
    (place,) = set(names["places"])
    assert place.rpartition("/")[2] not in computed
    client = names["app"].test_client()
    for guessed in computed:
        for headers in (names["alice"], names["bob"]):
            assert client.get(f"/reports/{guessed}", headers=headers).status_code == 404


def test_a_secret_is_in_no_row_and_a_refusal_is_replayed_with_its_reason(valkey_server: Server) -> None:
    names = recipe("Secrets shown once", valkey_server)
    client = names["app"].test_client()
    for body, status in (({"scope": "read"}, 201), ({"scope": 7}, 422), ({}, 422)):
        key = {"Idempotency-Key": f"recipe-{body}-{status}"}
        first = client.post("/tokens", headers=key, json=body)
        again = client.post("/tokens", headers=key, json=body)
        assert first.status_code == status
        assert again.status_code == (500 if status == 201 else status)
        with valkey_server.client() as store:
            stored = b"".join(value for name in store.keys("idem:shop:*") for value in store.hvals(name))
        if status == 201:
            assert first.json is not None
            assert first.json["token"].encode() not in stored
