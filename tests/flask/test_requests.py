"""What identifies a request, and how its body reaches the view."""

from __future__ import annotations

import gc
import hashlib
import io
from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask, Request, request

from idemredis import fingerprint_request
from tests.support.site import MakeSite, Site
from tests.support.vectors import VECTORS, body_of


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector['method']} {vector['target']}")
def test_a_request_ends_in_the_row_with_the_digest_of_the_vectors(vector: dict[str, Any], site: Site) -> None:
    path, _, query = vector["target"].partition("?")
    site.app.add_url_rule(
        "/<path:path>", "any", site.idempotency.protect(lambda path: "done"), methods=["POST", "PATCH", "DELETE"]
    )
    headers = list(vector["headers"].items())
    options: dict[str, Any] = {"environ_overrides": {"REQUEST_METHOD": vector["method"]}, "headers": headers}
    site.send("whole", vector["target"], data=body_of(vector), **options)
    site.send("in two", path, data=body_of(vector), query_string=query, **options)
    assert site.row("whole")["fingerprint"].decode() == vector["fingerprint"]
    assert site.row("in two")["fingerprint"].decode() == vector["fingerprint"]


@pytest.mark.parametrize(
    ("raw", "same_as"),
    [
        ("charges", "/charges"),
        ("http://shop/charges", "/charges"),
        ("HTTPS://shop:8443/charges?a=1", "/charges?a=1"),
        ("charges?next=http://other/refunds", "/charges?next=http://other/refunds"),
        ("http://shop?next=/refunds", "/?next=/refunds"),
        ("http://shop", "/"),
        ("//shop/charges", "//shop/charges"),
    ],
)
def test_a_target_in_another_form_is_the_same_target(raw: str, same_as: str, site: Site) -> None:
    site.send(data=b"", environ_overrides={"RAW_URI": raw})
    assert site.row()["fingerprint"].decode() == fingerprint_request("POST", same_as, {}, b"")


def test_two_endpoints_whose_raw_targets_lack_the_slash_are_not_the_same(site: Site) -> None:
    site.view(path="/refunds")
    site.send(environ_overrides={"RAW_URI": "charges"})
    assert site.send(path="/refunds", environ_overrides={"RAW_URI": "refunds"}).status_code == 409


