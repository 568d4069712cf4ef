"""The middleware around an application: `protect_all`, what passes untouched, loops, errors and mistakes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Host, Mount, Route, WebSocketRoute
from starlette.websockets import WebSocket

from idemredis import AsyncLedger, ConfigurationError, HoldForReview, Ledger, StoredResponse
from idemredis.asgi import Idempotency, IdempotencyMiddleware, current_reservation
from idemredis.ledger.waiting import A_KEY
from tests.support.asgi_site import AsgiSite, Wire, answer_of, scope_of
from tests.support.doors import MakeAsgiSite
from tests.support.servers import Server
from tests.support.started import Servers
from tests.support.waiting import wait_until

POST = ["POST", "PUT", "PATCH", "DELETE"]
NOWHERE = {"IDEMREDIS_URL": "redis://127.0.0.1:1"}


def _counting(site: AsgiSite, name: str = "run") -> Callable[..., Any]:
    async def endpoint(request: Request) -> Response:
        site.runs.append(name)
        return PlainTextResponse(f"{name} {bool(current_reservation)} {len(site.runs)}")

    return endpoint


def _serve(site: AsgiSite, app: Any, scope: dict[str, Any], pieces: Any = (b"",)) -> Wire:
    async def serve() -> Wire:
        wire = Wire(pieces)
        await app(scope, wire.receive, wire.send)
        return wire

    return site.loop.run(serve())


# protect_all


@pytest.fixture
def guarded(make_asgi_site: MakeAsgiSite) -> AsgiSite:
    """A Starlette application with every kind of endpoint that `protect_all` meets."""
    site = make_asgi_site(PROTECT_ALL=True)
    idempotency = site.idempotency

    class Class(HTTPEndpoint):
        async def post(self, request: Request) -> Response:
            response: Response = await _counting(site, "class")(request)
            return response

        @idempotency.exempt
        async def put(self, request: Request) -> Response:
            return await self.post(request)

    @idempotency.exempt
    class Exempt(HTTPEndpoint):
        async def post(self, request: Request) -> Response:
            response: Response = await _counting(site, "class")(request)
            return response

    site.app.router.routes += [
        Route("/plain/{order}", _counting(site), methods=[*POST, "GET"]),
        Route("/exempt", idempotency.exempt(_counting(site)), methods=POST),
        Route("/own", idempotency.protect(operation="own", required=False)(_counting(site)), methods=POST),
        Route("/class", Class),
        Route("/exempt-class", Exempt),
        Mount("/v1/{tenant}", routes=[Route("/orders/{order}", _counting(site), methods=POST)], name="v1"),
    ]
    return site


@pytest.mark.parametrize(
    ("path", "method", "protected"),
    [
        ("/plain/7", "POST", True),
        ("/plain/7", "DELETE", True),
        ("/exempt", "POST", False),
        ("/own", "POST", True),
        ("/class", "POST", True),
        ("/class", "PUT", False),
        ("/exempt-class", "POST", False),
        ("/v1/acme/orders/7", "POST", True),
    ],
)
def test_protect_all_claims_every_unsafe_request_that_a_route_serves(
    path: str, method: str, protected: bool, guarded: AsgiSite
) -> None:
    answers = [guarded.send(path=path, method=method).text for _ in range(2)]
    assert f" {protected} " in answers[0]
    assert (answers[0] == answers[1]) == protected
    assert len(guarded.rows()) == protected
    required = protected and path != "/own"
    assert guarded.send(None, path, method).status_code == (400 if required else 200)


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/nowhere", "POST", 404),
        ("/class", "DELETE", 405),
        ("/plain/7/", "POST", 307),
        ("/v1/acme/nowhere", "POST", 404),
    ],
)
@pytest.mark.parametrize("key", ["k1", None])
def test_protect_all_leaves_alone_what_no_route_serves(
    path: str, method: str, status: int, key: str | None, guarded: AsgiSite
) -> None:
    assert guarded.send(key, path, method).status_code == status
    assert guarded.sent == []


@pytest.mark.parametrize("how", ["mount", "application", "wrapped", "route", "mount in a mount"])
def test_protect_all_around_what_is_mounted_claims_what_is_served_there(how: str, make_asgi_site: MakeAsgiSite) -> None:
    """The application in the scope is then the outer one, whose routes say nothing of the inner paths."""
    site = make_asgi_site()
    idempotency, counting = site.idempotency, _counting(site)
    inner = [
        Route("/things", counting, methods=POST),
        Route("/exempt", idempotency.exempt(_counting(site)), methods=POST),
    ]
    around: Any = Middleware(IdempotencyMiddleware, idempotency=idempotency, protect_all=True)
    match how:
        case "mount":
            routes: list[Any] = [Mount("/sub", routes=inner, middleware=[around])]
        case "application":
            routes = [Mount("/sub", IdempotencyMiddleware(Starlette(routes=inner), idempotency, protect_all=True))]
        case "wrapped":
            within = BaseHTTPMiddleware(Starlette(routes=inner), lambda request, call_next: call_next(request))
            routes = [Mount("/sub", IdempotencyMiddleware(within, idempotency, protect_all=True))]
        case "route":
            routes = [Route(f"/sub{route.path}", route.endpoint, methods=POST, middleware=[around]) for route in inner]
        case _:
            routes = [Mount("/sub", Starlette(routes=[Mount("", routes=inner, middleware=[around])]))]
    app = Starlette(routes=routes)
    bodies = [_serve(site, app, *site.request(key, "/sub/things")).body for key in ("k1", "k1")]
    assert bodies == [b"run True 1"] * 2
    unknown = how in ("application", "wrapped")  # Starlette does not look into a middleware
    known = "/things" if how == "mount in a mount" else "/sub/things"
    assert site.row()["route"].decode() == "POST " + ("/sub/{path}" if unknown else known)
    if how == "wrapped":  # as around any other application, its routes are unknown
        return
    bodies = [_serve(site, app, *site.request(key, "/sub/exempt")).body for key in ("k2", "k2")]
    assert bodies == [b"run False 2", b"run False 3"]
    sent = len(site.sent)
    assert answer_of(_serve(site, app, *site.request("k3", "/sub/nowhere")).messages).status_code == 404
    assert len(site.sent) == sent


@pytest.mark.parametrize("wrapped", [False, True])
def test_protect_all_within_a_mounted_application_matches_its_routes(
    wrapped: bool, make_asgi_site: MakeAsgiSite
) -> None:
    site = make_asgi_site(PROTECT_ALL=True)
    site.app.router.routes += [
        Route("/things", _counting(site), methods=POST),
        Route("/exempt", site.idempotency.exempt(_counting(site)), methods=POST),
    ]
    whole = BaseHTTPMiddleware(site.app, lambda request, call_next: call_next(request)) if wrapped else site.app
    if not wrapped:
        site.app.add_middleware(_Opaque)
    app = Starlette(routes=[Mount("/sub", whole)])
    bodies = [_serve(site, app, *site.request(f"k-{path}", f"/sub/{path}")).body for path in ("things", "exempt")]
    assert bodies == [b"run True 1", b"run False 2"]
    assert answer_of(_serve(site, app, *site.request("k3", "/sub/nowhere")).messages).status_code == 404
    assert len(site.rows()) == 1


class _Opaque:
    """A middleware that does not show what it is around."""

    def __init__(self, app: Any) -> None:
        self._around = app

    async def __call__(self, *message: Any) -> None:
        await self._around(*message)


def test_a_safe_method_passes_under_protect_all(guarded: AsgiSite) -> None:
    assert guarded.send(path="/plain/7", method="GET").text == "run False 1"
    assert guarded.sent == []


def test_a_decorated_endpoint_under_protect_all_is_claimed_once_with_its_own_options(guarded: AsgiSite) -> None:
    guarded.send(path="/own")
    assert list(guarded.rows()) == [guarded.row_name(operation="own").encode()]
    assert guarded.told() == ["claimed", "completed"]


@pytest.mark.parametrize("protect_all", [False, True])
def test_rows_have_the_template_of_their_route_and_never_the_path(
    protect_all: bool, make_asgi_site: MakeAsgiSite
) -> None:
    site = make_asgi_site(PROTECT_ALL=protect_all)
    endpoint = _counting(site)
    made = endpoint if protect_all else site.idempotency.protect(endpoint)
    site.app.router.routes += [
        Route("/plain/{order}", made, methods=POST),
        Route("/again/{order}", made, methods=POST),
        Mount("/v1/{tenant}", routes=[Route("/orders/{order}", made, methods=POST)]),
    ]
    for key, path, route in (
        ("k1", "/plain/xyzzy", "POST /plain/{order}"),
        ("k2", "/again/xyzzy", "POST /again/{order}"),
        ("k3", "/v1/xyzzy/orders/xyzzy", "POST /v1/{tenant}/orders/{order}"),
    ):
        site.send(key, path)
        assert site.row(key)["route"].decode() == route
    assert "xyzzy" not in str(site.events)


def test_around_another_application_protect_all_claims_before_routing_except_what_is_exempt(
    make_asgi_site: MakeAsgiSite,
) -> None:
    site = make_asgi_site()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        site.runs.append(scope["path"])
        await PlainTextResponse("done", 404)(scope, receive, send)

    exempt: list[Any] = ["/webhooks/{source}", "/files/{rest:path}", lambda scope: scope["path"] == "/health"]
    wrapped = IdempotencyMiddleware(app, site.idempotency, protect_all=True, exempt=exempt)
    for path, claimed in (
        ("/charges", True),
        ("/webhooks/stripe", False),
        ("/webhooks/stripe/more", True),
        ("/files/a/b/c", False),
        ("/health", False),
        ("/healthy", True),
    ):
        for _ in range(2):
            scope, pieces = site.request(path, path)
            _serve(site, wrapped, scope, pieces)
        assert bool(site.row(path)) == claimed, path
        assert site.runs.count(path) == (1 if claimed else 2), path
    assert "route" not in site.row("/charges")


@pytest.mark.parametrize("root_path", ["", "/api"])
def test_an_exempt_path_is_the_one_within_the_applications_root(root_path: str, make_asgi_site: MakeAsgiSite) -> None:
    site = make_asgi_site()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("done")(scope, receive, send)

    wrapped = IdempotencyMiddleware(app, site.idempotency, protect_all=True, exempt=["/hooks"])
    scope, pieces = site.request(path=f"{root_path}/hooks", root_path=root_path)
    _serve(site, wrapped, scope, pieces)
    assert site.rows() == {}


@pytest.mark.parametrize("protect_all", [False, True])
def test_an_application_that_routes_by_host_must_tell_hosts_apart(
    protect_all: bool, make_asgi_site: MakeAsgiSite, caplog: pytest.LogCaptureFixture
) -> None:
    for told in (False, True):
        headers: dict[str, Any] = {"FINGERPRINT_HEADERS": ("content-type", "host")} if told else {}
        site = make_asgi_site(PROTECT_ALL=protect_all, **headers)
        endpoint = _counting(site) if protect_all else site.idempotency.protect(_counting(site))
        site.app.router.routes.append(Host("a.example", Starlette(routes=[Route("/charges", endpoint, methods=POST)])))
        answers = [site.send(headers=[("Host", "a.example")]).status_code for _ in range(2)]
        assert answers == ([200, 200] if told else [500, 500])
        assert len(site.runs) == len(site.rows()) == told


# What passes untouched


def test_a_websocket_passes_untouched(make_asgi_site: MakeAsgiSite) -> None:
    site = make_asgi_site(PROTECT_ALL=True)

    async def talk(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text("hello")
        await socket.close()

    site.app.router.routes.append(WebSocketRoute("/talk", talk))
    scope = scope_of("GET", "/talk", [("Idempotency-Key", "k1")], type="websocket", subprotocols=[])
    sent: list[Any] = []

    async def serve() -> None:
        async def receive() -> Any:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            sent.append(message["type"])

        await site.app(scope, receive, send)

    site.loop.run(serve())
    assert sent == ["websocket.accept", "websocket.send", "websocket.close"]
    assert site.sent == []


def test_the_scope_is_the_servers_own_and_nothing_is_left_in_it(make_asgi_site: MakeAsgiSite) -> None:
    site = make_asgi_site()
    scopes: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)
        assert "http.response.pathsend" not in scope["extensions"]
        await PlainTextResponse("done")(scope, receive, send)

    scope, pieces = site.request()
    extensions = scope["extensions"]
    _serve(site, IdempotencyMiddleware(app, site.idempotency, protect_all=True), scope, pieces)
    assert scopes[0] is scope
    assert "idemredis" not in scope
    assert "http.response.pathsend" in extensions  # a server may share it between requests


def test_the_middleware_twice_claims_once(make_asgi_site: MakeAsgiSite) -> None:
    site = make_asgi_site()
    site.view()
    twice = IdempotencyMiddleware(site.app, site.idempotency, protect_all=False)
    scope, pieces = site.request()
    assert answer_of(_serve(site, twice, scope, pieces).messages).text == "charge 1"
    assert site.told() == ["claimed", "completed"]


# Lifespan and event loops


def _lifespan(app: Any) -> list[str]:
    """Run an application's lifespan, and return what it has sent."""
    sent: list[str] = []

    async def serve() -> None:
        waiting = ["lifespan.startup", "lifespan.shutdown"]

        async def receive() -> Any:
            return {"type": waiting.pop(0)}

        async def send(message: Any) -> None:
            sent.append(message["type"])

        await app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)

    asyncio.run(serve())
    return sent


