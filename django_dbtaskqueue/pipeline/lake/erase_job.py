"""The job ``erase``: the tasks of some references leave the database and the lake, and a proof is kept.

The lake's files are written again without the rows. First ``attempts`` and ``finished`` lose them, then a transaction
deletes the rows of the database and ends with the commit of the lake's ``tasks``: so a run after a kill finds the tasks
that are left by their references. At last the summaries of changed days and the replaced files are deleted.
"""

import getpass
import json
import uuid
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.fs import FileSelector

from django_dbtaskqueue.core.exceptions import CheckFailed, JobOptionError, PipelineError
from django_dbtaskqueue.core.sql.pipeline import StagingStatements
from django_dbtaskqueue.core.sql.retention import CHANGES_TABLE, EraseStatements
from django_dbtaskqueue.pipeline.database import statement_errors
from django_dbtaskqueue.pipeline.jobs import Argument, Context, Job, Result, reader
from django_dbtaskqueue.pipeline.lake import PARTITION, DataFile, Lake, task_ids, writing
from django_dbtaskqueue.pipeline.lake.archive_jobs import some_of
from django_dbtaskqueue.pipeline.lake.export import Batches, Export, remove_out_of_date
from django_dbtaskqueue.pipeline.source import TERMINAL_STATUSES

__all__ = ["Erase"]

reason = reader(str, "a reason of at most 500 characters", lambda text: len(text) <= 500)
UNREFERENCED_FILE_MAX_AGE_H = 24  # a younger file that does not count may belong to a run under way


class Erase(Job):
    """Removes all tasks of these references, such as those of a person: from the task table, the history and the lake,
    with their failed attempts, steps and signals, the copies that operators' changes keep, the used references, and the
    rows that a load has staged: one that runs then ends with an error.

    The lake's files are written again without them, and the old files are deleted at once. The result is a proof: the
    rows of each place before and after. It is printed, and stored in the audit, which does not name the references. If
    a row is left, or a reference matches nothing, the exit code is 3. A task that is not finished, or that another task
    waits for, is refused: then nothing is removed. After a kill, run it again. --dry-run only counts.
    """

    name = "erase"
    summary = "remove the tasks of a person everywhere, with a proof"
    arguments = (
        Argument("reference", "of the tasks to remove", many=True),
        Argument("reference_file", "file in UTF-8 with one reference in each line, as it is", metavar="FILE"),
        Argument("queue", "only tasks of this queue", many=True),
        Argument("reason", "why, for the audit, such as the number of the request", reason, ""),
        Argument("other_table", "a task table that needs a run of its own, which the result names", many=True),
    )

    def run(self, context: Context) -> Result:
        """Return the proof. Raises PipelineError for tasks that cannot be removed, and CheckFailed if rows are left."""
        database, references = context.need_database(), _references(context)
        lake = Lake.at(context.lake) if context.lake else None
        with Batches.locked(database) as batches:
            erasure = Erasure(context, batches, lake, references)
            other_lakes = erasure.other_lakes()
            if lake is not None and not context.dry_run:
                batches.resume(lake)
            before = erasure.found()
            erasure.refuse_unfinished(before)
            unknown = [one for one in references if one not in before.references]
            facts = {"references": len(references), "references_not_found": len(unknown), "before": before.counts}
            proof: Result = {**facts, "dry_run": True} if context.dry_run else erasure.performed(before, facts)
        more = {"not_found": unknown, "erase_here_too": other_lakes, "other_tables": [*context.options["other_table"]]}
        proof = {**proof, **{name: found for name, found in more.items() if found}}
        faults = []
        if left := [place for place, number in proof.get("after", {}).items() if number]:
            faults.append(f"Rows are left ({', '.join(left)}), which were written meanwhile. Run it again.")
        if proof.get("files_not_deleted"):
            faults.append("The lake has files of killed runs that are younger than a day. Run it again later.")
        if unknown:
            reason = f"Nothing has {len(unknown):,} of these references: {some_of([*map(repr, unknown)])}"
            faults.append(f"{reason}. They were erased before, or are written another way.")
        if faults:
            raise CheckFailed(" ".join(faults), proof)
        return proof

    def as_text(self, result: Result) -> str:
        after = {place: f" -> {number:,}" for place, number in result.get("after", {}).items()}
        lines = [f"{place}: {number:,}{after.get(place, '')}" for place, number in result["before"].items()]
        facts = {name: value for name, value in result.items() if name not in ("before", "after")}
        return "\n".join([*lines, super().as_text(facts)])


def _references(context: Context) -> tuple[str, ...]:
    """Return the references, each a line of the file, spaces and all. Raises JobOptionError if there is none."""
    references = [*context.options["reference"]]
    if file := context.options["reference_file"]:
        try:
            lines = Path(file).read_bytes().decode("utf-8-sig").split("\n")
            references += [name for line in lines if (name := line.removesuffix("\r"))]
        except (OSError, UnicodeError) as error:
            raise JobOptionError("--reference-file", f"{file} cannot be read: {error}") from None
    if not references:
        raise JobOptionError("--reference", "whose tasks? Give --reference or --reference-file")
    return tuple(dict.fromkeys(references))


