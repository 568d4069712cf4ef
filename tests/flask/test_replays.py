"""What comes back: the stored answer to the last byte, and what becomes of answers that are not stored."""

from __future__ import annotations

import gc
import io
import itertools
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flask import (
    Flask,
    Response,
    abort,
    after_this_request,
    jsonify,
    make_response,
    redirect,
    request,
    send_file,
    session,
    stream_with_context,
)
from werkzeug.exceptions import BadRequest, HTTPException, ServiceUnavailable
from werkzeug.test import TestResponse

from idemredis import ConfigurationError, StoredResponse
from idemredis.flask import current_reservation
from tests.support.clock import SLACK, TurnedClock
from tests.support.site import MakeSite, Site

CAP = 16384


def _headers(response: TestResponse) -> list[tuple[str, str]]:
    """Those of the answer, repeated ones in their order; a Content-Length made anew comes last."""
    pairs = [(name, value) for name, value in response.headers if name != "Idempotent-Replayed"]
    return sorted(pairs, key=lambda pair: pair[0] == "Content-Length")


def _assert_replayed(site: Site, first: TestResponse, again: TestResponse, runs: int = 1) -> None:
    assert again.headers["Idempotent-Replayed"] == "true"
    assert "Idempotent-Replayed" not in first.headers
    assert (again.status_code, again.data) == (first.status_code, first.data)
    assert _headers(again) == _headers(first)
    assert len(site.runs) == runs


def _broken(pieces: int = 1) -> Iterator[bytes]:
    yield from [b"x" * 10] * pieces
    raise OSError("the source broke")


# The stored answer


NEVER = [
    ("Set-Cookie", "session=first-caller"),
    ("Set-Cookie2", "a=b"),
    ("Connection", "close"),
    ("Keep-Alive", "timeout=5"),
    ("Proxy-Authenticate", "Basic"),
    ("TE", "trailers"),
    ("Trailer", "Expires"),
    ("Transfer-Encoding", "chunked"),
    ("Upgrade", "h2c"),
    ("Date", "Wed, 21 Oct 2015 07:28:00 GMT"),
]


@pytest.mark.parametrize("name", [*dict(NEVER), "content-length", "WWW-Authenticate"])
def test_a_header_that_is_never_stored_is_refused_in_the_settings(name: str, make_site: MakeSite) -> None:
    with pytest.raises(ConfigurationError, match=rf"IDEMREDIS_REPLAY_HEADERS must be without '{name}'.*remove it from"):
        make_site(REPLAY_HEADERS=("content-type", name))


def test_no_content_type_is_invented(site: Site) -> None:
    def bare() -> Response:
        response = Response(b"1")
        del response.headers["Content-Type"]
        return response

    site.view(bare, "/things")
    first, again = site.send(path="/things"), site.send(path="/things")
    assert "Content-Type" not in first.headers
    _assert_replayed(site, first, again)


@pytest.mark.parametrize("path", ["/abort", "/raised", "/handled", "/redirect", "/json", "/unrouted", "/response"])
def test_what_the_applications_error_handlers_made_is_what_comes_back(path: str, site: Site) -> None:
    class OutOfStock(Exception):
        pass

    def raised() -> Any:
        raise BadRequest("no such item")

    def handled() -> Any:
        raise OutOfStock

    views: dict[str, Callable[[], Any]] = {
        "/abort": lambda: abort(422),
        "/raised": raised,
        "/handled": handled,
        "/redirect": lambda: redirect("/charges/7", 303),
        "/json": lambda: request.get_json() and abort(404, "gone"),
        "/unrouted": lambda: request.form["missing"],
        "/response": lambda: abort(make_response("made", 410, {"Location": "/there"})),
    }
    site.app.register_error_handler(OutOfStock, lambda error: ({"error": "out of stock"}, 409))
    site.app.register_error_handler(404, lambda error: (f"handled: {error.description}", 404))
    site.view(views[path], path)
    first, again = site.send(path=path), site.send(path=path)
    assert first.status_code < 500
    _assert_replayed(site, first, again)
    assert site.omitted() == b""


# Failures


FAILURES: dict[str, Callable[[], Any]] = {
    "500": lambda: ("broken", 500),
    "503": lambda: abort(503),
    "599": lambda: ("odd", 599),
    "exception": lambda: 1 / 0,
}


def _fail(site: Site, failure: str) -> int:
    try:
        return site.send().status_code
    except ZeroDivisionError:
        return 500


