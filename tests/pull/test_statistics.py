"""Statistics: by status, and by call from rows that every process appends to."""

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import transaction

from django_dbtaskqueue import Complete, CompleteDelete, Fail, Poison, Reenqueue, enqueue, enqueue_many, queue, registry
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow import usage
from django_dbtaskqueue.flow.usage import roll_up
from django_dbtaskqueue.models import MinuteCount, Task
from django_dbtaskqueue.operations import lookup
from django_dbtaskqueue.pull.handle import QueueHandle
from django_dbtaskqueue.signals import task_changed
from django_dbtaskqueue.testing import run_poller
from tests.conftest import ProcessDatabase
from tests.factories import age, make_task
from tests.operations.site import logged_in
from tests.pull.conftest import DAY, HOUR, SECOND, Configure, Told, taken
from tests.support import PATIENCE, actors, at_once, minute_counts, output_of, sql, taken_back, until

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


def poll(function: Any) -> None:
    registry.register("mail", function)
    with run_poller("mail"):
        pass


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
    first, second = mail.put().pk, enqueue("mail", "r").pk
    enqueue("mail", "r", on_duplicate="ignore")  # nothing was put
    enqueue_many("mail", [{}, {}, {"reference": "r"}], on_duplicate="ignore")
    mail.ack(mail.take())
    task = mail.take()
    mail.touch(task, HOUR)
    mail.release(task)
    mail.bury(second)
    mail.kick(1)
    mail.delete(second)
    many = sorted({task_id for call, task_id in told if call == "put"} - {first, second})
    calls = [("put", first), ("put", second), ("put", many[0]), ("put", many[1]), ("take", first), ("ack", first)]
    assert told == calls + [(call, second) for call in ("take", "touch", "release", "bury", "kick", "delete")]
    mail.release(mail.take(), HOUR)
    age(2 * SECOND, pk=mail.put(ttl=SECOND, priority=-1).pk)
    mail.take()
    assert mail.truncate() == 4
    counts = Counter(put=5, take=5, ack=1, touch=1, release=2, bury=1, kick=1, ttl=1, delete=5)
    assert mail.statistics().by_call == counts


def test_what_a_poller_does_is_counted_and_told(mail: QueueHandle, told: Told, taskqueue_registry: None) -> None:
    outcomes: list[tuple[str, Any]] = [
        *[("ack", None), ("ack", Complete(1)), ("ack", CompleteDelete()), ("poison", Poison("bad"))],
        *[("reenqueue", Reenqueue(HOUR)), ("fail", Fail("no", retry=False)), ("retry", Fail("no", delay=HOUR))],
    ]
    ids = [mail.put(number).pk for number in range(len(outcomes))]
    late = mail.put(0, ttl=SECOND).pk
    age(HOUR, pk=late)
    told.clear()
    poll(lambda task: outcomes[task.payload][1])
    expected = [("take", pk) for pk in (*ids, late)] + [("ttl", late)]
    expected += [(call, pk) for (call, _), pk in zip(outcomes, ids, strict=True)]
    assert sorted(told) == sorted(expected)
    assert mail.statistics().by_call == Counter(call for call, _ in expected) + Counter(put=len(ids) + 1)


@pytest.mark.usefixtures("taskqueue_registry")
def test_only_a_lease_that_ran_out_is_counted_as_expired(mail: QueueHandle, told: Told) -> None:
    """A task's holder died; then a poller's processor settles by itself, after a touch, twice."""
    task = taken(mail)
    age(HOUR)
    told.clear()

    def work(task: Lease) -> None:
        task.touch(HOUR)
        task.reenqueue(timedelta(0)) if task.reenqueue_attempt == 0 else task.complete()

    poll(work)
    assert told == [(call, task.id) for call in ("lease_expired", "take", "touch", "reenqueue", "take", "touch", "ack")]


def test_a_release_after_a_crash_is_no_expired_lease(mail: QueueHandle, told: Told, taskqueue_registry: None) -> None:
    """A poller takes two tasks whose holder died, and releases them to run them one by one."""
    ids = [taken(mail).id for _ in range(2)]
    age(HOUR)
    told.clear()
    poll(lambda task: None)
    calls = Counter(told)
    for pk in ids:
        assert (calls["lease_expired", pk], calls["ack", pk], calls["take", pk] - calls["release", pk]) == (1, 1, 1)
    assert "release" in told.calls()


@pytest.mark.urls("tests.operations.test_api")
def test_what_operators_do_in_any_way_is_counted_and_told(mail: QueueHandle, told: Told, settings: Any) -> None:
    settings.DBTASKQUEUE = {**settings.DBTASKQUEUE, "API": True}
    failed = [make_task("ERROR", queue="mail", reference=f"R{number}").pk for number in range(5)]
    late = [mail.put(ttl=SECOND).pk for _ in range(2)]
    age(HOUR, pk__in=late)
    told.clear()
    browser = logged_in(User.objects.create_superuser("ada"))
    Task.objects.filter(pk=failed[0]).reprocess()
    output_of("taskqueue", "reprocess", f"--id={failed[1]}", "--yes")
    body = {"ids": [failed[2]], "reason": "mended"}
    assert browser.post("/api/tasks/reprocess/ids", body, content_type="application/json").json()["changed"] == 1
    form = {"action": "reprocess", "_selected_action": [failed[3]], "reason": "mended", "confirm": "yes"}
    assert browser.post("/admin/dbtaskqueue/task/", form).status_code == 302
    assert lookup.reprocess("mail", "R4")
    output_of("housekeeptasks")
    Task.objects.filter(pk=failed[0]).cancel()
    Task.objects.filter(queue="mail").purge()
    expected = [("reprocess", pk) for pk in failed] + [("ttl", pk) for pk in late] + [("cancel", failed[0])]
    assert sorted(told) == sorted(expected + [("delete", pk) for pk in failed + late])  # one act has no order
    assert mail.statistics().by_call == {"put": 2, "reprocess": 5, "ttl": 2, "cancel": 1, "delete": 7}


