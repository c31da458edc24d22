"""The job ``archive``: finished tasks and their failed attempts move from the database to the lake; none is lost.

Each batch goes through these steps::

    freeze    one row says which tasks: a range of ids and a predicate. The tasks are not touched.
    export    Spark writes them to files in the lake, which do not count yet.
    verify    the files are read again and compared with their checksums. A task that breaks a rule of ``check`` is
              quarantined: it stays in the database.
    delete    a transaction deletes the rows that are in the files and still unchanged. A row that was reprocessed,
              locked or removed meanwhile stays. Files lose the rows that stay.
    publish   one commit to the lake's log of each table makes the files count.
    close     the transaction marks the batch as closed and ends: now the rows are gone.

If a run is killed before the end of the transaction, nothing has left the database. The next run revokes what the
batch may have published, abandons the batch, and archives its tasks again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from django_dbtaskqueue.core.durations import parse_length
from django_dbtaskqueue.core.exceptions import CheckFailed, PipelineError
from django_dbtaskqueue.core.sql.pipeline import ATTEMPT_KEYS, TASK_KEYS
from django_dbtaskqueue.pipeline.jobs import Argument, Context, Job, Result, count
from django_dbtaskqueue.pipeline.lake import DataFile, Lake, store_of
from django_dbtaskqueue.pipeline.lake.export import (
    MIN_SMALL_FILES,
    Batch,
    Batches,
    Export,
    SliceWriter,
    TaskFilters,
    compact,
)
from django_dbtaskqueue.pipeline.reports.quality import QUALITY_COLUMNS, rule_breaks
from django_dbtaskqueue.pipeline.schema import SCHEMAS, TERMINAL_STATUSES
from django_dbtaskqueue.pipeline.source.task_reader import Condition, Selection, even_slices, open_snapshot

__all__ = ["Archive"]

SLICE_IDS = 250_000  # ids that one Spark task exports, while there are at most MAX_SLICES
MAX_SLICES = 64
MAX_NAMED_TASKS = 20  # of those that break one rule
ARCHIVED_TABLES = ("history", "task")
RESULT_COUNTS = ("tasks", "attempts", "withdrawn", "quarantined", "batches", "resumed", "bytes", "files_compacted")
VERIFIED_COLUMNS = [*dict.fromkeys([*TASK_KEYS, *QUALITY_COLUMNS])]


class Archive(Job):
    """Moves finished tasks, from the task table and the history, with their failed attempts, into the lake.

    Works in batches: freeze, export, verify, delete what is still unchanged, publish, close. After a kill nothing is
    lost or doubled: the next run archives the unfinished batch again. A task that is reprocessed meanwhile stays in the
    database, and so does a failed task that another one waits for. A task that breaks a rule of `check` is quarantined:
    it stays in the database too, the others are archived, and the exit code is 3.
    """

    name = "archive"
    summary = "move finished tasks from the database to the lake"
    arguments = (
        Argument("older_than", "archive tasks that finished at least this long ago", parse_length, timedelta(days=1)),
        Argument("queue", "only this queue", many=True),
        Argument("status", "only tasks that ended so", many=True, choices=TERMINAL_STATUSES),
        Argument("source", "only this table", many=True, choices=ARCHIVED_TABLES),
        Argument("batch_size", "tasks in one batch, that is in one transaction", count, 500_000),
        Argument("limit", "stop after about N tasks", count),
        Argument("no_check", "archive tasks that break a rule of `check` too", bool, False),
        Argument("compact", "merge the small files of a day once there are N", count, MIN_SMALL_FILES),
        Argument("no_compact", "leave small files as they are", bool, False),
    )

    def run(self, context: Context) -> Result:
        """Archive, and return how many ``tasks`` and ``attempts`` left the database in how many ``batches``."""
        options, path = context.options, context.need_lake()
        sources = options["source"] or ARCHIVED_TABLES
        store_of(path)  # refuses what is not the address of a lake
        with Batches.locked(context.need_database()) as batches:
            filters = batches.filters(options["older_than"], options["status"] or TERMINAL_STATUSES, options["queue"])
            if context.dry_run:
                found = [batches.next(one, 0, options["limit"] or 2**62, filters) for one in sources]
                return {"tasks": sum(number for _first, _last, number in found), "dry_run": True}
            run = Run(context, Lake.at(path, create=True), batches, filters)
            run.done["resumed"] = batches.resume(run.lake)
            batches.unwatch()
            for source in sources:
                run.archive(source)
            if not options["no_compact"] and run.done["batches"]:
                tokens = [token for token, _location, _lake in batches.unfinished()]
                run.done["files_compacted"] = compact(
                    run.lake, context.damaged, without=tokens, fewest=options["compact"], progress=context.progress
                )
        if run.broken:
            run.raise_broken()
        return run.done


@dataclass
class Run:
    """One run over the batches of a database; ``done`` holds its counts, ``broken`` the tasks that break each rule."""

    context: Context
    lake: Lake
    batches: Batches
    filters: TaskFilters
    done: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(RESULT_COUNTS, 0))
    broken: dict[str, list[int]] = field(default_factory=dict)

    def archive(self, source: str) -> None:
        after = 0
        while (batch := self._freeze(source, after)) is not None:
            after = batch.last_id
            self._finish(batch)

    def _freeze(self, source: str, after: int) -> Batch | None:
        limit = self.context.options["batch_size"]
        if self.context.options["limit"]:
            limit = min(limit, self.context.options["limit"] - self.done["tasks"])
        if limit <= 0:
            return None
        self._step("freeze")
        first, last, number = self.batches.next(source, after, limit, self.filters)
        if not number:
            return None
        return self.batches.freeze(source, (first, last), self.lake.root, self.filters)

    def _finish(self, batch: Batch) -> None:
        export = Export(self.lake, batch.token)
        self._step("export")
        files, horizon = self._export(export, batch)
        self._step("verify")
        tasks, attempts = (
            self.lake.rows(table, files, columns)
            for table, columns in (("tasks", VERIFIED_COLUMNS), ("attempts", ATTEMPT_KEYS))
        )
        good, bad = self._judged(tasks)
        if bad.num_rows:  # a task that stays keeps its attempts
            attempts = attempts.join(bad, ["location", "task_id"], ["location", "id"], "left anti")
        size = sum(one.bytes for one in files)
        self._step("delete")
        with self.batches.deleting(batch, good, attempts, size=size, horizon=horizon) as deleted:
            kept = _without(export, files, pa.concat_tables([bad, task_ids(deleted.stayed)]))
            self._step("publish")
            for table in ("attempts", "tasks"):
                added = [one for one in kept if one.table == table]
                if added and not self.lake.commit(table, added, once=(batch.token, 1)):
                    raise PipelineError(f"Batch {batch.token} was revoked by another process. Start again.")
            self._step("close")
        counts = {"tasks": deleted.tasks, "attempts": deleted.attempts, "withdrawn": len(deleted.stayed),
                  "quarantined": bad.num_rows, "batches": 1, "bytes": size}  # fmt: skip
        for name, number in counts.items():
            self.done[name] += number

    def _export(self, export: Export, batch: Batch) -> tuple[list[DataFile], int | None]:
        """Write the batch's files; return them and the horizon of the state they show."""
        spark, database = self.context.spark, self.batches.database
        number = min(MAX_SLICES, -(-(batch.last_id - batch.first_id + 1) // SLICE_IDS))
        slices = even_slices(batch.first_id, batch.last_id, number)
        with open_snapshot(database) as snapshot:
            wanted: list[Condition] = [("status", "in", list(batch.filters.statuses))]
            wanted += [("queue_name", "in", list(batch.filters.queues))] if batch.filters.queues else []
            wanted += [("watched", "known", False)] if batch.source == "task" else []
            tasks = Selection(getattr(database.tables, batch.source), SCHEMAS[batch.source], tuple(wanted))
            writer = SliceWriter(export, database, batch, tasks, snapshot.name, slices)
            return export.files_of(spark.range(0, len(slices), 1, len(slices)), writer), snapshot.horizon

    def _judged(self, tasks: pa.Table) -> tuple[pa.Table, pa.Table]:
        """Return the tasks that obey the rules, and (location, id) of those that do not."""
        bad = pa.repeat(pa.scalar(False), tasks.num_rows)
        for name, rows in {} if self.context.options["no_check"] else rule_breaks(tasks).items():
            bad = pc.or_(bad, rows)
            self.broken.setdefault(name, []).extend(tasks["id"].filter(rows).to_pylist())
        return tasks.filter(pc.invert(bad)), tasks.select(["location", "id"]).filter(bad)

    def raise_broken(self) -> None:
        """Raise CheckFailed with the counts of the run, which has archived all other tasks."""
        rules = "; ".join(
            f"{name}: {len(ids):,} rows (task {', '.join(map(str, ids[:MAX_NAMED_TASKS]))}"
            f"{', …' if len(ids) > MAX_NAMED_TASKS else ''})"
            for name, ids in self.broken.items()
        )
        raise CheckFailed(
            f"Tasks that break rules stay in the database ({rules}). Correct or delete them, or archive them as they "
            "are with --no-check.",
            {**self.done, "broken": {name: len(ids) for name, ids in self.broken.items()}},
        )

    def _step(self, name: str) -> None:
        self.context.progress(name, self.done["tasks"], 0)


def task_ids(tasks: Collection[tuple[str, int]]) -> pa.Table:
    """Return (location, id) of tasks as a table."""
    locations, ids = zip(*tasks, strict=True) if tasks else ((), ())
    return pa.table({"location": pa.array(locations, pa.string()), "id": pa.array(ids, pa.int64())})


def _without(export: Export, files: list[DataFile], tasks: pa.Table) -> list[DataFile]:
    if not tasks.num_rows:
        return files
    return [kept for one in files if (kept := export.without(one, tasks)) is not None]
