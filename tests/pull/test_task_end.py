"""``task.wait()`` and ``task.await_result()``: woken by the end of the task, whatever ends it."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction

from django_dbtaskqueue import Complete, Poison, enqueue, queue
from django_dbtaskqueue.core.context import wake_listeners
from django_dbtaskqueue.core.exceptions import TaskFailed, TaskGone
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.pull import blocking
from tests.conftest import ProcessDatabase
from tests.flow.conftest import alias as alias
from tests.operations.site import refused
from tests.poller.processes import runtaskpoller
from tests.pull.conftest import Configure
from tests.support import PATIENCE, Actor, actors, taken_back, until

MOMENT = timedelta(milliseconds=50)  # that passes in vain
pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "sqlite"])


@pytest.fixture
def actor() -> Iterator[Actor]:
    with actors(1) as (made,):
        yield made


@pytest.fixture(autouse=True)
def _nobody_is_left() -> Iterator[None]:
    yield
    assert not blocking._waiting


def waited_for(alias: str, actor: Actor, wait: Callable[..., Any] = Task.wait) -> tuple[Task, Future[Any]]:
    task = enqueue("mail", using=alias)
    future = actor.do(wait, task, PATIENCE)
    until(Task.objects.using(alias).filter(watched=True).exists)
    return task, future


def end(task: Task, outcome: Any) -> None:
    lease = queue("mail", using=task._state.db).take()
    assert lease is not None and lease.id == task.pk
    lease._settle(outcome)


@pytest.mark.parametrize("wait", [Task.wait, async_to_sync(Task.await_result)], ids=["sync", "async"])
@pytest.mark.parametrize("keep", ["keep", "history"])
def test_the_result_is_returned_when_it_ends(alias: str, actor: Actor, configure: Any, keep: str, wait: Any) -> None:
    configure(keep=keep)
    task, future = waited_for(alias, actor, wait)
    end(task, Complete({"said": 7}))
    assert future.result(PATIENCE) == {"said": 7}
    assert task.wait(0) == {"said": 7}  # it has ended: at once


def test_a_failure_is_raised_with_its_text(alias: str, actor: Actor) -> None:
    task, future = waited_for(alias, actor)
    end(task, Poison("a bad address"))
    with pytest.raises(TaskFailed, match="ended in POISON: a bad address") as raised:
        future.result(PATIENCE)
    assert (raised.value.task_id, raised.value.status, raised.value.text) == (task.pk, "POISON", "a bad address")


def test_a_task_that_was_deleted_says_so(alias: str, actor: Actor, configure: Configure) -> None:
    configure(keep="delete")
    task, future = waited_for(alias, actor)
    end(task, Complete("lost"))
    refused('its queue has keep="delete", or it was deleted', future.result, PATIENCE, error=TaskGone)


def test_a_task_that_was_rolled_back_is_not_the_next_one_with_its_id(alias: str) -> None:
    with taken_back(alias):
        task = enqueue("mail", using=alias)
    other = enqueue("mail", using=alias)
    Task.objects.using(alias).update(create_time=task.create_time + timedelta(seconds=1))
    end(other, Complete("of another"))
    refused(None, task.wait, 0, error=TaskGone)


@pytest.mark.parametrize("wait", [Task.wait, async_to_sync(Task.await_result)], ids=["sync", "async"])
def test_a_timeout_leaves_the_task_alone(alias: str, wait: Any) -> None:
    task = enqueue("mail", using=alias)
    refused(r"has not ended in time\. It goes on", wait, task, MOMENT, error=TimeoutError)
    end(task, Complete("done"))
    assert task.wait() == "done"


def test_inside_a_transaction_it_would_never_end(alias: str) -> None:
    with transaction.atomic(using=alias):
        task = enqueue("mail", using=alias)
        refused(r"inside a transaction would never end.*Wait after the transaction", task.wait, PATIENCE)
    end(task, Complete())
    with transaction.atomic(using=alias):
        assert task.wait(0) is None


def test_without_notifications_the_waiter_looks_by_itself(alias: str, actor: Actor, settings: Any) -> None:
    settings.DBTASKQUEUE = {**settings.DBTASKQUEUE, "NOTIFY": False}
    task, future = waited_for(alias, actor)
    wake_listeners.discard(blocking.wake)  # as if another process ended the task
    end(task, Complete("found"))
    assert future.result(PATIENCE) == "found"


def test_a_locked_row_does_not_hold_the_waiter(actor: Actor) -> None:
    """A processor that settles inside a long transaction of its own."""
    task = enqueue("mail")
    with transaction.atomic():
        Task.objects.select_for_update().get(pk=task.pk)
        refused(None, actor.do(task.wait, MOMENT).result, PATIENCE, error=TimeoutError)


def test_no_more_wait_than_the_limit(alias: str, actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking, "MAX_WAITERS", 1)
    task, future = waited_for(alias, actor)
    refused("1 threads and coroutines of this process wait", task.wait, PATIENCE)
    end(task, Complete(1))
    assert future.result(PATIENCE) == 1


def test_many_coroutines_wait_on_one_thread(actor: Actor) -> None:
    tasks = [enqueue("mail") for _ in range(40)]

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(task.await_result(PATIENCE) for task in tasks))

    def end_all() -> int:
        until(lambda: Task.objects.filter(watched=True).count() == 40)
        threads = threading.active_count()
        for task in tasks:
            end(task, Complete(task.pk))
        return threads

    ending = actor.do(end_all)
    assert async_to_sync(all_of_them)() == [task.pk for task in tasks]
    assert ending.result(PATIENCE) < 20


def test_a_notification_that_names_no_task_breaks_no_listener() -> None:
    for name in ("mail", "ended nonsense", "ended ", "ended 1e9", f"ended {'9' * 5000}"):
        blocking.wake(name)  # what it raised would end the listening of all waiters of this process


def test_another_process_wakes_the_waiter(monkeypatch: Any, postgres_process_database: ProcessDatabase) -> None:
    monkeypatch.setattr(blocking, "SAFETY_LOOK_S", 2 * PATIENCE)
    with runtaskpoller(postgres_process_database, "--queue", "work") as poller:
        poller.until_logged("work")
        assert enqueue("work", payload={"do": "ok", "result": 7}).wait(PATIENCE) == 7
        poller.stop()
