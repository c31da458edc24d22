"""Statistics: by status, and by call from rows that every process appends to."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection, transaction

from django_dbtaskqueue import enqueue, enqueue_many, queue
from django_dbtaskqueue.db.minute_counts import roll_up
from django_dbtaskqueue.flow import usage
from django_dbtaskqueue.models import UsageCount
from django_dbtaskqueue.pull.handle import QueueHandle
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


@pytest.mark.parametrize("made", [{}, {"CREATED": 2, "COMPLETED": 3, "ERROR": 1, "POISON": 4, "PROCESSING": 1}])
def test_by_status_and_done_does_not_count_in_the_total(mail: QueueHandle, made: dict[str, int]) -> None:
    for status, number in made.items():
        for _ in range(number):
            make_task(status, queue="mail")
    make_task(queue="other")
    expected = dict.fromkeys(("CREATED", "PROCESSING", "COMPLETED", "ERROR", "POISON"), 0) | made
    total = sum(number for status, number in made.items() if status != "COMPLETED")
    assert mail.statistics().by_status == {**expected, "total": total}


def test_by_call(mail: QueueHandle) -> None:
    assert mail.statistics().by_call == {}
    mail.put()
    enqueue("mail", "r")
    enqueue("mail", "r", on_duplicate="ignore")  # nothing was put
    enqueue_many("mail", [{}, {}, {"reference": "r"}], on_duplicate="ignore")
    mail.ack(take(mail))
    mail.release(take(mail))
    mail.release(take(mail), HOUR)
    mail.bury(take(mail))
    assert mail.kick(5) == 1
    expired = mail.put(ttl=timedelta(seconds=1), priority=-1)
    age(timedelta(seconds=2), pk=expired.pk)
    take(mail)
    assert mail.truncate() == 5
    assert mail.statistics().by_call == {
        "put": 5, "take": 6, "ack": 1, "release": 2, "bury": 1, "kick": 1, "ttl": 1, "delete": 5,
    }  # fmt: skip


def test_what_is_rolled_back_was_no_call(mail: QueueHandle) -> None:
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        mail.put()
        raise ZeroDivisionError
    assert mail.statistics().by_call == {}


def test_they_outlive_processes_and_add_up_over_them(process_database: ProcessDatabase) -> None:
    # Given two processes that used every verb and ended
    for _ in range(2):
        process_database.run("shell", "-v", "0", "-c", EVERY_CALL)
    # Then a third sees what both did, and adds its own
    work = queue("work")
    work.put()
    doubled = {call: 2 * number for call, number in ITS_CALLS.items()}
    assert work.statistics().by_call == {**doubled, "put": 13}


def test_a_living_process_appends_by_itself(mail: QueueHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "FLUSH_INTERVAL_S", 0.01)
    monkeypatch.setattr(usage, "counter", usage.UsageCounter())
    before = datetime.now(UTC)
    mail.put()
    until(UsageCount.objects.exists)
    row = UsageCount.objects.get()
    assert (row.queue, row.call, row.count) == ("mail", "put", 1)
    assert (row.minute.second, row.minute.microsecond) == (0, 0)
    assert timedelta(0) <= before - row.minute < timedelta(minutes=1, seconds=1)


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


def test_inside_a_transaction_they_show_what_is_committed(mail: QueueHandle) -> None:
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
    gone = roll_up("default", UsageCount)
    # Then the latest stand, old minutes are one row each, old days too, and the sums are as before
    assert UsageCount.objects.filter(call="put").count() == 2 + 1 + 1 + 1
    assert gone == 2 * (len(ages) - 5)
    assert mail.statistics().by_call == {"put": 2 * len(ages), "take": 2 * len(ages)}
    assert roll_up("default", UsageCount) == 0


def test_the_signal_is_sent_for_every_verb(mail: QueueHandle, told: Told) -> None:
    ids = [mail.put().pk, enqueue("mail").pk]
    enqueue_many("mail", [{}, {}])
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


def test_a_receiver_that_raises_changes_nothing(mail: QueueHandle, caplog: Any) -> None:
    from django_dbtaskqueue.signals import task_changed

    def broken(**_: Any) -> None:
        raise ZeroDivisionError

    task_changed.connect(broken)
    try:
        mail.put()
        assert mail.take() is not None
    finally:
        task_changed.disconnect(broken)
    assert "Signal receiver" in caplog.text
