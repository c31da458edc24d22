"""The doctor: what is wrong with the queues, their pollers and their database, each finding with its remedy."""

import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial

from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, DatabaseError, connections, models, transaction
from django.db.migrations.executor import MigrationExecutor
from django.db.models.functions import Now
from django.utils.translation import gettext as _, ngettext

from django_dbtaskqueue import registry
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.durations import format_duration, format_seconds, percent
from django_dbtaskqueue.core.masking import masked_text
from django_dbtaskqueue.core.sql.checkout import NO_HANDLER
from django_dbtaskqueue.core.sql.pipeline import ABSENT_STREAMS_SQL
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.db import storage
from django_dbtaskqueue.db.session import Session, alias_for, aliases_of
from django_dbtaskqueue.flow.schedule import MAX_LISTED_SCHEDULES, MISSED_AFTER, aware, is_gone, rows_on
from django_dbtaskqueue.models import Attempt, FailureGroup, MinuteCount, Poller, Queue, Task, TaskHistory
from django_dbtaskqueue.models.control import MISSED_HEARTBEATS, queue_names_in
from django_dbtaskqueue.operations import checks, queue_stats
from django_dbtaskqueue.operations.bounded_reads import waits_by_priority
from django_dbtaskqueue.operations.lookup import Location, locations_on
from django_dbtaskqueue.operations.queue_stats import QueueStats, alive, living, names_of, overview, stats_of_groups
from django_dbtaskqueue.operations.serializers import short_error

MAX_CLOCK_SKEW = timedelta(seconds=2)  # between this host's clock and the database's
MAX_PRIORITY_WAIT_S = 600.0  # of the first task of a priority, while other priorities are served
MAX_IDLE_S = 60  # that a poller takes nothing from a queue with due tasks
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
MIN_FAILURES = 10  # attempts of an hour; fewer say little
MIN_FAILURE_SHARE, MAX_FAILURE_GROWTH = 0.1, 3.0  # of the attempts of an hour, and times that of the day before
MAX_OF_A_KIND = 10  # that the findings name
MAX_TRANSACTION_S = 300  # that a transaction may be open
MAX_DEAD_ROWS_SHARE = 0.2  # of a table's rows; autovacuum starts long before
MIN_DEAD_ROWS = 50_000  # fewer do not matter
MAX_NOTIFY_QUEUE_SHARE = 0.5  # of the server's notification queue

OLD_TRANSACTIONS = """\
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
WHERE s.n_dead_tup > %(min_rows)s AND s.n_dead_tup > %(share)s * s.n_live_tup ORDER BY t.place
"""
INDEXES = """\
SELECT t.name, c.relname, i.indisvalid FROM unnest(%(tables)s::text[]) AS t(name)
JOIN pg_index i ON i.indrelid = to_regclass(t.name) JOIN pg_class c ON c.oid = i.indexrelid
"""
LISTENERS = """\
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query ILIKE 'LISTEN %%'
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or worth knowing. ``level`` is error, warning or info; ``id`` is stable."""

    level: str
    id: str  # such as "queue.no_poller"
    words: str
    remedy: str  # a sentence or a command
    queues: tuple[str, ...] = ()  # those that it names, or whose poller it names


WORST_FIRST = ("error", "warning", "info")


def _finding(level: str, id: str, words: str, remedy: str, queues: Iterable[str] = (), /, **given: object) -> Finding:
    return Finding(level, id, words % given, remedy, tuple(queues))


_error, _warning, _info = (partial(_finding, level) for level in WORST_FIRST)


def examine(using: str | None = None) -> list[Finding]:
    """Examine one database, by default all that the settings name, and its queues; return findings, the worst first.

    A question that a database refuses or fails to answer becomes a finding. The cost does not grow with the tables.
    """
    common, homes = alias_for("", using), () if using else conf.settings_queues()
    found: list[Finding] = []
    for alias in dict.fromkeys([common, *(alias for queue in homes for alias in aliases_of(queue))]):
        for check in QUESTIONS:
            new = [one for one in _answers(check, alias) if one not in found]
            found += new if alias == common else [replace(one, words=f"{alias}: {one.words}") for one in new]
            if check is _unmigrated and new:
                break
    return sorted(found, key=lambda finding: WORST_FIRST.index(finding.level))


