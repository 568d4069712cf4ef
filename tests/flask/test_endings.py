"""When the row is settled, and by what: the application has finished, and what its client saw is what is stored."""

from __future__ import annotations

import gc
import gzip
import itertools
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flask import (
    Blueprint,
    Flask,
    Response,
    abort,
    after_this_request,
    jsonify,
    request,
    send_file,
    stream_with_context,
)
from werkzeug.test import EnvironBuilder

from idemredis import HoldForReview, Policy
from idemredis.flask import Idempotency, current_reservation
from tests.support.clock import TurnedClock
from tests.support.site import MakeSite, Site


class CommitFailed(Exception):
    """The session could not commit."""


def _failing_once(error: type[BaseException] = CommitFailed) -> Callable[..., Any]:
    """Return a function for any phase after the view; it fails the first time."""
    left = [error]

    def commit(response: Any = None) -> Any:
        if left:
            raise left.pop()
        return response

    return commit


def _send(site: Site, **options: Any) -> int:
    """Return the status of a request; an exception that leaves the application is the server's 500."""
    try:
        return site.send(path="/orders", **options).status_code
    except (CommitFailed, SystemExit):
        return 500


PHASES = ("after_request", "teardown_request", "teardown_appcontext", "blueprint", "call_on_close of the context")


def _commit_in(phase: str, site: Site, commit: Callable[..., Any]) -> None:
    match phase:
        case "after_request":
            site.app.after_request(commit)
        case "teardown_request":
            site.app.teardown_request(commit)
        case "teardown_appcontext":
            site.app.teardown_appcontext(commit)
        case "blueprint":
            blueprint = Blueprint("orders", __name__)
            blueprint.teardown_app_request(commit)
            site.app.register_blueprint(blueprint)
        case _:
            from flask import request_tearing_down

            request_tearing_down.connect(lambda *_, **__: commit(), site.app, weak=False)


