"""The doctor: each illness is seen when it is there, and not when it is not."""

from datetime import timedelta
from typing import Any, cast

import pytest
from django.core.checks import run_checks
from django.db import transaction
from django.utils import timezone

from django_dbtaskqueue import enqueue, registry
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.models import FailureGroup, MinuteCount, Poller, Queue, Task, TaskHistory
from django_dbtaskqueue.operations import doctor
from django_dbtaskqueue.operations.doctor import Finding, examine
from tests.factories import make_task
from tests.support import held, sql, until

HOUR = timedelta(hours=1)
OWN = {"database.durability", "database.pinned", "database.dead_rows"}  # of the server that the tests run on


@pytest.fixture(autouse=True)
def _parcels(settings: Any, taskqueue_registry: None) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {}}}
    registry.register("parcels", lambda task: None)


@pytest.fixture
def deaf(settings: Any) -> None:
    settings.DBTASKQUEUE |= {"NOTIFY": False}


def checked() -> list[Any]:
    return run_checks(tags=["dbtaskqueue"])


def found(alias: str = "default") -> dict[str, Finding]:
    return {finding.id: finding for finding in examine(alias) if finding.id not in OWN}


def poller(alias: str = "default", *queues: str, **columns: Any) -> None:
    served = [{"queue": queue, "weight": 1} for queue in queues or ["parcels"]]
    Poller.objects.using(alias).create(instance=f"host:{len(queues)}", state="RUNNING", queues=served, **columns)


def test_nothing_is_found_where_nothing_is_wrong(alias: str, deaf: None) -> None:
    poller(alias)
    enqueue("parcels", using=alias)
    assert found(alias) == {}


def test_a_poller_that_reports_but_takes_nothing(alias: str) -> None:
    make_task(ready_time=-HOUR, using=alias)
    poller(alias, slots=4)
    served = [{"queue": "parcels", "weight": 1, "idle_seconds": 75}]
    Poller.objects.using(alias).update(queues=["letters", *served])
    assert "took nothing from parcels for 1m15s" in found(alias)["poller.stuck"].words
    # ... unless it has no free slot, or took something since. What SQL wrote is no time
    odd = [{**served[0], "idle_seconds": one} for one in (30, "75", None, [75], 75.0, 10**30)]
    for change in ({"held": 4}, {"held": 0, "queues": [*odd, {**served[0], "queue": []}]}):
        Poller.objects.using(alias).update(**change)
        assert "poller.stuck" not in found(alias)


def test_queues_and_pollers(alias: str) -> None:
    make_task(ready_time=-HOUR, using=alias)
    assert found(alias)["queue.no_poller"].level == "error"
    assert found(alias)["queue.no_poller"].remedy == "python manage.py runtaskpoller"
    poller(alias)
    assert found(alias)["queue.late"].words.startswith("Queue parcels is late")
    Queue.objects.using(alias).create(name="parcels", paused_time=timezone.now())
    assert {"queue.paused"} <= found(alias).keys() and "queue.late" not in found(alias)
    poller(alias, "parcels", "letters")
    assert "serves letters" in found(alias)["poller.no_processor"].words
    Poller.objects.using(alias).update(heartbeat_time=timezone.now() - HOUR)
    assert "has not reported" in found(alias)["poller.silent"].words
    make_task(parked_by="no handler for payload type Alien on queue parcels", using=alias)
    assert "Alien" in found(alias)["task.parked"].words


def test_one_cause_is_one_finding(alias: str, deaf: None) -> None:
    """Queues that wait for the poller that died; then those that the new one does not serve."""
    for queue in ("parcels", "letters", "cards"):
        make_task(queue=queue, ready_time=-HOUR, using=alias)
    poller(alias, heartbeat_time=timezone.now() - HOUR)
    (finding,) = found(alias).values()
    waiting = "No poller is alive. 3 queues wait: cards, letters, parcels. Their oldest task has been due for 1h"
    assert finding.id == "queue.no_poller" and finding.words.startswith(waiting) and "host:0" in finding.words
    poller(alias, "parcels", "more")
    unserved = found(alias)["queue.no_poller"]
    assert unserved.remedy == "python manage.py runtaskpoller --queue cards --queue letters"
    assert unserved.queues == ("cards", "letters") and "Others take" in found(alias)["poller.silent"].remedy


