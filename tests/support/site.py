"""An application to attack: its views, its ledger, and its rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import pytest
import redis
from flask import Flask, Response, abort, request
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from idemredis import Ledger, Policy
from idemredis.core.keys import identify
from idemredis.events import Event
from idemredis.flask import Idempotency
from idemredis.store.clients import SOCKET_TIMEOUT
from tests.support.started import Servers
from tests.support.subject import PATIENCE, AnyServer
from tests.support.wiretap import Words, tap

PRINCIPAL = "acme"
METHODS = ["POST", "PUT", "PATCH", "DELETE"]


@dataclass
class Stream:
    """A streamed response of a view, behind any door."""

    pieces: Iterable[str | bytes]
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


class Door:
    """An application behind one of the doors, with its ledger.

    Attributes:
        kind: which door it is.
        runs: what views have appended; its length is the counter that must not move on a refusal.
        inside: what the view that counts itself does, once it has.
        sent: the scripts that the ledger asked for, in order.
        events: what the ledger told.
        store: a plain client, to look at rows and to spoil them.
    """

    kind: str
    ledger: Any

    def __init__(self, store: redis.Redis, namespace: str) -> None:
        self.runs: list[Any] = []
        self.sent: list[str] = []
        self.events: list[Event] = []
        self.inside: Callable[[], object] = lambda: None
        self.store = store
        self.namespace = namespace

    def view(self, run: Callable[..., Any] | None = None, path: str = "/charges", **options: Any) -> None:
        """Add a protected view that counts itself; it answers 201 with a body of its own each time.

        Args:
            run: what it does instead; it returns text, bytes, a dict, or a tuple of that with a status and headers.
            path: where it is, with parts such as `<name>`.
            options: those of `protect`; and `methods`.
        """
        raise NotImplementedError

    def send(
        self, key: str | None = "k1", path: str = "/charges", method: str = "POST", **options: Any
    ) -> TestResponse:
        """Send a request and return its response.

        Args:
            key: what is sent as the key; None sends none, unless `raw_key` has the header's value as it is.
            path: the target, as it is sent.
            method: in any case.
            options: `data`, `json`, `headers` and `content_type`; `announced` is another Content-Length than the
                body's; `chunked` sends no length.
        """
        raise NotImplementedError

    def body(self) -> bytes:
        """Return the body of the request that a view of this site serves."""
        raise NotImplementedError

    def header(self, name: str) -> str:
        """Return a header of the request that a view, or the principal, of this site is asked for."""
        raise NotImplementedError

    def abort(self, status: int) -> Any:
        """Raise what makes the framework answer with a status."""
        raise NotImplementedError

    def counted(self, run: Callable[..., Any] | None, path: str) -> Callable[..., Any]:
        """Return the function of a view that counts itself."""

        def charge(**args: Any) -> Any:
            self.runs.append(path)
            if run is not None:
                return run(**args)
            text = f"charge {len(self.runs)}"
            self.inside()
            return text, 201

        return charge

    def do(self, method: str, *args: Any) -> Any:
        """Call a method of the ledger's, on its event loop if it has one."""
        return getattr(self.ledger, method)(*args)

    def take_connection(self) -> Callable[[], object]:
        """Take a connection from the ledger's pool, and return the function that gives it back."""
        pool = self.ledger.client.connection_pool
        connection = pool.get_connection()
        return lambda: pool.release(connection)

    def row_name(self, key: str = "k1", principal: str = PRINCIPAL, operation: str = "") -> str:
        return identify(self.namespace, principal, key, operation).row

    def row(self, key: str = "k1", principal: str = PRINCIPAL, operation: str = "") -> dict[str, bytes]:
        """Return the row's fields; none where there is no row."""
        fields = cast(dict[bytes, bytes], self.store.hgetall(self.row_name(key, principal, operation)))
        return {name.decode(): value for name, value in fields.items()}

    def rows(self) -> dict[bytes, Any]:
        """Return everything there is, byte for byte, without the time it has left."""
        names = cast(list[bytes], self.store.keys())
        return {name: self.store.dump(name) for name in names}

    def omitted(self, key: str = "k1") -> bytes:
        """Return why the finished row has no body; nothing where it has one."""
        row = self.row(key)
        assert "response_body" in row, f"the row is {row['status']!r}"
        return row.get("response_omitted", b"")

    def pttl(self, key: str = "k1") -> int:
        """Return the milliseconds that the row still lives."""
        left: int = self.store.pttl(self.row_name(key))
        return left

    def kept_headers(self, key: str = "k1") -> list[list[str]]:
        headers: list[list[str]] = json.loads(self.row(key)["response_headers"])
        return headers

    def told(self) -> list[str]:
        return [event.name for event in self.events]

    def close(self) -> None:
        self.store.close()


