"""Mistakes in setting up: found at the start or at the first request, each with its fix; and refusals of one's own."""

from __future__ import annotations

import functools
import json
import logging
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from flask import Blueprint, Flask, abort, jsonify, make_response, request
from flask.views import MethodView

from idemredis import ConfigurationError, Ledger, Policy
from idemredis.flask import Idempotency, current_reservation
from idemredis.operating.in_flask import commands
from tests.support.site import MakeSite, Site
from tests.support.started import Servers

NOTHING = "protects nothing"


def _app(**settings: Any) -> Flask:
    app = Flask("shop")
    app.config.update({"IDEMREDIS_URL": "redis://127.0.0.1:1/0"})
    app.config.update({f"IDEMREDIS_{name}": value for name, value in settings.items()})
    return app


def _hiding(view: Callable[..., Any]) -> Callable[..., Any]:
    """As a decorator that does without functools.wraps."""
    return lambda *args, **kwargs: view(*args, **kwargs)


def _named(view: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(view)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return view(*args, **kwargs)

    return wrapper


# Protected functions that no route serves


def test_protect_above_the_route_is_named_at_the_first_request(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    @site.idempotency.protect
    @site.app.post("/above")
    def create_order() -> str:
        return "made"

    for _ in range(2):
        site.send()
    (record,) = [record for record in caplog.records if NOTHING in record.getMessage()]
    assert record.levelno == logging.WARNING
    assert f"{__name__}." in record.getMessage()
    assert "create_order" in record.getMessage()
    assert "put @protect below the route's decorator" in record.getMessage()


@pytest.mark.parametrize("methods", [("GET",), ("GET", "PUT")])
def test_protect_of_a_view_that_is_served_for_other_methods_only_is_named_at_the_first_request(
    methods: tuple[str, ...], make_site: MakeSite, caplog: pytest.LogCaptureFixture
) -> None:
    site = make_site(METHODS=("POST",))

    class Orders(MethodView):
        get = site.idempotency.protect(_lasting)

        @site.idempotency.protect
        def post(self) -> str:
            return "made"

    def read_order() -> str:
        return "read"

    site.view()
    site.app.add_url_rule("/orders", view_func=Orders.as_view("orders"))
    site.app.add_url_rule("/read", "read", site.idempotency.protect(read_order), methods=methods)
    for _ in range(2):
        site.send()
    named = [record.getMessage() for record in caplog.records if NOTHING in record.getMessage()]
    assert sorted("read_order" in message for message in named) == [False, True]
    assert all("IDEMREDIS_METHODS does not have" in message for message in named)
    of_class = next(message for message in named if "_lasting" in message)
    assert "served for GET only" in of_class


@pytest.mark.parametrize("decorator", [lambda view: view, _hiding, _named, functools.partial])
def test_a_protected_function_that_a_route_serves_is_not_named(
    decorator: Callable[..., Any], site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    class Whole(MethodView):
        decorators = [site.idempotency.protect, decorator]  # noqa: RUF012  # as Flask declares it

        def post(self) -> str:
            return "made"

    class Single(MethodView):
        @site.idempotency.protect
        def post(self) -> str:
            return "made"

        put = decorator(site.idempotency.protect(lambda self: "put"))

    blueprint = Blueprint("orders", __name__)
    view = decorator(site.idempotency.protect(lambda: "made"))
    blueprint.add_url_rule("/within", "within", view, methods=["POST"])
    site.app.register_blueprint(blueprint)
    site.app.add_url_rule("/whole", view_func=Whole.as_view("whole"))
    site.app.add_url_rule("/single", view_func=Single.as_view("single"))
    assert site.send().status_code == 201
    assert NOTHING not in caplog.text


def test_a_function_that_one_application_of_several_serves_is_not_named_by_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    idempotency = Idempotency(principal="acme")
    view = idempotency.protect(lambda: "made")
    for serves in (True, False):
        app = Flask("shop")
        app.config["IDEMREDIS_URL"] = "memory://"
        idempotency.init_app(app)
        if serves:
            app.add_url_rule("/", "view", view, methods=["POST"])
        app.test_client().get("/")
    assert NOTHING not in caplog.text


class _Odd:
    """A callable whose attributes cannot be looked at, such as a proxy that stands for nothing yet."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("nothing to stand for")

    def __call__(self) -> str:
        return "odd"


@pytest.mark.parametrize("protect_all", [False, True])
def test_what_a_view_happens_to_hold_is_no_trouble(
    protect_all: bool, make_site: MakeSite, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a factory that imports within itself: the view's closure then has proxies, clients and classes."""
    from flask import current_app, g, session

    site = make_site(PROTECT_ALL=protect_all)
    held: list[Any] = [request, current_app, g, session, _Odd(), object(), int]

    def holding(thing: Any) -> Callable[[], Any]:
        def view() -> str:
            return str(thing is not None)

        return view

    class Decorated:
        def __init__(self, thing: Any) -> None:
            self.thing = thing

        def __call__(self) -> str:
            return "True"

    for number, thing in enumerate(held):
        for kind, view in (("closure", holding(thing)), ("object", Decorated(thing))):
            site.app.add_url_rule(f"/{kind}/{number}", f"{kind}{number}", view, methods=["POST"])
    listed = site.app.test_cli_runner().invoke(commands, ["routes"])
    assert listed.exception is None
    assert len([line for line in listed.output.splitlines() if "/closure/" in line]) == len(held)
    for number in range(len(held)):
        for kind in ("closure", "object"):
            assert site.send(f"{kind}{number}", f"/{kind}/{number}").text == "True"
    assert len(site.rows()) == (2 * len(held) if protect_all else 0)
    assert NOTHING not in caplog.text


# PROTECT_ALL and decorators that hide marks


@pytest.mark.parametrize("wrap", [_hiding, lambda view: _hiding(_hiding(view)), lambda view: functools.partial(view)])
def test_the_options_of_a_view_that_a_decorator_hides_are_found(wrap: Callable[..., Any], make_site: MakeSite) -> None:
    site = make_site(PROTECT_ALL=True)
    view = site.idempotency.protect(required=False, operation="own")(lambda: current_reservation.operation)
    site.app.add_url_rule("/hidden", "hidden", wrap(view), methods=["POST"])
    assert site.send(None, "/hidden").status_code == 200
    assert [site.send(path="/hidden").text for _ in range(2)] == ["own"] * 2
    assert list(site.rows()) == [site.row_name(operation="own").encode()]


def test_an_exemption_that_a_decorator_hides_is_refused_with_the_fix(
    make_site: MakeSite, caplog: pytest.LogCaptureFixture
) -> None:
    site = make_site(PROTECT_ALL=True)
    site.app.add_url_rule("/hidden", "hidden", _hiding(site.idempotency.exempt(lambda: "run")), methods=["POST"])
    site.app.add_url_rule("/named", "named", _named(site.idempotency.exempt(lambda: "run")), methods=["POST"])
    site.app.add_url_rule("/two", "two", _two(site.idempotency), methods=["POST"])
    assert site.send(None, "/named").text == "run"
    for path in ("/hidden", "/two"):
        assert site.send(path=path).status_code == 500
        assert f"a decorator of '{path[1:]}' hides" in caplog.text
    assert "functools.wraps" in caplog.text
    assert site.rows() == {}


def _run() -> str:
    return "run"


def _two(idempotency: Idempotency) -> Callable[[], Any]:
    one, other = (idempotency.protect(operation=name)(_run) for name in ("one", "other"))
    return lambda: one() or other()


# Routes


def test_the_routes_command_says_of_every_unsafe_route_how_it_is_protected(make_site: MakeSite) -> None:
    site = make_site()
    app, idempotency = site.app, site.idempotency

    class Partly(MethodView):
        put = idempotency.protect(lambda self: "put")

        def post(self) -> str:
            return "post"

    site.view()
    app.add_url_rule("/plain/<name>", "plain", lambda name: name, methods=["GET", "DELETE"])
    app.add_url_rule("/exempt", "exempt", idempotency.exempt(lambda: "run"), methods=["POST"])
    app.add_url_rule("/hidden", "hidden", _hiding(idempotency.protect(lambda: "run")), methods=["POST"])
    app.add_url_rule("/partly", view_func=Partly.as_view("partly"))
    app.add_url_rule("/seen", "seen", lambda: "seen")
    lines = app.test_cli_runner().invoke(commands, ["routes"]).output.splitlines()
    told = {" ".join(line.split()[:2]): line.split(maxsplit=3)[3] for line in lines}
    assert told == {
        **{f"{method} /charges": "protected" for method in ("POST", "PUT", "PATCH", "DELETE")},
        "DELETE /plain/<name>": "NOT protected",
        "POST /exempt": "exempt",
        "POST /hidden": "protected",
        "POST /partly": "NOT protected",
        "PUT /partly": "protected",
    }


def test_the_routes_command_knows_protect_all_blueprints_and_the_mode(make_site: MakeSite) -> None:
    site = make_site(PROTECT_ALL=True, MODE="observe")
    app, idempotency = site.app, site.idempotency
    opened = idempotency.exempt(Blueprint("open", __name__, url_prefix="/open"))
    child = Blueprint("child", __name__, url_prefix="/child")
    child.add_url_rule("/", "run", lambda: "run", methods=["POST"])
    opened.register_blueprint(child)
    app.register_blueprint(opened)
    app.add_url_rule("/plain", "plain", lambda: "run", methods=["POST"])
    app.add_url_rule("/hidden", "hidden", _hiding(idempotency.exempt(lambda: "run")), methods=["POST"])
    first, *lines = app.test_cli_runner().invoke(commands, ["routes"]).output.splitlines()
    assert "IDEMREDIS_MODE is 'observe'" in first
    told = {line.split()[1]: line.split(maxsplit=3)[3] for line in lines}
    assert (told["/open/child/"], told["/plain"]) == ("exempt", "protected")
    assert told["/hidden"].startswith("UNCLEAR")
    listed = json.loads(app.test_cli_runner().invoke(commands, ["routes", "--json"]).output)
    assert {"method": "POST", "rule": "/plain", "endpoint": "plain", "protection": "protected"} in listed


# Settings and options


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://localhost/shop", "number of a database"),
        ("redis://localhost/0/1", "number of a database"),
        ("rediss://localhost/-1", "number of a database"),
        ("redis://:pass/word@localhost/0", "percent-encoded"),
        ("redis://localhost/0?sockettimeout=1", "option 'sockettimeout', which is unknown"),
        ("unix:///tmp/redis?database=1", "option 'database', which is unknown"),
        ("redis://localhost/0?db=many", "'db'"),
    ],
)
def test_a_url_with_a_wrong_part_is_refused_at_the_start(url: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as refused:
        Idempotency(_app(URL=url), principal="acme")
    assert "IDEMREDIS_URL" in str(refused.value)
    assert "word" not in str(refused.value).replace("password", "")


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost",
        "redis://localhost/",
        "redis://user:p%2Fw@localhost:6380/15",
        "rediss://localhost/1?ssl_cert_reqs=none&health_check_interval=3",
        "unix:///tmp/redis.sock?db=2&client_name=shop",
        "redis://localhost/0?protocol=3&max_connections=50",
    ],
)
def test_a_url_with_options_that_redis_py_knows_is_used(url: str) -> None:
    Idempotency(_app(URL=url), principal="acme")