def test_a_server_without_raw_targets_is_named_once_in_the_log(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    bare = {"RAW_URI": "", "REQUEST_URI": "", "SERVER_SOFTWARE": "bare/1.0"}
    for key in ("k1", "k2"):
        site.send(key, path="/charges?a=%2F", data=b"", environ_overrides=bare)
    assert site.row()["fingerprint"].decode() == fingerprint_request("POST", "/charges?a=%2F", {}, b"")
    assert [r.getMessage() for r in caplog.records if "bare/1.0" in r.getMessage()] == [
        "bare/1.0 does not give the raw request target; fingerprints use the decoded path, quoted again"
    ]


def test_an_applications_own_fingerprint_decides(site: Site) -> None:
    """Multipart clients choose a new boundary at each retry; the file stays the same."""

    def digest() -> object:
        return {"amount": request.form["amount"], "file": hashlib.sha256(request.files["file"].read()).hexdigest()}

    def view() -> tuple[str, int]:
        request.files["file"].seek(0)
        return f"{request.form['amount']} {request.files['file'].read()!r}", 201

    site.view(view, "/uploads", fingerprint=digest)

    def send(boundary: str, file: bytes) -> Any:
        return site.send(
            path="/uploads",
            data=MULTIPART.replace(b"--b", b"--" + boundary.encode()).replace(b"\x00\xff\r\n!", file),
            content_type=f"multipart/form-data; boundary={boundary}",
        )

    first, again = send("one", b"\x00\xff"), send("two", b"\x00\xff")
    assert first.data == again.data == rb"1000 b'\x00\xff'"
    assert again.headers["Idempotent-Replayed"] == "true"
    assert send("three", b"\x00\xfe").status_code == 409
    assert len(site.runs) == 1


def test_a_fingerprint_that_reads_the_body_leaves_it_to_the_view(site: Site) -> None:
    site.view(lambda: request.stream.read(), "/own", fingerprint=lambda: request.stream.read().decode())
    assert site.send(path="/own", data=b"abc").data == b"abc"


# Bodies read by more than one

JSON = b'{"amount": 1000, "note": "caf\xc3\xa9"}'
FORM = b"amount=1000&note=caf%C3%A9"
MULTIPART = (
    b'--b\r\nContent-Disposition: form-data; name="amount"\r\n\r\n1000\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n\x00\xff\x0d\x0a!\r\n--b--\r\n'
)
CONTENTS = {
    "json": (JSON, "application/json"),
    "form": (FORM, "application/x-www-form-urlencoded"),
    "multipart": (MULTIPART, "multipart/form-data; boundary=b"),
}
READERS: dict[str, Callable[[Request], Any]] = {
    "nobody": lambda request: None,
    "get_json()": lambda request: request.get_json(silent=True),
    "form": lambda request: dict(request.form),
    "values": lambda request: dict(request.values),
    "files": lambda request: request.files and request.files["file"].seek(0) + len(request.files["file"].read()),
    "stream": lambda request: request.stream.read(),
    "stream in part": lambda request: request.stream.read(7),
    "stream by line": lambda request: request.stream.readline(),
    "data": lambda request: request.data,
    "get_data()": lambda request: request.get_data(),
    "get_data(cache=False)": lambda request: request.get_data(cache=False),
    "get_data(parse_form_data=True)": lambda request: request.get_data(parse_form_data=True),
    "wsgi.input": lambda request: request.environ["wsgi.input"].read(10),
}
USES: dict[str, tuple[tuple[str, Callable[[Request], Any], Any], ...]] = {
    "json": (
        ("get_json()", READERS["get_json()"], {"amount": 1000, "note": "café"}),
        ("stream", READERS["stream"], JSON),
        ("data", READERS["data"], JSON),
        ("get_data()", READERS["get_data()"], JSON),
    ),
    "form": (
        ("form", READERS["form"], {"amount": "1000", "note": "café"}),
        ("values", READERS["values"], {"amount": "1000", "note": "café"}),
        ("stream", READERS["stream"], FORM),
        ("get_data()", READERS["get_data()"], FORM),
    ),
    "multipart": (
        ("form", READERS["form"], {"amount": "1000"}),
        ("files", READERS["files"], len(b"\x00\xff\x0d\x0a!")),
        ("stream", READERS["stream"], MULTIPART),
        ("get_data()", READERS["get_data()"], MULTIPART),
    ),
}


def _quiet(reader: Callable[[Request], Any]) -> Callable[[], None]:
    """Return a `before_request` function that reads, and has no answer of its own."""

    def read() -> None:
        reader(request)

    return read


def test_a_method_in_small_letters_is_protected_like_any_other(site: Site) -> None:
    site.app.before_request(_quiet(READERS["get_data()"]))
    site.view(lambda: "done", "/things")
    small: dict[str, Any] = {"environ_overrides": {"REQUEST_METHOD": "post"}}

    assert site.send("k1", "/things", **small).data == b"done"
    assert site.send("k1", "/things").headers["Idempotent-Replayed"] == "true"
    assert site.send("k1", "/things", json={"amount": 1}, **small).status_code == 409


@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize("reader", READERS)
def test_a_body_that_was_read_before_counts_whole_and_still_reaches_the_view(
    reader: str, kind: str, site: Site
) -> None:
    body, content_type = CONTENTS[kind]
    site.app.before_request(_quiet(READERS[reader]))
    seen: list[Any] = []
    parsing = (
        reader in ("data", "get_data(parse_form_data=True)") and kind != "json"
    )  # they leave nothing to get_data()
    uses = [use for use in USES[kind] if not (parsing and use[0] == "get_data()")]
    for name, use, _ in uses:

        def view(use: Callable[[Request], Any] = use) -> str:
            seen.append(use(request))
            return "done"

        site.view(view, f"/{name.strip('()')}")
    for name, _, wanted in uses:
        path = f"/{name.strip('()')}"
        assert site.send(name, path, data=body, content_type=content_type).data == b"done", name
        assert seen.pop() == wanted, name
        again = site.send(name, path, data=body, content_type=content_type)
        assert again.headers["Idempotent-Replayed"] == "true"
        changed = body.replace(b"1000", b"1001")
        assert site.send(name, path, data=changed, content_type=content_type).status_code == 409
        expected = fingerprint_request("POST", path, {"content-type": content_type}, body)
        assert site.row(name)["fingerprint"].decode() == expected
    assert seen == []


def test_a_function_that_was_there_before_the_extension_may_read_the_body_too(make_site: MakeSite) -> None:
    app = Flask("shop")
    app.before_request(_quiet(lambda request: request.form))
    site = make_site(app=app)
    site.view(lambda: dict(request.form), "/echo")
    body, content_type = CONTENTS["form"]
    answer = site.send(path="/echo", data=body, content_type=content_type)
    assert answer.get_json() == {"amount": "1000", "note": "café"}
    assert site.send(path="/echo", data=body + b"0", content_type=content_type).status_code == 409


def test_a_function_that_puts_the_body_back_itself_is_no_trouble(site: Site) -> None:
    @site.app.before_request
    def sign() -> None:
        request.environ["wsgi.input"] = io.BytesIO(request.environ["wsgi.input"].read())

    site.view(lambda: request.get_json(), "/echo")
    assert site.send(path="/echo").get_json() == {"amount": 1000}
    assert site.send(path="/echo", json={"amount": 1001}).status_code == 409


def test_a_body_that_something_around_the_application_swallowed_is_refused(site: Site) -> None:
    inner = site.app.wsgi_app

    def swallow(environ: Any, start_response: Any) -> Any:
        environ["wsgi.input"].read(3)
        return inner(environ, start_response)

    site.app.wsgi_app = swallow  # type: ignore[method-assign]
    assert site.send().get_json()["error"] == "idempotency_body_incomplete"
    assert (site.runs, site.rows()) == ([], {})


def test_a_view_that_changes_the_parsed_body_completes_the_row_it_claimed(site: Site) -> None:
    def view() -> dict[str, Any]:
        body: dict[str, Any] = request.get_json()
        body["amount"] = 7
        body.clear()
        return {"left": request.get_json()}

    site.view(view, "/things")
    site.app.before_request(lambda: request.get_json().update(seen=True))
    first, again = site.send(path="/things"), site.send(path="/things")
    assert first.get_json() == again.get_json() == {"left": {}}
    assert len(site.rows()) == len(site.runs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 65537, 262144, 262145, 1_048_576])
