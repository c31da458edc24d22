"""``replay`` of tasks that the queue would not take now: they are left out and named, and the others come back."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from django_dbtaskqueue import enqueue
from django_dbtaskqueue.core.exceptions import CheckFailed, JobOptionError
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.pipeline.database import Database
from tests.factories import make_task
from tests.pipeline.lakes import DAY, MEANWHILE, archive
from tests.pipeline.spark.test_copy_jobs import replay
from tests.pipeline.test_source_write import FUTURE

TTL = timedelta(minutes=5)


def test_one_bad_task_holds_no_other_back(spark: SparkSession, database: Database, tmp_path: Path) -> None:
    for reference, payload in (("fine", {}), ("large", {"text": "x" * 100})):
        columns: dict[str, Any] = {"reference": reference, "payload": payload, **MEANWHILE}
        make_task("ERROR", queue="claims", finish_time=-DAY, **columns)
    enqueue("claims", "far", run_at=FUTURE, ttl=TTL)
    Task.objects.filter(reference="far").cancel()
    lake, rejects = tmp_path / "lake", tmp_path / "rejects"
    archive(database, lake)
    with pytest.raises(CheckFailed, match=r"1 of these tasks .*claims/large: payload: it takes .*--rejects FILE"):
        replay(spark, database, lake, payload_max_bytes=50)
    far, fine = Task.objects.order_by("reference")
    assert (far.reference, fine.reference, far.expire_time) == ("far", "fine", far.next_process_time + TTL)
    found = replay(spark, database, lake, payload_max_bytes=50, rejects=str(rejects))
    assert (found["already_there"], found["rejected"]) == (2, 1)
    assert json.loads(rejects.read_text())["reference"] == "large"
    with pytest.raises(JobOptionError, match=r"--to: unknown queue 'claim'\. Did you mean 'claims'"):
        replay(spark, database, lake, to="claim", known_queue=["claims"])
