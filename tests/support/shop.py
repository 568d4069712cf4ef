"""An application on a ledger that `from_url` made, as a service would have it."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

from flask import Flask

from idemredis import Event, Ledger, Policy
from idemredis.core.keys import identify
from idemredis.flask import Idempotency

__all__ = ["Got", "Shop"]

PRINCIPAL = "acct_1"


class Got(NamedTuple):
    status: int
    text: str
    headers: dict[str, str]
    seconds: float

    @property
    def replayed(self) -> bool:
        return self.headers.get("Idempotent-Replayed") == "true"


class Shop:
    """An application with one protected view, which counts its runs and calls `inside`.

    Attributes:
        runs: how often the view ran.
        events: names of the events that the ledger emitted.
    """

    def __init__(self, url: str, namespace: str, policy: Policy | None = None, **settings: Any) -> None:
        self.runs = 0
        self.events: list[str] = []
        self.inside: Callable[[], object] = lambda: None
        self._namespace = namespace
        self.ledger = Ledger.from_url(url, policy or Policy(), namespace, [self._told])
        self.app = Flask("shop")
        self.app.config.update({f"IDEMREDIS_{name}": value for name, value in settings.items()})
        idempotency = Idempotency(self.app, principal=PRINCIPAL, ledger=self.ledger)

        @self.app.post("/charges")
        @idempotency.protect
        def charge() -> tuple[str, int]:
            self.runs += 1
            run = self.runs
            self.inside()
            return f"charge {run}", 201

    def post(self, key: str, body: bytes = b"{}") -> Got:
        began = time.monotonic()
        answer = self.app.test_client().post("/charges", data=body, headers={"Idempotency-Key": key})
        return Got(answer.status_code, answer.text, dict(answer.headers), time.monotonic() - began)

    def row(self, key: str) -> str:
        return identify(self._namespace, PRINCIPAL, key).row

    def close(self) -> None:
        self.ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _told(self, event: Event) -> None:
        self.events.append(event.name)
