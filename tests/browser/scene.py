"""A queue an operator would know: some queues run, one is late, one is paused, claims fail for two reasons."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db.models.functions import Now

from django_dbtaskqueue import Workflow
from django_dbtaskqueue.core.states import COMPLETED, CREATED, ERROR, POISON, PROCESSING
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.metrics import class_of
from django_dbtaskqueue.models import (
    Attempt,
    AuditEntry,
    BulkOperation,
    FailureCount,
    FailureGroup,
    Metric,
    PipelineReport,
    Poller,
    SavedSearch,
    Schedule,
    Step,
    Task,
    TaskHistory,
    UsageCount,
)
from django_dbtaskqueue.operations.permissions import Actor
from django_dbtaskqueue.operations.queue_control import pause
from django_dbtaskqueue.operations.schedule_control import add_schedule
from tests.factories import make_task
from tests.report_figures import report_figures

HOST = "worker-3.example.org"
HOLDER = f"{HOST}:4711:0a1b2c3d4e5f"
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
SLOW = """Traceback (most recent call last):
  File "/srv/desk/mail/sending.py", line 18, in send
    reply = session.post(url, json=body, timeout=5)
TimeoutError: the mail host did not answer within 5 s
"""
PLANE, MAIL = "9f2c" * 10, "1b7d" * 10


def play() -> None:
    """Fill the tables."""
    _tasks()
    _failures()
    _metrics()
    _pollers()
    _schedules()
    _acts()
    _reports()
    _batch()


def _claim(number: int) -> dict[str, Any]:
    passenger = {"name": "Zoë Ångström", "email": "zoe@example.org", "card_token": "tok_4242"}
    return {"flight": f"2013-01-02-UA-{1500 + number}-EWR-IAH", "passenger": passenger, "amount": 2**70}


def _tasks() -> None:
    for number in range(40):
        waited, ran = timedelta(minutes=number), timedelta(seconds=number % 7)
        make_task(
            COMPLETED,
            queue="claims" if number % 3 else "mail",
            reference=f"2013-01-01-UA-{1500 + number}-EWR-IAH",
            payload=_claim(number),
            result={"decision": "paid", "compensation": 600},
            process_result='{"decision": "paid", "compensation": 600}',
            create_time=-waited - timedelta(minutes=2),
            start_time=-waited - ran,
            finish_time=-waited,
            poller_instance=HOLDER,
        )
    for number in range(12):
        _failed(number, "claims", f"2013-01-02-AA-{number}-JFK-MIA" if number else LONG, REGISTER, PLANE)
    for number in range(3):
        _failed(number, "mail", f"receipt-{number}", SLOW, MAIL)
    for queue, reference, hours, said in (
        ("mail", "bounced-for-good", 72, "MailboxGone: zoe@example.org has not existed since May"),
        ("claims", "never-assigned", 5, "PlaneUnknown: N999 is not in the register"),
    ):
        end = -timedelta(hours=hours)
        make_task(
            POISON, queue=queue, reference=reference, payload=_claim(1), process_result=said, attempt=5,
            create_time=end - timedelta(hours=1), start_time=end, finish_time=end,
        )  # fmt: skip
    for number in range(5):
        late = -timedelta(minutes=4, seconds=12 + number)
        make_task(CREATED, queue="mail", reference=f"receipt-late-{number}", create_time=late, ready_time=late)
    make_task(CREATED, queue="mail", reference="tomorrow", ready_time=timedelta(hours=20))
    make_task(CREATED, queue="claims", reference="no-handler", parked_by="no handler for payload type Refund")
    for number in range(2):
        make_task(PROCESSING, queue="claims", reference=f"in-hand-{number}", poller_instance=HOLDER, payload=_claim(3))
    for number in range(6):
        make_task(CREATED, queue="night-batch", reference=f"statement-{number}")
    _steps(
        make_task(
            CREATED, queue="claims", reference="held-claim", total_attempt=2, next_process_time=timedelta(days=14)
        )
    )


def _steps(task: Task) -> None:
    """Let a task have taken steps, and wait for an approval."""
    facts = {"task_id": task.pk, "task_time": task.create_time}
    results: dict[str, object] = {"flight": "UA-1545", "compensation": 600, "card_token": "tok_4242"}
    Step.objects.create(**facts, position=1, name="arrival-reported", kind="signal", result=240)
    Step.objects.create(**facts, position=2, name="assess", result=results)
    until = task.create_time + timedelta(days=14)
    Step.objects.create(**facts, position=3, name="approved", kind="wait", until_time=until)


def _batch() -> None:
    """Enqueue a workflow whose graph is wider than the page."""
    flow = Workflow("night of 2013-01-02", on_complete="mail")
    for number in range(8):
        flow.add(f"read-{number}", "claims", f"read-{number}")
    flow.add("join", "orders", "join", after=[f"read-{number}" for number in range(8)]).enqueue()


def _failed(number: int, queue: str, reference: str, traceback: str, fingerprint: str) -> None:
    end = -timedelta(minutes=8 + number)
    task = make_task(
        ERROR,
        queue=queue,
        reference=reference,
        payload=_claim(number),
        context={"request_id": f"req-{number:04}", "user": "desk-7"},
        process_result=traceback,
        fingerprint=fingerprint,
        max_attempts=3,
        create_time=end - timedelta(minutes=30),
        start_time=end - timedelta(seconds=2),
        finish_time=end,
        poller_instance=HOLDER,
    )
    kind, _, message = traceback.strip().splitlines()[-1].partition(": ")
    for attempt in (1, 2, 3):
        Attempt.objects.create(
            task_id=task.pk,
            queue=queue,
            attempt=attempt,
            total_attempt=attempt,
            poller_instance=HOLDER,
            start_time=Now() + end - timedelta(minutes=9 - 3 * attempt, seconds=2),
            finish_time=Now() + end - timedelta(minutes=9 - 3 * attempt),
            error_type=kind,
            message=message,
            traceback=traceback,
            fingerprint=fingerprint,
        )


def _failures() -> None:
    places = {
        PLANE: ("claims", REGISTER, "flights.tasks:assess"),
        MAIL: ("mail", SLOW, "mail.sending:send"),
    }
    for fingerprint, (queue, traceback, frame) in places.items():
        kind, _, message = traceback.strip().splitlines()[-1].partition(": ")
        FailureGroup.objects.create(
            fingerprint=fingerprint,
            queue=queue,
            error_type=kind,
            frame=frame,
            message=message,
            first_seen=Now() - timedelta(days=2),
            last_seen=Now() - timedelta(minutes=8),
        )
        for ago, count in ((0, 12), (2, 7), (20, 31), (50, 4)):
            FailureCount.objects.create(fingerprint=fingerprint, minute=clock() - timedelta(hours=ago), count=count)


def clock() -> Any:
    session = Session.on("default")
    return session.time(session.run("SELECT CURRENT_TIMESTAMP", ())[0][0])


def _metrics() -> None:
    minute = clock().replace(second=0, microsecond=0)
    for ago in range(1, 61):  # the running minute is not over
        for queue, rate in (("claims", 240), ("mail", 80)):
            wave = rate + (37 * ago) % 90 - (60 if 20 < ago < 28 else 0)
            failed = 3 + ago % 5 + (40 if 20 < ago < 28 else 0)
            time = minute - timedelta(minutes=ago)
            UsageCount.objects.create(queue=queue, minute=time, call="put", count=wave + failed - 11)
            for outcome, count in (("completed", wave), ("failed", failed)):
                Metric.objects.create(
                    queue=queue,
                    minute=time,
                    outcome=outcome,
                    count=count,
                    run_seconds=count * 0.08,
                    wait_seconds=count * 0.6,
                    runs={str(class_of(0.05)): count * 9 // 10, str(class_of(0.4)): count // 10},
                    waits={str(class_of(0.3)): count * 9 // 10, str(class_of(4 + ago % 3)): count // 10},
                )


def _pollers() -> None:
    running = Task.objects.filter(status=PROCESSING).first()
    assert running is not None
    both = [{"queue": "claims", "weight": 3}, {"queue": "mail", "weight": 1}]
    held = [{"task_id": running.pk, "queue": "claims", "reference": running.reference, "seconds": 3.2}]
    for instance, state, extra in (
        (HOLDER, "RUNNING", {"held": 2, "finished": 13_420, "failed": 361, "running": held}),
        ("worker-4.example.org:99:5f4e3d2c1b0a", "RUNNING", {"heartbeat_time": Now() - timedelta(minutes=7)}),
        ("worker-5.example.org:77:aa11bb22cc33", "STOPPED", {"heartbeat_time": Now() - timedelta(hours=3)}),
    ):
        host, pid, _ = instance.split(":")
        facts = {"host": host, "pid": int(pid), "version": "0.1.0", "queues": both, "slots": 8, **extra}
        Poller.objects.create(instance=instance, state=state, start_time=Now() - timedelta(days=1), **facts)


def _reports() -> None:
    PipelineReport.objects.create(
        kind="report",
        since=Now() - timedelta(days=7),
        until=Now(),
        summary="claims: 99.2 % within 5 minutes, target 99 %",
        data=report_figures("<b>claims</b>"),
        location="/lake/reports/report-2026-11-21",
    )


def _schedules() -> None:
    said = {"queue": "claims", "cron": "0 7 * * mon-fri", "timezone": "Europe/Madrid"}
    times = {"next_time": Now() + timedelta(hours=7), "last_time": Now() - timedelta(hours=17)}
    add_schedule("statements", {**said, "queue": "mail", "payload": _claim(1)}, Actor())
    Schedule.objects.create(
        name="flights.tasks.digest", source="code", code={**said, "cron": "0 6 * * *"}, edited=["cron"], **said, **times
    )


def _acts() -> None:
    pause(["night-batch"], by="ada", reason="database maintenance", until=clock() + timedelta(hours=6))
    done = BulkOperation.objects.create(
        verb="reprocess",
        query="queue:mail error:Timeout",
        state="FINISHED",
        actor="ada",
        reason="the mail host is back",
        estimate=1240,
        changed=1236,
        skipped=4,
        skips={"not in ERROR": 4},
        create_time=Now() - timedelta(minutes=50),
        start_time=Now() - timedelta(minutes=50),
        finish_time=Now() - timedelta(minutes=49),
    )
    BulkOperation.objects.create(
        verb="housekeep", query="status:COMPLETED finished:>14d", state="RUNNING", actor="bo", estimate=10_000,
        estimate_more=True, changed=4_200, first_id=0, last_id=100_000, cursor=62_000, start_time=Now(),
    )  # fmt: skip
    AuditEntry.objects.create(
        actor="ada", verb="reprocess", query="queue:mail error:Timeout", reason="the mail host is back", changed=1236,
        skipped=4, source="admin", operation=done, time=Now() - timedelta(minutes=50),
    )  # fmt: skip
    AuditEntry.objects.create(
        actor="ada", verb="pause", queue="night-batch", reason="database maintenance", changed=1, source="admin"
    )
    SavedSearch.objects.create(owner="ada", name="Stuck claims", query="queue:claims is:stale", shared=True)
    TaskHistory.objects.create(
        task_id=3, queue="claims", reference="2012-12-24-UA-1", status="COMPLETED", attempt=1, process_result="ok",
        create_time=Now() - timedelta(days=21), finish_time=Now() - timedelta(days=20),
    )  # fmt: skip
