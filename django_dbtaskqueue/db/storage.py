"""How a task table lies on disk. PostgreSQL only; elsewhere these operations do nothing."""

from __future__ import annotations

from typing import Any

from django.db.migrations.operations.base import Operation, OperationCategory

# Half of each page stays free for the second version of its rows: a checkout then stays on the page (HOT) and writes
# no index entry. Vacuum follows the churn rather than the table's size.
STORAGE = {
    "fillfactor": 50,
    "autovacuum_vacuum_scale_factor": 0.02,
    "autovacuum_vacuum_threshold": 1000,
    "autovacuum_analyze_scale_factor": 0.05,
}


class TuneTaskTable(Operation):
    """Set the storage parameters of a task table; put it after the ``CreateModel`` of an ``AbstractTask`` subclass.

    ``unlogged``: for a temporary queue. Such a table is fast, and emptied by a crash of the server.
    """

    reversible = True
    category = OperationCategory.ALTERATION

    def __init__(self, model_name: str, *, unlogged: bool = False) -> None:
        self.model_name = model_name
        self.unlogged = unlogged

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Nothing changes in the models."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Set the parameters."""
        pairs = ", ".join(f"{name} = {value}" for name, value in STORAGE.items())
        self._alter(app_label, schema_editor, to_state, f"SET ({pairs})")
        if self.unlogged:
            self._alter(app_label, schema_editor, to_state, "SET UNLOGGED")
        self._estimate(app_label, schema_editor, to_state)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Back to the server's defaults; statistics go with the table."""
        self._alter(app_label, schema_editor, from_state, f"RESET ({', '.join(STORAGE)})")

    def _estimate(self, app_label: str, schema_editor: Any, state: Any) -> None:
        """Let the planner know how many tasks a queue has in a status: pages show it where counting would take long."""
        model = state.apps.get_model(app_label, self.model_name)
        if self._applies(schema_editor, model):
            table, quote = model._meta.db_table, schema_editor.quote_name
            columns = ", ".join(quote(model._meta.get_field(name).column) for name in ("queue", "status"))
            name = quote(f"{table}_cells")
            schema_editor.execute(f"CREATE STATISTICS IF NOT EXISTS {name} (mcv) ON {columns} FROM {quote(table)}")

    def describe(self) -> str:
        """Say what the operation does."""
        return f"Tune the storage of {self.model_name}"

    def _alter(self, app_label: str, schema_editor: Any, state: Any, change: str) -> None:
        model = state.apps.get_model(app_label, self.model_name)
        if self._applies(schema_editor, model):
            table = schema_editor.quote_name(model._meta.db_table)
            schema_editor.execute(f"ALTER TABLE {table} {change}")

    def _applies(self, schema_editor: Any, model: Any) -> bool:
        alias = schema_editor.connection.alias
        return schema_editor.connection.vendor == "postgresql" and self.allow_migrate_model(alias, model)
