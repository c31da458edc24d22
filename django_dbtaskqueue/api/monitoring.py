"""Queues, schedules, pollers, failures, audit and doctor over HTTP: as the admin and ``taskqueue`` show them."""

from __future__ import annotations

from typing import TypedDict

from django.core.exceptions import ImproperlyConfigured
from django.http import Http404
from django.utils import timezone

from django_dbtaskqueue.api.routing import Call
from django_dbtaskqueue.api.views import may_view, page
from django_dbtaskqueue.core.exceptions import TaskQueueError
from django_dbtaskqueue.db.session import alias_for
from django_dbtaskqueue.flow.placement import known_queues
from django_dbtaskqueue.flow.schedule import SCHEDULE_FIELDS
from django_dbtaskqueue.models import AuditEntry, Batch, FailureGroup, Poller, Queue, Schedule
from django_dbtaskqueue.models.control import queue_names_in
from django_dbtaskqueue.operations import monitor_documents as documents
from django_dbtaskqueue.operations import queue_control
from django_dbtaskqueue.operations import schedule_and_batch_control as control
from django_dbtaskqueue.operations.bounded_reads import statement_timeout
from django_dbtaskqueue.operations.doctor import Finding, examine
from django_dbtaskqueue.operations.permissions import PAUSE, RESUME, all_queues
from django_dbtaskqueue.operations.queue_counts import limits_of
from django_dbtaskqueue.operations.queue_stats import Health, Overview, Pause, alive, overview, pauses, stats_of_queue
from django_dbtaskqueue.operations.queue_stats import health as judged
from django_dbtaskqueue.operations.schedules import ScheduleDocument, find, listed, schedule_document
from django_dbtaskqueue.operations.trends import series, stats_of_groups
from django_dbtaskqueue.operations.visibility import check_queue, narrow, visible_names, visible_queues

MAX_LISTED_ROWS = 500  # pollers


class QueuePause(TypedDict):
    """A queue, and its pause if it is paused."""

    queue: str
    paused: Pause | None


class QueueList(TypedDict):
    """The health of all queues, and each queue that is known."""

    health: Health
    queues: list[QueuePause]


class QueueDetail(QueuePause):
    """One queue: its figures, its pause, and what operators set while it runs."""

    overrides: dict[str, object]
    stats: documents.QueueStatsDocument


class AuditPage(TypedDict):
    """Acts of operators, the newest first. ``before`` leads to the next page."""

    entries: list[documents.AuditDocument]
    before: int | None


def health(call: Call) -> Health:
    """Judge all queues: are they on time, served, paused?"""
    return judged(_overview(call))


def status(call: Call) -> documents.OverviewDocument:
    """Return the figures of every queue, or of one."""
    found, name = _overview(call), call.given["queue"]
    if name:
        check_queue(name, call.actor)
    return documents.overview_document(found, [row for row in found.queues if name in ("", row.queue)])


def trend(call: Call) -> list[documents.PointDocument]:
    """Return attempts by outcome, run times and waits over time, of every queue or of one."""
    may_view(call.actor, Queue)
    name = call.given["queue"]
    if name:
        check_queue(name, call.actor)
    points = series(None, call.given["since"], name or None, among=visible_queues(call.actor))
    return [documents.point_document(point) for point in points]


def doctor(call: Call) -> list[Finding]:
    """Examine queues, pollers, settings and the database."""
    may_view(call.actor, Queue)
    return [one for one in examine() if all(map(call.actor.sees, one.queues))]


# -- queues ------------------------------------------------------------------------------------------------------------


def queues(call: Call) -> QueueList:
    """Return the health, the known queues, and the pause of each."""
    paused = _pauses(call)
    names = sorted({*known_queues(), *paused}) if call.actor.sees_all else visible_queues(call.actor) or []
    return {
        "health": judged(_overview(call)),
        "queues": [{"queue": name, "paused": paused.get(name)} for name in names],
    }


def queue(call: Call, queue: str) -> QueueDetail:
    """Return one queue."""
    may_view(call.actor, Queue)
    if not call.actor.sees(queue) or queue not in all_queues():
        raise Http404(f"There is no queue {queue}.")
    row = Queue.objects.using(alias_for(queue, None, write=False)).filter(pk=queue).first()
    return {
        "queue": queue,
        "paused": _pauses(call).get(queue),
        "overrides": row.changes if row else {},
        "stats": documents.queue_stats_document(stats_of_queue(queue), limits_of(queue)),
    }


def pause_queue(call: Call, queue: str) -> int:
    """Pause a queue, for a time, until a time, or until it is resumed."""
    length, until = call.given["for"], call.given["until"]
    until = timezone.now() + length if length is not None else until
    given = {"reason": call.given["reason"], "until": until}
    return queue_control.pause_or_resume_queues(PAUSE, [queue], call.actor, **given)


def start_queue(call: Call, queue: str) -> int:
    """End a queue's pause."""
    return queue_control.pause_or_resume_queues(RESUME, [queue], call.actor, reason=call.given["reason"])


def change_queue_settings(call: Call, queue: str) -> dict[str, object]:
    """Set runtime overrides of a queue, and remove others. Pollers follow within a heartbeat."""
    try:
        return queue_control.change_settings(
            queue, call.given["values"], call.actor, reset=call.given["reset"], reason=call.given["reason"]
        )
    except ImproperlyConfigured as error:  # of what was sent, so not the site's fault
        raise TaskQueueError(str(error)) from None


