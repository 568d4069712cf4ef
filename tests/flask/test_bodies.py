"""What recording a request body costs, and where it ends: limits, a full disk, views that are not protected."""

from __future__ import annotations

import hashlib
import io
import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from flask import Blueprint, Flask, abort, request
from flask.views import MethodView

from idemredis import fingerprint_request
from tests.support.counting import count_calls
from tests.support.site import MakeSite, Site

CHUNKED = {"wsgi.input_terminated": True, "HTTP_TRANSFER_ENCODING": "chunked"}
BIG = bytes(range(256)) * 1200
"""More than is kept in memory."""


@contextmanager
def _small_files(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _by_line() -> str:
    return str(sum(len(line) for line in request.stream))


def _by_readline() -> str:
    size = 0
    while line := request.environ["wsgi.input"].readline():
        size += len(line)
    return str(size)


# Speed


@pytest.mark.slow
@pytest.mark.parametrize("reads", [_by_line, _by_readline])
@pytest.mark.parametrize("terminated", [False, True])
@pytest.mark.parametrize("where", ["unprotected", "before", "view", "both"])
def test_reading_line_by_line_costs_no_more_than_without_the_extension(
    where: str, terminated: bool, reads: Callable[[], str], make_site: MakeSite
) -> None:
    body = (b"x" * 59 + b"\n") * 500
    overrides = CHUNKED if terminated else {}
    bare = Flask("bare")
    bare.add_url_rule("/lines", "lines", reads, methods=["POST"])
    site = make_site()
    if where in ("before", "both"):
        site.app.before_request(lambda: reads() and None)
    view = (lambda: str(len(body))) if where == "before" else reads
    if where == "unprotected":
        site.app.add_url_rule("/lines", "lines", view, methods=["POST"])
    else:
        site.view(view, "/lines")
    site.send("k0", "/lines", data=body, environ_overrides=overrides)
    key = [("Idempotency-Key", "k1")]

    def send(app: Flask) -> int:
        return count_calls(
            lambda: answers.append(
                app.test_client().post("/lines", data=body, headers=key, environ_overrides=overrides).text
            )
        )

    answers: list[str] = []
    plain, ours = send(bare), send(site.app)
    assert answers == [str(len(body))] * 2
    assert ours <= plain * (2 if where == "both" else 1) + 3000


# Views that are not protected


@pytest.mark.parametrize("path", ["/plain", "/exempt", "/blueprint", "/method", "/nowhere"])
@pytest.mark.parametrize("protect_all", [False, True])
def test_the_body_of_a_view_that_is_not_protected_is_not_touched(
    path: str, protect_all: bool, make_site: MakeSite
) -> None:
    site = make_site(PROTECT_ALL=protect_all)
    app, idempotency = site.app, site.idempotency
    seen: list[object] = []

    def look() -> None:
        seen.append(request.environ["wsgi.input"])

    def view() -> str:
        return hashlib.sha256(request.get_data()).hexdigest()

    class Partly(MethodView):
        put = idempotency.protect(view)
        post = idempotency.exempt(view)

    app.before_request(look)
    if not protect_all:
        app.add_url_rule("/plain", "plain", view, methods=["POST"])
    app.add_url_rule("/exempt", "exempt", idempotency.exempt(lambda: view()), methods=["POST"])
    app.add_url_rule("/method", view_func=Partly.as_view("partly"))
    blueprint = idempotency.exempt(Blueprint("open", __name__))
    blueprint.add_url_rule("/blueprint", "view", lambda: view(), methods=["POST"])
    app.register_blueprint(blueprint)
    body = io.BytesIO(BIG)
    answer = site.send(path=path, input_stream=body, content_length=len(BIG))
    assert seen == [body]
    if answer.status_code == 200:
        assert answer.text == hashlib.sha256(BIG).hexdigest()
    assert site.sent == []


def test_a_full_disk_fails_no_request_of_a_view_that_is_not_protected(site: Site) -> None:
    site.app.add_url_rule("/plain", "plain", lambda: str(len(request.get_data())), methods=["POST"])
    site.app.before_request(lambda: request.get_data() and None)
    with _small_files(1000):
        assert site.send(path="/plain", data=BIG).text == str(len(BIG))


# Limits


@pytest.mark.parametrize("terminated", [False, True])
@pytest.mark.parametrize("read_before", [False, True])
def test_a_body_over_the_limit_is_refused_and_claims_nothing(
    terminated: bool, read_before: bool, make_site: MakeSite
) -> None:
    site = make_site(MAX_REQUEST_BYTES=100_000)
    if read_before:
        site.app.before_request(lambda: request.get_data() and None)
    site.view()
    overrides = CHUNKED if terminated else {}
    answer = site.send(data=b"x" * 100_001, environ_overrides=overrides)
    assert (answer.status_code, answer.get_json()["error"]) == (413, "idempotency_body_too_large")
    assert "100000 bytes" in answer.get_json()["message"]
    assert (site.runs, site.rows()) == ([], {})
    assert site.send(data=b"x" * 100_000, environ_overrides=overrides).status_code == 201


@pytest.mark.parametrize("terminated", [False, True])
@pytest.mark.parametrize(("own", "size"), [(50_000, 60_000), (50_000, 200_000), (150_000, 200_000)])
def test_flasks_own_limit_comes_first(own: int, size: int, terminated: bool, make_site: MakeSite) -> None:
    site = make_site(MAX_REQUEST_BYTES=100_000)
    site.app.config["MAX_CONTENT_LENGTH"] = own
    site.view()
    answer = site.send(data=b"x" * size, environ_overrides=CHUNKED if terminated else {})
    ours = terminated and own > 100_000  # how long a chunked body is shows only as it is read
    assert (answer.status_code, answer.is_json) == (413, ours)
    assert (site.runs, site.rows()) == ([], {})


def test_nothing_is_written_of_a_body_over_flasks_own_limit(site: Site) -> None:
    site.app.config["MAX_CONTENT_LENGTH"] = 1000
    site.app.before_request(lambda: request.environ["wsgi.input"].read() and None)
    with _small_files(0):
        assert site.send(data=BIG).status_code == 413


def test_a_stream_that_the_application_kept_before_the_claim_is_at_its_end_afterwards(site: Site) -> None:
    kept: list[Any] = []
    site.app.before_request(lambda: kept.append(request.environ["wsgi.input"]))

    def view() -> str:
        assert kept[0].read() == b""
        return request.get_data(as_text=True)

    site.view(view, "/things")
    answer = site.send(path="/things", data=b"first\nsecond\n")
    assert answer.text == "first\nsecond\n"
    assert site.row()["fingerprint"].decode() == fingerprint_request("POST", "/things", {}, b"first\nsecond\n")


# No room


@pytest.mark.parametrize("room", [0, 4096, 262_144, 300_000])
@pytest.mark.parametrize("read_before", [False, True])
@pytest.mark.parametrize("terminated", [False, True])
def test_a_body_that_does_not_fit_on_the_disk_is_refused_and_its_retry_is_not_locked_out(
    room: int, read_before: bool, terminated: bool, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    if read_before:
        site.app.before_request(lambda: request.environ["wsgi.input"].read(290_000) and None)
    site.view(lambda: hashlib.sha256(request.get_data()).hexdigest(), "/things")
    overrides = CHUNKED if terminated else {}
    with _small_files(room):
        answer = site.send(path="/things", data=BIG, environ_overrides=overrides)
        assert site.send("small", "/things", data=b"x").status_code == 200
    assert (answer.status_code, answer.get_json()["error"]) == (503, "idempotency_unavailable")
    assert answer.headers["Retry-After"]
    assert "does not fit into the temporary directory" in caplog.text
    assert (len(site.runs), site.row()) == (1, {})
    assert site.send(path="/things", data=BIG).text == hashlib.sha256(BIG).hexdigest()


def test_without_any_temporary_directory_the_body_is_kept_in_memory_up_to_its_limit(
    make_site: MakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Flask itself keeps a JSON body; on a machine whose disks cannot be written at all."""

    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    site = make_site(MAX_REQUEST_BYTES=len(BIG))
    site.view(lambda: hashlib.sha256(request.get_data()).hexdigest())
    assert [site.send(data=BIG).text for _ in range(2)] == [hashlib.sha256(BIG).hexdigest()] * 2
    assert (site.send("k2", data=BIG + b"x").status_code, len(site.runs)) == (413, 1)


# Views behind decorators


def _hiding(view: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: view()


class _Wrapper:
    def __init__(self, view: Callable[[], Any]) -> None:
        self.view = view

    def __call__(self) -> Any:
        return self.view()


@pytest.mark.parametrize("decorator", [_hiding, _Wrapper, lambda view: _hiding(_Wrapper(_hiding(view)))])
@pytest.mark.parametrize("terminated", [False, True])
def test_a_body_read_before_a_view_that_a_decorator_hides_counts_whole(
    decorator: Callable[[Any], Any], terminated: bool, site: Site
) -> None:
    site.app.before_request(lambda: request.stream.read(10) and None)
    hidden = decorator(site.idempotency.protect(lambda: request.get_data()))
    site.app.add_url_rule("/hidden", "hidden", hidden, methods=["POST"])
    overrides = CHUNKED if terminated else {}
    assert site.send(path="/hidden", data=BIG, environ_overrides=overrides).data == BIG
    assert site.row()["fingerprint"].decode() == fingerprint_request("POST", "/hidden", {}, BIG)
    assert site.send(path="/hidden", data=BIG[:-1], environ_overrides=overrides).status_code == 409


def test_a_protected_view_that_cannot_be_seen_from_outside_never_counts_half_a_body(site: Site) -> None:
    """As one that is looked up at run time. From the second request on it is known."""
    table = {"charge": site.idempotency.protect(lambda: request.get_data())}
    read: list[str] = ["part"]

    @site.app.before_request
    def look() -> None:
        if read[-1] == "part":
            request.stream.read(3)
        elif read[-1] == "whole":
            request.get_data()

    def find() -> Any:
        return table[request.args["do"]]()

    site.app.add_url_rule("/do", "do", find, methods=["POST"])
    assert site.send(path="/do?do=charge", data=b"12345", environ_overrides=CHUNKED).status_code == 500
    assert site.rows() == {}
    for how in ("part", "whole", "not at all"):
        read.append(how)
        assert site.send(how, "/do?do=charge", data=b"12345", environ_overrides=CHUNKED).data == b"12345"


def test_what_a_request_that_was_turned_away_had_read_is_freed(site: Site) -> None:
    site.app.before_request(lambda: abort(401) if request.get_data() else None)
    for _ in range(2):
        assert site.send(data=BIG).status_code == 401  # a file left open would be a ResourceWarning
