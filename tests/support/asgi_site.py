"""An ASGI application to attack, and a client that speaks ASGI to it from another thread."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextvars import ContextVar
from http import HTTPStatus
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import unquote

import redis
from fastapi import Depends, FastAPI
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from werkzeug.datastructures import Headers
from werkzeug.test import TestResponse

from idemredis import AsyncLedger, Policy
from idemredis.asgi import Idempotency, IdempotencyMiddleware
from idemredis.fastapi import guard
from idemredis.store.clients import SOCKET_TIMEOUT
from tests.support.site import METHODS, PRINCIPAL, Door, Sent, Stream
from tests.support.subject import PATIENCE, Loop
from tests.support.wiretap import tap

__all__ = ["AsgiSite", "Endpoints", "Wire", "answer_of", "scope_of"]

Endpoints: TypeAlias = Literal["thread", "async", "guard"]
"""Plain functions in Starlette's threads, `async def` functions of Starlette, or FastAPI's with a guard."""

Message: TypeAlias = dict[str, Any]

_body: ContextVar[bytes] = ContextVar("body")
_unread: ContextVar[Request] = ContextVar("unread")
_scope: ContextVar[dict[str, Any]] = ContextVar("scope")


def scope_of(method: str, target: str, headers: Iterable[tuple[str, str]] = (), **further: Any) -> dict[str, Any]:
    """Return the scope that a server makes of a request."""
    path, _, query = target.partition("?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode("latin-1"),
        "query_string": query.encode("latin-1"),
        "root_path": "",
        "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers],
        "client": ("127.0.0.1", 1),
        "server": ("shop", 80),
        "extensions": {"http.response.pathsend": {}, "http.response.zerocopysend": {}},
        **further,
    }


class Wire:
    """A server's end of one request: what the application receives, and what it has sent.

    Attributes:
        messages: what the application has sent.
        on_message: called before each of them.
    """

    def __init__(self, pieces: Iterable[bytes] = (b"",), *, complete: bool = True) -> None:
        pieces = list(pieces) or [b""]
        self.messages: list[Message] = []
        self.on_message: Callable[[Message], object] = lambda message: None
        self._waiting: list[Message] = [
            {"type": "http.request", "body": piece, "more_body": not (complete and n == len(pieces) - 1)}
            for n, piece in enumerate(pieces)
        ]
        self._gone = asyncio.Event()
        if not complete:
            self._gone.set()

    def disconnect(self) -> None:
        """Let the client go away; on the event loop."""
        self._gone.set()

    async def receive(self) -> Message:
        if self._waiting:
            return self._waiting.pop(0)
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.on_message(dict(message))
        self.messages.append(dict(message))
        if self.complete:
            self._gone.set()  # ASGI: who asks for another message after the response gets a disconnect

    @property
    def complete(self) -> bool:
        """Return True if the last message has been sent."""
        return any(m["type"] == "http.response.body" and not m.get("more_body", False) for m in self.messages)

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.messages if m["type"] == "http.response.body")


def answer_of(messages: list[Message]) -> TestResponse:
    """Return the response in an application's messages."""
    start = next(message for message in messages if message["type"] == "http.response.start")
    body = b"".join(message.get("body", b"") for message in messages if message["type"] == "http.response.body")
    headers = Headers([(name.decode("latin-1"), value.decode("latin-1")) for name, value in start["headers"]])
    try:
        phrase = HTTPStatus(start["status"]).phrase
    except ValueError:
        phrase = "Odd"
    made: Any = TestResponse([body], f"{start['status']} {phrase}", headers, None)  # type: ignore[arg-type]
    return made  # type: ignore[no-any-return]


