"""Housekeeping: what is old leaves, is counted, and nobody waits for it."""

from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from django.utils import timezone

from django_dbtaskqueue import processor, signals
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.states import COMPLETED, CREATED, ERROR, POISON, PROCESSING
from django_dbtaskqueue.db import storage
from django_dbtaskqueue.models import Attempt, AuditEntry, BulkOperation, Task, TaskChange, TaskHistory
from django_dbtaskqueue.operations.housekeeping import HISTORY_TABLE, Housekeeper, RetentionPolicy
from django_dbtaskqueue.testing import drain
from tests.conftest import ProcessDatabase
from tests.factories import make_task
from tests.operations.site import refused
from tests.poller.processes import polling
from tests.support import at_once, counted, held, minute_counts, sql, until, with_settings

DAY = timedelta(days=1)
_settings = with_settings(QUEUES={"parcels": {}, "elsewhere": {"database": "sqlite"}})


def old(status: str, days: float, alias: str = "default", **columns: Any) -> Task:
    then = timezone.now() - days * DAY
    return make_task(status, create_time=then, finish_time=then, last_update_time=then, using=alias, **columns)


def test_each_status_leaves_at_its_own_age(alias: str) -> None:
    for status, days in product((COMPLETED, ERROR, POISON), (1, 10, 20)):
        old(status, days, alias, reference=f"{status}-{days}")
    for status in (CREATED, PROCESSING, COMPLETED):
        late = make_task(status, create_time=timezone.now() - 90 * DAY, reference=status, using=alias)
    report = Housekeeper().turn(RetentionPolicy(completed=7 * DAY, poison=14 * DAY), using=alias)
    assert (report.moved, report.deleted, report.over) == (3, 0, True)
    gone = {"COMPLETED-10", "COMPLETED-20", "POISON-20"}
    assert set(TaskHistory.objects.using(alias).values_list("reference", flat=True)) == gone
    assert late.reference in set(Task.objects.using(alias).values_list("reference", flat=True))
    assert counted(alias) == 12
    for policy, deleted in ((RetentionPolicy(completed=7 * DAY), 0), (RetentionPolicy(error=7 * DAY), 2)):
        assert Housekeeper().turn(policy, using=alias, to="delete").deleted == deleted
    assert counted(alias) == 12


