"""Tasks to archive, and the count that must never change: hot + history + archive + deleted."""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, urlsplit

from deltalake import DeltaTable

from django_dbtaskqueue.models import Attempt, Task, TaskHistory
from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.lake import Lake, one_state
from django_dbtaskqueue.pipeline.lake.archive_jobs import Archive
from tests.factories import make_task
from tests.pipeline.executors import ThisProcess
from tests.support import minute_counts

DAY = timedelta(days=1)
MEANWHILE = {"create_time": -5 * DAY, "start_time": -4 * DAY}


def fill() -> None:
    """Make nine finished tasks in two queues on two days, three failed attempts, and three rows of history."""
    for day in (2, 3):
        for status in ("COMPLETED", "POISON"):
            make_task(status, finish_time=-day * DAY, **MEANWHILE)
    for _ in range(3):
        failed = make_task("ERROR", finish_time=-2 * DAY, payload={"city": "Kyiv"}, **MEANWHILE)
        Attempt.objects.create(task_id=failed.pk, queue=failed.queue, attempt=1, total_attempt=1, message="no")
    for _ in range(2):
        make_task("COMPLETED", queue="a/b=c %d", reference="ключ" if _ else None, finish_time=-DAY * 2, **MEANWHILE)
    for _ in range(3):
        to_history(make_task("COMPLETED", finish_time=-2 * DAY, **MEANWHILE))


def to_history(task: Task) -> None:
    Task.objects.filter(pk=task.pk).housekeep(older_than=timedelta(0))


def archive(database: Database, lake: Path | str, *, spark: Any = None, **options: Any) -> Mapping[str, Any]:
    """Run the job; everything finished is old enough unless told otherwise."""
    given = {"spark": spark or ThisProcess(), "database": database, "lake": lake, "older_than": "0s", **options}
    return Archive().run(Archive.context(**given))


@dataclass(frozen=True)
class Census:
    """What there is: the ids of tasks, wherever they stand, each as often as it does; failed attempts; deletions."""

    tasks: Counter[int]
    attempts: Counter[int]
    deleted: int

    @classmethod
    def of(cls, folder: Path | str) -> Self:
        """Count in the database and in the files of the lake, if there is one."""
        tasks = [*Task.objects.values_list("pk", flat=True), *TaskHistory.objects.values_list("task_id", flat=True)]
        attempts = [*Attempt.objects.values_list("pk", flat=True)]
        deleted = sum(minute_counts("deletion").values_list("count", flat=True))
        return cls(Counter([*tasks, *ids(folder, "tasks")]), Counter([*attempts, *ids(folder, "attempts")]), deleted)


def ids(folder: Path | str, table: str) -> list[int]:
    """Return the ids in those files of a lake that count, read without Spark and without our reader."""
    if not DeltaTable.is_deltatable(f"{folder}/{table}"):
        return []
    return [*DeltaTable(f"{folder}/{table}").to_pyarrow_table(columns=["id"])["id"].to_pylist()]


def counted(database: Database, folder: Path) -> list[int]:
    """Return the ids of the tasks that are in the lake and have left the database, both in one state."""
    lake = Lake.at(folder)
    with one_state(database, folder) as state:
        return [one for file in lake.counted("tasks", state) for one in lake.read(file, ["id"])["id"].to_pylist()]


def flip(path: Path, place: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


@dataclass(frozen=True)
class Bucket:
    """A bucket of a server of S3, used without our code and without that of deltalake."""

    endpoint: str
    name: str

    @property
    def lake(self) -> str:
        return f"s3://{self.name}/archive/lake"

    @property
    def env(self) -> dict[str, str]:
        """The variables that lead a process to the server. It takes any keys."""
        keys = {"AWS_ACCESS_KEY_ID": "the-id-of-a-key", "AWS_SECRET_ACCESS_KEY": "the-key-that-nobody-may-see"}
        return {"AWS_ENDPOINT_URL": self.endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1", **keys}

    def get(self, key: str) -> bytes:
        return self._asked("GET", key)

    def put(self, key: str, content: bytes) -> None:
        self._asked("PUT", key, content)

    def flip(self, url: str) -> None:
        key = url.removeprefix(f"s3://{self.name}/")
        content = bytearray(self.get(key))
        content[len(content) // 2] ^= 1
        self.put(key, bytes(content))

    def _asked(self, method: str, key: str, content: bytes | None = None) -> bytes:
        link = HTTPConnection(urlsplit(self.endpoint).netloc)
        link.request(method, f"/{self.name}/{quote(key)}", content)
        answer = link.getresponse()
        assert answer.status == HTTPStatus.OK, answer.reason
        return answer.read()


AZURITE = Path(os.environ.get("NODE_PATH", ""), ".bin", "azurite-blob")
ON_AZURE = ["container"] * AZURITE.exists()
MAKE_CONTAINER = """require("@azure/storage-blob").BlobServiceClient.fromConnectionString("UseDevelopmentStorage=true")
    .createContainer("lake")"""
AZURE = {
    "AZURE_STORAGE_ACCOUNT_NAME": "devstoreaccount1", "AZURE_STORAGE_USE_EMULATOR": "true", "AZURE_ALLOW_HTTP": "true",
}  # fmt: skip


def place_of(found: Path | Bucket | str) -> str:
    return found.lake if isinstance(found, Bucket) else str(found)