@pytest.mark.parametrize("terminated", [False, True])
def test_a_body_of_any_size_whose_beginning_was_read_before_is_hashed_and_handed_on_whole(
    size: int, terminated: bool, site: Site
) -> None:
    body = (bytes(range(256)) * (size // 256 + 1))[:size]
    site.app.before_request(_quiet(lambda request: request.stream.read(1000)))
    site.view(lambda: hashlib.sha256(request.stream.read()).hexdigest(), "/things")
    overrides = {"wsgi.input_terminated": True, "HTTP_TRANSFER_ENCODING": "chunked"} if terminated else {}
    answer = site.send(path="/things", data=body, environ_overrides=overrides)
    assert answer.text == hashlib.sha256(body).hexdigest()
    assert site.row()["fingerprint"].decode() == fingerprint_request("POST", "/things", {}, body)
    gc.collect()  # a temporary file left open would be a ResourceWarning, which is an error here


@pytest.mark.parametrize("terminated", [False, True])
@pytest.mark.parametrize("where", ["config", "request", "class"])
def test_a_body_over_the_applications_limit_is_413_and_claims_nothing(terminated: bool, where: str, site: Site) -> None:
    match where:
        case "config":
            site.app.config["MAX_CONTENT_LENGTH"] = 100_000
        case "request":
            site.app.before_request(lambda: setattr(request, "max_content_length", 100_000))
        case "class":
            site.app.request_class = type("Limited", (Request,), {"max_content_length": 100_000})
    overrides = {"wsgi.input_terminated": True, "HTTP_TRANSFER_ENCODING": "chunked"} if terminated else {}
    assert site.send(data=b"x" * 100_001, environ_overrides=overrides).status_code == 413
    assert (site.runs, site.rows()) == ([], {})
    assert site.send(data=b"x" * 100_000, environ_overrides=overrides).status_code == 201


@pytest.mark.slow
@pytest.mark.parametrize("cut", [0, 1, 70_000, 300_000])
@pytest.mark.parametrize("terminated", [False, True])
@pytest.mark.parametrize("read_before", [False, True])
def test_a_cut_off_upload_runs_and_claims_nothing_and_its_retry_is_not_locked_out(
    cut: int, terminated: bool, read_before: bool, site: Site
) -> None:
    if read_before:
        site.app.before_request(_quiet(READERS["wsgi.input"]))
    whole = b"x" * 300_001
    overrides = {"CONTENT_LENGTH": str(len(whole)), "wsgi.input_terminated": terminated}
    answer = site.send(data=whole[:cut], environ_overrides=overrides)
    assert (answer.status_code, answer.get_json()["error"]) == (400, "idempotency_body_incomplete")
    assert (site.runs, site.rows()) == ([], {})
    assert site.send(data=whole, environ_overrides=overrides).status_code == 201
    gc.collect()


@pytest.mark.parametrize("length", ["", "abc", "-1", "+5", "\xb2", "1 2", "0x5"])
def test_a_length_that_is_no_number_counts_as_no_body_here_and_in_the_view(length: str, site: Site) -> None:
    site.view(lambda: request.get_data(), "/echo")
    answer = site.send(path="/echo", data=b"12345", environ_overrides={"CONTENT_LENGTH": length})
    assert (answer.status_code, answer.data) == (200, b"")
    assert site.row()["fingerprint"].decode() == fingerprint_request("POST", "/echo", {}, b"")
