"""What identifies an ASGI request, and how its body reaches the endpoint."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from idemredis import fingerprint_request
from idemredis.asgi import IdempotencyMiddleware
from tests.support.asgi_site import AsgiSite, Wire, answer_of, scope_of
from tests.support.doors import MakeAsgiSite
from tests.support.vectors import VECTORS, body_of

POST = ["POST", "PUT", "PATCH", "DELETE"]


def _echo(site: AsgiSite, path: str = "/{path:path}") -> None:
    """Add an endpoint that reads its body after the claim, and answers with its digest."""

    @site.idempotency.protect
    async def echo(request: Request) -> Response:
        digest = hashlib.sha256()
        async for piece in request.stream():
            digest.update(piece)
        return PlainTextResponse(digest.hexdigest())

    site.app.router.routes.append(Route(path, echo, methods=POST))


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector['method']} {vector['target']}")
def test_a_request_ends_in_the_row_with_the_digest_of_the_vectors(
    vector: dict[str, Any], make_asgi_site: MakeAsgiSite
) -> None:
    site = make_asgi_site()
    _echo(site)
    body = body_of(vector)
    answer = site.send(
        path=vector["target"], method=vector["method"].upper(), data=body, headers=list(vector["headers"].items())
    )
    assert answer.text == hashlib.sha256(body).hexdigest()
    assert site.row()["fingerprint"].decode() == vector["fingerprint"]


@pytest.mark.parametrize(
    ("scope", "target"),
    [
        ({}, "/a%2Fb?x=1"),
        ({"raw_path": None}, "/a/b?x=1"),
        ({"raw_path": None, "path": "/caf\xe9 \u3042"}, "/caf%C3%A9%20%E3%81%82?x=1"),
        ({"raw_path": None, "root_path": "/v1", "path": "/v1/a"}, "/v1/a?x=1"),
        ({"raw_path": None, "root_path": "/v1", "path": "/a"}, "/v1/a?x=1"),
        ({"raw_path": b"http://shop/a%2Fb"}, "/a%2Fb?x=1"),
        ({"raw_path": b"/caf\xe9"}, "/caf\udce9?x=1"),
        ({"query_string": b""}, "/a%2Fb"),
    ],
    ids=str,
)
def test_the_target_is_the_raw_one_where_the_server_gives_it(
    scope: dict[str, Any], target: str, make_asgi_site: MakeAsgiSite
) -> None:
    site = make_asgi_site(PROTECT_ALL=True, app=None)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("done")(scope, receive, send)

    alone = IdempotencyMiddleware(app, site.idempotency, protect_all=True)
    headers = [("Idempotency-Key", "k1"), ("Content-Length", "0")]
    whole = scope_of("POST", "/a%2Fb?x=1", headers, **scope)
    if scope.get("raw_path", b"") is None:
        del whole["raw_path"]

    async def serve() -> None:
        await alone(whole, (wire := Wire()).receive, wire.send)

    site.loop.run(serve())
    assert site.row()["fingerprint"].decode() == fingerprint_request("POST", target, {}, b"")


@pytest.mark.parametrize("size", [0, 1, 65536, 262144, 262145, 1_048_576])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_the_claim_drains_reaches_the_endpoint_whole(
    size: int, chunked: bool, make_asgi_site: MakeAsgiSite
) -> None:
    site = make_asgi_site()
    _echo(site)
    body = (bytes(range(256)) * (size // 256 + 1))[:size]
    answer = site.send(path="/things", data=body, chunked=chunked)
    assert answer.text == hashlib.sha256(body).hexdigest()
    assert site.row()["fingerprint"].decode() == fingerprint_request("POST", "/things", {}, body)


@pytest.mark.parametrize("read", [0, 1, 2, 5])
def test_what_a_middleware_has_read_before_counts(read: int, make_asgi_site: MakeAsgiSite) -> None:
    """A middleware within ours reads some messages, and hands them on itself."""
    site = make_asgi_site()

    class Reading:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            taken = [await receive() for _ in range(read)]

            async def hand_on() -> Any:
                return taken.pop(0) if taken else await receive()

            await self.app(scope, hand_on, send)

    site.app.user_middleware.append(_middleware(Reading))
    _echo(site)
    body = b"0123456789" * 30_000
    assert site.send(path="/things", data=body).text == hashlib.sha256(body).hexdigest()
    assert site.row()["fingerprint"].decode() == fingerprint_request("POST", "/things", {}, body)
    assert site.send(path="/things", data=body[:-1]).status_code == 409


def _middleware(kind: Any) -> Any:
    from starlette.middleware import Middleware

    return Middleware(kind)


@pytest.mark.parametrize("how", ["gone", "short"])
def test_an_upload_that_breaks_off_is_refused_and_claims_nothing(how: str, make_asgi_site: MakeAsgiSite) -> None:
    site = make_asgi_site()
    _echo(site)
    scope, _ = site.request(path="/things", data=b"12345", announced=10)

    async def serve() -> Wire:
        return await site.serve(scope, Wire([b"12345"], complete=how == "short"))

    answer = answer_of(site.loop.run(serve()).messages)
    assert (answer.status_code, answer.get_json()["error"]) == (400, "idempotency_body_incomplete")
    assert (site.sent, site.rows()) == ([], {})


def test_no_disconnect_is_invented_once_the_body_is_read(make_asgi_site: MakeAsgiSite) -> None:
    site = make_asgi_site()
    seen: list[bool] = []

    @site.idempotency.protect
    async def endpoint(request: Request) -> Response:
        await request.body()
        seen.append(await request.is_disconnected())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await request.receive()
        return PlainTextResponse("done")

    site.app.router.routes.append(Route("/things", endpoint, methods=POST))
    assert site.send(path="/things").text == "done"
    assert seen == [False]


def test_repeated_key_lines_are_one_key(make_asgi_site: MakeAsgiSite) -> None:
    site = make_asgi_site()
    site.view()
    assert site.send("a", headers=[("Idempotency-Key", "b")]).status_code == 201
    assert site.row("b,a")["status"] == b"completed"


def test_an_application_that_reads_while_the_claim_drains_gets_every_byte_once_and_in_order(
    make_asgi_site: MakeAsgiSite,
) -> None:
    """As Quart does, which reads the body in a task of its own while its endpoint is claimed."""
    site = make_asgi_site()
    body = bytes(range(256)) * 4000

    @site.idempotency.protect
    async def endpoint() -> str:
        return "made"

    read: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def reading() -> None:
            more = True
            while more:
                message = await receive()
                read.append(message["body"])
                more = message["more_body"]

        reader = asyncio.ensure_future(reading())
        await asyncio.sleep(0)
        text = await endpoint()
        await reader
        await PlainTextResponse(text)(scope, receive, send)

    async def serve() -> Wire:
        scope, pieces = site.request(data=body)
        wire = Wire(pieces)
        receive = wire.receive

        async def slowly() -> Any:
            for _ in range(3):
                await asyncio.sleep(0)
            return await receive()

        await IdempotencyMiddleware(app, site.idempotency)(scope, slowly, wire.send)
        return wire

    assert site.loop.run(serve()).body == b"made"
    assert b"".join(read) == body
    assert site.row()["fingerprint"].decode() == fingerprint_request("POST", "/charges", {}, body)
