"""The operator's verbs over any selection: what they say they changed is what they changed."""

import sqlite3
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections
from django.db.models import F, Q
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_dbtaskqueue import enqueue, signal
from django_dbtaskqueue.core.exceptions import TaskQueueError
from django_dbtaskqueue.core.states import COMPLETED, CREATED, ERROR, POISON, PROCESSING, TERMINAL
from django_dbtaskqueue.flow import move
from django_dbtaskqueue.models import Task, TaskHistory
from tests.factories import make_task
from tests.support import counted, minute_counts, sql, taken_back

pytestmark = pytest.mark.django_db(databases=["default", "sqlite"])
DAY = timedelta(days=1)
VERBS: dict[str, tuple[str, Callable[[Any], int]]] = {
    "reprocess": (ERROR, lambda tasks: tasks.reprocess()),
    "mark_poison": (ERROR, lambda tasks: tasks.mark_poison()),
    "unpoison": (POISON, lambda tasks: tasks.unpoison()),
    "kick": (POISON, lambda tasks: tasks.kick(100)),
    "cancel": (CREATED, lambda tasks: tasks.cancel()),
    "release_all": (PROCESSING, lambda tasks: tasks.release_all()),
    "purge": (ERROR, lambda tasks: tasks.purge()),
    "housekeep": (ERROR, lambda tasks: tasks.housekeep(older_than=timedelta(0))),
    "housekeep, deleting": (ERROR, lambda tasks: tasks.housekeep(older_than=timedelta(0), to="delete")),
}


def tasks_of(alias: str) -> Any:
    return Task.objects.using(alias)


def make_many(alias: str, number: int) -> Any:
    line = f"WITH RECURSIVE s(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM s WHERE i < {number}) SELECT 'parcels' FROM s"
    sql(f"INSERT INTO dbtaskqueue_task (queue_name) {line}", alias=alias)
    return tasks_of(alias)


SELECTIONS: dict[str, Callable[[Any], Any]] = {
    "filtered": lambda tasks: tasks.filter(priority__lt=3),
    "excluded": lambda tasks: tasks.exclude(priority__gte=3),
    "by an expression": lambda tasks: tasks.filter(Q(priority=0) | Q(priority=1) | Q(priority=F("max_attempts") - 3)),
    "ordered": lambda tasks: tasks.filter(priority__lt=3).order_by("-create_time"),
    "sliced": lambda tasks: tasks.order_by("priority")[:3],
    "sliced from the other end": lambda tasks: tasks.order_by("-priority")[3:6],
    "distinct": lambda tasks: tasks.filter(priority__lt=3).distinct(),
    "united": lambda tasks: tasks.filter(priority=0) | tasks.filter(priority__in=[1, 2]),
    "annotated": lambda tasks: tasks.annotate(double=F("priority") * 2).filter(double__lt=6),
    "some columns": lambda tasks: tasks.filter(priority__lt=3).only("id"),
    "evaluated before": lambda tasks: [chosen := tasks.filter(priority__lt=3), list(chosen)][0],
}


def test_a_verb_changes_its_selection_and_nothing_else(alias: str) -> None:
    wrong: list[Any] = []
    for verb, (status, change) in VERBS.items():
        with taken_back(alias):
            made = [make_task(status, priority=number, using=alias).pk for number in range(6)]
            before = {row["id"]: row for row in tasks_of(alias).values()}
            for selection, select in SELECTIONS.items():
                with taken_back(alias):
                    number = change(select(tasks_of(alias)))
                    after = {row["id"]: row for row in tasks_of(alias).values()}
                    untouched = [pk for pk in made if before[pk] == after.get(pk)]
                    if (number, untouched, counted(alias)) != (3, made[3:], 6):
                        wrong.append((verb, selection, number, untouched))
            for nothing in (tasks_of(alias).none(), tasks_of(alias).filter(queue="letters"), tasks_of(alias).all()[:0]):
                assert change(nothing) == 0
            assert before == {row["id"]: row for row in tasks_of(alias).values()}
            assert not minute_counts("deletion", alias).exists()
            counts = [change(tasks_of(alias)), change(tasks_of(alias).filter(status=status))]
            if counts != [6, 0]:
                wrong.append((verb, "twice", counts))
    assert wrong == []


def test_mark_poison_and_unpoison_keep_what_the_task_says(alias: str) -> None:
    task = make_task(ERROR, process_result="why", using=alias)
    before = tasks_of(alias).values().get()
    assert tasks_of(alias).mark_poison() == 1
    assert tasks_of(alias).get().status == POISON and tasks_of(alias).unpoison() == 1
    after = tasks_of(alias).values().get(pk=task.pk)
    assert {name for name in after if after[name] != before[name]} == {"last_update_time"}


def test_purge_counts_per_queue(alias: str) -> None:
    for queue, number in (("parcels", 3), ("letters", 2)):
        for status in ([CREATED, PROCESSING, COMPLETED])[:number]:
            make_task(status, queue=queue, using=alias)
    assert tasks_of(alias).purge() == 5
    assert sorted(minute_counts("deletion", alias).values_list("queue", "count")) == [("letters", 2), ("parcels", 3)]


