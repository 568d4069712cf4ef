"""Run in each installation, which has nothing of the checkout: python smoke.py WHERE-IDEMREDIS-MUST-COME-FROM"""

from __future__ import annotations

import sys

import idemredis
from idemredis import InProgress, Ledger, Replay, Reservation, Reused, StoredResponse

assert idemredis.__file__.startswith(sys.argv[1]), f"{idemredis.__file__} is not from {sys.argv[1]}"

ledger = Ledger.from_url("memory://")
reservation = ledger.claim("acct_1", "order-1", "fingerprint")
assert isinstance(reservation, Reservation)
assert isinstance(ledger.claim("acct_1", "order-1", "fingerprint"), InProgress)
assert isinstance(ledger.claim("acct_1", "order-1", "another"), Reused)
answer = StoredResponse(status=201, headers=(("content-type", "application/json"),), body=b'{"id": 1}')
ledger.complete(reservation, answer)
assert ledger.claim("acct_1", "order-1", "fingerprint") == Replay(answer, generation=1, failed=False)

assert "flask" not in sys.modules

from flask import Flask  # noqa: E402  # what comes before needs no Flask

from idemredis.flask import Idempotency  # noqa: E402

app = Flask("smoke")
app.config["IDEMREDIS_URL"] = "memory://"
idempotency = Idempotency(principal="acct_1")
idempotency.init_app(app)
runs: list[int] = []


@app.post("/charges")
@idempotency.protect
def charge() -> tuple[dict[str, int], int]:
    runs.append(1)
    return {"runs": len(runs)}, 201


client = app.test_client()
first, retry = (client.post("/charges", json={"amount": 1}, headers={"Idempotency-Key": "order-1"}) for _ in range(2))
assert (first.status_code, first.json) == (201, {"runs": 1})
assert (retry.status_code, retry.data) == (201, first.data)
assert retry.headers["Idempotent-Replayed"] == "true"
print("claimed and replayed")
