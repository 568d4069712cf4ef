"""`IDEMREDIS_PROTECT_ALL`: every unsafe view that is not exempt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask import Blueprint, abort, request
from flask.views import MethodView

from idemredis.flask import current_reservation
from tests.support.site import MakeSite, Site

UNSAFE = ("POST", "PUT", "PATCH", "DELETE")


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
