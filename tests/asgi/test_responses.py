"""The response on its way out: when it is held, stored and sent, and what a client that goes away changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from idemredis import Policy
from idemredis.asgi import IdempotencyMiddleware, current_reservation
from tests.support.asgi_site import AsgiSite, Wire
from tests.support.doors import MakeAsgiSite
from tests.support.waiting import wait_until

CAP = 16384


def _add(site: AsgiSite, endpoint: Callable[..., Any], path: str = "/things", **options: Any) -> None:
    site.app.router.routes.append(Route(path, site.idempotency.protect(**options)(endpoint), methods=["POST"]))


def _watched(site: AsgiSite, **options: Any) -> tuple[Wire, list[tuple[str, bytes, bytes]]]:
    """Send a request, and return the row's status as each message of the response is sent."""
    seen: list[tuple[str, bytes, bytes]] = []
    scope, pieces = site.request(path="/things", **options)

    async def serve() -> Wire:
        wire = Wire(pieces)
        wire.on_message = lambda message: seen.append(
            (message["type"].rpartition(".")[2], message.get("body", b""), site.row()["status"])
        )
        return await site.serve(scope, wire)

    return site.loop.run(serve()), seen


def test_a_response_of_one_message_is_stored_before_it_is_sent(make_asgi_site: MakeAsgiSite) -> None:
    site = make_asgi_site()

    async def endpoint(request: Request) -> Response:
        return PlainTextResponse("made")

    _add(site, endpoint)
    _, seen = _watched(site)
    assert seen == [("start", b"", b"completed"), ("body", b"made", b"completed")]


def test_a_stream_is_forwarded_as_it_comes_and_settled_before_its_last_message(make_asgi_site: MakeAsgiSite) -> None:
    site = make_asgi_site()

    async def pieces() -> AsyncIterator[bytes]:
        yield b""
        yield b"ab"
        yield b"cd"

    async def endpoint(request: Request) -> Response:
        return StreamingResponse(pieces())

    _add(site, endpoint)
    _, seen = _watched(site)
    assert seen == [
        ("start", b"", b"pending"),
        ("body", b"ab", b"pending"),
        ("body", b"cd", b"pending"),
        ("body", b"", b"completed"),
    ]
    assert site.row()["response_body"] == b"abcd"


def test_a_stream_whose_length_is_announced_and_short_is_stored_before_it_is_sent(make_asgi_site: MakeAsgiSite) -> None:
    """As every response looks within Starlette's BaseHTTPMiddleware."""
    site = make_asgi_site()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"ab"
        yield b"cd"

    async def endpoint(request: Request) -> Response:
        return StreamingResponse(pieces(), headers={"Content-Length": "4"})

    _add(site, endpoint)
    wire, seen = _watched(site)
    assert [status for _, _, status in seen] == [b"completed", b"completed"]
    assert wire.body == b"abcd"


@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize("size", [CAP, CAP + 1])
def test_a_response_over_the_cap_is_a_tombstone_and_its_first_caller_gets_it_whole(
    size: int, announced: bool, make_asgi_site: MakeAsgiSite
) -> None:
    site = make_asgi_site()

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, size, 5000):
            yield b"x" * min(5000, size - at)

    async def endpoint(request: Request) -> Response:
        return StreamingResponse(pieces(), headers={"Content-Length": str(size)} if announced else {})

    _add(site, endpoint)
    wire, _ = _watched(site)
    assert wire.body == b"x" * size
    assert site.omitted() == (b"" if size == CAP else b"too_large")


def test_a_file_goes_through_our_hands_although_the_server_could_send_it(
    make_asgi_site: MakeAsgiSite, tmp_path: Any
) -> None:
    path = tmp_path / "receipt.txt"
    path.write_bytes(b"receipt")
    site = make_asgi_site()

    async def endpoint(request: Request) -> Response:
        return FileResponse(path)

    _add(site, endpoint)
    first, again = site.send(path="/things"), site.send(path="/things")
    assert (first.data, again.data, again.headers["Idempotent-Replayed"]) == (b"receipt", b"receipt", "true")