class AsgiSite(Door):
    """A Starlette or FastAPI application with the middleware and its ledger, on an event loop of its own."""

    def __init__(
        self,
        kind: Endpoints,
        server: Any,
        store: redis.Redis,
        namespace: str,
        *,
        principal: Any = PRINCIPAL,
        policy: Policy | None = None,
        ledger: type[AsyncLedger] = AsyncLedger,
        log_keys: bool = False,
        socket_timeout: float | None = None,
        problem: Any = None,
        app: Starlette | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(store, namespace)
        self.kind = kind
        self.loop = Loop()
        self._server = server
        make: Any = ledger.from_url if isinstance(server, str) else ledger
        timeout = SOCKET_TIMEOUT if isinstance(server, str) else PATIENCE
        how = {"log_keys": log_keys, "socket_timeout": timeout if socket_timeout is None else socket_timeout}
        self.ledger: Any = make(server, policy, namespace, (self.events.append,), **how)
        tap(self.ledger._client, Sent(self.sent))
        named = {f"IDEMREDIS_{name}": value for name, value in settings.items()}

        def called(scope: Any) -> Any:
            _scope.set(scope)
            return principal()

        whose = called if callable(principal) else principal
        self.idempotency = Idempotency(principal=whose, ledger=self.ledger, settings=named, problem=problem)
        self.app = app if app is not None else FastAPI() if kind == "guard" else Starlette()
        self.app.add_middleware(IdempotencyMiddleware, idempotency=self.idempotency)

    def view(self, run: Callable[..., Any] | None = None, path: str = "/charges", **options: Any) -> None:
        path = re.sub(r"<(?:path:(\w+)|(\w+))>", lambda m: f"{{{m[1]}:path}}" if m[1] else f"{{{m[2]}}}", path)
        view, methods = self.counted(run, path), options.pop("methods", METHODS)
        if "fingerprint" in options and options["fingerprint"] is not None:
            own = options["fingerprint"]
            options["fingerprint"] = (lambda: own()) if self.kind == "guard" else (lambda scope, body: own())
        options["recover"] = _as_response(options.get("recover"))
        if self.kind == "guard":
            self._guarded(path, view, methods, options)
            return

        def plain(request: Request) -> Response:
            _scope.set(request.scope)  # type: ignore[arg-type]
            _unread.set(request)
            return respond(view(**request.path_params))

        async def awaited(request: Request) -> Response:
            _body.set(await request.body())
            _scope.set(request.scope)  # type: ignore[arg-type]
            return respond(await asyncio.to_thread(view, **request.path_params))

        protected = self.idempotency.protect(**options)(plain if self.kind == "thread" else awaited)
        self.app.router.routes.insert(0, Route(path, protected, methods=methods))

    def _guarded(self, path: str, view: Callable[..., Any], methods: list[str], options: dict[str, Any]) -> None:
        claim = guard(self.idempotency, **options)

        async def endpoint(request: Request, reservation: Any) -> Response:
            _body.set(await request.body())
            _scope.set(request.scope)  # type: ignore[arg-type]
            return respond(await asyncio.to_thread(view, **request.path_params))

        endpoint.__annotations__["reservation"] = Annotated[Any, Depends(claim)]
        route = FastAPI()
        route.add_api_route(path, endpoint, methods=methods)
        self.app.router.routes.insert(0, route.router.routes[-1])

    def send(
        self, key: str | None = "k1", path: str = "/charges", method: str = "POST", **options: Any
    ) -> TestResponse:
        scope, pieces = self.request(key, path, method, **options)
        return answer_of(self.loop.run(self.serve(scope, Wire(pieces))).messages)

    def request(
        self, key: str | None = "k1", path: str = "/charges", method: str = "POST", **options: Any
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Return scope and body of a request that `send` would send."""
        headers = list(options.pop("headers", ()))
        raw_key = options.pop("raw_key", key)
        if raw_key is not None:
            headers.append(("Idempotency-Key", raw_key))
        content_type = options.pop("content_type", None)
        if "data" in options:
            data = options.pop("data")
        else:
            data = json.dumps(options.pop("json", {"amount": 1000})).encode()
            content_type = content_type or "application/json"
        if content_type is not None:
            headers.append(("Content-Type", content_type))
        announced, chunked = options.pop("announced", len(data)), options.pop("chunked", False)
        headers.append(("Transfer-Encoding", "chunked") if chunked else ("Content-Length", str(announced)))
        pieces = [data[at : at + 60_000] for at in range(0, len(data), 60_000)] or [b""]
        return scope_of(method, path, headers, **options), pieces

    async def serve(self, scope: dict[str, Any], wire: Wire) -> Wire:
        """Run the application for one request; what it raises after a response is the server's to log."""
        try:
            await self.app(scope, wire.receive, wire.send)
        except Exception:
            if not wire.messages:
                raise
        return wire

    def body(self) -> bytes:
        return self.loop.run(_unread.get().body()) if self.kind == "thread" else _body.get()

    def header(self, name: str) -> str:
        headers: list[tuple[bytes, bytes]] = _scope.get()["headers"]
        return next(value.decode() for key, value in headers if key == name.lower().encode())

    def abort(self, status: int) -> Any:
        raise HTTPException(status)

    def do(self, method: str, *args: Any) -> Any:
        return self.loop.run(super().do(method, *args))

    def take_connection(self) -> Callable[[], object]:
        async def take() -> tuple[Any, Any]:
            pool = self.ledger.client.connection_pool
            return pool, await pool.get_connection()

        pool, connection = self.loop.run(take())
        return lambda: self.loop.run(pool.release(connection))

    def close(self) -> None:
        if self.loop.running:
            self.loop.run(self.idempotency.close())
            self.loop.run(self._close_client())
            self.loop.close()
        super().close()

    async def _close_client(self) -> None:
        client: Any = self.ledger.client
        await client.aclose()


def respond(made: Any) -> Response:
    """Return Starlette's response for what a view of any door returns."""
    if isinstance(made, Response):
        return made
    if isinstance(made, Stream):
        return StreamingResponse(iter(made.pieces), made.status, made.headers)
    body, status, headers = (*made, None, None)[:3] if isinstance(made, tuple) else (made, 200, None)
    status = 200 if status is None else status
    if isinstance(body, dict | list):
        return JSONResponse(body, status, _mapping(headers))
    response = Response(body, status, media_type="text/html; charset=utf-8")
    pairs = headers.items() if isinstance(headers, Mapping) else headers or ()
    for name, value in pairs:
        if name.lower() == "content-type":
            response.headers[name] = value
        else:
            response.headers.append(name, value)
    return response


def _mapping(headers: Any) -> dict[str, str] | None:
    return None if headers is None else dict(headers)


def _as_response(recover: Callable[..., Any] | None) -> Callable[..., Any] | None:
    if recover is None:
        return None

    def of_reservation(r: Any) -> Any:
        made = recover(r)
        return None if made is None else respond(made)

    return of_reservation
