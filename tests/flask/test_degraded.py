"""Views that run unprotected, because the application has chosen so: without a key, in an outage, or to try it out."""

from __future__ import annotations

import io
from typing import Any

import pytest
import redis
from flask import Response, abort, request
from redis.backoff import NoBackoff
from redis.retry import Retry

from idemredis import NoReservation
from idemredis.flask import current_reservation
from tests.support.site import MakeSite, Site


def _unreachable() -> redis.Redis:
    return redis.Redis(port=1, retry=Retry(NoBackoff(), 0))


DEGRADED: dict[str, dict[str, Any]] = {
    "no key": {"REQUIRED": False},
    "outage": {"FAIL_OPEN": True, "client": "unreachable"},
    "observe": {"MODE": "observe"},
    "observe in an outage": {"MODE": "observe", "client": "unreachable"},
    "observe without a key": {"MODE": "observe"},
    "off": {"MODE": "off"},
    "off without a key": {"MODE": "off"},
}


def _degraded(make_site: MakeSite, case: str, **more: Any) -> Site:
    options = {**DEGRADED[case], **more}
    if options.get("client"):
        options["client"] = _unreachable()
    return make_site(**options)


def _key(case: str) -> str | None:
    return None if "no key" in case or "without a key" in case else "k1"


@pytest.mark.parametrize("case", DEGRADED)
def test_teardown_functions_of_an_unprotected_view_can_ask_for_the_reservation(case: str, make_site: MakeSite) -> None:
    site = _degraded(make_site, case)
    seen: list[bool] = []
    site.app.teardown_request(lambda error: seen.append(bool(current_reservation) or current_reservation.held))
    site.view()
    site.send(_key(case))
    assert seen == [False]
    assert not current_reservation
    with pytest.raises(NoReservation):
        current_reservation.ensure_held()


@pytest.mark.slow
@pytest.mark.parametrize("case", DEGRADED)
@pytest.mark.parametrize("size", [10, 300_000])
def test_the_body_reaches_an_unprotected_view_and_its_streamed_answer(
    case: str, size: int, make_site: MakeSite
) -> None:
    site = _degraded(make_site, case)
    stream = lambda: Response(iter(lambda: request.stream.read(1000), b""))  # noqa: E731
    site.view(lambda: Response(iter(request.stream), 201))
    site.view(stream, "/context")
    body = b"0123456789" * (size // 10)
    assert site.send(_key(case), data=body).data == body


# Events


# MODE = "observe"


def test_an_incomplete_body_is_read_as_without_the_extension_while_observing(make_site: MakeSite) -> None:
    site = make_site(MODE="observe")
    site.view(lambda: request.get_data())
    overrides = {"CONTENT_LENGTH": "100", "wsgi.input": io.BytesIO(b"12345")}
    assert site.send(data=b"", environ_overrides=overrides).status_code == 400  # Werkzeug's ClientDisconnected
    assert (len(site.runs), site.rows()) == (1, {})


# MODE = "off"


@pytest.mark.parametrize("protect_all", [False, True])
def test_turned_off_nothing_is_asked_recorded_or_sent(protect_all: bool, make_site: MakeSite) -> None:
    site = make_site(MODE="off", PROTECT_ALL=protect_all, principal=lambda: abort(500))
    inputs: list[Any] = []
    site.app.before_request(lambda: inputs.append(type(request.environ["wsgi.input"])))
    site.view()
    site.app.add_url_rule("/plain", "plain", lambda: "done", methods=["POST"])
    assert [site.send(path=path).status_code for path in ("/charges", "/charges", "/plain")] == [201, 201, 200]
    assert (site.sent, site.events, set(inputs)) == ([], [], {io.BytesIO})
