"""Let a reference in the ledger expire: rules of uniqueness take one for a period.

A poller of the release before works on: it writes no such reference, and NULL means that one stays taken.
"""

from functools import partial
from typing import Any

from django.db import migrations, models
from django.db.models import Q

from django_dbtaskqueue.migrations._task_tables import READABLE


class AddIndexConcurrently(migrations.AddIndex):
    """Add an index while producers write. Django's own operation cannot be imported without psycopg."""

    def database_forwards(self, app_label: str, schema_editor: Any, *states: Any) -> None:
        """Add it; only PostgreSQL has a way without a lock."""
        if schema_editor.connection.vendor == "postgresql":
            schema_editor.add_index = partial(schema_editor.add_index, concurrently=True)
        super().database_forwards(app_label, schema_editor, *states)

    def database_backwards(self, app_label: str, schema_editor: Any, *states: Any) -> None:
        """Remove it."""
        if schema_editor.connection.vendor == "postgresql":
            schema_editor.remove_index = partial(schema_editor.remove_index, concurrently=True)
        super().database_backwards(app_label, schema_editor, *states)


class AddConstraintNotValid(migrations.AddConstraint):
    """Add a constraint, then validate it: the second reads the table without a lock. As above."""

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


class Migration(migrations.Migration):
    """Add a column that may be NULL, which rewrites no row, an index of its values, and a check of the times."""

    atomic = False
    dependencies = [("dbtaskqueue", "0006_schedule")]

    operations = [
        migrations.AddField("usedreference", "expire_time", models.DateTimeField("expires", null=True, blank=True)),
        AddIndexConcurrently(
            "usedreference",
            models.Index(
                fields=["expire_time"], condition=Q(expire_time__isnull=False), name="dbtaskqueue_usedref_expires"
            ),
        ),
        AddConstraintNotValid(
            "usedreference",
            models.CheckConstraint(
                condition=Q(create_time__range=READABLE, expire_time__range=READABLE),
                name="dbtaskqueue_usedreference_times",
            ),
        ),
    ]
