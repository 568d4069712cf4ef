"""Methods and bodies that only WSGI has: those of a preflight, in another case, and without a length."""

from __future__ import annotations

import pytest

from tests.support.site import MakeSite, Site


def test_a_preflight_has_no_key_and_is_answered(site: Site) -> None:
    answer = site.client.options("/charges", headers={"Origin": "https://x", "Access-Control-Request-Method": "POST"})
    assert (answer.status_code, site.sent) == (200, [])


@pytest.mark.parametrize("method", ["post", "Post", "pOsT"])
def test_a_method_in_another_case_is_protected_too(method: str, site: Site) -> None:
    """Werkzeug's development server hands on the method as sent, and routing folds its case."""
    assert site.send(None, method=method).status_code == 400
    first = site.send(method=method)
    again = site.send()
    assert (first.status_code, again.data, len(site.runs)) == (201, first.data, 1)


@pytest.mark.parametrize("protocol", ["default", "ietf"])
def test_a_chunked_body_that_the_server_does_not_hand_on_is_411_and_claims_nothing(
    protocol: str, make_site: MakeSite
) -> None:
    site = make_site(PROTOCOL=protocol)
    site.view()
    answer = site.send(data=b"12345", environ_overrides={"HTTP_TRANSFER_ENCODING": "chunked"})
    assert (answer.status_code, answer.get_json()["error"]) == (411, "idempotency_length_required")
    assert (site.runs, site.rows()) == ([], {})
