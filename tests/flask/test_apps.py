"""Setting an application up: settings, principals, kinds of views, and what happens when Redis is away."""

from __future__ import annotations

import hashlib
import io
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import redis
from flask import Blueprint, Flask, Response, abort, current_app, g, request
from flask.views import MethodView
from redis.backoff import NoBackoff
from redis.retry import Retry
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from idemredis import AsyncLedger, ConfigurationError, HoldForReview, Ledger, Policy, Reservation
from idemredis.flask import Idempotency, current_reservation
from idemredis.web.settings import DEFAULTS
from tests.support.clock import SLACK, TurnedClock, expires_at
from tests.support.proxy import Proxy
from tests.support.servers import Server, valkey
from tests.support.site import MakeSite, Site
from tests.support.started import Servers
from tests.support.waiting import wait_until

KEY = {"Idempotency-Key": "k1"}
UNSAFE = ("POST", "PUT", "PATCH", "DELETE")


def _unreachable() -> redis.Redis:
    return redis.Redis(port=1, retry=Retry(NoBackoff(), 0))


# Settings

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


# Several applications, and setting one up more than once


def test_two_applications_in_one_process_have_settings_of_their_own(make_site: MakeSite) -> None:
    one, two = make_site(PROTOCOL="ietf"), make_site(REQUIRED=False, principal="other")
    for site in (one, two):
        site.view()
    assert one.send('"k1"').status_code == 201
    assert two.send("k1").status_code == 201
    assert (one.send(None).status_code, two.send(None).status_code) == (400, 201)
    assert {key.decode().split(":", 1)[1] for key in one.rows()} == {"acme:k1", "other:k1"}


def test_applications_behind_one_dispatcher_do_not_meet(make_site: MakeSite) -> None:
    front, back = make_site(), make_site(principal="back")
    for site in (front, back):
        site.view()
    front.app.wsgi_app = DispatcherMiddleware(front.app.wsgi_app, {"/back": back.app})  # type: ignore[method-assign]
    assert [front.send(path=path).text for path in ("/charges", "/back/charges") * 2] == ["charge 1"] * 4
    assert (len(front.runs), len(back.runs)) == (1, 1)


def test_an_application_within_the_view_of_another_runs_under_its_claim(make_site: MakeSite) -> None:
    inner, outer = make_site(), make_site()
    inner.view(lambda: abort(500) if request.args else f"inner {current_reservation.generation}", "/charges")

    def gateway() -> Any:
        answer = Response.from_app(inner.app, request.environ)
        assert current_reservation.held
        assert request.get_json() == {"amount": 1000}
        return answer

    outer.view(gateway)
    assert [outer.send().text for _ in range(2)] == ["inner 1"] * 2
    assert (len(outer.runs), len(inner.runs), len(outer.rows())) == (1, 1, 1)


def test_an_application_that_fails_within_the_view_of_another_does_not_settle_its_claim(make_site: MakeSite) -> None:
    inner, outer = make_site(), make_site()
    inner.app.config["PROPAGATE_EXCEPTIONS"] = True
    inner.view(lambda: 1 / 0, "/charges")

    def gateway() -> str:
        with pytest.raises(ZeroDivisionError):
            Response.from_app(inner.app, request.environ)
        return hashlib.sha256(request.stream.read()).hexdigest()

    body = b"x" * 300_000
    outer.view(gateway)
    answers = [outer.send(data=body) for _ in range(2)]
    assert [answer.text for answer in answers] == [hashlib.sha256(body).hexdigest()] * 2
    assert (len(outer.runs), outer.row()["status"]) == (1, b"completed")


def test_a_factory_makes_independent_applications_from_one_extension(every_key_left_expires: Servers) -> None:
    idempotency = Idempotency(principal="acme")
    runs: list[str] = []

    @idempotency.protect
    def charge() -> str:
        runs.append(current_app.name)
        return current_app.name

    def create_app(name: str) -> Flask:
        app = Flask(name)
        app.config["IDEMREDIS_URL"] = "memory://"
        idempotency.init_app(app)
        app.add_url_rule("/charges", "charge", charge, methods=["POST"])
        return app

    one, two = create_app("one"), create_app("two")
    answers = [app.test_client().post("/charges", headers=KEY).text for app in (one, two, one, two)]
    assert (answers, runs) == (["one", "two", "one", "two"], ["one", "two"])