def _answers(check: Callable[[str], Iterator[Finding]], alias: str) -> list[Finding]:
    try:
        with transaction.atomic(using=alias):
            return list(check(alias))
    except DatabaseError as error:
        words = _("The database did not answer one question: %(error)s")
        remedy = _("Grant the role of this process the right to read, or run the doctor as the owner of the tables.")
        return [_info("doctor.refused", words, remedy, error=str(error).strip().partition("\n")[0])]


def _unmigrated(alias: str) -> Iterator[Finding]:
    executor = MigrationExecutor(connections[alias])
    targets = [key for key in executor.loader.graph.leaf_nodes() if key[0] == Task._meta.app_label]
    if missing := [migration.name for migration, _backwards in executor.migration_plan(targets)]:
        words, command = _("Migrations are missing on %(alias)s: %(names)s."), "python manage.py migrate --database"
        yield _error("database.migrations", words, f"{command} {alias}", alias=alias, names=", ".join(missing))


def _settings(alias: str) -> Iterator[Finding]:
    rows = dict(Queue.objects.using(alias).values_list("name", "overrides")[:1000])
    for name in sorted({*conf.settings_queues(), *rows}):
        try:
            settings = conf.overlay(conf.default_settings(name), rows.get(name) or {})
        except ImproperlyConfigured as error:
            words = _("The runtime overrides of queue %(queue)s are not applied: %(error)s")
            remedy = _("Correct them on the queue's page, or with manage.py taskqueue.")
            yield _error("settings.overrides", words, remedy, (name,), queue=name, error=error)
            continue
        for fault, remedy in checks.contradictions(settings):
            yield _warning("settings.contradiction", "%(queue)s: %(fault)s", remedy, (name,), queue=name, fault=fault)


def _databases(alias: str) -> Iterator[Finding]:
    away = sorted(name for name in conf.settings_queues() if conf.default_settings(name).database != DEFAULT_DB_ALIAS)
    if away:
        names = {"queues": ", ".join(away), "alias": DEFAULT_DB_ALIAS}
        words = _("%(queues)s: these queues are not in the database %(alias)s.") % names
        remedy = _("A task is not part of a transaction on %(alias)s: enqueue after the commit, or move the queue.")
        yield Finding("info", "database.apart", words, remedy % names, tuple(away))
    for level in sorted(checks.isolation_levels(alias)):
        words = _("The connection %(alias)s asks for the isolation level %(level)s.")
        yield _warning("database.isolation", words, str(checks.READ_COMMITTED), alias=alias, level=level)


def _clock(alias: str) -> Iterator[Finding]:
    there = Session.on(alias).now()
    skew = abs((datetime.now(UTC) if there.tzinfo else datetime.now()) - there)
    if skew > MAX_CLOCK_SKEW:
        words = _("This host's clock and the database's are %(time)s apart.")
        remedy = _("Tasks use the database's clock, so they are safe. Synchronise both with NTP, or ages look wrong.")
        yield _warning("host.clock", words, remedy, time=format_duration(skew, rough=True))


# -- queues and pollers ------------------------------------------------------------------------------------------------


def _queues(alias: str) -> Iterator[Finding]:
    found = overview(alias)
    waiting = [row for row in found.queues if row.oldest is not None and not row.pollers and not row.paused]
    yield from _unserved(alias, waiting, found.pollers)
    for row in found.queues:
        yield from _queue(row)
    yield from _stuck(alias, {row.queue for row in found.late})
    yield from _failures(alias, found.queues)
    for place in locations_on(alias):
        yield from _starved(place, [row.queue for row in found.queues if not row.paused])


