"""The publisher's thread and locks in processes that gevent patches, before or after the publisher is made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from idemredis.telemetry.publisher import channel
from tests.support.servers import Server
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]

GEVENT = """
import sys
if sys.argv[3] == "first":
    from gevent import monkey
    monkey.patch_all()
import redis
from idemredis.events import Event
from idemredis.telemetry import Publisher

def event(key):
    return Event("claimed", "d" * 12, "", 1, "", 0.0, "worker", key)

publisher = Publisher(redis.Redis(port=int(sys.argv[1])), sys.argv[2])
if sys.argv[4] == "used":
    publisher(event("before"))
if sys.argv[3] == "last":
    import warnings
    warnings.simplefilter("ignore")
    from gevent import monkey
    monkey.patch_all()
import gevent, threading

started = []
start = threading.Thread.start
threading.Thread.start = lambda thread: started.append(thread.name) or start(thread)

def publish(number):
    publisher(event(f"k{number}"))
    gevent.sleep(0)
    publisher(event(f"l{number}"))

jobs = [gevent.spawn(publish, number) for number in range(20)]
gevent.joinall(jobs, timeout=20, raise_error=True)
publisher.close(10.0)
print(publisher.dropped, started.count("idemredis-publisher"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("patched", ["first", "last"])
@pytest.mark.parametrize("before", ["used", "unused"])
def test_greenlets_publish_whether_gevent_patches_before_or_after_the_publisher_is_made(
    valkey_server: Server, namespace: str, patched: str, before: str
) -> None:
    with valkey_server.client() as client, client.pubsub(ignore_subscribe_messages=True) as subscriber:
        subscriber.subscribe(channel(namespace))
        subscriber.get_message(timeout=5.0)
        ran = subprocess.run(
            [sys.executable, "-c", GEVENT, str(valkey_server.port), namespace, patched, before],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=False,
        )
        started = 0 if (patched, before) == ("first", "used") else 1  # not one for each greenlet
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"0 {started}\n", "")
        expected = {f"{letter}{number}" for letter in "kl" for number in range(20)}
        expected |= {"before"} if before == "used" else set()
        seen: list[str] = []

        def all_seen() -> bool:
            if (message := subscriber.get_message(timeout=0.1)) is not None:
                seen.append(json.loads(message["data"])["key"])
            return set(seen) == expected

        wait_until(all_seen)
        assert len(seen) == len(expected)