@pytest.mark.parametrize("given", ["lifespan", "middleware"])
def test_the_ledger_is_closed_in_the_lifespan(given: str, valkey_server: Server, namespace: str) -> None:
    closed: list[str] = []

    class Noting(AsyncLedger):
        async def close(self) -> None:
            closed.append("closed")
            await super().close()

    idempotency = Idempotency(principal="acme", ledger=Noting.from_url(valkey_server.url, namespace=namespace))
    if given == "lifespan":
        app: Any = Starlette(lifespan=idempotency.lifespan)
    else:
        app = IdempotencyMiddleware(Starlette(), idempotency)
    assert _lifespan(app) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert closed == ["closed"]


def test_it_works_in_one_event_loop_after_another_and_without_a_lifespan(valkey_server: Server, namespace: str) -> None:
    idempotency = Idempotency(
        principal="acme", settings={"IDEMREDIS_URL": valkey_server.url, "IDEMREDIS_NAMESPACE": namespace}
    )
    runs: list[int] = []

    @idempotency.protect
    async def charge(request: Request) -> Response:
        runs.append(1)
        return PlainTextResponse(f"run {len(runs)}")

    app = IdempotencyMiddleware(Starlette(routes=[Route("/charges", charge, methods=POST)]), idempotency)

    async def serve() -> bytes:
        wire = Wire()
        await app(scope_of("POST", "/charges", [("Idempotency-Key", "k1")]), wire.receive, wire.send)
        await idempotency.ledger.client.aclose()
        return wire.body

    assert [asyncio.run(serve()) for _ in range(3)] == [b"run 1"] * 3