VIEWS: dict[str, Callable[[], Any]] = {
    "list": lambda: ("made", 201),
    "stream": lambda: Response(iter(["ma", "de"]), 201),
    "stream of known length": lambda: Response(iter(["ma", "de"]), 201, {"Content-Length": "4"}),
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("on_error", ["release", "hold", "store"])
def test_a_commit_that_fails_after_the_view_is_a_failure_and_no_replay_of_an_order_that_does_not_exist(
    phase: str, kind: str, on_error: str, make_site: MakeSite
) -> None:
    site = make_site(ON_ERROR=on_error)
    site.view(VIEWS[kind], "/orders")
    _commit_in(phase, site, _failing_once())

    assert _send(site) == 500
    again = site.send(path="/orders")
    match on_error:
        case "release":
            assert (again.status_code, again.data, len(site.runs)) == (201, b"made", 2)
        case "hold":
            assert (again.status_code, len(site.runs), site.row()["status"]) == (409, 1, b"pending")
        case _:
            assert (again.status_code, again.headers["Idempotent-Replayed"], len(site.runs)) == (500, "true", 1)
            assert b"made" not in again.data


@pytest.mark.parametrize("phase", PHASES)
def test_the_view_has_no_say_in_a_failure_that_comes_after_it(phase: str, site: Site) -> None:
    def view() -> tuple[str, int]:
        current_reservation.outcome = "store"
        return "made", 201

    site.view(view, "/orders")
    _commit_in(phase, site, _failing_once())
    assert _send(site) == 500
    assert (site.send(path="/orders").data, len(site.runs)) == (b"made", 2)


def test_a_teardown_function_that_was_there_before_the_extension_counts_too(make_site: MakeSite) -> None:
    app = Flask("shop")
    runs: list[int] = []

    @app.teardown_request
    def commit(error: BaseException | None) -> None:
        if len(runs) == 1:
            raise CommitFailed

    site = make_site(app=app)

    def view() -> tuple[str, int]:
        runs.append(1)
        return "made", 201

    site.view(view, "/orders")
    assert _send(site) == 500
    assert (site.send(path="/orders").status_code, len(runs)) == (201, 2)


def test_an_exit_in_a_teardown_function_gives_the_key_up(make_site: MakeSite) -> None:
    site = make_site(ON_ERROR="store")
    site.view(VIEWS["list"], "/orders")
    site.app.teardown_request(_failing_once(SystemExit))
    assert _send(site) == 500
    assert (site.row()["status"], site.row()["owner"]) == (b"pending", b"")


def test_the_page_of_a_handler_for_a_failed_commit_is_what_is_stored(site: Site) -> None:
    site.view(VIEWS["list"], "/orders")
    site.app.register_error_handler(CommitFailed, lambda error: ({"error": "no"}, 409))
    site.app.register_error_handler(500, lambda error: ({"error": "duplicate"}, 409))
    site.app.after_request(_failing_once())
    first, again = site.send(path="/orders"), site.send(path="/orders")
    assert (first.status_code, again.status_code, again.data, len(site.runs)) == (409, 409, first.data, 1)


def test_the_row_stays_pending_until_the_teardown_functions_have_run(site: Site) -> None:
    seen: list[bytes] = []

    def look(response: Any) -> Any:
        seen.append(site.row()["status"])
        return response

    site.app.teardown_appcontext(look)
    site.app.after_request(look)
    assert site.send().status_code == 201
    assert (seen, site.row()["status"]) == ([b"pending", b"pending"], b"completed")


@pytest.mark.parametrize(("status", "stored"), [(429, False), (401, False), (503, False), (404, True), (202, True)])
def test_a_status_that_a_function_sets_afterwards_goes_by_its_own_rules(status: int, stored: bool, site: Site) -> None:
    """As a limiter does, which counts responses."""

    @site.app.after_request
    def limit(response: Response) -> Response:
        return (
            Response("later", status)
            if len(site.runs) == 1 and "Idempotent-Replayed" not in response.headers
            else response
        )

    first, again = site.send(), site.send()
    assert first.status_code == status
    assert (again.data, len(site.runs)) == ((b"charge 1", 1) if stored else (b"charge 2", 2))


@pytest.mark.parametrize("seconds", [None, "5"])
def test_a_refusal_with_retry_after_that_a_function_makes_is_not_final(seconds: str | None, site: Site) -> None:
    @site.app.after_request
    def busy(response: Response) -> Response:
        if len(site.runs) == 1 and "Idempotent-Replayed" not in response.headers:
            return Response("later", 409, None if seconds is None else {"Retry-After": seconds})
        return response

    assert site.send().status_code == 409
    assert site.send().data == (b"charge 1" if seconds is None else b"charge 2")


def test_an_error_of_the_view_stays_one_under_a_function_that_calls_it_200(site: Site) -> None:
    site.view(lambda: ("broken", 500), "/things")

    @site.app.after_request
    def envelope(response: Response) -> Response:
        response.status_code = 200
        return response

    assert [site.send(path="/things").status_code for _ in range(2)] == [200, 200]
    assert len(site.runs) == 2


# Layers around the application


def _layered(make_site: MakeSite, layer: Callable[[Any], Any], **options: Any) -> Site:
    """Make a site whose application had a WSGI layer before it was set up."""
    app = Flask("shop")
    app.wsgi_app = layer(app.wsgi_app)  # type: ignore[method-assign]
    site = make_site(app=app, **options)
    site.view(VIEWS["list"], "/orders")
    return site


def _raising(inner: Any) -> Any:
    count = itertools.count()

    def layer(environ: Any, start_response: Any) -> Any:
        body = inner(environ, start_response)
        if next(count) == 0:
            body.close()
            raise CommitFailed
        return body

    return layer


def _lazily_raising(inner: Any) -> Any:
    count = itertools.count()

    def layer(environ: Any, start_response: Any) -> Iterator[bytes]:
        pieces = list(inner(environ, start_response))
        if next(count) == 0:
            raise CommitFailed
        yield from pieces

    return layer


def _replacing(inner: Any) -> Any:
    count = itertools.count()

    def layer(environ: Any, start_response: Any) -> Any:
        if next(count):
            return inner(environ, start_response)
        body = inner(environ, lambda *_: lambda data: None)
        body.close()
        start_response("503 Service Unavailable", [("Content-Length", "0")])
        return [b""]

    return layer


@pytest.mark.parametrize("layer", [_raising, _lazily_raising, _replacing])
def test_a_failure_of_a_layer_inside_the_extension_is_what_the_client_saw(
    layer: Callable[[Any], Any], make_site: MakeSite
) -> None:
    site = _layered(make_site, layer)
    assert _send(site) in (500, 503)
    again = site.send(path="/orders")
    assert (again.status_code, again.data, len(site.runs)) == (201, b"made", 2)


@pytest.mark.parametrize("kind", VIEWS)
def test_a_layer_that_runs_the_application_only_when_it_is_read_changes_nothing(kind: str, make_site: MakeSite) -> None:
    def lazy(inner: Any) -> Any:
        def layer(environ: Any, start_response: Any) -> Iterator[bytes]:
            yield from inner(environ, start_response)

        return layer

    site = _layered(make_site, lazy)
    site.view(VIEWS[kind])
    first, again = site.send(), site.send()
    assert (first.data, again.data, again.headers["Idempotent-Replayed"]) == (b"made", b"made", "true")
    assert len(site.runs) == 1


def test_a_layer_inside_that_sends_a_failed_request_again_runs_it_under_a_claim_of_its_own(make_site: MakeSite) -> None:
    def retrying(inner: Any) -> Any:
        def layer(environ: Any, start_response: Any) -> Any:
            statuses: list[str] = []

            def start(status: str, *_: Any) -> Any:
                statuses.append(status)

            body = inner(environ, start)
            if statuses[0].startswith("5"):
                body.close()
                return inner(environ, start_response)
            start_response(statuses[0], [])
            return body

        return layer

    site = _layered(make_site, retrying)
    site.view(lambda: (f"run {len(site.runs)} {bool(current_reservation)}", 500 if len(site.runs) == 1 else 201))
    assert site.send(data=b"").data == b"run 2 True"
    assert (site.row()["generation"], site.send(data=b"").data) == (b"2", b"run 2 True")


@pytest.mark.parametrize("phase", PHASES)
def test_whoever_took_the_wsgi_application_before_the_extension_was_set_up_passes_nothing_by(
    phase: str, make_site: MakeSite
) -> None:
    app = Flask("shop")
    taken = app.wsgi_app
    site = make_site(app=app)
    app.wsgi_app = lambda environ, start_response: taken(environ, start_response)  # type: ignore[method-assign]
    site.view(lambda: (request.get_data(), 201), "/orders")
    app.before_request(lambda: request.stream.read(3) and None)
    _commit_in(phase, site, _failing_once())
    body = b"x" * 300_000
    assert _send(site, data=body) == 500
    first, again = (site.send(path="/orders", data=body) for _ in range(2))
    assert (first.data, again.status_code, len(site.runs)) == (body, 500, 2)
    assert again.get_json()["error"] == "idempotency_response_not_stored"


def test_a_response_that_the_server_cannot_send_is_a_failure(site: Site) -> None:
    """The test client takes any header; a server takes what latin-1 can carry."""
    site.view(VIEWS["list"], "/orders")
    builder = EnvironBuilder("/orders", method="POST", headers=[("Idempotency-Key", "k1")])

    def start_response(*_: Any) -> Any:
        raise CommitFailed

    with pytest.raises(CommitFailed):
        site.app.wsgi_app(builder.get_environ(), start_response)
    builder.close()
    assert (site.row()["owner"], len(site.runs)) == (b"", 1)


def test_a_request_within_the_handling_of_another_exception_is_settled_by_its_own_outcome(site: Site) -> None:
    try:
        raise CommitFailed
    except CommitFailed:
        assert site.send().status_code == 201
    assert site.row()["status"] == b"completed"


# Functions of after_this_request


def test_a_function_that_was_registered_before_the_view_is_no_part_of_what_is_stored(site: Site) -> None:
    @site.app.before_request
    def compress() -> None:
        @after_this_request
        def encode(response: Response) -> Response:
            response.set_data(gzip.compress(response.get_data(), mtime=0))
            response.headers["Content-Encoding"] = "gzip"
            response.headers.add("Link", "</docs>")
            return response

    first, again = site.send(), site.send()
    for answer in (first, again):
        assert gzip.decompress(answer.data) == b"charge 1"
        assert answer.headers.getlist("Link") == ["</docs>"]
    assert (site.row()["response_body"], [name for name, _ in site.kept_headers()]) == (b"charge 1", ["Content-Type"])


def test_a_function_that_a_decorator_registers_is_applied_once_to_a_first_answer_and_to_a_replay(site: Site) -> None:
    def link(view: Callable[..., Any], when: str) -> Callable[..., Any]:
        def linked(*args: Any) -> Any:
            def add(response: Response) -> Response:
                response.headers.add("Link", f"</{when}>")
                return response

            if when == "before":
                after_this_request(add)
                return view(*args)
            returned = view(*args)
            after_this_request(add)
            return returned

        return linked

    protected = site.idempotency.protect(link(lambda: ("made", 201), "within"))
    site.app.add_url_rule("/linked", "linked", link(link(protected, "before"), "after"), methods=["POST"])
    first, again = site.send(path="/linked"), site.send(path="/linked")
    assert sorted(first.headers.getlist("Link")) == ["</after>", "</before>", "</within>"]
    assert sorted(again.headers.getlist("Link")) == sorted(first.headers.getlist("Link"))
    assert [value for name, value in site.kept_headers() if name == "Link"] == ["</within>"]


def test_a_function_that_an_error_handler_registers_is_part_of_what_is_stored(site: Site) -> None:
    @site.app.errorhandler(422)
    def handle(error: Any) -> Any:
        @after_this_request
        def add(response: Response) -> Response:
            response.headers["Link"] = "</why>"
            return response

        return "refused", 422

    site.view(lambda: abort(422), "/things")
    first, again = site.send(path="/things"), site.send(path="/things")
    assert first.headers["Link"] == again.headers["Link"] == "</why>"


# Decorators between protect and Flask


def _envelope(view: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = view(*args, **kwargs)
        body = result.get_data(as_text=True) if isinstance(result, Response) else result[0]
        return jsonify(data=body)

    return wrapped


def _catch_all(view: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            result = view(*args, **kwargs)
            return {"id": result["id"]}
        except Exception:
            return {"error": "unexpected"}, 500

    return wrapped


def _raise(view: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = view(*args, **kwargs)
        if isinstance(result, Response):
            raise TypeError("a dict was expected")
        return result

    return wrapped


def _nothing(view: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = view(*args, **kwargs)
        return None if isinstance(result, Response) else result

    return wrapped


@pytest.mark.parametrize("testing", [False, True])
@pytest.mark.parametrize("protect_all", [False, True])
@pytest.mark.parametrize("decorator", [_envelope, _catch_all, _raise, _nothing])
def test_no_decorator_reshapes_a_refusal_or_a_replay(
    decorator: Callable[..., Any], protect_all: bool, testing: bool, make_site: MakeSite
) -> None:
    site = make_site(PROTECT_ALL=protect_all)
    site.app.testing = testing

    def make() -> Any:
        site.runs.append("made")
        return {"id": len(site.runs)} if decorator is _catch_all else ("made", 201)

    view = decorator(site.idempotency.protect(make))
    site.app.add_url_rule("/things", "things", view, methods=["POST"])
    first = site.send(path="/things")
    assert first.status_code < 300
    again = site.send(path="/things")
    assert (again.status_code, again.data, again.headers["Idempotent-Replayed"]) == (
        first.status_code,
        first.data,
        "true",
    )
    assert site.send(path="/things", json={"amount": 2}).get_json()["error"] == "idempotency_key_reused"
    assert site.send(None, "/things").get_json()["error"] == "idempotency_key_required"
    assert len(site.runs) == 1


def test_a_function_that_fails_over_a_replay_is_a_500_and_the_row_stays(site: Site) -> None:
    @site.app.after_request
    def fail(response: Response) -> Response:
        if "Idempotent-Replayed" in response.headers:
            raise LookupError
        return response

    site.send()
    before = site.rows()
    assert (site.send().status_code, site.rows()) == (500, before)


# Statuses and headers


def test_a_file_that_a_front_server_sends_is_sent_by_it_on_a_replay(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "label.pdf"
    path.write_bytes(b"label")
    site.app.config["USE_X_SENDFILE"] = site.app.use_x_sendfile = True  # type: ignore[attr-defined]
    site.view(lambda: send_file(path), "/sendfile")
    site.view(lambda: ("", 200, {"X-Accel-Redirect": "/private/label.pdf"}), "/accel")
    for key, where, name in (("k1", "/sendfile", "X-Sendfile"), ("k2", "/accel", "X-Accel-Redirect")):
        first, again = site.send(key, where), site.send(key, where)
        assert first.headers[name] == again.headers[name]
        assert again.headers["Idempotent-Replayed"] == "true"
    assert len(site.runs) == 2


# What the view decides


def test_an_outcome_that_is_set_while_a_stream_is_sent_counts(site: Site) -> None:
    def pieces() -> Iterator[str]:
        yield "the "
        current_reservation.outcome = "omit"
        yield "SECRET"

    site.view(lambda: Response(stream_with_context(pieces()), 201), "/things")
    assert site.send(path="/things").data == b"the SECRET"
    assert (site.omitted(), site.send(path="/things").get_json()["original_status"]) == (b"not_wanted", 201)
    assert not any(b"SECRET" in value for value in site.row().values())


@pytest.mark.parametrize("outcome", ["release", "hold"])
def test_a_stream_can_still_give_the_key_up_or_hold_it(outcome: Any, site: Site) -> None:
    def pieces() -> Iterator[str]:
        yield "a"
        current_reservation.outcome = outcome

    site.view(lambda: Response(stream_with_context(pieces())), "/things")
    site.send(path="/things")
    assert (site.row()["status"], site.row()["owner"] == b"") == (b"pending", outcome == "release")


def test_an_outcome_that_is_set_in_a_function_after_the_view_counts(site: Site) -> None:
    @site.app.teardown_request
    def omit(error: BaseException | None) -> None:
        current_reservation.outcome = "omit"

    site.send()
    assert site.omitted() == b"not_wanted"


@pytest.mark.parametrize("where", ["view", "caught", "handler", "after_request", "teardown", "stream"])
def test_a_view_can_hold_its_row_for_a_person_wherever_it_finds_out(where: str, site: Site) -> None:
    fail = _failing_once(HoldForReview)

    def hold(*args: Any) -> Any:
        return fail(*args)

    def pieces() -> Iterator[str]:
        yield ""
        hold()

    def view() -> Any:
        if where in ("view", "caught"):
            hold()
        if where == "handler":
            abort(422)
        return Response(pieces()) if where == "stream" else "made"

    if where == "caught":
        site.app.register_error_handler(Exception, lambda error: ("caught", 200))
    if where == "handler":
        site.app.register_error_handler(422, hold)
    if where == "after_request":
        site.app.after_request(hold)
    if where == "teardown":
        site.app.teardown_request(hold)
    site.view(view, "/things")
    if where in ("teardown", "stream"):
        with pytest.raises(HoldForReview):
            site.send(path="/things")
    else:
        answer = site.send(path="/things")
        assert (answer.status_code, answer.get_json()["error"]) == (409, "idempotency_key_in_progress")
    assert site.told()[-1] == "held_for_review"
    assert (site.row()["status"], site.row()["owner"] != b"") == (b"pending", True)
    again = site.send(path="/things")
    assert (again.status_code, len(site.runs)) == (409, 1)


# Streams


@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize("pieces", [[], ["", b""]])
def test_a_stream_that_breaks_before_its_first_byte_is_an_error_of_the_view(
    pieces: list[Any], announced: bool, site: Site
) -> None:
    def generate() -> Iterator[Any]:
        yield from pieces
        if len(site.runs) == 1:
            raise CommitFailed
        yield "made"

    headers = {"Content-Length": "4"} if announced else {}
    site.view(lambda: Response(generate(), 201, headers), "/orders")
    assert _send(site) == 500
    assert (site.send(path="/orders").data, len(site.runs)) == (b"made", 2)


@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize("read", ["whole", "one piece", "nothing"])
def test_a_streamed_source_is_closed_once(read: str, announced: bool, site: Site) -> None:
    class Slots:
        def __init__(self) -> None:
            self.closed = 0
            self.left = iter([b"ab", b"cd"])

        def __iter__(self) -> Iterator[bytes]:
            return self.left

        def close(self) -> None:
            self.closed += 1

    made: list[Slots] = []

    def view() -> Response:
        made.append(Slots())
        return Response(made[-1], 201, {"Content-Length": "4"} if announced else {})

    site.view(view, "/things")
    response = site.send(path="/things", buffered=False)
    chunks = response.iter_encoded()
    if read != "nothing":
        next(chunks)
    if read == "whole":
        list(chunks)
    for _ in range(2):
        response.close()
    del response, chunks
    assert (made[0].closed, site.send(path="/things").data) == (1, b"abcd")


def test_a_stream_that_a_function_closes_before_the_application_has_returned_is_stored_whole(site: Site) -> None:
    @site.app.after_request
    def close(response: Response) -> Response:
        if response.is_streamed:
            response.response.close()  # type: ignore[union-attr]
            response.response = [b"closed"]
        return response

    site.view(lambda: Response(iter(["a", "b"]), 201), "/things")
    assert site.send(path="/things").data == b"closed"
    again = site.send(path="/things")
    assert (again.data, len(site.runs)) == (b"ab", 1)


def test_a_stream_within_a_context_of_its_own_is_settled_after_its_teardown(site: Site) -> None:
    seen: list[bytes] = []

    @site.app.teardown_request
    def look(error: BaseException | None) -> None:
        seen.append(site.row()["status"])

    site.view(lambda: Response(stream_with_context(iter(["a", "b"])), 201), "/things")
    assert site.send(path="/things").data == b"ab"
    assert (seen[:1], site.row()["status"]) == ([b"pending"], b"completed")


def test_a_view_that_reads_a_stream_of_its_own_context_is_not_settled_early(site: Site) -> None:
    def view() -> tuple[str, int]:
        text = "".join(stream_with_context(iter(["a", "b"])))
        assert (site.row()["status"], current_reservation.held) == (b"pending", True)
        return text, 201

    site.view(view, "/things")
    assert [site.send(path="/things").data for _ in range(2)] == [b"ab"] * 2
    assert len(site.runs) == 1


def test_a_released_stream_is_not_read_on_for_nobody(site: Site) -> None:
    read: list[int] = []

    def generate() -> Iterator[str]:
        for n in range(100):
            read.append(n)
            yield "x"

    site.view(lambda: Response(generate(), 503), "/things")
    response = site.send(path="/things", buffered=False)
    next(response.iter_encoded())
    response.close()
    assert (len(read) < 5, site.row()["owner"]) == (True, b"")


# The application's own fingerprint


@pytest.mark.parametrize("read_before", [False, True])
def test_what_a_fingerprint_does_to_the_parsed_body_does_not_reach_the_view(read_before: bool, site: Site) -> None:
    def without_nonce() -> Any:
        body = request.get_json()
        body.pop("nonce")
        body["items"].clear()
        return body

    if read_before:
        site.app.before_request(lambda: request.get_json() and None)
    site.view(lambda: jsonify(request.get_json()), "/things", fingerprint=without_nonce)
    sent = {"nonce": 1, "items": [1, 2]}
    assert site.send(path="/things", json=sent).get_json() == sent
    assert site.send(path="/things", json={**sent, "nonce": 2}).get_json() == sent
    assert len(site.runs) == 1


def test_what_a_function_before_made_of_the_body_is_what_the_fingerprint_and_the_view_see(site: Site) -> None:
    site.app.before_request(lambda: request.get_json(force=True).update(seen=True))
    site.view(lambda: request.get_json(), "/things", fingerprint=lambda: request.get_json().pop("seen"))
    answer = site.send(path="/things", data=b'{"a": 1}', content_type="text/plain")
    assert answer.get_json() == {"a": 1, "seen": True}


def test_two_endpoints_with_one_fingerprint_function_do_not_take_each_others_keys_for_retries(site: Site) -> None:
    def order() -> object:
        return request.get_json()["order"]

    for path in ("/charges/<who>", "/refunds/<who>"):
        site.view(lambda who: f"run {len(site.runs)}", path, fingerprint=order)
    assert site.send(path="/charges/a", json={"order": 7}).data == b"run 1"
    assert site.send(path="/charges/a?trace=1", json={"order": 7}).data == b"run 1"
    for path, method in (("/refunds/a", "POST"), ("/charges/b", "POST"), ("/charges/a", "PUT")):
        answer = site.send(path=path, json={"order": 7}, method=method)
        assert answer.get_json()["error"] == "idempotency_key_reused", path
    assert len(site.runs) == 1


def test_the_whole_ends_within_two_calls(make_site: MakeSite) -> None:
    site = make_site(policy=Policy(heartbeat=False))
    site.view(VIEWS["stream"])
    site.send("k0")
    site.sent.clear()
    site.send()
    assert site.sent == ["EVALSHA", "EVALSHA"]


@pytest.mark.parametrize("settings", [{}, {"REQUIRED": False}, {"MODE": "observe"}, {"MODE": "off"}], ids=str)
def test_nothing_of_a_request_keeps_its_context_alive(settings: dict[str, Any], make_site: MakeSite) -> None:
    site = make_site(**settings)
    site.view()
    contexts: list[Any] = []
    make = site.app.request_context

    def noting(environ: Any) -> Any:
        context = make(environ)
        contexts.append(weakref.ref(context))
        return context

    site.send("k0")  # loads the scripts, which leaves an error and its frames to the collector
    site.app.request_context = noting  # type: ignore[method-assign]
    gc.collect()
    gc.disable()
    try:
        for key in ("k1", "k1", None):
            site.send(key)
        assert [context() for context in contexts] == [None] * 3
    finally:
        gc.enable()


def test_an_application_of_its_own_class_is_followed_like_any_other(make_site: MakeSite) -> None:
    class Shop(Flask):
        def process_response(self, response: Response) -> Response:
            response.headers.add("Link", "</shop>")
            return super().process_response(response)

        def wsgi_app(self, environ: Any, start_response: Any) -> Any:
            return super().wsgi_app(environ, start_response)

    site = make_site(app=Shop("shop"))
    site.view()
    first, again = site.send(), site.send()
    assert first.data == again.data == b"charge 1"
    assert first.headers.getlist("Link") == again.headers.getlist("Link") == ["</shop>"]


def test_the_extension_of_an_application_is_not_kept_by_it(make_site: MakeSite) -> None:
    assert isinstance(make_site().app.extensions["idemredis"].extension, Idempotency)


def test_an_exit_in_recover_gives_the_key_up_and_the_view_does_not_run(make_site: MakeSite, clock: TurnedClock) -> None:
    site = make_site()

    def view() -> str:
        current_reservation.outcome = "hold"
        return "held"

    def leave(reservation: object) -> None:
        raise SystemExit

    site.view(view, recover=leave)
    site.send()
    clock.turn(31)
    with pytest.raises(SystemExit):
        site.send()
    assert (len(site.runs), site.row()["owner"], site.row()["generation"]) == (1, b"", b"2")
