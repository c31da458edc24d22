"""The jobs of the archive: ``archive`` fills it, ``replay`` and ``stream`` copy tasks and delete nothing.

An archived task leaves the database, and none is lost. Each batch goes through these steps::

    freeze    one row says which tasks: a range of ids and a predicate. The tasks are not touched.
    export    Spark writes them to files in the lake, which do not count yet.
    verify    the files are read again. A task that breaks a rule of ``check`` is quarantined: it stays in the database.
    delete    a transaction deletes the rows that are in the files and still unchanged. Files lose the rows that stay.
    publish   one commit to the lake's log of each table makes the files count.
    close     the transaction marks the batch as closed and ends: now the rows are gone.

If a run is killed before the end, nothing has left the database. The next run revokes what the batch may have
published, abandons the batch, and archives its tasks again.
"""

import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Window, functions as F

from django_dbtaskqueue.core.columns import COPIED
from django_dbtaskqueue.core.durations import MAX_DELAY, parse_length
from django_dbtaskqueue.core.exceptions import CheckFailed, JobOptionError, PipelineError
from django_dbtaskqueue.core.sql.pipeline import ATTEMPT_KEYS, TASK_KEYS
from django_dbtaskqueue.pipeline import source
from django_dbtaskqueue.pipeline.jobs import Argument, Context, Job, Options, Result, above_zero, count, day
from django_dbtaskqueue.pipeline.lake import DataFile, Lake, export as lake_export, read_lake, task_ids, writing
from django_dbtaskqueue.pipeline.lake.export import Batches, Export, ExportedBatch, TaskFilters
from django_dbtaskqueue.pipeline.reports.quality import QUALITY_COLUMNS, rule_breaks
from django_dbtaskqueue.pipeline.source import TERMINAL_STATUSES
from django_dbtaskqueue.pipeline.source.enqueue_job import GUARDS, guarded, refuse_unknown_queue, rejected, rows_where
from django_dbtaskqueue.pipeline.source.stream_reader import START_ANEW
from django_dbtaskqueue.pipeline.spark import Cached, put

__all__ = ["Archive", "Replay", "Stream"]

SLICE_IDS = 250_000  # ids that one Spark task exports, while there are at most MAX_SLICES
MAX_SLICES = 64
NO_LIMIT = 2**62  # of tasks
ARCHIVED_TABLES = ("history", "task")
RESULT_COUNTS = ("tasks", "attempts", "withdrawn", "quarantined", "batches", "resumed", "bytes", "files_compacted")


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
        Argument("compact", "merge the small files of a day once there are N", count, lake_export.MIN_SMALL_FILES),
        Argument("no_compact", "leave small files as they are", bool, False),
    )

    def run(self, context: Context) -> Result:
        """Archive, and return how many ``tasks`` and ``attempts`` left the database in how many ``batches``."""
        options, path = context.options, context.need_lake()
        tables = options["source"] or ARCHIVED_TABLES
        Lake(path)  # refuses what is not the address of a lake
        with Batches.locked(context.need_database()) as batches:
            filters = batches.filters(options["older_than"], options["status"] or TERMINAL_STATUSES, options["queue"])
            if context.dry_run:
                found = [batches.next(one, 0, options["limit"] or NO_LIMIT, filters) for one in tables]
                return {"tasks": sum(number for _first, _last, number in found), "dry_run": True}
            run = ArchiveRun(context, Lake.at(path, create=True), batches, filters)
            run.done["resumed"] = batches.resume(run.lake)
            batches.unwatch()
            for table in tables:
                run.archive(table)
            if not options["no_compact"] and run.done["batches"]:
                tokens = [token for token, _location, _lake in batches.unfinished()]
                run.done["files_compacted"] = lake_export.compact(
                    run.lake, context.damaged, without=tokens, fewest=options["compact"], progress=context.progress
                )
        if run.broken:
            run.raise_broken()
        return run.done


