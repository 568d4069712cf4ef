"""Whose key it is: what may be a principal, and when it is asked for."""

from __future__ import annotations

import pytest
from flask import abort, g, request

from idemredis import ConfigurationError
from idemredis.flask import Idempotency
from tests.support.site import MakeSite


@pytest.mark.parametrize("principal", [None, "", "  ", True, b"acme", 1.5])
def test_a_constant_that_cannot_be_a_principal_is_refused_at_once(principal: object) -> None:
    with pytest.raises(ConfigurationError, match="principal"):
        Idempotency(principal=principal)


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
