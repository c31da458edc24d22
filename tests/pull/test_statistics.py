"""Statistics: by status, and by call from rows that every process appends to."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from io import StringIO
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.db import connection, transaction
from django.test import Client

from django_dbtaskqueue import (
    Complete,
    CompleteDelete,
    Fail,
    Poison,
    Reenqueue,
    enqueue,
    enqueue_many,
    processor,
    queue,
)
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.db.minute_counts import roll_up
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow import usage
from django_dbtaskqueue.models import Task, UsageCount
from django_dbtaskqueue.operations import lookup
from django_dbtaskqueue.pull.handle import QueueHandle
from django_dbtaskqueue.signals import task_changed
from django_dbtaskqueue.testing import run_poller
from tests.conftest import ProcessDatabase
from tests.factories import age, make_task
from tests.pull.conftest import Told
from tests.pull.test_verbs import take
from tests.support import PATIENCE, Actor, at_once, until

HOUR = timedelta(hours=1)
EVERY_CALL = """
from datetime import timedelta
from django_dbtaskqueue import queue
work = queue("work")
for n in range(6):
    work.put(n)
work.ack(work.take())
work.touch(task := work.take(), timedelta(seconds=1))
work.release(task)
work.bury(work.take())
work.kick(1)
work.delete(work.take().id)
"""
ITS_CALLS = {"put": 6, "take": 4, "ack": 1, "touch": 1, "release": 1, "bury": 1, "kick": 1, "delete": 1}


def test_by_status_and_done_does_not_count_in_the_total(mail: QueueHandle) -> None:
    none = dict.fromkeys(("CREATED", "PROCESSING", "COMPLETED", "ERROR", "POISON"), 0)
    assert mail.statistics().by_status == {**none, "total": 0}
    made = {"CREATED": 2, "COMPLETED": 3, "ERROR": 1, "POISON": 4, "PROCESSING": 1}
    for status, number in made.items():
        for _ in range(number):
            make_task(status, queue="mail")
    make_task(queue="other")
    assert mail.statistics().by_status == {**made, "total": 8}


def test_each_call_is_counted_and_told(mail: QueueHandle, told: Told) -> None:
    assert mail.statistics().by_call == {}
    ids = [mail.put().pk, enqueue("mail", "r").pk]
    enqueue("mail", "r", on_duplicate="ignore")  # nothing was put
    enqueue_many("mail", [{}, {}, {"reference": "r"}], on_duplicate="ignore")
    mail.ack(take(mail))
    task = take(mail)
    mail.touch(task, HOUR)
    mail.release(task)
    mail.bury(ids[1])
    mail.kick(1)
    mail.delete(ids[1])
    many = sorted({task_id for _, call, task_id in told if call == "put"} - set(ids))
    assert told == [
        ("mail", "put", ids[0]), ("mail", "put", ids[1]), ("mail", "put", many[0]), ("mail", "put", many[1]),
        ("mail", "take", ids[0]), ("mail", "ack", ids[0]), ("mail", "take", ids[1]), ("mail", "touch", ids[1]),
        ("mail", "release", ids[1]), ("mail", "bury", ids[1]), ("mail", "kick", ids[1]), ("mail", "delete", ids[1]),
    ]  # fmt: skip
    mail.release(take(mail), HOUR)
    expired = mail.put(ttl=timedelta(seconds=1), priority=-1)
    age(timedelta(seconds=2), pk=expired.pk)
    take(mail)
    assert mail.truncate() == 4
    assert mail.statistics().by_call == {
        "put": 5, "take": 5, "ack": 1, "touch": 1, "release": 2, "bury": 1, "kick": 1, "ttl": 1, "delete": 5,
    }  # fmt: skip


def test_what_a_poller_does_is_counted_and_told(mail: QueueHandle, told: Told, taskqueue_registry: None) -> None:
    # Given a task for each outcome, one that failed and is due again, and one that comes too late
    outcomes: dict[str, Any] = {"done": None, "result": Complete(1), "gone": CompleteDelete(), "poison": Poison("bad")}
    outcomes |= {"later": Reenqueue(HOUR), "fail": Fail("no", retry=False), "retry": Fail("no", delay=HOUR)}
    processor("mail")(lambda task: outcomes[task.payload])
    ids = {name: mail.put(name).pk for name in outcomes}
    late = mail.put("done", ttl=timedelta(seconds=1)).pk
    age(HOUR, pk=late)
    told.clear()
    # When a poller empties the queue
    with run_poller("mail"):
        pass
    # Then each call is counted and told once
    calls = ["ack", "ack", "ack", "poison", "reenqueue", "fail", "retry"]
    expected = [("mail", "take", pk) for pk in (*ids.values(), late)] + [("mail", "ttl", late)]
    expected += [("mail", call, pk) for call, pk in zip(calls, ids.values(), strict=True)]
    assert sorted(told) == sorted(expected)
    assert mail.statistics().by_call == Counter(call for _, call, _ in expected) + Counter(put=len(ids) + 1)


def test_only_a_lease_that_ran_out_is_counted_as_expired(
    mail: QueueHandle, told: Told, taskqueue_registry: None
) -> None:
    # Given a task whose holder died, and a poller's processor that settles by itself, after a touch
    task = mail.put()
    take(mail)
    age(HOUR)
    told.clear()

    def work(task: Lease) -> None:
        task.touch(HOUR)
        task.reenqueue(timedelta(0)) if task.reenqueue_attempt == 0 else task.complete()

    processor("mail")(work)
    # When it is processed, and put back, and processed again
    with run_poller("mail"):
        pass
    # Then the first take alone found an expired lease
    calls = ["lease_expired", "take", "touch", "reenqueue", "take", "touch", "ack"]
    assert told == [("mail", call, task.pk) for call in calls]


def test_a_release_after_a_crash_is_no_other_expired_lease(
    mail: QueueHandle, told: Told, taskqueue_registry: None
) -> None:
    # Given two tasks whose holder died
    processor("mail")(lambda task: None)
    ids = [mail.put().pk for _ in range(2)]
    take(mail), take(mail)
    age(HOUR)
    told.clear()
    # When a poller takes both, and releases them to run them one by one
    with run_poller("mail"):
        pass
    # Then each lost one lease, though it was taken more than once
    calls = Counter((call, pk) for _, call, pk in told)
    for pk in ids:
        taken = calls["take", pk] - calls["release", pk]
        assert (calls["lease_expired", pk], calls["ack", pk], taken) == (1, 1, 1)
    assert any(call == "release" for call, _ in calls)


@pytest.mark.urls("tests.operations.test_api")
def test_what_operators_do_in_any_way_is_counted_and_told(mail: QueueHandle, told: Told, settings: Any) -> None:
    # Given failed tasks, one for each way, and two whose time is up
    settings.DBTASKQUEUE = {**settings.DBTASKQUEUE, "API": True}
    failed = [make_task("ERROR", queue="mail", reference=f"R{number}").pk for number in range(5)]
    late = [mail.put(ttl=timedelta(seconds=1)).pk for _ in range(2)]
    age(HOUR, pk__in=late)
    told.clear()
    browser = Client()
    browser.force_login(User.objects.create_superuser("ada"))
    # When they are changed by a queryset, on the command line, by the API, in the admin, and by housekeeping
    Task.objects.filter(pk=failed[0]).reprocess()
    call_command("taskqueue", "reprocess", f"--id={failed[1]}", "--yes", stdout=StringIO())
    body = json.dumps({"ids": [failed[2]], "reason": "mended"})
    answer = browser.post("/api/tasks/reprocess/ids", body, content_type="application/json")
    assert answer.json()["changed"] == 1
    form = {"action": "reprocess", "_selected_action": [failed[3]], "reason": "mended", "confirm": "yes"}
    assert browser.post("/admin/dbtaskqueue/task/", form).status_code == 302
    assert lookup.reprocess("mail", "R4")
    call_command("housekeeptasks", stdout=StringIO())
    Task.objects.filter(pk=failed[0]).cancel()
    Task.objects.filter(queue="mail").purge()
    # Then each change is counted and told once
    expected = [("reprocess", pk) for pk in failed] + [("ttl", pk) for pk in late] + [("cancel", failed[0])]
    expected += [("delete", pk) for pk in failed + late]
    assert told == [("mail", call, pk) for call, pk in expected]
    assert mail.statistics().by_call == {"put": 2, "reprocess": 5, "ttl": 2, "cancel": 1, "delete": 7}


def test_a_task_whose_holder_died_on_its_last_attempt_is_counted_where_a_poller_ends_it(
    mail: QueueHandle, told: Told, taskqueue_registry: None, configure: Callable[..., None]
) -> None:
    configure(max_attempts=1)
    processor("mail")(lambda task: None)
    task = mail.put()
    take(mail)
    age(HOUR)
    told.clear()
    with run_poller("mail"):
        until(lambda: Task.objects.filter(status="ERROR").exists())
    assert told == [("mail", "fail", task.pk), ("mail", "lease_expired", task.pk)]


def test_waiting_tasks_are_told_apart(mail: QueueHandle) -> None:
    mail.put()
    mail.put(delay=HOUR)
    for _ in range(3):
        mail.put(group="g")
    take(mail)
    assert mail.statistics().waiting == {"ready": 1, "delayed": 1, "parked": 2}


def test_they_outlive_processes_and_add_up_over_them(postgres_process_database: ProcessDatabase) -> None:
    # Given another process that used every verb and ended, and this one, which uses them, too
    postgres_process_database.run("shell", "-v", "0", "-c", EVERY_CALL)
    exec(EVERY_CALL)  # noqa: S102 -- the same program
    assert queue("work").statistics().by_call == {call: 2 * number for call, number in ITS_CALLS.items()}


def test_a_living_process_appends_by_itself(mail: QueueHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "FLUSH_INTERVAL_S", 0.01)
    monkeypatch.setattr(usage, "counter", usage.UsageCounter())
    before = datetime.now(UTC)
    mail.put()
    until(UsageCount.objects.exists)
    row = UsageCount.objects.get()
    assert (row.queue, row.call, row.count) == ("mail", "put", 1)
    assert (row.minute.second, row.minute.microsecond) == (0, 0)
    assert before.replace(second=0, microsecond=0) <= row.minute <= datetime.now(UTC)


def test_what_cannot_be_stored_is_stored_later(mail: QueueHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = usage.UsageCounter()
    monkeypatch.setattr(usage, "counter", counter)
    mail.put()
    with connection.schema_editor() as editor:
        editor.execute("ALTER TABLE dbtaskqueue_usagecount RENAME TO away")
    with pytest.raises(Exception, match="dbtaskqueue_usagecount"):
        counter.store("default")
    with connection.schema_editor() as editor:
        editor.execute("ALTER TABLE away RENAME TO dbtaskqueue_usagecount")
    assert mail.statistics().by_call == {"put": 1}
    counter.flush()


def test_producers_do_not_wait_for_a_counter(postgres_process_database: ProcessDatabase) -> None:
    """Given a transaction that holds every row there is of the statistics, producers commit all the same."""
    mail = queue("mail")
    mail.put()
    mail.statistics()
    holder = Actor("holder")

    def hold() -> None:
        transaction.set_autocommit(False)
        list(UsageCount.objects.select_for_update())

    holder.do(hold).result(PATIENCE)
    at_once(4, lambda _: mail.put())
    assert mail.statistics().by_call == {"put": 5}
    holder.do(transaction.rollback).result(PATIENCE)
    holder.do(transaction.set_autocommit, True).result(PATIENCE)
    holder.close()


def test_they_show_what_is_committed(mail: QueueHandle) -> None:
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        mail.put()
        raise ZeroDivisionError
    assert mail.statistics().by_call == {}
    mail.put()
    with transaction.atomic():
        mail.put()
        found = mail.statistics()
        assert (found.by_call, found.by_status["CREATED"]) == ({"put": 1}, 2)
    assert mail.statistics().by_call == {"put": 2}


def test_old_rows_are_merged_and_nothing_is_lost(mail: QueueHandle) -> None:
    # Given many rows of some minutes and days
    now = datetime.now(UTC)
    ages = [timedelta(0), timedelta(0), *[timedelta(minutes=30)] * 4, *[timedelta(days=10, minutes=n) for n in (0, 0)]]
    ages += [timedelta(days=9), timedelta(days=9, hours=1), timedelta(days=9, hours=2)]
    midnight = now.replace(hour=23, minute=0, second=0, microsecond=0)
    for call in ("put", "take"):
        for old in ages:
            start = midnight if old >= timedelta(days=1) else now.replace(second=0, microsecond=0)
            UsageCount.objects.create(queue="mail", minute=start - old, call=call, count=2)
    # When they are merged
    gone = roll_up(Session.on("default"), UsageCount)
    # Then the latest stand, old minutes are one row each, old days too, and the sums are as before
    assert UsageCount.objects.filter(call="put").count() == 2 + 1 + 1 + 1
    assert gone == 2 * (len(ages) - 5)
    assert mail.statistics().by_call == {"put": 2 * len(ages), "take": 2 * len(ages)}
    assert roll_up(Session.on("default"), UsageCount) == 0


def test_a_receiver_that_raises_changes_nothing(mail: QueueHandle, caplog: Any) -> None:
    def broken(**_: Any) -> None:
        raise ZeroDivisionError

    task_changed.connect(broken)
    try:
        mail.put()
        assert mail.take() is not None
    finally:
        task_changed.disconnect(broken)
    assert "ZeroDivisionError" in caplog.text
