"""One library that makes calls safe to repeat, behind stdin and stdout. Run by the Python that has it installed.

`python peer.py NAME REDIS_URL`; each line `KIND CALLS` is answered with a JSON list of microseconds.
"""

from __future__ import annotations

import importlib
import io
import json
import sys
import time
import warnings
from collections.abc import Callable
from itertools import count
from typing import Any
from urllib.parse import urlsplit

Actions = dict[str, Callable[[], object]]

BODY = b'{"id":"ch_1","amount":1000}'.ljust(500)
ORDER = b'{"amount":1000}'
RESULT = {"id": "ch_1", "amount": 1000, "note": "x" * 450}

_keys = count()


def key() -> str:
    return f"8e03978e-40d5-43dd-bc93-{next(_keys):012x}"


def idemredis(url: str) -> Actions:
    ours, policy = importlib.import_module("idemredis"), importlib.import_module("idemredis").Policy()
    flask = importlib.import_module("idemredis.flask")
    ledger = ours.Ledger.from_url(url, policy)

    @ledger.once(principal="acct_1", key=lambda name: name)
    def charge(name: str) -> dict[str, object]:
        return RESULT

    app, view = plain_app()
    idempotency = flask.Idempotency(app, principal="acct_1", ledger=ledger)
    app.add_url_rule("/charges", view_func=idempotency.protect(view), methods=["POST"])
    return actions(charge, app.wsgi_app)


def idemkit(url: str) -> Actions:
    library, ai = importlib.import_module("idemkit"), importlib.import_module("idemkit.adapters.ai")
    policy = importlib.import_module("idemkit.core.policy")
    backend = library.RedisBackend.from_url(url)

    @ai.idempotent_sync(backend=backend, config=policy.MethodConfig(key_fields=["name"], scope=lambda **_: "acct_1"))
    def charge(*, name: str) -> dict[str, object]:
        return RESULT

    app, view = plain_app()
    app.add_url_rule("/charges", view_func=view, methods=["POST"])
    wsgi = library.WSGIIdempotencyMiddleware(
        app.wsgi_app,
        backend=library.RedisBackend.from_url(url),
        config=library.HttpConfig(scope=lambda request: "acct_1"),
    )
    return actions(lambda name: charge(name=name), wsgi)


def powertools(url: str) -> Actions:
    utilities = importlib.import_module("aws_lambda_powertools.utilities.idempotency")
    persistence = importlib.import_module("aws_lambda_powertools.utilities.idempotency.persistence.redis")
    where = urlsplit(url)
    client = importlib.import_module("redis").Redis(host=where.hostname, port=where.port, decode_responses=True)
    store = persistence.RedisCachePersistenceLayer(client=client)

    @utilities.idempotent_function(data_keyword_argument="name", persistence_store=store)
    def charge(*, name: str) -> dict[str, object]:
        return RESULT

    return actions(lambda name: charge(name=name), None)


def plain_app() -> tuple[Any, Callable[[], tuple[bytes, int, dict[str, str]]]]:
    def charge() -> tuple[bytes, int, dict[str, str]]:
        return BODY, 201, {"Content-Type": "application/json"}

    return importlib.import_module("flask").Flask("shop"), charge


def actions(function: Callable[[str], object], wsgi: Any) -> Actions:
    made: Actions = {"function": lambda: function(key()), "function again": lambda: function("always")}
    if wsgi is not None:
        made |= {"request": lambda: post(wsgi, key()), "request again": lambda: post(wsgi, "always")}
    return made


def post(wsgi: Any, name: str) -> bytes:
    test = importlib.import_module("werkzeug.test")
    global _environ
    if not _environ:
        _environ = test.EnvironBuilder(
            "/charges", method="POST", data=ORDER, content_type="application/json"
        ).get_environ()
    sent = {**_environ, "wsgi.input": io.BytesIO(ORDER), "HTTP_IDEMPOTENCY_KEY": name}
    statuses: list[str] = []

    def start_response(status: str, headers: object, info: object = None) -> Callable[[bytes], None]:
        statuses.append(status)
        return lambda data: None

    answer = wsgi(sent, start_response)
    body = b"".join(answer)
    getattr(answer, "close", lambda: None)()
    if statuses != ["201 CREATED"] and statuses != ["201 Created"]:
        raise RuntimeError(f"{statuses} {body[:200]!r}")
    return body


_environ: dict[str, Any] = {}


def main() -> None:
    warnings.simplefilter("ignore")
    made = {"idemredis": idemredis, "idemkit": idemkit, "powertools": powertools}[sys.argv[1]](sys.argv[2])
    print(json.dumps(sorted(made)), flush=True)
    for line in sys.stdin:
        kind, calls = line.rsplit(" ", 1)
        times = []
        for _ in range(int(calls)):
            began = time.perf_counter()
            made[kind]()
            times.append((time.perf_counter() - began) * 1e6)
        print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
