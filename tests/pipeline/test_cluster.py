"""Tasks and jobs on Spark, here and on a standalone cluster: what the page says, ``spark-submit``, a busy cluster."""

import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pyspark
import pytest

import django_dbtaskqueue.pipeline
from django_dbtaskqueue import enqueue
from django_dbtaskqueue.models import Attempt, Task
from django_dbtaskqueue.pipeline.spark import _default_master, find_java, scratch
from tests.conftest import REPOSITORY, ProcessDatabase
from tests.contrib.clusters import LONG_S, QUICK_JAVA, SETTINGS, Cluster
from tests.pipeline.commands import in_turn
from tests.poller.processes import manage, runtaskpoller
from tests.support import PATIENCE, until
from tests.testapp.models import Booking

POLLER = ["--executor", "spark", "--queue", "work,atomic,claims", "--drain", "--shutdown-timeout", "2m"]
QUICK = f"extraJavaOptions={QUICK_JAVA}"
PAGE, PAGE_MASTER = REPOSITORY / "docs" / "howto" / "spark-cluster.md", "spark://spark-1:7077"
PROGRAM = Path(django_dbtaskqueue.pipeline.__file__).with_name("__main__.py")


def tasks(queue: str) -> dict[str, Task]:
    return {str(task.reference): task for task in Task.objects.filter(queue=queue)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack, tmp_path_factory.mktemp("cluster"))


def workers_of_new_applications(folder: Path, seen: set[str]) -> set[str]:
    """Return the workers that ran an executor of an application which is not among those seen, and see it."""
    new = {path for path in folder.glob("work-*/app-*") if path.name not in seen}
    seen |= {path.name for path in new}
    return {path.parent.name for path in new}


