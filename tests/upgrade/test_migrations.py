"""Each migration after the first leaves pollers at work: its SQL is judged, and bad ones are planted to prove it."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from django.contrib.postgres.operations import AddConstraintNotValid, AddIndexConcurrently, ValidateConstraint
from django.db import DEFAULT_DB_ALIAS, connections, migrations, models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.loader import MigrationLoader
from django.db.models import Q
from django.db.models.functions import Now, Random
from pytest_django import DjangoDbBlocker

from tests.upgrade.lock_rules import faults

LOADER = MigrationLoader(None)  # the files, whatever a database has
FIRST = ("dbtaskqueue", "0001_initial")
POSITIVE = models.CheckConstraint(condition=Q(attempt__gte=0), name="planted_positive")
INDEX = models.Index(fields=["tag"], name="dbtaskqueue_planted")
Found = Callable[..., list[str]]


@pytest.fixture(scope="module")
def server(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[BaseDatabaseWrapper]:
    """A connection of these tests, which write nothing; in no transaction, as ``migrate`` has it."""
    with django_db_blocker.unblock():
        connection = connections.create_connection(DEFAULT_DB_ALIAS)
        yield connection
        connection.close()


@pytest.fixture
def found(server: BaseDatabaseWrapper) -> Found:
    """Return the faults of a migration that comes after those that there are."""

    def judge(*operations: Any, atomic: bool = True) -> list[str]:
        migration = migrations.Migration("0999_planted", "dbtaskqueue")
        migration.operations, migration.atomic = list(operations), atomic
        (leaf,) = LOADER.graph.leaf_nodes("dbtaskqueue")
        return faults(server, migration, LOADER.project_state(leaf))

    return judge


def test_each_migration_after_the_first_is_safe(server: BaseDatabaseWrapper) -> None:
    (leaf,) = LOADER.graph.leaf_nodes("dbtaskqueue")
    ours = [key for key in LOADER.graph.forwards_plan(leaf) if key[0] == "dbtaskqueue"]
    assert ours[0] == FIRST
    for before, key in pairwise(ours):
        assert not faults(server, LOADER.get_migration(*key), LOADER.project_state(before)), key


NULLABLE = migrations.AddField("task", "planted", models.IntegerField(null=True))


@pytest.mark.parametrize(
    "operations",
    [
        [NULLABLE],
        [migrations.AddField("task", "planted", models.CharField(max_length=9, db_default="none"))],
        [migrations.AddField("task", "planted", models.DateTimeField(db_default=Now()))],
        [AddIndexConcurrently("task", INDEX)],
        [AddConstraintNotValid("task", POSITIVE)],
        [AddConstraintNotValid("task", POSITIVE), ValidateConstraint("task", "planted_positive")],
        [NULLABLE, migrations.AlterField("task", "tag", models.CharField("label", max_length=200, null=True))],
        [migrations.CreateModel("Planted", [("id", models.BigAutoField(primary_key=True)), ("name", models.TextField(db_index=True))])],  # noqa: E501 -- one case a line
    ],
)  # fmt: skip
def test_a_safe_migration_is_let_through(found: Found, operations: list[Any]) -> None:
    assert found(*operations, atomic=False) == []


@pytest.mark.parametrize(
    ("operation", "part"),
    [
        (migrations.AddIndex("task", INDEX), "CREATE INDEX"),
        (migrations.AddConstraint("task", POSITIVE), "ADD CONSTRAINT"),
        (migrations.AddConstraint("task", models.UniqueConstraint(fields=["tag"], name="planted")), "UNIQUE"),
        (migrations.AddField("task", "planted", models.IntegerField(default=1)), "DROP DEFAULT"),
        (migrations.AddField("task", "planted", models.PositiveIntegerField(null=True)), "CHECK"),
        (migrations.AddField("task", "planted", models.FloatField(db_default=Random())), "RANDOM()"),
        (migrations.AddField("task", "planted", models.IntegerField(null=True, db_index=True)), "CREATE INDEX"),
        (migrations.AddField("task", "planted", models.ForeignKey("dbtaskqueue.queue", models.CASCADE, null=True)), "REFERENCES"),  # noqa: E501 -- one case a line
        (migrations.AlterField("task", "attempt", models.BigIntegerField()), "TYPE bigint"),
        (migrations.AlterField("task", "tag", models.CharField(max_length=200, db_default="")), "SET NOT NULL"),
        (migrations.RemoveField("task", "tag"), "DROP COLUMN"),
        (migrations.RenameField("task", "tag", "label"), "RENAME COLUMN"),
        (migrations.AlterModelTable("task", "planted"), "RENAME TO"),
        (migrations.DeleteModel("attempt"), "DROP TABLE"),
        (migrations.RunSQL("UPDATE dbtaskqueue_task SET tag = 'planted'"), "UPDATE"),
        (migrations.RunSQL("LOCK TABLE dbtaskqueue_task"), "LOCK TABLE"),
        (migrations.RunPython(migrations.RunPython.noop), "rows are changed in one transaction"),
        (migrations.SeparateDatabaseAndState([migrations.RunPython(migrations.RunPython.noop)]), "rows are changed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_planted_migration_that_locks_or_breaks_is_refused(found: Found, operation: Any, part: str) -> None:
    assert part in "\n".join(found(operation))


def test_a_constraint_is_not_validated_under_the_lock_that_added_it(found: Found) -> None:
    operations = AddConstraintNotValid("task", POSITIVE), ValidateConstraint("task", "planted_positive")
    assert "Set atomic = False" in "\n".join(found(*operations, atomic=True))
