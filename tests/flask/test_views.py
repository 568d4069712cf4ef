"""The kinds of views that `protect` takes, and its options for each."""

from __future__ import annotations

from flask import Blueprint, request
from flask.views import MethodView

from idemredis.flask import current_reservation
from tests.support.site import MakeSite


def test_a_view_without_a_required_key_runs_unprotected_and_with_one_is_protected(make_site: MakeSite) -> None:
    site = make_site(principal=lambda: request.headers.get("Authorization"))
    site.view(lambda: str(bool(current_reservation)), required=False)
    answers = [site.send(None) for _ in range(2)]
    assert [(answer.text, answer.headers["Idempotency-Status"]) for answer in answers] == [("False", "unprotected")] * 2
    assert site.sent == []
    assert [site.send(headers=[("Authorization", "a")]).text for _ in range(2)] == ["True"] * 2
    assert (site.send("").status_code, site.send().status_code, len(site.runs)) == (401, 401, 3)


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
