"""The README is true: its snippets run, its commands show what it says, its tables are the code's."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from idemredis.web.contract import REFUSALS, Contract
from idemredis.web.settings import DEFAULTS
from tests.support.servers import Server

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(document: Path, kind: str) -> list[str]:
    return [text for found, text in _BLOCK.findall(document.read_text()) if found == kind]


def table(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading of the README, without its two head lines."""
    section = (ROOT / "README.md").read_text().split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in rows[2:]]


@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_python_snippet_runs(document: Path, valkey_server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    for number, code in enumerate(blocks(document, "python"), 1):
        names: dict[str, Any] = {"__name__": f"snippet_{number}"}
        there = code.replace("redis://localhost:6379/0", valkey_server.url)
        if re.search("sentry_sdk.init|import django|import Litestar", there):  # they need a process of their own
            subprocess.run([sys.executable, "-c", there], cwd=ROOT, check=True)
            continue
        exec(compile(there, f"{document.name}, snippet {number}", "exec", dont_inherit=True), names)


def test_the_flask_snippet_charges_once(valkey_server: Server) -> None:
    code = next(code for code in blocks(ROOT / "README.md", "python") if "Flask(" in code)
    names: dict[str, Any] = {"__name__": "app"}
    exec(code.replace("redis://localhost:6379/0", valkey_server.url), names)
    client = names["app"].test_client()
    request = {"json": {"amount": 5}, "headers": {"Authorization": "Bearer alice-token", "Idempotency-Key": "k"}}
    first, again = client.post("/charges", **request), client.post("/charges", **request)
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.data == first.data
    assert again.headers["Idempotent-Replayed"] == "true"
    assert client.post("/charges", json={"amount": 6}, headers=request["headers"]).status_code == 409


@pytest.mark.parametrize("settings", [{"FAIL_OPEN": True}, {"REQUIRED": False}, {"MODE": "off"}], ids=str)
def test_the_flask_snippet_runs_unprotected_where_the_settings_say_so(settings: dict[str, Any]) -> None:
    code = next(code for code in blocks(ROOT / "README.md", "python") if "Flask(" in code)
    there = ", ".join(["IDEMREDIS_URL='redis://127.0.0.1:1/0'", *(f"IDEMREDIS_{k}={v!r}" for k, v in settings.items())])
    (set_url,) = re.findall(r'^app\.config\["IDEMREDIS_URL"\] = .*$', code, re.MULTILINE)
    names: dict[str, Any] = {"__name__": "app"}
    exec(code.replace(set_url, f"app.config.update({there})"), names)
    headers = {"Authorization": "Bearer alice-token"} | ({} if "REQUIRED" in settings else {"Idempotency-Key": "k"})
    answer = names["app"].test_client().post("/charges", json={"amount": 5}, headers=headers)
    assert (answer.status_code, answer.get_json()["charged"]) == (201, 5)
    assert answer.headers.get("Idempotency-Status") == (None if "MODE" in settings else "unprotected")


def test_the_support_table_is_what_is_declared() -> None:
    declared_at_all = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, tested = declared_at_all["project"], declared_at_all["dependency-groups"]["dev"]
    pythons, flask, client, _, _, fastapi, starlette = table("Install")[0]
    declared = [line.rsplit(" ", 1)[1] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)]
    lowest = dict(requirement.split(">=") for requirement in project["dependencies"])
    assert pythons.split(", ") == declared
    assert (flask.split()[0], client.split(",")[0]) == (lowest["flask"], lowest["redis"])
    assert project["optional-dependencies"]["fastapi"] == [f"fastapi>={fastapi.split()[0]}"]
    assert f"starlette>={starlette.split()[0]}" in tested


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="redis-cli is not installed; the servers here have none")
def test_the_row_looks_as_shown_in_redis_cli(valkey_server: Server) -> None:
    code = next(code for code in blocks(ROOT / "README.md", "python") if "send_welcome" in code)
    exec(code.replace("redis://localhost:6379/0", valkey_server.url), {"__name__": "worker"})
    shown = next(text for text in blocks(ROOT / "README.md", "console") if "redis-cli" in text)
    (hgetall, fields), (pttl, left) = (part.split("\n", 1) for part in shown.split("$ redis-cli ")[1:])

    def answer(command: str) -> str:
        words = ["redis-cli", "-p", str(valkey_server.port), "--no-raw", *shlex.split(command)]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    assert answer(hgetall).startswith(fields)
    assert left.startswith("(integer) ")
    assert 0 < int(answer(pttl).removeprefix("(integer) ")) <= 86_400_000


def test_the_settings_table_is_the_code() -> None:
    documented = {cells[0].strip("`"): cells[1] for cells in table("Settings")}
    assert list(documented) == list(DEFAULTS)
    for name, default in DEFAULTS.items():
        if default is None:
            assert documented[name].startswith("none"), name
        elif name == "REPLAY_HEADERS":
            assert tuple(header.strip("` ") for header in documented[name].split(",")) == default
        else:
            shown = documented[name].strip("`").replace('"', "'")
            assert shown in (repr(default), f"{default:g}" if isinstance(default, float) else repr(default)), name


@pytest.mark.parametrize("protocol", ["default", "ietf"])
def test_the_http_table_is_the_code(protocol: Any) -> None:
    contract = Contract(protocol)
    column = 1 if protocol == "default" else 2
    for cells in table("HTTP responses"):
        if code := re.search(r"`(idempotency_\w+)`", cells[1]):
            status = int(re.match(r"\d+", cells[column])[0])  # type: ignore[index]  # each row begins with one
            assert contract.refuse(code[1], "").status == status, code[1]
    told = {code for cells in table("HTTP responses") for code in re.findall(r"idempotency_\w+", cells[1])}
    assert told == set(REFUSALS)


def test_the_readme_is_short_enough_to_read() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 300
