"""What all groups of statements share: the dialects of the databases, and the names of one location's tables.

The statements use the column names of the default table. For a table with other names, each name is replaced.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, wraps
from string import Formatter
from types import SimpleNamespace
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from django_dbtaskqueue.core.states import SIGNAL, sql_sources

G = TypeVar("G", bound="Group")
P = ParamSpec("P")
MAX_ROWS = 1_000_000  # rows: more than any batch
COUNTS_TABLE = '"dbtaskqueue_minutecount"'
SQLITE_FORMAT = "%%Y-%%m-%%d %%H:%%M:%%f"


def fragment(names: str, postgresql: str, sqlite: str) -> Callable[..., str]:
    """Return a method that writes a fragment of SQL, as one kind of database has it or the other."""

    def write(dialect: "Dialect", *given: str) -> str:
        text = postgresql if dialect.vendor == "postgresql" else sqlite
        return text.format(**dict(zip(names.split(", "), given, strict=True)))

    return write


@dataclass(frozen=True, slots=True)
class Dialect:
    """Fragments of SQL for one kind of database. The clock is always the database's."""

    vendor: str
    now: str
    greatest: str
    least: str
    lock: str  # what a SELECT adds to lock the rows of ``t`` it reads
    single: bool = False  # ``rows`` is one row of plain parameters

    # The test that a column begins with a text, as Django writes it in the condition of an index.
    begins = fragment("column, text", "{column}::text LIKE '{text}%%'", "{column} LIKE '{text}%%' ESCAPE '\\'")
    # The seconds between two times, as a float.
    seconds_between = fragment(
        "early, late",
        "extract(epoch FROM {late} - {early})::float8",
        "(julianday({late}) - julianday({early})) * 86400.0",
    )
    # The test that a text column is among those of an array parameter (``array``).
    one_of = fragment(
        "column, param", "{column} = ANY(%({param})s::text[])", "{column} IN (SELECT value FROM json_each(%({param})s))"
    )
    # The test that a column is among the rows of a SELECT that locks or has a LIMIT: it runs once. Inside IN,
    # PostgreSQL may run it again for each row, lock more, and go beyond the LIMIT.
    among = fragment("column, select", "{column} = ANY(ARRAY({select}))", "{column} IN ({select})")
    # A FROM item of the texts of an array parameter; its column has the name of the alias.
    texts = fragment(
        "param, alias",
        "unnest(%({param})s::text[]) AS {alias}({alias})",
        "(SELECT value AS {alias} FROM json_each(%({param})s)) AS {alias}",
    )
    # A SELECT of the whole numbers of an array parameter.
    each = fragment("param", "SELECT unnest(%({param})s::bigint[])", "SELECT value FROM json_each(%({param})s)")
    # A text parameter as a time.
    time = fragment("value", "{value}::timestamptz", "{value}")
    # A JSON or time column as text, so that it is decoded once, by us: a row may hold what cannot be.
    text = fragment("column", "{column}::text", "CAST({column} AS text)")

    def later(self, seconds: str, start: str | None = None) -> str:
        """Return the time ``seconds`` (an SQL expression, may be fractional) after ``start`` (now by default)."""
        if self.vendor == "postgresql":
            return f"{start or self.now} + {seconds} * interval '1 second'"
        return f"strftime('{SQLITE_FORMAT}', {start or repr('now')}, printf('%%.3f seconds', {seconds}))"

    def maybe_later(self, seconds: str, start: str) -> str:
        """Return ``later``, or NULL where ``seconds`` is NULL."""
        later = self.later(seconds, start)
        return later if self.vendor == "postgresql" else f"CASE WHEN {seconds} IS NOT NULL THEN {later} END"

    def rows(self, columns: str) -> str:
        """Return a FROM item ``u`` over a JSON array of objects, with these columns and their PostgreSQL types."""
        typed = [column.split() for column in columns.split(", ")]
        if self.single:
            cast = "::{}" if self.vendor == "postgresql" else ""
            return f"(SELECT {', '.join(f'%({name})s{cast.format(kind)} AS {name}' for name, kind in typed)}) AS u"
        if self.vendor == "postgresql":
            return self.expect_few(self.expect_few(f"jsonb_to_recordset(%(rows)s::jsonb) AS u({columns})"))
        # ->> turns JSON true into 1 and null into NULL; -> keeps a value as JSON text
        picked = ", ".join(
            f"nullif(value -> '$.{name}', 'null') AS {name}" if kind == "jsonb" else f"value ->> '$.{name}' AS {name}"
            for name, kind in typed
        )
        return f"(SELECT {picked} FROM json_each(%(rows)s)) AS u"

    def expect_few(self, item: str) -> str:
        """Return a FROM item ``u`` with the same rows, of which PostgreSQL's planner expects a tenth: a LIMIT unknown.

        When it expects one row, it joins by primary key, however small the table is. For more rows it would scan the
        table, or the index, and compare each row with each of ``u``; and it keeps the plan when the table grows.
        """
        return f"(SELECT * FROM {item} LIMIT (SELECT {MAX_ROWS})) AS u"

    def array(self, values: Iterable[str] | Iterable[int]) -> str:
        """Return an array parameter as one text, which psycopg sends much sooner than a list."""
        items: list[Any] = list(values)
        if self.vendor != "postgresql":
            return json.dumps(items)
        texts = list(map(str, items))
        if items and isinstance(items[0], int):
            return f"{{{','.join(texts)}}}"
        joined = "".join(texts)
        if "\\" in joined or '"' in joined:
            texts = [text.replace("\\", "\\\\").replace('"', '\\"') for text in texts]
        return '{"' + '","'.join(texts) + '"}' if texts else "{}"