@pytest.mark.parametrize("verb", ["cancel", "purge"])
def test_a_selection_larger_than_a_statement_may_have_parameters(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a tenth of the true size, which both bounds have."""
    monkeypatch.setattr(move, "IDS_PER_STATEMENT", move.IDS_PER_STATEMENT // 10)
    tasks, raw = make_many("sqlite", 3300), connections["sqlite"].connection
    before = raw.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 3276)
    assert VERBS[verb][1](tasks) == 3300
    raw.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, before)


@pytest.mark.parametrize("verb", ["cancel", "purge"])
def test_no_query_of_a_verb_reads_the_table_twice(verb: str) -> None:
    """While statistics call the table empty, PostgreSQL compares each row of one reading with each of the other."""
    make_many("default", 10)
    with CaptureQueriesContext(connections["default"]) as captured:
        assert VERBS[verb][1](tasks_of("default").filter(queue="parcels")) == 10
    assert [query["sql"] for query in captured if query["sql"].count('FROM "dbtaskqueue_task"') > 1] == []


@pytest.mark.parametrize("to", ["history", "delete"])
def test_housekeep_takes_finished_tasks_of_that_age_or_older(alias: str, to: str) -> None:
    now = timezone.now()
    for name, age in {"older": 3 * DAY, "exact": DAY, "younger": DAY - timedelta(minutes=5)}.items():
        make_task(COMPLETED, reference=name, finish_time=now - age, using=alias)
    # Without a finish time a task ages by its last update
    make_task(ERROR, reference="failed", finish_time=None, using=alias)
    make_task(ERROR, finish_time=None, last_update_time=-2 * DAY, using=alias)
    for status in (CREATED, PROCESSING):
        make_task(status, reference=status, last_update_time=now - 5 * DAY, using=alias)
    assert tasks_of(alias).housekeep(older_than=DAY, to=to) == 3
    assert set(tasks_of(alias).values_list("reference", flat=True)) == {"younger", "failed", CREATED, PROCESSING}
    assert TaskHistory.objects.using(alias).count() == (3 if to == "history" else 0)
    assert sum(minute_counts("deletion", alias).values_list("count", flat=True)) == (0 if to == "history" else 3)


def test_housekeep_may_be_limited_to_some_statuses_of_finished_tasks(alias: str) -> None:
    for status in TERMINAL:
        for each in TERMINAL:
            make_task(each, using=alias)
        assert tasks_of(alias).housekeep(older_than=timedelta(0), statuses=[status]) == 1
        assert tasks_of(alias).housekeep(older_than=timedelta(0), statuses=status) == 0
        assert not tasks_of(alias).filter(status=status).exists()
        tasks_of(alias).purge()
    for status in (CREATED, PROCESSING, "DONE"):
        with pytest.raises(TaskQueueError, match=f"{status}.*is not one"):
            tasks_of(alias).housekeep(older_than=DAY, statuses=[status])
    with pytest.raises(TaskQueueError, match="to='archive'"):
        tasks_of(alias).housekeep(older_than=DAY, to="archive")


def test_housekeep_goes_on_until_all_are_gone(alias: str, django_assert_max_num_queries: Any) -> None:
    make_many(alias, 2_100).update(status=COMPLETED, final_status=COMPLETED, ready_time=None)
    with django_assert_max_num_queries(100, using=alias):  # Django inserts few rows at a time on SQLite
        assert tasks_of(alias).housekeep(older_than=timedelta(0)) == 2_100
    assert not tasks_of(alias).exists() and TaskHistory.objects.using(alias).count() == 2_100


class ReadsElsewhere:
    """A router of a site with a replica: reads go to another database than writes."""

    db_for_read = staticmethod(lambda model, **hints: "sqlite")
    db_for_write = staticmethod(lambda model, **hints: "default")
    allow_relation = staticmethod(lambda *objects, **hints: True)


def test_no_verb_judges_by_a_replica(settings: Any) -> None:
    settings.DATABASE_ROUTERS = [ReadsElsewhere()]
    for verb, (status, change) in VERBS.items():
        with taken_back("default"):
            make_task(status, using="default")
            assert Task.objects.count() == 0
            assert (change(Task.objects.all()), counted("default"), counted("sqlite")) == (1, 1, 0), verb
    task = Task.objects.enqueue("parcels", "r")
    assert Task.objects.enqueue("parcels", "r", on_duplicate="ignore").pk == task.pk
    task._state.db = "sqlite"  # as if it was read from there
    child = enqueue("parcels", "child", after=task)
    assert (signal(task, "go"), child._state.db) == (False, "default")
    Task.objects.checkout("parcels", poller_instance="p")[0].complete(1)
    assert task.wait(0) == 1 and Task.objects.using("default").get(pk=task.pk).status == COMPLETED