def _unserved(alias: str, waiting: Sequence[QueueStats], pollers: int) -> Iterator[Finding]:
    """Yield the queues that nothing serves as one finding, and the pollers that are silent, unless that is why."""
    interval = MISSED_HEARTBEATS * conf.settings().heartbeat
    running = Poller.objects.using(alias).exclude(state="STOPPED")
    silent = running.filter(heartbeat_time__lte=Now() - interval).order_by("instance").values_list("instance", "queues")
    since = format_duration(interval)
    names = tuple(row.queue for row in waiting)
    age = format_duration(max([row.oldest for row in waiting if row.oldest], default=timedelta(0)), rough=True)
    given = {"count": len(names), "queues": names_of(names), "age": age}
    if waiting and not pollers:
        words = ngettext(
            "No poller is alive. %(count)s queue waits: %(queues)s. Its oldest task has been due for %(age)s.",
            "No poller is alive. %(count)s queues wait: %(queues)s. Their oldest task has been due for %(age)s.",
            len(names),
        )
        if gone := [instance for instance, _queues in silent[:MAX_OF_A_KIND]]:
            words = f"{words} {_('Not heard of for over %(time)s: %(pollers)s.')}"
            given |= {"time": since, "pollers": ", ".join(gone)}
        yield _error("queue.no_poller", words, "python manage.py runtaskpoller", names, **given)
        return
    if waiting:
        words = _("No poller serves %(queues)s, and the oldest task there has been due for %(age)s.")
        remedy = " --queue ".join(("python manage.py runtaskpoller", *map(shlex.quote, names[:MAX_OF_A_KIND])))
        yield _error("queue.no_poller", words, remedy, names, **given)
    for instance, served in silent[:MAX_OF_A_KIND]:
        words = _("Poller %(poller)s has not reported for over %(time)s.")
        taken_over = _("It died or lost the database; see its log. Others take its tasks when their leases expire.")
        remedy = taken_over if pollers else _("It died or lost the database; see its log, and start it again.")
        yield _warning("poller.silent", words, remedy, queue_names_in(served), poller=instance, time=since)


def _queue(row: QueueStats) -> Iterator[Finding]:
    given = {"queue": row.queue, "age": format_duration(row.oldest or timedelta(0), rough=True)}
    if row.paused and row.overdue:
        words = _("Queue %(queue)s is paused, and its oldest task has been due for %(age)s.")
        remedy = _("Resume it on the queue's page when the reason for the pause no longer exists.")
        yield _info("queue.paused", words, remedy, (row.queue,), **given)
    if row.late and row.pollers:
        words = _("Queue %(queue)s is late: its oldest task has been due for %(age)s.")
        remedy = _("If the processors wait for I/O, add pollers, processes or threads; otherwise make them faster.")
        yield _warning("queue.late", words, remedy, (row.queue,), **given)


def _stuck(alias: str, late: set[str]) -> Iterator[Finding]:
    """Yield the pollers that report, have free slots, and take nothing from a queue whose tasks are due."""
    running = living(alias).filter(state="RUNNING", held__lt=models.F("slots"))
    for instance, served in running.order_by("instance").values_list("instance", "queues")[:100]:
        for item in (one for one in served if isinstance(one, dict)):
            queue, idle = str(item.get("queue")), item.get("idle_seconds")
            is_late = queue in late and conf.default_settings(queue).concurrency != 0
            if is_late and type(idle) is int and MAX_IDLE_S <= idle < 10**9:  # SQL can have written anything
                words = _("Poller %(poller)s is RUNNING but took nothing from %(queue)s for %(time)s with work due.")
                remedy = _("See its log, and restart it. If the tasks have a tag, start a poller with --tag.")
                given = {"poller": instance, "queue": queue, "time": format_seconds(idle)}
                yield _warning("poller.stuck", words, remedy, (queue,), **given)


