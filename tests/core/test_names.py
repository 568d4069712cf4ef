"""Row names, both ways, for whatever comes."""

from __future__ import annotations

import re
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idemredis import InvalidPrincipal
from idemredis.core.keys import identify, parse_row_name, valid_key

PRINTABLE = [chr(code) for code in range(0x20, 0x7F)]
ODD = st.text(
    st.sampled_from([*":%{}*?[]'\" /@+=,~_-.ab3A", "\u00e9", "\U0001f600", "\x00", "\n"]), min_size=1, max_size=8
)

keys = st.text(st.sampled_from(PRINTABLE), min_size=1, max_size=255) | st.text(
    st.sampled_from(":%{}ab3A"), min_size=1, max_size=5
)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1) | ODD
principals = texts.filter(lambda text: bool(text.strip()))
operations = st.just("") | texts
identities = st.tuples(principals, operations, keys)


@given(texts, identities)
def test_a_row_name_is_read_back_into_its_parts(namespace: str, identity: tuple[str, str, str]) -> None:
    principal, operation, key = identity
    name = identify(namespace, principal, key, operation).row

    assert parse_row_name(name) == parse_row_name(name.encode()) == (namespace, principal, operation, key)


@given(st.tuples(texts, identities), st.tuples(texts, identities))
def test_different_identities_have_different_rows(
    one: tuple[str, tuple[str, str, str]], other: tuple[str, tuple[str, str, str]]
) -> None:
    def name(of: tuple[str, tuple[str, str, str]]) -> str:
        namespace, (principal, operation, key) = of
        return identify(namespace, principal, key, operation).row

    assert (name(one) == name(other)) == (one == other)


@given(texts, identities)
def test_a_row_name_has_nothing_that_redis_or_a_shell_reads_as_more(
    namespace: str, identity: tuple[str, str, str]
) -> None:
    principal, operation, key = identity
    name = identify(namespace, principal, key, operation).row

    assert name.count(":") == (3 if operation else 2)
    assert re.fullmatch(r"(?:[A-Za-z0-9\-._~/@+=,:]|%[0-9A-F]{2})+", name)


@given(keys)
def test_every_printable_key_is_valid_and_stays_as_it_is(key: str) -> None:
    assert valid_key(key) == key
    assert identify("idem", "p", key).key == key


def test_the_names_are_those_that_the_design_gives() -> None:
    assert identify("idem", "acct_1", "8e03978e-40d5").row == "idem:acct_1:8e03978e-40d5"
    assert identify("idem", "a:b", "c").row == "idem:a%3Ab:c"
    assert identify("idem", "a", "b:c", "charge it").row == "idem:a:charge%20it:b%3Ac"
    assert identify("idem", "caf\u00e9", "{x}*%").row == "idem:caf%C3%A9:%7Bx%7D%2A%25"
    assert identify("idem", "a", "-._~/@+=,").row == "idem:a:-._~/@+=,"


def test_an_int_or_a_uuid_is_a_principal_as_its_text() -> None:
    account = UUID("12345678123456781234567812345678")
    assert identify("idem", 42, "k")[:3] == identify("idem", "42", "k")[:3] == ("42", "", "k")
    assert identify("idem", account, "k").row == f"idem:{account}:k"
    assert identify("idem", 0, "k").principal == "0"


def test_a_lone_surrogate_has_no_row() -> None:
    for principal, operation in (("\ud800", ""), ("p", "\udfff")):
        with pytest.raises(InvalidPrincipal, match="UTF-8"):
            identify("idem", principal, "k", operation)


@pytest.mark.parametrize("name", ["", "a", "a:b", "a:b:c:d:e", b"a:b", "a:b:%ff", "a:b:%e2%82"], ids=repr)
def test_what_is_no_row_name_is_refused(name: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"not the name of a row|can't decode"):
        parse_row_name(name)
