"""A lake that the previous release archived into, converted by today's."""

from pathlib import Path

import pytest

from tests.pipeline.lakes import ids
from tests.upgrade.releases import Release

# The quick tests convert a lake, too; this one needs Spark in two processes.
pytestmark = [pytest.mark.upgrade, pytest.mark.soak, pytest.mark.timeout(600)]
FINISHED = """
from datetime import timedelta
from django.utils import timezone
from django_dbtaskqueue.models import TaskHistory
at = timezone.now() - timedelta(days=2)
TaskHistory.objects.bulk_create(
    TaskHistory(queue="claims", task_id=number, payload={"n": number}, status="COMPLETED", attempt=1, total_attempt=1,
                create_time=at, start_time=at, finish_time=at)
    for number in range(NUMBERS)
)
"""


def test_a_lake_of_the_previous_release_is_converted(
    previous: Release, today: Release, database: str, tmp_path: Path
) -> None:
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    previous.manage(database, "migrate", "--verbosity", "0")
    previous.manage(database, "shell", "-c", FINISHED.replace("NUMBERS", "0, 30"))
    previous.manage(database, "runtaskpipeline", "archive", "--lake", old, "--older-than", "0s", "--quiet")
    today.manage(database, "migrate", "--verbosity", "0")
    today.manage(database, "runtaskpipeline", "convert", "--old", old, "--lake", new, "--delete-old")
    assert sorted(ids(new, "tasks")) == [*range(30)]
    assert not [*Path(old).rglob("*.parquet")]
    today.manage(database, "shell", "-c", FINISHED.replace("NUMBERS", "30, 40"))
    today.manage(database, "runtaskpipeline", "archive", "--lake", new, "--older-than", "0s", "--quiet")
    assert sorted(ids(new, "tasks")) == [*range(40)]
