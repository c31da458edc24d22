"""The statements of each task table, in the words of each database."""

from __future__ import annotations

from functools import lru_cache

from django_dbtaskqueue.core.columns import COLUMNS
from django_dbtaskqueue.core.sql import Statements, Tables
from django_dbtaskqueue.core.sql.base import DIALECTS, SQLITE
from django_dbtaskqueue.models import AbstractTask, Attempt, DeletedTasks, Queue, TaskHistory


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
    return {column.db: str(fields[column.name].column) for column in COLUMNS}
