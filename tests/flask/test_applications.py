"""Several applications, and setting one up more than once."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from flask import Flask, Response, abort, current_app, request
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from idemredis import ConfigurationError
from idemredis.flask import Idempotency, current_reservation
from tests.support.site import MakeSite, Site
from tests.support.started import Servers

KEY = {"Idempotency-Key": "k1"}


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


SPECIFICATION = {
    "openapi": "3.0.0",
    "info": {"title": "shop", "version": "1"},
    "paths": {
        "/charges": {
            "post": {
                "operationId": "charge",
                "requestBody": {
                    "content": {
                        "application/json": {
                            "schema": {"type": "object", "properties": {"amount": {"type": "integer"}}},
                        }
                    }
                },
                "responses": {"201": {"description": "made"}},
            }
        }
    },
}


@pytest.mark.filterwarnings("ignore")
def test_connexion_serves_protected_views_although_it_takes_the_application_before_the_extension_is_set_up(
    make_site: MakeSite,
) -> None:
    connexion = pytest.importorskip("connexion")
    outer = connexion.FlaskApp("shop")
    site = make_site(app=outer.app)

    @site.idempotency.protect
    def charge(body: dict[str, Any]) -> Any:
        site.runs.append(current_reservation.key)
        return {"id": len(site.runs), "amount": body["amount"]}, 201

    outer.add_api(SPECIFICATION, resolver=connexion.Resolver(lambda name: charge))

    def send(key: str | None = "k1", **body: Any) -> Any:
        return client.post("/charges", json=body, headers={} if key is None else {"Idempotency-Key": key})

    with outer.test_client() as client:
        first, again = send(amount=5), send(amount=5)
        assert (first.status_code, again.status_code, first.json()) == (201, 201, {"id": 1, "amount": 5})
        assert (again.content, again.headers["idempotent-replayed"]) == (first.content, "true")
        reused, missing = send(amount=6), send(None, amount=5)
        assert (reused.status_code, reused.json()["error"]) == (409, "idempotency_key_reused")
        assert (missing.status_code, missing.json()["error"]) == (400, "idempotency_key_required")
        assert send("wrong", amount="five").status_code == 400  # by Connexion, which asks before the view
        big = [send("big", amount=7, note="x" * 400_000) for _ in range(2)]
        assert [answer.json() for answer in big] == [{"id": 2, "amount": 7}] * 2
    assert (site.runs, len(site.rows())) == (["k1", "big"], 2)
