"""The doctor: what is wrong with the queues, their pollers and their database, in words, each with what helps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, DatabaseError, connections, router, transaction
from django.db.migrations.executor import MigrationExecutor
from django.db.models.functions import Now
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_dbtaskqueue import registry
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.management.console.output import span
from django_dbtaskqueue.models import Poller, Queue, Task
from django_dbtaskqueue.operations import checks, doctor_server
from django_dbtaskqueue.operations.finding import Finding
from django_dbtaskqueue.operations.lookup import Location
from django_dbtaskqueue.operations.stats.overview import MISSED, QueueFigures, alive, heads, overview, places_of

__all__ = ["Finding", "examine"]

SKEW = timedelta(seconds=2)  # between this host's clock and the database's
STARVED = 600.0  # seconds that the head of a priority may wait while others overtake it
NO_HANDLER = "no handler"  # how the parking reason of a task without a processor begins


def examine(using: str | None = None) -> list[Finding]:
    """Look at one database (the one new tasks go to by default) and its queues; return what is wrong, the worst first.

    A question the database refuses or fails to answer becomes a finding itself. The cost does not grow with the tables.
    """
    alias = using or router.db_for_write(Task)
    found: list[Finding] = []
    for look in (_unmigrated, _settings, _places, _clock, _queues, _pollers, _parked, doctor_server.examine):
        found += _looked(look, alias)
        if look is _unmigrated and found:
            return found
    order = ("error", "warning", "info")
    return sorted(found, key=lambda finding: order.index(finding.level))


def _looked(look: Callable[[str], Iterator[Finding]], alias: str) -> list[Finding]:
    try:
        with transaction.atomic(using=alias):
            return list(look(alias))
    except DatabaseError as error:
        line = str(error).strip().partition("\n")[0]
        return [
            Finding(
                "doctor.refused",
                "info",
                _("The database did not answer one question: %(error)s") % {"error": line},
                _("Give the role of this process the right to look, or run the doctor as the owner of the tables."),
            )
        ]


def _unmigrated(alias: str) -> Iterator[Finding]:
    executor = MigrationExecutor(connections[alias])
    targets = [key for key in executor.loader.graph.leaf_nodes() if key[0] == Task._meta.app_label]
    missing = [migration.name for migration, _backwards in executor.migration_plan(targets)]
    if missing:
        yield Finding(
            "database.migrations",
            "error",
            _("Migrations are missing on %(alias)s: %(names)s.") % {"alias": alias, "names": ", ".join(missing)},
            f"python manage.py migrate --database {alias}",
        )


# -- settings ----------------------------------------------------------------------------------------------------------


def _settings(alias: str) -> Iterator[Finding]:
    rows = dict(Queue.objects.using(alias).values_list("name", "overrides")[:1000])
    for name in sorted({*conf.known_queues(), *rows}):
        try:
            settings = conf.overlay(conf.default_settings(name), rows.get(name) or {})
        except ImproperlyConfigured as error:
            yield Finding(
                "settings.overrides",
                "error",
                _("What was changed for queue %(queue)s at run time is not in force: %(error)s")
                % {"queue": name, "error": error},
                _("Correct it on the queue's page, or with manage.py taskqueue."),
            )
            continue
        for words, remedy in checks.contradictions(settings):
            yield Finding("settings.contradiction", "warning", f"{name}: {words}", remedy)


def _places(alias: str) -> Iterator[Finding]:
    away = sorted(name for name in conf.known_queues() if conf.default_settings(name).database != DEFAULT_DB_ALIAS)
    if away:
        yield Finding(
            "database.apart",
            "info",
            _("%(queues)s: these queues are not in the database %(alias)s of the other data.")
            % {"queues": ", ".join(away), "alias": DEFAULT_DB_ALIAS},
            _("A task enqueued in a transaction there is not part of it: enqueue after the commit, or move the queue."),
        )
    for level in sorted(checks.isolation_levels(alias)):
        yield Finding(
            "database.isolation",
            "warning",
            _("The connection %(alias)s asks for the isolation level %(level)s.") % {"alias": alias, "level": level},
            _("Use READ COMMITTED: above it a checkout fails whenever another one was faster."),
        )


def _clock(alias: str) -> Iterator[Finding]:
    session = Session.on(alias)
    sql = "SELECT statement_timestamp()" if session.postgresql else f"SELECT {session.sql.dialect.now}"
    there = session.time(session.run(sql, {})[0][0])
    here = datetime.now(UTC) if there.tzinfo else datetime.now()
    skew = abs(here - there)
    if skew > SKEW:
        yield Finding(
            "host.clock",
            "warning",
            _("This host's clock and the database's are %(seconds).1f s apart.") % {"seconds": skew.total_seconds()},
            _("Tasks go by the database's clock, so they are safe; keep both in time with NTP, or ages look wrong."),
        )


# -- queues and pollers ------------------------------------------------------------------------------------------------


def _queues(alias: str) -> Iterator[Finding]:
    found = overview(alias)
    for row in found.queues:
        yield from _queue(row)
    for place in places_of(alias):
        yield from _starved(place, [row.queue for row in found.queues if not row.paused])


def _queue(row: QueueFigures) -> Iterator[Finding]:
    if row.oldest is None:
        return
    age = {"queue": row.queue, "age": span(row.oldest)}
    if row.paused:
        if row.late:
            yield Finding(
                "queue.paused",
                "info",
                _("Queue %(queue)s is paused, and its oldest task has been due for %(age)s.") % age,
                _("Resume it on the queue's page when the reason is gone."),
            )
    elif not row.pollers:
        yield Finding(
            "queue.no_poller",
            "error",
            _("No poller serves queue %(queue)s, and its oldest task has been due for %(age)s.") % age,
            f"python manage.py runtaskpoller --queue {row.queue}",
        )
    elif row.late:
        yield Finding(
            "queue.late",
            "warning",
            _("Queue %(queue)s is late: its oldest task has been due for %(age)s.") % age,
            _("More pollers, processes or threads help when the processors wait; else look at what they do so long."),
        )


def _starved(place: Location, names: list[str]) -> Iterator[Finding]:
    for name, waits in sorted(heads(place, names).items()):
        first = min(waits)
        late = [priority for priority, seconds in waits.items() if priority > first and seconds > STARVED]
        if late and waits[first] < STARVED and conf.default_settings(name).max_wait is None:
            yield Finding(
                "queue.starved",
                "warning",
                ngettext(
                    "Queue %(queue)s: tasks of priority %(priorities)s are overtaken again and again.",
                    "Queue %(queue)s: tasks of priorities %(priorities)s are overtaken again and again.",
                    len(late),
                )
                % {"queue": name, "priorities": ", ".join(map(str, sorted(late)))},
                _("Set max_wait for this queue: a priority that has waited longer then goes first."),
            )


def _pollers(alias: str) -> Iterator[Finding]:
    beat = conf.settings().heartbeat
    running = Poller.objects.using(alias).exclude(state="STOPPED")
    silent = running.filter(heartbeat_time__lte=Now() - MISSED * beat).order_by("instance")
    for instance in silent.values_list("instance", flat=True)[:10]:
        yield Finding(
            "poller.silent",
            "warning",
            _("Poller %(poller)s has not reported for over %(seconds)g s.")
            % {"poller": instance, "seconds": (MISSED * beat).total_seconds()},
            _("It died or lost the database. Its tasks are taken over when their leases end; see its log."),
        )
    known = set(registry.queues())
    for instance, names in sorted(alive(alias).items())[:100]:
        if strange := sorted(names - known):
            yield Finding(
                "poller.no_processor",
                "warning",
                _("Poller %(poller)s serves %(queues)s, for which this code has no processor.")
                % {"poller": instance, "queues": ", ".join(strange)},
                _("Bring both to the same version of the project, or leave the queue out with --exclude."),
            )


def _parked(alias: str) -> Iterator[Finding]:
    for _alias, model in places_of(alias):
        parked = model._base_manager.using(alias).filter(parked_by__startswith=NO_HANDLER)
        reasons = sorted({str(reason) for reason in parked.values_list("parked_by", flat=True)[:1000]})
        for reason in reasons[:10]:
            yield Finding(
                "task.parked",
                "warning",
                _("Tasks are parked: %(reason)s.") % {"reason": reason},
                _("Start pollers whose code has a processor for them; they are unparked by themselves."),
            )
