"""With a real Sentry client: errors of a protected view are reported, and docs/flask.md keeps keys out of them."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import Server

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow

# Sentry changes the process for good, so the application has one of its own; a snippet sets Sentry up.
APPLICATION = """
    import json
    import sys

    import redis
    from flask import Flask
    from sentry_sdk.transport import Transport

    class Collected(Transport):
        envelopes = []

        def capture_envelope(self, envelope):
            self.envelopes.append(envelope)

        def flush(self, *args, **options):
            pass

        def kill(self):
            pass

    exec(sys.argv[2].replace("sentry_sdk.init(", "sentry_sdk.init(transport=Collected, traces_sample_rate=1.0, "))

    from idemredis.flask import Idempotency, current_reservation

    app = Flask("shop")
    secret = "secret" + "-"  # not as it is in the lines of this program, which Sentry sends from Python 3.13 on
    idempotency = Idempotency(app, principal=lambda: secret + "principal", client=redis.Redis.from_url(sys.argv[1]))

    @app.post("/<what>")
    @idempotency.protect
    def view(what):
        current_reservation.checkpoint(what)
        return {}[what] if what == "fails" else what

    key = secret + "key"
    for path in ("/fails", "/works", "/works", "/fails"):
        app.test_client().post(path, headers={"Idempotency-Key": f"{key}{path}"}, data=secret + "body")
    events = [item.payload.json for envelope in Collected.envelopes for item in envelope.items if item.payload.json]
    print(json.dumps(events))
"""
PLAIN = 'import sentry_sdk\nsentry_sdk.init(dsn="https://public@sentry.example/1")'


def _events(server: Server, snippet: str) -> list[dict[str, Any]]:
    words = [sys.executable, "-c", textwrap.dedent(APPLICATION), server.url, snippet]
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert ran.returncode == 0, ran.stderr
    events: list[dict[str, Any]] = json.loads(ran.stdout.splitlines()[-1])
    return events


def _errors(events: list[dict[str, Any]]) -> list[str]:
    return [event["exception"]["values"][-1]["type"] for event in events if "exception" in event]


def _of_document() -> str:
    text = (ROOT / "docs" / "flask.md").read_text()
    return next(block.split("\n```\n")[0] for block in text.split("```python\n") if "sentry_sdk.init" in block)


def test_an_error_of_a_protected_view_is_reported_with_the_clients_key_and_no_more(valkey_server: Server) -> None:
    pytest.importorskip("sentry_sdk")
    events = _events(valkey_server, PLAIN)
    assert _errors(events) == ["KeyError", "KeyError"]
    assert [event["transaction"] for event in events if event.get("type") == "transaction"] == ["view"] * 4
    assert "secret-key" in json.dumps(events)
    for hidden in ("secret-principal", "secret-body"):
        assert hidden not in json.dumps(events)


def test_what_the_document_says_keeps_keys_out_of_sentry(valkey_server: Server) -> None:
    pytest.importorskip("sentry_sdk")
    events = _events(valkey_server, _of_document())
    assert _errors(events) == ["KeyError", "KeyError"]
    assert "secret-" not in json.dumps(events)
