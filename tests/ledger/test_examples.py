"""Each example is run as a newcomer would, against its own server and with its own processes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

NAMES = [
    "celery_worker",
    "rq_worker",
    "asyncio_consumer",
    "webhooks",
    "checkout_saga",
    "sql_fencing",
    "fastapi_shop",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_example_proves_all_that_it_says(name: str, tmp_path: Path) -> None:
    path = EXAMPLES / f"{name}.py"
    ran = subprocess.run([sys.executable, path], cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False)
    proved = re.findall(r"^proved: .+$", ran.stdout, re.MULTILINE)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert len(proved) == path.read_text().count("prove(") > 0, ran.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_says_how_it_is_run(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 120
    assert f"\n    python examples/{name}.py" in text.split('"""')[1]
