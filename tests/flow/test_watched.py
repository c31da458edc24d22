"""The end of a task that something waits for is told once, by whatever ended it."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction

from django_dbtaskqueue import enqueue
from django_dbtaskqueue.core.states import CREATED, ERROR, POISON, PROCESSING
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow import dependencies, move
from django_dbtaskqueue.flow.rescue import rescue
from django_dbtaskqueue.flow.settle_port import SettlePort
from django_dbtaskqueue.models import Task
from tests.factories import make_task
from tests.flow.conftest import taken

pytestmark = pytest.mark.django_db(databases=["default", "sqlite"], transaction=True)


@pytest.fixture
def told() -> Any:
    names: list[str] = []
    notify.listen(names.append)
    yield lambda: [int(name.removeprefix(notify.TASK_ENDED)) for name in names if name.startswith(notify.TASK_ENDED)]
    notify.unlisten(names.append)


def watched(alias: str) -> Task:
    task = enqueue("parcels", using=alias)
    Task.objects.using(alias).filter(pk=task.pk).update(watched=True)
    return task


def row(task: Task) -> dict[str, Any]:
    return Task.objects.using(task._state.db).values("status", "watched").get(pk=task.pk)


def test_an_outcome_tells_an_end_and_nothing_else(alias: str, told: Callable[[], list[int]], settings: Any) -> None:
    ended = []
    for verb, status in (("complete", "COMPLETED"), ("poison", "POISON"), ("fail", "CREATED")):
        task = watched(alias)
        getattr(taken(alias), verb)()
        assert row(task) == {"status": status, "watched": True if status == CREATED else None}
        ended += [] if status == CREATED else [task.pk]
        assert told() == ended
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {"keep": "delete"}}}
    task = watched(alias)
    taken(alias).complete()
    assert not Task.objects.using(alias).filter(pk=task.pk).exists()
    assert told() == [*ended, task.pk]


def test_an_end_is_told_after_its_commit(alias: str, told: Callable[[], list[int]]) -> None:
    task = watched(alias)
    with transaction.atomic(using=alias):
        taken(alias).complete()
        assert told() == []
    assert told() == [task.pk]


def test_an_operator_and_a_rescue_tell_an_end(alias: str, told: Callable[[], list[int]]) -> None:
    cancelled = watched(alias)
    assert move.change(Task.objects.using(alias), "cancel") == 1
    assert row(cancelled) == {"status": str(POISON), "watched": None}
    spent = {"attempt": 5, "max_attempts": 5, "next_process_time": -timedelta(seconds=1)}
    dead = make_task(PROCESSING, using=alias, watched=True, **spent)
    assert len(rescue(Session.on(alias), "parcels", SettlePort(alias))) == 1
    assert told() == [cancelled.pk, dead.pk]


def test_a_task_that_comes_back_is_watched_again(alias: str) -> None:
    """It was told that the task failed; something waits for another end."""
    for status, verb in ((ERROR, "reprocess"), (POISON, "kick")):
        task = make_task(status, using=alias, watched=False)
        assert move.change(Task.objects.using(alias), verb) == 1
        assert row(task) == {"status": str(CREATED), "watched": True}


def test_a_sweep_tells_what_a_dead_process_did_not(alias: str, told: Callable[[], list[int]]) -> None:
    ended = [make_task(POISON, using=alias, watched=True).pk for _ in range(3)]
    make_task(POISON, using=alias, watched=False)
    make_task(using=alias, watched=True)
    assert dependencies.sweep(Session.on(alias)) == 3
    assert told() == ended
    assert dependencies.sweep(Session.on(alias)) == 0
