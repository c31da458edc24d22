"""How tables lie on disk: storage parameters, partitions by month. PostgreSQL only; elsewhere nothing is done."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.operations.base import Operation, OperationCategory

__all__ = ["PartitionByMonth", "TuneTaskTable"]

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


# -- partitions --------------------------------------------------------------------------------------------------------

# A partition holds one month, in UTC, and is named after it: ``dbtaskqueue_taskhistory_y2026m11``. Rows of a month
# that has none go to the default partition, so that an insert never fails for want of one.

AHEAD = 3  # months for which partitions are made in advance
NAME, NAME_FORMAT = re.compile(r"_y\d{4}m\d{2}$"), "_y%Ym%m"
LOCK_TIMEOUT = "3s"  # for the default partition, when rows move out of it
MONTHS = """\
SELECT to_char(month, '"_y"YYYY"m"MM')
FROM (SELECT date_trunc('month', statement_timestamp() AT TIME ZONE 'UTC') AS now) AS x,
    generate_series(now, now + %s * interval '1 month', interval '1 month') AS month
"""
MONTHS_OF_ROWS = """\
SELECT DISTINCT to_char({column} AT TIME ZONE 'UTC', '"_y"YYYY"m"MM') FROM {table}
WHERE {column} BETWEEN '1900-01-01' AND '9900-01-01'
"""
COLUMN = """\
SELECT a.attname FROM pg_partitioned_table p
JOIN pg_attribute a ON a.attrelid = p.partrelid AND a.attnum = p.partattrs[0]
WHERE p.partrelid = to_regclass(%s)
"""
CHILDREN = """\
SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = to_regclass(%s) ORDER BY c.relname
"""


class Partition(NamedTuple):
    """One month's table."""

    name: str
    first: datetime  # the month's first moment

    @property
    def end(self) -> datetime:
        return (self.first + timedelta(days=31)).replace(day=1)


def is_partitioned(connection: BaseDatabaseWrapper, table: str) -> bool:
    """Whether the table is made of partitions; never outside PostgreSQL."""
    return connection.vendor == "postgresql" and bool(_of_table(connection, table, COLUMN))


def months(connection: BaseDatabaseWrapper, table: str) -> list[Partition]:
    """Return the table's monthly partitions, the oldest first; the default one is not among them."""
    return _named(_of_table(connection, table, CHILDREN))


def missing_months(connection: BaseDatabaseWrapper, table: str) -> list[Partition]:
    """Return the months without a partition: this one, the next ones, and those with rows in the default partition."""
    quote, there, default = connection.ops.quote_name, _of_table(connection, table, CHILDREN), f"{table}_default"
    suffixes = {*_texts(connection, MONTHS, AHEAD)}
    if default in there:
        column = quote(_of_table(connection, table, COLUMN)[0])
        suffixes.update(_texts(connection, MONTHS_OF_ROWS.format(column=column, table=quote(default))))
    return [month for month in _named(f"{table}{suffix}" for suffix in sorted(suffixes)) if month.name not in there]


def make_month(connection: BaseDatabaseWrapper, table: str, month: Partition) -> None:
    """Make one month's partition. Rows of that month move into it from the default one. Needs the table's owner.

    Call it in a transaction: meanwhile inserts into the default partition wait.
    """
    quote = connection.ops.quote_name
    parent, default, child = quote(table), quote(f"{table}_default"), quote(month.name)
    column, first, end = quote(_of_table(connection, table, COLUMN)[0]), month.first.isoformat(), month.end.isoformat()
    statements = [
        f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'",
        f"CREATE TABLE {child} (LIKE {parent} INCLUDING DEFAULTS INCLUDING CONSTRAINTS)",
        f"ALTER TABLE {parent} ATTACH PARTITION {child} FOR VALUES FROM ('{first}') TO ('{end}')",
    ]
    if f"{table}_default" in _of_table(connection, table, CHILDREN):
        old = f"DELETE FROM {default} WHERE {column} >= '{first}' AND {column} < '{end}' RETURNING *"  # noqa: S608 -- names of models
        statements[2:2] = [
            f"LOCK TABLE {default} IN SHARE ROW EXCLUSIVE MODE",
            f"WITH old AS ({old}) INSERT INTO {child} SELECT * FROM old",  # noqa: S608 -- names of models
        ]
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def _texts(connection: BaseDatabaseWrapper, sql: str, *params: str | int) -> list[str]:
    with connection.cursor() as cursor:
        cursor.execute(sql, params or None)
        return [str(text) for (text,) in cursor.fetchall()]


def _of_table(connection: BaseDatabaseWrapper, table: str, sql: str) -> list[str]:
    return _texts(connection, sql, connection.ops.quote_name(table))


def _named(names: Iterable[str]) -> list[Partition]:
    months = [(name, month[0]) for name in names if (month := NAME.search(name))]
    return [Partition(name, datetime.strptime(month, NAME_FORMAT).replace(tzinfo=UTC)) for name, month in months]


class PartitionByMonth(TableOperation):
    """Turn a table into one partitioned by the month of a column; its rows move over. PostgreSQL only.

    The table's key becomes (key, column), as PostgreSQL demands; the model keeps its own. Its indexes keep their names.
    """

    def __init__(self, model_name: str, column: str) -> None:
        self.model_name = model_name
        self.column = column

    def describe(self) -> str:
        return f"Partition {self.model_name} by the month of {self.column}"

    def change(self, schema_editor: Any, model: Any, *, back: bool) -> None:
        """Make the partitioned table (``back``: one plain table), move the rows over, drop the old one."""
        partitioning = "" if back else f"PARTITION BY RANGE ({schema_editor.quote_name(self.column)})"
        table, column, quote = model._meta.db_table, model._meta.pk.column, schema_editor.quote_name
        old, parent, key, sequence = quote(f"{table}_old"), quote(table), quote(column), quote(f"{table}_{column}_seq")
        like = f"LIKE {old} INCLUDING DEFAULTS INCLUDING CONSTRAINTS"
        schema_editor.execute(f"ALTER TABLE {parent} RENAME TO {old}")
        schema_editor.execute(f"CREATE TABLE {parent} ({like}) {partitioning}")
        schema_editor.execute(f"ALTER TABLE {parent} ALTER COLUMN {key} DROP DEFAULT")
        if partitioning:
            schema_editor.execute(f"CREATE TABLE {quote(f'{table}_default')} PARTITION OF {parent} DEFAULT")
        if partitioning and not schema_editor.collect_sql:  # it reads the database's clock
            for month in missing_months(schema_editor.connection, table):
                make_month(schema_editor.connection, table, month)
        schema_editor.execute(f"INSERT INTO {parent} SELECT * FROM {old}")  # noqa: S608 -- names of models
        schema_editor.execute(f"DROP TABLE {old}")
        keys = f"{key}, {quote(self.column)}" if partitioning else key
        schema_editor.execute(f"ALTER TABLE {parent} ADD PRIMARY KEY ({keys})")
        # A sequence and not an identity: PostgreSQL before 17 has none on partitioned tables.
        schema_editor.execute(f"CREATE SEQUENCE {sequence} OWNED BY {parent}.{key}")
        schema_editor.execute(f"ALTER TABLE {parent} ALTER COLUMN {key} SET DEFAULT nextval('{sequence}')")
        schema_editor.execute(f"SELECT setval('{sequence}', coalesce(max({key}), 0) + 1, false) FROM {parent}")  # noqa: S608 -- names of models
        for index in model._meta.indexes:
            schema_editor.add_index(model, index)