def test_failures_that_are_new_or_more_than_before_and_errors_that_nobody_looks_at(alias: str, deaf: None) -> None:
    counts = MinuteCount.objects.using(alias)

    def count(name: str, number: int, ago: timedelta) -> None:
        counts.create(kind="outcome", queue="parcels", name=name, minute=timezone.now() - ago, count=number)

    def group(**columns: Any) -> None:
        times = {"first_seen": timezone.now(), "last_seen": timezone.now(), **columns}
        FailureGroup.objects.using(alias).create(queue="parcels", error_type="KeyError", **times)

    poller(alias)
    for name, number, ago in (("completed", 180, 5), ("retried", 20, 5), ("completed", 16, 0.5), ("failed", 4, 0.5)):
        count(name, number, ago * HOUR)
    group(fingerprint="old", first_seen=timezone.now() - 2 * HOUR)
    make_task("ERROR", using=alias)
    assert found(alias) == {}, "a tenth failed before, too, and few attempts say little"
    count("retried", 20, HOUR / 2)
    failing = found(alias)["queue.failing"]
    assert failing.level == "error" and failing.words.startswith("60 % of the attempts of parcels failed")
    assert "10 % in the day before" in failing.words
    group(fingerprint="new", message="password=hunter2 is wrong")
    new = found(alias)["failure.new"]
    assert new.level == "warning" and "KeyError: password=" in new.words and "hunter2" not in new.words
    assert "queue.failing" not in found(alias), "the new failure is why"
    counts.create(kind="failure", queue="parcels", name="new", count=10)
    assert found(alias)["failure.new"].level == "error"
    make_task("ERROR", finish_time=-2 * HOUR, using=alias)
    assert "task.left" not in found(alias), "the first one in ERROR is of this hour"
    Task.objects.using(alias).update(finish_time=timezone.now() - 2 * HOUR)
    FailureGroup.objects.using(alias).update(first_seen=timezone.now() - 2 * HOUR)
    counts.filter(queue="parcels").delete()
    assert found(alias).keys() == {"task.left"}, "when no failure is new any more, and nothing runs"
    assert "parcels (2)" in found(alias)["task.left"].words


def test_a_task_that_was_given_up_and_counts_that_no_sum_can_hold_hide_no_finding(alias: str, deaf: None) -> None:
    runs = {"task_id": 7, "queue": "parcels", "seconds": 900}
    poller(alias, running=[{**runs, "given_up": False}, "no task", {"given_up": 1}])
    assert found(alias) == {}
    Poller.objects.using(alias).update(running=[{**runs, "given_up": True}])
    assert "Task 7 of parcels was given up, and still runs on poller host:0" in found(alias)["task.runaway"].words
    make_task(queue="letters", ready_time=-HOUR, using=alias)
    times = dict.fromkeys(("first_seen", "last_seen"), timezone.now())
    FailureGroup.objects.using(alias).create(fingerprint="new", queue="cards", **times)
    for row in (("outcome", "parcels", "failed"), ("failure", "cards", "new"), ("call", "parcels", "put")) * 2:
        facts = dict(zip(("kind", "queue", "name"), row, strict=True))
        MinuteCount.objects.using(alias).create(count=2**63 - 1, **facts)
    assert {*found(alias)} == {"queue.no_poller", "queue.failing", "failure.new", "task.runaway"}


def test_a_starved_priority(alias: str, settings: Any) -> None:
    poller(alias)
    make_task(priority=0, using=alias)
    make_task(priority=7, ready_time=-HOUR, using=alias)
    assert "priority 7" in found(alias)["queue.starved"].words
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {"max_wait": "1m"}}}
    assert "queue.starved" not in found(alias)


def test_settings_that_make_no_sense_and_apps_that_are_missing_are_named(settings: Any, monkeypatch: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {"poll_interval": "1m", "idle_interval": "5s"}}, "PREPARE": False}
    assert "poll_interval" in found()["settings.contradiction"].words
    assert [check.id for check in checked()] == ["dbtaskqueue.W001", "dbtaskqueue.W003"]
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {"settle_interval": "1m", "lease": "90s", "ttl": "1ms"}}}
    assert len([check for check in checked() if check.id == "dbtaskqueue.W001"]) == 2
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {"database": "sqlite"}}}
    assert found()["database.apart"].level == "info"
    for alias in ("default", "sqlite"):
        monkeypatch.setitem(settings.DATABASES[alias], "TIME_ZONE", "Asia/Kolkata")
    assert [(one.id, "'sqlite' has the TIME_ZONE" in one.msg) for one in checked()] == [("dbtaskqueue.E014", True)]
    settings.DBTASKQUEUE = {"READ_ALIAS": {"default": "moon"}}
    assert [(one.id, "moon" in one.msg) for one in checked()] == [("dbtaskqueue.E013", True)]
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {}}}
    Queue.objects.create(name="parcels", overrides={"leese": "1m"})
    assert "leese" in found()["settings.overrides"].words
    monkeypatch.setitem(settings.DATABASES["default"]["OPTIONS"], "isolation_level", 4)
    assert "SERIALIZABLE" in found()["database.isolation"].words
    assert [check.id for check in checked()] == ["dbtaskqueue.W002"]
    monkeypatch.undo()
    before = settings.INSTALLED_APPS
    settings.INSTALLED_APPS = [name for name in before if name != "django_tables2"]
    assert [(one.id, "Add 'django_tables2' to" in one.hint) for one in checked()] == [("dbtaskqueue.E007", True)]
    settings.INSTALLED_APPS = [name for name in before if name not in ("django_tables2", "django.contrib.admin")]
    assert not checked()


