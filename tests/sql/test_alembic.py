"""Alembic finds the table like an application's own, and sees no difference once it is there."""

from __future__ import annotations

from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import MetaData, inspect

from idemredis.sql import Effects
from tests.support.databases import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_autogenerate_finds_the_table_once_and_a_migration_by_hand_makes_the_same(databases: Any, kind: str) -> None:
    engine = databases.get(kind).engine()
    metadata = MetaData()
    effects = Effects(metadata, "idemredis_migrated")

    def found(connection: Any) -> list[Any]:
        options = {"include_object": lambda thing, name, *rest: "migrated" in name, "compare_type": True}
        changes: list[Any] = compare_metadata(MigrationContext.configure(connection, opts=options), metadata)
        return changes

    with engine.begin() as connection:
        assert [change[0] for change in found(connection)] == ["add_table", "add_index"]
        op = Operations(MigrationContext.configure(connection))
        effects.create(op.get_bind())
        assert found(connection) == []
        op.drop_table("idemredis_migrated")
        assert not inspect(connection).has_table("idemredis_migrated")
    engine.dispose()
