"""The job ``archive``: finished tasks and their failed attempts move from the database to the lake; none is lost.

Each batch goes through these steps. The next run continues a run that was killed at any of them::

    freeze    one row says which tasks: a range of ids and a predicate. The tasks are not touched.
    export    Spark writes them, and a manifest with counts and checksums, below the lake's staging folder.
    verify    the files are read again and compared; the rules of ``check`` are applied.
    publish   the files move to their places; one entry in the lake's log makes them count.
    delete    one transaction deletes the rows that are in the files and still unchanged, and marks the batch. A row
              that was reprocessed, locked or removed meanwhile is withdrawn.
    withdraw  the withdrawn rows are removed from the files.
    close     the batch has ended.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from django_dbtaskqueue.core.durations import parse_length
from django_dbtaskqueue.core.exceptions import LakeError, PipelineError
from django_dbtaskqueue.pipeline.jobs import Argument, Context, Job, Result, count
from django_dbtaskqueue.pipeline.lake import (
    DAMAGED_FILE_REMEDY,
    DataFile,
    Entry,
    Lake,
    exclusive,
    local_path,
    sound,
    sync,
    writing,
)
from django_dbtaskqueue.pipeline.lake.archive_batches import Batch, Batches, TaskFilters
from django_dbtaskqueue.pipeline.lake.export import Export, SliceWriter, data_file, encodings, keys, withdraw
from django_dbtaskqueue.pipeline.schema import ATTEMPTS, SCHEMAS, TERMINAL_STATUSES
from django_dbtaskqueue.pipeline.source.task_reader import Condition, Selection, even_slices, open_snapshot
from django_dbtaskqueue.pipeline.spark.terminal import Progress, silent

if TYPE_CHECKING:
    from datetime import datetime

__all__ = ["Archive"]

SLICE_IDS = 250_000  # ids that one Spark task exports, while there are at most MAX_SLICES
MAX_SLICES = 64
MIN_SMALL_FILES = 8  # of one partition, before they are merged
SMALL_FILE_BYTES = 32 * 2**20  # larger files stay as they are
MERGED_FILE_BYTES = 128 * 2**20  # about the largest size of a merged file
MERGE_BATCH_ROWS = 131_072
MAX_LOG_ENTRIES = 200  # of more the log is folded
SOURCES = ("history", "task")
RESULT_COUNTS = ("tasks", "attempts", "withdrawn", "batches", "resumed", "bytes", "files_compacted")


class Archive(Job):
    """Moves finished tasks, from the task table and the history, with their failed attempts, into the lake.

    Works in batches: freeze, export, verify, publish, delete what is still unchanged, close. A run that was killed is
    continued by the next one. A task that is reprocessed meanwhile stays in the database and does not count in the
    lake. Rows that break a rule of `check` stop the batch before anything is deleted (exit code 3).
    """

    name = "archive"
    summary = "move finished tasks from the database to the lake"
    arguments = (
        Argument("older_than", "archive tasks that finished at least this long ago", parse_length, timedelta(days=1)),
        Argument("queue", "only this queue; may be given again", many=True),
        Argument("status", "only tasks that ended so; may be given again", many=True, choices=TERMINAL_STATUSES),
        Argument("source", "only this table; may be given again", many=True, choices=SOURCES),
        Argument("batch_size", "tasks in one batch, that is in one transaction", count, 500_000),
        Argument("limit", "stop after about N tasks", count),
        Argument("no_check", "archive rows that break a rule of `check` too", bool, False),
        Argument("compact", "merge the small files of a day and queue once there are N", count, MIN_SMALL_FILES),
        Argument("no_compact", "leave small files as they are", bool, False),
    )

    def run(self, context: Context) -> Result:
        """Archive, and return how many ``tasks`` and ``attempts`` left the database in how many ``batches``."""
        database, path = context.need_database(), context.need_lake()
        filters = TaskFilters(context.options["status"] or TERMINAL_STATUSES, context.options["queue"])
        if context.dry_run:
            local_path(path)
            limit, sources = context.options["limit"] or 2**62, context.options["source"] or SOURCES
            with Batches.locked(database) as batches:
                cutoff = batches.cutoff(context.options["older_than"])
                found = [batches.next(one, after=0, limit=limit, cutoff=cutoff, filters=filters) for one in sources]
            return {"tasks": sum(number for _first, _last, number in found), "dry_run": True}
        lake = Lake.at(path, create=True)
        with exclusive(lake.own / "lock"), Batches.locked(database) as batches:
            run = Run(context, lake, batches)
            run.resume()
            for source in context.options["source"] or SOURCES:
                run.archive(source, filters)
            if not context.options["no_compact"] and run.done["batches"]:
                tokens, fewest = [one.token for one in batches.unfinished()], context.options["compact"]
                merged = compact(lake, without=tokens, fewest=fewest, progress=context.progress)
                run.done["files_compacted"] = merged
        return run.done


@dataclass
class Run:
    """One run over the batches of a database; ``done`` holds its counts."""

    context: Context
    lake: Lake
    batches: Batches
    done: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RESULT_COUNTS, 0))

    def resume(self) -> None:
        """Finish the batches of a killed run."""
        for batch in self.batches.unfinished():
            if batch.location != self.batches.database.location:
                continue
            if local_path(batch.lake) != self.lake.root:
                raise PipelineError(
                    f"An archive of tasks {batch.first_id}-{batch.last_id} of {batch.location} into the lake "
                    f"{batch.lake} is not finished. Finish it first: archive --lake {batch.lake}"
                )
            self.done["resumed"] += 1
            self.finish(batch)

    def archive(self, source: str, filters: TaskFilters) -> None:
        cutoff = self.batches.cutoff(self.context.options["older_than"])
        after = 0
        while (batch := self._freeze(source, after, cutoff, filters)) is not None:
            after = batch.last_id
            self.finish(batch)

    def _freeze(self, source: str, after: int, cutoff: datetime, filters: TaskFilters) -> Batch | None:
        limit = self.context.options["batch_size"]
        if self.context.options["limit"]:
            limit = min(limit, self.context.options["limit"] - self.done["tasks"])
        if limit <= 0:
            return None
        self._step("freeze")
        first, last, number = self.batches.next(source, after=after, limit=limit, cutoff=cutoff, filters=filters)
        if not number:
            return None
        return self.batches.freeze(source, (first, last), lake=str(self.lake.root), cutoff=cutoff, filters=filters)

    def finish(self, batch: Batch) -> None:
        """Take a batch from its state to its end."""
        entry = self.lake.entry(batch.token)
        withdrawn = batch.withdrawn
        if batch.state == "open":
            entry = entry or self._publish(batch)
            if entry is None:
                return
            withdrawn = self._delete(batch, entry)
        if entry is None:
            raise LakeError(self.lake.log, f"has no entry of batch {batch.token}", "Restore the lake from a backup")
        self._step("withdraw")
        withdraw(self.lake, entry, withdrawn)
        self._step("close")
        self.lake.discard(batch.token)
        self.batches.end(batch, "closed", before="deleted")
        self.done["batches"] += 1

    def _publish(self, batch: Batch) -> Entry | None:
        """Export, verify and publish. Return None if all tasks were changed after the freeze."""
        export = Export(self.lake, batch.token)
        entry = export.found()
        if entry is None:
            self._step("export")
            entry = self._export(export, batch)
        self._step("verify")
        try:
            export.verify(entry, check=not self.context.options["no_check"])
        except PipelineError as error:
            self._abandon(batch, str(error))
            raise
        if not entry.files:
            self._abandon(batch, "Every task was changed before it was exported.")
            return None
        self._step("publish")
        export.publish(entry)
        return entry

    def _abandon(self, batch: Batch, note: str) -> None:
        self.lake.discard(batch.token)
        self.batches.end(batch, "abandoned", before="open", note=note)

    def _export(self, export: Export, batch: Batch) -> Entry:
        spark, database = self.context.spark, self.batches.database
        number = min(MAX_SLICES, -(-(batch.last_id - batch.first_id + 1) // SLICE_IDS))
        slices = even_slices(batch.first_id, batch.last_id, number)
        with open_snapshot(database) as snapshot:
            attempts = Selection(database.tables.attempt, ATTEMPTS) if self.batches.failed_attempts(batch) else None
            wanted: list[Condition] = [("status", "in", list(batch.filters.statuses))]
            wanted += [("queue_name", "in", list(batch.filters.queues))] if batch.filters.queues else []
            tasks = Selection(getattr(database.tables, batch.source), SCHEMAS[batch.source], tuple(wanted))
            writer = SliceWriter(export, database, batch, tasks, attempts, snapshot.name, slices)
            numbers = spark.range(0, len(slices), 1, len(slices))
            facts = {"location": batch.location, "source": batch.source, "ids": [batch.first_id, batch.last_id],
                     "horizon": snapshot.horizon}  # fmt: skip
            return export.describe("archive", numbers, writer, facts)

    def _delete(self, batch: Batch, entry: Entry) -> tuple[tuple[str, int], ...]:
        self._step("delete")
        tasks, attempts = keys(self.lake, entry)
        size = sum(one.bytes for one in entry.files)
        deleted = self.batches.delete(batch, tasks, attempts, size=size, horizon=entry.facts.get("horizon"))
        self.done["tasks"] += deleted.tasks
        self.done["attempts"] += deleted.attempts
        self.done["withdrawn"] += len(deleted.withdrawn)
        self.done["bytes"] += size
        return deleted.withdrawn

    def _step(self, name: str) -> None:
        self.context.progress(name, self.done["tasks"], 0)


def compact(
    lake: Lake, *, without: Collection[str] = (), fewest: int = MIN_SMALL_FILES, progress: Progress = silent
) -> int:
    """Merge the small files of each partition with at least ``fewest`` of them; return how many were replaced.

    Call it under the lake's lock. Files of the changes ``without`` stay, because rows may still be withdrawn from them.
    After a kill either the old files count or the new ones.
    """
    groups = [*_groups(lake.files(without=without), fewest)]
    for done, group in enumerate(groups):
        progress("compact", done, len(groups))
        _merge(lake, group)
    lake.sweep()
    lake.fold(longer_than=MAX_LOG_ENTRIES)
    return sum(map(len, groups))


def _groups(files: Sequence[DataFile], fewest: int) -> Iterator[list[DataFile]]:
    partitions = defaultdict(list)
    for one in files:
        if one.bytes < SMALL_FILE_BYTES:
            partitions[Path(one.path).parent].append(one)
    for near in partitions.values():
        group: list[DataFile] = []
        for one in near:
            if sum(each.bytes for each in group) + one.bytes > MERGED_FILE_BYTES:
                yield group
                group = []
            group.append(one)
        if len(group) >= fewest:
            yield group


def _merge(lake: Lake, files: Sequence[DataFile]) -> None:
    token = uuid.uuid4().hex
    place = lake.root / Path(files[0].path).parent / f"{token}-0.parquet"
    half = lake.staging(token) / "0.parquet"
    with writing(lake.root):
        half.parent.mkdir(parents=True)
        _write(half, [sound(lake.root / one.path, one.bytes) for one in files])
        sync(half)
        half.rename(place)
        sync(place.parent)
    merged = data_file(lake.root, place)
    expected = sum(one.rows for one in files)
    if merged.rows != expected:
        place.unlink()
        raise LakeError(place, f"has {merged.rows} rows instead of {expected}", "The old files still count")
    lake.commit(Entry(token, "compact", (merged,), tuple(one.path for one in files)))
    lake.discard(token)


def _write(half: Path, paths: Sequence[Path]) -> None:
    schema = pa.unify_schemas([_schema(path) for path in paths])
    rows = ds.dataset([str(path) for path in paths], schema, format="parquet")  # a missing column is null
    with pq.ParquetWriter(half, schema, **encodings(schema)) as writer:
        for batch in rows.to_batches(batch_size=MERGE_BATCH_ROWS, use_threads=False):
            writer.write_batch(batch)


def _schema(path: Path) -> pa.Schema:
    try:
        return pq.read_schema(path).remove_metadata()
    except (pa.ArrowInvalid, OSError) as error:
        raise LakeError(path, f"is damaged ({error})", DAMAGED_FILE_REMEDY) from error
