"""Servers that start when first needed, one of each kind a test process; and a ledger to try on each of them."""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib.metadata
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.support.clock import TurnedClock
from tests.support.clusters import Cluster
from tests.support.servers import Server
from tests.support.started import Servers
from tests.support.subject import AnyServer, MakeSubject, Mode, Subject

pytest_plugins = ["tests.support.site", "tests.support.doors", "tests.support.worker", "tests.support.place"]

TESTS = Path(__file__).parent

_namespaces = count(1)

hypothesis.settings.register_profile("suite", deadline=None)  # the machine may be busy with others
hypothesis.settings.load_profile("suite")


SLOW_FOLDERS = {"bench", "client", "demo", "faults", "packaging", "shop", "sql"}
SLOW_SERVERS = {"redis", "cluster"}
SLOW_DOORS = {"thread", "guard"}
SLOW_TOGETHER = {"async", "valkey"}  # each of them with others is not slow
SLOW_FIXTURES = {"broker", "pair", "served_by", "started_cluster", "workers"}

STARTED_ONCE = (
    "tests/packaging/",
    "tests/shop/",
    "tests/faults/test_clock_jumps.py",
    "tests/asgi/test_real_servers.py",
    "tests/flask/test_real_servers.py",
    "tests/store/test_outages.py",
)
"""What starts something that takes seconds, once for all of its tests: one process runs them all."""

WAITING = (
    "tests/asgi/test_served_frameworks.py",
    "tests/ledger/test_examples.py",
    "tests/ledger/test_runners.py",
    "tests/ledger/test_task_queues.py",
    "tests/store/test_lost_replies.py",
    "tests/store/test_wire.py",
)
"""Where one case after the other waits for seconds: several processes run them, so that they wait at the same time."""

TEARDOWN_WITHIN = 400
"""Seconds, as in `faulthandler_timeout`."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Spare `make quick` the import of what it leaves out."""
    left_out = config.option.markexpr == "not slow" and collection_path.parent == TESTS
    return True if left_out and collection_path.name in SLOW_FOLDERS else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what `make quick` leaves out, besides the tests that are marked by hand; and run that first.

    So no process is left with a long test at the end while the others are done.
    """
    for item in items:
        params = item.callspec.params.values() if hasattr(item, "callspec") else ()
        chosen = {value for value in params if isinstance(value, str)}
        fixtures = set(getattr(item, "fixturenames", ()))
        folder = item.path.relative_to(TESTS).parts[0]
        is_slow = chosen & (SLOW_SERVERS | SLOW_DOORS) or chosen >= SLOW_TOGETHER
        if folder in SLOW_FOLDERS or is_slow or fixtures & SLOW_FIXTURES:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: (not item.nodeid.startswith(STARTED_ONCE), item.get_closest_marker("slow") is None))


def pytest_collection_finish() -> None:
    """Let the garbage collector leave alone what was there before the tests: some of them have it run."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Hand the tests out in their order, each with all of its parameters unless they wait."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            alone = nodeid if nodeid.startswith(WAITING) else nodeid.partition("[")[0]
            return next(filter(nodeid.startswith, STARTED_ONCE), alone)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """End the process if a teardown hangs: a failed test is watched by nothing else, once its failure was seen."""
    faulthandler.dump_traceback_later(TEARDOWN_WITHIN, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


importlib.metadata.version = functools.cache(importlib.metadata.version)
"""redis-py looks its version up for each client, which takes as long as a short test."""


def pytest_configure() -> None:
    """A shell ignores Ctrl-C for what runs in the background, and so would all that the tests start and end by it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def all_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("servers"))
    yield servers
    servers.stop()


@pytest.fixture(autouse=True)
def every_key_left_expires(all_servers: Servers) -> Iterator[Servers]:
    all_servers.used.clear()
    yield all_servers
    all_servers.look_over()


@pytest.fixture(params=["fakeredis", "valkey", "redis"])
def server(request: pytest.FixtureRequest, every_key_left_expires: Servers) -> AnyServer:
    return every_key_left_expires.get(request.param)


@pytest.fixture(params=["valkey", "redis"])
def real_server(request: pytest.FixtureRequest, every_key_left_expires: Servers) -> Server:
    return _real(every_key_left_expires.get(request.param))


@pytest.fixture
def valkey_server(every_key_left_expires: Servers) -> Server:
    return _real(every_key_left_expires.get("valkey"))


@pytest.fixture(scope="session")
def started_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack, tmp_path_factory.mktemp("cluster"))


@pytest.fixture
def cluster(started_cluster: Cluster, every_key_left_expires: Servers) -> Cluster:
    for node in started_cluster.nodes:
        every_key_left_expires.watch(node)
    return started_cluster


@pytest.fixture(params=["sync", "async"])
def mode(request: pytest.FixtureRequest) -> Mode:
    chosen: Mode = request.param
    return chosen


@pytest.fixture
def namespace() -> str:
    return f"test{os.getpid()}-{next(_namespaces)}"


@pytest.fixture
def clock(namespace: str, every_key_left_expires: Servers) -> TurnedClock:
    """Turns the clock of the test's rows, on every server that the test uses."""
    return TurnedClock(namespace, every_key_left_expires.used)


@pytest.fixture
def make_subject(namespace: str, every_key_left_expires: Servers) -> Iterator[MakeSubject]:
    """Make subjects: `make_subject(mode, server, policy=…, url=…, **client_options)`."""
    made: list[Subject] = []

    def make(mode: Mode, server: AnyServer, **options: Any) -> Subject:
        made.append(Subject(mode, server, **{"namespace": namespace, **options}))
        return made[-1]

    yield make
    for subject in made:
        subject.close()


@pytest.fixture
def subject(make_subject: MakeSubject, mode: Mode, server: AnyServer) -> Subject:
    return make_subject(mode, server)


def _real(server: AnyServer) -> Server:
    assert isinstance(server, Server)
    return server
