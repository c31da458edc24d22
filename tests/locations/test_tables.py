"""Queues with a table of their own, under any name; and temporary queues."""

from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import connection

from django_dbtaskqueue import DuplicateTask, LeaseLost, enqueue, enqueue_many, registry
from django_dbtaskqueue.db.session import model_named
from django_dbtaskqueue.models import Attempt, Step, Task, TaskHistory, TemporaryTask
from django_dbtaskqueue.operations.housekeeping import Housekeeper, RetentionPolicy
from django_dbtaskqueue.testing import run_poller
from tests.flow.conftest import alias as alias
from tests.testapp.models import Parcel

LEASE = timedelta(seconds=60)
LOCATION = "testapp.parcel"
pytestmark = pytest.mark.django_db(databases=["default", "sqlite"])


@pytest.fixture(autouse=True)
def own_table(settings: Any, taskqueue_registry: None) -> None:
    """The queue ``parcels`` lives in ``Parcel``; ``fleeting`` is temporary."""
    own = {"model": "testapp.Parcel"}
    queues = {"parcels": own, "archived": {**own, "keep": "history"}, "fleeting": {"temporary": True}, "usual": {}}
    settings.DBTASKQUEUE = {"QUEUES": queues}


def parcels(alias: str) -> Any:
    return Parcel.objects.db_manager(alias)


def test_the_whole_road_in_a_table_of_ones_own(alias: str) -> None:
    task = enqueue("archived", "p1", {"to": "Berlin"}, using=alias)
    assert isinstance(task, Parcel) and (task.reference, task.weight) == ("p1", 1)
    assert not Task.objects.using(alias).exists()
    first = parcels(alias).checkout("archived", poller_instance="a", lease=LEASE)[0]
    first.fail("dropped", delay=timedelta(0))
    second = parcels(alias).checkout("archived", poller_instance="b", lease=LEASE)[0]
    with pytest.raises(LeaseLost):
        first.complete()
    second.complete("delivered")
    moved = TaskHistory.objects.using(alias).get()
    assert (moved.task_id, moved.reference, moved.result, moved.location) == (task.pk, "p1", "delivered", LOCATION)
    attempt = Attempt.objects.using(alias).get()
    assert (attempt.location, attempt.task_id) == (LOCATION, task.pk)


def test_verbs_groups_and_history_work_there(alias: str) -> None:
    enqueue_many("parcels", ({"reference": f"p{n}", "group": "van"} for n in range(3)), using=alias)
    with pytest.raises(DuplicateTask):
        enqueue("parcels", "p0", using=alias)
    head = parcels(alias).checkout("parcels", poller_instance="a", limit=5)
    assert [lease.reference for lease in head] == ["p0"]
    head[0].fail("lost", retry=False)
    assert (parcels(alias).mark_poison(), parcels(alias).kick(5), parcels(alias).cancel()) == (1, 1, 3)
    assert parcels(alias).housekeep(older_than=timedelta(0)) == 3
    assert set(TaskHistory.objects.using(alias).values_list("location", flat=True)) == {LOCATION}


def test_housekeeping_of_one_table_leaves_the_steps_of_another(alias: str) -> None:
    task = enqueue("usual", using=alias)
    [lease] = Task.objects.db_manager(alias).checkout("usual", poller_instance="a")
    lease.step("weigh", lambda: 7)
    Housekeeper().turn(RetentionPolicy(), using=alias)
    assert Step.objects.using(alias).get().task_id == task.pk


@pytest.mark.django_db(databases=["default", "sqlite"], transaction=True)
def test_one_poller_serves_queues_of_several_tables(alias: str) -> None:
    seen: list[str | None] = []
    for queue in ("parcels", "fleeting", "usual"):
        registry.register(queue, lambda task: seen.append(task.queue))
        enqueue(queue, "r", using=alias)
    with run_poller("parcels", "fleeting", "usual", using=alias):
        pass
    assert sorted(map(str, seen)) == ["fleeting", "parcels", "usual"]
    assert parcels(alias).get().status == "COMPLETED"
    assert TemporaryTask.objects.using(alias).get().status == "COMPLETED"


def test_a_temporary_queue_is_unlogged_and_an_ordinary_one_is_not() -> None:
    enqueue("fleeting", "r")
    with connection.cursor() as cursor:
        cursor.execute("SELECT relname, relpersistence FROM pg_class WHERE relname ~ '^dbtaskqueue_(temporary)?task$'")
        assert dict(cursor.fetchall()) == {"dbtaskqueue_task": "p", "dbtaskqueue_temporarytask": "u"}


def test_a_table_that_is_none_is_refused_at_start(settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {"model": "testapp.Booking"}}}
    with pytest.raises(SystemCheckError, match=r"Queue 'parcels'.*AbstractTask.*E003|E003.*parcels"):
        call_command("check")


def test_names_that_would_need_quoting_are_an_error_and_never_stripped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Parcel._meta, "db_table", 'parcel"; DROP TABLE x')
    model_named.cache_clear()
    with pytest.raises(ImproperlyConfigured, match="cannot be a table's or column's name"):
        model_named("testapp.Parcel")
    model_named.cache_clear()
