"""One database connection, spoken to in plain statements.

A session over the thread's Django connection takes part in the caller's transaction. A session of the poller owns its
connection: autocommit, prepared statements, and plans that do not flip with the statistics.
"""

import re
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property, lru_cache, wraps
from inspect import getdoc
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar
from weakref import WeakKeyDictionary

from asgiref.sync import sync_to_async
from django.apps import apps
from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, DatabaseError, NotSupportedError, connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Model, Value
from django.utils.dateparse import parse_datetime
from django.utils.timezone import make_aware, make_naive

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.columns import TASK_COLUMNS
from django_dbtaskqueue.core.context import set_inside, shown_database, standbys
from django_dbtaskqueue.core.exceptions import TaskQueueError, near_match
from django_dbtaskqueue.core.sql import Statements
from django_dbtaskqueue.core.sql.dialects import DIALECTS, OWN_SESSION_SQL, SQLITE, Tables
from django_dbtaskqueue.db import liveness
from django_dbtaskqueue.models import AbstractTask, Task, TemporaryTask

if TYPE_CHECKING:
    from psycopg.abc import AdaptContext

P = ParamSpec("P")
T = TypeVar("T")
TIMESTAMPTZ_OID = 1184
LIBPQ_IDLE = 0  # libpq's number of a connection that is in no transaction
MIN_STATEMENTS_TO_PREPARE = 3  # on one connection: fewer do not pay for the round trips of preparing


@dataclass(slots=True)
class Kept:
    """What is kept for a Django connection until it connects anew."""

    raw: Any  # psycopg's connection
    cursor: Any
    prepares: bool | None = None  # None: not known yet


_kept: WeakKeyDictionary[BaseDatabaseWrapper, Kept] = WeakKeyDictionary()
# By psycopg's connection, because a pool lends one again and again: how many so far; then whether to prepare.
_statement_counts: WeakKeyDictionary[Any, int | bool] = WeakKeyDictionary()


def kept_for(connection: BaseDatabaseWrapper, raw: Any) -> Kept:
    """Return what is kept for a connection, which is connected by ``raw``."""
    kept = _kept.get(connection)
    if kept is None or kept.raw is not raw or kept.cursor.closed:
        import psycopg

        _kept[connection] = kept = Kept(raw, psycopg.Cursor(raw))
        load_times_fast(kept.cursor)
    return kept


def load_times_fast(context: "AdaptContext") -> None:
    """Django's loader, in Python, costs a checkout more than the database does."""
    if django_settings.USE_TZ:
        import psycopg

        loader = psycopg.adapters.get_loader(TIMESTAMPTZ_OID, psycopg.pq.Format.TEXT)
        context.adapters.register_loader(TIMESTAMPTZ_OID, loader)  # type: ignore[arg-type]  # there is one


def should_prepare(raw: Any) -> bool | None:
    """Whether a connection is used long enough, and keeps its server process. Asked per statement while it is None."""
    known = _statement_counts.get(raw, 0)
    if isinstance(known, bool):
        return known
    if known < MIN_STATEMENTS_TO_PREPARE:
        _statement_counts[raw] = known + 1
        return None
    [pid] = raw.execute("SELECT pg_backend_pid()").fetchone()
    _statement_counts[raw] = direct = bool(pid == raw.info.backend_pid)  # a pooler makes a number up
    return direct


def execute_prepared(cursor: Any, sql: str, params: Mapping[str, object], *, ends: bool) -> None:
    """Execute a prepared statement, whatever the site has set for its own statements.

    ``ends``: this is the last statement of the caller's transaction. If it is the first as well, it goes without BEGIN
    and needs no COMMIT, which are round trips of their own.
    """
    raw = cursor.connection
    threshold = raw.prepare_threshold
    alone = ends and not raw.autocommit and raw.info.transaction_status == LIBPQ_IDLE
    raw.prepare_threshold = 0
    if alone:
        raw.autocommit = True
    try:
        cursor.execute(sql, params)
    finally:
        raw.prepare_threshold = threshold
        if alone and not raw.closed:
            raw.autocommit = False