def _failures(alias: str, queues: Sequence[QueueStats]) -> Iterator[Finding]:
    """Yield failures that are new, queues that fail more than they did before, and errors that nobody looks at."""
    recent = FailureGroup.objects.using(alias).filter(first_seen__gte=Now() - HOUR, last_seen__gte=Now() - HOUR)
    new = list(recent.order_by("-last_seen")[:MAX_OF_A_KIND])
    for group, stats in zip(new, stats_of_groups([group.pk for group in new], alias), strict=True):
        words = ngettext(
            "A failure of queue %(queue)s is new: %(failure)s. %(count)s attempt failed in the last hour.",
            "A failure of queue %(queue)s is new: %(failure)s. %(count)s attempts failed in the last hour.",
            stats.failed["1h"],
        )
        said = masked_text(group.newest or group.message)
        failure = ": ".join(part for part in (short_error(group.error_type), said) if part).rstrip(".")
        given = {"queue": group.queue, "failure": failure, "count": stats.failed["1h"]}
        remedy = f"python manage.py taskqueue list --filter fingerprint:{group.pk}"
        level = _error if stats.failed["1h"] >= MIN_FAILURES else _warning
        yield level("failure.new", words, remedy, (group.queue,), **given)
    explained = {group.queue for group in new}
    failing = [row.queue for row in queues if row.failed >= MIN_FAILURES and row.queue not in explained]
    for queue, share, usual in queue_stats.failure_shares(alias, failing):
        if share >= MIN_FAILURE_SHARE and share > usual * MAX_FAILURE_GROWTH:
            words = _("%(share)s of the attempts of %(queue)s failed in the last hour; %(usual)s in the day before.")
            given = {"share": percent(share), "queue": queue, "usual": percent(usual)}
            search = shlex.quote(f"queue:{queue} -status:COMPLETED attempt:>0")
            remedy = f"python manage.py taskqueue list --filter {search}"
            yield _error("queue.failing", words, remedy, (queue,), **given)
    if left := [row for row in queues if row.statuses[Status.ERROR] and _is_left(alias, row.queue)]:
        shown = names_of([f"{row.queue} ({row.statuses[Status.ERROR]})" for row in left])
        words = _("Tasks have been in ERROR for over an hour: %(queues)s.")
        remedy = _("Reprocess those that can succeed now, and move the others to POISON: see the page of failures.")
        yield _warning("task.left", words, remedy, [row.queue for row in left], queues=shown)


def _is_left(alias: str, queue: str) -> bool:
    """Whether the first task of a queue in ERROR failed over an hour ago, when its failure is not new any more."""
    for _alias, model in locations_on(alias):
        tasks = model._base_manager.using(alias)
        first = tasks.filter(queue=queue, final_status=Status.ERROR).order_by("pk").values("pk")[:1]
        if tasks.filter(pk__in=first, finish_time__lt=Now() - HOUR).exists():
            return True
    return False


def _starved(place: Location, names: list[str]) -> Iterator[Finding]:
    for name, waits in sorted(waits_by_priority(place, names).items()):
        first = min(waits)
        late = [priority for priority, seconds in waits.items() if priority > first and seconds > MAX_PRIORITY_WAIT_S]
        if late and waits[first] < MAX_PRIORITY_WAIT_S and conf.default_settings(name).max_wait is None:
            words = ngettext(
                "Queue %(queue)s: tasks of priority %(priorities)s do not get their turn.",
                "Queue %(queue)s: tasks of priorities %(priorities)s do not get their turn.",
                len(late),
            )
            remedy = _("Set max_wait for this queue: then tasks that have waited longer go first.")
            given = {"queue": name, "priorities": ", ".join(map(str, sorted(late)))}
            yield _warning("queue.starved", words, remedy, (name,), **given)


def _pollers(alias: str) -> Iterator[Finding]:
    for instance, names in sorted(alive(alias).items())[:100]:
        if strange := sorted(names.difference(registry.queues())):
            words = _("Poller %(poller)s serves %(queues)s, for which this code has no processor.")
            remedy = _("Bring both to the same version of the project, or leave the queue out with --exclude.")
            yield _warning("poller.no_processor", words, remedy, names, poller=instance, queues=", ".join(strange))


def _lost_slots(alias: str) -> Iterator[Finding]:
    """Yield what keeps a slot, or all of them, though the poller lives."""
    blocked = _("A coroutine blocks the event loop of poller %(poller)s, so no async task goes on there.")
    unblock = _("Its log says where. Let the processor await, or make it a plain function; then restart the poller.")
    runaway = _("Task %(task)s of %(queue)s was given up, and still runs on poller %(poller)s: a slot is lost.")
    end = _("Restart the poller. Let the processor look at task.cancelled, or run it in a process.")
    rows = living(alias).order_by("pk").values_list("instance", "state", "queues", "running")
    for instance, state, queues, running in rows:
        if state == "BLOCKED":
            yield _warning("poller.blocked", blocked, unblock, queue_names_in(queues), poller=instance)
        for item in (one for one in running if one.get("given_up") is True):
            queue, task = str(item.get("queue")), item.get("task_id")
            yield _warning("task.runaway", runaway, end, (queue,), task=task, queue=queue, poller=instance)


