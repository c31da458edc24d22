"""Operations that change a table while producers and pollers write to it.

Django's own operations of this kind cannot be imported without psycopg.
"""

from functools import partial
from typing import Any

from django.db import migrations


def _without_lock(schema_editor: Any) -> None:
    """Let an editor add and remove indexes without a lock. Only PostgreSQL has a way."""
    if schema_editor.connection.vendor == "postgresql":
        schema_editor.add_index = partial(schema_editor.add_index, concurrently=True)
        schema_editor.remove_index = partial(schema_editor.remove_index, concurrently=True)


class AddIndexConcurrently(migrations.AddIndex):
    """Add an index while producers write."""

    def database_forwards(self, app_label: str, schema_editor: Any, *states: Any) -> None:
        """Add it."""
        _without_lock(schema_editor)
        super().database_forwards(app_label, schema_editor, *states)

    def database_backwards(self, app_label: str, schema_editor: Any, *states: Any) -> None:
        """Remove it."""
        _without_lock(schema_editor)
        super().database_backwards(app_label, schema_editor, *states)


class RemoveIndexConcurrently(migrations.RemoveIndex):
    """Remove an index while producers write."""

    def database_forwards(self, app_label: str, schema_editor: Any, *states: Any) -> None:
        """Remove it."""
        _without_lock(schema_editor)
        super().database_forwards(app_label, schema_editor, *states)

    def database_backwards(self, app_label: str, schema_editor: Any, *states: Any) -> None:
        """Add it again."""
        _without_lock(schema_editor)
        super().database_backwards(app_label, schema_editor, *states)


class AddConstraintNotValid(migrations.AddConstraint):
    """Add a constraint, then validate it: the second reads the table without a lock."""

    def database_forwards(self, app_label: str, schema_editor: Any, *states: Any) -> None:
        """Add it; only PostgreSQL has a way without a lock."""
        if schema_editor.connection.vendor != "postgresql":
            return super().database_forwards(app_label, schema_editor, *states)
        model = states[1].apps.get_model(app_label, self.model_name)
        if self.allow_migrate_model(schema_editor.connection.alias, model):
            table, name = map(schema_editor.quote_name, (model._meta.db_table, self.constraint.name))
            schema_editor.execute(f"{self.constraint.create_sql(model, schema_editor)} NOT VALID", params=None)
            schema_editor.execute(f"ALTER TABLE {table} VALIDATE CONSTRAINT {name}")
        return None