POSTGRESQL = Dialect("postgresql", "statement_timestamp()", "greatest", "least", "FOR NO KEY UPDATE OF t")
SQLITE = Dialect("sqlite", f"strftime('{SQLITE_FORMAT}', 'now')", "max", "min", "")
DIALECTS = {dialect.vendor: dialect for dialect in (POSTGRESQL, SQLITE)}
NO_VALUES = {"postgresql": "{}", "sqlite": "[]"}  # an empty array parameter

# Statistics lag behind a queue: custom plans flip to sequential scans, and a plan that was made while the table was
# small would scan it for each row of a batch. A poller that waits for a row that a processor has locked in its own
# transaction cannot work for the other tasks. And a statement whose poller has gone must end, for it holds locks.
OWN_SETTINGS = {
    "plan_cache_mode": "force_generic_plan", "enable_seqscan": "off", "jit": "off", "lock_timeout": "250ms",
    "client_connection_check_interval": "2s",
}  # fmt: skip
OWN_SESSION_SQL = "SELECT " + ", ".join(
    # PostgreSQL of other systems may refuse to watch the client.
    f"CASE WHEN '{name}' <> 'client_connection_check_interval' OR version() LIKE '%linux%'"
    f" THEN set_config('{name}', '{value}', false) END"
    for name, value in OWN_SETTINGS.items()
)

# Parameters, single or as the rows ``u`` of a JSON array. This package names them, so they are not renamed.
PARAMETERS = (
    r"%\(\w+\)s(?:::\w+)?(?: AS \w+)?|\bu\.\w+|jsonb_to_recordset\(.*?\) AS u\(.*?\)"
    r"|\(SELECT (?:nullif|value).*?\) AS u\b"
)
OTHER_COLUMNS = r"\bstep\.\w+"  # columns of the table of steps, which has this alias
GROUP = "group"  # the parking reason of a task behind the head of its group
MOVING = "moving to "  # how the parking reason of a task begins that is on its way to another database
HERE = f"(t.parked_by IS NULL OR substr(t.parked_by, 1, {len(MOVING)}) <> '{MOVING}')"  # no other database can have it
PARENTS = "parents"  # the parking reason of a task that waits for others
PARENT_FAILED = "Cancelled: parent task"  # how the result of a task begins that a parent's end has cancelled
FENCED = "task_id bigint, token bigint"  # columns of a lease; ``token`` is its total_attempt
FENCE = "t.id = u.task_id AND t.total_attempt = u.token"  # joins a task to rows of ``FENCED``
# The heads of a group, and the tasks behind them, by the conditions of the indexes of groups (``AbstractTask``). They
# imply no other index's condition, not even in part. After the first tasks with a group, the table's statistics say for
# a while that there are none. All indexes that begin with the queue then cost the planner the same, and those of ready
# and of parked tasks hold all tasks of a queue.
HEAD = "coalesce(t.parked_by, t.final_status) IS NULL"
BEHIND = f"coalesce(t.parked_by, '') = '{GROUP}'"
CONSTANTS = SimpleNamespace(
    BEHIND=BEHIND, FENCE=FENCE, FENCED=FENCED, GROUP=GROUP, HEAD=HEAD, HERE=HERE, PARENTS=PARENTS, SIGNAL=SIGNAL
)


@dataclass(frozen=True)
class Tables:
    """Quoted names of one location's tables, and the columns that are named otherwise there."""

    task: str
    history: str = '"dbtaskqueue_taskhistory"'
    attempt: str = '"dbtaskqueue_attempt"'
    counts: str = COUNTS_TABLE
    queue: str = '"dbtaskqueue_queue"'
    poller: str = '"dbtaskqueue_poller"'
    ledger: str = '"dbtaskqueue_usedreference"'
    limit: str = '"dbtaskqueue_limit"'
    dependency: str = '"dbtaskqueue_dependency"'
    hold: str = '"dbtaskqueue_hold"'
    step: str = '"dbtaskqueue_step"'
    columns: Mapping[str, str] = field(default_factory=dict)  # name in the default table -> quoted name

    def rename(self, sql: str) -> str:
        """Return ``sql`` with this table's column names; parameters and other tables' columns stay as they are."""
        if not self.columns:
            return sql
        others = "|".join(map(re.escape, (self.history, self.attempt, self.counts, self.step)))
        kept = rf"{PARAMETERS}|{OTHER_COLUMNS}|INSERT INTO (?:{others})(?: AS \w+)? \(.*?\)"
        names = "|".join(self.columns)
        return re.sub(rf"({kept})|\b({names})\b", lambda match: match[1] or self.columns[match[2]], sql)