@pytest.mark.parametrize("propagate", [False, True])
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("per_view", [False, True])
def test_under_release_a_failure_is_run_again_at_once(
    failure: str, propagate: bool, per_view: bool, make_site: MakeSite
) -> None:
    site = make_site(ON_ERROR="hold") if per_view else make_site()
    site.app.config["PROPAGATE_EXCEPTIONS"] = propagate
    site.view(FAILURES[failure], **({"on_error": "release"} if per_view else {}))
    statuses = [_fail(site, failure) for _ in range(3)]
    assert statuses == [int(failure) if failure.isdigit() else 500] * 3
    assert (len(site.runs), site.row()["generation"], site.row()["owner"]) == (3, b"3", b"")


@pytest.mark.parametrize("propagate", [False, True])
@pytest.mark.parametrize("failure", FAILURES)
def test_under_hold_a_failure_keeps_the_key_until_the_lease_ends(
    failure: str, propagate: bool, make_site: MakeSite, clock: TurnedClock
) -> None:
    site = make_site(ON_ERROR="hold")
    site.app.config["PROPAGATE_EXCEPTIONS"] = propagate
    site.view(FAILURES[failure])
    _fail(site, failure)
    busy = site.send()
    assert (busy.status_code, len(site.runs)) == (409, 1)
    assert 30_000 - SLACK * 1000 < busy.get_json()["lease_ms"] <= 30_000
    clock.turn(30)
    _fail(site, failure)
    assert (len(site.runs), site.row()["generation"]) == (2, b"2")


@pytest.mark.parametrize("propagate", [False, True])
@pytest.mark.parametrize("failure", FAILURES)
def test_under_store_a_failure_is_final_and_replayed(failure: str, propagate: bool, make_site: MakeSite) -> None:
    site = make_site(ON_ERROR="store")
    site.app.config["PROPAGATE_EXCEPTIONS"] = propagate
    site.view(FAILURES[failure])
    status = _fail(site, failure)
    again = site.send()
    assert (again.status_code, again.headers["Idempotent-Replayed"], len(site.runs)) == (status, "true", 1)
    assert (site.row()["status"], site.omitted()) == (b"failed", b"")


def test_under_store_the_page_of_the_applications_own_handler_is_what_comes_back(make_site: MakeSite) -> None:
    site = make_site(ON_ERROR="store")
    site.app.register_error_handler(500, lambda error: ({"error": "ours"}, 502))
    site.view(lambda: 1 / 0)
    first, again = site.send(), site.send()
    _assert_replayed(site, first, again)
    assert again.get_json() == {"error": "ours"}


def test_under_store_a_streamed_error_page_is_kept_as_it_was_streamed(make_site: MakeSite) -> None:
    site = make_site(ON_ERROR="store")
    site.app.register_error_handler(500, lambda error: Response(iter(["our ", "page"]), 500))
    site.view(lambda: 1 / 0)
    first, again = site.send(), site.send()
    assert (first.data, again.data, len(site.runs)) == (b"our page", b"our page", 1)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("teardown_fails", [False, True])
def test_an_exit_in_the_view_gives_the_key_up_at_once(
    error: type[BaseException], teardown_fails: bool, make_site: MakeSite
) -> None:
    site = make_site()

    def leave() -> str:
        if len(site.runs) == 1:
            raise error
        return "done"

    def fail(_: BaseException | None) -> None:
        if teardown_fails and len(site.runs) == 1:
            raise LookupError("the session was gone")

    site.app.teardown_request(fail)
    site.view(leave)
    with pytest.raises((error, LookupError)):
        site.send()
    assert site.row()["owner"] == b""
    assert site.send().data == b"done"


# What the view decides


# Streams


def _stream(pieces: Iterable[Any], length: int | None = None, status: int = 200) -> Response:
    response = Response(iter(pieces), status)
    if length is not None:
        response.content_length = length
    return response


def test_a_stream_of_text_and_bytes_is_stored_whole(site: Site) -> None:
    site.view(lambda: _stream(["caf\xe9 ", b"\xff", "end"]), "/things")
    first, again = site.send(path="/things"), site.send(path="/things")
    assert first.data == again.data == b"caf\xc3\xa9 \xffend"
    assert len(site.runs) == 1


@pytest.mark.parametrize(("pieces", "omitted"), [(5, b""), (None, b"too_large")])
def test_a_small_stream_whose_client_goes_away_is_collected_to_its_end(
    pieces: int | None, omitted: bytes, site: Site
) -> None:
    closed: list[bool] = []

    def generate() -> Iterator[bytes]:
        try:
            for _ in itertools.count() if pieces is None else range(pieces):
                yield b"xy"
        finally:
            closed.append(True)

    site.view(lambda: Response(generate(), 201), "/things")
    response = site.send(path="/things", buffered=False)
    chunks = response.iter_encoded()
    assert next(chunks) == b"xy"
    assert site.row()["status"] == b"pending"
    response.close()
    assert (site.omitted(), closed) == (omitted, [True])
    again = site.send(path="/things")
    assert (again.status_code, len(site.runs)) == (500 if omitted else 201, 1)
    assert omitted or again.data == b"xy" * 5