@dataclass
class ArchiveRun:
    """One run over the batches of a database; ``done`` holds its counts, ``broken`` the tasks that break each rule."""

    context: Context
    lake: Lake
    batches: Batches
    filters: TaskFilters
    done: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(RESULT_COUNTS, 0)))
    broken: dict[str, list[int]] = field(default_factory=dict)

    def archive(self, table: str) -> None:
        after, most, options = 0, self.context.options["limit"] or NO_LIMIT, self.context.options
        while (limit := min(options["batch_size"], most - self.done["tasks"])) > 0:
            self._step("freeze")
            if (batch := self.batches.freeze(table, after, limit, self.lake.root, self.filters)) is None:
                return
            after = batch.last_id
            self._finish(batch)

    def _finish(self, batch: ExportedBatch) -> None:
        export = Export(self.lake, batch.token)
        self._step("export")
        files, horizon = self._export(export, batch)
        self._step("verify")
        tasks = self.lake.rows("tasks", files, {*TASK_KEYS, *QUALITY_COLUMNS})
        attempts = self.lake.rows("attempts", files, ATTEMPT_KEYS)
        good, bad = self._judged(tasks)
        if bad.num_rows:  # a task that stays keeps its attempts
            attempts = attempts.join(bad, ["location", "task_id"], ["location", "id"], "left anti")
        size = sum(one.bytes for one in files)
        self._step("delete")
        with self.batches.deleting(batch, good, attempts, size=size, horizon=horizon) as deleted:
            out = pa.concat_tables([bad, task_ids(deleted.stayed)])
            kept = [*export.without((one, out) for one in files)] if out.num_rows else files
            self._step("publish")
            for table in ("attempts", "tasks"):
                added = [one for one in kept if one.table == table]
                if added and not self.lake.commit(table, added, once=(batch.token, 1)):
                    raise PipelineError(f"Batch {batch.token} was revoked by another process. Start again.")
            self._step("close")
        self.done.update(tasks=deleted.tasks, attempts=deleted.attempts, withdrawn=len(deleted.stayed))
        self.done.update(quarantined=bad.num_rows, batches=1, bytes=size)

    def _export(self, export: Export, batch: ExportedBatch) -> tuple[list[DataFile], int | None]:
        """Write the batch's files; return them and the horizon of the state they show."""
        spark, database = self.context.spark, self.batches.database
        number = min(MAX_SLICES, -(-(batch.last_id - batch.first_id + 1) // SLICE_IDS))
        slices = source.even_slices(batch.first_id, batch.last_id, number)
        with source.open_snapshot(database) as snapshot:
            wanted: list[source.Condition] = [("status", "in", list(batch.filters.statuses))]
            wanted += [("queue_name", "in", list(batch.filters.queues))] if batch.filters.queues else []
            wanted += [("watched", "known", False)] if batch.source == "task" else []
            tasks = source.Selection(database, batch.source, source.SCHEMAS[batch.source], tuple(wanted), snapshot.name)
            writer = partial(lake_export.write_slices, export, tasks, batch.filters.cutoff, slices)
            return lake_export.files_of(spark.range(0, len(slices), 1, len(slices)), writer), snapshot.horizon

    def _judged(self, tasks: pa.Table) -> tuple[pa.Table, pa.Table]:
        """Return the tasks that obey the rules, and (location, id) of those that do not."""
        bad = pa.repeat(pa.scalar(False), tasks.num_rows)
        for name, rows in {} if self.context.options["no_check"] else rule_breaks(tasks).items():
            bad = pc.or_(bad, rows)
            self.broken.setdefault(name, []).extend(tasks["id"].filter(rows).to_pylist())
        return tasks.filter(pc.invert(bad)), tasks.select(["location", "id"]).filter(bad)

    def raise_broken(self) -> None:
        """Raise CheckFailed with the counts of the run, which has archived all other tasks."""
        rules = [f"{name}: {len(ids):,} rows (task {some_of(ids)})" for name, ids in self.broken.items()]
        raise CheckFailed(
            f"Tasks that break rules stay in the database ({'; '.join(rules)}). Correct or delete them, or archive "
            "them as they are with --no-check.",
            {**self.done, "broken": {name: len(ids) for name, ids in self.broken.items()}},
        )

    def _step(self, name: str) -> None:
        self.context.progress(name, self.done["tasks"], 0)


def some_of(found: Sequence[object], most: int = 20) -> str:
    """Return the first of these as text."""
    return ", ".join([*map(str, found[:most]), *["…"][: len(found) > most]])


# -- copies: into the lake, and out of it as new tasks -----------------------------------------------------------------

MAX_SHOWN_REFERENCES = 5  # by a dry run


def sink(lake: Lake, stream: str, location: str, rows: DataFrame, number: int) -> None:
    """Write a micro-batch into the lake's ``finished``, unless the lake has its number: Spark may repeat it."""
    if lake.has("finished", stream, number):
        return
    export = Export(lake, uuid.uuid4().hex)
    if files := lake_export.files_of(rows, partial(lake_export.write_finished, export, location)):
        lake.commit("finished", lake.sound(files), once=(stream, number))


def checkpoint(lake: Lake, location: str, given: str | None = None) -> tuple[Path, str]:
    """Return the checkpoint folder of a location's stream, and the stream's name in it; without it a new one starts.

    Raises PipelineError for one that was set back.
    """
    if given is None and lake.store.path is None:
        raise JobOptionError("--checkpoint", "a lake in an object store needs a local folder that stays between runs")
    folder = (Path(given) if given else Path(lake.root) / "finished" / "_streams") / location
    name = folder / "dbtaskqueue-stream"
    with writing(str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
        if not name.exists():
            put(name, uuid.uuid4().hex)
    last = max((int(one.name) for one in (folder / "offsets").glob("[0-9]*")), default=-1)
    if lake.has("finished", name.read_text(), last + 1):  # of another content: these rows would be left out
        reason = f"The lake has later micro-batches of the stream than number {last}, the last of {folder}"
        raise PipelineError(f"{reason}: it was set back, so {START_ANEW}")
    return folder.absolute(), name.read_text()


class Stream(Job):
    """Copies each finish of a task into the lake's `finished`, in micro-batches, until it is stopped with Ctrl-C.

    With --once it copies what has finished since the last time, and ends. Each micro-batch is one change of the lake.
    After a kill the next start continues: no finish is missing or copied twice. A task that is reprocessed and finishes
    again is copied again, with another total_attempt. Nothing is deleted: only `archive` archives tasks.

    The first start registers the stream: a trigger on the task table writes an event for each task that finishes, and
    a micro-batch reads only these tasks. The first micro-batch reads the whole table, and so does one after 7 days
    without any. Only the owner of the table can make the trigger: without it each micro-batch reads the whole table.
    A stream that will not come back is removed with --unregister NAME, which drops the trigger with the last stream.
    """

    name = "stream"
    summary = "copy finished tasks to the lake, continuously"
    arguments = (
        Argument("once", "end when all that has finished by now is copied", bool, False),
        Argument("checkpoint", "a local folder that holds how far the copy is; default: below a lake in a folder"),
        Argument("interval", "time between two micro-batches", parse_length, timedelta(seconds=10)),
        Argument("unregister", "remove the registered stream of this name, which `manage.py taskqueue doctor` shows"),
    )

    def run(self, context: Context) -> Result:
        """Return how many ``rows`` this run copied in how many ``files``; ``whole_table``: why it read all rows."""
        database, options = context.need_database(), context.options
        if not database.postgresql:
            raise PipelineError("Finished tasks can be streamed from PostgreSQL only. With SQLite, use `archive`.")
        if options["unregister"]:
            if not context.dry_run:
                source.unregister_stream(database, options["unregister"])
            return {"unregistered": options["unregister"], **({"dry_run": True} if context.dry_run else {})}
        lake = Lake.at(context.need_lake(), create=not context.dry_run)
        if context.dry_run:
            return {"rows": 0, "files": 0, "dry_run": True}
        place, name = checkpoint(lake, database.location, options["checkpoint"])
        before, reason = {one.path for one in lake.files("finished")}, ""
        try:
            rows = source.stream_tasks(context.spark, database, name=name)
        except PipelineError as error:
            reason = str(error)
            context.progress(f"each micro-batch reads the whole table: {reason}", 0, 0)
            rows = source.stream_tasks(context.spark, database)
        writer = rows.writeStream.foreachBatch(partial(sink, lake, name, database.location))
        interval = f"{options['interval'].total_seconds()} seconds"
        trigger: Any = {"availableNow": True} if options["once"] else {"processingTime": interval}
        context.progress("streaming", 0, 0)
        for tries_left in (2, 1, 0):
            query = writer.option("checkpointLocation", str(place)).trigger(**trigger).start()
            try:
                query.awaitTermination()
                break
            except StreamingQueryException as error:  # Spark gives a process of Python ten seconds to start
                if not tries_left or "failed to connect back" not in str(error):
                    raise
            finally:
                query.stop()
        added = [one for one in lake.files("finished") if one.path not in before]
        shown = {"whole_table": reason} if reason else {}
        return {"rows": sum(one.rows for one in added), "files": len(added), **shown}


def chosen_tasks(tasks: DataFrame, options: Options) -> DataFrame:
    """Return the archived tasks by queue, status, reference, day of their finish, and the user's SQL."""
    for column, name in (("queue_name", "queue"), ("status", "status"), ("reference_number", "reference")):
        if options[name]:
            tasks = tasks.filter(F.col(column).isin(*options[name]))
    if options["since"]:
        tasks = tasks.filter(F.col("finished_date") >= F.lit(options["since"]))
    if options["until"]:
        tasks = tasks.filter(F.col("finished_date") <= F.lit(options["until"]))
    tasks = rows_where(tasks, options["where"])
    return tasks.orderBy("finish_time", "location", "id").limit(options["limit"]) if options["limit"] else tasks


def as_new(tasks: DataFrame, to: str | None, rate: float | None) -> DataFrame:
    """Return archived tasks as new ones; of each (queue, reference) the one that was archived last.

    A task without a reference gets one made of its old id, so that replaying it twice adds one task. With a ``rate``
    so many tasks become due per second from now on.
    """
    # How long the task could be started after it was due. A task that has run counts as due at its creation.
    due = F.when(F.col("total_attempt") == 0, F.greatest("create_time", "next_process_time"))
    span = F.col("expire_time") - F.coalesce(due, "create_time")
    values = {
        "queue": F.lit(to) if to else F.col("queue_name"),
        "reference": F.coalesce("reference_number", F.concat_ws(":", F.lit("replay"), "location", "id")),
        **{one.argument: F.make_dt_interval(secs=one.db) if one.type == "float8" else F.col(one.db) for one in COPIED},
        "ttl": F.when(span.isNotNull(), F.least(F.greatest(span, F.lit(timedelta(0))), F.lit(MAX_DELAY))),
        "_ended": F.coalesce("finish_time", "last_update_time"),
        "_id": F.col("id"),
    }
    last = Window.partitionBy("queue", "reference").orderBy(F.desc("_ended"), F.desc("_id"))
    new = tasks.select(*(value.alias(name) for name, value in values.items()))
    new = new.withColumn("_rank", F.row_number().over(last)).filter("_rank = 1")
    if rate is not None:
        place = F.row_number().over(Window.orderBy("_ended", "_id")) - 1
        due = F.timestamp_seconds(F.lit(datetime.now(UTC).timestamp()) + place / F.lit(rate))
        new = new.withColumn("run_at", due)
    return new.drop("_ended", "_id", "_rank")


class Replay(Job):
    """Enqueues archived tasks again, as new tasks with the old reference, payload, priority, group and tag.

    A task whose reference is taken in its queue, by a task of any status, is left out: so a second replay adds nothing
    while the first one's tasks exist. A task without a reference gets one made of its old id. The archive is not
    changed. A task that the queue would not take now is left out: --rejects FILE says why, and without it the exit code
    is 3. --dry-run returns the counts of the run, and the first references.
    """

    name = "replay"
    summary = "enqueue archived tasks again"
    arguments = (
        Argument("queue", "only tasks of this queue", many=True),
        Argument("status", "only tasks that ended so", many=True, choices=TERMINAL_STATUSES),
        Argument("reference", "only the task of this reference", many=True),
        Argument("since", "only tasks that finished on this day or later", day),
        Argument("until", "only tasks that finished on this day or earlier", day),
        Argument("where", "only tasks for which this SQL is true, such as \"process_result LIKE '%Kyiv%'\""),
        Argument("limit", "at most N tasks, the oldest first", count),
        Argument("to", "the queue to put them into; default: each task's own"),
        Argument("rate", "spread them: N become due in a second", above_zero),
        *GUARDS,
    )

    def run(self, context: Context) -> Result:
        """Return how many tasks were ``chosen``, ``enqueued``, ``already_there`` and ``rejected``."""
        database, options = context.need_database(), context.options
        refuse_unknown_queue("--to", options)
        if options["since"] and options["until"] and options["since"] > options["until"]:
            raise JobOptionError("--since", f"{options['since']} comes after --until {options['until']}")
        context.progress("reading the archive", 0, 0)
        archived = read_lake(
            context.spark, context.need_lake(), database=database, since=options["since"], damaged=context.damaged
        )
        with Cached() as cached:
            new = cached.hold(as_new(chosen_tasks(archived, options), options["to"], options["rate"]))
            number = new.count()
            names = new.select(F.concat_ws("/", "queue", "reference")).orderBy("queue", "reference")
            first = names.limit(MAX_SHOWN_REFERENCES).collect() if context.dry_run else []
            context.progress("enqueueing", 0, number)
            guards = {**guarded(context), "on_invalid": "reject"}
            report = source.write_tasks(new, database, on_duplicate="ignore", **guards)
        enqueued = "would_enqueue" if context.dry_run else "enqueued"
        counts = {"chosen": number, enqueued: report.enqueued, "already_there": report.ignored}
        shown = {"first": [name for (name,) in first]} if first else {}
        result = {**counts, **rejected(context, report.rejects, "w"), **shown}
        if report.rejects and not options["rejects"]:
            one = report.rejects[0]
            reason = f"The first, {one.queue}/{one.reference}: {one.reason}. --rejects FILE lists them"
            raise CheckFailed(f"{report.rejected:,} of these tasks cannot be enqueued. {reason}.", result)
        return result