def test_background_tasks_run_after_the_response_and_decide_nothing(make_asgi_site: MakeAsgiSite) -> None:
    site = make_asgi_site()
    seen: list[bytes] = []

    async def later() -> None:
        seen.append(site.row()["status"])
        raise LookupError("too late")

    async def endpoint(request: Request) -> Response:
        return PlainTextResponse("made", background=BackgroundTask(later))

    _add(site, endpoint)
    assert site.send(path="/things").text == "made"
    assert seen == [b"completed"]
    assert site.send(path="/things").headers["Idempotent-Replayed"] == "true"


# A client that goes away


def _leave(site: AsgiSite, began: asyncio.Event, *, cancel: bool = False, **options: Any) -> Wire:
    """Send a request whose client goes away once the endpoint has begun; return when the server is done with it."""
    scope, pieces = site.request(path="/things", **options)
    wire = Wire(pieces)

    async def serve() -> None:
        wire._gone = asyncio.Event()
        task = asyncio.ensure_future(site.serve(scope, wire))
        await asyncio.wait_for(began.wait(), 20)
        wire.disconnect()
        if cancel:
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait([task])

    site.loop.run(serve())
    return wire


async def _event() -> asyncio.Event:
    return asyncio.Event()


@pytest.mark.parametrize("cancel", [False, True])
def test_an_endpoint_goes_on_when_its_client_goes_away_and_its_response_is_stored(
    cancel: bool, make_asgi_site: MakeAsgiSite
) -> None:
    site = make_asgi_site()
    began, go_on = site.loop.run(_event()), site.loop.run(_event())
    left: list[bool] = []

    async def endpoint(request: Request) -> Response:
        began.set()
        if cancel:
            await go_on.wait()
        left.append(True)
        return PlainTextResponse("made")

    _add(site, endpoint)
    _leave(site, began, cancel=cancel)
    assert left == ([] if cancel else [True])
    site.loop.run(_set(go_on))
    wait_until(lambda: site.row()["status"] == b"completed")
    assert site.send(path="/things").text == "made"
    assert left == [True]


async def _set(event: asyncio.Event) -> None:
    event.set()


@pytest.mark.parametrize("cancel", [False, True])
def test_a_stream_under_the_cap_ends_and_is_stored_although_its_client_has_gone(
    cancel: bool, make_asgi_site: MakeAsgiSite
) -> None:
    site = make_asgi_site()
    began = site.loop.run(_event())

    async def pieces() -> AsyncIterator[bytes]:
        yield b"a"
        began.set()
        for _ in range(20):
            await asyncio.sleep(0)
            yield b"b"

    async def endpoint(request: Request) -> Response:
        return StreamingResponse(pieces())

    _add(site, endpoint)
    _leave(site, began, cancel=cancel)
    wait_until(lambda: site.row()["status"] == b"completed")
    assert site.send(path="/things").text == "a" + "b" * 20


def test_a_stream_over_the_cap_is_ended_by_its_client(make_asgi_site: MakeAsgiSite) -> None:
    site = make_asgi_site()
    began = site.loop.run(_event())
    made: list[int] = []

    async def pieces() -> AsyncIterator[bytes]:
        while True:
            made.append(1)
            yield b"x" * 5000
            if len(made) == 5:
                began.set()
            await asyncio.sleep(0.001)

    async def endpoint(request: Request) -> Response:
        return StreamingResponse(pieces())

    _add(site, endpoint)
    _leave(site, began)
    assert site.omitted() == b"too_large"
    assert site.send(path="/things").get_json()["error"] == "idempotency_response_not_stored"


def test_a_stream_that_would_not_be_stored_is_ended_by_its_client(make_asgi_site: MakeAsgiSite) -> None:
    site = make_asgi_site()
    began = site.loop.run(_event())

    async def pieces() -> AsyncIterator[bytes]:
        while True:
            yield b"x"
            began.set()
            await asyncio.sleep(0.001)

    async def endpoint(request: Request) -> Response:
        return StreamingResponse(pieces(), 503)

    _add(site, endpoint)
    _leave(site, began)
    assert site.row()["owner"] == b""


def test_an_endless_stream_ends_after_max_hold(make_asgi_site: MakeAsgiSite) -> None:
    site = make_asgi_site(policy=Policy(lease=0.1, max_hold=0.2))
    began = site.loop.run(_event())

    async def pieces() -> AsyncIterator[bytes]:
        yield b"x"
        began.set()
        while True:
            await asyncio.sleep(0.005)
            yield b""

    async def endpoint(request: Request) -> Response:
        return StreamingResponse(pieces())

    _add(site, endpoint)
    _leave(site, began)
    assert site.omitted() == b"broken_off"


