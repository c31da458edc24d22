"""A queue an operator would know: some queues run, one is late, one is paused, claims fail."""

import json
from datetime import timedelta
from typing import Any

from django.db.models.functions import Now

from django_dbtaskqueue import Workflow, models
from django_dbtaskqueue.core.states import COMPLETED, CREATED, ERROR, POISON, PROCESSING
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.metrics import class_of
from django_dbtaskqueue.operations.permissions import Actor
from django_dbtaskqueue.operations.queue_control import pause
from django_dbtaskqueue.operations.schedule_control import add_schedule
from tests.factories import make_task
from tests.report_figures import report_figures

HOLDER = "worker-3.example.org:4711:0a1b2c3d4e5f"
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
LONG = "2013-01-02-AA-1141-JFK-MIA-rebooked-via-ATL-second-leg-with-a-reference-nobody-wanted-to-be-this-long"
REGISTER = """Traceback (most recent call last):
  File "/srv/desk/flights/tasks.py", line 41, in assess
    plane = planes[flight.tail_number]
            ~~~~~~^^^^^^^^^^^^^^^^^^^^
KeyError: 'N14228'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/srv/desk/flights/tasks.py", line 44, in assess
    raise PlaneUnknown(flight.tail_number) from error
flights.rules.PlaneUnknown: N14228 is not in the register
"""
PLANE = "9f2c" * 10


def play() -> None:
    """Fill the tables."""
    _tasks()
    _failures()
    _metrics()
    _pollers()
    _schedules()
    _acts()
    _batch()
    week = {"since": Now() - 7 * DAY, "until": Now(), "location": "/lake/reports/report-2026-11-21"}
    summary, figures = "claims: 99.2 % within 5 minutes, target 99 %", report_figures("<b>claims</b>")
    models.PipelineReport.objects.create(kind="report", summary=summary, data=figures, **week)


def _claim(number: int) -> dict[str, Any]:
    passenger = {"name": "Zoë Ångström", "email": "zoe@example.org", "card_token": "tok_4242"}
    return {"flight": f"2013-01-02-UA-{1500 + number}-EWR-IAH", "passenger": passenger, "amount": 2**70}


def _tasks() -> None:
    decision = {"decision": "paid", "compensation": 600}
    paid = {"result": decision, "process_result": json.dumps(decision)}
    for number in range(40):
        waited, ran = number * MINUTE, timedelta(seconds=number % 7)
        times = {"create_time": -waited - 2 * MINUTE, "start_time": -waited - ran, "finish_time": -waited}
        flight, queue = f"2013-01-01-UA-{1500 + number}-EWR-IAH", "claims" if number % 3 else "mail"
        facts = {"payload": _claim(number), "poller_instance": HOLDER, **paid, **times}
        make_task(COMPLETED, queue=queue, reference=flight, **facts)
    for number in range(12):
        _failed(number, f"2013-01-02-AA-{number}-JFK-MIA" if number else LONG)
    end, gone = -72 * HOUR, "MailboxGone: zoe@example.org has not existed since May"
    facts = {"create_time": end - HOUR, "start_time": end, "finish_time": end, "process_result": gone}
    make_task(POISON, queue="mail", reference="bounced-for-good", payload=_claim(1), attempt=5, **facts)
    for number in range(5):
        late = -timedelta(minutes=4, seconds=12 + number)
        make_task(CREATED, queue="mail", reference=f"receipt-late-{number}", create_time=late, ready_time=late)
    make_task(CREATED, queue="mail", reference="tomorrow", ready_time=20 * HOUR)
    make_task(CREATED, queue="claims", reference="no-handler", parked_by="no handler for payload type Refund")
    for number in range(2):
        make_task(PROCESSING, queue="claims", reference=f"in-hand-{number}", poller_instance=HOLDER, payload=_claim(3))
    for number in range(6):
        make_task(CREATED, queue="night-batch", reference=f"statement-{number}")
    facts = {"total_attempt": 2, "next_process_time": 14 * DAY}
    _steps(make_task(CREATED, queue="claims", reference="held-claim", **facts))


def _steps(task: models.Task) -> None:
    """Let a task have taken steps, and wait for an approval."""
    steps, facts = models.Step.objects, {"task_id": task.pk, "task_time": task.create_time}
    results: dict[str, object] = {"flight": "UA-1545", "compensation": 600, "card_token": "tok_4242"}
    steps.create(**facts, position=1, name="arrival-reported", kind="signal", result=240)
    steps.create(**facts, position=2, name="assess", result=results)
    steps.create(**facts, position=3, name="approved", kind="wait", until_time=task.create_time + 14 * DAY)


def _batch() -> None:
    """Enqueue a workflow whose graph is wider than the page."""
    flow = Workflow("night of 2013-01-02", on_complete="mail")
    for number in range(8):
        flow.add(f"read-{number}", "claims", f"read-{number}")
    flow.add("join", "orders", "join", after=[f"read-{number}" for number in range(8)]).enqueue()


ERROR_TYPE, _, MESSAGE = REGISTER.strip().splitlines()[-1].partition(": ")
SAID = {"queue": "claims", "fingerprint": PLANE, "error_type": ERROR_TYPE, "message": MESSAGE}


