"""Why does this task not run? One test for each reason, and a sentence for every state that a task can be in."""

import json
import re
from contextlib import suppress
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
from django.db import IntegrityError, connections, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_dbtaskqueue import enqueue, queue, registry
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.models import Poller, Queue, Task, TaskHistory
from django_dbtaskqueue.operations.explain import REASONS, explain
from django_dbtaskqueue.operations.queue_control import pause
from tests.factories import HOLDER, QUEUE, age, make_task
from tests.poller.processes import polling
from tests.support import until

MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
CODES = {
    *("finished", "gone", "leased", "lease_expired", "expired", "attempts_used", "parked", "paused", "no_poller"),
    *("no_processor", "no_tag", "pollers_idle", "concurrency", "group", "not_due", "busy", "waiting"),
}
MAX_STATEMENTS = 14  # with those that set and reset the planner's settings and the time limit


@pytest.fixture(autouse=True)
def _parcels(settings: Any, taskqueue_registry: None) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {}}, "NOTIFY": False}
    registry.register(QUEUE, lambda task: None)


def poller(alias: str, instance: str = HOLDER, **columns: Any) -> None:
    item = {"queue": QUEUE, "weight": 1, "idle_seconds": 0, "types": ["", "Known"], "tags": ["host-1"]}
    given = {"state": "RUNNING", "slots": 4, "held": 0, "queues": [item], **columns}
    Poller.objects.using(alias).create(instance=instance, **given)


def is_told(task: Any, code: str, *words: str) -> str:
    found = explain(task)
    assert found.code == code and [one for one in words if one not in found.sentence] == [], found
    return found.sentence


def test_the_queue_is_paused_or_no_living_poller_serves_it(alias: str) -> None:
    task = enqueue(QUEUE, using=alias)
    pause(QUEUE, alias, by="ada", reason="the insurer is down", until=timezone.now() + HOUR)
    is_told(task, "paused", "by ada: the insurer is down, until 20")
    assert explain(task).facts["by"] == "ada"
    Queue.objects.using(alias).update(paused_until=timezone.now() - HOUR)
    start = "Start one: manage.py runtaskpoller --queue parcels"
    is_told(task, "no_poller", f"No living poller serves queue parcels. {start}")
    poller(alias, "stopped", state="STOPPED")
    poller(alias, "elsewhere", queues=[{"queue": "letters"}])
    poller(alias, "silent")
    age(HOUR, using=alias, model=Poller, instance="silent")
    is_told(task, "no_poller")


def test_no_living_poller_has_a_processor_for_it_or_it_is_parked_and_secrets_are_masked(alias: str) -> None:
    poller(alias)
    task = make_task(payload_type="shop.Order", using=alias)
    nobody = "No living poller of queue parcels has a processor for payload type shop.Order. Deploy its code."
    is_told(task, "no_processor", nobody)
    parked = "no handler for payload type shop.Order on queue parcels"
    Task.objects.using(alias).update(parked_by=parked, ready_time=None)
    is_told(task, "no_processor")
    # A poller with the new code has come
    poller(alias, "new", queues=[{"queue": QUEUE, "types": ["shop.Order"], "tags": []}])
    is_told(task, "parked", "A poller has one now")
    task = make_task(parked_by="unreadable: password=hunter2", using=alias)
    is_told(task, "parked", "unreadable")
    assert "hunter2" not in repr(explain(task))


def test_no_poller_takes_its_tag(alias: str) -> None:
    poller(alias)
    is_told(enqueue(QUEUE, tag="host-1", using=alias), "waiting")
    task = enqueue(QUEUE, tag="host-2", using=alias)
    is_told(task, "no_tag", "No living poller of queue parcels takes tag host-2. Start one with --tag host-2.")
    # One poller takes the tag, another one has the processor
    poller(alias, "tagged", queues=[{"queue": QUEUE, "types": ["Other"], "tags": ["host-2"]}])
    is_told(task, "no_tag", "and has a processor")
    # Of a poller of an older version nothing is claimed
    poller(alias, "old", queues=[QUEUE])
    is_told(task, "waiting")


def test_its_pollers_are_paused_ending_or_busy(alias: str) -> None:
    poller(alias, "p1", state="PAUSED")
    poller(alias, "p2", state="ENDING")
    task = enqueue(QUEUE, using=alias)
    is_told(task, "pollers_idle", "The pollers that may take the task take none at present: p1 (PAUSED), p2 (ENDING).")
    poller(alias, held=4)
    is_told(task, "busy", "Each poller that may take the task is busy: 4 slots are full.")
    poller(alias, "free")
    is_told(task, "waiting")


def test_the_concurrency_of_the_queue_or_of_its_processor_is_reached(alias: str) -> None:
    poller(alias)
    task = enqueue(QUEUE, using=alias)
    make_task(Status.PROCESSING, ready_time=-MINUTE, using=alias)
    Queue.objects.using(alias).create(name=QUEUE)
    none = "The concurrency of queue parcels is 0: no poller takes its tasks."
    reached = "holds as many as the concurrency allows: 1."
    for limit, code, words in ((1, "concurrency", reached), (2, "waiting", ""), (0, "concurrency", none)):
        Queue.objects.using(alias).update(overrides={"concurrency": limit})
        is_told(task, code, words)
    Queue.objects.using(alias).update(overrides={})
    registry.unregister(QUEUE)
    registry.register(QUEUE, lambda task: None, concurrency=1)
    Task.objects.using(alias).filter(status=Status.PROCESSING).update(payload_type="Other")
    is_told(task, "waiting")  # the other one is of another processor
    make_task(Status.PROCESSING, ready_time=-MINUTE, using=alias)
    is_told(task, "concurrency")