class Site(Door):
    """A Flask application with its extension and ledger."""

    kind = "flask"

    def __init__(
        self,
        server: redis.Redis | str,
        store: redis.Redis,
        namespace: str,
        *,
        principal: Any = PRINCIPAL,
        policy: Policy | None = None,
        ledger: type[Ledger] = Ledger,
        log_keys: bool = False,
        socket_timeout: float | None = None,
        app: Flask | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(store, namespace)
        make: Any = ledger.from_url if isinstance(server, str) else ledger
        timeout = SOCKET_TIMEOUT if isinstance(server, str) else PATIENCE
        how = {"log_keys": log_keys, "socket_timeout": timeout if socket_timeout is None else socket_timeout}
        self.ledger: Ledger = make(server, policy, namespace, (self.events.append,), **how)
        tap(self.ledger.client, Sent(self.sent))
        self.app = Flask("shop") if app is None else app
        self.app.config.update({f"IDEMREDIS_{name}": value for name, value in settings.items()})
        self.idempotency = Idempotency(principal=principal, ledger=self.ledger)
        self.idempotency.init_app(self.app)

    @property
    def client(self) -> FlaskClient:
        return self.app.test_client()

    def view(self, run: Callable[..., Any] | None = None, path: str = "/charges", **options: Any) -> None:
        methods = options.pop("methods", METHODS)
        view = self.counted(run, path)

        def answer(**args: Any) -> Any:
            made = view(**args)
            if isinstance(made, Stream):
                pieces: Any = iter(made.pieces)
                return Response(pieces, made.status, made.headers)
            return made

        protected = self.idempotency.protect(**options)(answer)
        self.app.add_url_rule(path, path.replace(".", "-"), protected, methods=methods)

    def send(
        self, key: str | None = "k1", path: str = "/charges", method: str = "POST", **options: Any
    ) -> TestResponse:
        headers = list(options.pop("headers", ()))
        options.setdefault("buffered", True)  # a stream that nobody reads is not settled
        if key is not None:
            headers.append(("Idempotency-Key", key))
        if not options.keys() & {"data", "json", "input_stream"}:
            options["json"] = {"amount": 1000}
        overrides = {**options.pop("environ_overrides", {})}
        if not method.isupper():
            overrides["REQUEST_METHOD"] = method
        if (raw_key := options.pop("raw_key", None)) is not None:
            overrides["HTTP_IDEMPOTENCY_KEY"] = raw_key
        if (announced := options.pop("announced", None)) is not None:
            overrides["CONTENT_LENGTH"] = str(announced)
        if options.pop("chunked", False):
            overrides |= {"wsgi.input_terminated": True, "HTTP_TRANSFER_ENCODING": "chunked"}
        return self.client.open(path, method=method, headers=headers, environ_overrides=overrides, **options)

    def body(self) -> bytes:
        return request.get_data()

    def header(self, name: str) -> str:
        return request.headers[name]

    def abort(self, status: int) -> Any:
        return abort(status)

    def close(self) -> None:
        self.ledger.close()
        self.ledger.client.close()
        super().close()


class Sent:
    """Notes the scripts that a client asks for."""

    def __init__(self, noted: list[str]) -> None:
        self._noted = noted

    def sent(self, words: Words) -> Words:
        if words[0] in (b"EVALSHA", b"EVAL"):
            self._noted.append(words[0].decode())
        return words

    def replied(self, words: Words, reply: Any) -> Any:
        return reply


class MakeSite(Protocol):
    def __call__(self, server: AnyServer | None = None, **options: Any) -> Site: ...


@pytest.fixture
def make_site(every_key_left_expires: Servers, namespace: str) -> Iterator[MakeSite]:
    """Make sites: `make_site(server, principal=…, policy=…, ledger=…, PROTOCOL="ietf", …)`.

    The ledger has a client of the server's, or `client=`, or what `from_url` makes of `url=`.
    """
    made: list[Site] = []

    def make(server: AnyServer | None = None, **options: Any) -> Site:
        server = server or every_key_left_expires.get("fakeredis")
        given = options.pop("url", None) or options.pop("client", None) or server.client()
        made.append(Site(given, server.client(), namespace, **options))
        return made[-1]

    yield make
    for site in made:
        site.close()


@pytest.fixture
def site(make_site: MakeSite) -> Site:
    """A site whose `/charges` counts itself and answers 201."""
    site = make_site()
    site.view()
    return site


def bodies(responses: Iterable[TestResponse]) -> list[tuple[int, bytes]]:
    return [(response.status_code, response.data) for response in responses]