def confs(*settings: str) -> list[str]:
    """Return options for a small driver on this machine, with these settings."""
    return [word for one in (*SETTINGS, f"driver.{QUICK}", *settings) for word in ("--conf", f"spark.{one}")]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_spark_submit_s_job_runs(postgres_process_database: ProcessDatabase, cluster: Cluster, tmp_path: Path) -> None:
    seen = {path.name for path in cluster.folder.glob("work-*/app-*")}
    orders = tmp_path / "orders.jsonl"
    orders.write_text("".join(f'{{"reference": "o{number}"}}\n' for number in range(20)))
    command = [
        *(str(Path(pyspark.__file__).parent / "bin" / "spark-submit"), "--master", cluster.url),
        *confs(f"executor.{QUICK}", "sql.parquet.compression.codec=snappy", f"executorEnv.PYTHONPATH={REPOSITORY}"),
        *(str(PROGRAM), "enqueue", "--input", str(orders), "--queue", "claims", "--map", "reference=reference"),
        # Options of the job, which once put the session on this machine's cores.
        *("--memory", "700m", "--conf", "spark.sql.shuffle.partitions=3"),
    ]
    env = {**postgres_process_database.env, "JAVA_HOME": str(find_java(scratch())), "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(command, env=env, cwd=tmp_path, text=True, capture_output=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "enqueued: 20" in done.stdout and Task.objects.count() == 20
    assert workers_of_new_applications(cluster.folder, seen) == {"work-0", "work-1"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_commands_of_the_page_on_a_cluster(postgres_process_database: Any, cluster: Cluster, tmp_path: Path) -> None:
    """Each as it stands on the page, but for the names of what is elsewhere here, and what makes this cluster small."""
    orders = [f'{{"reference": "o{number}", "result": {number}}}\n' for number in range(40)]
    (tmp_path / "orders.jsonl").write_text("".join(orders))
    text = PAGE.read_text().replace(PAGE_MASTER, cluster.url).replace("/mnt/", f"{tmp_path}/").replace("claims", "work")
    text = text.replace("--older-than 7d", "--older-than 0s").replace("spark.executor.memory=2g", "spark.ui.port=0")
    jobs = [*map(shlex.split, re.findall(r"^python (manage.py runtaskpipeline .* --master \S+)$", text, re.M))]
    (poller,) = map(shlex.split, re.findall(r"^ExecStart=/srv/shop/venv/bin/python (.*)$", text, re.M))
    assert [words[2] for words in jobs] == ["enqueue", "archive", "report"]
    small, seen = confs(f"executor.{QUICK}", "cores.max=1"), {one.name for one in cluster.folder.glob("work-*/app-*")}
    said = []
    with in_turn(postgres_process_database, *small) as run:
        for words in (jobs[0], [*poller, "--queue", "work", "--drain"], *jobs[1:]):
            is_job = "runtaskpipeline" in words
            said.append(run(*words[2:])[1] if is_job else postgres_process_database.run(*words[1:], *small).stdout)
            assert len(workers_of_new_applications(cluster.folder, seen)) == 1, words
    assert "enqueued: 40" in said[0] and "tasks: 40" in said[2]
    assert "40 tasks ended, 100 % of them COMPLETED" in said[3]
    assert (tmp_path / "report" / "report.html").exists() and not Task.objects.exists()


@pytest.mark.slow
def test_a_lost_executor_loses_no_task(postgres_process_database: Any, cluster: Cluster, tmp_path: Path) -> None:
    marks, gate = tmp_path / "marks", tmp_path / "gate"
    held = {"do": "book", "mark": str(marks), "then": {"do": "wait", "until": str(gate)}}
    for number in range(8):
        enqueue("atomic", f"held-{number}", held)
    enqueue("work", "deadly", {"do": "exit", "until_attempt": 2})  # ends its worker by each of Spark's attempts
    for number in range(20):
        enqueue("work", f"ok-{number}", {"result": number})
    options = ["--master", cluster.url, "--worker-env", "DATABASE_URL"]

    def marked() -> list[str]:
        return marks.read_text().splitlines() if marks.exists() else []

    small = confs(f"executor.{QUICK}", "task.maxFailures=2")
    with runtaskpoller(postgres_process_database, *POLLER, *options, *small) as poller:
        until(lambda: len({line.split()[3] for line in marked()}) == 2, timeout=LONG_S)  # workers
        before = len(marked())
        cluster.executors()[0].kill()
        until(lambda: len(marked()) > before, timeout=LONG_S)  # its task again, elsewhere
        gate.touch()
        poller.ended()
    atomic, work = tasks("atomic"), tasks("work")
    assert {(task.status, task.total_attempt) for task in atomic.values()} == {("COMPLETED", 1)}
    assert Counter(Booking.objects.values_list("reference", flat=True)) == Counter(list(atomic))
    assert [work[f"ok-{number}"].result for number in range(20)] == list(range(20))
    assert {work[f"ok-{number}"].total_attempt for number in range(20)} == {1}
    assert (work["deadly"].status, work["deadly"].total_attempt) == ("COMPLETED", 2)
    assert "Python worker exited unexpectedly" in Attempt.objects.get(task_id=work["deadly"].pk).message


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_job_on_a_busy_cluster_says_so_and_ends_by_sigterm(postgres_process_database: Any, tmp_path: Path) -> None:
    orders = tmp_path / "orders.jsonl"
    orders.write_text('{"reference": "a"}\n')
    words = ["enqueue", "--input", str(orders), "--queue", "claims", "--map", "reference=reference"]
    with ExitStack() as stack:
        options = ["--master", Cluster(stack, tmp_path, workers=0).url, *confs("starvation.timeout=1s")]
        job = stack.enter_context(manage(postgres_process_database, "runtaskpipeline", *words, *options))
        until(lambda: "sufficient resources" in job.log, timeout=200)
        started = psutil.Process(job.process.pid).children(recursive=True)
        assert started
        job.signal()
        said = job.ended(130)
        assert psutil.wait_procs(started, timeout=PATIENCE)[1] == []
    assert "Interrupted. Finished work stays" in said
    assert "Traceback" not in said and "\tat " not in said


def test_the_master_of_spark_s_own_settings_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    assert _default_master() == "local[*]"
    (tmp_path / "spark-defaults.conf").write_text("# spark.master local[1]\nspark.master   yarn\nspark.ui.port 1\n")
    assert _default_master() == "yarn"


# -- ``runtaskpoller --executor spark`` on this machine ----------------------------------------------------------------
@pytest.mark.slow
def test_every_task_runs_and_settles_on_a_worker(postgres_process_database: ProcessDatabase, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    for number in range(60):
        enqueue("work", f"ok-{number}", {"result": number, "mark": str(marks)})
        enqueue("atomic", f"book-{number}", {"do": "book"})
    enqueue("work", "again", {"do": "raise", "until_attempt": 2})
    enqueue("work", "never", {"do": "raise", "message": "no such flight"})
    enqueue("work", "later", {"do": "reenqueue", "times": 5})
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
    assert (work["later"].status, work["later"].reenqueue_attempt) == ("COMPLETED", 5)
    assert (work["self"].status, work["self"].result) == ("COMPLETED", "by itself")
    assert atomic["undone"].status == "ERROR"
    claims = Attempt.objects.filter(queue="claims", attempt=1).values_list("error_type", "task_id")
    assert {kind.rpartition(".")[2] for kind, _ in claims} == {"DoesNotExist"}
    assert {pk for _, pk in claims} == {task.pk for task in tasks("claims").values()} and ", 0 lost in" in log


@pytest.mark.slow
def test_workers_of_another_database_start_nothing(postgres_process_database: ProcessDatabase, tmp_path: Path) -> None:
    for number in range(20):
        enqueue("work", f"ok-{number}", {"result": number})
    other = {**postgres_process_database.env, "DATABASE_URL": f"sqlite:///{tmp_path}/other.sqlite3"}
    command = [sys.executable, str(REPOSITORY / "manage.py"), "migrate", "--verbosity", "0"]
    subprocess.run(command, env=other, cwd=REPOSITORY, check=True)
    wrong = f"spark.executorEnv.DATABASE_URL={other['DATABASE_URL']}"
    options = ["--master", "local[2]", "--conf", wrong, "--conf", f"spark.driver.{QUICK}"]
    with runtaskpoller(postgres_process_database, *POLLER, *options) as poller:
        until(lambda: any(one in poller.log for one in ("is gone; its outcome", "is not the poller's")), timeout=LONG_S)
        poller.signal()
        until(lambda: poller.code is not None, timeout=LONG_S)
        said = poller.log
    assert "The database 'default' of this Spark worker is not the poller's: it is" in said
    assert "Traceback" not in said and "\tat " not in said
    assert "No task was started" in said and "is gone; its outcome" not in said
    assert {(task.status, task.attempt) for task in Task.objects.all()} == {("CREATED", 0)}
    assert not Attempt.objects.exists()
