"""Each migration after the first leaves pollers at work: its SQL is judged, and bad ones are planted to prove it."""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from django.contrib.postgres.operations import AddConstraintNotValid, AddIndexConcurrently, ValidateConstraint
from django.db import DEFAULT_DB_ALIAS, connections, migrations, models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations import Migration, RunPython, SeparateDatabaseAndState
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ProjectState
from django.db.models import Q
from django.db.models.functions import Now, Random
from pytest_django import DjangoDbBlocker

NAME = r'"?(\w+)"?'
NEW_TABLE = re.compile(rf"CREATE (?:UNLOGGED )?TABLE {NAME}")
TABLE = re.compile(rf"\b(?:ALTER TABLE(?: ONLY)?|ON|INTO|UPDATE|FROM|REFERENCES|DROP TABLE|TRUNCATE) {NAME}")
SAFE = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"CREATE INDEX CONCURRENTLY .*",
        r"DROP INDEX CONCURRENTLY .*",
        rf"ALTER TABLE {NAME} ADD COLUMN (?!.*\b(?:NOT NULL|CHECK|REFERENCES|UNIQUE|PRIMARY|GENERATED)\b).*",
        # With a default of the database: PostgreSQL then stores the value once, and an older INSERT gets it.
        rf"ALTER TABLE {NAME} ADD COLUMN (?=.*\bDEFAULT\b)(?!.*\b(?:CHECK|REFERENCES|UNIQUE|PRIMARY|GENERATED)\b).*",
        rf"ALTER TABLE {NAME} ADD CONSTRAINT {NAME} (?:CHECK|FOREIGN KEY) .* NOT VALID",
        rf"ALTER TABLE {NAME} VALIDATE CONSTRAINT {NAME}",
        rf"ALTER TABLE {NAME} DROP CONSTRAINT (?:IF EXISTS )?{NAME}",
        rf"ALTER TABLE {NAME} (?:RE)?SET \(.*\)",
        rf"ALTER TABLE {NAME} ALTER COLUMN {NAME} (?:DROP NOT NULL|SET STATISTICS \d+|SET DEFAULT .*)",
        r"COMMENT ON .*",
    )
)
# A default that differs from row to row: PostgreSQL writes the whole table again.
VOLATILE = re.compile(r"ADD COLUMN .*\b(?:clock_timestamp|random|gen_random_uuid|nextval|timeofday)\b", re.IGNORECASE)
HELD = re.compile(r"ALTER TABLE .* (?:ADD|DROP|ALTER) ")  # until the end of the transaction nobody gets at the table
ADVICE = (
    "Safe are: AddIndexConcurrently, AddField with null=True or db_default, AddConstraintNotValid, and in a migration "
    "that is not atomic ValidateConstraint."
)


def faults(connection: BaseDatabaseWrapper, migration: Migration, state: ProjectState) -> list[str]:
    """Return what would stop pollers while a migration runs, or stop older ones after it. Changes ``state``."""
    found = [
        f"{operation.describe()}: rows are changed in one transaction. Let pollers or retention change them in batches."
        for operation in _flat(migration.operations)
        if isinstance(operation, RunPython)
    ]
    with connection.schema_editor(collect_sql=True, atomic=migration.atomic) as editor:
        migration.apply(state, editor, collect_sql=True)
    statements = [" ".join(line.rstrip(";").split()) for line in editor.collected_sql if not line.startswith("--")]
    new = {made[1] for statement in statements if (made := NEW_TABLE.match(statement))}
    held = ""
    for statement in statements:
        if new.intersection(TABLE.findall(statement)) or NEW_TABLE.match(statement):
            continue  # nobody uses it yet
        if not any(pattern.fullmatch(statement) for pattern in SAFE) or VOLATILE.search(statement):
            found.append(f"{statement}: not among the statements that are known to be safe. {ADVICE}")
        if migration.atomic and held and "VALIDATE CONSTRAINT" in statement:
            found.append(f"{statement}: holds the lock of {held!r} while it reads the table. Set atomic = False.")
        if HELD.match(statement):
            held = statement
    return found


def _flat(operations: Sequence[Operation]) -> Iterator[Operation]:
    for operation in operations:
        if isinstance(operation, SeparateDatabaseAndState):
            yield from _flat(operation.database_operations)
        else:
            yield operation


LOADER = MigrationLoader(None)  # the files, whatever a database has
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
    assert ours[0] == ("dbtaskqueue", "0001_initial")
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
        ([AddConstraintNotValid("task", POSITIVE), ValidateConstraint("task", "planted_positive")], "atomic = False"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_planted_migration_that_locks_or_breaks_is_refused(found: Found, operation: Any, part: str) -> None:
    assert part in "\n".join(found(*(operation if isinstance(operation, list) else [operation])))
