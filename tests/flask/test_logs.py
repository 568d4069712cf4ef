"""What an operator reads: every loud thing is there, and no raw key or principal is unless it was asked for."""

from __future__ import annotations

from typing import Any

import pytest
from flask import Flask

from idemredis.flask import Idempotency
from tests.support.started import Servers

KEY = "key-7f3d9c"
PRINCIPAL = "account-41ab"


@pytest.mark.parametrize("asked", [False, True])
def test_raw_keys_are_in_events_only_where_they_were_asked_for(
    asked: bool, every_key_left_expires: Servers, namespace: str
) -> None:
    events: list[Any] = []
    app = Flask("shop")
    app.config.update(IDEMREDIS_LOG_KEYS=asked, IDEMREDIS_NAMESPACE=namespace)
    client = every_key_left_expires.get("fakeredis").client()
    idempotency = Idempotency(app, principal=PRINCIPAL, client=client, observers=[events.append])
    app.add_url_rule("/", "charge", idempotency.protect(lambda: "done"), methods=["POST"])
    app.test_client().post("/", headers={"Idempotency-Key": KEY})
    assert [event.name for event in events] == ["claimed", "completed"]
    assert {(event.key, event.principal) for event in events} == {(KEY, PRINCIPAL) if asked else (None, None)}
