"""The doctor: each illness is seen when it is there, and not when it is not."""

from datetime import timedelta
from typing import Any

import pytest
from django.core.checks import run_checks
from django.db import transaction
from django.utils import timezone

from django_dbtaskqueue import enqueue, registry
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.models import Poller, Queue, Task, TaskHistory
from django_dbtaskqueue.operations import doctor
from django_dbtaskqueue.operations.doctor import Finding, examine
from tests.conftest import ProcessDatabase
from tests.factories import make_task
from tests.operations.site import held, sql
from tests.support import until

HOUR = timedelta(hours=1)
OWN = {"database.durability", "database.pinned", "database.dead_rows"}  # of the server that the tests run on


@pytest.fixture(autouse=True)
def _parcels(settings: Any, taskqueue_registry: None) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {}}}
    registry.register("parcels", lambda task: None)


def checked() -> list[Any]:
    return run_checks(tags=["dbtaskqueue"])


def found(alias: str = "default") -> dict[str, Finding]:
    return {finding.id: finding for finding in examine(alias) if finding.id not in OWN}


def poller(alias: str = "default", *queues: str, **columns: Any) -> None:
    served = [{"queue": queue, "weight": 1} for queue in queues or ["parcels"]]
    Poller.objects.using(alias).create(instance=f"host:{len(queues)}", state="RUNNING", queues=served, **columns)


def test_nothing_is_found_where_nothing_is_wrong(alias: str, settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {}}, "NOTIFY": False}
    poller(alias)
    enqueue("parcels", using=alias)
    assert found(alias) == {}


def test_a_poller_that_reports_but_takes_nothing(alias: str) -> None:
    make_task(ready_time=-HOUR, using=alias)
    poller(alias, slots=4)
    served = [{"queue": "parcels", "weight": 1, "idle_seconds": 75}]
    Poller.objects.using(alias).update(queues=served)
    assert "took nothing from parcels for 1m15s" in found(alias)["poller.stuck"].words
    # ... unless it has no free slot, or took something since
    Poller.objects.using(alias).update(held=4)
    assert "poller.stuck" not in found(alias)
    Poller.objects.using(alias).update(held=0, queues=[{**served[0], "idle_seconds": 30}])
    assert "poller.stuck" not in found(alias)


def test_queues_and_pollers(alias: str) -> None:
    make_task(ready_time=-HOUR, using=alias)
    assert found(alias)["queue.no_poller"].level == "error"
    assert "--queue parcels" in found(alias)["queue.no_poller"].remedy
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
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {}}}
    Queue.objects.create(name="parcels", overrides={"leese": "1m"})
    assert "leese" in found()["settings.overrides"].words
    monkeypatch.setitem(settings.DATABASES["default"]["OPTIONS"], "isolation_level", 4)
    assert "SERIALIZABLE" in found()["database.isolation"].words
    assert [check.id for check in checked()] == ["dbtaskqueue.W002"]
    monkeypatch.undo()
    before = settings.INSTALLED_APPS
    settings.INSTALLED_APPS = [name for name in before if name != "django_tables2"]
    (error,) = checked()
    assert error.id == "dbtaskqueue.E007" and "Add 'django_tables2' to INSTALLED_APPS" in str(error.hint)
    settings.INSTALLED_APPS = [name for name in before if name not in ("django_tables2", "django.contrib.admin")]
    assert not checked()


def test_an_index_that_is_missing_comes_with_the_statement_that_makes_it() -> None:
    sql("DROP INDEX dbtaskqueue_task_rdy")
    missing = found()["database.index"]
    assert "dbtaskqueue_task_rdy" in missing.words
    assert missing.remedy.startswith('CREATE INDEX CONCURRENTLY "dbtaskqueue_task_rdy" ON "dbtaskqueue_task"')
    sql(missing.remedy.replace(" CONCURRENTLY", ""))
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
        raw: Any = wakeup._session.connection.connection
        if raw is not None:
            times.update(sql("SELECT query_start FROM pg_stat_activity WHERE pid = %s", [raw.info.backend_pid]))
        return len(times) > 3

    wakeup.start()
    try:
        until(probed)
        assert "poller.deaf" not in found()
    finally:
        wakeup.stop()


def test_old_transactions_dead_rows_and_no_migrations(
    postgres_process_database: ProcessDatabase, monkeypatch: Any
) -> None:
    def found_now() -> list[str]:
        return [finding.id for finding in examine()]

    monkeypatch.setattr(doctor, "MAX_TRANSACTION_S", -1)
    monkeypatch.setattr(doctor, "MIN_DEAD_ROWS", 0)
    reading = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM dbtaskqueue_task"
    with held(lambda: sql(reading)):
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