def _parked(alias: str) -> Iterator[Finding]:
    remedy = _("Start pollers whose code has a processor for them; then the tasks are unparked automatically.")
    for _alias, model in locations_on(alias):
        parked = model._base_manager.using(alias).filter(parked_by__startswith=NO_HANDLER)
        reasons: defaultdict[str, set[str]] = defaultdict(set)
        for reason, name in parked.values_list("parked_by", "queue")[:1000]:
            reasons[str(reason)].add(name)
        for reason, names in sorted(reasons.items())[:MAX_OF_A_KIND]:
            yield _warning("task.parked", _("Tasks are parked: %(reason)s."), remedy, names, reason=reason)


def _schedules(alias: str) -> Iterator[Finding]:
    pollers = alive(alias)
    served = {*registry.queues()}.union(*pollers.values())
    for row in rows_on(alias).filter(paused=False).order_by("name")[:MAX_LISTED_SCHEDULES]:
        queues, given = (row.queue,), {"name": row.name, "queue": row.queue, "note": row.note}
        if is_gone(row, registry.periodics()):
            words = _("Schedule %(name)s was declared by code that this process does not have.")
            remedy = _("If the code is gone, delete the schedule on its page.")
            yield _info("schedule.gone", words, remedy, queues, **given)
        elif row.queue not in served:
            words = _("Schedule %(name)s enqueues to %(queue)s, for which no code and no poller has a processor.")
            remedy = _("Add the processor, or pause the schedule.")
            yield _warning("schedule.no_processor", words, remedy, queues, **given)
        elif pollers and row.next_time is not None and row.next_time < row.clock - MISSED_AFTER:
            words = _("Schedule %(name)s is overdue although pollers run: %(note)s.")
            remedy = _("See the log of the pollers of its database. They must have the code of its queue.")
            given["note"] = row.note or _("no poller noted why")
            yield _error("schedule.overdue", words, remedy, queues, **given)


def _streams(alias: str) -> Iterator[Finding]:
    """Yield the streams of a database that have not read for so long that no events are kept for them."""
    session = Session.on(alias)
    for location, name, seconds in session.run(ABSENT_STREAMS_SQL, {}) if session.postgresql else ():
        words = _("Stream %(name)s of %(table)s has not read for %(time)s; finished tasks still write events for it.")
        command = f"manage.py runtaskpipeline stream --unregister {name} --database {alias} --task-table {location}"
        remedy = _("Start the stream again, or run as the tables' owner: %(command)s") % {"command": command}
        yield _warning("stream.absent", words, remedy, name=name, table=location, time=format_seconds(seconds))


# -- the PostgreSQL server ---------------------------------------------------------------------------------------------


def _server(alias: str) -> Iterator[Finding]:
    session = Session.on(alias)
    if session.postgresql:
        for check in (_indexes, _dead_rows, _old_transactions, _listeners, _durability, _months):
            yield from check(session)


def _tables(session: Session) -> dict[str, type[models.Model]]:
    own = [model for _alias, model in locations_on(session.connection.alias)]
    tables: list[type[models.Model]] = [*own, TaskHistory, Attempt, MinuteCount]
    return {session.connection.ops.quote_name(model._meta.db_table): model for model in tables}


def _indexes(session: Session) -> Iterator[Finding]:
    tables = _tables(session)
    found = {(table, name): valid for table, name, valid in session.run(INDEXES, {"tables": list(tables)})}
    for table, model in tables.items():
        for index in (one for one in model._meta.indexes if (table, one.name) not in found):
            with session.connection.schema_editor(collect_sql=True) as editor:
                text = str(index.create_sql(model, editor)).replace("INDEX", "INDEX CONCURRENTLY", 1)
            given = {"table": model._meta.db_table, "name": index.name}
            yield _error("database.index", _("%(table)s has no index %(name)s."), f"{text};", **given)
    for table, name in (place for place, valid in found.items() if not valid):  # as a killed CONCURRENTLY leaves one
        words, remedy = _("Index %(name)s of %(table)s is not valid."), "REINDEX INDEX CONCURRENTLY"
        name = session.connection.ops.quote_name(name)
        yield _error("database.index", words, f"{remedy} {name};", table=table, name=name)