Row = tuple[Any, ...]
Params = Mapping[str, Any]
TABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
TABLE_NAME_RULE = "use 1 to 63 letters, digits and '_', not beginning with a digit"
UNDEFINED_SQLSTATES = ("42P01", "42703")  # a table, a column
UNDEFINED_IN_SQLITE = ("no such table", "no such column")
NO_DEADLINE = nullcontext()
CURSOR_METHODS = ("cursor", "_cursor", "create_cursor", "make_cursor", "make_debug_cursor", "_prepare_cursor")


@cache
def _is_hooked(backend: type[BaseDatabaseWrapper]) -> bool:
    """Whether a backend takes part when Django opens a cursor: it sets a tenant's schema, or counts statements."""
    from django.db.backends.postgresql.base import DatabaseWrapper

    return any(getattr(backend, name) is not getattr(DatabaseWrapper, name) for name in CURSOR_METHODS)


class Session:
    """Runs the flow's statements on one connection of one thread at a time."""

    def __init__(
        self, connection: BaseDatabaseWrapper, model: type[AbstractTask] = Task, *, answer_timeout: float | None = None
    ) -> None:
        self.connection = connection
        self.model = model
        self.owned = answer_timeout is not None
        self._deadline: AbstractContextManager[None] = NO_DEADLINE
        if answer_timeout is not None:
            self._deadline = liveness.Deadline(connection, answer_timeout)
        self.ends = False  # whether the one statement to be repeated is the last of the caller's transaction
        self.postgresql = connection.vendor == "postgresql"
        own = getattr(connection.cursor, "__func__", None)  # a tool may have put another one on the connection
        backend = type(connection)
        self.hooked = self.postgresql and (_is_hooked(backend) or own is not backend.cursor)  # type: ignore[arg-type]
        self.sql = statements_of(model, connection.vendor)

    @cached_property
    def location(self) -> str:
        """The task table, as ``app.model`` in lower case."""
        return self.model._meta.label_lower

    @classmethod
    def on(cls, using: str, model: type[AbstractTask] = Task) -> Self:
        """Return a session over the calling thread's Django connection."""
        return cls(connections[using], model)

    @classmethod
    def open(
        cls, using: str, model: type[AbstractTask] = Task, *, answer_timeout: float = liveness.ANSWER_TIMEOUT_S
    ) -> Self:
        """Return a session over a connection of its own, made at its first statement. Close it at the end."""
        connection = connections.create_connection(using)
        # Kept as long as the poller runs, and set up in its own way: not one to be shared.
        liveness.bound_waits(connection, pool=False)
        connection.inc_thread_sharing()
        return cls(connection, model, answer_timeout=answer_timeout)

    def narrowed(self) -> Self:
        """Return a session on the same connection whose checkouts leave out the payload types in ``without``."""
        twin = copy(self)
        twin.sql = self.sql.narrowed
        return twin

    def close(self) -> None:
        """Close an owned connection; the next statement connects again."""
        if self.owned:
            self.connection.close()

    def run(self, sql: str, params: Params) -> list[Row]:
        connection = self.connection
        logged = (self.hooked or connection.execute_wrappers or connection.queries_logged) and self.logged()
        if not self.postgresql or (logged and not self.owned):
            with connection.cursor() as cursor:
                cursor.execute(sql, params)
                return list(cursor.fetchall()) if cursor.description else []
        cursor = self._cursor()
        if logged:  # wrapped as Django wraps its own, which cannot work beside the loader of an owned connection
            cursor = (connection.make_debug_cursor if connection.queries_logged else connection.make_cursor)(cursor)
        with connection.wrap_database_errors, self._deadline:
            return _rows(cursor.execute(sql, params))

    def count(self, sql: str, params: Params) -> int:
        """Execute one statement; return how many rows it wrote."""
        if self.logged() or not self.postgresql:
            with self.connection.cursor() as cursor:
                cursor.execute(sql, params)
                return int(cursor.rowcount)
        with self.connection.wrap_database_errors, self._deadline:
            return int(self._cursor().execute(sql, params).rowcount)

    def copy(self, sql: str, rows: str) -> None:
        """Send ``rows`` to a COPY, on PostgreSQL; one that is ``logged`` would not see it."""
        with self.connection.wrap_database_errors, self._deadline, self._cursor().copy(sql) as copy:
            copy.write(rows)

    def repeat(self, sql: str, params: Params) -> list[Row]:
        """``run`` a statement that comes again and again: prepared, once this connection has seen a few of them."""
        connection = self.connection
        if self.owned or not self.postgresql:
            return self.run(sql, params)
        if (self.hooked or connection.execute_wrappers or connection.queries_logged) and self.logged():
            return self.run(sql, params)
        kept = kept_for(connection, self._raw())
        with connection.wrap_database_errors:
            if kept.prepares is None and conf.settings().prepare:
                kept.prepares = should_prepare(kept.raw)
            if kept.prepares:
                execute_prepared(kept.cursor, sql, params, ends=self.ends)
            else:
                kept.cursor.execute(sql, params)
            return _rows(kept.cursor)

    def together(self, batch: Sequence[tuple[str, Params]]) -> list[list[Row]]:
        """Execute statements in one transaction; return their rows. On an owned connection: in one round trip."""
        if len(batch) == 1 and (self.owned or self.connection.in_atomic_block):
            return [self.run(*batch[0]) if self.owned else self.repeat(*batch[0])]
        if not (self.owned and self.postgresql):
            with self.atomic():
                return [self.repeat(sql, params) for sql, params in batch]
        with self.connection.wrap_database_errors, self._deadline:
            return self._in_one_trip(batch)

    def _in_one_trip(self, batch: Sequence[tuple[str, Params]]) -> list[list[Row]]:
        """Execute statements between two syncs of a pipeline: they form one implicit transaction."""
        import psycopg

        raw, first_error = self._raw(), None
        cursors = [raw.cursor() for _ in batch]
        try:
            with raw.pipeline():
                try:
                    for cursor, (sql, params) in zip(cursors, batch, strict=True):
                        cursor.execute(sql, params)
                except psycopg.Error as error:  # the end of the block would log that it could not raise another one
                    first_error = error
        except psycopg.Error:
            if first_error is None:
                raise
        if first_error is not None:
            raise first_error
        return [_rows(cursor) for cursor in cursors]

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """A transaction (a savepoint inside the caller's)."""
        if not self.owned:
            with transaction.atomic(using=self.connection.alias):
                yield
        elif self.postgresql:
            with self.connection.wrap_database_errors, self._deadline, self._raw().transaction():
                yield
        elif getattr(self.connection.connection, "in_transaction", False):
            yield  # an error ends the caller's, too
        else:
            with self.connection.cursor() as cursor:
                cursor.execute("BEGIN IMMEDIATE")  # the write lock at once: a later upgrade would fail, not wait
                try:
                    yield
                except BaseException:
                    cursor.execute("ROLLBACK")
                    raise
                cursor.execute("COMMIT")

    def time(self, value: Any) -> datetime:
        """Return a time read by ``run`` as the site's models would show it."""
        parsed = value if isinstance(value, datetime) else parse_datetime(value)
        if parsed is None:
            raise ValueError(f"{value!r} in a time column of {self.location} is not a time.")
        return parsed.replace(tzinfo=(parsed.tzinfo or UTC) if django_settings.USE_TZ else None)  # None: site's zone

    def time_text(self, value: datetime) -> str:
        """Return ``value`` as the text this database compares its times with."""
        value = (value if value.tzinfo else make_aware(value)).astimezone(UTC)  # PostgreSQL knows offsets to 16 hours
        if self.postgresql:
            return value.isoformat()
        return value.replace(tzinfo=None).isoformat(sep=" ", timespec="milliseconds")

    def comparable_time(self, time: datetime) -> datetime | Value:
        """Return a time as a query compares it with a column: SQLite compares text, written to the millisecond."""
        if not self.postgresql:
            return Value(self.time_text(time))
        return self.stored_time(make_aware(time) if django_settings.USE_TZ and time.tzinfo is None else time)

    def stored_time(self, value: datetime) -> datetime:
        """Return ``value`` as a model must hold it so that the database's clock can be compared with it.

        Without USE_TZ, Django writes the site's local time into SQLite, whose clock says UTC.
        """
        if self.postgresql or django_settings.USE_TZ:
            return value.astimezone(UTC) if value.tzinfo else value
        return make_naive(make_aware(value) if value.tzinfo is None else value, UTC)

    def now(self) -> datetime:
        return self.time(self.run(f"SELECT {self.sql.dialect.now}", {})[0][0])

    def is_past(self, value: datetime) -> bool:
        dialect = self.sql.dialect
        sql = f"SELECT {dialect.time('%(value)s')} <= {dialect.now}"
        return bool(self.run(sql, {"value": self.time_text(value)})[0][0])

    def logged(self) -> bool:
        """Whether statements go through Django's slower cursor: they are logged (DEBUG), or a backend takes part."""
        logged = bool(self.connection.execute_wrappers)
        if logged and self.connection.execute_wrappers == liveness.FIRST_STATEMENT:  # the poller's own
            liveness.begin_first_statement(self.connection)
            logged = False
        return logged or bool(self.connection.queries_logged) or (self.hooked and not self.owned)

    def _cursor(self) -> Any:
        return kept_for(self.connection, self._raw()).cursor

    def _raw(self) -> Any:
        connection = self.connection
        if connection.connection is None or (self.owned and connection.connection.closed):
            self._connect()
        connection.validate_no_broken_transaction()
        return connection.connection

    def _connect(self) -> None:
        if self.owned:
            self.connection.close()
            liveness.ensure_thread()
        with self.connection.wrap_database_errors, self._deadline:
            self.connection.connect()
        if not self.owned:
            return
        if self.hooked:  # once: nobody switches its schema later
            self.connection.cursor().close()
        import psycopg

        raw: Any = self.connection.connection
        raw.cursor_factory = psycopg.Cursor
        load_times_fast(raw)
        if conf.settings().prepare:
            raw.prepare_threshold = 0
            with self.connection.wrap_database_errors, self._deadline:
                raw.execute(OWN_SESSION_SQL)