def _failed(number: int, reference: str) -> None:
    end, seconds = -(8 + number) * MINUTE, timedelta(seconds=2)
    times = {"create_time": end - 30 * MINUTE, "start_time": end - seconds, "finish_time": end}
    facts = {"payload": _claim(number), "context": {"user": "desk-7"}, "process_result": REGISTER, "max_attempts": 3}
    place = {"queue": "claims", "fingerprint": PLANE, "poller_instance": HOLDER}
    task = make_task(ERROR, reference=reference, **facts, **place, **times)
    for attempt in (1, 2, 3):
        finish = Now() + end - (9 - 3 * attempt) * MINUTE
        numbers = {"task_id": task.pk, "attempt": attempt, "total_attempt": attempt}
        times = {"start_time": finish - seconds, "finish_time": finish}
        models.Attempt.objects.create(traceback=REGISTER, poller_instance=HOLDER, **numbers, **times, **SAID)


def _failures() -> None:
    seen = {"first_seen": Now() - 2 * DAY, "last_seen": Now() - 8 * MINUTE}
    models.FailureGroup.objects.create(frame="flights.tasks:assess", **SAID, **seen)
    for ago, count in ((0, 12), (2, 7), (20, 31), (50, 4)):
        models.FailureCount.objects.create(fingerprint=PLANE, minute=clock() - ago * HOUR, count=count)


def clock() -> Any:
    session = Session.on("default")
    return session.time(session.run("SELECT CURRENT_TIMESTAMP", ())[0][0])


def _spread(count: int, usual: float, slow: float) -> dict[str, int]:
    """Nine of ten take the usual time."""
    return {str(class_of(usual)): count * 9 // 10, str(class_of(slow)): count // 10}


def _metrics() -> None:
    minute = clock().replace(second=0, microsecond=0)
    for ago in range(1, 61):  # the running minute is not over
        for queue, rate in (("claims", 240), ("mail", 80)):
            wave = rate + (37 * ago) % 90 - (60 if 20 < ago < 28 else 0)
            failed = 3 + ago % 5 + (40 if 20 < ago < 28 else 0)
            place = {"queue": queue, "minute": minute - ago * MINUTE}
            models.UsageCount.objects.create(**place, call="put", count=wave + failed - 11)
            for outcome, count in (("completed", wave), ("failed", failed)):
                times = {"runs": _spread(count, 0.05, 0.4), "waits": _spread(count, 0.3, 4 + ago % 3)}
                sums = {"count": count, "run_seconds": count * 0.08, "wait_seconds": count * 0.6}
                models.Metric.objects.create(outcome=outcome, **place, **sums, **times)


def _pollers() -> None:
    running = models.Task.objects.filter(status=PROCESSING).first()
    assert running is not None
    both = [{"queue": "claims", "weight": 3}, {"queue": "mail", "weight": 1}]
    held = [{"task_id": running.pk, "queue": "claims", "reference": running.reference, "seconds": 3.2}]
    for instance, state, extra in (
        (HOLDER, "RUNNING", {"held": 2, "finished": 13_420, "failed": 361, "running": held}),
        ("worker-4.example.org:99:5f4e3d2c1b0a", "RUNNING", {"heartbeat_time": Now() - 7 * MINUTE}),
        ("worker-5.example.org:77:aa11bb22cc33", "STOPPED", {"heartbeat_time": Now() - 3 * HOUR}),
    ):
        host, pid, _ = instance.split(":")
        facts = {"host": host, "pid": int(pid), "version": "0.1.0", "queues": both, "slots": 8, **extra}
        models.Poller.objects.create(instance=instance, state=state, start_time=Now() - DAY, **facts)


def _schedules() -> None:
    said = {"queue": "claims", "cron": "0 7 * * mon-fri", "timezone": "Europe/Madrid"}
    add_schedule("statements", {**said, "queue": "mail", "payload": _claim(1)}, Actor())
    edited = {"source": "code", "code": {**said, "cron": "0 6 * * *"}, "edited": ["cron"]}
    times = {"next_time": Now() + 7 * HOUR, "last_time": Now() - 17 * HOUR}
    models.Schedule.objects.create(name="flights.tasks.digest", **edited, **said, **times)


def _acts() -> None:
    pause(["night-batch"], by="ada", reason="database maintenance", until=clock() + 6 * HOUR)
    act = {"verb": "reprocess", "query": "queue:mail error:Timeout", "actor": "ada", "reason": "the mail host is back"}
    counts, begin = {"changed": 1236, "skipped": 4}, Now() - 50 * MINUTE
    times = {"create_time": begin, "start_time": begin, "finish_time": begin + MINUTE}
    operations, acts = models.BulkOperation.objects, models.AuditEntry.objects
    done = operations.create(state="FINISHED", estimate=1240, skips={"not in ERROR": 4}, **act, **counts, **times)
    acts.create(source="admin", operation=done, time=begin, **act, **counts)
    under_way = {"verb": "housekeep", "query": "status:COMPLETED finished:>14d", "state": "RUNNING", "actor": "bo"}
    counts = {"estimate": 10_000, "changed": 4_200, "first_id": 0, "last_id": 100_000, "cursor": 62_000}
    operations.create(estimate_more=True, start_time=Now(), **under_way, **counts)
    why = "database maintenance"
    acts.create(actor="ada", verb="pause", queue="night-batch", reason=why, changed=1, source="admin")
    models.SavedSearch.objects.create(owner="ada", name="Stuck claims", query="queue:claims is:stale", shared=True)
    past = {"task_id": 3, "queue": "claims", "reference": "2012-12-24-UA-1", "status": "COMPLETED", "attempt": 1}
    times = {"create_time": Now() - 21 * DAY, "finish_time": Now() - 20 * DAY}
    models.TaskHistory.objects.create(process_result="ok", **past, **times)