def test_setting_an_application_up_twice_reads_its_settings_anew_and_claims_once(make_site: MakeSite) -> None:
    site = make_site(PROTECT_ALL=True)
    site.view()
    site.app.config["IDEMREDIS_REQUIRED"] = False
    site.idempotency.init_app(site.app)
    assert site.send(None).status_code == 201
    assert [site.send().text for _ in range(2)] == ["charge 2"] * 2
    assert site.told() == ["claimed", "completed", "replayed"]


def test_a_second_setup_that_fails_leaves_the_first_in_force(make_site: MakeSite) -> None:
    site = make_site()
    site.view()
    site.app.config["IDEMREDIS_ON_ERROR"] = "never"
    with pytest.raises(ConfigurationError):
        site.idempotency.init_app(site.app)
    assert [site.send().text for _ in range(2)] == ["charge 1"] * 2


def test_a_second_extension_on_one_application_is_refused(site: Site) -> None:
    with pytest.raises(ConfigurationError, match="'shop' has an Idempotency already"):
        Idempotency(site.app, principal="other", ledger=site.ledger)


def test_setup_after_the_first_request_is_refused_each_time_and_no_view_runs(every_key_left_expires: Servers) -> None:
    app = Flask("shop")
    idempotency = Idempotency(principal="acme", client=every_key_left_expires.get("fakeredis").client())
    runs: list[int] = []

    @app.post("/")
    @idempotency.protect
    def charge() -> str:
        runs.append(1)
        return "done"

    assert app.test_client().post("/nowhere").status_code == 404
    for _ in range(2):
        with pytest.raises(AssertionError, match="teardown_request"):
            idempotency.init_app(app)
    assert app.test_client().post("/", headers=KEY).status_code == 500
    assert runs == []


def test_a_protected_view_of_an_application_without_setup_does_not_run(caplog: pytest.LogCaptureFixture) -> None:
    app = Flask("shop")
    runs: list[int] = []

    @app.post("/")
    @Idempotency(principal="acme").protect
    def charge() -> str:
        runs.append(1)
        return "done"

    assert app.test_client().post("/", headers=KEY).status_code == 500
    assert "call Idempotency.init_app(app) first" in caplog.text
    assert runs == []


# Principals


@pytest.mark.parametrize("principal", [None, "", "  ", True, b"acme", 1.5])
def test_a_constant_that_cannot_be_a_principal_is_refused_at_once(principal: object) -> None:
    with pytest.raises(ConfigurationError, match="principal"):
        Idempotency(principal=principal)


@pytest.mark.parametrize(
    ("principal", "text"),
    [("acme", "acme"), (7, "7"), (0, "0"), (UUID(int=1), "00000000-0000-0000-0000-000000000001"), ("a:b", "a:b")],
)
@pytest.mark.parametrize("called", [False, True])
def test_a_principal_may_be_text_a_number_or_a_uuid_and_a_function_or_not(
    principal: object, text: str, called: bool, make_site: MakeSite
) -> None:
    site = make_site(principal=(lambda: principal) if called else principal)
    site.view(lambda: current_reservation.principal)
    assert site.send().text == text
    assert site.row(principal=text)


def test_the_principal_is_asked_for_after_authentication_and_once(make_site: MakeSite) -> None:
    asked: list[str] = []

    def principal() -> str:
        asked.append(g.account)
        return str(g.account)

    site = make_site(principal=principal)

    @site.app.before_request
    def authenticate() -> None:
        g.account = request.headers.get("Authorization") or abort(401)

    site.view(lambda: g.account)
    assert site.send().status_code == 401
    assert asked == []
    assert site.send(headers=[("Authorization", "alice")]).text == "alice"
    assert asked == ["alice"]


@pytest.mark.parametrize(("error", "status"), [(LookupError("no account"), 500), (None, 403)])
def test_a_principal_function_that_fails_runs_and_claims_nothing(
    error: Exception | None, status: int, make_site: MakeSite
) -> None:
    def principal() -> str:
        if error is None:
            abort(403)
        raise error

    site = make_site(principal=principal, FAIL_OPEN=True)
    site.view()
    assert site.send().status_code == status
    assert (site.runs, site.rows()) == ([], {})


# Kinds of views


