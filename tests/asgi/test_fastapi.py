"""FastAPI: the guard among dependencies, what a 422 does, overrides, OpenAPI, and the layers of the application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import StreamingResponse
from openapi_spec_validator import validate
from pydantic import BaseModel

from idemredis import AsyncReservation, ConfigurationError, StoredResponse
from idemredis.asgi import Idempotency, IdempotencyMiddleware, current_reservation
from idemredis.fastapi import guard, responses
from tests.support.asgi_site import AsgiSite, Wire, scope_of
from tests.support.clock import TurnedClock
from tests.support.doors import MakeAsgiSite

Add = Callable[..., Any]


class Charge(BaseModel):
    amount: int


def _account(authorization: Annotated[str | None, Header()] = None) -> str:
    if authorization is None:
        raise HTTPException(401, "who are you?")
    return authorization


@pytest.fixture
def shop(make_asgi_site: MakeAsgiSite) -> AsgiSite:
    """A FastAPI application whose principal is a dependency."""
    return make_asgi_site("guard", principal=lambda: pytest.fail("the guard has a principal of its own"))


def _guarded(site: AsgiSite, **options: Any) -> Any:
    return guard(site.idempotency, **{"principal": _account, **options})


def _app(site: AsgiSite) -> FastAPI:
    assert isinstance(site.app, FastAPI)
    return site.app


def _send(site: AsgiSite, key: str | None = "k1", who: str | None = "alice", **options: Any) -> Any:
    headers = [] if who is None else [("Authorization", who)]
    return site.send(key, **{"headers": headers, **options})


def _post(site: AsgiSite, endpoint: Callable[..., Any], claim: Any, path: str = "/charges", **options: Any) -> None:
    endpoint.__annotations__["claim"] = Annotated[AsyncReservation, Depends(claim)]
    _app(site).post(path, **{"status_code": 201, **options})(endpoint)


def test_the_guard_claims_after_authentication_for_the_account_that_it_found(shop: AsgiSite) -> None:
    async def charge(body: Charge, claim: Any) -> dict[str, Any]:
        shop.runs.append(1)
        assert claim is current_reservation or claim == current_reservation
        return {"run": len(shop.runs), "by": claim.principal}

    _post(shop, charge, _guarded(shop))
    assert _send(shop, who=None).status_code == 401
    assert shop.rows() == {}
    first, again = _send(shop), _send(shop)
    assert first.get_json() == again.get_json() == {"run": 1, "by": "alice"}
    assert again.headers["Idempotent-Replayed"] == "true"
    assert _send(shop, who="bob").get_json() == {"run": 2, "by": "bob"}


def test_what_stands_before_the_guard_runs_outside_the_claim_and_what_stands_after_it_inside(shop: AsgiSite) -> None:
    order: list[str] = []

    def before() -> None:
        order.append(f"before {shop.row('k1', 'alice').get('status')!r}")

    async def after() -> AsyncIterator[None]:
        order.append(f"after {shop.row('k1', 'alice')['status']!r}")
        yield
        order.append(f"ended {shop.row('k1', 'alice')['status']!r}")

    async def charge(first: Any, claim: Any, then: Any) -> dict[str, Any]:
        return {}

    charge.__annotations__["first"] = Annotated[None, Depends(before)]
    charge.__annotations__["then"] = Annotated[None, Depends(after)]
    _post(shop, charge, _guarded(shop))
    for _ in range(2):
        assert _send(shop).status_code == 201
    assert order == ["before None", "after b'pending'", "ended b'completed'", "before b'completed'"]


def test_a_dependency_of_the_scope_of_its_function_ends_inside_the_claim(shop: AsgiSite) -> None:
    """A commit in one that yields counts then: it ends before the response is made."""
    failing = [LookupError("the commit failed")]

    async def session() -> AsyncIterator[None]:
        yield
        if failing:
            raise failing.pop()

    async def charge(claim: Any, db: Any) -> dict[str, Any]:
        shop.runs.append(1)
        return {"run": len(shop.runs)}

    charge.__annotations__["db"] = Annotated[None, Depends(session, scope="function")]
    _post(shop, charge, _guarded(shop))
    assert [_send(shop).status_code for _ in range(3)] == [500, 201, 201]
    assert len(shop.runs) == 2


def test_malformed_json_is_refused_before_the_claim_and_a_wrong_model_inside_it(shop: AsgiSite) -> None:
    async def charge(body: Charge, claim: Any) -> dict[str, Any]:
        return {}

    _post(shop, charge, _guarded(shop))
    malformed: dict[str, Any] = {"data": b'{"amount":', "content_type": "application/json"}
    assert [_send(shop, **malformed).status_code for _ in range(2)] == [422, 422]
    assert shop.rows() == {}
    wrong = [_send(shop, json={"amount": "many"}) for _ in range(2)]
    assert [answer.status_code for answer in wrong] == [422, 422]
    assert ["Idempotent-Replayed" in answer.headers for answer in wrong] == [False, True]
    assert wrong[0].data == wrong[1].data


@pytest.mark.parametrize("required", [True, False])
def test_without_a_key_the_refusal_is_ours_and_the_endpoint_runs_only_if_it_is_not_required(
    required: bool, shop: AsgiSite
) -> None:
    async def charge(claim: Any) -> dict[str, Any]:
        await claim.checkpoint("charged")
        return {"claimed": bool(claim), "key": claim.downstream_key("gateway")}

    _post(shop, charge, _guarded(shop, required=required))
    answer = _send(shop, None)
    if required:
        assert (answer.status_code, answer.get_json()["error"]) == (400, "idempotency_key_required")
    else:
        assert (answer.status_code, answer.get_json()["claimed"]) == (201, False)
        assert answer.headers["Idempotency-Status"] == "unprotected"
        assert _send(shop, None).get_json()["key"] != answer.get_json()["key"]


def test_a_safe_method_passes_on_a_guarded_route_with_a_stand_in(shop: AsgiSite) -> None:
    async def look(claim: Any) -> dict[str, Any]:
        await claim.checkpoint("looked")
        claim.ensure_held()
        return {"claimed": bool(claim), "is_one": isinstance(claim, AsyncReservation)}

    look.__annotations__["claim"] = Annotated[AsyncReservation, Depends(_guarded(shop))]
    _app(shop).get("/charges")(look)
    assert _send(shop, method="GET").get_json() == {"claimed": False, "is_one": True}
    assert shop.sent == []


def test_a_plain_endpoint_saves_checkpoints_from_its_thread(shop: AsgiSite) -> None:
    def charge(claim: Any) -> dict[str, Any]:
        return {"saved": claim.checkpoint("charged", {"id": 1}), "current": current_reservation.key}

    _post(shop, charge, _guarded(shop))
    assert _send(shop).get_json() == {"saved": None, "current": "k1"}
    assert shop.row("k1", "alice")["checkpoint"] == b"charged"


def test_a_guard_of_a_router_guards_all_of_its_endpoints_and_claims_once(shop: AsgiSite) -> None:
    claim = _guarded(shop)
    router = APIRouter(prefix="/v1", dependencies=[Depends(claim)])

    async def charge(order: str, claim: Any) -> dict[str, Any]:
        return {"route": claim.route}

    charge.__annotations__["claim"] = Annotated[AsyncReservation, Depends(_guarded(shop))]
    router.post("/orders/{order}/charges")(charge)
    _app(shop).include_router(router, prefix="/api")
    answer = _send(shop, path="/api/v1/orders/7/charges")
    assert answer.get_json() == {"route": "POST /api/v1/orders/{order}/charges"}
    assert shop.told() == ["claimed", "completed"]


def test_a_streamed_endpoint_can_be_guarded(shop: AsgiSite) -> None:
    async def charge(claim: Any) -> StreamingResponse:
        async def pieces() -> AsyncIterator[bytes]:
            for n in range(3):
                yield b"%d" % n

        return StreamingResponse(pieces())

    _post(shop, charge, _guarded(shop))
    assert [_send(shop).data for _ in range(2)] == [b"012"] * 2


def test_the_guards_own_fingerprint_is_a_dependency_of_the_parsed_body(shop: AsgiSite) -> None:
    def of(body: Charge) -> int:
        return body.amount

    async def charge(body: Charge, claim: Any) -> dict[str, Any]:
        shop.runs.append(1)
        return {"run": len(shop.runs)}

    _post(shop, charge, _guarded(shop, fingerprint=of))
    assert _send(shop, data=b'{"amount": 5}', content_type="application/json").get_json() == {"run": 1}
    assert _send(shop, data=b'{"amount":5,"x":1}', content_type="application/json").get_json() == {"run": 1}
    assert _send(shop, json={"amount": 6}).get_json()["error"] == "idempotency_key_reused"


@pytest.mark.parametrize("made", ["stored", "response", "value", "pair", "tombstone", "nothing"])
def test_recover_gives_the_response_of_the_attempt_before(made: str, shop: AsgiSite, clock: TurnedClock) -> None:
    from fastapi.responses import JSONResponse

    async def recover(claim: AsyncReservation) -> object:
        return {
            "stored": StoredResponse(202, (("location", "/7"),), b"found"),
            "response": JSONResponse({"found": claim.generation}, 202),
            "value": {"found": claim.generation},
            "pair": ({"found": claim.generation}, 202),
            "tombstone": StoredResponse(202, omitted="not_wanted"),
            "nothing": None,
        }[made]

    async def charge(claim: Any) -> dict[str, Any]:
        claim.outcome = "hold" if claim.generation == 1 else None
        return {"run": claim.generation}

    _post(shop, charge, _guarded(shop, recover=recover))
    _send(shop)
    clock.turn(31)
    first, again = _send(shop), _send(shop)
    expected = {
        "stored": (202, b"found"),
        "response": (202, b'{"found":2}'),
        "value": (201, b'{"found":2}'),  # the status of the route
        "pair": (202, b'{"found":2}'),
        "nothing": (201, b'{"run":2}'),
    }
    if made == "tombstone":
        assert [first.get_json()["error"], again.get_json()["error"]] == ["idempotency_response_not_stored"] * 2
    else:
        assert (first.status_code, first.data) == (again.status_code, again.data) == expected[made]
        assert again.headers["Idempotent-Replayed"] == "true"
    assert shop.row("k1", "alice")["generation"] == b"2"


def test_tests_can_override_the_principal_and_the_guard(shop: AsgiSite) -> None:
    claim = _guarded(shop)

    async def charge(claim: Any) -> dict[str, Any]:
        return {"by": claim.principal if claim else "nobody"}

    _post(shop, charge, claim)
    app = _app(shop)
    app.dependency_overrides[_account] = lambda: "test account"
    assert _send(shop, who=None).get_json() == {"by": "test account"}
    app.dependency_overrides[claim] = lambda: None
    assert _send(shop, None, who=None).get_json() == {"by": "nobody"}


# OpenAPI


@pytest.mark.parametrize("protocol", ["default", "ietf"])
@pytest.mark.parametrize("required", [True, False])
def test_openapi_has_the_header_and_the_refusals(required: bool, protocol: str) -> None:
    idempotency = Idempotency(
        principal="acme",
        settings={
            "IDEMREDIS_URL": "redis://127.0.0.1:1",
            "IDEMREDIS_REQUIRED": required,
            "IDEMREDIS_PROTOCOL": protocol,
        },
    )
    app = FastAPI()

    async def charge(body: Charge, claim: Any, x_other: Annotated[str, Header()]) -> None:
        """Charge."""

    charge.__annotations__["claim"] = Annotated[AsyncReservation, Depends(guard(idempotency))]
    app.post("/charges", responses=responses(idempotency))(charge)
    document = app.openapi()
    validate(document)
    operation = document["paths"]["/charges"]["post"]
    (header,) = [p for p in operation["parameters"] if p["name"] == "Idempotency-Key"]
    assert (header["in"], header["required"], header["schema"]["maxLength"]) == ("header", required, 255)
    assert [p["name"] for p in operation["parameters"] if p["required"]].count("x-other") == 1
    refused = {"400", "401", "409", "413", "500", "503"} | ({"422"} if protocol == "ietf" else set())
    assert refused <= set(operation["responses"])
    media_type = "application/problem+json" if protocol == "ietf" else "application/json"
    documented = operation["responses"]["409"]["content"][media_type]["schema"]["properties"]
    assert "idempotency_key_in_progress" in documented["error"]["enum"]
    assert "Retry-After" in operation["responses"]["409"]["headers"]


# Mistakes


def test_a_guard_without_the_middleware_or_with_anothers_is_a_configuration_error() -> None:
    nowhere = {"IDEMREDIS_URL": "redis://127.0.0.1:1"}
    idempotency, other = (Idempotency(principal="acme", settings=nowhere) for _ in range(2))
    app = FastAPI()

    @app.post("/charges", dependencies=[Depends(guard(idempotency))])
    def charge() -> None:
        """Charge."""

    async def serve(app: Any) -> None:
        wire = Wire()
        await app(scope_of("POST", "/charges", [("Idempotency-Key", "k1")]), wire.receive, wire.send)

    with pytest.raises(ConfigurationError, match="no IdempotencyMiddleware is around it"):
        asyncio.run(serve(app))
    with pytest.raises(ConfigurationError, match="another Idempotency"):
        asyncio.run(serve(IdempotencyMiddleware(app, other)))


@pytest.mark.parametrize(
    "options", [{"principal": "acme"}, {"fingerprint": "x"}, {"lease": 0}, {"lease": 90_000}, {"on_error": "retry"}]
)
def test_an_option_of_a_guard_that_cannot_work_is_refused(options: dict[str, Any]) -> None:
    idempotency = Idempotency(principal="acme", settings={"IDEMREDIS_URL": "redis://127.0.0.1:1"})
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        guard(idempotency, **options)


def test_a_guard_needs_a_principal_of_its_own_if_there_is_no_other() -> None:
    idempotency = Idempotency(settings={"IDEMREDIS_URL": "redis://127.0.0.1:1"})
    guard(idempotency, principal=_account)
    with pytest.raises(ConfigurationError, match="guard needs a principal"):
        guard(idempotency)


# Layers


def test_what_a_layer_within_ours_adds_for_this_delivery_is_there_on_refusals_and_replays(
    make_asgi_site: MakeAsgiSite,
) -> None:
    site = make_asgi_site("guard")
    site.app.user_middleware.clear()
    site.app.add_middleware(CORSMiddleware, allow_origins=["https://shop"])
    site.app.add_middleware(IdempotencyMiddleware, idempotency=site.idempotency)
    site.view(lambda: ("made", 201, {"X-Of-The-View": "1"}))
    origin = [("Origin", "https://shop")]
    first, again = site.send(headers=origin), site.send(headers=origin)
    refused = site.send(headers=origin, json={"amount": 2})
    for answer in (first, again, refused):
        assert answer.headers["Access-Control-Allow-Origin"] == "https://shop"
    assert "X-Of-The-View" not in again.headers
    assert again.headers["Idempotent-Replayed"] == "true"
    assert "access-control-allow-origin" not in [name for name, _ in site.kept_headers()]


@pytest.mark.parametrize("where", ["inside", "outside", "both"])
def test_it_works_inside_and_outside_of_a_base_http_middleware(where: str, make_asgi_site: MakeAsgiSite) -> None:
    site = make_asgi_site("guard")
    seen: list[int] = []

    async def look(request: Any, call_next: Any) -> Any:
        await request.body()
        response = await call_next(request)
        seen.append(response.status_code)
        return response

    from starlette.middleware.base import BaseHTTPMiddleware

    site.app.user_middleware.clear()
    if where != "outside":
        site.app.add_middleware(BaseHTTPMiddleware, dispatch=look)
    site.app.add_middleware(IdempotencyMiddleware, idempotency=site.idempotency)
    if where != "inside":
        site.app.add_middleware(BaseHTTPMiddleware, dispatch=look)
    site.view(lambda: (site.body(), 201))
    body = b"0123456789" * 30_000
    first, again = site.send(data=body), site.send(data=body)
    assert (first.data, again.status_code) == (body, 500)  # the response is larger than the cap
    small = [site.send("k2", data=b"small") for _ in range(2)]
    assert [answer.data for answer in small] == [b"small"] * 2
    assert small[1].headers["Idempotent-Replayed"] == "true"
    assert site.send("k2", data=b"other").status_code == 409
    assert len(site.runs) == 2
    assert len(seen) == (10 if where == "both" else 5)
