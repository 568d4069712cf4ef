"""What docs/http.md tells the callers of an API is what the extension does, and what the client worth copying does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from client import Answer, may_be_sent_again
from openapi_schema_validator import OAS31Validator
from openapi_spec_validator import validate
from openapi_spec_validator.readers import read_from_filename

from idemredis import StoredResponse
from idemredis.core.keys import MAX_KEY_LENGTH, valid_key
from idemredis.errors import InvalidKey
from idemredis.web.contract import REFUSALS, Contract

DOCUMENT = (Path(__file__).parents[2] / "docs" / "http.md").read_text()

STATUSES = {
    "IdempotencyKeyMissing": 400,
    "IdempotencyPrincipalRequired": 401,
    "IdempotencyConflict": 409,
    "IdempotencyLengthRequired": 411,
    "IdempotencyBodyTooLarge": 413,
    "IdempotencyNoResponse": 500,
    "IdempotencyUnavailable": 503,
}


@pytest.fixture
def fragment(tmp_path: Path) -> Any:
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
    file = tmp_path / "fragment.yaml"
    file.write_text(text)
    return read_from_filename(str(file))[0]


def refusals() -> list[StoredResponse]:
    contract = Contract()
    return [
        contract.key_required(),
        contract.key_invalid(InvalidKey("the key is empty")),
        contract.body_incomplete(),
        contract.principal_required(),
        contract.key_reused(),
        contract.in_progress(12.3),
        contract.lost_race(),
        contract.length_required(),
        contract.body_too_large(1024),
        contract.row_corrupt(),
        contract.not_stored(StoredResponse(201, omitted="too_large")),
        contract.unavailable(),
    ]


def test_the_fragment_stands_in_a_valid_openapi_document(fragment: Any) -> None:
    replayed = {"Idempotent-Replayed": {"$ref": "#/components/headers/IdempotentReplayed"}}
    answers: dict[str, object] = {"201": {"description": "Charged.", "headers": replayed}}
    answers |= {str(status): {"$ref": f"#/components/responses/{name}"} for name, status in STATUSES.items()}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "A shop", "version": "1"},
        "paths": {
            "/charges": {
                "post": {"parameters": [{"$ref": "#/components/parameters/IdempotencyKey"}], "responses": answers}
            }
        },
        **fragment,
    }

    validate(document)
    assert set(fragment["components"]["responses"]) == set(STATUSES)


def test_every_refusal_is_as_the_fragment_says(fragment: Any) -> None:
    schema = OAS31Validator(fragment["components"]["schemas"]["IdempotencyRefusal"])
    responses = fragment["components"]["responses"]
    by_status = {status: responses[name] for name, status in STATUSES.items()}
    told = [json.loads(refusal.body) for refusal in refusals()]

    assert {body["error"] for body in told} == set(REFUSALS)
    for refusal, body in zip(refusals(), told, strict=True):
        schema.validate(body)
        assert set(body) <= set(schema.schema["properties"]), body
        headers = {name.lower() for name, _ in refusal.headers}
        assert headers - {"content-type"} <= {name.lower() for name in by_status[refusal.status].get("headers", {})}
    assert not schema.is_valid({"error": "another", "message": ""})


@pytest.mark.parametrize("key", ["a", " ", "~" * MAX_KEY_LENGTH, "", "~" * (MAX_KEY_LENGTH + 1), "é", "a\n", "\t"])
def test_the_header_is_what_a_valid_key_is(key: str, fragment: Any) -> None:
    schema = OAS31Validator(fragment["components"]["parameters"]["IdempotencyKey"]["schema"])
    try:
        valid = bool(valid_key(key))
    except InvalidKey:
        valid = False

    # Python's $ also matches before a newline at the end; that of OpenAPI, which is JavaScript's, does not.
    assert (schema.is_valid(key) and not key.endswith("\n")) == valid


def test_the_table_is_what_the_client_does() -> None:
    rows = [line.split(" | ") for line in DOCUMENT.splitlines() if re.match(r"\| .*idempotency_", line)]
    told = {code: cells[2] for cells in rows for code in re.findall(r"`(idempotency_\w+)`", cells[0])}

    assert set(told) == set(REFUSALS)
    for code, does in told.items():
        answer = Answer(REFUSALS[code][0], {}, json.dumps({"error": code}).encode())
        assert may_be_sent_again(answer) == does.startswith("retry the same request"), code
