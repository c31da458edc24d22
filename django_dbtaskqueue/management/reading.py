"""``taskqueue status``, ``list``, ``show``, ``tail`` and ``doctor``: they change nothing, and each query is bounded."""

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from django.core.management.base import CommandError
from django.db.models import QuerySet
from django.db.models.functions import Now

from django_dbtaskqueue.core.columns import LISTED, LONG
from django_dbtaskqueue.core.durations import clock, format_age, format_seconds, task_place
from django_dbtaskqueue.core.exceptions import UnknownQueue
from django_dbtaskqueue.core.json import whole_number
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.db.session import model_named
from django_dbtaskqueue.management import FAILED_CODE, Options, Output, from_now, printable
from django_dbtaskqueue.models import Attempt, TaskHistory
from django_dbtaskqueue.models.querysets import TaskQuerySet
from django_dbtaskqueue.operations import serializers
from django_dbtaskqueue.operations.bounded_reads import limits_text, statement_timeout
from django_dbtaskqueue.operations.doctor import examine
from django_dbtaskqueue.operations.explain import explain
from django_dbtaskqueue.operations.lookup import aliases_in, elsewhere, locations_on, places_of, tasks_on
from django_dbtaskqueue.operations.queue_stats import overview, with_limits
from django_dbtaskqueue.operations.search import Search, parse, to_text
from django_dbtaskqueue.operations.search.query import Page, look_through, select, tasks_for

MAX_TAIL_ROWS = 200  # of one query
TABLE_MESSAGE_WIDTH = 72  # characters of a message in a line of a table or of ``tail``
MAX_SHOWN_ATTEMPTS = 20
MAX_NAMESAKES = 20  # of one database: moved tasks with one id


def matching(output: Output, options: Options) -> tuple[Search, TaskQuerySet]:
    """Return a search and the tasks that match it; say which databases are left out."""
    search = parse(" ".join(options["filter"]))
    tasks = select(search, tasks_for(search, options["database"]))
    if left_out := elsewhere(search.queues(), tasks):
        output.err.write(left_out)
    return search, tasks


def status(output: Output, options: Options) -> int:
    """Show the health in a sentence, then each queue: pause, oldest wait, rates, tasks by status."""
    view = overview(options["database"])
    requested = set(options["queue"])
    rows = with_limits([row for row in view.queues if not requested or row.queue in requested])
    if unknown := requested - {row.queue for row in rows}:
        raise UnknownQueue(sorted(unknown)[0], [row.queue for row in view.queues])
    found = replace(view, queues=rows)
    if not rows:
        return output.answer(found, "No queue is known: neither in DBTASKQUEUE nor by a processor.")
    alive = f"{view.pollers} {'poller' if view.pollers == 1 else 'pollers'} alive"
    output.write("\n".join([f"{view.health.sentence.rstrip('.')}; {alive}", *map(printable, view.health.notes)]))
    durations = ("run p50", "run p95", "wait p50", "wait p95", "time to drain")
    rates = ("in/min", "out/min", "failed, 1 h")
    head = ("queue", "state", "oldest waiting", *rates, *durations, *map(str, Status), "TOTAL")
    table = []
    for row in rows:
        state = "paused" if row.paused else "running" if row.pollers else "no poller"
        flow = f"{60 * row.rate_in:,.1f}", f"{60 * row.rate_out:,.1f}", row.failed
        measured = (row.run.p50, row.run.p95, row.wait.p50, row.wait.p95)
        times = [None if one is None else format_seconds(one) for one in measured]
        counts = [str(one).replace("\u202f", " ") for one in (*row.statuses.values(), row.total)]
        table.append((row.queue, state, format_age(row.oldest), *flow, *times, format_age(row.drain), *counts))
    output.table(found, head, table, right=head[2:])
    for row in rows:
        if row.limits:
            output.write(f"{row.queue}: {limits_text(row.limits)}")
    return 0


def list_tasks(output: Output, options: Options) -> int:
    """List the newest tasks that match. A long search goes on until it is stopped."""
    search, tasks = matching(output, options)
    limit, read, before = options["limit"], 0, options["before"]
    listed: TaskQuerySet[Any] = tasks.defer(*LONG).annotate(clock=Now())
    shown: list[Any] = []
    page = Page(shown)
    try:
        for page in look_through(search, listed, limit, before=before):
            shown, before, read = shown + page.rows, page.older, read + page.window
            if page.window and len(shown) < limit:
                output.err.write(f"Read {read:,} tasks, {page.progress:.0%}, back to {page.back_to:%Y-%m-%d %H:%M}.")
    except KeyboardInterrupt:
        output.err.write(f"Stopped. To go on: --before {before}")
    documents, rows = [serializers.summary(task) for task in shown], [_row(task) for task in shown]
    head = ("id", "status", "queue", "reference", "attempt", "enqueued", "result or error")
    none = "" if page.window else f"No task matches {to_text(search) or 'anything'}."
    output.table(documents, head, rows, none=none, right=("id", "attempt", "enqueued"))
    if shown and page.older is not None:
        output.write(f"More follow: --before {shown[-1].pk}")
    return 0