def test_an_index_that_is_missing_comes_with_the_statement_that_makes_it() -> None:
    sql("DROP INDEX dbtaskqueue_task_rdy")
    missing = found()["database.index"]
    assert "dbtaskqueue_task_rdy" in missing.words
    assert missing.remedy.startswith('CREATE INDEX CONCURRENTLY "dbtaskqueue_task_rdy" ON "dbtaskqueue_task"')
    sql(missing.remedy.replace(" CONCURRENTLY", ""))
    sql("CREATE INDEX dbtaskqueue_task_payload_in ON dbtaskqueue_task (priority)")  # by taskqueue index
    for name in ("dbtaskqueue_task_rdy", "dbtaskqueue_task_payload_in"):
        assert "database.index" not in found()
        sql(f"UPDATE pg_index SET indisvalid = false WHERE indexrelid = '{name}'::regclass")
        broken = found()["database.index"]
        assert f'Index "{name}" of' in broken.words
        sql(broken.remedy.replace(" CONCURRENTLY", ""))
    assert "database.index" not in found()


def test_clocks_apart_deaf_pollers_and_a_history_without_a_month(monkeypatch: Any) -> None:
    poller()
    assert "no session listens" in found()["poller.deaf"].words
    monkeypatch.setattr(doctor, "MAX_CLOCK_SKEW", timedelta(seconds=-1))
    assert "apart" in found()["host.clock"].words
    TaskHistory.objects.create(queue="parcels", task_id=1, moved_time=timezone.now() - timedelta(days=2000))
    assert found()["history.default"].level == "warning"
    for (name,) in sql("SELECT relname FROM pg_class WHERE relname ~ '^dbtaskqueue_taskhistory_y.*m[0-9]+$'"):
        sql(f"DROP TABLE {name}")
    assert "tomorrow" in found()["history.month"].words


@pytest.mark.django_db(transaction=True)
def test_a_listener_that_probes_its_connection_is_not_deaf(monkeypatch: Any) -> None:
    monkeypatch.setattr(notify, "LISTEN_PROBE_INTERVAL_S", 0.02)
    poller()
    wakeup, times = notify.Wakeup("default", lambda queue: None), set[Any]()

    def probed() -> bool:
        if raw := cast(Any, wakeup._session.connection.connection):
            times.update(sql("SELECT query_start FROM pg_stat_activity WHERE pid = %s", [raw.info.backend_pid]))
        return len(times) > 3

    wakeup.start()
    try:
        until(probed)
        assert "poller.deaf" not in found()
    finally:
        wakeup.stop()


@pytest.mark.usefixtures("postgres_process_database")
def test_old_transactions_dead_rows_and_no_migrations(monkeypatch: Any) -> None:
    def found_now() -> list[str]:
        return [finding.id for finding in examine()]

    monkeypatch.setattr(doctor, "MAX_TRANSACTION_S", -1)
    monkeypatch.setattr(doctor, "MIN_DEAD_ROWS", 0)
    with held(lambda: sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM dbtaskqueue_task")):
        assert "database.pinned" in found_now()
    make_task().delete()
    until(lambda: "database.dead_rows" in found_now())
    sql("DELETE FROM django_migrations WHERE app = 'dbtaskqueue'")
    assert found_now() == ["database.migrations"]


def test_a_question_that_is_refused_is_a_finding(monkeypatch: Any) -> None:
    monkeypatch.setattr(doctor, "LISTENERS", "SELECT * FROM nowhere")
    poller()
    with transaction.atomic():
        assert "nowhere" in {finding.id: finding.words for finding in examine()}["doctor.refused"]
        assert not Task.objects.exists()