def test_a_view_without_a_required_key_runs_unprotected_and_with_one_is_protected(make_site: MakeSite) -> None:
    site = make_site(principal=lambda: request.headers.get("Authorization"))
    site.view(lambda: str(bool(current_reservation)), required=False)
    answers = [site.send(None) for _ in range(2)]
    assert [(answer.text, answer.headers["Idempotency-Status"]) for answer in answers] == [("False", "unprotected")] * 2
    assert site.sent == []
    assert [site.send(headers=[("Authorization", "a")]).text for _ in range(2)] == ["True"] * 2
    assert (site.send("").status_code, site.send().status_code, len(site.runs)) == (401, 401, 3)


@pytest.mark.parametrize(("setting", "option", "status"), [(False, None, 201), (False, True, 400), (True, False, 201)])
def test_a_view_says_for_itself_whether_a_key_is_required(
    setting: bool, option: bool | None, status: int, make_site: MakeSite
) -> None:
    site = make_site(REQUIRED=setting)
    site.view(required=option)
    assert site.send(None).status_code == status


def test_the_methods_to_protect_can_be_chosen(make_site: MakeSite) -> None:
    site = make_site(METHODS=("POST",))
    site.view()
    assert [site.send(method="PUT").text for _ in range(2)] == ["charge 1", "charge 2"]
    assert [site.send(method="POST").text for _ in range(2)] == ["charge 3", "charge 3"]


def test_method_views_are_protected_whole_or_by_the_method(make_site: MakeSite) -> None:
    site = make_site()

    class Whole(MethodView):
        decorators = [site.idempotency.protect]  # noqa: RUF012  # as Flask declares it

        def get(self) -> str:
            return "seen"

        def post(self) -> str:
            site.runs.append("post")
            return f"run {len(site.runs)}"

        put = post

    class Single(MethodView):
        @site.idempotency.protect(operation="single")
        def post(self) -> str:
            site.runs.append(current_reservation.operation)
            return f"run {len(site.runs)}"

        def put(self) -> str:
            return f"unprotected {bool(current_reservation)}"

    site.app.add_url_rule("/whole", view_func=Whole.as_view("whole"))
    site.app.add_url_rule("/single", view_func=Single.as_view("single"))
    assert site.send(None, "/whole", "GET").text == "seen"
    assert [site.send(path="/whole").text for _ in range(2)] == ["run 1"] * 2
    assert [site.send("k2", "/whole", "PUT").text for _ in range(2)] == ["run 2"] * 2
    assert site.send(None, "/whole").status_code == 400
    assert [site.send(path="/single").text for _ in range(2)] == ["run 3"] * 2
    assert site.send(None, "/single", "PUT").text == "unprotected False"
    assert site.runs == ["post", "post", "single"]


def test_blueprints_and_url_values_work(make_site: MakeSite) -> None:
    site = make_site()
    shop = Blueprint("shop", __name__, url_prefix="/shops/<name>")

    @shop.post("/charges/<int:number>")
    @site.idempotency.protect
    def charge(name: str, number: int) -> dict[str, object]:
        site.runs.append(name)
        return {"name": name, "number": number}

    site.app.register_blueprint(shop)
    assert [site.send(path="/shops/a/charges/7").get_json() for _ in range(2)] == [{"name": "a", "number": 7}] * 2
    assert site.send(path="/shops/a/charges/8").status_code == 409
    assert site.runs == ["a"]
    assert charge.__name__ == "charge"


def test_async_views_are_protected(make_site: MakeSite) -> None:
    site = make_site()

    async def charge() -> tuple[str, int]:
        site.runs.append(current_reservation.key)
        return f"run {len(site.runs)}", 201

    async def broken() -> str:
        site.runs.append("broken")
        raise LookupError

    for view in (charge, broken):
        site.app.add_url_rule(f"/{view.__name__}", view_func=site.idempotency.protect(view), methods=["POST"])
    assert [site.send(path="/charge").text for _ in range(2)] == ["run 1"] * 2
    assert [site.send("k2", "/broken").status_code for _ in range(2)] == [500, 500]
    assert (site.runs, site.row("k2")["generation"]) == (["k1", "broken", "broken"], b"2")


def test_protect_within_protect_claims_once_by_the_outer_options(make_site: MakeSite) -> None:
    site = make_site()
    site.view(site.idempotency.protect(operation="inner")(lambda: current_reservation.operation), operation="outer")
    assert [site.send().text for _ in range(2)] == ["outer"] * 2
    assert len(site.rows()) == len(site.runs) == 1


