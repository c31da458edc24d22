"""A queue an operator would know: some queues run, one is late, one is paused, claims fail. Each page has rows."""

from datetime import timedelta
from typing import Any

from django.db.models.functions import Now

from django_dbtaskqueue import Workflow, models
from django_dbtaskqueue.core.states import COMPLETED, CREATED, ERROR, POISON, PROCESSING
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.metrics import class_of
from django_dbtaskqueue.operations.permissions import Actor
from django_dbtaskqueue.operations.queue_control import pause
from django_dbtaskqueue.operations.schedules import add_schedule
from tests.factories import make_task
from tests.report_figures import report_figures

HOLDER = "worker-3.example.org:4711:0a1b2c3d4e5f"
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
LONG = "2013-01-02-AA-1141-JFK-MIA-rebooked-via-ATL-second-leg-with-a-reference-nobody-wanted-to-be-this-long"
REGISTER = """Traceback (most recent call last):
  File "/srv/desk/flights/tasks.py", line 41, in assess
    plane = planes[flight.tail_number]
            ~~~~~~^^^^^^^^^^^^^^^^^^^^
flights.rules.PlaneUnknown: N14228 is not in the register
"""
PLANE = "9f2c" * 10
SAID = {"queue": "claims", "fingerprint": PLANE, "error_type": "flights.rules.PlaneUnknown", "message": "N14228 is new"}
PASSENGER = {"name": "Zoë Ångström", "email": "zoe@example.org", "card_token": "tok_4242"}
CLAIM = {"flight": "2013-01-02-UA-1545-EWR-IAH", "passenger": PASSENGER, "amount": 2**70}


def play() -> None:
    for fill in (_tasks, _failures, _metrics, _pollers, _schedules, _acts):
        fill()
    flow = Workflow("night of 2013-01-02", on_complete="mail")  # its graph is wider than the page
    reads = [f"read-{number}" for number in range(8)]
    for name in reads:
        flow.add(name, "claims", name)
    flow.add("join", "orders", "join", after=reads).enqueue()
    week = {"since": Now() - 7 * DAY, "until": Now(), "location": "/lake/reports/report-2026-11-21"}
    summary, figures = "claims: 99.2 % within 5 minutes, target 99 %", report_figures("<b>claims</b>")
    models.PipelineReport.objects.create(kind="report", summary=summary, data=figures, **week)


def _tasks() -> None:
    for number in range(40):
        times = {"create_time": -(number + 2) * MINUTE, "start_time": -number * MINUTE, "finish_time": -number * MINUTE}
        queue, decision = "claims" if number % 3 else "mail", {"decision": "paid", "compensation": 600}
        make_task(COMPLETED, queue=queue, reference=f"paid-{number}", payload=CLAIM, result=decision, **times)
    gone = "MailboxGone: zoe@example.org has not existed since May"
    make_task(POISON, queue="mail", reference="bounced", payload=CLAIM, attempt=5, process_result=gone)
    for number in range(5):
        late = -timedelta(minutes=4, seconds=number)
        make_task(CREATED, queue="mail", reference=f"receipt-late-{number}", create_time=late, ready_time=late)
    make_task(CREATED, queue="mail", reference="tomorrow", ready_time=20 * HOUR)
    make_task(CREATED, queue="claims", reference="no-handler", parked_by="no handler for payload type Refund")
    make_task(PROCESSING, queue="claims", reference="in-hand", poller_instance=HOLDER, payload=CLAIM)
    make_task(CREATED, queue="night-batch", reference="statement")
    held = make_task(CREATED, queue="claims", reference="held-claim", total_attempt=2, next_process_time=14 * DAY)
    steps, of = models.Step.objects, {"task_id": held.pk, "task_time": held.create_time}
    steps.create(**of, position=1, name="arrival-reported", kind="signal", result=240)
    steps.create(**of, position=2, name="assess", result={"compensation": 600, "card_token": "tok_4242"})
    steps.create(**of, position=3, name="approved", kind="wait", until_time=held.create_time + 14 * DAY)


