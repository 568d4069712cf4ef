"""`once` under real workers of Celery, RQ and Dramatiq; Celery's are those of the snippet in docs/workers.md."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rq import Queue, Retry

from tests.support.proxy import Proxy
from tests.support.servers import Server, valkey
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]

SLOW = """
import os, time

def charge_card(order, key):
    with open("ran", "a") as file:
        file.write(f"{order} {os.getpid()}\\n")
    mine = open("ran").read().splitlines()
    if str(order).startswith("dies") and len(mine) == 1:
        time.sleep(300)
    if str(order).startswith("slow") and len(mine) == 1:
        while not os.path.exists("go"):
            time.sleep(0.01)
    if str(order).startswith("limited") and len(mine) == 1:
        time.sleep(300)
    if str(order).startswith("again") and len(mine) == 1:
        raise charge.retry(countdown=0)
    return f"charged {order}"
"""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Server]:
    """A server for one test: task queues leave keys that never expire."""
    with valkey(tmp_path / "server") as server:
        yield server


@contextmanager
def running(folder: Path, *command: str) -> Iterator[subprocess.Popen[str]]:
    with (folder / "log").open("w") as log:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}"}
        process = subprocess.Popen(
            [sys.executable, "-m", *command], cwd=folder, env=environment, stdout=log, stderr=log, text=True
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def runs(folder: Path) -> list[int]:
    """Return the process ids of the runs so far."""
    ran = folder / "ran"
    return [int(line.split()[1]) for line in ran.read_text().splitlines()] if ran.exists() else []


def caller(folder: Path, text: str) -> subprocess.Popen[str]:
    """Run some lines of a task's caller in the folder of its module."""
    pipe = subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}"}
    return subprocess.Popen([sys.executable, "-c", text], cwd=folder, env=environment, stdout=pipe, text=True)


def celery_module(
    folder: Path, broker: Server, ledger: str | None = None, visibility_timeout: float | None = None
) -> None:
    """Write the snippet of the document as a module, with a function that is slow on demand."""
    text = (ROOT / "docs" / "workers.md").read_text()
    [snippet] = [code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "from celery" in code]
    assert "lease=10" in snippet
    snippet = snippet.replace('from_url("redis://localhost:6379/0")', f'from_url("{ledger or broker.url}")')
    snippet = snippet.replace("redis://localhost:6379/0", broker.url).replace("lease=10", "lease=2")
    if visibility_timeout is not None:
        options = {"visibility_timeout": visibility_timeout, "unacked_restore_interval": 1}
        snippet += f"\napp.conf.broker_transport_options = {options}\n"
    (folder / "shop.py").write_text(snippet + SLOW)


WORKER = ("celery", "--app", "shop", "worker", "--concurrency", "3", "--loglevel", "WARNING", "--without-mingle")


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_a_task_that_is_delivered_twice_shows_no_failure_and_runs_once(
    broker: Server, tmp_path: Path, pool: str
) -> None:
    celery_module(tmp_path, broker)
    with running(tmp_path, *WORKER, "--pool", pool):
        ask = "import shop; r = shop.charge.delay('slow'); print(r.get(timeout=60))"
        with caller(tmp_path, ask) as first:
            wait_until(lambda: runs(tmp_path), 40.0)
            states = (
                "import shop, time\nr = shop.charge.delay('slow')\n"
                "while r.state != 'RETRY': time.sleep(0.01); assert r.state != 'FAILURE'\n"
                "open('go', 'w').close()\nprint(r.get(timeout=60))"
            )
            with caller(tmp_path, states) as second:
                assert second.communicate(timeout=80)[0] == "charged slow\n"
            assert first.communicate(timeout=80)[0] == "charged slow\n"
    assert len(runs(tmp_path)) == 1


def test_a_task_whose_process_is_killed_is_taken_over_and_its_caller_gets_the_result(
    broker: Server, tmp_path: Path
) -> None:
    celery_module(tmp_path, broker)
    with (
        running(tmp_path, *WORKER),
        caller(tmp_path, "import shop; print(shop.charge.delay('dies').get(timeout=60))") as asked,
    ):
        [killed] = wait_until(lambda: runs(tmp_path), 40.0)
        os.kill(killed, signal.SIGKILL)
        assert asked.communicate(timeout=80)[0] == "charged dies\n"
    assert len(runs(tmp_path)) == 2


@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_a_task_that_runs_longer_than_the_visibility_timeout_is_delivered_again_and_runs_once(
    broker: Server, tmp_path: Path, pool: str
) -> None:
    """Each delivery has the same task id, so a failure of the second one would be the task's result."""
    celery_module(tmp_path, broker, visibility_timeout=0.5)
    ask = (
        "import shop, time\nr = shop.charge.delay('slow')\n"
        "while r.state != 'RETRY': time.sleep(0.01); assert r.state != 'FAILURE'\n"
        "open('go', 'w').close()\nprint(r.get(timeout=60))"
    )
    with running(tmp_path, *WORKER, "--pool", pool), caller(tmp_path, ask) as asked:
        wait_until(lambda: runs(tmp_path), 40.0)
        with running(tmp_path, *WORKER):  # one with an event loop, which looks for messages that are overdue
            assert asked.communicate(timeout=80)[0] == "charged slow\n"
    assert len(runs(tmp_path)) == 1