def _rows(cursor: Any) -> list[Row]:
    return list(cursor.fetchall()) if cursor.rownumber is not None else []  # cheaper to ask for than a description


@contextmanager
def migrated() -> Iterator[None]:
    """Raise ``ImproperlyConfigured``, with what to do, where a table is missing or a server is too old for Django."""
    try:
        yield
    except NotSupportedError as error:
        raise ImproperlyConfigured(f"This database cannot be used: {error}") from error
    except DatabaseError as error:
        text = str(error).strip().partition("\n")[0]
        if liveness.sqlstate(error) not in UNDEFINED_SQLSTATES and not text.startswith(UNDEFINED_IN_SQLITE):
            raise
        raise ImproperlyConfigured(f"The database is not migrated ({text}). Run: python manage.py migrate") from error


@lru_cache(maxsize=1024)
def model_named(label: str) -> type[AbstractTask]:
    """Return the task table named ``app.Model``, or raise ``ImproperlyConfigured``."""
    try:
        model = apps.get_model(label)
    except (LookupError, ValueError) as error:
        raise ImproperlyConfigured(f"model={label!r} is not a model of an installed app: {error}") from None
    if not issubclass(model, AbstractTask):
        raise ImproperlyConfigured(f"model={label!r} must be a subclass of django_dbtaskqueue.models.AbstractTask.")
    for name in (model._meta.db_table, *(str(field.column) for field in model._meta.concrete_fields)):
        if not TABLE_NAME.fullmatch(name):
            raise ImproperlyConfigured(
                f"model={label!r}: {name!r} cannot be a table's or column's name here: {TABLE_NAME_RULE}."
            )
    return model


