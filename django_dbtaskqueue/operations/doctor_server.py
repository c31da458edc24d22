"""The doctor's look at the PostgreSQL server: indexes, vacuum, old transactions, listeners, the history's months."""

from __future__ import annotations

from collections.abc import Iterator

from django.db import models
from django.utils.translation import gettext as _

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.db import partitions
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.models import Attempt, FailureCount, Metric, TaskHistory
from django_dbtaskqueue.operations.finding import Finding
from django_dbtaskqueue.operations.stats.overview import alive, places_of

PINNED = 300  # seconds that a transaction may be open
DEAD = 0.2  # of a table's rows; PostgreSQL's own vacuum comes long before
FEW = 50_000  # dead rows that never matter
FULL = 0.5  # of the server's queue of notifications

HELD_BACK = """\
SELECT kind, who, seconds FROM (
    SELECT 'transaction' AS kind, coalesce(nullif(application_name, ''), usename, '?') || ' (' || pid || ')' AS who,
        extract(epoch FROM statement_timestamp() - xact_start)::int AS seconds, backend_xmin IS NOT NULL AS pins
    FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
    UNION ALL SELECT 'prepared transaction', gid, extract(epoch FROM statement_timestamp() - prepared)::int, true
    FROM pg_prepared_xacts WHERE database = current_database()
) AS x WHERE pins AND seconds > %(seconds)s ORDER BY seconds DESC LIMIT 5
"""
DEAD_ROWS = """\
SELECT t.name, s.relname, s.n_live_tup, s.n_dead_tup FROM unnest(%(tables)s::text[]) WITH ORDINALITY AS t(name, place)
JOIN pg_stat_user_tables s ON s.relid = to_regclass(t.name)
WHERE s.n_dead_tup > %(few)s AND s.n_dead_tup > %(share)s * s.n_live_tup ORDER BY t.place
"""
INDEXES = """\
SELECT t.name, c.relname, i.indisvalid FROM unnest(%(tables)s::text[]) AS t(name)
JOIN pg_index i ON i.indrelid = to_regclass(t.name) JOIN pg_class c ON c.oid = i.indexrelid
"""
SETTING = "current_setting('{}')"
LISTENERS = """\
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query ILIKE 'LISTEN %%'
"""


def examine(alias: str) -> Iterator[Finding]:
    """Yield what is wrong with one PostgreSQL database; nothing for any other."""
    session = Session.on(alias)
    if session.postgresql:
        for look in (_indexes, _dead_rows, _held_back, _listeners, _durability, _months):
            yield from look(session)


def _tables(alias: str) -> list[type[models.Model]]:
    tables = [model for _, model in places_of(alias)]
    return [*dict.fromkeys(tables), TaskHistory, Attempt, Metric, FailureCount]


def _named(session: Session, model: type[models.Model]) -> str:
    return session.connection.ops.quote_name(model._meta.db_table)


def _indexes(session: Session) -> Iterator[Finding]:
    models_of = {_named(session, model): model for model in _tables(session.connection.alias)}
    found = {(table, name): valid for table, name, valid in session.run(INDEXES, {"tables": list(models_of)})}
    for table, model in models_of.items():
        for index in model._meta.indexes:
            if not found.get((table, index.name), False):
                broken = (table, index.name) in found
                words = (
                    _("Index %(name)s of %(table)s is not valid.") if broken else _("%(table)s has no index %(name)s.")
                )
                yield Finding(
                    "database.index",
                    "error",
                    words % {"table": model._meta.db_table, "name": index.name},
                    _create(session, model, index, broken=broken),
                )


def _create(session: Session, model: type[models.Model], index: models.Index, *, broken: bool) -> str:
    """Return the statement that makes an index without a stop of the work."""
    with session.connection.schema_editor(collect_sql=True) as editor:
        text = str(index.create_sql(model, editor))
    made = text.replace("CREATE INDEX", "CREATE INDEX CONCURRENTLY", 1) + ";"
    return f"DROP INDEX CONCURRENTLY {session.connection.ops.quote_name(index.name)}; {made}" if broken else made