def test_a_lease_that_does_not_fit_the_retention_is_refused_where_it_can_be_known() -> None:
    early = Idempotency(principal="acme")
    view = early.protect(lease=120)(_lasting)
    with pytest.raises(ConfigurationError, match=r"protect\(lease=120\) of .*_lasting .*retention of 60 s.*RETENTION"):
        early.init_app(_app(LEASE_SECONDS=5, RETENTION_SECONDS=60))
    early.init_app(_app())
    assert view is not _lasting
    late = Idempotency(_app(LEASE_SECONDS=5, RETENTION_SECONDS=60), principal="acme")
    for options in ({"lease": 120}, {"lease": 60}):
        with pytest.raises(ConfigurationError, match="retention of 60 s"):
            late.protect(**options)  # type: ignore[call-overload]
    late.protect(lease=59)


def _lasting() -> str:
    return "made"


def test_a_lease_that_does_not_fit_a_ledger_is_refused_at_the_decoration(every_key_left_expires: Servers) -> None:
    ledger = Ledger(every_key_left_expires.get("fakeredis").client(), Policy(lease=5, retention=60))
    with pytest.raises(ConfigurationError, match="retention of 60 s"):
        Idempotency(principal="acme", ledger=ledger).protect(lease=60)


@pytest.mark.parametrize("routing", ["host_matching", "subdomain_matching"])
def test_an_application_that_routes_by_host_must_tell_hosts_apart(routing: str, make_site: MakeSite) -> None:
    options = {"host_matching": True, "static_host": "a.test"} if routing == "host_matching" else {routing: True}
    make: Any = Flask
    with pytest.raises(ConfigurationError, match="IDEMREDIS_FINGERPRINT_HEADERS must have 'host' in it; add it"):
        make_site(app=make("shop", **options))
    site = make_site(app=make("shop", **options), FINGERPRINT_HEADERS=("content-type", "Host"))
    view = site.idempotency.protect(lambda **_: request.host)
    own = site.idempotency.protect(fingerprint=lambda: 1)(lambda **_: request.host)
    where: dict[str, Any] = {"host": "<name>.test"} if routing == "host_matching" else {"subdomain": "<name>"}
    if routing == "subdomain_matching":
        site.app.config["SERVER_NAME"] = "test"
    site.app.add_url_rule("/hosts", "hosts", view, methods=["POST"], **where)
    site.app.add_url_rule("/own", "own", own, methods=["POST"], **where)
    for path in ("/hosts", "/own"):
        assert site.send(path, path, base_url="http://a.test").text == "a.test"
        assert site.send(path, path, base_url="http://b.test").get_json()["error"] == "idempotency_key_reused"