# PROTECT_ALL


@pytest.fixture
def guarded(make_site: MakeSite) -> Site:
    """A site with every kind of view that PROTECT_ALL meets."""
    site = make_site(PROTECT_ALL=True)
    app, idempotency = site.app, site.idempotency

    def run(name: str) -> Callable[..., str]:
        def view(*args: Any, **kwargs: Any) -> str:
            site.runs.append(name)
            return f"{name} {bool(current_reservation)} {len(site.runs)}"

        return view

    class Plain(MethodView):
        post = put = run("method view")

    @idempotency.exempt
    class Exempt(MethodView):
        post = run("exempt class")

    class Partly(MethodView):
        post = idempotency.exempt(run("exempt method"))
        put = run("guarded method")

    class Optional(MethodView):
        post = idempotency.protect(required=False, operation="own")(run("decorated method"))
        put = run("undecorated method")

    app.add_url_rule("/plain", "plain", run("plain"), methods=["GET", *UNSAFE])
    app.add_url_rule("/exempt", "exempt", idempotency.exempt(run("exempt")), methods=UNSAFE)
    app.add_url_rule("/decorated", "decorated", idempotency.protect(operation="own")(run("decorated")), methods=UNSAFE)
    app.add_url_rule("/optional", "optional", idempotency.protect(required=False)(run("optional")), methods=UNSAFE)
    for number, view in enumerate((Plain, Exempt, Partly, Optional)):
        app.add_url_rule(f"/view{number}", view_func=view.as_view(f"view{number}"))
    for name in ("open", "closed"):
        blueprint = Blueprint(name, __name__, url_prefix=f"/{name}")
        blueprint.add_url_rule("/", "run", run(f"{name} blueprint"), methods=UNSAFE)
        child = Blueprint("child", __name__, url_prefix="/child")
        child.add_url_rule("/", "run", run(f"child of {name}"), methods=UNSAFE)
        blueprint.register_blueprint(child)
        if name == "open":
            idempotency.exempt(blueprint)
        app.register_blueprint(blueprint)
    return site


@pytest.mark.parametrize(
    ("path", "method", "protected"),
    [
        *(("/plain", method, True) for method in UNSAFE),
        ("/plain", "GET", False),
        ("/exempt", "POST", False),
        ("/decorated", "POST", True),
        ("/optional", "POST", True),
        ("/view0", "POST", True),
        ("/view0", "PUT", True),
        ("/view1", "POST", False),
        ("/view2", "POST", False),
        ("/view2", "PUT", True),
        ("/view3", "POST", True),
        ("/view3", "PUT", True),
        ("/open/", "POST", False),
        ("/open/child/", "POST", False),
        ("/closed/", "POST", True),
        ("/closed/child/", "POST", True),
    ],
)
def test_protect_all_guards_every_unsafe_view_that_is_not_exempt(
    path: str, method: str, protected: bool, guarded: Site
) -> None:
    answers = [guarded.send(path=path, method=method).text for _ in range(2)]
    assert f" {protected} " in answers[0]
    assert (answers[0] == answers[1]) == protected
    assert len(guarded.runs) == (1 if protected else 2)
    assert len(guarded.rows()) == protected
    required = (protected and path not in ("/optional", "/view3")) or (path, method) == ("/view3", "PUT")
    assert guarded.send(None, path, method).status_code == (400 if required else 200)


def test_protect_all_over_a_decorated_view_claims_once_with_the_views_own_options(guarded: Site) -> None:
    guarded.send(path="/decorated")
    assert list(guarded.rows()) == [guarded.row_name(operation="own").encode()]
    assert guarded.told() == ["claimed", "completed"]


@pytest.mark.parametrize(("path", "method", "status"), [("/nowhere", "POST", 404), ("/view1", "PUT", 405)])
@pytest.mark.parametrize("key", ["k1", None])
def test_protect_all_leaves_what_is_not_routed_alone(
    path: str, method: str, status: int, key: str | None, guarded: Site
) -> None:
    assert guarded.send(key, path, method).status_code == status
    assert guarded.sent == []


