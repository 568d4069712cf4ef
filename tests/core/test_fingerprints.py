"""What identifies a request, to the last digit."""

from __future__ import annotations

from typing import Any

import pytest

from idemredis import fingerprint_request, fingerprint_value
from idemredis.core.fingerprint import FINGERPRINT_HEADERS, begin_fingerprint
from tests.support.vectors import VECTORS, body_of


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector['method']} {vector['target']}")
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_the_digests_are_those_of_the_other_ledger(vector: dict[str, Any], kind: type) -> None:
    digest = fingerprint_request(vector["method"], vector["target"], vector["headers"], kind(body_of(vector)))

    assert digest == vector["fingerprint"]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector['method']} {vector['target']}")
def test_a_body_hashed_piece_by_piece_gives_the_same_digest(vector: dict[str, Any]) -> None:
    values = {name.lower(): value for name, value in vector["headers"].items()}
    counted = [(name, values.get(name, "")) for name in FINGERPRINT_HEADERS]
    digest = begin_fingerprint(vector["method"], vector["target"], counted)
    body = body_of(vector)
    for at in range(0, len(body), 4097):
        digest.update(body[at : at + 4097])

    assert digest.hexdigest() == vector["fingerprint"]


BASE: dict[str, Any] = {
    "method": "POST",
    "target": "/a?x=1&y=2",
    "headers": {"content-type": "application/json"},
    "body": b'{"a":1}',
}


@pytest.mark.parametrize(
    "change",
    [
        {"method": "PATCH"},
        {"target": "/a?x=1&y=3"},
        {"target": "/a?y=2&x=1"},
        {"target": "/%61?x=1&y=2"},
        {"target": "/a"},
        {"headers": {"content-type": "application/x-www-form-urlencoded"}},
        {"headers": {}},
        {"headers": {"content-type": "application/json", "x-api-version": "2"}},
        {"body": b'{"a":2}'},
        {"body": b'{"a": 1}'},
        {"body": b""},
        {"allow": ("content-type",)},
        {"allow": ("x-api-version", "content-type")},
    ],
    ids=str,
)
def test_whatever_counts_makes_another_digest(change: dict[str, Any]) -> None:
    assert fingerprint_request(**BASE) != fingerprint_request(**{**BASE, **change})


@pytest.mark.parametrize(
    "same",
    [
        {"method": "post"},
        {"headers": {"Content-Type": "application/json"}},
        {"headers": {"content-type": "application/json", "x-api-version": ""}},
        {"headers": {"content-type": "application/json", "traceparent": "00-1", "User-Agent": "x"}},
        {"allow": ("Content-Type", "X-Api-Version")},
    ],
    ids=str,
)
def test_whatever_does_not_count_makes_no_difference(same: dict[str, Any]) -> None:
    assert fingerprint_request(**BASE) == fingerprint_request(**{**BASE, **same})


@pytest.mark.parametrize("body", ["text", None, 1, [1]])
def test_a_body_that_is_not_bytes_is_refused(body: Any) -> None:
    with pytest.raises(TypeError, match="must be bytes, not"):
        fingerprint_request("POST", "/", {}, body)


def test_a_header_that_never_was_on_the_wire_is_refused() -> None:
    with pytest.raises(ValueError, match="latin-1"):
        fingerprint_request("POST", "/", {"content-type": "\u20ac"}, b"")


def test_the_order_of_keys_makes_no_difference_to_a_value_and_the_order_of_items_does() -> None:
    assert fingerprint_value({"a": 1, "b": {"c": 2, "d": 3}}) == fingerprint_value({"b": {"d": 3, "c": 2}, "a": 1})
    assert fingerprint_value([1, 2]) == fingerprint_value((1, 2))
    assert (
        len({fingerprint_value(value) for value in ([1, 2], [2, 1], {"a": 1}, "1", 1, 1.5, True, None, "", [], {})})
        == 11
    )


def test_the_digest_of_a_value_is_that_of_its_canonical_json() -> None:
    """Written down once, so that a later version cannot change what is stored in rows."""
    assert fingerprint_value({"to": 42}) == "3dc9f67dde01ca18c8d51a1ec043b13e6e180e37637ed35c6d9424b68ea4cc18"


@pytest.mark.parametrize("value", [float("nan"), {"a": [float("inf")]}, -float("inf")], ids=repr)
def test_a_number_that_json_has_not_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="JSON"):
        fingerprint_value(value)


@pytest.mark.parametrize(
    "value",
    [{1: "a"}, [{"a": {None: 1}}], ({True: 1},), b"bytes", {1, 2}, object()],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_json_is_refused(value: object) -> None:
    with pytest.raises(TypeError):
        fingerprint_value(value)


def test_a_value_that_refers_to_itself_is_refused() -> None:
    value: list[object] = []
    value.append(value)
    with pytest.raises(ValueError, match="refers to itself"):
        fingerprint_value(value)