@pytest.mark.usefixtures("taskqueue_registry")
def test_a_spent_task_is_counted_where_a_poller_ends_it(mail: QueueHandle, told: Told, configure: Configure) -> None:
    configure(max_attempts=1)
    registry.register("mail", lambda task: None)
    task = taken(mail)
    age(HOUR)
    told.clear()
    with run_poller("mail"):
        until(Task.objects.filter(status="ERROR").exists)
    assert told == [("fail", task.id), ("lease_expired", task.id)]


def test_waiting_tasks_are_told_apart(mail: QueueHandle) -> None:
    mail.put()
    mail.put(delay=HOUR)
    for _ in range(3):
        mail.put(group="g")
    mail.take()
    assert mail.statistics().waiting == {"ready": 1, "delayed": 1, "parked": 2}


def test_they_outlive_processes_and_add_up_over_them(postgres_process_database: ProcessDatabase) -> None:
    postgres_process_database.run("shell", "-v", "0", "-c", EVERY_CALL)
    exec(EVERY_CALL)  # noqa: S102 -- the same program
    assert queue("work").statistics().by_call == {call: 2 * number for call, number in ITS_CALLS.items()}


def test_a_living_process_appends_by_itself(mail: QueueHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "FLUSH_INTERVAL_S", 0.01)
    monkeypatch.setattr(usage, "counter", usage.UsageCounter())
    before = datetime.now(UTC)
    mail.put()
    until(minute_counts("call").exists)
    row = minute_counts("call").get()
    assert (row.queue, row.name, row.count) == ("mail", "put", 1)
    assert (row.minute.second, row.minute.microsecond) == (0, 0)
    assert before.replace(second=0, microsecond=0) <= row.minute <= datetime.now(UTC)


def test_what_cannot_be_stored_is_stored_later(mail: QueueHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = usage.UsageCounter()
    monkeypatch.setattr(usage, "counter", counter)
    mail.put()
    sql("ALTER TABLE dbtaskqueue_minutecount RENAME TO away")
    with pytest.raises(Exception, match="dbtaskqueue_minutecount"):
        counter.store(Session.on("default"))
    sql("ALTER TABLE away RENAME TO dbtaskqueue_minutecount")
    assert mail.statistics().by_call == {"put": 1}
    counter.flush()


def test_producers_do_not_wait_for_a_counter(postgres_process_database: ProcessDatabase) -> None:
    """Given a transaction that holds every row there is of the statistics, producers commit all the same."""
    mail = queue("mail")
    mail.put()
    mail.statistics()
    with actors(1) as (holder,):
        holder.do(transaction.set_autocommit, False)
        holder.do(lambda: list(minute_counts("call").select_for_update())).result(PATIENCE)
        at_once(4, lambda _: mail.put())
        assert mail.statistics().by_call == {"put": 5}
        holder.do(transaction.rollback)
        holder.do(transaction.set_autocommit, True).result(PATIENCE)


def test_they_show_what_is_committed(mail: QueueHandle) -> None:
    with taken_back():
        mail.put()
    assert mail.statistics().by_call == {}
    mail.put()
    with transaction.atomic():
        mail.put()
        found = mail.statistics()
        assert (found.by_call, found.by_status["CREATED"]) == ({"put": 1}, 2)
    assert mail.statistics().by_call == {"put": 2}


def test_old_rows_are_merged_and_nothing_is_lost(mail: QueueHandle) -> None:
    now = datetime.now(UTC).replace(second=0, microsecond=0)
    midnight = now.replace(hour=23, minute=0)
    minutes = [now, now, *[now - HOUR / 2] * 4]
    minutes += [midnight - 10 * DAY, midnight - 10 * DAY, *(midnight - 9 * DAY - n * HOUR for n in range(3))]
    for call in ("put", "take"):
        for minute in minutes:
            MinuteCount.objects.create(kind="call", queue="mail", minute=minute, name=call, count=2)
    gone = roll_up(Session.on("default"))
    assert minute_counts("call").filter(name="put").count() == 2 + 1 + 1 + 1 and gone == 2 * (len(minutes) - 5)
    assert mail.statistics().by_call == {"put": 2 * len(minutes), "take": 2 * len(minutes)}
    assert roll_up(Session.on("default")) == 0


def test_a_receiver_that_raises_changes_nothing(mail: QueueHandle, caplog: Any) -> None:
    def broken(**_: Any) -> None:
        raise ZeroDivisionError

    task_changed.connect(broken)
    taken(mail)
    task_changed.disconnect(broken)
    assert "ZeroDivisionError" in caplog.text
