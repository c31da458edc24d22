"""``runtaskpoller --executor spark``: on this machine; tests/pipeline/test_cluster.py has a cluster."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from django_dbtaskqueue.flow.enqueue import enqueue
from django_dbtaskqueue.models import Attempt, Task
from tests.conftest import REPOSITORY, ProcessDatabase
from tests.contrib.clusters import LONG_S
from tests.patience import PATIENCE
from tests.support import until
from tests.testapp.models import Booking

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow
POLLER = [
    "runtaskpoller",
    "--executor",
    "spark",
    "--queue",
    "work,atomic,claims",
    "--drain",
    "--shutdown-timeout",
    "2m",
]

QUICK = "extraJavaOptions=-XX:TieredStopAtLevel=1"  # half the start


def tasks(queue: str) -> dict[str, Task]:
    return {str(task.reference): task for task in Task.objects.filter(queue=queue)}


def test_every_task_runs_on_a_worker_once_and_is_settled_there(
    postgres_process_database: ProcessDatabase, tmp_path: Path
) -> None:
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
    log = postgres_process_database.run(*POLLER, "--master", "local[2]", "--conf", f"spark.driver.{QUICK}").stderr
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


def test_workers_of_another_database_start_nothing_and_say_so(
    postgres_process_database: ProcessDatabase, tmp_path: Path
) -> None:
    for number in range(20):
        enqueue("work", f"ok-{number}", {"result": number})
    other = {**postgres_process_database.env, "DATABASE_URL": f"sqlite:///{tmp_path}/other.sqlite3"}
    manage, log = [sys.executable, str(REPOSITORY / "manage.py")], tmp_path / "poller"
    subprocess.run([*manage, "migrate", "--verbosity", "0"], env=other, cwd=REPOSITORY, check=True)
    wrong = f"spark.executorEnv.DATABASE_URL={other['DATABASE_URL']}"
    command = [*manage, *POLLER, "--master", "local[2]", "--conf", wrong, "--conf", f"spark.driver.{QUICK}"]
    with log.open("wb") as file:
        poller = subprocess.Popen(
            command, env=postgres_process_database.env, cwd=REPOSITORY, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        until(
            lambda: "is gone; its outcome" in log.read_text() or "is not the poller's" in log.read_text(),
            timeout=LONG_S,
        )
        poller.terminate()
        poller.wait(PATIENCE)
    finally:
        poller.kill()
        poller.wait()
    said = log.read_text()
    assert "The database 'default' of this Spark worker is not the poller's: it is" in said
    assert "Traceback" not in said and "\tat " not in said
    assert "No task was started" in said and "is gone; its outcome" not in said
    assert {(task.status, task.attempt) for task in Task.objects.all()} == {("CREATED", 0)}
    assert not Attempt.objects.exists()
