"""``unique_over="history"``: a reference stays taken when its task has left the table."""

from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction

from django_dbtaskqueue import DuplicateTask, enqueue, enqueue_many, queue
from django_dbtaskqueue.models import Task, UsedReference
from django_dbtaskqueue.operations import lookup
from tests.flow.conftest import finish
from tests.support import at_once

pytestmark = pytest.mark.django_db(databases=["default", "sqlite"])
SETTINGS = {"once": {"unique_over": "history", "keep": "delete"}, "usual": {"keep": "delete"}}


@pytest.fixture(autouse=True)
def _queues(settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": SETTINGS}


def test_a_reference_stays_taken_when_its_task_is_gone(alias: str) -> None:
    for name in SETTINGS:
        enqueue(name, "r1", using=alias)
        finish(alias, name)
    assert enqueue("usual", "r1", using=alias).pk
    for on_duplicate in ("error", "replace"):
        with pytest.raises(DuplicateTask, match="a task that has left the table"):
            enqueue("once", "r1", on_duplicate=on_duplicate, using=alias)
    known = enqueue("once", "r1", on_duplicate="ignore", using=alias)
    assert (known.pk, known.queue, known.reference) == (None, "once", "r1")
    assert not Task.objects.using(alias).filter(queue="once").exists()
    # Another reference, and none, are free
    assert enqueue("once", "r2", using=alias).pk and enqueue("once", using=alias).pk


def test_a_task_in_the_table_is_a_duplicate_as_ever(alias: str) -> None:
    first = enqueue("once", "r1", {"n": 1}, using=alias)
    with pytest.raises(DuplicateTask) as refused:
        enqueue("once", "r1", using=alias)
    assert (refused.value.task_id, refused.value.status) == (first.pk, "CREATED")
    assert enqueue("once", "r1", on_duplicate="ignore", using=alias).pk == first.pk
    assert enqueue("once", "r1", {"n": 2}, on_duplicate="replace", using=alias).payload == {"n": 2}
    assert UsedReference.objects.using(alias).count() == 1


def test_many_at_once(alias: str) -> None:
    enqueue("once", "r1", using=alias)
    finish(alias, "once")
    items = [("r0", 0), ("r1", 1), ("r2", 2), (None, 3)]
    with pytest.raises(DuplicateTask, match=r"'r1'.*left the table"):
        enqueue_many("once", items, using=alias)
    assert UsedReference.objects.using(alias).count() == 1
    report = enqueue_many("once", items, on_duplicate="ignore", using=alias)
    assert (report.enqueued, report.ignored) == (3, 1)
    report = enqueue_many("once", items, on_duplicate="ignore", using=alias)
    assert (report.enqueued, report.ignored) == (1, 3)


def test_it_is_taken_exactly_if_the_callers_transaction_commits(alias: str) -> None:
    with pytest.raises(ZeroDivisionError), transaction.atomic(using=alias):
        enqueue("once", "r1", using=alias)
        raise ZeroDivisionError
    assert not UsedReference.objects.using(alias).exists()
    assert enqueue("once", "r1", using=alias).pk


def test_only_an_operators_deletion_frees_it() -> None:
    # By the verb, while the task is in the table
    enqueue("once", "r1")
    assert Task.objects.purge() == 1
    enqueue("once", "r1")
    # By reference, when the task is gone
    finish("default", "once")
    assert lookup.delete("once", "r1") is True
    assert lookup.delete("once", "r1") is False
    assert enqueue("once", "r1").pk
    # And not by retention
    (lease,) = Task.objects.checkout("once", poller_instance="a")
    lease.fail("lost", retry=False)
    assert Task.objects.housekeep(older_than=timedelta(0)) == 1
    with pytest.raises(DuplicateTask):
        enqueue("once", "r1")
    # A queue that is dropped leaves nothing
    queue("once").drop()
    assert not UsedReference.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_of_many_producers_at_once_one_has_it() -> None:
    def try_it(_: int) -> bool:
        try:
            return bool(enqueue("once", "r1").pk)
        except DuplicateTask:
            return False

    assert at_once(6, try_it).count(True) == 1
    finish("default", "once")
    assert at_once(6, try_it).count(True) == 0
