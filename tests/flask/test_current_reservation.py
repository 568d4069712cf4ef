"""`current_reservation` in views, and what a request leaves behind."""

from __future__ import annotations

import io
from typing import Any

import pytest
from flask import Blueprint

from idemredis.flask import current_reservation
from tests.support.site import MakeSite, Site

KEY = {"Idempotency-Key": "k1"}


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
