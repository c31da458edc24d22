"""How a task table lies on disk. PostgreSQL only; elsewhere these operations do nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from django.db.migrations.operations.base import Operation, OperationCategory

__all__ = ["TuneTaskTable"]

# Half of each page stays free for the second version of its rows: a checkout then stays on the page (HOT) and writes
# no index entry. Vacuum follows the churn rather than the table's size.
STORAGE = {
    "fillfactor": 50,
    "autovacuum_vacuum_scale_factor": 0.02,
    "autovacuum_vacuum_threshold": 1000,
    "autovacuum_analyze_scale_factor": 0.05,
}


class TableOperation(Operation, ABC):
    """Changes one model's table on PostgreSQL, and nothing in the models."""

    reversible = True
    category = OperationCategory.ALTERATION
    model_name: str

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Nothing changes in the models."""

    def database_forwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any, *, back: bool = False
    ) -> None:
        connection, model = schema_editor.connection, to_state.apps.get_model(app_label, self.model_name)
        if connection.vendor == "postgresql" and self.allow_migrate_model(connection.alias, model):
            self.change(schema_editor, model, back=back)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        self.database_forwards(app_label, schema_editor, to_state, from_state, back=True)

    @abstractmethod
    def change(self, schema_editor: Any, model: Any, *, back: bool) -> None:
        """Change the table of ``model``; with ``back`` take the change back."""


class TuneTaskTable(TableOperation):
    """Set the storage parameters of a task table; put it after the ``CreateModel`` of an ``AbstractTask`` subclass.

    ``unlogged``: for a temporary queue. Such a table is fast, and emptied by a crash of the server.
    """

    def __init__(self, model_name: str, *, unlogged: bool = False) -> None:
        self.model_name = model_name
        self.unlogged = unlogged

    def change(self, schema_editor: Any, model: Any, *, back: bool) -> None:
        """Set the parameters, or reset them to the server's defaults; statistics go with the table."""
        quote = schema_editor.quote_name
        table = quote(model._meta.db_table)
        if back:
            schema_editor.execute(f"ALTER TABLE {table} RESET ({', '.join(STORAGE)})")
            return
        pairs = ", ".join(f"{name} = {value}" for name, value in STORAGE.items())
        schema_editor.execute(f"ALTER TABLE {table} SET ({pairs})")
        if self.unlogged:
            schema_editor.execute(f"ALTER TABLE {table} SET UNLOGGED")
        # The planner then knows how many tasks a queue has in a status. Pages show it where counting would take long.
        columns = ", ".join(quote(model._meta.get_field(name).column) for name in ("queue", "status"))
        name = quote(f"{model._meta.db_table}_queue_status")
        schema_editor.execute(f"CREATE STATISTICS IF NOT EXISTS {name} (mcv) ON {columns} FROM {table}")

    def describe(self) -> str:
        return f"Tune the storage of {self.model_name}"
