"""How the modules hang together, and that what is public says what it does."""

from __future__ import annotations

import ast
import graphlib
import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest

import idemredis

PACKAGE = Path(idemredis.__file__).parent

FLOORS = [
    {"errors"},
    {"policy", "events"},
    {"core"},
    {"store"},
    {"inspection"},
    {"ledger"},
    {"web"},
    {"telemetry", "sql"},
    {"flask", "asgi", "operating"},
    {"fastapi"},
    {"testing"},
]
"""The folders and the modules beside them, from the ground up; a module imports from its own folder and from below."""

PURE = {"errors", "policy", "events", "core"}
"""What knows no client, no thread and no framework."""

PUBLIC = {"", "testing", "flask", "asgi", "fastapi"}
"""The modules that users import."""

MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
    if path != PACKAGE / "__init__.py" and path.stem != "__main__"
)

every_module = pytest.mark.parametrize("module", MODULES)


def imported(module: str) -> set[str]:
    """The modules of this package that a module imports when it runs, at its top or later."""
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(source_of(module))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            waiting += node.orelse
        elif isinstance(node, ast.ImportFrom):
            inside = PACKAGE.joinpath(*module.split(".")).is_dir()  # a folder's own module is at its folder's level
            here = ["idemredis", *module.split("."), *["__init__"] * inside][: -node.level] if node.level else []
            path = ".".join([*here, *filter(None, [node.module])])
            found |= {f"{path}.{alias.name}" for alias in node.names} | {path}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            waiting += ast.iter_child_nodes(node)
    return {name.removeprefix("idemredis.") for name in found if name.startswith("idemredis.")} & set(MODULES)


def source_of(module: str) -> str:
    path = PACKAGE.joinpath(*module.split("."))
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def room_of(module: str) -> str:
    return module.partition(".")[0]


def test_every_module_is_on_a_floor() -> None:
    assert set(map(room_of, MODULES)) == set().union(*FLOORS)


@every_module
def test_imports_go_down(module: str) -> None:
    floor = next(at for at, rooms in enumerate(FLOORS) if room_of(module) in rooms)
    below = set().union(*FLOORS[:floor])

    upwards = {name for name in imported(module) if room_of(name) not in below | {room_of(module)}}
    assert not upwards, f"{module} imports what is not below it"


def test_no_imports_go_round_in_a_circle() -> None:
    graph = graphlib.TopologicalSorter({module: imported(module) for module in MODULES})
    order = list(graph.static_order())

    assert set(order) == set(MODULES)


@every_module
def test_what_is_pure_knows_no_client_and_redis_py_has_one_importer(module: str) -> None:
    roots = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(source_of(module)))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom) and not node.level
            else []
        )
    }
    if room_of(module) in PURE:
        assert not roots & {"redis", "threading", "asyncio", "socket", "fakeredis", "flask", "click"}
    if room_of(module) != "store":
        assert "redis" not in roots


def test_importing_the_package_imports_neither_flask_nor_fakeredis_nor_opentelemetry_nor_sqlalchemy() -> None:
    """Whatever redis-py imports itself (OpenTelemetry, where it is installed) is not ours to choose."""
    code = """
import sys, redis, redis.asyncio, redis.sentinel
before = set(sys.modules)
import idemredis
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""
    ran = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)

    assert not {"flask", "werkzeug", "fakeredis", "lupa", "opentelemetry", "sqlalchemy"} & set(ran.stdout.split())
    assert "idemredis" in ran.stdout.split()


def test_importing_the_asgi_door_imports_no_framework() -> None:
    code = "import sys, idemredis.asgi; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    frameworks = {"flask", "werkzeug", "starlette", "fastapi", "litestar", "quart", "django", "pydantic"}
    assert not frameworks & set(ran.stdout.split())


@pytest.mark.parametrize("module", ["", *MODULES])
def test_every_module_says_what_is_public_and_every_public_name_what_it_is_for(module: str) -> None:
    loaded = importlib.import_module(f"idemredis.{module}".rstrip("."))
    assert loaded.__doc__
    names = getattr(loaded, "__all__", ()) if hasattr(loaded, "__path__") else loaded.__all__
    assert list(names) == sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    undocumented = []
    for name in names:
        thing = getattr(loaded, name)
        if inspect.isclass(thing):
            if not thing.__doc__ and thing.__module__.startswith("idemredis"):
                undocumented.append(name)
            undocumented += [
                f"{name}.{attribute}"
                for attribute, member in vars(thing).items()
                if not attribute.startswith("_")
                and isinstance(member, (FunctionType, property, classmethod, staticmethod))
                and not inspect.getdoc(member)
                and module == ""
            ]
        elif (
            isinstance(thing, FunctionType)
            and not thing.__doc__
            and module in ("", "testing", "flask", "asgi", "fastapi")
        ):
            undocumented.append(name)
    assert not undocumented


def public(cls: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(getattr(cls, name))
        for name in dir(cls)
        if not name.startswith("_") and callable(getattr(cls, name))
    }


def test_both_ledgers_have_the_same_methods_with_the_same_arguments() -> None:
    sync, asynchronous = public(idemredis.Ledger), public(idemredis.AsyncLedger)
    assert set(sync) == set(asynchronous)

    for name, signature in sync.items():
        theirs = asynchronous[name]
        assert [str(p.replace(annotation=p.empty)) for p in signature.parameters.values()] == [
            str(p.replace(annotation=p.empty)) for p in theirs.parameters.values()
        ], name
    made, same = (inspect.signature(cls).parameters for cls in (idemredis.Ledger, idemredis.AsyncLedger))
    assert list(made) == list(same)
    assert [p.default for p in made.values()] == [p.default for p in same.values()]


def test_whatever_reaches_redis_is_awaited_in_the_async_ledger() -> None:
    for name in (
        "claim",
        "complete",
        "fail",
        "release",
        "hold",
        "renew",
        "start_heartbeat",
        "checkpoint",
        "read",
        "check",
        "close",
    ):
        assert inspect.iscoroutinefunction(getattr(idemredis.AsyncLedger, name)), name
        assert not inspect.iscoroutinefunction(getattr(idemredis.Ledger, name)), name


TESTS = Path(__file__).parent


def imported_by_test(path: Path) -> set[str]:
    """The modules of the tests that one of them imports, at its top or later."""
    here = ["tests", *path.relative_to(TESTS).parent.parts]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            above = here[: len(here) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.startswith("tests.")}


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_no_test_module_is_imported_and_helpers_are_in_support(path: Path) -> None:
    imports = imported_by_test(path)
    assert not [name for name in imports if name.split(".")[-1].startswith(("test_", "conftest"))]
    if path.name.startswith(("test_", "conftest")):
        assert not [name for name in imports if name.split(".")[1] != "support"]