def test_a_slow_stream_whose_client_goes_away_is_a_tombstone_and_holds_its_worker_for_seconds_at_most(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("idemredis.web.recorder.DRAIN_SECONDS", 0.05)

    def generate() -> Iterator[bytes]:
        while True:
            yield b"x"
            time.sleep(0.01)

    site.view(lambda: Response(generate(), 201), "/things")
    response = site.send(path="/things", buffered=False)
    next(response.iter_encoded())
    response.close()
    assert (site.omitted(), site.send(path="/things").status_code) == (b"broken_off", 500)


def test_the_row_of_a_stream_stays_pending_until_it_has_been_sent(site: Site) -> None:
    site.view(lambda: Response(iter([b"a", b"b"])), "/things")
    response = site.send(path="/things", buffered=False)
    assert site.send(path="/things").status_code == 409
    assert b"".join(response.iter_encoded()) == b"ab"
    assert site.send(path="/things").data == b"ab"


def test_a_big_stream_costs_no_memory_in_proportion(site: Site) -> None:
    pieces, size = 2048, 16 * 1024

    def view() -> Response:
        return Response((b"x" * size for _ in range(pieces)), 201)

    site.view(view, "/things")
    site.view(lambda: _stream((b"x" * size for _ in range(pieces)), 5), "/liar")
    for key, path in (("k1", "/things"), ("k2", "/liar")):
        tracemalloc.start()
        response = site.send(key, path, buffered=False)
        sent = sum(len(piece) for piece in response.iter_encoded())
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        response.close()
        assert sent == pieces * size
        assert peak < 4 * 1024 * 1024
        assert site.omitted(key) == b"too_large"


def test_a_generator_can_use_the_reservation_in_a_request_context(site: Site) -> None:
    def pieces() -> Iterator[str]:
        yield f"{current_reservation.generation} {current_reservation.held} "
        current_reservation.checkpoint("sent", {"n": 1})
        yield current_reservation.key

    site.view(lambda: Response(stream_with_context(pieces())), "/things")
    first, again = site.send(path="/things"), site.send(path="/things")
    assert first.data == again.data == b"1 True k1"
    assert (site.row()["checkpoint"], len(site.runs)) == (b"sent", 1)


@pytest.mark.parametrize("begun", [False, True])
def test_a_generator_without_a_context_that_asks_for_the_reservation_breaks_its_stream(begun: bool, site: Site) -> None:
    def pieces() -> Iterator[str]:
        yield "begun" if begun else ""
        yield str(current_reservation.generation)

    site.view(lambda: Response(pieces()), "/things")
    with pytest.raises(RuntimeError):
        site.send(path="/things")
    if begun:
        assert (site.omitted(), site.send(path="/things").status_code) == (b"broken_off", 500)
    else:
        assert site.row()["owner"] == b""


def test_the_stream_of_a_big_upload_can_be_sent_back(site: Site) -> None:
    """Also where the answer begins after the request has been torn down, and on a view that is not protected."""
    data = bytes(range(256)) * 4096

    def echo() -> Response:
        stream = request.stream
        return Response(iter(lambda: stream.read(65536), b""))

    def lines() -> Response:
        return Response(iter(request.stream))

    site.view(echo, "/echo")
    site.view(lines, "/lines")
    site.app.add_url_rule("/plain", "plain", echo, methods=["POST"])
    site.app.add_url_rule("/plain-lines", "plain-lines", lines, methods=["POST"])
    assert site.send(path="/echo", data=data).data == data
    assert site.send("k2", path="/plain", data=data).data == data
    for number, path in enumerate(("/lines", "/plain-lines")):
        ended = {"wsgi.input_terminated": True}
        assert site.send(f"line{number}", path, data=data, environ_overrides=ended).data == data
    gc.collect()  # an upload left open would be a ResourceWarning, which is an error here


@pytest.mark.parametrize("size", [100, CAP, CAP + 1, 300_000])
def test_a_sent_file_is_stored_when_it_is_small_and_a_tombstone_when_it_is_not(
    size: int, site: Site, tmp_path: Path
) -> None:
    path = tmp_path / "receipt.pdf"
    path.write_bytes(b"\x00\xff" * (size // 2) + b"!" * (size % 2))
    site.view(lambda: send_file(path, download_name="receipt.pdf", as_attachment=True), "/things")
    first, again = site.send(path="/things"), site.send(path="/things")
    assert first.data == path.read_bytes()
    assert first.headers["Content-Disposition"] == "attachment; filename=receipt.pdf"
    if size <= CAP:
        assert again.data == first.data
        for name in ("Content-Type", "Content-Disposition", "ETag", "Last-Modified", "Content-Length"):
            assert again.headers[name] == first.headers[name]
    else:
        assert (again.status_code, again.get_json()["original_status"]) == (500, 200)
    assert len(site.runs) == 1
    gc.collect()


def test_a_sent_file_object_is_closed_and_stored(site: Site) -> None:
    files: list[io.BytesIO] = []

    def view() -> Response:
        files.append(io.BytesIO(b"in memory"))
        return send_file(files[-1], "text/plain")

    site.view(view, "/things")
    first, again = site.send(path="/things"), site.send(path="/things")
    assert first.data == again.data == b"in memory"
    assert files[0].closed


def test_headers_that_cannot_be_replayed_make_a_tombstone_and_the_caller_gets_its_answer(site: Site) -> None:
    def view() -> Response:
        response = Response("done", 201)
        response.headers["Link"] = "/caf\u0113"
        return response

    site.view(view, "/things")
    with site.app.test_request_context(
        "/things", method="POST", json={"amount": 1000}, headers={"Idempotency-Key": "k1"}
    ):
        first = site.app.full_dispatch_request()
    assert (first.status_code, first.data, first.headers["Link"]) == (201, b"done", "/caf\u0113")
    again = site.send(path="/things")
    assert (again.status_code, again.get_json()["original_status"], len(site.runs)) == (500, 201, 1)
    assert site.omitted() == b"not_encodable"


@pytest.mark.parametrize("name", ["Location", "Content-Location"])
def test_a_location_outside_latin_1_is_replayed_as_it_was_sent(name: str, make_site: MakeSite) -> None:
    site = make_site(REPLAY_HEADERS=("location", "content-location", "content-type"))
    site.view(lambda: Response("done", 201, {name: "/\u0113/caf\xe9?q=\u3042"}))
    first, again = site.send(), site.send()
    assert first.headers[name] == "/%C4%93/caf%C3%A9?q=%E3%81%82"
    _assert_replayed(site, first, again)


# after_request functions


def test_after_request_functions_run_on_first_answers_on_replays_and_on_refusals_alike(site: Site) -> None:
    calls: list[int] = []

    @site.app.after_request
    def mark(response: Response) -> Response:
        calls.append(response.status_code)
        response.headers["Access-Control-Allow-Origin"] = "*"
        response.headers.add("Link", "</docs>")
        response.set_cookie("seen", str(len(calls)))
        return response

    answers = [site.send(), site.send(), site.send(json={"amount": 2})]
    assert calls == [201, 201, 409]
    assert [answer.headers.getlist("Link") for answer in answers] == [["</docs>"]] * 3
    assert [answer.headers["Set-Cookie"][:6] for answer in answers] == ["seen=1", "seen=2", "seen=3"]
    assert not any("seen" in value or "docs" in value for _, value in site.kept_headers())


def test_what_after_request_functions_add_to_a_stream_is_not_stored(site: Site) -> None:
    @site.app.after_request
    def mark(response: Response) -> Response:
        response.headers["Content-Encoding"] = "rot13"
        response.headers.add("Link", "</docs>")
        return response

    site.view(lambda: Response(iter(["a", "b"])), "/things")
    site.send(path="/things")
    assert site.send(path="/things").headers.getlist("Link") == ["</docs>"]
    assert [name for name, _ in site.kept_headers()] == ["Content-Type"]


def test_a_function_that_encodes_a_stream_does_not_change_what_is_stored(site: Site) -> None:
    """As compressing extensions do: the row has the plain body and its plain headers."""

    @site.app.after_request
    def encode(response: Response) -> Response:
        plain: Any = response.response
        response.response = (piece.swapcase() for piece in plain)
        response.headers["Content-Encoding"] = "swapcase"
        response.headers.pop("Content-Length", None)
        return response

    site.view(lambda: Response(iter([b"Ab", b"cD"])), "/things")
    first, again = site.send(path="/things"), site.send(path="/things")
    assert first.data == again.data == b"aBCd"
    assert first.headers["Content-Encoding"] == again.headers["Content-Encoding"] == "swapcase"
    assert (site.row()["response_body"], len(site.runs)) == (b"AbcD", 1)
    assert [name for name, _ in site.kept_headers()] == ["Content-Type"]


def test_a_function_that_reads_a_streamed_answer_settles_it(site: Site) -> None:
    read: list[bytes] = []

    @site.app.after_request
    def look(response: Response) -> Response:
        read.append(response.get_data())
        return response

    site.view(lambda: Response(iter(["a", "b"]), 201), "/things")
    first, again = site.send(path="/things"), site.send(path="/things")
    assert first.data == again.data == b"ab"
    assert (read, site.omitted(), len(site.runs)) == ([b"ab", b"ab"], b"", 1)


def test_a_streamed_answer_that_breaks_under_a_function_that_reads_it_is_a_failure_like_any_other(site: Site) -> None:
    @site.app.after_request
    def look(response: Response) -> Response:
        if response.is_streamed:
            response.get_data()
        return response

    site.view(lambda: Response(_broken(), 201), "/things")
    assert [site.send(path="/things").status_code for _ in range(2)] == [500, 500]
    assert (site.row()["owner"], len(site.runs)) == (b"", 2)


def test_a_function_that_replaces_a_streamed_answer_does_not_change_what_is_stored(site: Site) -> None:
    gc.disable()
    try:

        @site.app.after_request
        def replace(response: Response) -> Response:
            return make_response("replaced", 200) if response.is_streamed else response

        site.view(lambda: Response(iter(["a", "b"]), 201), "/things")
        site.send("k0")  # loads the scripts, which leaves an error and its frames to the collector
        runs = len(site.runs)
        assert site.send(path="/things").data == b"replaced"
        again = site.send(path="/things")
        assert (again.status_code, again.data, len(site.runs)) == (201, b"ab", runs + 1)
    finally:
        gc.enable()


def test_what_a_function_of_the_view_does_is_part_of_the_answer(site: Site) -> None:
    def view() -> str:
        @after_this_request
        def mark(response: Response) -> Response:
            response.headers.add("Link", "</once>")
            return response

        return "done"

    site.view(view, "/things")
    first, again = site.send(path="/things"), site.send(path="/things")
    assert first.headers.getlist("Link") == again.headers.getlist("Link") == ["</once>"]


def test_the_first_caller_gets_its_answer_untouched(site: Site) -> None:
    cookies = [("Set-Cookie", "a=1"), ("Set-Cookie", "b=2"), ("X-Request-Id", "7"), ("Cache-Control", "no-store")]
    answer = Response("body", 201, cookies)
    site.app.add_url_rule("/plain", "plain", lambda: answer, methods=["POST"])
    site.view(lambda: answer, "/things")
    plain, first = site.send(None, "/plain"), site.send(path="/things")
    assert (first.status_code, list(first.headers), first.data) == (201, list(plain.headers), plain.data)


def test_a_session_belongs_to_its_client_and_a_replay_can_renew_it(make_site: MakeSite) -> None:
    app = Flask("shop")
    app.secret_key = "secret"
    site = make_site(app=app)

    @app.before_request
    def visit() -> None:
        session["visits"] = session.get("visits", 0) + 1

    site.view(lambda: jsonify(visits=session["visits"]))
    first, again = site.send(), site.send()
    assert first.get_json() == again.get_json() == {"visits": 1}
    assert first.headers["Set-Cookie"].startswith("session=")
    assert again.headers["Set-Cookie"].startswith("session=")
    assert b"session" not in b"".join(site.row().values())


def test_an_exception_with_a_response_of_its_own_is_stored(site: Site) -> None:
    def view() -> Any:
        raise HTTPException(response=Response("own", 402, {"Location": "/pay"}))

    site.view(view, "/things")
    _assert_replayed(site, site.send(path="/things"), site.send(path="/things"))


def test_retry_after_of_a_released_503_reaches_the_first_caller(site: Site) -> None:
    def view() -> Any:
        raise ServiceUnavailable(retry_after=7)

    site.view(view, "/things")
    answers = [site.send(path="/things") for _ in range(2)]
    assert [answer.headers["Retry-After"] for answer in answers] == ["7", "7"]
    assert len(site.runs) == 2


def test_an_answer_that_a_worker_stored_is_replayed_over_http(site: Site) -> None:
    """The ledger is one: a view that hands its operation to a worker finds what the worker said."""

    def view() -> Any:
        current_reservation.outcome = "hold"
        site.ledger.complete(current_reservation, StoredResponse(207, (("X-Worker", "1"),), b"by a worker"))
        return "accepted", 202

    site.view(view, "/things")
    first, again = site.send(path="/things"), site.send(path="/things")
    assert (first.status_code, again.status_code, again.data) == (202, 207, b"by a worker")
    assert again.headers["X-Worker"] == "1"
