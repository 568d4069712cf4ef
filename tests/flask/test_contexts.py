"""Copies of the request's context, and contexts within a view: none of them settles the row or takes anything away."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import gevent
import pytest
from flask import Flask, Response, copy_current_request_context, request, stream_with_context

from idemredis import Policy
from idemredis.flask import current_reservation
from tests.support.servers import Server
from tests.support.site import MakeSite, Site
from tests.support.waiting import wait_until

KEY = {"Idempotency-Key": "k1"}
BODY = bytes(range(256)) * 400
"""More than is read at a time."""

Job = Callable[[], object]
"""What a view hands to a copy of its context; it may raise."""


class JobFailed(Exception):
    pass


def _copied(app: Flask, job: Job) -> None:
    copy_current_request_context(job)()


def _in_a_thread(app: Flask, job: Job) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(copy_current_request_context(job)).result(20)


def _in_a_greenlet(app: Flask, job: Job) -> None:
    failed: list[Exception] = []

    def run() -> None:
        try:
            job()
        except Exception as error:
            failed.append(error)
            raise

    # In a hub of its own, which another thread ends with it: a greenlet of this thread would leave its hub behind.
    def spawn(copied: Callable[[], None]) -> None:
        gevent.spawn(_swallow, copied).join(20)
        gevent.get_hub().destroy()

    thread = threading.Thread(target=spawn, args=(copy_current_request_context(run),))
    thread.start()
    thread.join(20)
    if failed:
        raise failed[0]


def _swallow(function: Callable[[], None]) -> None:
    with suppress(JobFailed):
        function()


def _by_flask_executor(app: Flask, job: Job) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        executor = app.extensions["executor"]
        executor.submit(job).result(20)


def _in_the_same_environ(app: Flask, job: Job) -> None:
    with app.request_context(request.environ):
        job()


def _in_a_test_request_context(app: Flask, job: Job) -> None:
    with app.test_request_context("/charges", method="POST", headers=KEY, data=b"other"):
        job()


def _in_a_nested_request(app: Flask, job: Job) -> None:
    app.config["PROPAGATE_EXCEPTIONS"] = True
    app.extensions["job"] = job
    assert app.test_client().post("/inner", headers={"Idempotency-Key": "inner"}).status_code == 201


def _in_a_nested_request_that_is_not_protected(app: Flask, job: Job) -> None:
    app.config["PROPAGATE_EXCEPTIONS"] = True
    app.extensions["job"] = job
    with app.test_client() as client:  # keeps its context for a while
        assert client.post("/plain", headers=KEY).status_code == 200


def _in_a_stream_of_its_own_context(app: Flask, job: Job) -> None:
    def pieces() -> Iterator[str]:
        yield "begun"
        job()

    assert "".join(stream_with_context(pieces())) == "begun"


CONTEXTS: dict[str, Callable[[Flask, Job], None]] = {
    "a copy": _copied,
    "a copy in a thread": _in_a_thread,
    "a copy in a greenlet": _in_a_greenlet,
    "flask-executor": _by_flask_executor,
    "a context of the same environ": _in_the_same_environ,
    "test_request_context": _in_a_test_request_context,
    "a nested test client": _in_a_nested_request,
    "a nested test client on an unprotected view": _in_a_nested_request_that_is_not_protected,
    "stream_with_context": _in_a_stream_of_its_own_context,
}


@pytest.fixture(params=["view", "async view"])
def kind(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(params=CONTEXTS)
def enter(request: pytest.FixtureRequest) -> Callable[[Flask, Job], None]:
    return CONTEXTS[request.param]


def _prepare(site: Site) -> None:
    app = site.app
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("flask_executor").Executor(app)

    def run() -> tuple[str, int]:
        app.extensions["job"]()
        return "inner", 201

    app.add_url_rule("/inner", "inner", site.idempotency.protect(run), methods=["POST"])
    app.add_url_rule("/plain", "plain", lambda: run()[0], methods=["POST"])


def _add(site: Site, kind: str, view: Callable[[], Any]) -> None:
    def run() -> Any:
        site.runs.append(kind)
        return view()

    async def run_async() -> Any:
        await asyncio.sleep(0)
        return run()

    _prepare(site)
    protected = site.idempotency.protect(run if kind == "view" else run_async)
    site.app.add_url_rule("/things", "things", protected, methods=["POST"])


@pytest.mark.parametrize("fails", [False, True], ids=["ends well", "raises"])
def test_what_ends_within_a_view_settles_nothing_and_takes_nothing_away(
    enter: Callable[[Flask, Job], None], fails: bool, kind: str, make_site: MakeSite
) -> None:
    site = make_site()
    charges: list[str] = []

    def job() -> None:
        charges.append("charged")
        if fails:
            raise JobFailed

    def view() -> tuple[str, int]:
        try:
            enter(site.app, job)
        except JobFailed:
            assert fails
        assert (site.row()["status"], site.row()["owner"].decode()) == (b"pending", current_reservation.owner)
        assert (current_reservation.key, current_reservation.held) == ("k1", True)
        current_reservation.checkpoint("charged")
        return hashlib.sha256(request.get_data()).hexdigest(), 201

    _add(site, kind, view)
    answers = [site.send(path="/things", data=BODY) for _ in range(3)]
    assert [(answer.status_code, answer.text) for answer in answers] == [(201, hashlib.sha256(BODY).hexdigest())] * 3
    assert [answer.headers.get("Idempotent-Replayed") for answer in answers] == [None, "true", "true"]
    assert (len(site.runs), charges, site.row()["generation"]) == (1, ["charged"], b"1")


@pytest.mark.parametrize("fails", [False, True], ids=["ends well", "raises"])
def test_what_ends_within_an_unprotected_view_leaves_it_its_body(
    enter: Callable[[Flask, Job], None], fails: bool, kind: str, make_site: MakeSite
) -> None:
    """Redis cannot be reached, and the application has chosen to run all the same."""
    site = make_site(url="redis://127.0.0.1:1/0", FAIL_OPEN=True)

    def job() -> None:
        if fails:
            raise JobFailed

    def view() -> tuple[str, int]:
        try:
            enter(site.app, job)
        except JobFailed:
            assert fails
        assert not current_reservation
        return f"{current_reservation.key} {hashlib.sha256(request.get_data()).hexdigest()}", 201

    _add(site, kind, view)
    answers = [site.send(path="/things", data=BODY) for _ in range(2)]
    assert [(answer.status_code, answer.text) for answer in answers] == [
        (201, f"k1 {hashlib.sha256(BODY).hexdigest()}")
    ] * 2
    assert {answer.headers["Idempotency-Status"] for answer in answers} == {"unprotected"}


def test_a_copy_has_the_reservation_while_the_request_lasts(site: Site) -> None:
    def view() -> str:
        def job() -> str:
            current_reservation.checkpoint("begun")
            return f"{current_reservation.key} {current_reservation.held}"

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(copy_current_request_context(job)).result(20)

    site.view(view, "/things")
    assert [site.send(path="/things").text for _ in range(2)] == ["k1 True"] * 2
    assert (site.row()["checkpoint"], len(site.runs)) == (b"begun", 1)


@pytest.mark.parametrize("fails", [False, True], ids=["ends well", "raises"])
def test_a_copy_that_outlives_its_request_finds_no_reservation_and_changes_nothing(fails: bool, site: Site) -> None:
    go_on = threading.Event()
    pool = ThreadPoolExecutor(1)
    jobs: list[Future[bool]] = []

    def job() -> bool:
        assert go_on.wait(20)
        if fails:
            raise JobFailed
        return bool(current_reservation)

    def view() -> tuple[str, int]:
        jobs.append(pool.submit(copy_current_request_context(job)))
        return "begun", 201

    site.view(view, "/things")
    assert site.send(path="/things").text == "begun"
    done = site.row()
    go_on.set()
    pool.shutdown()
    assert jobs[0].exception() is not None if fails else jobs[0].result() is False
    assert site.row() == done
    assert (site.send(path="/things").headers["Idempotent-Replayed"], len(site.runs)) == ("true", 1)


def test_a_protected_view_that_is_called_in_a_copy_runs_under_the_claim_of_its_request(site: Site) -> None:
    def inner() -> str:
        return f"{current_reservation.key} in a copy"

    protected = site.idempotency.protect(operation="inner")(inner)
    site.view(lambda: copy_current_request_context(protected)(), "/things")
    assert [site.send(path="/things").text for _ in range(2)] == ["k1 in a copy"] * 2
    assert len(site.rows()) == len(site.runs) == 1


@pytest.mark.parametrize("fails", [False, True], ids=["ends well", "raises"])
def test_a_copy_that_ends_while_a_stream_is_sent_does_not_settle_it(fails: bool, site: Site) -> None:
    def job() -> None:
        if fails:
            raise JobFailed

    def pieces() -> Iterator[str]:
        yield "a"
        with ThreadPoolExecutor(1) as pool, suppress(JobFailed):
            pool.submit(copy_current_request_context(job)).result(20)
        assert (site.row()["status"], current_reservation.held) == (b"pending", True)
        yield request.get_data(as_text=True)

    site.view(lambda: Response(stream_with_context(pieces()), 201), "/things")
    answers = [site.send(path="/things", data=b"b" * 100_000) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 500]  # over the limit of what is stored
    assert answers[0].text == "a" + "b" * 100_000
    assert (site.omitted(), len(site.runs)) == (b"too_large", 1)


def test_reading_in_another_context_of_the_same_environ_takes_no_more_than_it_reads(site: Site) -> None:
    """As without the extension: the two share one body."""

    def view() -> str:
        stream = request.stream
        with site.app.request_context(request.environ):
            assert request.stream.read(10) == BODY[:10]
        return hashlib.sha256(stream.read()).hexdigest()

    site.view(view, "/things")
    answer = site.send(path="/things", data=BODY, environ_overrides={"wsgi.input_terminated": True})
    assert answer.text == hashlib.sha256(BODY[10:]).hexdigest()


def test_a_teardown_that_fails_when_a_stream_of_its_own_context_ends_does_not_have_the_work_run_again(
    site: Site,
) -> None:
    """The client has had the whole stream by then."""

    sent: list[str] = []

    @site.app.teardown_request
    def fail(error: BaseException | None) -> None:
        if sent == ["a", "b"]:
            raise JobFailed

    def pieces() -> Iterator[str]:
        for piece in "ab":
            sent.append(piece)
            yield piece

    site.view(lambda: Response(stream_with_context(pieces()), 201), "/things")
    answer = site.send(path="/things", buffered=False)
    received: list[bytes] = []
    with pytest.raises(JobFailed):
        received.extend(answer.iter_encoded())
    answer.close()
    assert b"".join(received) == b"ab"
    sent.clear()
    again = site.send(path="/things")
    assert (again.status_code, again.get_json()["error"]) == (500, "idempotency_response_not_stored")
    assert (site.omitted(), len(site.runs)) == (b"broken_off", 1)


# Views in a context of a test


def test_a_view_that_is_called_in_test_request_context_gives_its_key_up_when_the_context_ends(site: Site) -> None:
    """Nothing has made a response of what it returned, so there is nothing to store."""

    @site.idempotency.protect
    def view() -> str:
        return current_reservation.key

    for generation in (1, 2):
        with site.app.test_request_context("/charges", method="POST", headers=KEY):
            assert view() == "k1"
            assert (site.row()["status"], current_reservation.generation) == (b"pending", generation)
            lease = current_reservation.lease
        assert (site.row()["owner"], lease.ended, bool(current_reservation)) == (b"", True, False)


def test_a_whole_request_in_test_request_context_is_stored(site: Site) -> None:
    with site.app.test_request_context("/charges", method="POST", headers=KEY, json={"amount": 1000}):
        assert site.app.full_dispatch_request().data == b"charge 1"
    assert site.send().headers["Idempotent-Replayed"] == "true"


def test_a_view_that_fails_in_test_request_context_gives_its_key_up(site: Site) -> None:
    @site.idempotency.protect
    def view() -> None:
        raise JobFailed

    with suppress(JobFailed), site.app.test_request_context("/charges", method="POST", headers=KEY):
        view()
    assert (site.row()["status"], site.row()["owner"]) == (b"pending", b"")


def test_a_context_that_nobody_ends_holds_its_row_for_a_lease_and_no_longer(
    make_site: MakeSite, valkey_server: Server
) -> None:
    """As where a thread pushes one and ends: nobody renews the lease of a reservation that is gone."""
    site = make_site(valkey_server, policy=Policy(lease=0.5, retention=60))

    def view() -> str:
        return current_reservation.key

    def abandon() -> None:
        site.app.test_request_context("/charges", method="POST", headers=KEY).push()
        assert protected() == "k1"

    def is_stale() -> bool:
        gc.collect()
        row = site.ledger.read("acme", "k1")
        return row is not None and row.stale

    protected = site.idempotency.protect(view)
    thread = threading.Thread(target=abandon)
    thread.start()
    thread.join(20)
    assert site.row()["status"] == b"pending"
    wait_until(is_stale)
