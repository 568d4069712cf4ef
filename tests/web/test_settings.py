"""Every setting: the values that it takes, and how the others are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask

from idemredis import AsyncLedger, ConfigurationError, Ledger
from idemredis.flask import Idempotency
from idemredis.web.settings import DEFAULTS
from tests.support.started import Servers

KEY = {"Idempotency-Key": "k1"}

BAD: dict[str, tuple[Any, ...]] = {
    "URL": ("", 7, b"redis://x", "http://localhost", "localhost:6379"),
    "MODE": ("Enforce", "", None, 7, ["off"]),
    "NAMESPACE": ("", None, 7, b"idem"),
    "LEASE_SECONDS": (0, -1, float("nan"), float("inf"), "30", True, None, 86400, 86401),
    "RETENTION_SECONDS": (0, -1, float("nan"), float("inf"), "1", None, 30, 29, 1e12),
    "MAX_HOLD_SECONDS": (0, -1, float("nan"), "900", None),
    "HEARTBEAT": (1, "yes", None),
    "METHODS": ((), "POST", ("GET",), ("post",), (7,), None, ("POST", "HEAD")),
    "REQUIRED": (1, "no", None),
    "PROTECT_ALL": (0, "yes", None),
    "PROTOCOL": ("IETF", "", None, 7, ["ietf"]),
    "DOCS_URL": ("", "docs", "javascript:alert(1)", 'https://x/"><script>', "https://x\r\nSet-Cookie: a=b", 7),
    "FINGERPRINT_HEADERS": ("content-type", ("a b",), ("a\r\n",), (7,), None, ("",)),
    "REPLAY_HEADERS": ("location", ("a:",), (None,), None, ("Set-Cookie",), ("location", "Content-Length")),
    "MAX_BODY_BYTES": (-1, 1.5, "1", True, None),
    "MAX_REQUEST_BYTES": (0, -1, 1.5, "1", True, None),
    "ON_ERROR": ("retry", None, 7),
    "WAIT_SECONDS": (-1, float("nan"), "1", None, False, True),
    "RETRY_AFTER_SECONDS": (0, -1, float("inf"), "2", None),
    "FAIL_OPEN": (1, "open", None),
    "MIN_REPLICAS": (-1, 1.0, "1", None),
    "REPLICA_TIMEOUT_SECONDS": (0, -1, float("nan"), "1", None),
    "SOCKET_TIMEOUT_SECONDS": (0, -1, float("nan"), "1", None),
    "LOG_KEYS": (1, "yes", None),
}


def test_every_setting_has_bad_values_here() -> None:
    assert BAD.keys() == DEFAULTS.keys()


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_bad_value_stops_the_application_and_names_the_setting(name: str, value: Any) -> None:
    app = Flask("shop")
    app.config.update({"IDEMREDIS_URL": "redis://127.0.0.1:1/0", f"IDEMREDIS_{name}": value})
    with pytest.raises(ConfigurationError) as refused:
        Idempotency(app, principal="acme")
    message = str(refused.value)
    assert f"IDEMREDIS_{name}" in message
    assert "must be" in message or "cannot be used" in message
    if not isinstance(value, (int, float)) and name != "URL":  # an URL may have a password in it
        assert repr(value) in message
    assert app.extensions == {}


def test_a_replica_timeout_above_the_socket_timeout_is_refused_with_both_names() -> None:
    app = Flask("shop")
    app.config.update(
        IDEMREDIS_URL="redis://127.0.0.1:1", IDEMREDIS_MIN_REPLICAS=1, IDEMREDIS_REPLICA_TIMEOUT_SECONDS=1
    )
    with pytest.raises(ConfigurationError, match=r"IDEMREDIS_REPLICA_TIMEOUT_SECONDS.*SOCKET_TIMEOUT_SECONDS"):
        Idempotency(app, principal="acme")


@pytest.mark.parametrize(
    ("name", "value", "other", "having"),
    [
        ("DOCS_URL", "https://shop.example/keys", "PROTOCOL", "ietf"),
        ("REPLICA_TIMEOUT_SECONDS", 0.2, "MIN_REPLICAS", 1),
    ],
)
def test_a_setting_that_would_be_ignored_is_refused_with_the_one_that_it_needs(
    name: str, value: Any, other: str, having: Any
) -> None:
    app = Flask("shop")
    app.config.update({"IDEMREDIS_URL": "redis://127.0.0.1:1/0", f"IDEMREDIS_{name}": value})
    with pytest.raises(ConfigurationError, match=f"IDEMREDIS_{name} would be ignored: .*set IDEMREDIS_{other} to"):
        Idempotency(app, principal="acme")
    assert app.extensions == {}
    app.config[f"IDEMREDIS_{other}"] = having
    Idempotency(app, principal="acme")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("LEASE", "did you mean IDEMREDIS_LEASE_SECONDS"),
        ("FAILOPEN", "IDEMREDIS_FAIL_OPEN"),
        ("X", "URL, MODE, NAMESPACE"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_one_that_was_meant(name: str, hint: str) -> None:
    app = Flask("shop")
    app.config.update({"IDEMREDIS_URL": "memory://", f"IDEMREDIS_{name}": 1})
    with pytest.raises(ConfigurationError, match=f"IDEMREDIS_{name} is not a setting.*{hint}"):
        Idempotency(app, principal="acme")


def test_no_url_is_refused_with_what_to_set() -> None:
    with pytest.raises(ConfigurationError, match="IDEMREDIS_URL is not set"):
        Idempotency(Flask("shop"), principal="acme")


def test_memory_says_once_that_nothing_is_shared(caplog: pytest.LogCaptureFixture) -> None:
    app = Flask("shop")
    app.config["IDEMREDIS_URL"] = "memory://"
    idempotency = Idempotency(app, principal="acme")
    runs: list[int] = []

    @app.post("/charges")
    @idempotency.protect
    def charge() -> str:
        runs.append(1)
        return str(len(runs))

    answers = [app.test_client().post("/charges", headers=KEY).text for _ in range(3)]
    assert answers == ["1"] * 3
    assert [r.levelname for r in caplog.records if "nothing is shared with other processes" in r.message] == ["WARNING"]


@pytest.mark.parametrize(
    ("given", "config", "message"),
    [
        ({"ledger": "ledger"}, {"LEASE_SECONDS": 5}, "IDEMREDIS_LEASE_SECONDS is the ledger's own setting"),
        ({"ledger": "ledger"}, {"URL": "memory://"}, "IDEMREDIS_URL is the ledger's own setting"),
        ({"client": "client"}, {"URL": "memory://"}, "IDEMREDIS_URL and a client are both given"),
        ({"client": "client", "ledger": "ledger"}, {}, "not both"),
        ({"client": "async"}, {}, "AsyncLedger|sync client"),
        ({"client": "nothing"}, {}, "redis-py client"),
        ({"ledger": "async ledger"}, {}, "not AsyncLedger"),
        ({"ledger": "nothing"}, {}, "ledger must be a Ledger"),
    ],
)
def test_a_client_or_ledger_that_cannot_be_used_is_refused(
    given: dict[str, str], config: dict[str, Any], message: str, every_key_left_expires: Servers
) -> None:
    memory = every_key_left_expires.get("fakeredis")
    made: dict[str, Callable[[], Any]] = {
        "client": memory.client,
        "ledger": lambda: Ledger(memory.client()),
        "async": memory.async_client,
        "async ledger": lambda: AsyncLedger(memory.async_client()),
        "nothing": object,
    }
    app = Flask("shop")
    app.config.update({f"IDEMREDIS_{name}": value for name, value in config.items()})
    with pytest.raises(ConfigurationError, match=message):
        Idempotency(app, principal="acme", **{name: made[kind]() for name, kind in given.items()})


def test_a_client_of_the_callers_is_used_with_the_applications_settings(every_key_left_expires: Servers) -> None:
    client = every_key_left_expires.get("fakeredis").client()
    app = Flask("shop")
    app.config.update(IDEMREDIS_NAMESPACE="own", IDEMREDIS_RETENTION_SECONDS=100)
    idempotency = Idempotency(principal=7, client=client)
    idempotency.init_app(app)
    app.add_url_rule("/", "charge", idempotency.protect(lambda: "done"), methods=["POST"])
    app.test_client().post("/", headers=KEY)
    assert client.keys() == [b"own:7:k1"]
    assert client.pttl("own:7:k1") <= 100_000


@pytest.mark.parametrize(
    "options",
    [
        {"lease": 0},
        {"lease": -1},
        {"lease": float("nan")},
        {"lease": "5"},
        {"wait": -1},
        {"wait": float("inf")},
        {"wait": "1"},
        {"on_error": "retry"},
        {"operation": 7},
        {"operation": None},
        {"required": "no"},
        {"fingerprint": "text"},
        {"recover": 7},
    ],
)
def test_an_option_of_protect_that_cannot_work_is_refused_when_the_view_is_made(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        Idempotency(principal="acme").protect(**options)


def test_an_unknown_option_of_protect_is_refused() -> None:
    with pytest.raises(TypeError, match="retention"):
        Idempotency(principal="acme").protect(retention=5)  # type: ignore[call-overload]
