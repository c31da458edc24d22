"""``runtaskpoller --executor spark``: on this machine; tests/pipeline/test_cluster.py has a cluster."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from django_dbtaskqueue.flow.enqueue import enqueue
from django_dbtaskqueue.models import Attempt, Task
from tests.conftest import REPOSITORY, ProcessDatabase
from tests.contrib.clusters import LONG_S
from tests.patience import PATIENCE
from tests.poller.processes import runtaskpoller
from tests.support import until
from tests.testapp.models import Booking

pytestmark = pytest.mark.slow
POLLER = ["--executor", "spark", "--queue", "work,atomic,claims", "--drain", "--shutdown-timeout", "2m"]
QUICK = "extraJavaOptions=-XX:TieredStopAtLevel=1"  # half the start


def tasks(queue: str) -> dict[str, Task]:
    return {str(task.reference): task for task in Task.objects.filter(queue=queue)}


def test_every_task_runs_and_settles_on_a_worker(postgres_process_database: ProcessDatabase, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    for number in range(60):
        enqueue("work", f"ok-{number}", {"result": number, "mark": str(marks)})
        enqueue("atomic", f"book-{number}", {"do": "book"})
    enqueue("work", "again", {"do": "raise", "until_attempt": 2})
    enqueue("work", "never", {"do": "raise", "message": "no such flight"})
    enqueue("work", "later", {"do": "reenqueue"})
    enqueue("work", "self", {"do": "settle", "result": "by itself"})
    for number in range(3):
        enqueue("claims", f"claim-{number}", {"flight": "X", "passenger": "Ada"})  # a batch, in one transaction
    enqueue("atomic", "undone", {"do": "book", "then": {"do": "raise"}})
    options = [*POLLER, "--master", "local[2]", "--conf", f"spark.driver.{QUICK}"]
    log = postgres_process_database.run("runtaskpoller", *options).stderr
    work, atomic = tasks("work"), tasks("atomic")
    assert [work[f"ok-{number}"].result for number in range(60)] == list(range(60))
    assert set(Counter(line.split()[0] for line in marks.read_text().splitlines()).values()) == {1}
    assert {atomic[f"book-{number}"].status for number in range(60)} == {"COMPLETED"}
    booked = Booking.objects.values_list("reference", flat=True)
    assert Counter(booked) == Counter([*(f"book-{number}" for number in range(60)), "self"])
    assert (work["again"].status, work["again"].total_attempt) == ("COMPLETED", 2)
    assert (work["never"].status, work["never"].attempt) == ("ERROR", 3)
    assert "in _raise" in str(work["never"].process_result)  # the traceback is that of the worker
    assert (work["later"].status, work["later"].reenqueue_attempt) == ("COMPLETED", 1)
    assert (work["self"].status, work["self"].result) == ("COMPLETED", "by itself")
    assert atomic["undone"].status == "ERROR"
    claims = Attempt.objects.filter(queue="claims", attempt=1).values_list("error_type", "task_id")
    assert {kind.rpartition(".")[2] for kind, _ in claims} == {"DoesNotExist"}
    assert {pk for _, pk in claims} == {task.pk for task in tasks("claims").values()}
    assert "failed, 0 lost" in log


def test_workers_of_another_database_start_nothing(postgres_process_database: ProcessDatabase, tmp_path: Path) -> None:
    for number in range(20):
        enqueue("work", f"ok-{number}", {"result": number})
    other = {**postgres_process_database.env, "DATABASE_URL": f"sqlite:///{tmp_path}/other.sqlite3"}
    command = [sys.executable, str(REPOSITORY / "manage.py"), "migrate", "--verbosity", "0"]
    subprocess.run(command, env=other, cwd=REPOSITORY, check=True)
    wrong = f"spark.executorEnv.DATABASE_URL={other['DATABASE_URL']}"
    options = ["--master", "local[2]", "--conf", wrong, "--conf", f"spark.driver.{QUICK}"]
    with runtaskpoller(postgres_process_database, *POLLER, *options) as poller:
        told = ("is gone; its outcome", "is not the poller's")
        until(lambda: any(one in poller.log for one in told), timeout=LONG_S)
        poller.signal()
        poller.process.wait(PATIENCE)
        said = poller.log
    assert "The database 'default' of this Spark worker is not the poller's: it is" in said
    assert "Traceback" not in said and "\tat " not in said
    assert "No task was started" in said and "is gone; its outcome" not in said
    assert {(task.status, task.attempt) for task in Task.objects.all()} == {("CREATED", 0)}
    assert not Attempt.objects.exists()
