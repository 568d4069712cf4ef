"""The webhook endpoint of the examples accepts what its provider signed, and nothing else."""

from __future__ import annotations

import hashlib
import hmac
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from webhooks import SECRETS, create_app, sign

from tests.support.servers import Server

BODY = json.dumps({"id": "evt_1", "type": "renewal.due", "data": {"card": "tok_visa", "amount": 1999}}).encode()
ANOTHER = BODY.replace(b"1999", b"1")
SECRET = SECRETS["stripes"]
RIGHT = sign("stripes", BODY)


class Shop:
    """The example's application, and what it did."""

    def __init__(self, client: FlaskClient, gateway: Path, server: Server, namespace: str) -> None:
        self._namespace = namespace
        self.client = client
        self._gateway = gateway
        self._server = server

    def deliver(self, signature: str | bytes | None, provider: str = "stripes", body: bytes = BODY) -> int:
        """Deliver a webhook as a stranger would; bytes of a header are read as Latin-1 by WSGI servers."""
        headers: dict[str, Any] = {"Content-Type": "application/json"}
        environ: dict[str, Any] = {}
        if signature is not None:
            text = signature.decode("latin-1") if isinstance(signature, bytes) else signature
            environ["HTTP_X_SIGNATURE"] = text
        return self.client.post(
            f"/webhooks/{provider}", data=body, headers=headers, environ_overrides=environ
        ).status_code

    def did_nothing(self) -> bool:
        """Whether no card was charged and no event was claimed."""
        with self._server.client() as client:
            claimed = client.keys(f"{self._namespace}:*")
        if not self._gateway.exists():
            return not claimed
        with closing(sqlite3.connect(self._gateway)) as db:
            return not claimed and db.execute("SELECT count(*) FROM requests").fetchone() == (0,)


@pytest.fixture
def shop(valkey_server: Server, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    gateway = tmp_path / "gateway.sqlite3"
    monkeypatch.setenv("SHOP_REDIS", valkey_server.url)
    monkeypatch.setenv("SHOP_NAMESPACE", namespace)
    monkeypatch.setenv("SHOP_GATEWAY", str(gateway))
    app = create_app()
    app.testing = False  # as in production: an exception is a 500
    return Shop(app.test_client(), gateway, valkey_server, namespace)


WRONG: dict[str, str | bytes | None] = {
    "none": None,
    "empty": "",
    "blank": "   ",
    "another body's": sign("stripes", ANOTHER),
    "under another secret": hmac.digest(b"whsec_guessed", BODY, hashlib.sha256).hex(),
    "under an empty secret": hmac.digest(b"", BODY, hashlib.sha256).hex(),
    "with another hash": hmac.digest(SECRET, BODY, hashlib.sha512).hex(),
    "of no secret at all": hashlib.sha256(BODY).hexdigest(),
    "cut short": RIGHT[:-1],
    "made longer": f"{RIGHT}0",
    "one digit off": RIGHT[:-1] + ("0" if RIGHT[-1] != "0" else "1"),
    "upper case": RIGHT.upper(),
    "within words": f"sha256={RIGHT}",
    "not hexadecimal": "z" * 64,
    "not ASCII": "é" * 64,
    "full-width digits": "\uff10".encode() * 64,
    "with a surrogate": b"\xed\xa0\x80",
    "the words for no provider": "no such provider",
    "the word none": "None",
}


@pytest.mark.parametrize("signature", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("provider", ["stripes", "unknown", "Stripes", "__class__"])
def test_a_wrong_signature_is_refused_and_nothing_is_done(
    shop: Shop, signature: str | bytes | None, provider: str
) -> None:
    assert shop.deliver(signature, provider) == 401
    assert shop.did_nothing()


@pytest.mark.parametrize("provider", ["unknown", "", "Stripes"])
def test_a_provider_without_a_secret_is_refused_whatever_it_signed_with(shop: Shop, provider: str) -> None:
    for secret in (SECRET, b"", b"None", provider.encode()):
        assert shop.deliver(hmac.digest(secret, BODY, hashlib.sha256).hex(), provider) in (401, 404)
    assert shop.did_nothing()


@pytest.mark.parametrize("secret", ["", b"", None])
def test_a_secret_that_is_empty_is_none(shop: Shop, secret: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECRETS, "stripes", secret)
    assert shop.deliver(hmac.digest(b"", BODY, hashlib.sha256).hex()) == 401
    assert shop.did_nothing()


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b"7", b"{", b'{"id": "evt_1"}', b'{"id": 1, "type": [], "data": 3}']
)
def test_a_signed_body_that_is_no_event_is_a_bad_request(shop: Shop, body: bytes) -> None:
    assert shop.deliver(sign("stripes", body), body=body) == 400
    assert shop.did_nothing()


def test_the_right_signature_is_accepted(shop: Shop) -> None:
    assert shop.deliver(RIGHT) == 200
    assert not shop.did_nothing()
