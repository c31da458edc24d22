"""Many producers of the same references: one task each, and every producer learns which."""

import random
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.db import connections, transaction
from django.utils import timezone

from django_dbtaskqueue import DuplicateTask, QueueFull, batch, enqueue, enqueue_many
from django_dbtaskqueue.flow.enqueue import ON_DUPLICATE
from django_dbtaskqueue.models import Task
from tests.clock import SteppedClock
from tests.flow.conftest import alias as alias
from tests.operations.site import refused
from tests.support import PATIENCE, actors, at_once, backend_pid, until, until_blocked

pytestmark = pytest.mark.django_db(databases=["default", "sqlite"], transaction=True)
REFERENCES = [f"r-{number:04}" for number in range(300)]  # so many that batches are copied


@pytest.mark.parametrize("on_duplicate", ["ignore", "replace"])
def test_overlapping_batches_do_not_wait_in_a_circle(alias: str, parcels: None, on_duplicate: str) -> None:
    def produce(index: int) -> int:
        reports = [
            enqueue_many("parcels", [(reference, index) for reference in items], on_duplicate=on_duplicate, using=alias)
            for items in (random.Random(10 * turn + index).sample(REFERENCES, len(REFERENCES)) for turn in range(3))
        ]
        assert {one.enqueued + one.ignored + one.replaced for one in reports} == {len(REFERENCES)}
        return sum(one.enqueued for one in reports)

    assert sum(at_once(4, produce)) == Task.objects.using(alias).count() == len(REFERENCES)


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("on_duplicate", ["ignore", "replace", "error"])
def test_a_reference_being_inserted_is_waited_for(parcels: None, end: str, on_duplicate: str) -> None:
    def second() -> int | str:
        try:
            return enqueue("parcels", "r", "second", on_duplicate=on_duplicate).pk
        except DuplicateTask as error:
            return f"refused for {error.task_id}"

    with actors(1) as (other,):
        pid = other.do(backend_pid).result(PATIENCE)
        with transaction.atomic():
            first = enqueue("parcels", "r", "first")
            answer = other.do(second)
            until_blocked(pid)
            assert not answer.done()
            transaction.set_rollback(end == "rollback")
        got = answer.result(PATIENCE)
    task = Task.objects.get()
    if end == "rollback":
        assert (got, task.payload) == (task.pk, "second") and task.pk != first.pk
    elif on_duplicate == "error":
        assert (got, task.payload) == (f"refused for {first.pk}", "first")
    else:
        assert (got, task.payload) == (first.pk, "second" if on_duplicate == "replace" else "first")


# -- a full queue: who waits for room gets it as soon as there is some, and not for ever -------------------------------
LONG = timedelta(seconds=2 * PATIENCE)


@pytest.fixture
def full(alias: str, settings: Any) -> str:
    """Return the database whose queue ``narrow`` has a task, and room for one."""
    settings.DBTASKQUEUE = {"QUEUES": {"narrow": {"capacity": 1}}}
    enqueue("narrow", "first", using=alias)
    return alias


@pytest.mark.parametrize("capacity", [1, 300])  # where it was lowered, a queue holds more
@pytest.mark.parametrize("how", [*ON_DUPLICATE, "unique", "debounce:1h"])
def test_a_duplicate_takes_no_room(alias: str, settings: Any, how: str, capacity: int) -> None:
    options: dict[str, Any] = {"using": alias, "on_duplicate" if how in ON_DUPLICATE else "unique": how}
    items = [{"reference": f"r{n}" if how in ON_DUPLICATE else None, "payload": n} for n in range(301)]
    enqueue_many("claims", items[:300], **options)
    settings.DBTASKQUEUE = {"QUEUES": {"claims": {"capacity": capacity}}}
    for again in (partial(enqueue, **items[0]), partial(enqueue_many, items=items[:300])):
        with pytest.raises(DuplicateTask) if how == "error" else nullcontext():
            again("claims", **options)
    refused(None, enqueue_many, "claims", items, error=QueueFull, **options)
    assert Task.objects.using(alias).count() == 300


@pytest.mark.parametrize("verb", ["reprocess", "kick", "retry"])
def test_an_operator_and_a_producer_do_not_wait_in_a_circle(settings: Any, verb: str) -> None:
    settings.DBTASKQUEUE, tasks = {"QUEUES": {"narrow": {"capacity": 9}}}, Task.objects.filter(group_key="g")
    with batch("b") as made:
        enqueue("narrow", group="g")
    (lease,) = Task.objects.checkout("narrow", poller_instance="p")
    lease.poison() if verb == "kick" else lease.fail(retry=False)
    act = {"reprocess": tasks.reprocess, "kick": partial(tasks.kick, 1), "retry": made.retry}[verb]
    with actors(1) as (operator,):
        pid = operator.do(backend_pid).result(PATIENCE)
        with transaction.atomic():
            enqueue("narrow")  # locks the queue
            done = operator.do(act)
            until_blocked(pid)
            enqueue("narrow", group="g")  # locks the group
        assert done.result(PATIENCE) == 1


@pytest.mark.parametrize("inside", [False, True])
def test_who_waits_gets_the_room_that_comes_free(full: str, inside: bool) -> None:
    """Inside a transaction of SQLite nobody else could make room: it is refused at once."""

    def second() -> Task:
        with transaction.atomic(using=full) if inside else nullcontext():
            return enqueue("narrow", "second", timeout=LONG, using=full)

    in_vain = inside and full == "sqlite"
    with actors(1) as (producer,):
        answer = producer.do(second)
        if not in_vain:
            Task.objects.db_manager(full).checkout("narrow", poller_instance="p")[0].complete()
        with pytest.raises(QueueFull) if in_vain else nullcontext():
            assert answer.result(PATIENCE).reference == "second"


@pytest.mark.parametrize("parked", [None, "no handler for payload type Alien"])
def test_a_task_past_its_time_to_live_takes_no_room(full: str, parked: str | None) -> None:
    past = timezone.now() - timedelta(minutes=1)
    first = Task.objects.using(full).filter(reference="first")
    first.update(expire_time=past, parked_by=parked, **({"ready_time": None} if parked else {}))
    enqueue("narrow", "second", using=full)
    refused(None, enqueue, "narrow", "third", using=full, error=QueueFull)


def test_who_waits_in_vain_is_told(full: str, clock: SteppedClock) -> None:
    looks: list[str] = []

    def wait() -> Task:
        with connections[full].execute_wrapper(lambda run, sql, *rest: looks.append(sql) or run(sql, *rest)):
            return enqueue("narrow", "second", timeout=LONG, using=full)

    with actors(1) as (producer,):
        second = producer.do(wait)
        until(lambda: len(looks) > 10)
        assert not second.done()
        clock.advance(LONG.total_seconds())
        refused("capacity of 1", second.result, PATIENCE, error=QueueFull)