def _failures() -> None:
    for number in range(12):
        facts = {"payload": CLAIM, "context": {"user": "desk-7"}, "process_result": REGISTER, "max_attempts": 3}
        place = {"queue": "claims", "fingerprint": PLANE, "poller_instance": HOLDER, "finish_time": -number * MINUTE}
        task = make_task(ERROR, reference=f"2013-01-02-AA-{number}" if number else LONG, **facts, **place)
        for attempt in (1, 2, 3):
            numbers = {"task_id": task.pk, "attempt": attempt, "total_attempt": attempt}
            times = dict.fromkeys(("start_time", "finish_time"), Now() - (number + 9 - 3 * attempt) * MINUTE)
            models.Attempt.objects.create(traceback=REGISTER, poller_instance=HOLDER, **numbers, **times, **SAID)
    seen = {"first_seen": Now() - 2 * DAY, "last_seen": Now() - 8 * MINUTE}
    models.FailureGroup.objects.create(frame="flights.tasks:assess", **SAID, **seen)
    for ago, count in ((0, 12), (2, 7), (20, 31), (50, 4)):
        models.MinuteCount.objects.create(kind="failure", name=PLANE, minute=clock() - ago * HOUR, count=count)


def clock() -> Any:
    session = Session.on("default")
    return session.time(session.run("SELECT CURRENT_TIMESTAMP", ())[0][0])


def _metrics() -> None:
    minute = clock().replace(second=0, microsecond=0)
    for ago in range(1, 61):  # the running minute is not over
        for queue in ("claims", "mail"):
            place = {"queue": queue, "minute": minute - ago * MINUTE}
            models.MinuteCount.objects.create(kind="call", **place, name="put", count=200 + ago)
            for outcome, count in (("completed", 240 - ago), ("failed", ago)):
                sums = {"count": count, "run_seconds": count * 0.08, "wait_seconds": count * 0.6}
                times = {"runs": {str(class_of(0.05)): count}, "waits": {str(class_of(4)): count}}
                models.MinuteCount.objects.create(kind="outcome", name=outcome, **place, **sums, **times)


def _pollers() -> None:
    running = models.Task.objects.get(status=PROCESSING)
    held = [{"task_id": running.pk, "queue": "claims", "reference": running.reference, "seconds": 3.2}]
    facts = {"host": "worker", "pid": 4711, "version": "0.1.0", "slots": 8, "start_time": Now() - DAY}
    facts |= {"queues": [{"queue": "claims", "weight": 3}, {"queue": "mail", "weight": 1}]}
    for instance, state, extra in (
        (HOLDER, "RUNNING", {"held": 2, "finished": 13_420, "failed": 361, "running": held}),
        ("worker-4.example.org:99:5f4e3d2c1b0a", "RUNNING", {"heartbeat_time": Now() - 7 * MINUTE}),
        ("worker-5.example.org:77:aa11bb22cc33", "STOPPED", {"heartbeat_time": Now() - 3 * HOUR}),
    ):
        models.Poller.objects.create(instance=instance, state=state, **facts, **extra)


def _schedules() -> None:
    said = {"queue": "claims", "cron": "0 7 * * mon-fri", "timezone": "Europe/Madrid"}
    add_schedule("statements", {**said, "queue": "mail", "payload": CLAIM}, Actor())
    edited = {"source": "code", "code": {**said, "cron": "0 6 * * *"}, "edited": ["cron"]}
    times = {"next_time": Now() + 7 * HOUR, "last_time": Now() - 17 * HOUR}
    models.Schedule.objects.create(name="flights.tasks.digest", **edited, **said, **times)


def _acts() -> None:
    pause("night-batch", "default", by="ada", reason="database maintenance", until=clock() + 6 * HOUR)
    act = {"verb": "reprocess", "query": "queue:mail error:Timeout", "actor": "ada", "reason": "the mail host is back"}
    counts, times = {"changed": 1236, "skipped": 4}, dict.fromkeys(("start_time", "finish_time"), Now() - HOUR)
    operations, acts = models.BulkOperation.objects, models.AuditEntry.objects
    done = operations.create(state="FINISHED", estimate=1240, skips={"not in ERROR": 4}, **act, **counts, **times)
    acts.create(source="admin", operation=done, **act, **counts)
    acts.create(source="admin", actor="ada", verb="pause", queue="night-batch", reason="maintenance", changed=1)
    under_way = {"verb": "housekeep", "query": "status:COMPLETED finished:>14d", "state": "RUNNING", "actor": "bo"}
    counts = {"estimate": 10_000, "changed": 4_200, "first_id": 0, "last_id": 100_000, "cursor": 62_000}
    operations.create(estimate_more=True, start_time=Now(), **under_way, **counts)
    models.SavedSearch.objects.create(owner="ada", name="Stuck claims", query="queue:claims is:stale", shared=True)
    past = {"task_id": 3, "queue": "claims", "reference": "2012-12-24-UA-1", "status": "COMPLETED", "attempt": 1}
    times = {"create_time": Now() - 21 * DAY, "finish_time": Now() - 20 * DAY}
    models.TaskHistory.objects.create(process_result="ok", **past, **times)
