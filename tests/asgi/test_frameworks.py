"""`protect` in Litestar, Quart and Django: ordinary responses for refusals and replays, in threads and on the loop."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from django.urls import path as django_path
from litestar import Litestar
from litestar import post as litestar_post
from litestar.params import FromPath
from quart import Quart

from idemredis import StoredResponse
from idemredis.asgi import IdempotencyMiddleware, current_reservation
from tests.support.asgi_site import AsgiSite, Wire, answer_of
from tests.support.doors import MakeAsgiSite
from tests.support.frameworks import build
from tests.support.frameworks.in_django import serve as serve_django


def _built(site: AsgiSite, framework: str, sync: bool = False) -> Any:
    def charge() -> dict[str, Any]:
        site.runs.append(current_reservation.key)
        return {"run": len(site.runs), "key": current_reservation.key}

    return build(framework, site.idempotency, charge, sync)


@pytest.fixture(params=["litestar", "quart", "django"])
def framework(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def _send(site: AsgiSite, app: Any, key: str | None = "k1", **options: Any) -> Any:
    scope, pieces = site.request(key, "/charges/7", headers=[("Host", "shop")], **options)

    async def serve() -> Wire:
        wire = Wire(pieces)
        await asyncio.wait_for(app(scope, wire.receive, wire.send), 30)
        return wire

    return answer_of(site.loop.run(serve()).messages)


@pytest.mark.parametrize("sync", [False, True])
def test_an_endpoint_runs_once_and_refusals_and_replays_are_no_errors_of_the_application(
    sync: bool, framework: str, make_asgi_site: MakeAsgiSite, caplog: pytest.LogCaptureFixture
) -> None:
    site = make_asgi_site()
    app = IdempotencyMiddleware(_built(site, framework, sync), site.idempotency)
    caplog.set_level(logging.ERROR)
    first, again = _send(site, app), _send(site, app)
    assert first.status_code in (200, 201)
    assert (first.get_json()["run"], first.get_json()["key"]) == (1, "k1")
    assert sync or first.get_json()["body"] == '{"amount": 1000}'
    assert (again.status_code, again.data) == (first.status_code, first.data)
    assert again.headers["Idempotent-Replayed"] == "true"
    assert _send(site, app, json={"amount": 2}).get_json()["error"] == "idempotency_key_reused"
    assert _send(site, app, None).get_json()["error"] == "idempotency_key_required"
    assert len(site.runs) == 1
    ours = [record for record in caplog.records if record.name != "asyncio"]
    assert [record.getMessage() for record in ours] == []


@pytest.mark.parametrize("size", [100_000, 1_000_000])
def test_a_large_body_reaches_the_endpoint_whole(size: int, framework: str, make_asgi_site: MakeAsgiSite) -> None:
    site = make_asgi_site()
    if framework == "litestar":
        size = min(size, 9_000_000)
    app = IdempotencyMiddleware(_built(site, framework), site.idempotency)
    body = b"0123456789" * (size // 10)
    assert _send(site, app, data=body).get_json()["body"] == body.decode()


def test_the_route_is_a_template_or_the_name_of_the_endpoint(framework: str, make_asgi_site: MakeAsgiSite) -> None:
    site = make_asgi_site()
    _send(site, IdempotencyMiddleware(_built(site, framework), site.idempotency))
    route = site.row()["route"].decode()
    assert "7" not in route.removesuffix(".charge")
    if framework == "litestar":
        assert route == "POST /charges/{order}"
    else:
        assert "charge" in route


def test_an_endpoint_may_return_a_stored_response(framework: str, make_asgi_site: MakeAsgiSite) -> None:
    site = make_asgi_site()
    stored = StoredResponse(202, (("Content-Type", "text/x-own"), ("Location", "/7")), b"found")

    def recover(r: Any) -> StoredResponse:
        return stored

    async def endpoint(*args: Any, **kwargs: Any) -> Any:
        return stored

    if framework == "litestar":

        @litestar_post("/charges/{order:str}")
        @site.idempotency.protect
        async def charge(order: FromPath[str]) -> Any:
            return stored

        app: Any = Litestar([charge], openapi_config=None)
    elif framework == "quart":
        app = Quart("shop")
        app.post("/charges/<order>")(site.idempotency.protect(endpoint))
    else:
        app = serve_django([django_path("charges/<str:order>", site.idempotency.protect(endpoint))])
    for _ in range(2):
        answer = _send(site, IdempotencyMiddleware(app, site.idempotency))
        assert (answer.status_code, answer.data, answer.headers["Location"]) == (202, b"found", "/7")
        assert answer.headers["Content-Type"] == "text/x-own"


def test_protect_all_claims_before_another_application_routes(framework: str, make_asgi_site: MakeAsgiSite) -> None:
    site = make_asgi_site()
    app = IdempotencyMiddleware(_built(site, framework), site.idempotency, protect_all=True)
    assert [_send(site, app).get_json()["run"] for _ in range(2)] == [1, 1]
    assert site.told() == ["claimed", "completed", "replayed"]
