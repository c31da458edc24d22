"""``taskqueue status``, ``list``, ``show`` and ``tail``: their cost is bounded, however large the table."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from django.db.models import QuerySet
from django.db.models.functions import Now

from django_dbtaskqueue.core.columns import LISTED, LONG
from django_dbtaskqueue.core.durations import format_duration
from django_dbtaskqueue.core.exceptions import UnknownQueue
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.management.console.find import one
from django_dbtaskqueue.management.console.output import Screen, ago, facts, printable
from django_dbtaskqueue.models import Attempt
from django_dbtaskqueue.models.querysets import TaskQuerySet
from django_dbtaskqueue.operations.bounded_reads import statement_timeout
from django_dbtaskqueue.operations.search.parse import parse, to_text
from django_dbtaskqueue.operations.search.query import TaskFilter, tasks_for
from django_dbtaskqueue.operations.serializers import (
    attempt_of,
    error_of,
    message_of,
    overview_document,
    summary,
)
from django_dbtaskqueue.operations.stats.queue_stats import Overview, health, overview

AT_ONCE = 200  # rows of one look of ``tail``
WIDTH = 72  # characters of a message in a line of a table or of ``tail``


def found(words: Sequence[str], using: str | None) -> tuple[TaskFilter, TaskQuerySet]:
    """Return the filter of a search and all that fits it, through the one definition that pages and API use."""
    text = " ".join(words)
    tasks = tasks_for(parse(text), using)
    chosen = TaskFilter({"q": text}, queryset=tasks).checked()
    return chosen, chosen.qs


def status(screen: Screen, options: dict[str, Any]) -> int:
    """Health in a sentence, then each queue: its tasks by status, its oldest wait, rates, and when it is drained."""
    view = overview(options["database"])
    wanted = set(options["queue"])
    rows = [row for row in view.queues if not wanted or row.queue in wanted]
    if unknown := wanted - {row.queue for row in rows}:
        raise UnknownQueue(sorted(unknown)[0], [row.queue for row in view.queues])
    screen.data(overview_document(view, rows))
    if not rows:
        screen.say("No queue is known: neither in DBTASKQUEUE nor by a processor.")
        return 0
    screen.say(_summary(view))
    head = ("queue", "state", "oldest", "in/s", "out/s", "drained in", *map(str, Status), "TOTAL")
    table = [
        (
            row.queue,
            "paused" if row.paused else "running" if row.pollers else "no poller",
            _age(row.oldest),
            f"{row.rate_in:.1f}",
            f"{row.rate_out:.1f}",
            _age(row.drain),
            *row.statuses.values(),
            row.total,
        )
        for row in rows
    ]
    screen.table(head, table, right=head[2:])
    return 0


def _summary(view: Overview) -> str:
    """Return "2 queues late, oldest 4m12s; 3 pollers alive, 5 attempts failed in the last hour", then the notes."""
    found = health(view)
    alive = f"{view.pollers} {'poller' if view.pollers == 1 else 'pollers'} alive"
    first = f"{found.sentence.rstrip('.')}; {alive}, {view.failed:,} attempts failed in the last hour"
    return "\n".join([first, *map(printable, found.notes)])


def _age(value: timedelta | None) -> str | None:
    return None if value is None else format_duration(value, rough=True)


def list_tasks(screen: Screen, options: dict[str, Any]) -> int:
    """The newest tasks that match, and how to see the next ones."""
    chosen, tasks = found(options["filter"], options["database"])
    if options["before"]:
        tasks = tasks.filter(pk__lt=options["before"])
    limit = options["limit"] or 20
    with statement_timeout(tasks.db):
        rows = list(tasks.defer(*LONG).annotate(clock=Now()).order_by("-pk")[: limit + 1])
    shown = rows[:limit]
    screen.data([summary(task) for task in shown])
    if not shown:
        screen.say(f"No task matches {to_text(chosen.search) or 'anything'}.")
        return 0
    head = ("id", "status", "queue", "reference", "attempt", "enqueued", "result or error")
    screen.table(head, [_row(task) for task in shown], right=("id", "attempt", "enqueued"))
    if len(rows) > limit:
        screen.say(f"More follow: --before {shown[-1].pk}")
    return 0


def show(screen: Screen, options: dict[str, Any]) -> int:
    """All there is to say of one task: its facts, its failed attempts, its payload with secrets masked."""
    task, document = one(options["task"], options["database"], options["queue"])
    location = getattr(task, "location", task._meta.label_lower)
    attempts = Attempt.objects.using(task._state.db).filter(location=location, task_id=document["id"])
    document["attempts"] = [attempt_of(row) for row in attempts.order_by("-total_attempt")[:20]]
    screen.data(document)
    names = [*LISTED, *(["moved_time"] if "moved_time" in document else [])]
    plain = {name: _shown(name, document[name], task.clock) for name in names}
    facts(screen, plain | {"message": message_of(task.process_result)})
    for name in LONG:
        if document[name] is not None:
            screen.say(f"\n{name}:\n{_indented(json.dumps(document[name], indent=2, ensure_ascii=False, default=str))}")
    for row in document["attempts"]:
        screen.say(f"\nattempt {row['attempt']} failed: {printable(row['error'])}")
        screen.say(_indented(row["traceback"]))
    return 0


def tail(screen: Screen, options: dict[str, Any]) -> int:
    """Tasks as they are enqueued and attempts as they fail, until stopped (or ``--count`` looks)."""
    chosen, tasks = found(options["filter"], options["database"])
    queues = chosen.search.queues()
    failed = Attempt.objects.using(tasks.db).filter(**({"queue__in": queues} if queues else {}))
    fresh, failing = Fresh(tasks.defer(*LONG)), Fresh(failed)
    looks, pause = options["count"], threading.Event()
    while looks is None or looks > 0:
        with statement_timeout(tasks.db):
            for task in fresh.read():
                screen.data({"event": "task", **summary(task)})
                screen.say(f"{task.create_time:%H:%M:%S}  {task.pk}  {printable(str(task))}  {task.status}")
            for row in failing.read():
                screen.data({"event": "failed", **attempt_of(row)})
                words = f"{row.task_id}  {row.queue}  attempt {row.attempt} failed: {message_of(error_of(row), WIDTH)}"
                screen.say(f"{row.finish_time:%H:%M:%S}  {printable(words)}")
        looks = None if looks is None else looks - 1
        pause.wait(options["interval"].total_seconds() if looks != 0 else 0)
    return 0


class Fresh:
    """Rows inserted since the last look; each look reads only what is new, whatever the rows must fit."""

    def __init__(self, rows: QuerySet[Any]) -> None:
        self._rows = rows
        self._everything = rows.model._default_manager.using(rows.db).order_by("-pk").values_list("pk", flat=True)
        self._seen = self._last()

    def read(self) -> list[Any]:
        """Return up to 200 of them, the oldest first."""
        last = self._last()
        found = list(self._rows.filter(pk__gt=self._seen, pk__lte=last).order_by("pk")[:AT_ONCE])
        self._seen = found[-1].pk if len(found) == AT_ONCE else last
        return found

    def _last(self) -> int:
        return int(self._everything.first() or 0)


def _row(task: Any) -> tuple[Any, ...]:
    attempts = f"{task.attempt}/{task.max_attempts}"
    when = ago(task.create_time, task.clock)
    return task.pk, task.status, task.queue, task.reference, attempts, when, message_of(task.process_result, WIDTH)


def _shown(name: str, value: Any, now: datetime) -> Any:
    return f"{value:%Y-%m-%d %H:%M:%S} ({ago(value, now)})" if isinstance(value, datetime) else value


def _indented(text: str) -> str:
    return "\n".join(f"    {printable(line)}" for line in text.splitlines())