class _Orders(MethodView):
    pass


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("charge", r"protect\(operation='charge'\)"),
        (7, "not 7"),
        (_Orders, r"_Orders `decorators = \[idempotency.protect\]`"),
        (Blueprint("b", __name__), "options by name"),
    ],
)
@pytest.mark.parametrize("later", [False, True])
def test_protect_of_what_is_no_function_says_what_was_meant(given: Any, message: str, later: bool) -> None:
    idempotency = Idempotency(principal="acme")
    with pytest.raises(ConfigurationError, match=message):
        (idempotency.protect(required=False) if later else idempotency.protect)(given)


def test_observers_that_would_be_ignored_are_refused(every_key_left_expires: Servers) -> None:
    ledger = Ledger(every_key_left_expires.get("fakeredis").client())
    with pytest.raises(ConfigurationError, match="pass observers to the Ledger"):
        Idempotency(principal="acme", ledger=ledger, observers=[print])


# Refusals in the application's own shape


def _envelope(code: str, status: int, message: str, facts: dict[str, int]) -> Any:
    return {"ok": False, "code": code, "text": message, **facts}, status, {"X-Shop": "1"}


@pytest.fixture
def make_shaped(make_site: MakeSite) -> Callable[..., Site]:
    def make(problem: Callable[..., Any], **options: Any) -> Site:
        site = make_site(**options)
        site.idempotency.problem = problem
        site.view()
        return site

    return make