def _dead_rows(session: Session) -> Iterator[Finding]:
    tables = [_named(session, model) for model in _tables(session.connection.alias)]
    for table, name, live, dead in session.run(DEAD_ROWS, {"tables": tables, "few": FEW, "share": DEAD}):
        yield Finding(
            "database.dead_rows",
            "warning",
            _("%(table)s has %(dead)s dead rows beside %(live)s live ones: vacuum does not keep up.")
            % {"table": name, "dead": f"{dead:,}", "live": f"{live:,}"},
            f"VACUUM (ANALYZE) {table};",
        )


def _held_back(session: Session) -> Iterator[Finding]:
    for kind, who, seconds in session.run(HELD_BACK, {"seconds": PINNED}):
        yield Finding(
            "database.pinned",
            "warning",
            _("A %(kind)s of %(who)s has been open for %(seconds)s s; vacuum can clean up nothing younger.")
            % {"kind": kind, "who": who, "seconds": seconds},
            _("End it, and give sessions an idle_in_transaction_session_timeout. Checkouts get slower meanwhile."),
        )


def _listeners(session: Session) -> Iterator[Finding]:
    settings = conf.settings()
    running = alive(session.connection.alias)
    if not settings.notify or not running:
        return
    (number,), (full,) = session.run(LISTENERS, {})[0], session.run("SELECT pg_notification_queue_usage()", {})[0]
    if not number:
        yield Finding(
            "poller.deaf",
            "warning",
            _("Pollers run, but nobody listens for wake-ups: new tasks are found by polling, a little later."),
            _('A pooler in transaction mode swallows LISTEN: set DBTASKQUEUE["LISTEN"] to a direct connection.'),
        )
    if full > FULL:
        yield Finding(
            "database.notifications",
            "error",
            _("The server's queue of notifications is %(percent)s %% full; when it is full, commits that notify fail.")
            % {"percent": int(full * 100)},
            _("End the session that listens but stays in an old transaction; see pg_stat_activity."),
        )


def _durability(session: Session) -> Iterator[Finding]:
    names = ("fsync", "synchronous_commit", "transaction_isolation")
    fsync, synchronous, isolation = session.run(f"SELECT {', '.join(map(SETTING.format, names))}", {})[0]
    if "off" in (fsync, synchronous):
        yield Finding(
            "database.durability",
            "info",
            _("fsync is %(fsync)s and synchronous_commit is %(commit)s: a crash of the server loses its last commits.")
            % {"fsync": fsync, "commit": synchronous},
            _("Set both to on where a task must not be lost."),
        )
    if isolation != "read committed":
        yield Finding(
            "database.isolation",
            "warning",
            _("The server's isolation level is %(level)s.") % {"level": isolation},
            _("Use READ COMMITTED: above it a checkout fails whenever another one was faster."),
        )


def _months(session: Session) -> Iterator[Finding]:
    table = TaskHistory._meta.db_table
    if not partitions.is_partitioned(session.connection, table):
        return
    remedy = "python manage.py housekeeptasks"
    now = session.time(session.run("SELECT statement_timestamp() + interval '1 day'", {})[0][0])
    if not any(month.first <= now < month.end for month in partitions.months(session.connection, table)):
        yield Finding("history.month", "warning", _("The history has no partition for tomorrow."), remedy)
    default = session.connection.ops.quote_name(f"{table}_default")
    if session.run(f"SELECT 1 FROM {default} LIMIT 1", {}):  # noqa: S608 -- the name of a partition
        yield Finding(
            "history.default",
            "info",
            _("Part of the history lies in its default partition, where it ends row by row and not by the month."),
            _("Run housekeeptasks often enough: it makes the partitions three months ahead."),
        )
