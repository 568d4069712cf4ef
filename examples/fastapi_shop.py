"""A FastAPI application where each order charges a card once, however often its client sends it.

    python examples/fastapi_shop.py                           # demonstrates it on an embedded server, under uvicorn
    uvicorn --app-dir examples --workers 2 fastapi_shop:app    # the processes that it starts

The principal is a dependency. The guard depends on it, so the claim is made after authentication. The endpoint is a
plain function, which FastAPI runs in a thread.
"""

from __future__ import annotations

import os
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import httpx
from embedded import valkey
from fastapi import Depends, FastAPI, Header, HTTPException
from gateway import DECLINED, SLOW, CardDeclined, Gateway
from proof import prove, serving, wait_for
from pydantic import BaseModel

from idemredis import AsyncReservation
from idemredis.asgi import Idempotency, IdempotencyMiddleware
from idemredis.fastapi import guard, responses

GATEWAY = os.environ.get("SHOP_GATEWAY", "gateway.sqlite3")
SETTINGS = {
    "IDEMREDIS_URL": os.environ.get("SHOP_REDIS", "redis://127.0.0.1:6379/0"),
    "IDEMREDIS_LEASE_SECONDS": 2,
}
ACCOUNTS = {"Bearer alice": "acct_1", "Bearer bob": "acct_2"}  # stands for your own authentication


def account(authorization: Annotated[str, Header()] = "") -> str:
    if authorization not in ACCOUNTS:
        raise HTTPException(401)
    return ACCOUNTS[authorization]


class Order(BaseModel):
    card: str
    amount: int


idempotency = Idempotency(settings=SETTINGS)
Claim = Annotated[AsyncReservation, Depends(guard(idempotency, principal=account))]
app = FastAPI(lifespan=idempotency.lifespan)
app.add_middleware(IdempotencyMiddleware, idempotency=idempotency)


@app.post("/orders", status_code=201, responses=responses(idempotency))
def create_order(order: Order, claim: Claim) -> dict[str, str]:
    key = claim.downstream_key("gateway")  # the same for every attempt at this order
    try:
        return {"charge": Gateway(GATEWAY).charge(order.card, order.amount, key)}
    except CardDeclined:
        raise HTTPException(402, "the card was declined") from None  # stored, as any other 4xx


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, valkey() as url:
        gateway = Gateway(Path(folder) / "gateway.sqlite3")
        env = {"SHOP_REDIS": url, "SHOP_GATEWAY": f"{folder}/gateway.sqlite3"}
        with (
            serving("fastapi_shop:app", "uvicorn", **env) as shop,
            httpx.Client(base_url=shop, timeout=20) as http,
        ):

            def send(key: str, card: str = "tok_visa", who: str = "alice") -> httpx.Response | None:
                headers = {"Authorization": f"Bearer {who}", "Idempotency-Key": key}
                try:
                    return http.post("/orders", json={"card": card, "amount": 1999}, headers=headers)
                except httpx.TransportError:
                    return None  # the worker died: the client cannot know whether the card was charged

            def retry(key: str, card: str = "tok_visa") -> httpx.Response:
                """Send until there is an answer other than "in progress"."""

                def final() -> httpx.Response | None:
                    answer = send(key, card)
                    return answer if answer is not None and answer.status_code < 409 else None

                return wait_for(final)

            with ThreadPoolExecutor(8) as at_once:
                answers = list(at_once.map(lambda _: retry("order-1"), range(8)))
            prove("8 clients at once get the same answer", len({(a.status_code, a.text) for a in answers}) == 1)
            prove("and the card is charged once", len(gateway.requests()) == 1)
            prove("a retry is marked as such", retry("order-1").headers["Idempotent-Replayed"] == "true")

            reused, stranger, other = send("order-1", DECLINED), send("order-1", who="eve"), send("order-1", who="bob")
            prove("another order under the same key is refused", reused is not None and reused.status_code == 409)
            prove("a stranger is refused before the claim", stranger is not None and stranger.status_code == 401)
            prove("another account has keys of its own", other is not None and other.text != answers[0].text)

            declined = [retry("order-2", DECLINED) for _ in range(2)]
            prove("a declined card is answered so again", [answer.status_code for answer in declined] == [402, 402])

            before = len(gateway.requests())
            with ThreadPoolExecutor(1) as beside:
                first = beside.submit(send, "order-3", SLOW)
                os.kill(wait_for(lambda: gateway.requests()[before:])[0].process, signal.SIGKILL)
                prove("a worker was killed after it had charged the card: no answer", first.result() is None)
            taken_over = retry("order-3", SLOW)
            charged = [asked.charged for asked in gateway.requests()[before:]]
            prove("the retry took the order over", taken_over.status_code == 201)
            prove("and the card was charged once", charged == [True, False])


if __name__ == "__main__":
    main()