@dataclass
class Found:
    """Rows about the tasks: their number in each place, and what it takes to remove them."""

    hot: list[tuple[str, int, str, bool]]  # reference, id, status, not waited for
    keys: set[tuple[str, int]]  # location and id of each task
    references: set[str]  # those that any row has
    counts: dict[str, int]
    files: dict[str, list[tuple[DataFile, pa.Table]]] = field(default_factory=dict)  # with the tasks to remove
    archived: Counter[str] = field(default_factory=Counter)  # tasks of the lake by queue


class Erasure:
    """One run."""

    def __init__(self, context: Context, batches: Batches, lake: Lake | None, references: tuple[str, ...]) -> None:
        self.context, self.lake, self.references = context, lake, references
        self.database, self.link, queues = batches.database, batches.link, context.options["queue"]
        tables, dialect = self.database.tables, self.database.dialect
        self.sql, self.shared = EraseStatements(tables, dialect), self.database.sql
        self.staging = StagingStatements(tables, dialect)
        self.params = {"references": dialect.array(references), "queues": dialect.array(queues), "every": not queues}

    def other_lakes(self) -> list[str]:
        """Return further lakes with tasks of this database; each needs a run of its own. Raises JobOptionError."""
        lakes = [lake for (lake,) in self.link.run(self.sql.lakes)]
        if lakes and self.lake is None:
            raise JobOptionError("--lake", f"tasks of this database are in {', '.join(lakes)}: give it, too")
        return [lake for lake in lakes if self.lake is None or lake != self.lake.root]

    def found(self, removed: Collection[tuple[str, int]] = ()) -> Found:
        """Return what there is now, also about tasks that were ``removed``. Raises LakeError for a damaged file."""
        self.context.progress("counting rows", 0, 0)
        hot, here = self._hot(), self.database.location
        history, used = (self.link.run(sql, self.params) for sql in (self.sql.history, self.sql.used_references))
        keys = {*removed, *((location, one) for _, location, one in history), *((here, one) for _, one, _, _ in hot)}
        staged = self._staged()
        references = {row[0] for row in (*hot, *history, *used, *staged)}
        found = Found(hot, keys, references, {"tasks": len(hot), "history": len(history)})
        for table in ("tasks", "finished") if self.lake else ():
            found.files[table] = [*self._files(table, found)]
        for place, (count, _remove) in self.sql.about.items():
            found.counts[place] = int(self.link.run(count, self._rows(found))[0][0])
        found.counts |= {"used references": len(used), "staged rows": len(staged)}
        if self.lake:
            found.files["attempts"] = [*self._files("attempts", found)]
            for table in ("attempts", "finished", "tasks"):
                found.counts[f"lake: {table}"] = sum(tasks.num_rows for _file, tasks in found.files[table])
        return found

    def _hot(self) -> list[tuple[str, int, str, bool]]:
        rows = self.link.run(self.sql.tasks, self.params)
        watched = [task_id for _, task_id, _status, is_watched in rows if is_watched is not None]
        of = {"location": self.database.location, "ids": self.database.dialect.array(watched)}
        needed = {task_id for (task_id,) in self.link.run(self.shared.needed, of)} if watched else set()
        return [(name, one, status, not is_watched and one not in needed) for name, one, status, is_watched in rows]

    def _staged(self, *, remove: bool = False) -> list[tuple[Any, ...]]:
        """Return the references of the rows in staging tables, of loads that run or were killed; remove the rows."""
        found, statement = [], self.sql.delete_staged if remove else self.sql.staged
        for (table,) in self.link.run(self.staging.abandoned, {"age": 0.0}):
            with statement_errors(f"The staging table {table} of a load could not be searched", "Run erase again."):
                rows = self.link.run(statement.format(table=table), self.params)
                found += rows
                if rows and remove and self.link.postgresql:
                    self.link.run(f"VACUUM {table}")
        return found

    def _files(self, table: str, found: Found) -> Iterator[tuple[DataFile, pa.Table]]:
        """Yield the files with rows to remove, and (location, id) of the tasks of these rows."""
        assert self.lake is not None  # noqa: S101 -- asked before
        known = task_ids(found.keys)
        for file in self.lake.files(table):
            if table == "attempts":
                rows = self.lake.read(file, ["location", "task_id"]).rename_columns(["location", "id"])
                rows = rows.join(known, ["location", "id"], join_type="left semi")
            else:
                rows = self.lake.read(file, ["location", "id", "queue_name", "reference_number"])
                rows = rows.filter(pc.is_in(rows["reference_number"], pa.array(self.references, pa.string())))
                if queues := self.context.options["queue"]:
                    rows = rows.filter(pc.is_in(rows["queue_name"], pa.array(queues, pa.string())))
                found.keys.update(zip(rows["location"].to_pylist(), rows["id"].to_pylist(), strict=True))
                found.references.update(rows["reference_number"].to_pylist())
                if table == "tasks":
                    found.archived.update(rows["queue_name"].to_pylist())
            if rows.num_rows:
                yield file, rows.select(["location", "id"])

    def _rows(self, found: Found) -> dict[str, str]:
        return {"rows": json.dumps([{"location": location, "task_id": one} for location, one in sorted(found.keys)])}

    def refuse_unfinished(self, found: Found) -> None:
        running = [one for _, one, status, _ in found.hot if status == "PROCESSING"]
        waiting = [one for _, one, status, _ in found.hot if status not in (*TERMINAL_STATUSES, "PROCESSING")]
        needed = [one for _, one, _, free in found.hot if not free]
        for refused, reason in (
            (running, "run now. Wait for their end"),
            (waiting, "have not run yet. Cancel them first, with `taskqueue cancel`"),
            (needed, "are waited for by others. Wait for these to end"),
        ):
            if refused:
                tasks = f"{len(refused):,} of these tasks (task {some_of(refused)})"
                raise PipelineError(f"{tasks} {reason}, then run erase again. Nothing was removed.")

    def performed(self, before: Found, facts: Result) -> Result:
        audit = self._audit_begun(facts)
        self.context.progress("removing", 0, 0)
        rewritten = self._rewrite("attempts", before) + self._rewrite("finished", before)
        if not self.link.postgresql:
            self.link.run("PRAGMA secure_delete = ON")  # freed pages are overwritten
        self.context.progress("deleting", 0, 0)
        self._staged(remove=True)
        with self.link.transaction():
            self._delete(before)
            rewritten += self._rewrite("tasks", before)
            self.context.progress("committing", 0, 0)
        if self.lake is not None:
            remove_out_of_date(self.lake)  # summaries have messages and the beginnings of references
        self.context.progress("vacuuming", 0, 0)
        vacuumed = self._vacuum()
        deleted, unreferenced = delete_replaced(self.lake) if self.lake else (0, 0)
        proof = {
            **facts, "after": self.found(before.keys).counts, "files_rewritten": rewritten, "files_deleted": deleted,
            "files_not_deleted": unreferenced, "database_vacuumed": vacuumed, "audit_entry": audit,
        }  # fmt: skip
        changed = before.counts["tasks"] + before.counts["history"] + before.counts.get("lake: tasks", 0)
        self.link.run(self.sql.audited, {"id": audit, "changed": changed, "details": json.dumps(proof)})
        return proof

    def _audit_begun(self, facts: Result) -> int:
        actor = "command"
        with suppress(OSError, KeyError, ImportError):  # a container's user may have no name
            actor = getpass.getuser()
        details = json.dumps({**facts, "state": "started"})
        values = {"actor": actor[:200], "reason": self.context.options["reason"], "details": details}
        return int(self.link.run(self.sql.audit, values)[0][0])

    def _delete(self, before: Found) -> None:
        if self._hot() != before.hot:
            raise PipelineError("Tasks of these references were changed meanwhile. Run erase again.")
        ids = {"ids": self.database.dialect.array([task_id for _, task_id, _status, _free in before.hot])}
        for _count, remove in self.sql.about.values():
            self.link.run(remove, self._rows(before))
        for statement in (self.shared.count_chosen, self.shared.note_chosen, self.shared.delete_chosen):
            self.link.run(statement, ids)
        for statement in (self.sql.count_history, self.sql.delete_history, self.sql.delete_used_references):
            self.link.run(statement, self.params)
        for queue, number in before.archived.items():
            self.link.run(self.sql.count_archived, {"queue": queue, "count": number})

    def _rewrite(self, table: str, before: Found) -> int:
        """Write the files of a table again without the tasks; return how many there were."""
        if self.lake is None or not before.files[table]:
            return 0
        export = Export(self.lake, uuid.uuid4().hex)
        self.lake.commit(table, export.without(before.files[table]), [file for file, _tasks in before.files[table]])
        return len(before.files[table])

    def _vacuum(self) -> bool:
        """Remove the deleted rows from the database's files; return whether all tables could be vacuumed."""
        if not self.link.postgresql:
            self.link.run("PRAGMA wal_checkpoint(TRUNCATE)")
            return True
        warnings: list[object] = []  # of tables that this user may not vacuum
        self.link.connection.add_notice_handler(warnings.append)
        own = self.sql.tables
        for table in (own.task, own.history, own.attempt, own.step, own.ledger, CHANGES_TABLE):
            self.link.run(f"VACUUM {table}")
        return not warnings


def delete_replaced(lake: Lake) -> tuple[int, int]:
    """Delete the replaced files, and others that do not count once a day old; return how many, and how many stay."""
    deleted, left = 0, 0
    for table in lake.tables():
        with writing(lake.root):
            before = _stored(lake, table)
            lake.vacuum(table, 0, full=False)
            lake.vacuum(table, UNREFERENCED_FILE_MAX_AGE_H)
            after = _stored(lake, table)
        deleted += len(before - after)
        left += len(after - {one.name for one in lake.files(table)})
    return deleted, left


def _stored(lake: Lake, table: str) -> set[str]:
    """Return the names of the Parquet files in the folder of a table, whether they count or not."""
    found = lake.store.files.get_file_info(FileSelector(table, recursive=True))
    return {one.path for one in found if one.path.startswith(f"{table}/{PARTITION}") and one.is_file}
