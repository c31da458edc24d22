"""Dagster: every night, archive what finished a week ago, then report the last day.

Dagster needs no package of the project. Each asset is a command of the project, in the project's own environment.
"""

import json
import os
import shlex
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from dagster import Definitions, MaterializeResult, RetryPolicy, ScheduleDefinition, asset

PIPELINE = os.environ.get("TASK_PIPELINE", "/srv/shop/venv/bin/python /srv/shop/manage.py runtaskpipeline")
LAKE = os.environ.get("TASK_LAKE", "/srv/lake")
RETRIES = RetryPolicy(max_retries=3, delay=300)  # a job that was stopped or repeated loses and doubles nothing


def run(*job: str) -> MaterializeResult:
    """Run a job; return what it found, for the asset's page. Raises CalledProcessError for exit codes above 0."""
    with TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        subprocess.run([*shlex.split(PIPELINE), *job, "--quiet", "--json", str(found)], check=True)
        return MaterializeResult(metadata=json.loads(found.read_text()))


@asset(retry_policy=RETRIES)
def archived_tasks() -> MaterializeResult:
    return run("archive", "--lake", LAKE, "--older-than", "7d")


@asset(deps=[archived_tasks], retry_policy=RETRIES)
def task_report() -> MaterializeResult:
    return run("report", "--lake", LAKE, "--since", "1d", "--out", f"{LAKE}-report")


nightly = ScheduleDefinition(name="nightly", target="*", cron_schedule="0 3 * * *")
defs = Definitions(assets=[archived_tasks, task_report], schedules=[nightly])
