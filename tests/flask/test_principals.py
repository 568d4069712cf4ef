"""Whose key it is: what may be a principal, and when it is asked for."""

from __future__ import annotations

from uuid import UUID

import pytest
from flask import abort, g, request

from idemredis import ConfigurationError
from idemredis.flask import Idempotency, current_reservation
from tests.support.site import MakeSite


@pytest.mark.parametrize("principal", [None, "", "  ", True, b"acme", 1.5])
def test_a_constant_that_cannot_be_a_principal_is_refused_at_once(principal: object) -> None:
    with pytest.raises(ConfigurationError, match="principal"):
        Idempotency(principal=principal)


@pytest.mark.parametrize(
    ("principal", "text"),
    [("acme", "acme"), (7, "7"), (0, "0"), (UUID(int=1), "00000000-0000-0000-0000-000000000001"), ("a:b", "a:b")],
)
@pytest.mark.parametrize("called", [False, True])
def test_a_principal_may_be_text_a_number_or_a_uuid_and_a_function_or_not(
    principal: object, text: str, called: bool, make_site: MakeSite
) -> None:
    site = make_site(principal=(lambda: principal) if called else principal)
    site.view(lambda: current_reservation.principal)
    assert site.send().text == text
    assert site.row(principal=text)


def test_the_principal_is_asked_for_after_authentication_and_once(make_site: MakeSite) -> None:
    asked: list[str] = []

    def principal() -> str:
        asked.append(g.account)
        return str(g.account)

    site = make_site(principal=principal)

    @site.app.before_request
    def authenticate() -> None:
        g.account = request.headers.get("Authorization") or abort(401)

    site.view(lambda: g.account)
    assert site.send().status_code == 401
    assert asked == []
    assert site.send(headers=[("Authorization", "alice")]).text == "alice"
    assert asked == ["alice"]


@pytest.mark.parametrize(("error", "status"), [(LookupError("no account"), 500), (None, 403)])
def test_a_principal_function_that_fails_runs_and_claims_nothing(
    error: Exception | None, status: int, make_site: MakeSite
) -> None:
    def principal() -> str:
        if error is None:
            abort(403)
        raise error

    site = make_site(principal=principal, FAIL_OPEN=True)
    site.view()
    assert site.send().status_code == status
    assert (site.runs, site.rows()) == ([], {})