def test_protect_all_comes_after_authentication_and_stores_nothing_that_it_answered(make_site: MakeSite) -> None:
    site = make_site(PROTECT_ALL=True, principal=lambda: request.headers["Authorization"])
    site.app.before_request(lambda: None if "Authorization" in request.headers else abort(401))
    site.app.add_url_rule("/", "charge", lambda: "done", methods=["POST"])
    assert site.send(path="/").status_code == 401
    assert (site.sent, site.rows()) == ([], {})
    assert site.send(path="/", headers=[("Authorization", "a")]).text == "done"


# Redis away


def test_without_redis_the_view_does_not_run_and_the_answer_is_503(make_site: MakeSite) -> None:
    site = make_site(client=_unreachable())
    site.view()
    answers = [site.send() for _ in range(2)]
    assert [answer.status_code for answer in answers] == [503, 503]
    assert site.runs == []


def test_fail_open_runs_unprotected_and_says_so_in_a_header_and_the_log(
    make_site: MakeSite, caplog: pytest.LogCaptureFixture
) -> None:
    site = make_site(client=_unreachable(), FAIL_OPEN=True)
    site.view(site.idempotency.protect(lambda: f"run {len(site.runs)} {bool(current_reservation)}"))
    answers = [site.send() for _ in range(2)]
    assert [answer.text for answer in answers] == ["run 1 False", "run 2 False"]
    assert [answer.headers["Idempotency-Status"] for answer in answers] == ["unprotected"] * 2
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len([text for text in errors if "runs unprotected, since IDEMREDIS_FAIL_OPEN is set" in text]) == 2


def test_fail_open_opens_nothing_but_an_outage(make_site: MakeSite) -> None:
    principals: list[object] = ["acme"]
    site = make_site(FAIL_OPEN=True, principal=lambda: principals[-1])
    site.view()
    assert site.send().status_code == 201
    assert site.send(json={"amount": 2}).status_code == 409
    assert site.send(None).status_code == 400
    assert site.send("\t").status_code == 400
    assert site.send("k2", data=b"1", environ_overrides={"CONTENT_LENGTH": "2"}).status_code == 400
    site.store.hset(site.row_name(), "status", "other")
    assert site.send().status_code == 500
    principals.append(None)
    assert site.send("k3").status_code == 401
    assert len(site.runs) == 1
    assert "Idempotency-Status" not in site.send("k3").headers


def test_fail_open_without_a_principal_runs_nothing_during_an_outage_either(make_site: MakeSite) -> None:
    site = make_site(client=_unreachable(), FAIL_OPEN=True, principal=lambda: None)
    site.view()
    assert (site.send().status_code, site.runs) == (401, [])


@pytest.mark.parametrize(
    "field", ["status", "generation", "owner", "fingerprint", "lease", "retention", "response_body"]
)
def test_a_row_with_a_field_missing_is_500_and_stays_as_it_is(field: str, site: Site) -> None:
    site.send()
    site.store.hdel(site.row_name(), field)
    before = site.rows()
    answer = site.send()
    assert (answer.status_code, answer.get_json()["error"]) == (500, "idempotency_row_corrupt")
    assert (site.rows(), len(site.runs)) == (before, 1)