def _dead_rows(session: Session) -> Iterator[Finding]:
    asked = {"tables": list(_tables(session)), "min_rows": MIN_DEAD_ROWS, "share": MAX_DEAD_ROWS_SHARE}
    for table, name, live, dead in session.run(DEAD_ROWS, asked):
        words = _("%(table)s has %(dead)s dead rows beside %(live)s live ones: vacuum does not keep up.")
        given = {"table": name, "dead": f"{dead:,}", "live": f"{live:,}"}
        yield _warning("database.dead_rows", words, f"VACUUM (ANALYZE) {table};", **given)


def _old_transactions(session: Session) -> Iterator[Finding]:
    words = _("A %(kind)s of %(who)s has been open for %(time)s; vacuum cannot remove rows deleted since then.")
    remedy = _("End it, and set idle_in_transaction_session_timeout. Until then checkouts get slower.")
    for kind, who, seconds in session.run(OLD_TRANSACTIONS, {"seconds": MAX_TRANSACTION_S}):
        yield _warning("database.pinned", words, remedy, kind=kind, who=who, time=format_seconds(seconds))


def _listeners(session: Session) -> Iterator[Finding]:
    if not conf.settings().notify or not alive(session.connection.alias):
        return
    (number,), (full,) = session.run(LISTENERS, {})[0], session.run("SELECT pg_notification_queue_usage()", {})[0]
    if not number:
        words = _("Pollers run, but no session listens for NOTIFY: pollers find new tasks by polling, a little later.")
        remedy = _('A pooler in transaction mode loses LISTEN: set DBTASKQUEUE["LISTEN"] to a direct connection.')
        yield _warning("poller.deaf", words, remedy)
    if full > MAX_NOTIFY_QUEUE_SHARE:
        words = _("The server's notification queue is %(percent)s %% full; when it is full, commits with NOTIFY fail.")
        remedy = _("End the session that listens and keeps an old transaction open; see pg_stat_activity.")
        yield _error("database.notifications", words, remedy, percent=int(full * 100))


def _durability(session: Session) -> Iterator[Finding]:
    names = (f"current_setting('{name}')" for name in ("fsync", "synchronous_commit", "transaction_isolation"))
    fsync, synchronous, isolation = session.run(f"SELECT {', '.join(names)}", {})[0]
    if "off" in (fsync, synchronous):
        words = _(
            "fsync is %(fsync)s and synchronous_commit is %(commit)s: a crash of the server loses its last commits."
        )
        remedy = _("Set both to on where a task must not be lost.")
        yield _info("database.durability", words, remedy, fsync=fsync, commit=synchronous)
    if isolation != "read committed":
        words = _("The server's isolation level is %(level)s.")
        yield _warning("database.isolation", words, str(checks.READ_COMMITTED), level=isolation)


def _months(session: Session) -> Iterator[Finding]:
    table = TaskHistory._meta.db_table
    if not storage.is_partitioned(session.connection, table):
        return
    remedy = "python manage.py housekeeptasks"
    tomorrow = aware(session.now(), session.connection.alias) + DAY
    if not any(month.first <= tomorrow < month.end for month in storage.months(session.connection, table)):
        yield _warning("history.month", _("The history has no partition for tomorrow."), remedy)
    default = session.connection.ops.quote_name(f"{table}_default")
    if session.run(f"SELECT 1 FROM {default} LIMIT 1", {}):  # noqa: S608 -- the name of a partition
        words = _("Part of the history is in its default partition, where old rows are deleted one by one.")
        remedy = _("Run housekeeptasks as the tables' owner: it moves the rows into partitions of their months.")
        yield _warning("history.default", words, remedy)


QUESTIONS = (
    _unmigrated, _settings, _databases, _clock, _queues, _pollers, _parked, _schedules, _streams, _lost_slots, _server,
)  # fmt: skip