def is_task_table(label: str) -> bool:
    """Whether this names a task table: a row that SQL wrote may name anything."""
    with suppress(ImproperlyConfigured):
        return bool(model_named(label))
    return False


def model_for(queue: str) -> type[AbstractTask]:
    """Return the table ``queue``'s tasks live in."""
    return model_of(conf.default_settings(queue))


def model_of(settings: conf.QueueSettings) -> type[AbstractTask]:
    """Return the table the tasks of a queue with these settings live in."""
    return TemporaryTask if settings.temporary else model_named(settings.model)


def aliases_of(queue: str, using: str | None = None, *, write: bool = True) -> tuple[str, ...]:
    """Return every database ``queue``'s tasks live in: its shards, or the one there is."""
    shards = conf.default_settings(queue).shards if using is None else ()
    return tuple(standbys.get().get(one, one) for one in shards) or (alias_for(queue, using, write=write),)


def task_aliases(queues: Collection[str] | None = None) -> list[str]:
    """Return the common database and those of queues, by default all, each once; not the standbys that are read."""
    names = ("", *(conf.settings_queues() if queues is None else queues))
    with set_inside(standbys, {}), set_inside(shown_database, ""):
        return list(dict.fromkeys([alias_for("", None), *(alias for name in names for alias in aliases_of(name))]))