def test_a_task_whose_whole_worker_is_killed_is_delivered_again_and_taken_over(broker: Server, tmp_path: Path) -> None:
    celery_module(tmp_path, broker, visibility_timeout=0.5)
    with caller(tmp_path, "import shop; print(shop.charge.delay('dies').get(timeout=60))") as asked:
        with running(tmp_path, *WORKER, "--pool", "gevent") as worker:
            wait_until(lambda: runs(tmp_path), 40.0)
            worker.kill()
        with running(tmp_path, *WORKER):
            assert asked.communicate(timeout=80)[0] == "charged dies\n"
    assert len(runs(tmp_path)) == 2


def test_a_task_that_retries_itself_runs_again(broker: Server, tmp_path: Path) -> None:
    celery_module(tmp_path, broker)
    ask = "import shop; print(shop.charge.delay('again').get(timeout=60))"
    with running(tmp_path, *WORKER), caller(tmp_path, ask) as asked:
        assert asked.communicate(timeout=80)[0] == "charged again\n"
    assert len(runs(tmp_path)) == 2


@pytest.mark.parametrize("limit", ["soft_time_limit", "time_limit"])
def test_a_task_that_ran_into_a_time_limit_runs_again_when_it_is_sent_again(
    broker: Server, tmp_path: Path, limit: str
) -> None:
    celery_module(tmp_path, broker)
    ask = (
        f"import shop\nr = shop.charge.apply_async(('limited',), {limit}=1)\n"
        "print(type(r.get(timeout=60, propagate=False)).__name__)\n"
        "print(shop.charge.delay('limited').get(timeout=60))"
    )
    with running(tmp_path, *WORKER), caller(tmp_path, ask) as asked:
        error = "SoftTimeLimitExceeded" if limit.startswith("soft") else "TimeLimitExceeded"
        assert asked.communicate(timeout=80)[0].splitlines() == [error, "charged limited"]
    assert len(runs(tmp_path)) == 2


def test_a_response_that_a_process_of_celery_could_not_store_is_named_when_the_process_ends(
    broker: Server, tmp_path: Path
) -> None:
    with Proxy(broker.port) as proxy:
        celery_module(tmp_path, broker, ledger=proxy.url)
        ask = "import shop; print(shop.charge.delay('slow').get(timeout=60))"
        with running(tmp_path, *WORKER), caller(tmp_path, ask) as asked:
            wait_until(lambda: runs(tmp_path), 40.0)
            proxy.refuse()
            (tmp_path / "go").touch()
            assert asked.communicate(timeout=80)[0] == "charged slow\n"
    assert "completion_lost" in (tmp_path / "log").read_text()


RQ = """
from idemredis import Ledger

ledger = Ledger.from_url("URL")


@ledger.once(principal="shop", key=lambda order: f"order-{order}", operation="charge", lease=2, wait=5)
def charge(order):
    return charge_card(order, "")
"""


def test_a_job_of_rq_that_ran_into_its_time_limit_runs_again_and_a_duplicate_gets_its_result(
    broker: Server, tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(RQ.replace("URL", broker.url) + SLOW)
    worker = ("rq.cli", "worker", "--url", broker.url, "--path", str(tmp_path), "--quiet")
    with running(tmp_path, *worker), broker.client() as client:
        queue = Queue(connection=client)
        limited = queue.enqueue("shop.charge", "limited", job_timeout=5, retry=Retry(max=3))
        assert wait_until(limited.return_value, 60.0) == "charged limited"
        duplicate = queue.enqueue("shop.charge", "limited")
        assert wait_until(duplicate.return_value, 60.0) == "charged limited"
    assert len(runs(tmp_path)) == 2


DRAMATIQ = """
import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend
from idemredis import Ledger

broker = RedisBroker(url="URL", heartbeat_timeout=1000, maintenance_chance=1_000_000)
# redis-py waits 5 s for a reply by default, also for that of a command that blocks for longer
broker.add_middleware(Results(backend=RedisBackend(url="URL?socket_timeout=90")))
dramatiq.set_broker(broker)
ledger = Ledger.from_url("URL")


@dramatiq.actor(store_results=True, min_backoff=500, max_backoff=1000)
@ledger.once(principal="shop", key=lambda order: f"order-{order}", operation="charge", lease=2)
def charge(order):
    return charge_card(order, "")
"""


def test_a_message_of_dramatiq_whose_worker_is_killed_is_taken_over_and_its_sender_gets_the_result(
    broker: Server, tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(DRAMATIQ.replace("URL", broker.url) + SLOW)
    ask = "import shop; print(shop.charge.send('dies').get_result(block=True, timeout=60000))"
    command = ("dramatiq", "shop", "--processes", "1", "--threads", "2")
    with caller(tmp_path, ask) as asked:
        with running(tmp_path, *command) as worker:
            [killed] = wait_until(lambda: runs(tmp_path), 40.0)
            os.kill(killed, signal.SIGKILL)
            worker.kill()
        with running(tmp_path, *command):
            assert asked.communicate(timeout=80)[0] == "charged dies\n"
    assert len(runs(tmp_path)) == 2
