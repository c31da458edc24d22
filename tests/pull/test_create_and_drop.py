"""Queues made and dropped at runtime, and the overrides of a queue's row as producers see them."""

from datetime import timedelta
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from django_dbtaskqueue import Fixed, QueueFull, UnknownQueue, enqueue, queue, registry
from django_dbtaskqueue.conf.overrides import ROW_CACHE_S, overridden_settings
from django_dbtaskqueue.models import Queue, Task
from django_dbtaskqueue.pull.handle import QueueHandle
from tests.clock import SteppedClock
from tests.conftest import ProcessDatabase
from tests.factories import age, make_task
from tests.operations.site import refused
from tests.pull.conftest import HOUR, SECOND, row, taken, waiters
from tests.support import PATIENCE, actors, minute_counts, taken_back, until


def test_a_queue_made_at_runtime_has_its_settings(process_database: ProcessDatabase) -> None:
    once = Fixed(SECOND, jitter=0)
    sites = queue("sites").create(max_attempts=2, capacity=3, ttl=HOUR, lease="90s", retry=once, keep="delete")
    in_text = {"ttl": "PT1H", "lease": "PT1M30S", "retry": "fixed:1s,jitter=0"}
    assert Queue.objects.get(pk="sites").overrides == {"max_attempts": 2, "capacity": 3, "keep": "delete", **in_text}
    task = row(sites.put())
    assert task.max_attempts == 2 and task.expire_time == task.next_process_time + HOUR
    sites.put()
    sites.put()
    refused(None, enqueue, "sites", error=QueueFull)
    lease = sites.take()
    assert timedelta(seconds=85) < lease.lease_until - lease.start_time < timedelta(seconds=95)
    lease.fail("once")
    again = row(task)
    assert again.next_process_time - again.last_update_time == SECOND
    sites.ack(sites.take())
    assert Task.objects.count() == 2


def test_a_second_create_is_an_error_unless_it_may_exist(mail: QueueHandle) -> None:
    queue("sites").create(max_attempts=2)
    refused("if_not_exists=True", queue("sites").create, max_attempts=3)
    queue("sites").create(max_attempts=3, if_not_exists=True)
    assert overridden_settings("sites", "default").max_attempts == 2
    refused("there is a queue 'mail'", mail.create)
    mail.create(if_not_exists=True)
    mail.put()
    assert mail.drop() == 1
    assert mail.put().pk, "a queue of the settings remains known"


BAD: dict[str, dict[str, Any]] = {
    "Did you mean 'max_attempts'": {"max_atempts": 2},
    "capacity=0 is not valid": {"capacity": 0},
    "database='sqlite' cannot stand in a queue's row": {"database": "sqlite"},
    "can only be written in code": {"retry": lambda attempt, error: SECOND},
}


def test_a_bad_setting_is_an_error_and_no_queue_nor_is_one_that_is_rolled_back(mail: QueueHandle) -> None:
    for message, given in BAD.items():
        refused(message, queue("sites").create, **given, error=ImproperlyConfigured)
    with taken_back():
        queue("sites").create()
        queue("sites").put()
    assert not Queue.objects.exists() and not Task.objects.exists()
    refused(None, queue("sites").put, error=UnknownQueue)


def test_drop_takes_tasks_row_and_counters(process_database: ProcessDatabase) -> None:
    sites = queue("sites").create()
    first = sites.put().pk
    for status in ("COMPLETED", "ERROR", "POISON"):
        make_task(status, queue="sites")
    assert sites.statistics().by_call == {"put": 1}
    assert sites.drop() == 4
    assert not Task.objects.exists() and not Queue.objects.exists() and not minute_counts("call").exists()
    assert sum(minute_counts("deletion").filter(queue="sites").values_list("count", flat=True)) == 4
    for verb in (sites.put, sites.take, sites.drop, sites.statistics, sites.truncate):
        refused(None, verb, error=UnknownQueue)
    # And made anew it starts from nothing, but for the ids
    sites.create()
    assert sites.statistics().by_call == {}
    assert sites.put().pk > first


def test_drop_is_refused_while_a_lease_lives_or_somebody_waits(process_database: ProcessDatabase) -> None:
    sites = queue("sites").create()
    task = taken(sites)
    refused(r"1 tasks are being processed.*release_all\(\)", sites.drop)
    assert Task.objects.count() == 1 and Queue.objects.exists()
    sites.ack(task)
    taken(sites)
    age(HOUR)  # that lease is over
    assert sites.drop() == 2
    sites.create()
    with actors(1) as (actor,):
        future = actor.do(sites.take, timedelta(seconds=PATIENCE))
        until(lambda: waiters("sites") == 1)
        refused(r"1 threads are waiting in take\(\)", sites.drop)
        sites.put()
        sites.ack(future.result(PATIENCE))  # type: ignore[arg-type]
    assert sites.drop() == 1


def test_a_runtime_override_of_retry_counts_for_consumers(mail: QueueHandle, taskqueue_registry: None) -> None:
    registry.register("mail", lambda task: None, retry="fixed:1h,jitter=0")
    Queue.objects.create(name="mail", overrides={"retry": "fixed:9m,jitter=0"})
    taken(mail).fail("not yet")
    found = Task.objects.get()
    assert abs(found.next_process_time - found.last_update_time - timedelta(minutes=9)) < SECOND


def test_a_change_by_others_counts_within_a_moment(mail: QueueHandle, clock: SteppedClock) -> None:
    Queue.objects.create(name="mail")
    assert mail.put().max_attempts == 5
    Queue.objects.filter(pk="mail").update(overrides={"max_attempts": 9})  # unseen by this process, as any other's
    clock.advance(ROW_CACHE_S)
    assert mail.put().max_attempts == 9


def test_overrides_that_cannot_be_are_logged_once_and_not_applied(mail: QueueHandle, caplog: Any) -> None:
    Queue.objects.create(name="mail", overrides={"max_attempts": -1})
    assert {mail.put().max_attempts for _ in range(3)} == {5}
    assert caplog.text.count("Overrides of queue mail are not applied") == 1
    assert "max_attempts=-1" in caplog.text