@pytest.mark.parametrize("kind", ["string", "list", "set", "zset"])
def test_a_row_of_another_type_is_500_and_stays_as_it_is(
    kind: str, make_site: MakeSite, valkey_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    site = make_site(valkey_server)
    site.view()
    name = site.row_name()
    match kind:
        case "string":
            site.store.set(name, "x")
        case "list":
            site.store.rpush(name, "x")
        case "set":
            site.store.sadd(name, "x")
        case _:
            site.store.zadd(name, {"x": 1})
    site.store.expire(name, 60)
    before = site.rows()
    answer = site.send()
    assert (answer.status_code, answer.get_json()["error"], site.runs) == (500, "idempotency_row_corrupt", [])
    assert site.rows() == before
    assert "a row is corrupt, and its request was not run" in caplog.text


def test_redis_dying_in_the_view_costs_the_client_nothing_and_the_answer_is_stored_when_it_is_back(
    make_site: MakeSite, valkey_server: Server
) -> None:
    with Proxy(valkey_server.port) as proxy:
        client = redis.Redis(port=proxy.port, retry=Retry(NoBackoff(), 0))
        site = make_site(valkey_server, client=client)

        def view() -> tuple[str, int]:
            proxy.refuse()
            return "charged", 201

        site.view(view)
        first = site.send()
        assert (first.status_code, first.text, site.row()["status"]) == (201, "charged", b"pending")
        assert site.send().status_code == 503
        proxy.refuse(False)
        wait_until(lambda: site.row()["status"] == b"completed")
        again = site.send()
        assert (again.text, again.headers["Idempotent-Replayed"], len(site.runs)) == ("charged", "true", 1)


def test_a_lost_reply_to_the_claim_is_asked_for_again_and_the_view_runs_once(
    make_site: MakeSite, valkey_server: Server
) -> None:
    with Proxy(valkey_server.port) as proxy:
        site = make_site(valkey_server, client=redis.Redis(port=proxy.port, retry=Retry(NoBackoff(), 0)))
        site.view()
        proxy.drop_replies(1)
        assert [site.send().text for _ in range(2)] == ["charge 1"] * 2
        assert site.row()["generation"] == b"1"


def test_a_restarted_server_without_the_scripts_is_no_trouble(make_site: MakeSite, valkey_server: Server) -> None:
    site = make_site(valkey_server)

    def view() -> str:
        site.store.script_flush()
        return "done"

    site.view(view)
    assert [site.send().text for _ in range(2)] == ["done"] * 2
    assert len(site.runs) == 1


def test_a_server_that_hangs_is_a_503_within_the_timeout_and_the_next_retry_is_not_locked_out(
    make_site: MakeSite, tmp_path: Path
) -> None:
    with valkey(tmp_path) as server:
        site = make_site(server, client=server.client(socket_timeout=0.3, retry=Retry(NoBackoff(), 0)))
        site.view()
        wait_until(lambda: site.send("k0").status_code == 201)

        def is_refused_in_time(key: str) -> bool:
            began = time.monotonic()
            assert site.send(key).status_code == 503
            return time.monotonic() - began < 2.5

        server.freeze()
        assert any(map(is_refused_in_time, ("k1", "k2", "k3")))  # a busy machine is late once, no timeout each time
        server.thaw()
        assert len(site.runs) == 1
        assert wait_until(lambda: site.send().status_code == 201)
        assert len(site.runs) == 2


# Recovery and waiting


def _stale(site: Site, clock: TurnedClock, **options: Any) -> None:
    """Add a view whose first attempt dies after a checkpoint, and let its lease end."""

    def view() -> tuple[str, int]:
        if len(site.runs) == 1:
            current_reservation.checkpoint("charged", {"charge": "ch_1"})
            current_reservation.outcome = "hold"
        return f"run {len(site.runs)} {current_reservation.last_checkpoint}", 201

    site.view(view, **options)
    site.send()
    clock.turn(31)


def test_recover_can_give_the_answer_instead_of_the_view(make_site: MakeSite, clock: TurnedClock) -> None:
    site = make_site()
    seen: list[Reservation] = []

    def recover(reservation: Reservation) -> Any:
        seen.append(reservation)
        assert current_reservation.generation == 2
        return {"recovered": reservation.last_checkpoint}, 202, {"Location": "/charges/ch_1"}

    _stale(site, clock, recover=recover)
    first, again = site.send(), site.send()
    assert (first.status_code, first.get_json()) == (202, {"recovered": ["charged", {"charge": "ch_1"}]})
    assert (again.status_code, again.data, again.headers["Location"]) == (202, first.data, "/charges/ch_1")
    assert (len(site.runs), seen[0].generation, seen[0].taken_over) == (1, 2, True)


def test_recover_can_have_the_view_run(make_site: MakeSite, clock: TurnedClock) -> None:
    site = make_site()
    calls: list[int] = []
    _stale(site, clock, recover=lambda reservation: calls.append(reservation.generation))
    assert [site.send().text for _ in range(2)] == ["run 2 ('charged', {'charge': 'ch_1'})"] * 2
    assert calls == [2]


def test_recover_is_not_asked_on_a_first_run(make_site: MakeSite) -> None:
    site = make_site()
    site.view(recover=lambda reservation: pytest.fail("nothing to recover"))
    assert site.send().status_code == 201


def test_recover_can_hold_the_row_for_a_person(make_site: MakeSite, clock: TurnedClock) -> None:
    site = make_site()

    def recover(reservation: Reservation) -> None:
        raise HoldForReview("ask the gateway")

    _stale(site, clock, recover=recover)
    held = site.send()
    assert (held.status_code, held.get_json()["error"]) == (409, "idempotency_key_in_progress")
    assert 30_000 - SLACK * 1000 < held.get_json()["lease_ms"] <= 30_000
    assert (site.row()["status"], len(site.runs), site.told()[-1]) == (b"pending", 1, "held_for_review")
    assert 30_000 - SLACK * 1000 < site.send().get_json()["lease_ms"] <= 30_000


@pytest.mark.parametrize("error", [LookupError, SystemExit])
def test_a_recover_that_fails_gives_the_key_up_and_the_view_does_not_run(
    error: type[BaseException], make_site: MakeSite, clock: TurnedClock
) -> None:
    site = make_site()

    def recover(reservation: Reservation) -> None:
        raise error

    _stale(site, clock, recover=recover)
    if error is SystemExit:
        with pytest.raises(SystemExit):
            site.send()
    else:
        assert site.send().status_code == 500
    assert (len(site.runs), site.row()["owner"], site.row()["generation"]) == (1, b"", b"2")


@pytest.mark.parametrize("per_view", [False, True])
def test_a_duplicate_can_wait_for_the_running_one(per_view: bool, make_site: MakeSite) -> None:
    site = make_site(WAIT_SECONDS=0 if per_view else 20)
    running, go_on = threading.Event(), threading.Event()

    def view() -> str:
        running.set()
        assert go_on.wait(20)
        return f"run {len(site.runs)}"

    options: dict[str, Any] = {"wait": 20} if per_view else {}
    site.view(view, **options)
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(site.send())) for _ in range(3)]
    threads[0].start()
    assert running.wait(20)
    site.sent.clear()
    for thread in threads[1:]:
        thread.start()
    wait_until(lambda: len(site.sent) >= 4)  # both have asked more than once
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert [answer.text for answer in answers] == ["run 1"] * 3
    assert sorted(answer.headers.get("Idempotent-Replayed", "") for answer in answers) == ["", "true", "true"]