# -- batches -----------------------------------------------------------------------------------------------------------


def batches(call: Call) -> list[control.BatchDocument]:
    """Return the newest batches, and how many tasks of each are in which status."""
    may_view(call.actor, Batch)
    return control.batch_documents(control.listed_batches(call.actor))


# -- schedules ---------------------------------------------------------------------------------------------------------


def schedules(call: Call) -> list[ScheduleDocument]:
    """Return the schedules, in words and with their next times."""
    may_view(call.actor, Schedule)
    return [schedule_document(row, call.actor) for row in listed(call.actor)]


def schedule(call: Call, schedule: str) -> ScheduleDocument:
    """Return one schedule."""
    may_view(call.actor, Schedule)
    return schedule_document(_schedule(call, schedule), call.actor)


def make_schedule(call: Call, schedule: str) -> ScheduleDocument:
    """Make a schedule."""
    made = control.add_schedule(schedule, _fields(call), call.actor, reason=call.given["reason"])
    return schedule_document(made, call.actor)


def change_schedule(call: Call, schedule: str) -> ScheduleDocument:
    """Change fields of a schedule. They win over the code until it is reset."""
    _schedule(call, schedule)
    changed = control.edit_schedule(schedule, _fields(call), call.actor, reason=call.given["reason"])
    return schedule_document(changed, call.actor)


def act_on_schedule(call: Call, schedule: str, action: str) -> ScheduleDocument:
    """Pause, resume, run, reset or delete a schedule; return it as it is then, or was."""
    verb = control.SCHEDULE_VERBS.get(f"{action}_schedule")
    if verb is None:
        words = ", ".join(name.removesuffix("_schedule") for name in control.SCHEDULE_VERBS)
        raise Http404(f"There is no action {action!r}; they are {words}.")
    _schedule(call, schedule)
    row = control.act_on_schedule(verb, schedule, call.actor, reason=call.given["reason"])
    return schedule_document(row, call.actor)


def _schedule(call: Call, name: str) -> Schedule:
    found: Schedule | None = find(name, call.actor)
    if found is None:
        raise Http404(f"There is no schedule {name}.")
    return found


def _fields(call: Call) -> dict[str, object]:
    return {name: call.given[name] for name in SCHEDULE_FIELDS if call.given[name] is not None}


# -- pollers -----------------------------------------------------------------------------------------------------------


def pollers(call: Call) -> list[documents.PollerDocument]:
    """Return the pollers as they last reported."""
    may_view(call.actor, Poller)
    rows = narrow(Poller.objects.using(alias_for("", None, write=False)).all(), call.actor)
    living = alive(rows.db)
    found = rows.order_by("-heartbeat_time", "pk")[:MAX_LISTED_ROWS]
    return [
        documents.poller_document(
            row, alive=row.instance in living, queues=visible_names(queue_names_in(row.queues), call.actor)
        )
        for row in found
    ]


def command_poller(call: Call, poller: str, command: str) -> int:
    """Send a command to a poller. It follows at its next heartbeat."""
    if command not in queue_control.POLLER_VERBS:
        raise Http404(f"There is no command {command!r}; they are {', '.join(queue_control.POLLER_VERBS)}.")
    alias, reason = alias_for("", None), call.given["reason"]
    number = queue_control.command_pollers([poller], command, call.actor, reason=reason, using=alias)
    if not number:
        raise Http404(f"There is no running poller {poller}.")
    return number


# -- failures and the audit --------------------------------------------------------------------------------------------


def failures(call: Call) -> list[documents.FailureDocument]:
    """Return failure groups."""
    may_view(call.actor, FailureGroup)
    rows = narrow(FailureGroup.objects.using(alias_for("", None, write=False)).all(), call.actor)
    if call.given["queue"]:
        rows = rows.filter(queue=call.given["queue"])
    with statement_timeout(rows.db):
        found = list(rows.order_by("-last_seen", "pk")[: call.given["limit"]])
        stats = stats_of_groups([row.fingerprint for row in found], rows.db)
    return [documents.failure_document(row, one) for row, one in zip(found, stats, strict=True)]


def failure(call: Call, fingerprint: str) -> documents.FailureDocument:
    """Return one failure group."""
    may_view(call.actor, FailureGroup)
    rows = narrow(FailureGroup.objects.using(alias_for("", None, write=False)).all(), call.actor)
    row = rows.filter(pk=fingerprint).first()
    if row is None:
        raise Http404(f"There is no failure group {fingerprint}.")
    (stats,) = stats_of_groups([row.fingerprint], rows.db)
    return documents.failure_document(row, stats)


def audit(call: Call) -> AuditPage:
    """Return who did what."""
    may_view(call.actor, AuditEntry)
    rows = narrow(AuditEntry.objects.using(alias_for("", None, write=False)).all(), call.actor)
    given = {name: call.given[name] for name in ("queue", "actor", "verb") if call.given[name]}
    found, before = page(rows.filter(**given), call)
    return {"entries": [documents.audit_document(row) for row in found], "before": before}


def _overview(call: Call) -> Overview:
    may_view(call.actor, Queue)
    return overview(only=visible_queues(call.actor))


def _pauses(call: Call) -> dict[str, Pause]:
    may_view(call.actor, Queue)
    return pauses(narrow(Queue.objects.using(alias_for("", None, write=False)).all(), call.actor))
