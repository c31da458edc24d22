"""Metrics of all queues for Prometheus: ``path("metrics", django_dbtaskqueue.api.prometheus.metrics)``.

A caller needs a token or a session, and the permission ``view_queue``. It gets the queues that it may view. The numbers
come from bounded counts and from the counts by the minute, so a scrape costs the same however many tasks there are.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime

from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_exempt

from django_dbtaskqueue.api.routing import error, identified, may_view, unknown_caller
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.metrics import Exposition, exposed, metric
from django_dbtaskqueue.models import MinuteCount, Queue, Schedule
from django_dbtaskqueue.models.control import CALL, OUTCOME
from django_dbtaskqueue.models.readable import Total
from django_dbtaskqueue.operations.bounded_reads import statement_timeout
from django_dbtaskqueue.operations.lookup import aliases_in, locations
from django_dbtaskqueue.operations.permissions import Actor, narrow
from django_dbtaskqueue.operations.queue_stats import QueueStats, overview, with_limits
from django_dbtaskqueue.operations.schedules import listed

__all__ = ["metrics"]

METHODS = ("GET", "HEAD")
METRIC_SUMS = ("count", "run_seconds", "wait_seconds")
DAY_S = 86_400
TODAY = "since midnight UTC; starts again each day"
HELD_BACK = "Due tasks that wait because the limit is reached; at most 1,000 of each priority are counted"
DATABASE_METRICS = (
    metric("dbtaskqueue_tasks", "Tasks by status; large numbers are estimates", "queue", "status"),
    metric("dbtaskqueue_oldest_due_age_seconds", "How long the task that waits longest has been due", "queue"),
    metric("dbtaskqueue_expired_leases", "Tasks whose lease ran out and that no poller has taken over", "queue"),
    metric("dbtaskqueue_queue_paused", "1 while the queue is paused", "queue"),
    metric("dbtaskqueue_queue_pollers", "Pollers alive that serve the queue", "queue"),
    metric("dbtaskqueue_pollers", "Pollers alive"),
    metric("dbtaskqueue_limited_running_tasks", "Tasks that count under the queue's max_running", "queue", "database"),
    metric("dbtaskqueue_limit_max_running", "The queue's max_running", "queue", "database"),
    metric("dbtaskqueue_limit_rate_tokens", "Tasks that the queue's rate allows to start now", "queue", "database"),
    metric("dbtaskqueue_held_back_tasks", HELD_BACK, "queue", "database", "limit"),
    metric("dbtaskqueue_enqueued_tasks_total", f"Tasks enqueued {TODAY}", "queue"),
    metric("dbtaskqueue_attempts_total", f"Attempts that ended {TODAY}", "queue", "outcome"),
    metric("dbtaskqueue_run_seconds_total", f"Run time of attempts {TODAY}", "queue"),
    metric("dbtaskqueue_wait_seconds_total", f"Time from due to checkout of attempts {TODAY}", "queue"),
    metric("dbtaskqueue_recent_run_seconds", "Run time of attempts, last hour", "queue", "percentile"),
    metric("dbtaskqueue_recent_wait_seconds", "Time from due to checkout, last hour", "queue", "percentile"),
    metric("dbtaskqueue_schedule_next_timestamp_seconds", "The schedule's next tick", "schedule", "queue"),
    metric("dbtaskqueue_schedule_last_timestamp_seconds", "The schedule's last tick", "schedule", "queue"),
    metric("dbtaskqueue_schedule_paused", "1 while the schedule is paused", "schedule", "queue"),
)


@csrf_exempt
@login_not_required
@identified
def metrics(request: HttpRequest, actor: Actor | None, parts: Mapping[str, object]) -> HttpResponse:
    """Answer with the metrics of all queues that the caller may view, for Prometheus. A view without arguments.

    The caller has an API token, or a session of a user who may view queues; others get 401 or 403. Only GET and HEAD.
    """
    if request.method not in METHODS:
        return error(405, "Use GET.", Allow=", ".join(METHODS))
    if actor is None:
        return unknown_caller()
    may_view(actor, Queue)
    text, content_type = exposed([exposition(actor)], request.headers.get("Accept", ""))
    return HttpResponse(text, content_type=content_type, headers={"Cache-Control": "no-store"})


def exposition(actor: Actor) -> Exposition:
    """Return the metrics of the queues that the actor may view."""
    found = Exposition(DATABASE_METRICS)
    aliases = aliases_in(locations())
    with ExitStack() as limits:
        for alias in aliases:
            limits.enter_context(statement_timeout(alias))
        stats = overview(only=actor.visible_queues)
        found.add("dbtaskqueue_pollers", stats.pollers)
        for row in with_limits(stats.queues):
            _add_queue(found, row)
        _add_counts(found, aliases, stats.as_of, actor)
        if actor.user is None or actor.user.has_perm(f"{Schedule._meta.app_label}.view_schedule"):
            for schedule in listed(actor):
                labels = (schedule.name, schedule.queue)
                for name, moment in (("next", schedule.next_time), ("last", schedule.last_time)):
                    if moment is not None:
                        found.add(f"dbtaskqueue_schedule_{name}_timestamp_seconds", moment.timestamp(), *labels)
                found.add("dbtaskqueue_schedule_paused", schedule.paused, *labels)
    return found


def _add_queue(found: Exposition, row: QueueStats) -> None:
    for status, count in row.statuses.items():
        found.add("dbtaskqueue_tasks", count.number, row.queue, status)
    age = 0.0 if row.oldest is None else row.oldest.total_seconds()
    found.add("dbtaskqueue_oldest_due_age_seconds", age, row.queue)
    found.add("dbtaskqueue_expired_leases", row.stale, row.queue)
    found.add("dbtaskqueue_queue_paused", row.paused, row.queue)
    found.add("dbtaskqueue_queue_pollers", row.pollers, row.queue)
    for kind, measured in (("run", row.run), ("wait", row.wait)):
        for label, seconds in (("50", measured.p50), ("95", measured.p95)):
            if seconds is not None:
                found.add(f"dbtaskqueue_recent_{kind}_seconds", seconds, row.queue, label)
    for use in row.limits:
        place = (row.queue, use.database)
        if use.max_running is not None:
            found.add("dbtaskqueue_limited_running_tasks", use.running, *place)
            found.add("dbtaskqueue_limit_max_running", use.max_running, *place)
        if use.rate is not None:
            found.add("dbtaskqueue_limit_rate_tokens", use.tokens, *place)
        for limit, value in (("max_running", use.max_running), ("rate", use.rate)):
            if value is not None:
                held_back = use.held_back.number if use.reached == limit else 0
                found.add("dbtaskqueue_held_back_tasks", held_back, *place, limit)


def _add_counts(found: Exposition, aliases: Iterable[str], now: datetime, actor: Actor) -> None:
    """Add what was counted since midnight, in UTC: no roll-up moves a count over midnight, so no counter falls."""
    midnight = datetime.fromtimestamp(now.timestamp() // DAY_S * DAY_S, UTC)
    sums: defaultdict[tuple[str, ...], float] = defaultdict(float)  # over the databases of a queue
    for alias in aliases:
        since = Session.on(alias).stored_time(midnight)
        counts = narrow(MinuteCount.objects.using(alias).filter(minute__gte=since), actor)
        enqueued = counts.filter(kind=CALL, name="put").values_list("queue")
        for queue, number in enqueued.annotate(Total("count")).order_by():
            sums["dbtaskqueue_enqueued_tasks_total", queue] += float(number)
        ended = counts.filter(kind=OUTCOME).values_list("queue", "name")
        for queue, outcome, number, run, wait in ended.annotate(*map(Total, METRIC_SUMS)).order_by():
            sums["dbtaskqueue_attempts_total", queue, outcome] += float(number)
            sums["dbtaskqueue_run_seconds_total", queue] += run
            sums["dbtaskqueue_wait_seconds_total", queue] += wait
    for (name, *labels), value in sums.items():
        found.add(name, value, *labels)