# Errors of the application


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("outside", [False, True])
def test_under_store_a_page_of_the_servers_own_is_never_what_is_stored(
    outside: bool, debug: bool, make_asgi_site: MakeAsgiSite
) -> None:
    site = make_asgi_site(ON_ERROR="store")

    async def endpoint(request: Request) -> Response:
        site.runs.append(1)
        raise LookupError("a secret of the application")

    route = Route("/charges", site.idempotency.protect(endpoint), methods=POST)
    if outside:
        app: Any = IdempotencyMiddleware(Starlette(debug=debug, routes=[route]), site.idempotency)
    else:
        app = Starlette(debug=debug, routes=[route])
        app.add_middleware(IdempotencyMiddleware, idempotency=site.idempotency)
    site.app = app
    first, again = site.send(), site.send()
    assert (first.status_code, b"Traceback" in first.data or b"secret" in first.data) == (500, debug)
    assert (again.status_code, again.text, len(site.runs)) == (500, "Internal Server Error", 1)
    assert site.row()["response_body"] == b"Internal Server Error"


@pytest.mark.parametrize("status", [409, 503])
def test_under_store_the_page_of_the_applications_own_handler_is_what_comes_back(
    status: int, make_asgi_site: MakeAsgiSite
) -> None:
    class OutOfStock(Exception):
        pass

    async def handle(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": "out of stock"}, status)

    site = make_asgi_site(ON_ERROR="store", app=Starlette(exception_handlers={OutOfStock: handle}))

    async def endpoint(request: Request) -> Response:
        site.runs.append(1)
        raise OutOfStock

    site.app.router.routes.append(Route("/charges", site.idempotency.protect(endpoint), methods=POST))
    first, again = site.send(), site.send()
    assert (first.status_code, first.get_json()) == (again.status_code, again.get_json())
    assert (again.status_code, again.get_json(), len(site.runs)) == (status, {"error": "out of stock"}, 1)


def test_an_endpoint_that_holds_for_review_is_held_although_a_handler_catches_everything(
    make_asgi_site: MakeAsgiSite,
) -> None:
    async def handle(request: Request, error: Exception) -> Response:
        return PlainTextResponse("caught", 200)

    site = make_asgi_site(PROTECT_ALL=True, app=Starlette(exception_handlers={HoldForReview: handle}))

    async def endpoint(request: Request) -> Response:
        raise HoldForReview

    site.app.router.routes.append(Route("/charges", endpoint, methods=POST))
    answer = site.send()
    assert (answer.status_code, answer.get_json()["error"]) == (409, "idempotency_key_in_progress")
    assert (site.told()[-1], site.row()["owner"] != b"") == ("held_for_review", True)


@pytest.mark.parametrize("decorator", ["catches", "reshapes", "raises"])
def test_no_decorator_reshapes_a_refusal_or_a_replay(decorator: str, make_asgi_site: MakeAsgiSite) -> None:
    site = make_asgi_site()
    protected = site.idempotency.protect(_counting(site))

    async def around(request: Request) -> Response:
        try:
            response = await protected(request)
        except Exception:
            return PlainTextResponse("caught", 200)
        if decorator == "raises" and b"Idempotent" in str(response.raw_headers).title().encode():
            raise TypeError("a plain response was expected")
        if decorator == "reshapes":
            return JSONResponse({"data": response.body.decode()})
        made: Response = response
        return made

    site.app.router.routes.append(Route("/charges", around, methods=POST))
    first, again = site.send(), site.send()
    assert (again.data, again.headers["Idempotent-Replayed"]) == (first.data, "true")
    assert site.send(json={"amount": 2}).get_json()["error"] == "idempotency_key_reused"
    assert site.send(None).get_json()["error"] == "idempotency_key_required"
    assert len(site.runs) == 1


@pytest.mark.parametrize("kind", ["stored", "tombstone"])
@pytest.mark.parametrize("sync", [False, True])
def test_an_endpoint_may_return_a_stored_response(sync: bool, kind: str, make_asgi_site: MakeAsgiSite) -> None:
    site = make_asgi_site()
    stored = StoredResponse(201, (("Location", "/7"), ("Set-Cookie", "a=b")), b"made")
    made = stored if kind == "stored" else stored.without_body("not_wanted")

    def plain(request: Request) -> StoredResponse:
        return made

    async def awaited(request: Request) -> StoredResponse:
        return made

    endpoint: Any = site.idempotency.protect(plain if sync else awaited)
    site.app.router.routes.append(Route("/charges", endpoint, methods=POST))
    first, again = site.send(), site.send()
    if kind == "stored":
        assert (first.status_code, first.text, first.headers["Location"]) == (201, "made", "/7")
        assert "Set-Cookie" not in first.headers
        assert (again.text, again.headers["Idempotent-Replayed"]) == ("made", "true")
    else:
        assert [a.get_json()["error"] for a in (first, again)] == ["idempotency_response_not_stored"] * 2
        assert site.omitted() == b"not_wanted"


def test_an_endpoint_may_return_a_stored_response_where_nothing_is_claimed(make_asgi_site: MakeAsgiSite) -> None:
    site = make_asgi_site()

    async def endpoint(request: Request) -> StoredResponse:
        return StoredResponse(201, (("Location", "/7"),), b"made")

    inner = site.idempotency.protect(endpoint)
    site.app.router.routes.append(Route("/charges", inner, methods=["GET"]))
    site.app.router.routes.append(Route("/charges", site.idempotency.protect(inner), methods=POST))
    for method in ("GET", "POST"):
        answer = site.send(path="/charges", method=method)
        assert (answer.status_code, answer.text, answer.headers["Location"]) == (201, "made", "/7")


@pytest.mark.parametrize("sync", [False, True])
def test_what_calls_a_refused_endpoint_again_does_not_run_it(sync: bool, make_asgi_site: MakeAsgiSite) -> None:
    """An application of no framework, whose decorator tries again whatever is raised, also what ends a replay."""
    site = make_asgi_site()
    scopes: list[Any] = []

    async def run() -> bytes:
        site.runs.append("run")
        return b"made"

    def run_sync() -> bytes:
        site.runs.append("run")
        return b"made"

    def principal(scope: Any) -> str:
        scopes.append(scope)
        if len(scopes) == 1:
            raise OSError("the directory of users is away")
        return "alice"

    idempotency = Idempotency(principal=principal, ledger=site.ledger)
    protected = idempotency.protect(run)
    protected_sync = idempotency.protect(run_sync)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for attempt in range(3):
            try:
                body = await asyncio.to_thread(protected_sync) if sync else await protected()
                break
            except Exception:
                if attempt == 2:
                    raise
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    around = IdempotencyMiddleware(app, idempotency)
    first, again = (_serve(site, around, *site.request()) for _ in range(2))
    assert first.body == again.body == b"made"
    assert site.runs == ["run"]
    assert len(site.rows()) == 1
    assert answer_of(again.messages).headers["Idempotent-Replayed"] == "true"


# Refusals in the application's own shape


@pytest.mark.parametrize("made", ["response", "stored", "dict", "pair", "triple", "async"])
def test_refusals_have_the_shape_that_the_application_gives_them(made: str, make_asgi_site: MakeAsgiSite) -> None:
    def problem(code: str, status: int, message: str, facts: dict[str, int]) -> Any:
        body = {"oops": code, "facts": sorted(facts)}
        match made:
            case "response":
                return JSONResponse(body, 418)
            case "stored":
                return StoredResponse(418, (("content-type", "application/json"),), bytes(JSONResponse(body).body))
            case "async":
                return later(body)
            case "pair":
                return body, 418
            case "triple":
                return body, 418, {"content-type": "application/json", "X-Shape": "own"}
            case _:
                return body

    async def later(body: Any) -> Any:
        return JSONResponse(body, 418)

    site = make_asgi_site(problem=problem)

    async def hold(request: Request) -> Response:
        current_reservation.outcome = "hold"
        return PlainTextResponse("held")

    site.app.router.routes.append(Route("/charges", site.idempotency.protect(hold), methods=POST))
    site.send()
    answer = site.send()
    assert answer.status_code == (409 if made == "dict" else 418)
    assert answer.get_json() == {"oops": "idempotency_key_in_progress", "facts": ["lease_ms", "retry_after_ms"]}
    assert answer.headers["Retry-After"] == "2"
    assert answer.headers.getlist("Content-Type") == ["application/json"]
    assert answer.headers.get("X-Shape") == ("own" if made == "triple" else None)


def test_a_problem_function_that_fails_costs_the_client_nothing(
    make_asgi_site: MakeAsgiSite, caplog: pytest.LogCaptureFixture
) -> None:
    site = make_asgi_site(problem=lambda *_: 1 / 0)
    site.view()
    assert site.send(None).get_json()["error"] == "idempotency_key_required"
    assert "problem= failed for idempotency_key_required" in caplog.text


# Principals


@pytest.mark.parametrize("kind", ["sync", "async", "callable"])
@pytest.mark.parametrize("mode", ["enforce", "observe", "off"])
def test_a_principal_may_be_found_by_a_function_of_the_scope_sync_or_async(
    mode: str, kind: str, every_key_left_expires: Servers, namespace: str, make_asgi_site: MakeAsgiSite
) -> None:
    async def account(scope: Any) -> str:
        await asyncio.sleep(0)
        return f"account of {scope['path']}"

    class Accounts:
        async def __call__(self, scope: Any) -> str:
            return await account(scope)

    principal: Any = {"sync": lambda scope: f"account of {scope['path']}", "async": account, "callable": Accounts()}[
        kind
    ]
    site = make_asgi_site(MODE=mode)
    keys: list[str] = []

    async def charge(request: Request) -> Response:
        keys.append(current_reservation.downstream_key("gateway"))
        return PlainTextResponse(current_reservation.principal)

    ledger = site.ledger
    own = Idempotency(principal=principal, ledger=ledger, settings={"IDEMREDIS_MODE": mode})
    app = Starlette(routes=[Route("/charges", own.protect(charge), methods=POST)])
    app.add_middleware(IdempotencyMiddleware, idempotency=own)
    site.app = app
    assert site.send().text == "account of /charges"
    assert bool(site.row(principal="account of /charges")) == (mode != "off")
    assert site.send("k1").text == "account of /charges"
    assert len(set(keys)) == 1


# Mistakes


def test_a_protected_endpoint_without_the_middleware_or_with_anothers_is_a_configuration_error() -> None:
    idempotency = Idempotency(principal="acme", settings=NOWHERE)

    @idempotency.protect
    async def charge(request: Request) -> Response:
        return PlainTextResponse("done")

    async def serve(app: Any) -> None:
        wire = Wire()
        await app(scope_of("POST", "/"), wire.receive, wire.send)

    app = Starlette(routes=[Route("/", charge, methods=POST)])
    with pytest.raises(ConfigurationError, match="no IdempotencyMiddleware is around it"):
        asyncio.run(serve(app))
    with pytest.raises(ConfigurationError, match="another Idempotency"):
        asyncio.run(serve(IdempotencyMiddleware(app, Idempotency(principal="acme", settings=NOWHERE))))


def test_a_plain_function_on_the_event_loop_is_a_configuration_error_and_no_deadlock(
    make_asgi_site: MakeAsgiSite,
) -> None:
    site = make_asgi_site()

    @site.idempotency.protect
    def charge() -> str:
        return "done"

    async def endpoint(request: Request) -> Response:
        return PlainTextResponse(charge())

    site.app.router.routes.append(Route("/charges", endpoint, methods=POST))
    with pytest.raises(ConfigurationError, match="sync_to_thread"):
        site.loop.run(_raising(site))
    assert site.rows() == {}


async def _raising(site: AsgiSite) -> None:
    scope, pieces = site.request()
    wire = Wire(pieces)
    await site.app(scope, wire.receive, wire.send)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"settings": {}}, "IDEMREDIS_URL is not set"),
        ({"settings": {"URL": "redis://"}}, "did you mean IDEMREDIS_URL"),
        ({"settings": {**NOWHERE, "IDEMREDIS_LEASE": 5}}, "IDEMREDIS_LEASE is not a setting"),
        ({"settings": NOWHERE, "principal": None}, "principal"),
        ({"settings": NOWHERE, "problem": "no"}, "problem must be a function"),
        ({"ledger": Ledger.from_url("redis://127.0.0.1:1")}, "must be an AsyncLedger"),
        ({"ledger": object()}, "must be an AsyncLedger"),
    ],
)
def test_what_cannot_be_set_up_is_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Idempotency(**{"principal": "acme", **arguments})


