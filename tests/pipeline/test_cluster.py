"""Jobs on a real standalone cluster: ``spark-submit``, and a cluster that is busy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pyspark
import pytest

import django_dbtaskqueue.pipeline
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.pipeline.spark import _default_master, find_java, scratch
from tests.conftest import REPOSITORY, ProcessDatabase
from tests.contrib.clusters import SETTINGS, Cluster
from tests.patience import PATIENCE, patience
from tests.support import until

if TYPE_CHECKING:
    from collections.abc import Iterator

QUICK = "extraJavaOptions=-XX:TieredStopAtLevel=1"
PROGRAM = Path(django_dbtaskqueue.pipeline.__file__).with_name("__main__.py")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def confs(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--conf", f"spark.{setting}")]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_spark_submit_s_master_does_the_work(
    postgres_process_database: ProcessDatabase, stack: ExitStack, tmp_path: Path
) -> None:
    cluster = Cluster(stack, tmp_path, workers=1)
    orders = tmp_path / "orders.jsonl"
    orders.write_text("".join(f'{{"reference": "o{number}"}}\n' for number in range(20)))
    paths = f"executorEnv.PYTHONPATH={REPOSITORY}"
    command = [
        *(str(Path(pyspark.__file__).parent / "bin" / "spark-submit"), "--master", cluster.url),
        *confs(*SETTINGS, f"driver.{QUICK}", f"executor.{QUICK}", "sql.parquet.compression.codec=snappy", paths),
        *(str(PROGRAM), "enqueue", "--input", str(orders), "--queue", "claims", "--map", "reference=reference"),
        # Options of the job, which once put the session on this machine's cores.
        *("--memory", "700m", "--conf", "spark.sql.shuffle.partitions=3"),
    ]
    env = {**postgres_process_database.env, "JAVA_HOME": str(find_java(scratch())), "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(command, env=env, cwd=tmp_path, text=True, capture_output=True, timeout=patience(200))
    assert done.returncode == 0, done.stderr
    assert "enqueued: 20" in done.stdout
    assert Task.objects.count() == 20
    assert [*tmp_path.glob("work-0/app-*/*/stderr")], "the cluster's worker has run no executor"


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_job_on_a_busy_cluster_says_what_it_waits_for_and_ends_by_sigterm(
    postgres_process_database: ProcessDatabase, stack: ExitStack, tmp_path: Path
) -> None:
    cluster = Cluster(stack, tmp_path, workers=0)
    orders = tmp_path / "orders.jsonl"
    orders.write_text('{"reference": "a"}\n')
    command = [
        *(sys.executable, str(REPOSITORY / "manage.py"), "runtaskpipeline", "enqueue", "--input", str(orders)),
        *("--queue", "claims", "--map", "reference=reference", "--master", cluster.url),
        *confs(*SETTINGS, f"driver.{QUICK}", "starvation.timeout=1s"),
    ]
    log = tmp_path / "job"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=postgres_process_database.env, cwd=REPOSITORY, stdout=file, stderr=file, start_new_session=True
        )
    try:
        until(lambda: "sufficient resources" in log.read_text(), timeout=200)
        started = psutil.Process(process.pid).children(recursive=True)
        assert started
        process.terminate()
        assert process.wait(PATIENCE) == 130
        assert psutil.wait_procs(started, timeout=PATIENCE)[1] == []
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    said = log.read_text()
    assert "Interrupted. Finished work stays" in said
    assert "Traceback" not in said and "\tat " not in said


def test_the_master_of_spark_s_own_settings_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    assert _default_master() == "local[*]"
    (tmp_path / "spark-defaults.conf").write_text("# spark.master local[1]\nspark.master   yarn\nspark.ui.port 1\n")
    assert _default_master() == "yarn"
