"""What a migration may do to a table that pollers use: the statements that hold a lock only for a moment.

Judged is the SQL for PostgreSQL that Django would run, so a rule counts for each operation that leads to it.
"""

import re
from collections.abc import Iterator, Sequence

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations import Migration, RunPython, SeparateDatabaseAndState
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ProjectState

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