def test_without_a_principal_nothing_can_be_claimed_but_by_guards_that_have_one() -> None:
    idempotency = Idempotency(settings=NOWHERE)
    with pytest.raises(ConfigurationError, match="protect needs a principal"):
        idempotency.protect(lambda request: None)
    with pytest.raises(ConfigurationError, match="protect_all needs a principal"):
        IdempotencyMiddleware(Starlette(), idempotency, protect_all=True)
    IdempotencyMiddleware(Starlette(), idempotency)


def test_names_of_others_in_the_settings_are_not_ours() -> None:
    settings = {**NOWHERE, "DEBUG": True, "SECRET_KEY": "x", "IDEMREDIS_LEASE_SECONDS": 7}
    assert Idempotency(principal="acme", settings=settings).ledger.policy.lease == 7


@pytest.mark.parametrize("what", ["class", "text", "generator", "async generator"])
def test_protect_of_what_cannot_be_protected_says_what_was_meant(what: str) -> None:
    idempotency = Idempotency(principal="acme", settings=NOWHERE)

    def generator() -> Any:
        yield 1

    async def async_generator() -> Any:
        yield 1

    things: dict[str, Any] = {
        "class": HTTPEndpoint,
        "text": "charge",
        "generator": generator,
        "async generator": async_generator,
    }
    with pytest.raises(ConfigurationError, match="protect"):
        idempotency.protect(things[what])


