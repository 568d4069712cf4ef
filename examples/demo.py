"""The shop under gunicorn with two workers, and a client that retries, collides, makes mistakes and loses its server.

Each request is printed with its response and its row in the ledger. The exit status is 0 if every response was right.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import cast

import httpx
import redis
from embedded import valkey
from gateway import SLOW, Gateway
from serve import WORKERS, serving

LEASE = 3
"""Seconds after which a retry takes over from a killed worker. Short, to keep the demo short."""

ENDS_WITHIN = 60
"""Seconds. A step that takes longer has failed, and the demo exits with status 1."""

SHOWN = frozenset({"authorization", "idempotency-key", "location", "retry-after", "idempotent-replayed"})
"""The headers to print."""


class Demo:
    """A client of the shop that prints requests and responses, and remembers what was wrong."""

    def __init__(self, http: httpx.Client, ledger: redis.Redis, gateway: Gateway) -> None:
        self.http = http
        self.ledger = ledger
        self.gateway = gateway
        self.scenes = 0
        self.scene = ""
        self.asked_before = 0
        self.wrong: list[str] = []

    def play(self) -> None:
        self.a_first_charge_and_its_retry()
        self.two_at_once()
        self.another_amount()
        self.another_account()
        self.no_key()
        self.a_worker_killed_in_mid_charge()

    def a_first_charge_and_its_retry(self) -> None:
        self.begin("A first charge")
        first = self.charge("order-1001", 1999)
        self.check("status 201", first.status_code == 201)
        self.check_row("order-1001", status="completed", generation="1", response_status="201")
        self.check_gateway(asked=1, charged=1)

        self.begin("Its retry gets the same bytes, and charges nothing")
        retry = self.charge("order-1001", 1999)
        self.check("status 201", retry.status_code == 201)
        self.check("the same bytes", retry.content == first.content)
        self.check("the same Location", retry.headers.get("location") == first.headers.get("location"))
        self.check("Idempotent-Replayed: true", retry.headers.get("idempotent-replayed") == "true")
        self.check_row("order-1001", status="completed", generation="1")
        self.check_gateway(asked=0, charged=0)

    def two_at_once(self) -> None:
        self.begin("Two at once: one runs, the other is told when to ask again")
        together = threading.Barrier(2)

        def send() -> httpx.Response:
            together.wait()
            return self.send("order-1002", 500, card=SLOW)

        with ThreadPoolExecutor(2) as threads:
            sent = [threads.submit(send) for _ in range(2)]
        ran, refused = sorted((one.result() for one in sent), key=lambda answer: answer.status_code)
        show(ran)
        show(refused)
        self.check("status 201 for one", ran.status_code == 201)
        self.check("status 409 for the other", refused.status_code == 409)
        self.check("idempotency_key_in_progress", error_of(refused) == "idempotency_key_in_progress")
        self.check("Retry-After: 1 or more", int(refused.headers.get("retry-after", "0")) >= 1)
        self.check_row("order-1002", status="completed", generation="1")
        self.check_gateway(asked=1, charged=1)

    def another_amount(self) -> None:
        self.begin("The same key with another amount is refused")
        reused = self.charge("order-1001", 2999)
        self.check("status 409", reused.status_code == 409)
        self.check("idempotency_key_reused", error_of(reused) == "idempotency_key_reused")
        self.check_row("order-1001", status="completed", generation="1")
        self.check_gateway(asked=0, charged=0)

    def another_account(self) -> None:
        self.begin("The same key from another account is another operation")
        other = self.charge("order-1001", 1999, account="bob")
        self.check("status 201", other.status_code == 201)
        self.check("no replay", "idempotent-replayed" not in other.headers)
        self.check_row("order-1001", account="bob", status="completed", generation="1")
        self.check_gateway(asked=1, charged=1)

    def no_key(self) -> None:
        self.begin("No key: nothing runs")
        refused = self.charge(None, 1999)
        self.check("status 400", refused.status_code == 400)
        self.check("idempotency_key_required", error_of(refused) == "idempotency_key_required")
        self.check_gateway(asked=0, charged=0)

    def a_worker_killed_in_mid_charge(self) -> None:
        self.begin("A worker is killed after the card was charged, and before the order was recorded")
        with ThreadPoolExecutor(1) as thread:
            sent = thread.submit(self.send, "order-1003", 700, card=SLOW)
            while not (charging := self.gateway.requests()[self.asked_before :]) and not sent.done():
                time.sleep(0.01)
            for request in charging:
                os.kill(request.process, signal.SIGKILL)
            lost = sent.exception()
        if isinstance(lost, httpx.TransportError):
            show_request(lost.request)
        print("".join(f"$ kill -9 {request.process}\n" for request in charging))
        print(f"< ({lost or sent.result()})\n")
        self.check("a broken connection", isinstance(lost, httpx.TransportError))
        self.check_row("order-1003", status="pending", generation="1")
        self.check_gateway(asked=1, charged=1)

        self.begin("Its retry is told to wait while the dead worker's lease lasts")
        retry = self.charge("order-1003", 700, card=SLOW)
        self.check("status 409", retry.status_code == 409)
        self.check("idempotency_key_in_progress", error_of(retry) == "idempotency_key_in_progress")
        self.check_row("order-1003", status="pending", generation="1")

        self.begin(
            "After the lease it takes over at generation 2; the gateway knows its key, and does not charge again"
        )
        until = time.monotonic() + LEASE + 2
        while retry.status_code == 409 and time.monotonic() < until:
            seconds = int(retry.headers.get("retry-after", "1"))
            print(f"$ sleep {seconds}\n")
            time.sleep(seconds)
            retry = self.charge("order-1003", 700, card=SLOW)
        self.check("status 201", retry.status_code == 201)
        self.check("no replay", "idempotent-replayed" not in retry.headers)
        self.check_row("order-1003", status="completed", generation="2", response_status="201")
        self.check_gateway(asked=1, charged=0)

        self.begin("What alice has ordered, and paid for, once each")
        orders = self.http.get("/orders", headers={"Authorization": "Bearer alice-token"})
        show(orders)
        self.check("1999, 500 and 700", [order["amount"] for order in orders.json()["orders"]] == [1999, 500, 700])

    def charge(self, key: str | None, amount: int, account: str = "alice", card: str = "tok_visa") -> httpx.Response:
        answer = self.send(key, amount, account, card)
        show(answer)
        return answer

    def send(self, key: str | None, amount: int, account: str = "alice", card: str = "tok_visa") -> httpx.Response:
        headers = {"Authorization": f"Bearer {account}-token"} | ({} if key is None else {"Idempotency-Key": key})
        return self.http.post("/charges", json={"card": card, "amount": amount}, headers=headers)

    def begin(self, scene: str) -> None:
        self.scenes += 1
        self.scene = f"{self.scenes}. {scene}"
        self.asked_before = len(self.gateway.requests())
        print(f"{'-' * 100}\n{self.scene}\n")

    def check(self, expected: str, right: bool) -> None:
        if not right:
            self.wrong.append(f"{self.scene}: expected {expected}")
            print(f"WRONG: expected {expected}\n")

    def check_row(self, key: str, account: str = "alice", **expected: str) -> None:
        """Print the row as redis-cli does, and check some of its fields."""
        name = f"idem:acct_{account}:{key}"
        row = cast("dict[bytes, bytes]", self.ledger.hgetall(name))
        print(f"$ redis-cli HGETALL {name}\n{as_redis_cli_shows(row)}\n")
        for field, value in expected.items():
            self.check(f'"{field}" "{value}" in {name}', row.get(field.encode()) == value.encode())

    def check_gateway(self, asked: int, charged: int) -> None:
        """Print and check how often the gateway was called since the scene began."""
        requests = self.gateway.requests()[self.asked_before :]
        charges = sum(request.charged for request in requests)
        print(f"The gateway was asked {len(requests)} time(s), and charged {charges} time(s).\n")
        self.check(
            f"the gateway asked {asked} time(s), charging {charged}", (len(requests), charges) == (asked, charged)
        )


def show(answer: httpx.Response) -> None:
    show_request(answer.request)
    print(f"< {answer.status_code} {answer.reason_phrase}")
    show_message("< ", answer.headers, answer.content)


def show_request(request: httpx.Request) -> None:
    print(f"> {request.method} {request.url.path}")
    show_message("> ", request.headers, request.content)


def show_message(mark: str, headers: httpx.Headers, body: bytes) -> None:
    lines = [f"{name.decode()}: {value.decode()}" for name, value in headers.raw if name.decode().lower() in SHOWN]
    lines += ["", *body.decode().splitlines()] if body else []
    print("".join(f"{mark}{line}".rstrip() + "\n" for line in lines))


def error_of(answer: httpx.Response) -> object:
    body = answer.json()
    return body.get("error") if isinstance(body, dict) else None


def as_redis_cli_shows(row: dict[bytes, bytes]) -> str:
    words = [word for field in row.items() for word in field]
    width = len(str(len(words)))
    lines = (f'{number:{width}}) "{quoted(word)}"' for number, word in enumerate(words, 1))
    return "\n".join(lines) or "(empty array)"


def quoted(word: bytes) -> str:
    """Quote a value as redis-cli does: printable ASCII unchanged, other bytes escaped."""
    short = {ord(c): "\\" + c for c in '"\\'} | {10: "\\n", 13: "\\r", 9: "\\t", 7: "\\a", 8: "\\b"}
    return "".join(short.get(byte) or (chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}") for byte in word)


def main() -> int:
    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, stop)
    signal.alarm(ENDS_WITHIN)
    with tempfile.TemporaryDirectory(prefix="idemredis-") as name, valkey() as url, redis.Redis.from_url(url) as ledger:
        log = Path(name, "shop.log")
        with (
            serving(url, Path(name), log, SHOP_IDEMREDIS_LEASE_SECONDS=str(LEASE)) as shop,
            httpx.Client(base_url=shop.url, timeout=10) as http,
        ):
            print(f"The shop is on {shop.url} with {WORKERS} workers, its ledger on {url}.\n")
            demo = Demo(http, ledger, Gateway(shop.gateway))
            demo.play()
        if demo.wrong:
            print(f"{log.read_text()}\nNot every answer was right:\n" + "\n".join(demo.wrong))
            return 1
    print("Every answer was right.")
    return 0


def stop(number: int, frame: FrameType | None) -> None:
    sys.exit(f"the demo was stopped by {signal.Signals(number).name}")


if __name__ == "__main__":
    sys.exit(main())
