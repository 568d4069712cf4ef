"""What identifies a request, and how its body reaches the view: in the test client and behind real servers."""

from __future__ import annotations

import base64
import gc
import hashlib
import http.client
import io
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from flask import Flask, Request, request

from idemredis import fingerprint_request
from tests.support.servers import Server
from tests.support.serving import KINDS, Served
from tests.support.site import MakeSite, Site
from tests.support.started import Servers
from tests.support.waiting import wait_until

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "fingerprints.json").read_text())
RAW_KINDS = tuple(kind for kind in KINDS if kind != "gevent")
"""Those that hand on the raw target."""


def _body(vector: dict[str, Any]) -> bytes:
    if "body_repeat" in vector:
        text, times = vector["body_repeat"]
        return text.encode() * int(times)  # type: ignore[no-any-return]
    return base64.b64decode(vector["body_base64"])


# Fingerprints


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector['method']} {vector['target']}")
def test_a_request_ends_in_the_row_with_the_digest_of_the_vectors(vector: dict[str, Any], site: Site) -> None:
    path, _, query = vector["target"].partition("?")
    site.app.add_url_rule(
        "/<path:path>", "any", site.idempotency.protect(lambda path: "done"), methods=["POST", "PATCH", "DELETE"]
    )
    headers = list(vector["headers"].items())
    options: dict[str, Any] = {"environ_overrides": {"REQUEST_METHOD": vector["method"]}, "headers": headers}
    site.send("whole", vector["target"], data=_body(vector), **options)
    site.send("in two", path, data=_body(vector), query_string=query, **options)
    assert site.row("whole")["fingerprint"].decode() == vector["fingerprint"]
    assert site.row("in two")["fingerprint"].decode() == vector["fingerprint"]


PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "query": ({"path": "/charges?a=1"}, {"path": "/charges?a=2"}),
    "order of the query": ({"path": "/charges?a=1&b=2"}, {"path": "/charges?b=2&a=1"}),
    "no query and an empty one": ({"path": "/charges"}, {"path": "/charges?a"}),
    "encoded slash": ({"path": "/a%2Fb"}, {"path": "/a/b"}),
    "case of the encoding": ({"path": "/a%2fb"}, {"path": "/a%2Fb"}),
    "method": ({"method": "POST"}, {"method": "PATCH"}),
    "content type": ({"content_type": "application/json"}, {"content_type": "application/x-www-form-urlencoded"}),
    "parameter of the content type": ({"content_type": "a/b"}, {"content_type": "a/b; charset=x"}),
    "no content type": ({}, {"content_type": "application/json"}),
    "version": ({"headers": [("X-Api-Version", "1")]}, {"headers": [("X-Api-Version", "2")]}),
    "one byte": ({"data": b'{"amount":1000}'}, {"data": b'{"amount":1001}'}),
    "one space": ({"data": b'{"amount":1000}'}, {"data": b'{"amount": 1000}'}),
    "no body": ({"data": b""}, {"data": b"0"}),
    "a trailing slash": ({"path": "/charges/"}, {"path": "/charges"}),
}


@pytest.mark.parametrize("name", PAIRS)
def test_requests_that_differ_in_what_matters_are_not_the_same(name: str, site: Site) -> None:
    for path in ("/a/b", "/<path:path>"):
        view = site.idempotency.protect(lambda **_: "done")
        site.app.add_url_rule(path, path, view, methods=["POST", "PATCH"])
    one, other = ({"data": b"{}", **options} for options in PAIRS[name])
    assert site.send(**one).status_code < 300
    assert site.send(**other).get_json()["error"] == "idempotency_key_reused"
    assert site.send(**one).headers["Idempotent-Replayed"] == "true"


def test_headers_that_change_between_retries_do_not_matter(site: Site) -> None:
    first = site.send(headers=[("User-Agent", "a"), ("X-Trace-Id", "1"), ("Accept", "*/*"), ("Date", "x")])
    again = site.send(headers=[("User-Agent", "b"), ("X-Trace-Id", "2"), ("Authorization", "new")])
    assert (again.data, len(site.runs)) == (first.data, 1)


def test_the_headers_that_matter_can_be_chosen(make_site: MakeSite) -> None:
    site = make_site(FINGERPRINT_HEADERS=("X-Tenant",))
    site.view()
    site.send(data=b"{}", headers=[("X-Tenant", "a")], content_type="a/b")
    assert site.send(data=b"{}", headers=[("X-Tenant", "a")], content_type="c/d").status_code == 201
    assert site.send(data=b"{}", headers=[("X-Tenant", "b")], content_type="a/b").status_code == 409


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