def test_a_request_ends_if_something_else_cancels_its_task_before_the_first_step(make_asgi_site: MakeAsgiSite) -> None:
    """Such as a task factory, or a watchdog that cancels all tasks but those that it knows."""
    site = make_asgi_site()
    site.view(lambda: "done")

    async def scene() -> None:
        scope, pieces = site.request()
        asyncio.get_running_loop().set_task_factory(_cancelled_at_once)
        try:
            with pytest.raises(asyncio.CancelledError):
                async with asyncio.timeout(5.0):
                    await site.app(scope, (wire := Wire(pieces)).receive, wire.send)
        finally:
            asyncio.get_running_loop().set_task_factory(None)

    site.loop.run(scene())
    assert (site.runs, site.rows()) == ([], {})


def _cancelled_at_once(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    task = asyncio.Task(work, loop=loop, **options)
    task.cancel()
    return task


def test_a_request_that_is_not_claimed_yet_is_cancelled_as_usual(make_asgi_site: MakeAsgiSite) -> None:
    site = make_asgi_site()
    began = site.loop.run(_event())
    ended: list[str] = []

    async def endpoint(request: Request) -> Response:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        return PlainTextResponse("made")

    site.app.router.routes.append(Route("/things", endpoint, methods=["POST"]))
    _leave(site, began, cancel=True)
    assert (ended, site.rows()) == (["cancelled"], {})


def test_a_response_that_the_server_has_no_client_for_is_stored(make_asgi_site: MakeAsgiSite) -> None:
    """As a server of spec version 2.4 says it: `send` raises an OSError."""
    site = make_asgi_site()

    async def pieces() -> AsyncIterator[bytes]:
        for n in range(5):
            yield b"%d" % n

    async def endpoint(request: Request) -> Response:
        return StreamingResponse(pieces())

    _add(site, endpoint)
    scope, body = site.request(path="/things", asgi={"version": "3.0", "spec_version": "2.4"})

    async def serve() -> None:
        wire = Wire(body)

        def gone(message: Any) -> None:
            if message.get("body") == b"2":
                raise OSError("the client has gone")

        wire.on_message = gone
        await site.serve(scope, wire)

    site.loop.run(serve())
    assert site.row()["response_body"] == b"01234"


def test_the_reservation_is_there_until_the_end_of_a_stream(make_asgi_site: MakeAsgiSite) -> None:
    site = make_asgi_site()

    async def pieces() -> AsyncIterator[bytes]:
        await current_reservation.checkpoint("sent", 1)
        yield current_reservation.key.encode()
        current_reservation.outcome = "omit"

    async def endpoint(request: Request) -> Response:
        return StreamingResponse(pieces())

    _add(site, endpoint)
    assert site.send(path="/things").text == "k1"
    assert (site.row()["checkpoint"], site.omitted()) == (b"sent", b"not_wanted")


@pytest.mark.parametrize("headers", ["absent", "iterator"])
@pytest.mark.parametrize("key", ["k1", None])
def test_headers_may_be_absent_or_read_only_once(headers: str, key: str | None, make_asgi_site: MakeAsgiSite) -> None:
    """ASGI has them as an iterable, and as optional."""
    site = make_asgi_site()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        start = {"type": "http.response.start", "status": 201}
        if headers == "iterator":
            start["headers"] = iter([(b"location", b"/7")])
        await send(start)
        await send({"type": "http.response.body", "body": b"made"})

    around = IdempotencyMiddleware(app, site.idempotency, protect_all=True)
    site.app = around  # type: ignore[assignment]
    site.idempotency.settings = replace(site.idempotency.settings, required=False)
    answers = [site.send(key) for _ in range(2)]
    for answer in answers:
        assert (answer.status_code, answer.text) == (201, "made")
        assert answer.headers.get("Location") == ("/7" if headers == "iterator" else None)


def test_a_second_first_message_replaces_what_was_held_of_the_first(make_asgi_site: MakeAsgiSite) -> None:
    site = make_asgi_site()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        length = [(b"content-length", b"8")]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        await send({"type": "http.response.start", "status": 422, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"no"})

    site.app = IdempotencyMiddleware(app, site.idempotency, protect_all=True)  # type: ignore[assignment]
    assert [(a.status_code, a.text) for a in (site.send(), site.send())] == [(422, "no")] * 2