def renamed(render: Callable[Concatenate[G, P], str]) -> Callable[Concatenate[G, P], str]:
    """Return a method that makes a statement with the column names of the location's table, once for each argument."""

    @wraps(render)
    def statement_of(group: G, /, *args: P.args, **kwargs: P.kwargs) -> str:
        return group.tables.rename(render(group, *args, **kwargs))

    return cast(Callable[Concatenate[G, P], str], lru_cache(maxsize=256)(statement_of))


def part(text: str, other: str | None = None) -> cached_property[str]:
    """Return a part of some statements of a group, as text with fields in braces. ``other``: but on PostgreSQL.

    A field is the name of a table, a fragment of the dialect, another part of the group, or one of ``CONSTANTS``.
    ``{each:ids}`` calls the method ``each``; several arguments stand between bars.
    """

    def render(group: "Group") -> str:
        chosen = text if other is None or group.dialect.vendor == "postgresql" else other
        return _Filler().format(chosen, group.tables, group.dialect, group, CONSTANTS)

    return cached_property(render)


def template(text: str, other: str | None = None) -> cached_property[str]:
    """Return a statement as text like that of a ``part``. Columns are renamed only beside the task table."""
    filled = part(text, other).func

    def render(group: "Group") -> str:
        sql = filled(group)
        return group.tables.rename(sql) if group.tables.task in sql else sql

    return cached_property(render)


class _Filler(Formatter):
    """Fills in fields; the positional arguments are where their names are looked up."""

    def get_value(self, key: int | str, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        return next(getattr(place, str(key)) for place in args if hasattr(place, str(key)))

    def format_field(self, value: object, format_spec: str) -> str:
        return str(value(*format_spec.split("|")) if callable(value) else value)


class Group:
    """Statements of one purpose, each rendered once and cached, so that prepared statements are reused."""

    _sources = staticmethod(sql_sources)
    _byte_wise = part(' COLLATE "C"', "")  # after a text to order by
    skipping = part("{lock} SKIP LOCKED", "")  # what a SELECT adds to lock its rows and skip locked ones
    # When a task that was parked is in the ready order again: never in the past.
    _now_or_due = part("{greatest}({now}, next_process_time)")
    # Of a task that waits: its last outcome was a failure. After another one its row has no text, or has a result.
    _failed_last = part("t.attempt > 0 AND t.process_result IS NOT NULL AND t.result IS NULL")
    # A task that was parked for itself goes behind the head of its group, or into the ready order.
    _unparked = part(
        "parked_by = CASE WHEN group_key IS NOT NULL THEN '{GROUP}' END, last_update_time = {now},"
        " ready_time = CASE WHEN group_key IS NULL THEN {_now_or_due} END"
    )

    def __init__(self, tables: Tables, dialect: Dialect) -> None:
        self.tables = tables
        self.dialect = dialect

    def fenced(self, verb: str, *more: str) -> str:
        """Return the FROM and WHERE that join ``rows``, with ``more`` columns, to the leases that still hold."""
        rows = self.dialect.rows(", ".join((FENCED, *more)))
        return f"{self.tables.task} AS t JOIN {rows} ON {FENCE} WHERE t.status IN ({sql_sources(verb)})"

    def distinct(self, column: str, condition: str) -> str:
        """Return a SELECT of a column's distinct values, which skips through an index that begins with the column.

        For PostgreSQL, which has no loose index scan.
        """
        first = f"SELECT {column} FROM {self.tables.task} WHERE {condition}"
        return (
            f"WITH RECURSIVE s(v) AS (({first} ORDER BY {column} LIMIT 1) UNION ALL"
            f" SELECT ({first} AND {column} > s.v ORDER BY {column} LIMIT 1) FROM s WHERE s.v IS NOT NULL)"
            " SELECT v FROM s WHERE v IS NOT NULL"
        )

    def _counting(self, rows: str, queue: str = "queue_name") -> str:
        """Return the INSERT that counts rows, which are about to be deleted for good, by their queue."""
        counted = f"SELECT 'deletion', {queue}, count(*) FROM {rows} GROUP BY {queue}"
        return f"INSERT INTO {self.tables.counts} (kind, queue_name, count) {counted}"

    def _noting(self, rows: str) -> str:
        """Return the INSERT that counts, by their batch, rows about to leave that have not completed."""
        return (
            f"INSERT INTO {self.tables.counts} (kind, queue_name, name, count)"
            f" SELECT 'batch_' || batch, queue_name, status, count(*) FROM {rows}"
            " AND batch IS NOT NULL AND status <> 'COMPLETED' GROUP BY batch, queue_name, status"
        )