# current_reservation


def test_the_reservation_is_falsy_where_there_is_none(site: Site) -> None:
    def look() -> str:
        assert not current_reservation
        with pytest.raises(RuntimeError, match="no reservation"):
            current_reservation.ensure_held()
        return "looked"

    site.app.add_url_rule("/plain", "plain", look, methods=["GET", "POST"])
    assert not current_reservation
    with pytest.raises(RuntimeError):
        current_reservation.ensure_held()
    with site.app.app_context():
        assert not current_reservation
    assert site.send(path="/plain").text == "looked"
    assert site.send(path="/plain", method="GET").text == "looked"


def test_the_reservation_shows_itself(site: Site) -> None:
    def view() -> dict[str, Any]:
        assert current_reservation
        current_reservation.ensure_held()
        return {
            name: getattr(current_reservation, name)
            for name in ("principal", "key", "operation", "generation", "taken_over", "held", "last_checkpoint")
        } | {"downstream": current_reservation.downstream_key("gateway")}

    site.view(view, "/shown", operation="show")
    shown = site.send(path="/shown").get_json()
    downstream = shown.pop("downstream")
    assert shown == {
        "principal": "acme",
        "key": "k1",
        "operation": "show",
        "generation": 1,
        "taken_over": False,
        "held": True,
        "last_checkpoint": None,
    }
    assert len(downstream) == 64


def test_nothing_of_a_request_is_left_for_the_next_within_one_application_context(site: Site) -> None:
    left: list[bool] = []

    @site.app.post("/plain")
    def plain() -> str:
        left.append(bool(current_reservation))
        return "plain"

    with site.app.app_context(), site.app.test_client() as client:
        assert client.post("/charges", headers=KEY).text == "charge 1"
        assert client.post("/charges", headers=KEY).text == "charge 1"
        assert client.post("/charges", headers={"Idempotency-Key": "k2"}).text == "charge 2"
        client.post("/plain", headers=KEY)
    assert left == [False]
    assert not current_reservation


def test_a_request_within_a_request_has_a_reservation_of_its_own(site: Site) -> None:
    def outer() -> str:
        before = current_reservation.key
        inner = site.send("inner").text
        return f"{before} {inner} {current_reservation.key}"

    site.view(outer, "/outer")
    assert site.send("outer", "/outer").text == "outer charge 2 outer"
    assert (site.row("inner")["status"], site.row("outer")["status"]) == (b"completed", b"completed")