def show(output: Output, options: Options) -> int:
    """Show one task, in a table or in the history: facts, failed attempts, payload with secrets masked."""
    task, document = find_task(options["task"], options["database"], options["queue"])
    location = getattr(task, "location", task._meta.label_lower)
    attempts = Attempt.objects.using(task._state.db).filter(location=location, task_id=document["id"])
    newest = attempts.order_by("-total_attempt")[:MAX_SHOWN_ATTEMPTS]
    document["explanation"] = explain(task)
    document["attempts"] = [serializers.attempt_of(row) for row in newest]
    names = [*LISTED, *(["moved_time"] if "moved_time" in document else [])]
    plain = {name: _shown(document[name], task.clock) for name in names}
    message = serializers.message_of(task.process_result)
    output.facts(document, {"now": document["explanation"].sentence, **plain, "message": message})
    for name in LONG:
        if document[name] is not None:
            text = json.dumps(document[name], indent=2, ensure_ascii=False, default=str)
            output.write(f"\n{name}:\n{_indented(text)}")
    for row in document["attempts"]:
        output.write(f"\nattempt {row['attempt']} failed: {printable(row['error'])}")
        output.write(_indented(row["traceback"]))
    return 0


def tail(output: Output, options: Options) -> int:
    """Show tasks as they are enqueued and attempts as they fail, until stopped."""
    search, tasks = matching(output, options)
    queues = search.queues()
    failed = Attempt.objects.using(tasks.db).filter(**({"queue__in": queues} if queues else {}))
    fresh, failing = new_rows(tasks.defer(*LONG)), new_rows(failed)
    remaining, pause = options["count"], threading.Event()
    while remaining is None or remaining > 0:
        with statement_timeout(tasks.db):
            for task in next(fresh):
                output.data({"event": "task", **serializers.summary(task)})
                output.write(f"{task.create_time:%H:%M:%S}  {task.pk}  {printable(str(task))}  {task.status}")
            for row in next(failing):
                output.data({"event": "failed", **serializers.attempt_of(row)})
                message = serializers.message_of(serializers.error_of(row), TABLE_MESSAGE_WIDTH)
                text = f"{row.task_id}  {row.queue}  attempt {row.attempt} failed: {message}"
                output.write(f"{row.finish_time:%H:%M:%S}  {printable(text)}")
        remaining = None if remaining is None else remaining - 1
        clock.wait(pause, options["interval"].total_seconds() if remaining != 0 else 0)
    return 0


def doctor(output: Output, options: Options) -> int:
    """Say what is wrong with queues, pollers, settings and the database, and what helps."""
    findings = examine(options["database"])
    output.data(findings)
    for finding in findings:
        paint = {"error": output.style.ERROR, "warning": output.style.WARNING}.get(finding.level, str)
        output.write(f"{paint(finding.level.upper())}  {printable(finding.words)}  [{finding.id}]")
        output.write(f"    {printable(finding.remedy)}")
    if not findings:
        output.write("Nothing is wrong.")
    return FAILED_CODE if any(finding.level == "error" for finding in findings) else 0


def new_rows(rows: QuerySet[Any]) -> Iterator[list[Any]]:
    """Yield up to 200 of the rows inserted since, the oldest first. It reads new rows only, also if few match."""
    ids = rows.model._default_manager.using(rows.db).order_by("-pk").values_list("pk", flat=True)
    last = ids.first() or 0
    while True:
        newest = ids.first() or 0
        found = list(rows.filter(pk__gt=last, pk__lte=newest).order_by("pk")[:MAX_TAIL_ROWS])
        last = found[-1].pk if len(found) == MAX_TAIL_ROWS else newest
        yield found


def _row(task: Any) -> tuple[Any, ...]:
    attempts, when = f"{task.attempt}/{task.max_attempts}", from_now(task.create_time, task.clock)
    message = serializers.message_of(task.process_result, TABLE_MESSAGE_WIDTH)
    return (task.pk, task.status, task.queue, task.reference, attempts, when, message)


def _shown(value: Any, now: datetime) -> Any:
    return f"{value:%Y-%m-%d %H:%M:%S} ({from_now(value, now)})" if isinstance(value, datetime) else value


def _indented(text: str) -> str:
    return "\n".join(f"    {printable(line)}" for line in text.splitlines())


def find_task(name: str, using: str | None, queue: str | None) -> tuple[Any, serializers.Document]:
    """Return a task and its document, by an id or ``queue/reference``; the history is searched last."""
    named, slash, reference = name.partition("/")
    queue = named if slash else queue
    alias, location, number = task_place(name) or ("", "", whole_number(name) or -1)
    key, value = ("reference", reference) if slash else ("pk", number)
    by: dict[str, Any] = {"queue": queue} if queue else {}
    places = [(alias, model_named(location))] if alias else places_of(queue, using) if queue else locations_on(using)
    found = _found([tasks_on(*place).filter(**by, **{key: value}) for place in places])
    if not found:
        by["task_id" if key == "pk" else key] = value
        found = _found([TaskHistory.objects.using(one).filter(**by).order_by("-pk") for one in aliases_in(places)])
    if not found:
        raise CommandError(f"There is no task {name!r:.99}, not in the history either. Give an id, or queue/reference.")
    if len(found) > 1:
        tables = ", ".join(f"{task._meta.db_table} on {task._state.db} ({task.queue})" for task in found)
        raise CommandError(f"There is more than one task {name}: {tables}. Say which with --queue or --database.")
    return found[0], serializers.detail(found[0], payload=True)


def _found(selections: Sequence[QuerySet[Any]]) -> list[Any]:
    """Return the first task of each queue in each table."""
    found: dict[object, Any] = {}
    for rows in selections:
        with statement_timeout(rows.db):
            for task in rows.annotate(clock=Now())[:MAX_NAMESAKES]:
                found.setdefault((rows.db, rows.model, task.queue), task)
    return list(found.values())
