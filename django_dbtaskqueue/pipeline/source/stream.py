"""The job ``stream``: a copy of each finish goes to the lake as it happens; the tasks stay where they are."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django_dbtaskqueue.core.exceptions import PipelineError
from django_dbtaskqueue.pipeline.arguments import Argument, duration
from django_dbtaskqueue.pipeline.jobs import Context, Job
from django_dbtaskqueue.pipeline.lake.archive_files import Export
from django_dbtaskqueue.pipeline.lake.archive_write import WRITTEN, RowWriter
from django_dbtaskqueue.pipeline.lake.lake import Lake
from django_dbtaskqueue.pipeline.lake.lake_files import write_safely, writing
from django_dbtaskqueue.pipeline.source.source import stream_tasks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class Sink:
    """Writes micro-batches into the lake's ``finished``, each one once, however often Spark hands it over."""

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
            written = rows.mapInArrow(RowWriter(export.writer, self.location), WRITTEN)
            entry = export.describe("stream", written, {"stream": self.stream, "batch": number})
        export.verify(entry)
        if entry.files:
            export.publish(entry)
        else:
            lake.discard(token)


def checkpoint(lake: Lake, location: str) -> tuple[Path, str]:
    """Return the folder in which the stream of a location keeps its place, and the stream's name, which stands in it.

    Who removes the folder starts a new stream, whose micro-batches are not those of the old one.
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

    With --once it copies what has finished since the last time, and ends. Each micro-batch is one change of the lake,
    made once: after a kill the next start goes on where this one stopped, and no finish is missing or there twice.
    A task that is reprocessed and finishes again stands there twice, with another total_attempt. Nothing is deleted:
    what counts as archived is only what `archive` moved.
    """

    name = "stream"
    summary = "copy finished tasks to the lake, continuously"
    arguments = (
        Argument("once", "end when all that has finished by now is copied", bool, False),
        Argument("interval", "time between two micro-batches", duration, timedelta(seconds=10)),
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
        writer = rows.writeStream.foreachBatch(Sink(lake.root, name, database.location))
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