def test_a_turn_goes_through_many_batches_and_past_tasks_that_may_not_go_yet(alias: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("django_dbtaskqueue.flow.retention.ROWS_PER_BATCH", 3)
    then = timezone.now() - 10 * DAY
    for number in range(20):
        finish = then if number % 2 else timezone.now()
        make_task(COMPLETED, create_time=then, finish_time=finish, reference=str(number), using=alias)
    housekeeper = Housekeeper()
    assert [housekeeper.turn(RetentionPolicy(completed=DAY), using=alias).moved for _twice in range(2)] == [10, 0]
    moved = TaskHistory.objects.using(alias).values("location", "finish_time", "status")
    assert all(row == {"location": "dbtaskqueue.task", "finish_time": then, "status": "COMPLETED"} for row in moved)


def test_history_and_attempts_end_in_turn(alias: str) -> None:
    for days in (1, 100):
        time, told = timezone.now() - days * DAY, {"attempt": 1, "total_attempt": 1, "message": str(days)}
        TaskHistory.objects.using(alias).create(queue="parcels", task_id=1, moved_time=time)
        Attempt.objects.using(alias).create(queue="parcels", task_id=1, finish_time=time, **told)
    policy = RetentionPolicy(history=30 * DAY, attempts=30 * DAY)
    turns = [Housekeeper().turn(policy, using=alias, queues=queues) for queues in (["letters"], None)]
    assert [(one.deleted, one.attempts) for one in turns] == [(0, 0), (1, 1)], "the first is of one queue"
    assert TaskHistory.objects.using(alias).get().moved_time > timezone.now() - 2 * DAY
    assert list(minute_counts("deletion", alias).values_list("queue", "count")) == [("parcels", 1)]
    assert [row.message for row in Attempt.objects.using(alias).all()] == ["1"]


def test_the_audit_ends_at_its_age_but_not_what_still_runs(alias: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("django_dbtaskqueue.flow.retention.ROWS_PER_BATCH", 2)
    operations = BulkOperation.objects.using(alias)
    ended, running, young = (
        operations.create(verb="reprocess", query=state, state=state, update_time=timezone.now() - days * DAY)
        for state, days in (("FINISHED", 400), ("RUNNING", 400), ("CANCELLED", 1))
    )
    for operation, days in ((running, 401), (ended, 400), (None, 400), (None, 400), (young, 1), (None, 1)):
        time = timezone.now() - days * DAY
        AuditEntry.objects.using(alias).create(actor="ada", verb="pause", operation=operation, time=time)
    entry, span = AuditEntry.objects.using(alias).latest("pk"), {"first_task_id": 1, "last_task_id": 1, "task_ids": [1]}
    for operation, days in ((ended, 400), (ended, 400), (ended, 400), (young, 1)):
        facts = {"time": timezone.now() - days * DAY, "skip_reason": "too young", **span}
        TaskChange.objects.using(alias).create(audit=entry, operation=operation, **facts)
    report = Housekeeper().turn(RetentionPolicy(audit=365 * DAY), using=alias)
    assert report.audit == 3 + 3 + 1 and "and 7 records of operators' actions" in str(report)
    left = AuditEntry.objects.using(alias).order_by("pk").values_list("operation__query", flat=True)
    assert list(left) == ["RUNNING", "CANCELLED", None]
    assert set(operations.values_list("query", flat=True)) == {"RUNNING", "CANCELLED"}
    assert [skip.operation_id for skip in TaskChange.objects.using(alias).all()] == [young.pk]
    assert Housekeeper().turn(RetentionPolicy(), using=alias).audit == 0
    assert RetentionPolicy.of_settings().audit == 365 * DAY


@pytest.mark.usefixtures("postgres_process_database")
def test_two_housekeepers_and_an_operator_at_once_lose_and_double_nothing() -> None:
    ids = [old(ERROR, 10).pk for _ in range(60)]
    with held(lambda: list(Task.objects.select_for_update().filter(pk__in=ids[:5]))):
        moved = at_once(2, lambda _index: Housekeeper().turn(RetentionPolicy(error=DAY)).moved)
    assert sum(moved) == TaskHistory.objects.count() == 55
    assert set(Task.objects.values_list("pk", flat=True)) == set(ids[:5]) and counted() == 60


@pytest.fixture
def history(postgres_process_database: ProcessDatabase, settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {}}}


def where(row: TaskHistory) -> str:
    ((table,),) = sql("SELECT tableoid::regclass::text FROM dbtaskqueue_taskhistory WHERE id = %s", [row.pk])
    return str(table)


def months() -> list[str]:
    return [month.name for month in storage.months(connection, HISTORY_TABLE)]


def test_history_lies_in_one_table_a_month_made_ahead_and_dropped_when_old(history: None) -> None:
    first, *others = storage.months(connection, HISTORY_TABLE)
    assert len(others) == storage.AHEAD
    row = TaskHistory.objects.create(queue="parcels", task_id=1)
    assert where(row) == first.name and first.first <= row.moved_time < first.end
    # A month that nobody made goes to the default partition, and from there into a partition of its own
    stray = TaskHistory.objects.create(queue="parcels", task_id=2, moved_time=first.first - 300 * DAY)
    assert where(stray) == f"{HISTORY_TABLE}_default"
    month = "FOR VALUES FROM ('2020-12-01+00') TO ('2021-01-01+00')"
    sql(f"CREATE TABLE {HISTORY_TABLE}_y2020m12 PARTITION OF {HISTORY_TABLE} {month}")
    sql(f"DROP TABLE {others[-1].name}")
    for queue in ("parcels", "parcels", "letters"):
        TaskHistory.objects.create(queue=queue, task_id=3, moved_time=datetime(2020, 12, 5, tzinfo=UTC))
    assert counted() == 5
    report = Housekeeper().turn(RetentionPolicy(history=90 * DAY))
    strays = f"{HISTORY_TABLE}_y{stray.moved_time.astimezone(UTC):%Ym%m}"
    assert (report.partitions, report.dropped) == ([strays, others[-1].name], [f"{HISTORY_TABLE}_y2020m12", strays])
    assert (report.deleted, counted()) == (4, 5)
    deleted = sorted(minute_counts("deletion").values_list("queue", "count"))
    assert deleted == [("letters", 1), ("parcels", 1), ("parcels", 2)]
    assert [found.pk for found in TaskHistory.objects.all()] == [row.pk]
    assert months() == [month.name for month in (first, *others)]


def test_months_without_a_housekeeper_move_out_of_the_default_partition(history: None) -> None:
    made, now = months(), timezone.now()
    for name in made:
        sql(f"DROP TABLE {name}")
    times = [now - number * 20 * DAY for number in range(6)]
    rows = [TaskHistory.objects.create(queue="parcels", task_id=1, moved_time=time) for time in times]
    assert {where(row) for row in rows} == {f"{HISTORY_TABLE}_default"}
    before = list(TaskHistory.objects.order_by("pk").values())
    report = Housekeeper().turn(RetentionPolicy())
    assert list(TaskHistory.objects.order_by("pk").values()) == before
    assert {where(row) for row in rows} <= set(report.partitions) and {*made} <= set(report.partitions)
    assert Housekeeper().turn(RetentionPolicy()).partitions == []
    assert where(TaskHistory.objects.create(queue="parcels", task_id=9)) == made[0]


def test_partitioning_keeps_rows_and_can_be_taken_back(history: None) -> None:
    rows = [TaskHistory.objects.create(queue="parcels", task_id=number).pk for number in range(3)]
    tables = MigrationExecutor(connection).loader.project_state([("dbtaskqueue", "0001_initial")]).apps
    step = storage.PartitionByMonth("taskhistory", "moved_time")
    state = type("State", (), {"apps": tables})()
    for change, partitioned in ((step.database_backwards, False), (step.database_forwards, True)):
        with connection.schema_editor() as editor:
            change("dbtaskqueue", editor, state, state)
        assert storage.is_partitioned(connection, HISTORY_TABLE) is partitioned
        assert sorted(TaskHistory.objects.values_list("pk", flat=True)) == rows
        rows.append(TaskHistory.objects.create(queue="parcels", task_id=9).pk)
        with connection.cursor() as cursor:
            names = connection.introspection.get_constraints(cursor, HISTORY_TABLE)
        assert {"dbtaskqueue_history_task", "dbtaskqueue_history_finished"} <= names.keys()


def test_a_poller_ends_what_holds_up_and_keeps_house_if_told(history: None, settings: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("django_dbtaskqueue.poller.heartbeat.FIRST_RETENTION_SECONDS", 0.05)
    (first, *_) = months()
    sql(f"DROP TABLE {first}")
    old(COMPLETED, 300)
    expired(queue="letters")
    with polling({"parcels": 1}):
        until(lambda: first in months())
        until(lambda: not Task.objects.filter(queue="letters", status=CREATED).exists())
    assert Task.objects.filter(status=COMPLETED).count() == 1
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {}}, "HOUSEKEEPING": "100ms"}
    with polling({"parcels": 1}):
        until(lambda: TaskHistory.objects.count() == 1)


