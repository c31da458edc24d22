"""The stream of finished tasks: every one, however late it commits, and none a second time after a restart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from django_dbtaskqueue import enqueue_many
from django_dbtaskqueue.core.exceptions import PipelineError
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.schema import schema_of
from django_dbtaskqueue.pipeline.source import stream_tasks
from django_dbtaskqueue.pipeline.source.task_reader import Selection, TaskStreamReader
from tests.patience import Deadline

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession


SETTLE = (
    "UPDATE dbtaskqueue_task SET status = 'ERROR', final_status = 'ERROR', ready_time = NULL,"
    " finish_time = statement_timestamp(), last_update_time = statement_timestamp()"
)


class Follower:
    """A reader that Spark would drive, driven by hand."""

    def __init__(self, database: Database) -> None:
        selection = Selection(database.tables.task, schema_of("task", ["reference_number"]))
        self.reader = TaskStreamReader(database, selection, "task")
        self.offset = self.reader.initialOffset()

    def read_until(self, *references: str) -> None:
        """Read on until these have come, and see that no others have."""
        found: list[str] = []
        deadline = Deadline()  # the server's own transactions (an ANALYZE) delay the stream as well
        while len(found) < len(references) and not deadline.passed:
            found += self.read()
        assert sorted(found) == sorted(references)

    def read(self) -> list[str]:
        """The references of the next micro-batch."""
        end = self.reader.latestOffset(self.offset, self.reader.getDefaultReadLimit())
        parts = self.reader.partitions(self.offset, end)
        self.offset = end
        batches = [batch for part in parts for batch in self.reader.read(part)]
        return sorted(name for batch in batches for name in batch.column(0).to_pylist())


def finish(database: Database, *references: str) -> Any:
    """Settle tasks on a connection of its own, in a transaction that stays open; return the connection."""
    other = database.connect()
    other.autocommit = False
    for reference in references:
        other.execute(
            f"{SETTLE} WHERE reference_number = %s",
            [reference],
        )
    return other


def commit(*open_connections: Any) -> None:
    for other in open_connections:
        other.commit()
        other.close()


@pytest.fixture
def follower(pg: Database) -> Follower:
    enqueue_many("other", [(name, None) for name in "abcdefgh"])
    return Follower(pg)


def test_an_end_that_others_wait_for_comes_once(pg: Database, follower: Follower) -> None:
    """Telling it writes to the row a second time."""
    Task.objects.filter(reference="a").update(watched=True)
    commit(finish(pg, "a", "b"))
    follower.read_until("b")
    Task.objects.filter(reference="a").update(watched=None)
    follower.read_until("a")
    assert follower.read() == []


def test_a_late_commit_is_never_skipped(pg: Database, follower: Follower) -> None:
    """The early one writes first, under the lowest transaction id, and commits last."""
    commit(finish(pg, "a"))
    follower.read_until("a")
    early = finish(pg, "b")
    commit(finish(pg, "c"))
    assert follower.read() == []  # it waits rather than passing b over
    commit(finish(pg, "d"))
    commit(early)
    follower.read_until("b", "c", "d")
    assert follower.read() == []


def test_a_savepoint_and_a_rollback_make_no_difference(pg: Database, follower: Follower) -> None:
    """What is written inside a savepoint has a transaction id of its own, above that of its transaction."""
    other = finish(pg, "a")
    with other.transaction():
        other.execute(f"{SETTLE} WHERE reference_number = 'b'")
    undone = finish(pg, "c")
    commit(finish(pg, "d"))
    assert follower.read() == []
    undone.rollback()
    undone.close()
    commit(other)
    follower.read_until("a", "b", "d")


def test_a_task_that_finishes_again_comes_again(pg: Database, follower: Follower) -> None:
    commit(finish(pg, "a", "b"))
    follower.read_until("a", "b")
    Task.objects.filter(reference="a").reprocess()
    assert follower.read() == []
    commit(finish(pg, "a"))
    follower.read_until("a")


def test_a_query_restarted_goes_on_where_it_was(
    spark: SparkSession, pg: Database, follower: Follower, tmp_path: Path
) -> None:
    lake, checkpoint = str(tmp_path / "lake"), str(tmp_path / "checkpoint")

    def drain() -> list[str]:
        df = stream_tasks(spark, pg, ["reference_number", "status", "finish_time"], queue="other")
        writer = df.writeStream.format("parquet").option("checkpointLocation", checkpoint)
        writer.trigger(availableNow=True).start(lake).awaitTermination()
        return sorted(
            row.reference_number for row in spark.read.schema("reference_number string").parquet(lake).collect()
        )

    commit(finish(pg, "a", "b"))
    late = finish(pg, "c")
    commit(finish(pg, "d"))
    follower.read_until("a", "b")  # no transaction of the server's own is in the way any more
    assert drain() == ["a", "b"]
    commit(late)
    follower.read_until("c", "d")
    assert drain() == ["a", "b", "c", "d"]


def test_sqlite_has_no_stream(sqlite: Database) -> None:
    with pytest.raises(PipelineError, match="PostgreSQL only"):
        TaskStreamReader(sqlite, Selection(sqlite.tables.task, schema_of("task")), "task")
