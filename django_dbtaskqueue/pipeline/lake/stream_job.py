"""The job ``stream``: copies each finish of a task to the lake; the tasks stay in the database."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django_dbtaskqueue.core.durations import parse_length
from django_dbtaskqueue.core.exceptions import PipelineError
from django_dbtaskqueue.pipeline.jobs import Argument, Context, Job
from django_dbtaskqueue.pipeline.lake import Lake, write_safely, writing
from django_dbtaskqueue.pipeline.lake.export import WRITTEN_FILES, Export, RowWriter
from django_dbtaskqueue.pipeline.source import stream_tasks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class LakeSink:
    """Writes each micro-batch once into the lake's ``finished``, also if Spark repeats it."""

    root: Path
    stream: str
    location: str

    def __call__(self, rows: DataFrame, number: int) -> None:
        """Write the micro-batch of that number, unless the lake has it."""
        lake = Lake(self.root)
        token = hashlib.sha256(f"{self.stream} {number}".encode()).hexdigest()[:32]
        if lake.entry(token) is not None:
            return
        export = Export(lake, token)
        entry = export.found()
        if entry is None:
            written = rows.mapInArrow(RowWriter(export.writer, self.location), WRITTEN_FILES)
            entry = export.describe("stream", written, {"stream": self.stream, "batch": number})
        export.verify(entry)
        if entry.files:
            export.publish(entry)
        else:
            lake.discard(token)


def checkpoint(lake: Lake, location: str) -> tuple[Path, str]:
    """Return the checkpoint folder of a location's stream, and the stream's name, which is stored in it.

    If the folder is removed, a new stream starts, whose micro-batches differ from the old one's.
    """
    folder = lake.own / "streams" / location
    name = folder / "dbtaskqueue-stream"
    with writing(lake.root):
        folder.mkdir(parents=True, exist_ok=True)
        if not name.exists():
            write_safely(name, uuid.uuid4().hex)
    return folder, name.read_text()


class Stream(Job):
    """Copies each finish of a task into the lake's `finished`, in micro-batches, until it is stopped with Ctrl-C.

    With --once it copies what has finished since the last time, and ends. Each micro-batch is one change of the lake.
    After a kill the next start continues: no finish is missing or copied twice. A task that is reprocessed and finishes
    again is copied again, with another total_attempt. Nothing is deleted: only `archive` archives tasks.
    """

    name = "stream"
    summary = "copy finished tasks to the lake, continuously"
    arguments = (
        Argument("once", "end when all that has finished by now is copied", bool, False),
        Argument("interval", "time between two micro-batches", parse_length, timedelta(seconds=10)),
    )

    def run(self, context: Context) -> Mapping[str, Any]:
        """Return how many ``rows`` this run copied in how many ``files``."""
        database, path = context.need_database(), context.need_lake()
        if database.vendor != "postgresql":
            raise PipelineError("Finished tasks can be streamed from PostgreSQL only. With SQLite, use `archive`.")
        lake = Lake.at(path, create=not context.dry_run)
        if context.dry_run:
            return {"rows": 0, "files": 0, "dry_run": True}
        place, name = checkpoint(lake, database.location)
        before = {one.path for one in lake.files("finished")}
        rows = stream_tasks(context.spark, database)
        writer = rows.writeStream.foreachBatch(LakeSink(lake.root, name, database.location))
        writer = writer.option("checkpointLocation", str(place))
        interval = f"{context.options['interval'].total_seconds()} seconds"
        once = context.options["once"]
        query = (writer.trigger(availableNow=True) if once else writer.trigger(processingTime=interval)).start()
        context.progress("streaming", 0, 0)
        try:
            query.awaitTermination()
        finally:
            query.stop()
        added = [one for one in lake.files("finished") if one.path not in before]
        return {"rows": sum(one.rows for one in added), "files": len(added)}
