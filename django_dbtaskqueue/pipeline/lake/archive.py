"""The job ``archive``: finished tasks and their failed attempts leave the database for the lake, and none is lost.

Each batch takes the same way, and a run that was killed anywhere on it is continued by the next run:

    freeze    one row says which tasks: a range of ids and a predicate. No task is touched.
    export    Spark writes them below the lake's staging folder, and a manifest with counts and checksums.
    verify    the files are read again and compared; the rules of ``check`` are applied.
    publish   the files move to their places; one entry in the lake's log makes them count.
    delete    the rows whose keys the files hold leave the database, if they are still unchanged, in one transaction
              that marks the batch; rows somebody reprocessed, locked or removed meanwhile are withdrawn.
    withdraw  the files lose the withdrawn rows.
    close     the batch is over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from django_dbtaskqueue.core.exceptions import LakeError, PipelineError
from django_dbtaskqueue.core.states import TERMINAL
from django_dbtaskqueue.pipeline.arguments import Argument, count, duration
from django_dbtaskqueue.pipeline.jobs import Context, Job
from django_dbtaskqueue.pipeline.lake.archive_batches import Batch, Batches, Wanted
from django_dbtaskqueue.pipeline.lake.archive_compact import FEWEST, compact
from django_dbtaskqueue.pipeline.lake.archive_files import Export, keys, withdraw
from django_dbtaskqueue.pipeline.lake.archive_write import WRITTEN, SliceWriter
from django_dbtaskqueue.pipeline.lake.lake import Entry, Lake
from django_dbtaskqueue.pipeline.lake.lake_files import exclusive, local_path
from django_dbtaskqueue.pipeline.lake.snapshot import open_snapshot
from django_dbtaskqueue.pipeline.schema import ATTEMPTS, SCHEMAS
from django_dbtaskqueue.pipeline.source.source_read import Condition, Selection

if TYPE_CHECKING:
    from datetime import datetime

SLICE = 250_000  # ids that one Spark task exports
SOURCES = ("history", "task")
STATUSES = tuple(str(status) for status in TERMINAL)


class Archive(Job):
    """Moves finished tasks, from the task table and the history, with their failed attempts, into the lake.

    Works in batches: freeze, export, verify, publish, delete what is still unchanged, close. A run that was killed is
    continued by the next one. A task that is reprocessed meanwhile stays in the database and does not count in the
    lake. Rows that break a rule of `check` stop the batch before anything is deleted (exit code 3).
    """

    name = "archive"
    summary = "move finished tasks from the database to the lake"
    arguments = (
        Argument("older_than", "archive what finished at least so long ago", duration, timedelta(days=1)),
        Argument("queue", "only this queue; may be given again", many=True),
        Argument("status", "only tasks that ended so; may be given again", many=True, choices=STATUSES),
        Argument("source", "only this table; may be given again", many=True, choices=SOURCES),
        Argument("batch_size", "tasks in one batch, that is in one transaction", count, 500_000),
        Argument("limit", "stop after about so many tasks", count),
        Argument("no_check", "archive rows that break a rule of `check` too", bool, False),
        Argument("compact", "merge the small files of a day and queue once there are so many", count, FEWEST),
        Argument("no_compact", "leave small files as they are", bool, False),
    )

    def run(self, context: Context) -> Mapping[str, Any]:
        """Archive, and return how many ``tasks`` and ``attempts`` left the database in how many ``batches``."""
        database, path = context.need_database(), context.need_lake()
        wanted = Wanted(context.options["status"] or STATUSES, context.options["queue"])
        if context.dry_run:
            local_path(path)
            with Batches(database) as batches:
                return {"tasks": sum(_counts(context, batches, wanted).values()), "dry_run": True}
        lake = Lake.at(path, create=True)
        with exclusive(lake.own / "lock"), Batches(database) as batches:
            run = Run(context, lake, batches)
            run.resume()
            for source in context.options["source"] or SOURCES:
                run.archive(source, wanted)
            if not context.options["no_compact"] and run.done["batches"]:
                under_way, fewest = batches.tokens_under_way(), context.options["compact"]
                merged = compact(lake, without=under_way, fewest=fewest, progress=context.progress)
                run.done["files_compacted"] = merged
        return run.done


def _selection(batch: Batch, table: str) -> Selection:
    conditions: list[Condition] = [("status", "in", list(batch.wanted.statuses))]
    if batch.wanted.queues:
        conditions.append(("queue_name", "in", list(batch.wanted.queues)))
    return Selection(table, SCHEMAS[batch.source], tuple(conditions))


def _slices(first: int, last: int) -> tuple[tuple[int, int], ...]:
    """Cut a range of ids into pairs (first, below): some for each core, none too small to be worth its query."""
    count = max(1, min(64, -(-(last - first + 1) // SLICE)))
    edges = [first + (last + 1 - first) * step // count for step in range(count + 1)]
    return tuple(pairwise(edges))


def _counts(context: Context, batches: Batches, wanted: Wanted) -> dict[str, int]:
    cutoff = batches.cutoff(context.options["older_than"])
    limit = context.options["limit"] or 2**62
    found = {}
    for source in context.options["source"] or SOURCES:
        found[source] = batches.next(source, after=0, limit=limit, cutoff=cutoff, wanted=wanted)[2]
    return found


def _nothing_done() -> dict[str, int]:
    return dict.fromkeys(("tasks", "attempts", "withdrawn", "batches", "resumed", "bytes", "files_compacted"), 0)


@dataclass
class Run:
    """One run over the batches of a database. ``done`` counts."""

    context: Context
    lake: Lake
    batches: Batches
    done: dict[str, int] = field(default_factory=_nothing_done)

    def resume(self) -> None:
        """Finish what a killed run has begun."""
        for batch in self.batches.under_way():
            if local_path(batch.lake) != self.lake.root:
                raise PipelineError(
                    f"Tasks {batch.first_id}-{batch.last_id} of {batch.location} are on their way into the lake "
                    f"{batch.lake}. Finish that first: archive --lake {batch.lake}"
                )
            self.done["resumed"] += 1
            self.finish(batch)

    def archive(self, source: str, wanted: Wanted) -> None:
        """Archive what fits, batch after batch."""
        cutoff = self.batches.cutoff(self.context.options["older_than"])
        after = 0
        while (batch := self._freeze(source, after, cutoff, wanted)) is not None:
            after = batch.last_id
            self.finish(batch)

    def _freeze(self, source: str, after: int, cutoff: datetime, wanted: Wanted) -> Batch | None:
        limit = self.context.options["batch_size"]
        if self.context.options["limit"]:
            limit = min(limit, self.context.options["limit"] - self.done["tasks"])
        if limit <= 0:
            return None
        self._step("freeze")
        first, last, number = self.batches.next(source, after=after, limit=limit, cutoff=cutoff, wanted=wanted)
        if not number:
            return None
        return self.batches.freeze(source, (first, last), lake=str(self.lake.root), cutoff=cutoff, wanted=wanted)

    def finish(self, batch: Batch) -> None:
        """Take a batch from where it stands to its end."""
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
        """Export, verify and publish; None for a batch whose tasks have all been changed since it was frozen."""
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
        slices = _slices(batch.first_id, batch.last_id)
        with open_snapshot(database) as snapshot:
            attempts = Selection(database.tables.attempt, ATTEMPTS) if self.batches.failed_attempts(batch) else None
            tasks = _selection(batch, getattr(database.tables, batch.source))
            writer = SliceWriter(export.writer, database, batch, tasks, attempts, snapshot.name, slices)
            numbers = spark.range(0, len(slices), 1, len(slices))
            facts = {"location": batch.location, "source": batch.source, "ids": [batch.first_id, batch.last_id],
                     "horizon": snapshot.horizon}  # fmt: skip
            return export.describe("archive", numbers.mapInArrow(writer, WRITTEN), facts)

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