def test_it_waits_behind_the_head_of_its_group(alias: str) -> None:
    poller(alias)
    head, task = (enqueue(QUEUE, group="customer-7", using=alias) for _ in range(2))
    is_told(task, "group", f"The task waits behind task {head.pk} of its group customer-7, which is CREATED.")
    assert queue(QUEUE, using=alias).take() is not None
    is_told(task, "group", "which is PROCESSING")
    assert explain(task).facts == {"group": "customer-7", "head": head.pk, "status": "PROCESSING"}


def test_it_is_not_due_or_its_time_or_its_attempts_are_over(alias: str) -> None:
    poller(alias)
    is_told(enqueue(QUEUE, delay=HOUR + MINUTE, using=alias), "not_due", "The task is due in 1h")
    parcels = queue(QUEUE, using=alias)
    failed, reenqueued = parcels.put(), parcels.put()
    parcels.take().fail("no route", delay=HOUR + MINUTE)
    parcels.take().reenqueue(HOUR + MINUTE, "halfway", keep_attempts=True)
    is_told(failed, "not_due", "Attempt 2 of 5 is due in 1h, because the last one failed.")
    is_told(reenqueued, "not_due", "The task is due in 1h")
    task = enqueue(QUEUE, ttl=MINUTE, using=alias)
    age(HOUR, using=alias)
    pause(QUEUE, alias, by="ada")
    is_told(task, "expired", "Its time to live ended 59m")
    is_told(make_task(attempt=5, max_attempts=5, using=alias), "attempts_used")


def test_it_waits_for_its_turn(alias: str) -> None:
    poller(alias)
    other = make_task(priority=1, ready_time=-MINUTE, using=alias)
    make_task(priority=0, ready_time=HOUR, using=alias)  # not due
    make_task(Status.PROCESSING, ready_time=-MINUTE, using=alias)
    make_task(ready_time=-MINUTE, queue="letters", using=alias)
    task = make_task(priority=1, ready_time=timedelta(seconds=-1), using=alias)
    later = make_task(priority=2, ready_time=-HOUR, using=alias)
    is_told(task, "waiting", "It is number 2 of 3 waiting tasks")
    assert [explain(one).facts["position"] for one in (other, task, later)] == [1, 2, 3]


def test_a_lease_is_held_or_ran_out(alias: str) -> None:
    poller(alias)
    task = enqueue(QUEUE, using=alias)
    assert queue(QUEUE, using=alias).take() is not None
    is_told(task, "leased", " has held the lease for ", "; the lease ends in ")
    age(HOUR, using=alias)
    is_told(task, "lease_expired", "the next checkout takes the task over")
    Task.objects.using(alias).update(max_attempts=1)
    age(-HOUR, using=alias, model=Poller)
    is_told(task, "lease_expired", "a poller will write ERROR")
    Poller.objects.using(alias).all().delete()
    is_told(task, "no_poller")


def test_it_has_finished(alias: str) -> None:
    task = make_task(Status.ERROR, process_result="ValueError: password=hunter2", using=alias)
    age(MINUTE, using=alias)
    assert "hunter2" not in is_told(task, "finished", "The task ended in ERROR 1m")
    # A result needs the permission to see payloads
    assert "secret" not in repr(explain(make_task(Status.COMPLETED, process_result="secret", using=alias)))
    Task.objects.using(alias).filter(pk=task.pk).housekeep(older_than=timedelta(0))
    is_told(task, "finished", "It is in the history.")
    assert explain(task).facts["status"] == "ERROR"
    is_told(TaskHistory.objects.using(alias).get(), "finished")
    TaskHistory.objects.using(alias).all().delete()
    is_told(task, "gone")


TIMES = (-MINUTE, HOUR)
PARKED = (None, "group", "no handler for x", "unreadable: x")
NAMES = ("status", "next_process_time", "expire_time", "parked_by", "group_key", "tag", "attempt")
STATES = [*product(Status, TIMES, (None, *TIMES), PARKED, (None, "g"), (None, "nobody"), (0, 5))]
STRIDE = 7  # of 960 states: no number of values that a column has, so that each pair of values comes


def test_each_state_of_a_task_has_its_sentence(alias: str) -> None:
    tasks = []
    for values in STATES[alias == "sqlite" :: STRIDE]:
        with suppress(IntegrityError), transaction.atomic(using=alias):
            tasks.append(make_task(using=alias, **dict(zip(NAMES, values, strict=True))))
    assert len(tasks) > 40
    for served in (False, True):
        if served:
            poller(alias)
        for found in map(explain, tasks):
            json.dumps(found.facts, default=str)
            assert found.code in CODES and found.sentence and not re.search(r"%\(|\n", found.sentence), found
    assert REASONS[-1].__name__ == "_waiting", "it always holds"


def test_the_cost_is_a_handful_of_statements(alias: str) -> None:
    for number in range(20):
        poller(alias, f"p{number}")
        enqueue(QUEUE, priority=number % 3, using=alias)
    task = enqueue(QUEUE, priority=2, using=alias)
    with CaptureQueriesContext(connections[alias]) as queries:
        assert explain(task).code == "waiting"
    assert len(queries) <= MAX_STATEMENTS, [query["sql"] for query in queries]


@pytest.mark.django_db(transaction=True)
def test_a_real_poller_reports_its_tags_and_types() -> None:
    with polling({"parcels": 1}, tags=("host-1",)):
        until(lambda: Poller.objects.filter(state="RUNNING").exists())
        is_told(enqueue(QUEUE, tag="host-2", delay=HOUR), "no_tag")
        is_told(enqueue(QUEUE, tag="host-1", delay=HOUR), "not_due")
        is_told(make_task(payload_type="Alien", ready_time=HOUR), "no_processor")
