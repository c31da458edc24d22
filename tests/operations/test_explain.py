"""Why does this task not run? One test for each reason, and a sentence for every state that a task can be in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from io import StringIO
from itertools import product
from typing import Any

import pytest
from django.core.management import call_command
from django.db import IntegrityError, connections, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_dbtaskqueue import enqueue, registry
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.models import Poller, Queue, Task, TaskHistory
from django_dbtaskqueue.operations.explain import REASONS, explain
from django_dbtaskqueue.operations.queue_control import pause
from django_dbtaskqueue.pull.handle import queue
from tests.factories import HOLDER, QUEUE, age, make_task
from tests.poller.processes import polling
from tests.support import until

both = pytest.mark.django_db(databases=["default", "sqlite"])
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
CODES = {
    "finished", "gone", "leased", "lease_expired", "expired", "attempts_used", "parked", "paused", "no_poller",
    "no_processor", "no_tag", "pollers_idle", "concurrency", "group", "not_due", "busy", "waiting",
}  # fmt: skip
MAX_STATEMENTS = 14  # with those that set and reset the planner's settings and the time limit


@pytest.fixture(autouse=True)
def _parcels(settings: Any) -> Iterator[None]:
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {}}, "NOTIFY": False}
    saved = registry.snapshot()
    registry.register(QUEUE, lambda task: None)
    yield
    registry.restore(saved)


def poller(alias: str, instance: str = HOLDER, **columns: Any) -> None:
    """Write the row of a poller as its heartbeat does."""
    item = {"queue": QUEUE, "weight": 1, "idle_seconds": 0, "types": ["", "Known"], "tags": ["host-1"]}
    given = {"state": "RUNNING", "slots": 4, "held": 0, "queues": [item], **columns}
    Poller.objects.using(alias).create(instance=instance, **given)


def why(task: Any) -> tuple[str, str]:
    found = explain(task)
    return found.code, found.sentence


# -- each reason -------------------------------------------------------------------------------------------------------


@both
def test_the_queue_is_paused(alias: str) -> None:
    task = enqueue(QUEUE, using=alias)
    pause([QUEUE], by="ada", reason="the insurer is down", until=timezone.now() + HOUR, using=alias)
    code, sentence = why(task)
    assert code == "paused" and "by ada: the insurer is down, until 20" in sentence
    assert explain(task).facts["by"] == "ada"
    # A pause that is over is none
    Queue.objects.using(alias).update(paused_until=timezone.now() - HOUR)
    assert why(task)[0] == "no_poller"


@both
def test_no_living_poller_serves_the_queue(alias: str) -> None:
    task = enqueue(QUEUE, using=alias)
    assert why(task) == (
        "no_poller", "No living poller serves queue parcels. Start one: manage.py runtaskpoller --queue parcels"
    )  # fmt: skip
    poller(alias, "stopped", state="STOPPED")
    poller(alias, "elsewhere", queues=[{"queue": "letters"}])
    poller(alias, "silent")
    age(HOUR, using=alias, model=Poller, instance="silent")
    assert why(task)[0] == "no_poller"


@both
def test_no_living_poller_has_a_processor_for_its_type(alias: str) -> None:
    poller(alias)
    task = make_task(payload_type="shop.Order", using=alias)
    assert why(task) == (
        "no_processor",
        "No living poller of queue parcels has a processor for payload type shop.Order. Deploy its code.",
    )
    Task.objects.using(alias).update(
        parked_by="no handler for payload type shop.Order on queue parcels", ready_time=None
    )
    assert why(task)[0] == "no_processor"
    # A poller with the new code has come
    poller(alias, "new", queues=[{"queue": QUEUE, "types": ["shop.Order"], "tags": []}])
    assert why(task)[0] == "parked" and "A poller has one now" in why(task)[1]


@both
def test_it_is_parked_for_another_reason_and_secrets_are_masked(alias: str) -> None:
    poller(alias)
    task = make_task(parked_by="unreadable: password=hunter2", using=alias)
    code, sentence = why(task)
    assert code == "parked" and "unreadable" in sentence and "hunter2" not in str(explain(task).document)


@both
def test_no_poller_takes_its_tag(alias: str) -> None:
    poller(alias)
    assert why(enqueue(QUEUE, tag="host-1", using=alias))[0] == "waiting"
    task = enqueue(QUEUE, tag="host-2", using=alias)
    assert why(task) == (
        "no_tag", "No living poller of queue parcels takes tag host-2. Start one with --tag host-2."
    )  # fmt: skip
    # One poller takes the tag, another one has the processor
    poller(alias, "tagged", queues=[{"queue": QUEUE, "types": ["Other"], "tags": ["host-2"]}])
    assert why(task)[0] == "no_tag" and "and has a processor" in why(task)[1]
    # Of a poller of an older version nothing is claimed
    poller(alias, "old", queues=[QUEUE])
    assert why(task)[0] == "waiting"


@both
def test_its_pollers_are_paused_or_ending(alias: str) -> None:
    poller(alias, "p1", state="PAUSED")
    poller(alias, "p2", state="ENDING")
    assert why(enqueue(QUEUE, using=alias)) == (
        "pollers_idle", "The pollers that may take the task take none at present: p1 (PAUSED), p2 (ENDING)."
    )  # fmt: skip


@both
def test_the_concurrency_of_the_queue_is_reached(alias: str) -> None:
    poller(alias)
    task = enqueue(QUEUE, using=alias)
    make_task(Status.PROCESSING, ready_time=-MINUTE, using=alias)
    row = Queue.objects.using(alias).create(name=QUEUE, overrides={"concurrency": 1})
    code, sentence = why(task)
    assert code == "concurrency" and sentence.endswith("holds as many as the concurrency allows: 1.")
    row.overrides = {"concurrency": 2}
    row.save()
    assert why(task)[0] == "waiting"
    row.overrides = {"concurrency": 0}
    row.save()
    assert why(task)[1] == "The concurrency of queue parcels is 0: no poller takes its tasks."


@both
def test_the_concurrency_of_its_processor_is_reached(alias: str) -> None:
    registry.unregister(QUEUE)
    registry.register(QUEUE, lambda task: None, concurrency=1)
    poller(alias)
    make_task(Status.PROCESSING, ready_time=-MINUTE, payload_type="Other", using=alias)
    task = enqueue(QUEUE, using=alias)
    assert why(task)[0] == "waiting"  # the other one is of another processor
    make_task(Status.PROCESSING, ready_time=-MINUTE, using=alias)
    assert why(task)[0] == "concurrency"


@both
def test_it_waits_behind_the_head_of_its_group(alias: str) -> None:
    poller(alias)
    head, task = (enqueue(QUEUE, group="customer-7", using=alias) for _ in range(2))
    assert why(task) == (
        "group", f"The task waits behind task {head.pk} of its group customer-7, which is CREATED."
    )  # fmt: skip
    lease = queue(QUEUE, using=alias).take()
    assert lease is not None and "which is PROCESSING" in why(task)[1]
    assert explain(task).facts == {"group": "customer-7", "head": head.pk, "status": "PROCESSING"}


@both
def test_it_is_not_due(alias: str) -> None:
    poller(alias)
    assert why(enqueue(QUEUE, delay=HOUR + MINUTE, using=alias))[1].startswith("The task is due in 1h")
    retried = make_task(ready_time=HOUR + MINUTE, attempt=2, using=alias)
    code, sentence = why(retried)
    assert code == "not_due" and sentence.startswith("Attempt 3 of 5 is due in 1h")


@both
def test_all_slots_are_full(alias: str) -> None:
    poller(alias, held=4)
    task = enqueue(QUEUE, using=alias)
    code, sentence = why(task)
    assert code == "busy" and sentence.startswith("Each poller that may take the task is busy: 4 slots are full.")
    poller(alias, "free")
    assert why(task)[0] == "waiting"


@both
def test_it_waits_for_its_turn(alias: str) -> None:
    poller(alias)
    other = make_task(priority=1, ready_time=-MINUTE, using=alias)
    make_task(priority=0, ready_time=HOUR, using=alias)  # not due
    make_task(Status.PROCESSING, ready_time=-MINUTE, using=alias)
    make_task(ready_time=-MINUTE, queue="letters", using=alias)
    task = make_task(priority=1, ready_time=timedelta(seconds=-1), using=alias)
    later = make_task(priority=2, ready_time=-HOUR, using=alias)
    assert "It is number 2 of 3 waiting tasks" in why(task)[1]
    found = {one.pk: explain(one).facts["position"] for one in (other, task, later)}
    assert list(found.values()) == [1, 2, 3]


@both
def test_a_lease_is_held_or_ran_out(alias: str) -> None:
    poller(alias)
    task = enqueue(QUEUE, using=alias)
    lease = queue(QUEUE, using=alias).take()
    assert lease is not None
    code, sentence = why(task)
    assert code == "leased" and " has held the lease for " in sentence and "; the lease ends in " in sentence
    age(HOUR, using=alias)
    assert why(task)[0] == "lease_expired" and "the next checkout takes the task over" in why(task)[1]
    Task.objects.using(alias).update(max_attempts=1)
    age(-HOUR, using=alias, model=Poller)
    assert why(task)[0] == "lease_expired" and "a poller will write ERROR" in why(task)[1]
    Poller.objects.using(alias).all().delete()
    assert why(task)[0] == "no_poller"


@both
def test_its_time_to_live_is_over(alias: str) -> None:
    task = enqueue(QUEUE, ttl=MINUTE, using=alias)
    age(HOUR, using=alias)
    pause([QUEUE], by="ada", using=alias)
    assert why(task)[0] == "expired" and why(task)[1].startswith("Its time to live ended 59m")


@both
def test_all_attempts_are_used(alias: str) -> None:
    assert why(make_task(attempt=5, max_attempts=5, using=alias))[0] == "attempts_used"


@both
def test_it_has_finished(alias: str) -> None:
    task = make_task(Status.ERROR, process_result="ValueError: password=hunter2", using=alias)
    age(MINUTE, using=alias)
    code, sentence = why(task)
    assert code == "finished" and sentence.startswith("The task ended in ERROR 1m") and "hunter2" not in sentence
    # A result needs the permission to see payloads
    assert "secret" not in str(explain(make_task(Status.COMPLETED, process_result="secret", using=alias)).document)
    # It moved to the history
    Task.objects.using(alias).filter(pk=task.pk).housekeep(older_than=timedelta(0))
    assert explain(task).facts["status"] == "ERROR" and why(task)[1].endswith("It is in the history.")
    assert explain(TaskHistory.objects.using(alias).get()).code == "finished"
    # It was deleted
    TaskHistory.objects.using(alias).all().delete()
    assert why(task)[0] == "gone"


# -- every state, and the cost -----------------------------------------------------------------------------------------

TIMES = (-MINUTE, HOUR)
STRIDE = 7  # of 960 states: no number of values that a column has, so that each pair of values comes


@both
def test_each_state_of_a_task_has_its_sentence(alias: str) -> None:
    """Whatever the constraints let a row be, with and without pollers, it gets one sentence and a known code."""
    every = list(
        product(
            Status, TIMES, (None, *TIMES), (None, "group", "no handler for x", "unreadable: x"), (None, "g"),
            (None, "nobody"), (0, 5),
        )
    )  # fmt: skip
    wrong, tasks = [], []
    for status, due, expires, parked, group, tag, attempt in every[alias == "sqlite" :: STRIDE]:
        columns = {
            "next_process_time": due, "expire_time": expires, "parked_by": parked, "group_key": group, "tag": tag,
            "attempt": attempt,
        }  # fmt: skip
        with suppress(IntegrityError), transaction.atomic(using=alias):
            tasks.append(make_task(status, using=alias, **columns))
    assert len(tasks) > 40
    for served in (False, True):
        if served:
            poller(alias)
        for task in tasks:
            found = explain(task)
            json.dumps(found.document, default=str)
            if found.code not in CODES or not found.sentence or re.search(r"%\(|\n", found.sentence):
                wrong.append((task, found))
    assert wrong == []


@both
def test_the_cost_is_a_handful_of_statements(alias: str) -> None:
    for number in range(20):
        poller(alias, f"p{number}")
        enqueue(QUEUE, priority=number % 3, using=alias)
    task = enqueue(QUEUE, priority=2, using=alias)
    with CaptureQueriesContext(connections[alias]) as queries:
        assert explain(task).code == "waiting"
    assert len(queries) <= MAX_STATEMENTS, [query["sql"] for query in queries]


def test_the_last_reason_always_holds() -> None:
    assert REASONS[-1].__name__ == "_waiting"


@pytest.mark.django_db(transaction=True)
def test_a_real_poller_reports_its_tags_and_types() -> None:
    with polling({"parcels": 1}, tags=("host-1",)):
        until(lambda: Poller.objects.filter(state="RUNNING").exists())
        assert why(enqueue(QUEUE, tag="host-2", delay=HOUR))[0] == "no_tag"
        assert why(enqueue(QUEUE, tag="host-1", delay=HOUR))[0] == "not_due"
        assert why(make_task(payload_type="Alien", ready_time=HOUR))[0] == "no_processor"


# -- where it is shown -------------------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_the_command_line_shows_it() -> None:
    task = enqueue(QUEUE)
    out = StringIO()
    call_command("taskqueue", "show", str(task.pk), stdout=out, no_color=True)
    assert "now  No living poller serves queue parcels." in out.getvalue()
    out = StringIO()
    call_command("taskqueue", "show", str(task.pk), "--json", stdout=out)
    assert json.loads(out.getvalue())["explanation"]["code"] == "no_poller"
