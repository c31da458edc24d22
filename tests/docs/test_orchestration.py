"""The files for pipelines of one's own: the programs that they are written for run them, beside a real database.

Each program has an environment of its own, as at home, which the tests make with pip.
"""

import os
import shutil
import subprocess
import sys
import venv
from datetime import timedelta
from pathlib import Path

import pytest

from django_dbtaskqueue.models import Task
from django_dbtaskqueue.pipeline.lake import Lake
from django_dbtaskqueue.pipeline.spark import find_java, scratch
from tests.conftest import ProcessDatabase
from tests.docs.test_reference import DOCS
from tests.factories import age, make_task
from tests.patience import PATIENCE

REPOSITORY, FILES = DOCS.parent, DOCS / "files"
pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


def environment_of(folder: Path, *packages: str) -> Path:
    venv.create(folder, with_pip=True)
    subprocess.run([folder / "bin/pip", "install", "--quiet", *packages], check=True)
    return folder / "bin"


def run(*command: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    ours = ("PYTHON", "DJANGO", "VIRTUAL")
    outside = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return subprocess.run(command, cwd=cwd, env=outside | env, text=True, capture_output=True, timeout=PATIENCE)


def night(database: ProcessDatabase, folder: Path) -> dict[str, str]:
    """Return the variables for a night's jobs on a database with an old task and a new one."""
    make_task(status="COMPLETED", reference="old")
    age(timedelta(days=8))
    make_task(status="COMPLETED", reference="new")
    return {
        **{name: value for name, value in database.env.items() if name not in os.environ},
        "DATABASE_URL": database.url,
        "TASK_PIPELINE": f"{sys.executable} {REPOSITORY / 'manage.py'} runtaskpipeline",
        "TASK_LAKE": str(folder / "lake"),
    }


def assert_archived_and_reported(folder: Path, done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert [task.reference for task in Task.objects.all()] == ["new"]
    assert Lake.at(str(folder / "lake")).versions()["tasks"] > 0
    assert [*(folder / "lake-report").glob("*.html")]


def test_airflow_runs_the_night(postgres_process_database: ProcessDatabase, tmp_path: Path) -> None:
    programs = environment_of(tmp_path / "venv", "apache-airflow>=3.1", "apache-airflow-providers-standard")
    env = night(postgres_process_database, tmp_path) | {"AIRFLOW_HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    env |= {"AIRFLOW__CORE__LOAD_EXAMPLES": "False", "AIRFLOW__CORE__DAGS_FOLDER": str(tmp_path / "dags")}
    shutil.copytree(FILES / "orchestrate", tmp_path / "dags", ignore=shutil.ignore_patterns("dagster*"))
    run(programs / "airflow", "db", "migrate", cwd=tmp_path, **env).check_returncode()
    command = (programs / "airflow", "dags", "test", "tasks", "--dagfile-path", tmp_path / "dags/airflow_tasks.py")
    assert_archived_and_reported(tmp_path, run(*command, cwd=tmp_path, **env))


def test_dagster_runs_the_night(postgres_process_database: ProcessDatabase, tmp_path: Path) -> None:
    programs = environment_of(tmp_path / "venv", "dagster>=1.12")
    env = night(postgres_process_database, tmp_path) | {"DAGSTER_HOME": str(tmp_path)}
    command = (programs / "dagster", "asset", "materialize", "--select", "*", "-f")
    assert_archived_and_reported(tmp_path, run(*command, FILES / "orchestrate/dagster_tasks.py", cwd=tmp_path, **env))


def test_declarative_pipelines_read_and_write_tasks(postgres_process_database: ProcessDatabase, tmp_path: Path) -> None:
    programs = environment_of(tmp_path / "venv", f"{REPOSITORY}[spark]", "pyspark[connect,pipelines]")
    folder = tmp_path / "pipeline"
    shutil.copytree(FILES / "spark-pipeline", folder)
    spec = folder / "spark-pipeline.yaml"
    spec.write_text(spec.read_text().replace("/srv/pipelines/tasks", str(tmp_path / "storage")))
    env = {"DATABASE_URL": postgres_process_database.url, "JAVA_HOME": str(find_java(scratch()))}
    env |= {"PYSPARK_PYTHON": str(programs / "python"), "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    for number in range(2):  # the second run goes on where the first one stopped
        make_task(status="COMPLETED", queue="claims")
        make_task(status="POISON", queue="claims")
        command = (programs / "spark-pipelines", "run", "--conf", "spark.sql.catalogImplementation=hive")
        done = run(*command, cwd=folder, **env)
        assert "Run is COMPLETED." in done.stdout + done.stderr, done.stdout + done.stderr
        assert Task.objects.filter(queue="reviews").count() == number + 1
    assert {task.payload["queue_name"] for task in Task.objects.filter(queue="reviews")} == {"claims"}