def test_a_problem_function_is_taken_at_construction(every_key_left_expires: Servers) -> None:
    app = Flask("shop")
    client = every_key_left_expires.get("fakeredis").client()
    idempotency = Idempotency(app, principal="acme", client=client, problem=_envelope)
    app.add_url_rule("/", "charge", idempotency.protect(lambda: "made"), methods=["POST"])
    answer = app.test_client().post("/")
    assert answer.get_json()["code"] == "idempotency_key_required"
    with pytest.raises(ConfigurationError, match="problem must be a function"):
        Idempotency(principal="acme", problem="envelope")  # type: ignore[arg-type]


@pytest.mark.parametrize("protocol", ["default", "ietf"])
def test_refusals_have_the_shape_that_the_application_gives_them(
    protocol: str, make_shaped: Callable[..., Site]
) -> None:
    site = make_shaped(_envelope, PROTOCOL=protocol)
    site.send()
    reused, missing = site.send(json={"amount": 2}), site.send(None)
    assert (reused.status_code, reused.get_json()["code"]) == (
        409 if protocol == "default" else 422,
        "idempotency_key_reused",
    )
    assert (missing.status_code, missing.get_json()["ok"], missing.headers["X-Shop"]) == (400, False, "1")
    assert site.send().text == "charge 1"  # a replay is no refusal
    assert len(site.runs) == 1