def expired(alias: str = "default", **columns: Any) -> Task:
    then = timezone.now() - timedelta(minutes=5)
    return make_task(CREATED, create_time=then, using=alias, **{"queue": "parcels", "expire_time": then, **columns})


@pytest.mark.parametrize("how", ["poison", "delete"])
def test_expired_tasks_that_no_poller_takes_are_ended(alias: str, how: str, settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {"expired": how}, "elsewhere": {"database": "sqlite"}}}
    waiting = expired(alias)
    parked = expired(alias, parked_by="no handler for payload type Alien on queue parcels")
    held = make_task(PROCESSING, expire_time=waiting.expire_time, using=alias)
    later = make_task(CREATED, expire_time=timezone.now() + DAY, using=alias)
    assert Housekeeper().turn(RetentionPolicy(), using=alias).expired == 2
    left = Task.objects.using(alias).in_bulk()
    assert (left[held.pk].status, left[later.pk].status) == (PROCESSING, CREATED)
    if how == "delete":
        assert left.keys() == {held.pk, later.pk}
        assert sum(minute_counts("deletion", alias).values_list("count", flat=True)) == 2
    else:
        assert {left[pk].status for pk in (waiting.pk, parked.pk)} == {POISON}
        assert str(left[parked.pk].process_result).startswith("Expired at ")


