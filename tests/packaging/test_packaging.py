"""The Lua is found however the package was installed, and the versions it asks for are enough."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
SMOKE = Path(__file__).with_name("smoke.py")

pytestmark = pytest.mark.timeout(300)


class Built(NamedTuple):
    wheel: Path
    sdist: Path
    wheel_from_sdist: Path


class Installation:
    """A virtual environment; what it does not get itself it may borrow from the suite's own, but never idemredis."""

    def __init__(self, directory: Path, *, borrows: bool) -> None:
        run(sys.executable, "-m", "venv", "--without-pip", directory)
        self.directory = directory
        self.python = directory / "bin" / "python"
        [self.packages] = directory.glob("lib/python*/site-packages")
        if borrows:  # a plain path: what is installed editable there is not seen through it
            (self.packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))

    def install(self, *what: str | Path) -> None:
        run(sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet", *what)

    def runs_from(self, place: Path, **env: str) -> None:
        assert run(self.python, "-P", "-W", "error", SMOKE, place, **env) == "claimed and replayed\n"

    def tests(self, *what: str | Path) -> None:
        """Run a part of this suite on what is installed here, not on the checkout."""
        options: list[str | Path] = ["--import-mode=append", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml"]
        run(self.python, "-P", "-m", "pytest", *options, *what)


def run(*command: str | Path, **env: str) -> str:
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    of_both, of_checkout = tmp_path_factory.mktemp("both"), tmp_path_factory.mktemp("checkout")
    run(sys.executable, "-m", "build", "--outdir", of_both, ROOT)  # isolated; the wheel is built from the sdist
    run(sys.executable, "-m", "build", "--outdir", of_checkout, "--wheel", "--no-isolation", ROOT)
    [wheel], [sdist], [wheel_from_sdist] = of_checkout.glob("*.whl"), of_both.glob("*.tar.gz"), of_both.glob("*.whl")
    return Built(wheel, sdist, wheel_from_sdist)


def test_the_wheel_has_the_package_its_lua_and_its_type_marker_and_nothing_else(built: Built) -> None:
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "idemredis").rglob("*.py")}
    lua = {f"idemredis/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "lua").rglob("*.lua")}
    assert {"idemredis/lua/claim.lua", "idemredis/lua/lib/clock.lua"} <= lua

    with zipfile.ZipFile(built.wheel) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}

    assert names == modules | lua | {"idemredis/py.typed"}


def test_the_wheel_built_from_the_sdist_is_the_one_built_from_the_checkout(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as one, zipfile.ZipFile(built.wheel_from_sdist) as other:
        assert {name: one.read(name) for name in one.namelist()} == {
            name: other.read(name) for name in other.namelist()
        }


def test_the_sdist_has_what_its_tests_need(built: Built) -> None:
    with tarfile.open(built.sdist) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}

    assert {"pyproject.toml", "Makefile", "README.md", "CHANGELOG.md", "LICENSE"} <= names
    assert {"lua/claim.lua", "examples/demo.py", "tests/conftest.py", "tests/vectors/fingerprints.json"} <= names


def test_the_wheel_runs_with_the_dependencies_it_asks_for(built: Built, tmp_path: Path) -> None:
    installation = Installation(tmp_path / "venv", borrows=False)
    installation.install(f"{built.wheel}[memory]")
    installation.runs_from(installation.packages)


def test_the_wheel_built_from_the_sdist_runs(built: Built, tmp_path: Path) -> None:
    installation = Installation(tmp_path / "venv", borrows=True)
    installation.install("--no-deps", built.wheel_from_sdist)
    installation.runs_from(installation.packages)


def test_an_editable_install_runs_with_the_lua_of_the_checkout(tmp_path: Path) -> None:
    installation = Installation(tmp_path / "venv", borrows=True)
    installation.install("--no-deps", "--editable", ROOT)
    installation.runs_from(ROOT)


def test_a_bare_checkout_runs(tmp_path: Path) -> None:
    Installation(tmp_path / "venv", borrows=True).runs_from(ROOT, PYTHONPATH=str(ROOT))


def test_a_wheel_that_is_not_unpacked_runs(built: Built, tmp_path: Path) -> None:
    Installation(tmp_path / "venv", borrows=True).runs_from(built.wheel, PYTHONPATH=str(built.wheel))


@pytest.mark.parametrize(
    ("extra", "document", "has"),
    [("otel", "operations", "PrometheusMetricReader"), ("memory", "flask", "TESTING=True")],
)
def test_an_extra_installs_what_its_snippet_needs(
    extra: str, document: str, has: str, built: Built, tmp_path: Path
) -> None:
    blocks = (ROOT / "docs" / f"{document}.md").read_text().split("```python\n")
    (snippet,) = [code for block in blocks if has in (code := block.partition("\n```\n")[0])]
    installation = Installation(tmp_path / "venv", borrows=False)
    installation.install(f"{built.wheel}[{extra}]")
    run(installation.python, "-P", "-c", snippet)


def test_the_cli_extra_installs_what_the_command_line_needs(built: Built, tmp_path: Path) -> None:
    installation = Installation(tmp_path / "venv", borrows=False)
    installation.install(f"{built.wheel}[cli]")
    assert "doctor" in run(installation.directory / "bin" / "idemredis", "--help")


@pytest.mark.parametrize(("left_out", "door"), [("fastapi", "flask"), ("otel", "guard")])
def test_the_lowest_versions_that_are_declared_are_enough(
    left_out: str, door: str, built: Built, tmp_path: Path
) -> None:
    """FastAPI asks for a later OpenTelemetry than the oldest with which the extra `otel` works."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [wants for extra, wants in project["optional-dependencies"].items() if extra != left_out]
    declared = sorted({*project["dependencies"], *(requirement for wants in extras for requirement in wants)})
    assert {"fakeredis", "flask", "lupa", "redis"} <= {requirement.split(">=")[0] for requirement in declared}

    installation = Installation(tmp_path / "venv", borrows=True)
    installation.install(built.wheel, *(requirement.replace(">=", "==") for requirement in declared))
    installation.runs_from(installation.packages)
    web, core = ROOT / "tests/web/test_contract.py", ROOT / "tests/core/test_transitions.py"
    installation.tests("-k", f"not (sync-redis or async-redis) and (test_transitions or {door})", web, core)