def row_key(row: Model, pk: int | None = None) -> str:
    """Return the key of a row, or of ``pk`` beside it; ``east:7`` is of another database than the common one."""
    alias = next((one for one, standby in standbys.get().items() if standby == row._state.db), row._state.db)
    key, common = pk or row.pk, task_aliases(())[0] if shown_database.get() or standbys.get() else alias_for("", None)
    return str(key) if isinstance(key, str) or alias in (None, common) else f"{alias}:{key}"


def alias_of(task: AbstractTask) -> str:
    """Return the database that has a task. One that the site's router reads from, and does not write to, is a copy."""
    there, homes = task._state.db, aliases_of(task.queue)
    return homes[0] if there is None else there if there in homes else router.db_for_write(type(task), instance=task)


def only_alias(queue: str, using: str | None = None) -> str:
    """Return the one database of a queue; raise ``TaskQueueError`` if there are several."""
    if len(aliases := aliases_of(queue, using)) > 1:
        known = " or ".join(aliases)
        raise TaskQueueError(f"Queue {queue!r} has shards, and each has its own ids. Name the database: {known}.")
    return aliases[0]


def alias_for(queue: str, using: str | None, *, write: bool = True) -> str:
    """Return the database alias of ``queue``: the caller's choice, the queue's setting, or the site's router.

    Raises ``TaskQueueError`` for an alias that DATABASES does not have.
    """
    if using is not None:
        if using in [*connections]:
            return using
        known = f"{near_match(str(using), connections)} There are {', '.join(connections)}."
        raise TaskQueueError(f"There is no database {using!r} in DATABASES.{known}")
    settings = conf.default_settings(queue)
    alias = settings.database
    if alias == DEFAULT_DB_ALIAS:
        alias = router.db_for_write(Task) if write else router.db_for_read(Task)
    alias = settings.shards[0] if settings.shards and alias not in settings.shards else alias
    if (shown := shown_database.get()) and (not queue or shown in settings.shards):
        alias = shown
    return standbys.get().get(alias, alias)


@lru_cache(maxsize=256)
def statements_of(model: type[AbstractTask], vendor: str) -> Statements:
    """Return the statements for one task table; an unknown database gets those of SQLite."""
    quote = '"{}"'.format
    fields = {field.name: str(field.column) for field in model._meta.concrete_fields}
    renamed = {one.db: quote(fields[one.name]) for one in TASK_COLUMNS if fields[one.name] != one.db}
    return Statements(Tables(quote(model._meta.db_table), columns=renamed), DIALECTS.get(vendor, SQLITE))


def asynchronous(function: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return a function for async code, on Django's thread for the ORM, with the same arguments and promises."""

    @wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return await sync_to_async(function)(*args, **kwargs)

    call.__name__ = call.__qualname__ = f"a{function.__name__}"
    first = f"``{function.__name__}`` for async code: the same arguments, promises and errors."
    call.__doc__ = f"{first}\n\n{getdoc(function)}"
    return call