def test_threads_of_one_application_see_their_own_reservations(site: Site) -> None:
    barrier = threading.Barrier(8)

    def view() -> str:
        barrier.wait(20)
        return current_reservation.key

    site.view(view, "/own")
    answers: dict[str, str] = {}

    def send(key: str) -> None:
        answers[key] = site.send(key, "/own").text

    threads = [threading.Thread(target=send, args=(f"k{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert answers == {f"k{n}": f"k{n}" for n in range(8)}


@pytest.mark.parametrize("outcome", ["kept", "released"])
def test_a_middleware_that_runs_the_same_request_again_runs_no_view_unclaimed(outcome: str, site: Site) -> None:
    """As retrying middlewares do: the environ of the first run is used for the second."""
    seen: list[bool] = []

    def view() -> tuple[str, int]:
        seen.append(bool(current_reservation))
        return "done", 500 if outcome == "released" else 200

    site.view(view, "/again")
    inner = site.app.wsgi_app

    def twice(environ: Any, start_response: Any) -> Any:
        first: Any = inner(environ, lambda *_: io.BytesIO().write)
        b"".join(first)
        first.close()
        return inner(environ, start_response)

    site.app.wsgi_app = twice  # type: ignore[method-assign]
    answer = site.send(path="/again", data=b"")
    if outcome == "released":
        assert (answer.status_code, seen, site.row()["generation"]) == (500, [True, True], b"2")
    else:
        assert (answer.text, answer.headers["Idempotent-Replayed"], seen) == ("done", "true", [True])


def test_teardown_functions_see_the_exception_and_the_next_request_is_not_disturbed(site: Site) -> None:
    site.app.config["PROPAGATE_EXCEPTIONS"] = True
    torn: list[str] = []

    @site.app.teardown_request
    def note(error: BaseException | None) -> None:
        torn.append(type(error).__name__)

    site.view(lambda: 1 / 0 if len(site.runs) == 1 else "done", "/broken")
    with pytest.raises(ZeroDivisionError):
        site.send(path="/broken")
    assert site.row()["owner"] == b""
    assert site.send(path="/broken").text == "done"
    assert torn == ["ZeroDivisionError", "NoneType"]


def test_rows_and_events_have_the_rule_and_never_the_path(make_site: MakeSite) -> None:
    site = make_site(PROTECT_ALL=True)
    blueprint = Blueprint("refunds", "refunds", url_prefix="/v1")

    @blueprint.route("/orders/<order>/refunds", methods=["POST", "PUT"])
    def refund(order: str) -> str:
        return "refunded"

    site.app.register_blueprint(blueprint)
    site.view(path="/charges/<name>")
    for key, method, path, route in (
        ("k1", "POST", "/charges/xyzzy?amount=1", "POST /charges/<name>"),
        ("k2", "PUT", "/v1/orders/xyzzy/refunds", "PUT /v1/orders/<order>/refunds"),
    ):
        for _ in range(2):
            site.send(key, path, method)
        assert site.row(key)["route"].decode() == route
        assert [event.route for event in site.events] == [route] * 3
        assert "xyzzy" not in str(site.events)
        site.events.clear()


def test_a_long_view_keeps_its_lease(make_site: MakeSite, valkey_server: Server) -> None:
    site = make_site(valkey_server, policy=Policy(lease=0.3, retention=60))

    def view() -> str:
        first = expires_at(site.store, site.row_name())
        wait_until(lambda: expires_at(site.store, site.row_name()) > first + 600 and current_reservation.held)
        return "done"

    site.view(view)
    assert (site.send().text, site.row()["generation"]) == ("done", b"1")


def test_a_view_that_was_fenced_out_answers_its_own_client_and_changes_nothing(
    make_site: MakeSite, clock: TurnedClock, caplog: pytest.LogCaptureFixture
) -> None:
    site = make_site()

    def view() -> str:
        mine = f"run {len(site.runs)}"
        if mine == "run 1":
            clock.turn(31)
            assert site.send().text == "run 2"
        return mine

    site.view(view)
    assert site.send().text == "run 1"
    assert site.row()["response_body"] == b"run 2"
    assert site.send().text == "run 2"
    assert site.told().count("fenced") == 1
    assert "may have been done twice" in caplog.text