@pytest.mark.parametrize("exempt", [["charges"], [7]])
def test_an_exemption_that_is_neither_a_path_nor_a_function_is_refused(exempt: Any) -> None:
    with pytest.raises(ConfigurationError, match="exempt takes path templates"):
        IdempotencyMiddleware(Starlette(), Idempotency(principal="acme", settings=NOWHERE), exempt=exempt)


# A caller that is cancelled


def test_a_claim_that_is_cancelled_runs_nothing_and_its_row_is_given_up(
    make_asgi_site: MakeAsgiSite, valkey_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """And leaves no connection in the pool on which the reply is still to come."""
    caplog.set_level(logging.ERROR)
    site = make_asgi_site("async", valkey_server)
    site.view()
    site.send("warm")

    async def serve(key: str, steps: int) -> None:
        scope, pieces = site.request(key)
        wire = Wire(pieces)
        task = asyncio.ensure_future(site.app(scope, wire.receive, wire.send))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    for steps in range(40):
        site.loop.run(serve(f"k{steps}", steps))
        answer = wait_until(lambda steps=steps: (got := site.send(f"k{steps}")).status_code == 201 and got)  # type: ignore[misc]
        assert answer
    assert [site.row(f"k{steps}")["status"] for steps in range(40)] == [b"completed"] * 40
    assert "corrupt" not in caplog.text


def test_of_the_duplicates_of_one_key_four_wait_and_the_rest_are_refused_at_once(
    make_asgi_site: MakeAsgiSite, valkey_server: Server
) -> None:
    site = make_asgi_site("async", valkey_server, WAIT_SECONDS=60)

    async def serve() -> list[int]:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def charge(request: Request) -> Response:
            site.runs.append(1)
            begun.set()
            await go_on.wait()
            return PlainTextResponse("made", 201)

        site.app.router.routes.append(Route("/charges", site.idempotency.protect(charge), methods=POST))

        async def send() -> int:
            scope, pieces = site.request()
            return answer_of((await site.serve(scope, Wire(pieces))).messages).status_code

        first = asyncio.ensure_future(send())
        await begun.wait()
        duplicates = [asyncio.ensure_future(send()) for _ in range(A_KEY + 5)]
        refused: set[Any] = set()
        while len(refused) < 5:
            refused, _ = await asyncio.wait(duplicates, timeout=0.05)
        go_on.set()
        return [await first, *sorted([await one for one in duplicates])]

    assert site.loop.run(serve()) == [201, *[201] * A_KEY, *[409] * 5]
    assert len(site.runs) == 1


def test_a_request_within_a_once_function_has_a_reservation_of_its_own(make_asgi_site: MakeAsgiSite) -> None:
    site = make_asgi_site()

    @site.idempotency.protect
    async def charge(request: Request) -> Response:
        return PlainTextResponse(current_reservation.key)

    site.app.router.routes.append(Route("/charges", charge, methods=POST))

    @site.ledger.once(principal="worker", key="outer")
    async def work() -> list[str]:
        scope, pieces = site.request("inner")
        wire = await site.serve(scope, Wire(pieces))
        return [wire.body.decode(), current_reservation.key]

    assert site.loop.run(work()) == ["inner", "outer"]
