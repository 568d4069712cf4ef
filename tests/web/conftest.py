"""The doors that every sentence of this folder is said of."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["flask", "thread", "async", "guard"])
def door_kind(request: pytest.FixtureRequest) -> str:
    """Flask; plain and `async def` endpoints of Starlette; FastAPI's with a guard."""
    kind: str = request.param
    return kind