@pytest.mark.parametrize(("how", "name"), [("poison", "poisoned"), ("delete", "deleted")])
def test_an_expired_task_ends_the_same_way_whoever_meets_it(
    alias: str, how: str, name: str, settings: Any, taskqueue_registry: None
) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {"expired": how}, "elsewhere": {"database": "sqlite"}}}
    processor("parcels")(lambda task: None)
    told, listener = list[str](), signals.Listener()
    listener.finished = lambda task: told.append(f"finished in attempt {task.attempt}")
    listener.executed = lambda task, outcome: told.append(type(outcome).__name__)
    signals.register(listener)
    found, then = [], timezone.now() - timedelta(minutes=5)
    for end in (lambda: drain("parcels", using=alias), lambda: Housekeeper().turn(RetentionPolicy(), using=alias)):
        task = expired(alias, expire_time=then, group_key="g")
        end()
        columns = ("status", "attempt", "total_attempt", "process_result", "parked_by", "final_status")
        found.append((list(Task.objects.using(alias).filter(pk=task.pk).values_list(*columns)), told[:]))
        told.clear()
    signals.unregister(listener)
    assert found[0] == found[1]
    assert found[0][1] == ["Poison" if how == "poison" else "CompleteDelete", "finished in attempt 1"]
    [metric] = minute_counts("outcome", alias)
    assert (metric.queue, metric.name, metric.count) == ("parcels", name, 1)


REFUSE = {
    "default": "ALTER TABLE dbtaskqueue_taskhistory ADD CONSTRAINT refuse CHECK (queue_name <> 'bad') NOT VALID",
    "sqlite": "CREATE TRIGGER refuse BEFORE INSERT ON dbtaskqueue_taskhistory WHEN NEW.queue_name = 'bad'"
    " BEGIN SELECT RAISE(ABORT, 'refused'); END",
}


def test_a_queue_that_raises_rests_and_stops_no_other(alias: str) -> None:
    for queue in ("bad", "good"):
        old(COMPLETED, 10, alias, queue=queue)
    sql(REFUSE[alias], alias=alias)
    house, policy = Housekeeper(), RetentionPolicy(completed=DAY)
    report = house.turn(policy, using=alias)
    assert (report.moved, [one.partition(":")[0] for one in report.failed]) == (1, [f"queue bad on {alias}"])
    assert house.turn(policy, using=alias).failed == [], "it rests"
    refused("queue bad", call_command, "housekeeptasks", "--completed=1d", f"--database={alias}", error=CommandError)


@pytest.mark.django_db(databases=["default", "sqlite"])
def test_the_command_says_what_it_did_and_wrong_settings_are_refused(capsys: Any, settings: Any) -> None:
    old(COMPLETED, 3)
    old(POISON, 30)
    for options, said in (
        (["--poison", "never", "--completed", "1d"], "moved 1 tasks to the history, deleted 0 tasks"),
        (["--delete", "--queue", "parcels"], "moved 0 tasks to the history, deleted 1 tasks"),
    ):
        call_command("housekeeptasks", "--database", "default", *options)
        assert said in capsys.readouterr().out
    assert counted() == 2
    for options, said in (
        *((["--queue", "parcel"], "Did you mean 'parcels'"), (["--database", "nowhere"], "no database 'nowhere'")),
        *((["--completed", "soon"], "soon"), (["--completed", "0s"], "more than 0")),
        (["--queue", "parcels", "--history", "1d"], "--history would delete rows of all queues"),
    ):
        refused(said, call_command, "housekeeptasks", "--database", "default", *options, error=CommandError)
    settings.DBTASKQUEUE = {"KEEP_POISON": "2d", "KEEP_COMPLETED": None}
    assert (RetentionPolicy.of_settings().poison, RetentionPolicy.of_settings().completed) == (2 * DAY, None)
    settings.DBTASKQUEUE = {"KEEP_POISON": timedelta(0)}
    refused(r"KEEP_POISON.*positive", conf.settings, error=ImproperlyConfigured)
