"""Serve the shop on gunicorn with an embedded server until Ctrl-C: python examples/serve.py"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.request import Request, urlopen

from embedded import free_port, running, valkey, wait_until_up

WORKERS = 2

PAGE = "shop:create_app()"
"""`payments.py` with a page to try it in."""

LEASE = 5
"""Seconds after which a retry takes over from a killed worker. Short enough to watch."""

HELP = """
Open {url}/ in a browser: the shop, with a switch for each trouble, and the ledger beside it.
Its ledger is on {redis}. Ctrl-C ends both.

Or with curl. Charge a card; send it again, and compare; then send another amount with the same key:
  {charge_alice}

The same key from another account is another operation:
  {charge_bob}

A charge of 3 seconds; send it again meanwhile, from another terminal:
  {charge_slow}

What was ordered, and a row of the ledger:
  curl {url}/orders -H 'Authorization: Bearer alice-token'
  redis-cli -u {redis} HGETALL idem:acct_alice:order-1
"""

CHARGE = """curl -i {url}/charges -H 'Authorization: Bearer {token}' -H 'Idempotency-Key: {key}' \\
    -H 'Content-Type: application/json' -d '{{"card": "{card}", "amount": 1999}}'"""


class Shop(NamedTuple):
    """The shop's URL, its gateway, which records requests, and gunicorn's process."""

    url: str
    gateway: Path
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def serving(
    redis: str,
    directory: Path,
    log: Path | None = None,
    app: str = "payments:create_app()",
    threads: int = 1,
    **settings: str,
) -> Iterator[Shop]:
    """Run the shop under gunicorn with its SQLite files in `directory`; the environment overrides `settings`."""
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "gunicorn", "--bind", address, "--workers", str(WORKERS)]
    command += ["--threads", str(threads)]
    command += ["--graceful-timeout", "1", "--log-level", "warning", "--no-control-socket"]
    command += ["--log-file", str(log), "--capture-output"] if log else []
    command += ["--pythonpath", str(Path(__file__).parent), app]
    url, gateway = f"http://{address}", directory / "gateway.sqlite3"
    env = {
        "SHOP_IDEMREDIS_URL": redis,
        "SHOP_DATABASE": str(directory / "shop.sqlite3"),
        "SHOP_GATEWAY": str(gateway),
        "SHOP_HEALTH_TOKEN": secrets.token_hex(),
        **settings,
        **os.environ,
    }
    with running(command, env=env) as process:
        health = Request(f"{url}/healthz", headers={"Authorization": f"Bearer {env['SHOP_HEALTH_TOKEN']}"})
        wait_until_up(process, lambda: urlopen(health, timeout=5).close())
        yield Shop(url, gateway, process)


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (
        contextlib.suppress(KeyboardInterrupt),
        tempfile.TemporaryDirectory(prefix="idemredis-") as directory,
        valkey() as redis,
        serving(redis, Path(directory), None, PAGE, 8, SHOP_IDEMREDIS_LEASE_SECONDS=str(LEASE)) as shop,
    ):
        print(lines_to_try(shop.url, redis), flush=True)
        shop.process.wait()


def lines_to_try(url: str, redis: str) -> str:
    return HELP.format(
        url=url,
        redis=redis,
        charge_alice=CHARGE.format(url=url, token="alice-token", key="order-1", card="tok_visa"),
        charge_bob=CHARGE.format(url=url, token="bob-token", key="order-1", card="tok_visa"),
        charge_slow=CHARGE.format(url=url, token="alice-token", key="order-2", card="tok_slow"),
    )


if __name__ == "__main__":
    main()
