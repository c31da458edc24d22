"""The statements of each task table, in the words of each database."""

from __future__ import annotations

from functools import lru_cache

from django_dbtaskqueue.core.sql.dialects import DIALECTS, SQLITE
from django_dbtaskqueue.core.sql.statements import Statements, Tables
from django_dbtaskqueue.models import AbstractTask, Attempt, DeletedTasks, Queue, Task, TaskHistory


@lru_cache(maxsize=256)
def statements(model: type[AbstractTask], vendor: str) -> Statements:
    """Return the statements for one task table; unknown databases speak the standard SQLite also speaks."""
    quote = '"{}"'.format
    columns = {seed: quote(column) for seed, column in _columns(model).items() if seed != column}
    tables = Tables(
        task=quote(model._meta.db_table),
        history=quote(TaskHistory._meta.db_table),
        attempt=quote(Attempt._meta.db_table),
        deleted=quote(DeletedTasks._meta.db_table),
        queue=quote(Queue._meta.db_table),
        columns=columns,
    )
    return Statements(tables, DIALECTS.get(vendor, SQLITE))


def _columns(model: type[AbstractTask]) -> dict[str, str]:
    fields = {field.name: field for field in model._meta.concrete_fields}
    return {str(default.column): str(fields[default.name].column) for default in Task._meta.concrete_fields}