def test_a_refusal_keeps_its_numbers_and_its_retry_after(make_shaped: Callable[..., Site]) -> None:
    site = make_shaped(_envelope)

    def held() -> str:
        current_reservation.outcome = "hold"
        return "held"

    site.view(held, "/held")
    site.send(path="/held")
    answer = site.send(path="/held")
    assert answer.get_json().keys() == {"ok", "code", "text", "lease_ms", "retry_after_ms"}
    assert answer.headers["Retry-After"] == "2"
    site.idempotency.problem = lambda *_: ("later", 409, {"Retry-After": "9"})
    assert site.send(path="/held").headers.getlist("Retry-After") == ["9"]


def test_a_refusal_of_ones_own_shape_links_to_the_documentation_too(make_shaped: Callable[..., Site]) -> None:
    site = make_shaped(_envelope, PROTOCOL="ietf", DOCS_URL="https://shop.example/keys")
    site.idempotency.problem = lambda *_: ("no", 400, {"Link": "</why>"})
    links = site.send(None).headers.getlist("Link")
    assert links == ["</why>", '<https://shop.example/keys>; rel="describedby"']


async def _awaited(code: str, status: int, message: str, facts: dict[str, int]) -> Any:
    return jsonify(code=code), status


def _aborting(code: str, status: int, message: str, facts: dict[str, int]) -> Any:
    abort(make_response({"code": code}, status))


@pytest.mark.parametrize("problem", [_awaited, _aborting])
def test_a_problem_function_may_do_what_a_view_may_do(
    problem: Callable[..., Any], make_shaped: Callable[..., Site]
) -> None:
    answer = make_shaped(problem).send(None)
    assert (answer.status_code, answer.get_json()) == (400, {"code": "idempotency_key_required"})


@pytest.mark.parametrize("problem", [lambda *_: 1 / 0, lambda *_: None, lambda: "no arguments"])
def test_a_problem_function_that_fails_costs_the_client_nothing(
    problem: Callable[..., Any], make_shaped: Callable[..., Site], caplog: pytest.LogCaptureFixture
) -> None:
    site = make_shaped(problem)
    answer = site.send(None)
    assert (answer.status_code, answer.get_json()["error"]) == (400, "idempotency_key_required")
    assert "problem= failed for idempotency_key_required" in caplog.text
    assert site.runs == []


def test_the_deadline_of_the_settings_holds_for_a_client_of_ones_own_too() -> None:
    """Its server takes connections and never replies."""
    app = Flask("shop")
    app.config.update(IDEMREDIS_SOCKET_TIMEOUT_SECONDS=0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = redis.Redis(port=silent.getsockname()[1], socket_timeout=None)
        idempotency = Idempotency(app, principal="acct_1", client=client)
        app.add_url_rule("/charges", view_func=idempotency.protect(lambda: "charged"), methods=["POST"])
        began = time.monotonic()
        answer = app.test_client().post("/charges", headers={"Idempotency-Key": "k1"})
        assert (answer.status_code, time.monotonic() - began < 5.0) == (503, True)