@pytest.mark.parametrize("value", ["text", {"a": [1, None]}, 7, None])
def test_an_applications_own_fingerprint_may_be_text_or_any_json(value: object, site: Site) -> None:
    site.view(path="/own", fingerprint=lambda: value)
    assert site.send(path="/own", json=1).data == site.send(path="/own?x", json=2).data


def test_a_fingerprint_that_reads_the_body_leaves_it_to_the_view(site: Site) -> None:
    site.view(lambda: request.stream.read(), "/own", fingerprint=lambda: request.stream.read().decode())
    assert site.send(path="/own", data=b"abc").data == b"abc"


@pytest.mark.parametrize("fingerprint", [lambda: 1 / 0, lambda: {1: 2}, lambda: object(), lambda: ""])
def test_a_fingerprint_that_fails_runs_and_claims_nothing(fingerprint: Callable[[], object], site: Site) -> None:
    site.view(path="/own", fingerprint=fingerprint)
    assert site.send(path="/own").status_code == 500
    assert (site.runs, site.rows()) == ([], {})


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


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 65537, 262144, 262145, 1_048_576])
@pytest.mark.parametrize("read_before", [False, True])
@pytest.mark.parametrize("terminated", [False, True])
def test_a_body_of_any_size_is_hashed_and_handed_on_whole(
    size: int, read_before: bool, terminated: bool, site: Site
) -> None:
    body = (bytes(range(256)) * (size // 256 + 1))[:size]
    if read_before:
        site.app.before_request(_quiet(lambda request: request.stream.read(1000)))
    site.view(lambda: hashlib.sha256(request.stream.read()).hexdigest(), "/things")
    overrides = {"wsgi.input_terminated": True, "HTTP_TRANSFER_ENCODING": "chunked"} if terminated else {}
    answer = site.send(path="/things", data=body, environ_overrides=overrides)
    assert answer.text == hashlib.sha256(body).hexdigest()
    assert site.row()["fingerprint"].decode() == fingerprint_request("POST", "/things", {}, body)
    gc.collect()  # a temporary file left open would be a ResourceWarning, which is an error here


@pytest.mark.parametrize("terminated", [False, True])
@pytest.mark.parametrize("per_request", [False, True])
def test_a_body_over_the_applications_limit_is_413_and_claims_nothing(
    terminated: bool, per_request: bool, site: Site
) -> None:
    if per_request:
        site.app.before_request(lambda: setattr(request, "max_content_length", 100_000))
    else:
        site.app.config["MAX_CONTENT_LENGTH"] = 100_000
    overrides = {"wsgi.input_terminated": True, "HTTP_TRANSFER_ENCODING": "chunked"} if terminated else {}
    assert site.send(data=b"x" * 100_001, environ_overrides=overrides).status_code == 413
    assert (site.runs, site.rows()) == ([], {})
    assert site.send(data=b"x" * 100_000, environ_overrides=overrides).status_code == 201


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


# Real servers


@pytest.fixture(scope="module")
def served_by(all_servers: Servers) -> Iterator[Callable[[str], Served]]:
    """Start the server of a kind when a test first asks for it."""
    running: dict[str, Served] = {}

    def get(kind: str) -> Served:
        if kind.endswith("gevent") and find_spec("gevent") is None:
            pytest.skip("gevent is not installed")
        if kind not in running:
            server = all_servers.get("valkey")
            assert isinstance(server, Server)
            running[kind] = Served(kind, server.url)
        running[kind].forget_runs()
        return running[kind]

    yield get
    for served in running.values():
        served.close()


def _stored(server: Server, key: str = "k1") -> str:
    with server.client() as client:
        value = client.hget(f"served:acme:{key}", "fingerprint")
        assert isinstance(value, bytes)
        return value.decode()


def _rows(server: Server) -> int:
    with server.client() as client:
        size: int = client.dbsize()
        return size


def _head(target: str = "/charges", method: str = "POST", key: str = "k1", **headers: str) -> str:
    lines = [f"{method} {target} HTTP/1.1", f"Idempotency-Key: {key}"]
    return "\n".join([*lines, *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())])


def _chunks(body: bytes, size: int) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@pytest.mark.parametrize("kind", ["gunicorn-sync", "werkzeug"])
def test_the_vectors_come_out_of_a_raw_socket_too(
    kind: str, served_by: Callable[[str], Served], valkey_server: Server
) -> None:
    served = served_by(kind)
    for number, vector in enumerate(VECTORS):
        if vector["method"] == "post" and kind == "gunicorn-sync":
            continue  # gunicorn refuses a method in lower case
        body = _body(vector)
        headers = {"Content-Length": str(len(body)), **vector["headers"]}
        answer = served.exchange(_head(vector["target"], vector["method"], f"v{number}", **headers), body)
        assert answer.status == 201
        assert answer.json["sha256"] == hashlib.sha256(body).hexdigest()
        assert _stored(valkey_server, f"v{number}") == vector["fingerprint"], vector["target"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_server_hands_on_the_raw_target_or_says_that_it_does_not(
    kind: str, served_by: Callable[[str], Served], valkey_server: Server
) -> None:
    served = served_by(kind)
    targets = ["/a/b", "/caf%C3%A9?q=%E3%81%82", "/x?a=1&b=%zz", "/"]
    if kind in RAW_KINDS:
        targets += ["/a%2Fb", "/%61", "/x?", "/a//b;p=1", "/~x%7E"]
    else:
        assert "does not give the raw request target" not in served.log
    for number, target in enumerate(targets):
        answer = served.exchange(_head(target, key=f"t{number}", Content_Length="3"), b"abc")
        assert answer.status == 201
        assert _stored(valkey_server, f"t{number}") == fingerprint_request("POST", target, {}, b"abc"), target
    assert (kind in RAW_KINDS) == ("does not give the raw request target" not in served.log)


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_of_a_megabyte_hashes_alike_chunked_and_plain(
    kind: str, served_by: Callable[[str], Served], valkey_server: Server
) -> None:
    served = served_by(kind)
    body = bytes(range(256)) * 4096
    plain = served.exchange(_head(Content_Length=str(len(body))), body)
    chunked = served.exchange(_head(key="k2", Transfer_Encoding="chunked"), _chunks(body, 60_000))
    assert plain.json["sha256"] == chunked.json["sha256"] == hashlib.sha256(body).hexdigest()
    assert _stored(valkey_server) == _stored(valkey_server, "k2") == fingerprint_request("POST", "/charges", {}, body)
    again = served.exchange(_head(Transfer_Encoding="chunked"), _chunks(body, 9_999))
    assert (again.headers["idempotent-replayed"], again.body) == ("true", plain.body)
    assert served.runs() == ["k1", "k2"]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_upload_that_a_client_breaks_off_runs_and_claims_nothing(
    kind: str, chunked: bool, served_by: Callable[[str], Served], valkey_server: Server
) -> None:
    served = served_by(kind)
    whole = b"x" * 100_000
    if chunked:
        answer = served.exchange(_head(Transfer_Encoding="chunked"), _chunks(whole, 30_000)[:70_000], half_close=True)
    else:
        answer = served.exchange(_head(Content_Length="100000"), whole[:70_000], half_close=True)
    if kind == "waitress":  # it waits for the whole body, and forgets a client that goes away
        assert answer.status == 0
    else:
        assert (answer.status, answer.error) == (400, "idempotency_body_incomplete")
    assert (served.runs(), _rows(valkey_server)) == ([], 0)
    assert served.exchange(_head(Content_Length="100000"), whole).status == 201


@pytest.mark.parametrize("kind", ["gunicorn-gthread", "werkzeug"])
def test_an_upload_of_50_mb_arrives_whole_and_costs_no_memory_in_proportion(
    kind: str, served_by: Callable[[str], Served], valkey_server: Server
) -> None:
    served = served_by(kind)
    before = max(served.exchange(_head(key=f"w{n}", Content_Length="1"), b"x").json["peak_kib"] for n in range(6))
    body = bytes(range(256)) * (200 * 1024)
    answer = served.exchange(_head(Content_Length=str(len(body))), body).json
    assert (answer["size"], answer["sha256"]) == (len(body), hashlib.sha256(body).hexdigest())
    assert answer["peak_kib"] - before < 12 * 1024


@pytest.mark.parametrize("kind", ["werkzeug", "gevent"])
def test_a_server_that_takes_methods_in_lower_case_runs_no_view_unclaimed(
    kind: str, served_by: Callable[[str], Served], valkey_server: Server
) -> None:
    served = served_by(kind)
    assert served.exchange("post /charges HTTP/1.1\nContent-Length: 0").error == "idempotency_key_required"
    first = served.exchange(_head(method="post", Content_Length="0"))
    again = served.exchange(_head(Content_Length="0"))
    assert (first.status, again.body, again.headers["idempotent-replayed"]) == (201, first.body, "true")
    assert served.runs() == ["k1"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_repeated_header_line_is_one_key_that_no_single_line_names(
    kind: str, served_by: Callable[[str], Served], valkey_server: Server
) -> None:
    served = served_by(kind)
    assert served.exchange(f"{_head(key='a')}\nIdempotency-Key: b\nContent-Length: 0").status == 201
    for key in ("a", "b"):
        assert served.exchange(_head(key=key, Content_Length="0")).json["generation"] == 1
    assert [len(run) for run in served.runs()][1:] == [1, 1]
    assert served.runs()[0] in ("a,b", "a, b")


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_no_key_may_have_are_refused_by_every_server_or_by_us(
    kind: str, served_by: Callable[[str], Served], valkey_server: Server
) -> None:
    served = served_by(kind)
    for key in ("a\x00b", "a\x7fb", "caf\xe9", "a\x80", "k" * 256):
        answer = served.exchange(_head(key=key, Content_Length="0"))
        assert answer.status in (0, 400, 431), key
    assert (served.runs(), _rows(valkey_server)) == ([], 0)


@pytest.mark.parametrize("answer", ["plain", "stream", "file"])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_first_answer_and_its_replay_are_the_same_behind_every_server(
    kind: str, chunked: bool, answer: str, served_by: Callable[[str], Served], valkey_server: Server
) -> None:
    served = served_by(kind)
    head, body = (
        (_head(f"/answers/{answer}", Transfer_Encoding="chunked"), _chunks(b"abc", 2))
        if chunked
        else (_head(f"/answers/{answer}", Content_Length="3"), b"abc")
    )
    first = served.exchange(head, body)
    wait_until(lambda: _status(valkey_server) == b"completed")
    again = served.exchange(head, body)
    assert first.status == again.status == (200 if answer == "file" else 201)
    assert (again.body, again.headers["idempotent-replayed"]) == (first.body, "true")
    assert again.headers["content-type"] == first.headers["content-type"]
    assert served.runs() == ["k1"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_commit_that_fails_in_the_teardown_is_no_success_behind_any_server(
    kind: str, served_by: Callable[[str], Served], valkey_server: Server
) -> None:
    served = served_by(kind)
    head = _head("/answers/uncommitted", Content_Length="0")
    assert served.exchange(head).status in (0, 500)
    again = served.exchange(head)
    assert (again.status, again.body, served.runs()) == (201, b"uncommitted", ["k1", "k1"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_breaks_is_final_only_if_something_of_it_was_sent(
    kind: str, served_by: Callable[[str], Served], valkey_server: Server
) -> None:
    served = served_by(kind)
    for key, answer in (("k1", "broken"), ("k2", "broken-first")):
        with suppress(http.client.IncompleteRead):
            served.exchange(_head(f"/answers/{answer}", key=key, Content_Length="0"))
    wait_until(lambda: _status(valkey_server) == b"completed")
    assert served.exchange(_head("/answers/broken", Content_Length="0")).error == "idempotency_response_not_stored"
    with valkey_server.client() as client:
        assert client.hmget("served:acme:k2", "status", "owner") == [b"pending", b""]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "waitress"])
def test_a_small_stream_whose_client_goes_away_is_stored_whole_behind_a_server(
    kind: str, served_by: Callable[[str], Served], valkey_server: Server
) -> None:
    """waitress reads a response to its end by itself."""
    served = served_by(kind)
    head = _head("/answers/slow", Content_Length="0")
    with served.connect() as connection:
        connection.sendall(f"{head}\nHost: shop\nConnection: close\n\n".replace("\n", "\r\n").encode())
        assert connection.recv(1)
    wait_until(lambda: _status(valkey_server) == b"completed", 20.0)
    again = served.exchange(head)
    assert (again.status, again.body.count(b"piece"), served.runs()) == (201, 20, ["k1"])


def _status(server: Server, key: str = "k1") -> object:
    with server.client() as client:
        return client.hget(f"served:acme:{key}", "status")
