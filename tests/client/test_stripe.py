"""What docs/http.md says about stripe-python, with a real one: how often it sends a request that is refused."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import stripe
from flask import Flask, request
from werkzeug.serving import make_server

from idemredis.flask import Idempotency

DOCUMENT = (Path(__file__).parents[2] / "docs" / "http.md").read_text()

Serve = Callable[[Flask], list[str]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Serve an application to stripe-python, whose pauses are short; return the keys of the requests that arrive."""
    monkeypatch.setattr(stripe.HTTPClient, "INITIAL_DELAY", 0.001)
    monkeypatch.setattr(stripe.HTTPClient, "MAX_DELAY", 0.001)
    monkeypatch.setattr(stripe, "api_key", "sk_test_none")
    servers: list[Any] = []

    def start(app: Flask) -> list[str]:
        arrived: list[str] = []
        app.before_request(lambda: arrived.append(request.headers["Idempotency-Key"]))
        servers.append(make_server("127.0.0.1", 0, app, threaded=True))
        threading.Thread(target=servers[-1].serve_forever).start()
        monkeypatch.setattr(stripe, "api_base", f"http://127.0.0.1:{servers[-1].server_port}")
        return arrived

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def _of_document() -> Flask:
    (code,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "shop"}
    exec(code.partition("\nclient, headers")[0], names)
    app: Flask = names["app"]
    return app


def _plain(protocol: str) -> Flask:
    app = Flask("shop")
    app.config.update(IDEMREDIS_URL="memory://", IDEMREDIS_PROTOCOL=protocol)
    idempotency = Idempotency(app, principal="shop")
    view = idempotency.protect(lambda: {"id": "cus_1", "object": "customer"})
    app.add_url_rule("/v1/customers", "customers", view, methods=["POST"])
    return app


@pytest.mark.slow
@pytest.mark.parametrize("retries", [2, 5])
@pytest.mark.parametrize("protocol", ["default", "ietf"])
def test_stripes_client_sends_a_reused_key_again_where_that_is_409_and_not_where_it_is_422(
    protocol: str, retries: int, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    if retries == 2:
        assert stripe.max_network_retries == 2, "the document says that this is its default"
    monkeypatch.setattr(stripe, "max_network_retries", retries)
    arrived = serve(_plain(protocol))
    ids = [stripe.Customer.create(name="a", idempotency_key="k1").id for _ in range(2)]
    assert (ids, arrived) == (["cus_1"] * 2, ["k1"] * 2)
    arrived.clear()
    with pytest.raises(AttributeError, match="'str' object has no attribute 'get'"):
        stripe.Customer.create(name="b", idempotency_key="k1")
    assert len(arrived) == (1 if protocol == "ietf" else 1 + retries)


def test_stripes_client_understands_the_refusals_of_the_document(serve: Serve) -> None:
    arrived = serve(_of_document())
    assert stripe.Customer.create(name="a", idempotency_key="k1").id == "cus_1"
    with pytest.raises(stripe.APIError, match="this key was used for another request") as refused:
        stripe.Customer.create(name="b", idempotency_key="k1")
    assert (refused.value.http_status, len(arrived)) == (422, 2)
