"""The job ``convert``: a lake of an earlier version, which had a log of its own, becomes one of Delta Lake tables.

OLD/tasks/finished_date=2026-01-31/queue=claims/….parquet    (and attempts, finished)
OLD/_dbtaskqueue/lake.json                                   the version of the layout
OLD/_dbtaskqueue/log/….json                                  one file for each change: files added, files removed
OLD/_dbtaskqueue/streams/LOCATION/                           the checkpoint of ``stream``
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from django_dbtaskqueue.core.exceptions import LakeError, PipelineError
from django_dbtaskqueue.core.sql.pipeline import ALL_BATCHES
from django_dbtaskqueue.pipeline.jobs import Argument, Context, Job, Result
from django_dbtaskqueue.pipeline.lake import PARTITION, ROW_TABLES, Lake, conformed
from django_dbtaskqueue.pipeline.lake.archive_batches import Batches
from django_dbtaskqueue.pipeline.lake.export import Export
from django_dbtaskqueue.pipeline.lake.store import LocalFolder, reading, store_of, writing
from django_dbtaskqueue.pipeline.spark import put

CLOSED_LAYOUT = 2  # the earlier program refuses a lake of this layout: it writes no more to it
ABANDONED = "Its lake was converted before these tasks were deleted: they are archived again."
RESULT_COUNTERS = ("files", "rows", "converted_before", "left_out", "withdrawn")


@dataclass(frozen=True)
class OldFile:
    """A file that the old log names. ``path`` is below the old lake's folder."""

    table: str
    path: str
    rows: int
    bytes: int
    sha256: str

    @property
    def batch(self) -> str:
        return Path(self.path).name.partition("-")[0]

    @property
    def token(self) -> str:
        """The token of the commit that converts it: the same in each run."""
        return hashlib.sha256(f"convert {self.path} {self.sha256}".encode()).hexdigest()[:32]

    @property
    def day(self) -> str:
        return self.path.split("/")[1].partition("=")[2]


class OldLake:
    """The folder of a lake with a log of its own. Only its version is ever written to it."""

    def __init__(self, path: str) -> None:
        store = store_of(path)
        self.root, self.own = Path(store.root), Path(store.root) / "_dbtaskqueue"
        if not isinstance(store, LocalFolder) or not (self.own / "lake.json").is_file():
            remedy = "Give the folder of a lake that has a folder _dbtaskqueue with a log"
            raise LakeError(store.root, "is not a lake of an earlier version", remedy)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Hold the old program's lock in the block. From then on the old program writes nothing to this lake."""
        with writing(str(self.own)), (self.own / "lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                reason = "is held: an archive of the earlier version is writing to this lake"
                raise LakeError(self.own / "lock", reason, "Wait for it to end, then start again") from None
            version = self._json(self.own / "lake.json")
            put(self.own / "lake.json", json.dumps({**version, "layout": CLOSED_LAYOUT}))
            yield

    def _json(self, path: Path) -> dict[str, Any]:
        with reading(str(path)):
            text = path.read_text()
        try:
            found = json.loads(text)
        except ValueError as error:
            raise LakeError(path, f"is not JSON ({error})", "Restore it from a backup") from None
        return dict(found)

    def entries(self) -> list[dict[str, Any]]:
        """Return the changes, the oldest first. An entry that folds others replaces them."""
        found = {path.name: self._json(path) for path in sorted((self.own / "log").glob("*.json"))}
        folded = {name for entry in found.values() for name in entry["facts"].get("folds", ())}
        return [entry for name, entry in found.items() if name not in folded]

    def files(self) -> list[OldFile]:
        """Return the files that count."""
        entries = self.entries()
        removed = {path for entry in entries for path in entry["removed"]}
        return [OldFile(**one) for entry in entries for one in entry["files"] if one["path"] not in removed]

    def read(self, file: OldFile) -> pa.Table:
        """Return the rows of a file. Raises LakeError if its bytes or rows are not those in the log."""
        place = self.root / file.path
        with reading(str(place)):
            content = place.read_bytes()
            if hashlib.sha256(content).hexdigest() != file.sha256:
                reason = "is damaged: its checksum is not the one in the lake's log"
                raise LakeError(place, reason, "Restore it from a backup, then convert again")
            rows = pq.ParquetFile(pa.BufferReader(content)).read()
        day = pa.repeat(pa.scalar(date.fromisoformat(file.day)), file.rows)
        return conformed(rows.append_column(PARTITION, day), file.table).drop_columns(PARTITION)

    def streams(self) -> Iterator[tuple[str, int]]:
        """Yield the name of each stream and the number of its last micro-batch in this lake."""
        made = {token for one in self.entries() for token in (one["token"], *one["facts"].get("recent", ()))}
        for file in (self.own / "streams").glob("*/dbtaskqueue-stream"):
            name = file.read_text()
            numbers = sorted(int(one.name) for one in (file.parent / "offsets").glob("[0-9]*"))
            written = [one for one in numbers if hashlib.sha256(f"{name} {one}".encode()).hexdigest()[:32] in made]
            if written:
                yield name, written[-1]

    def delete(self) -> None:
        """Delete its files, the log last. Checkpoints of streams stay, because ``stream`` goes on from them."""
        with writing(str(self.root)):
            for table in ROW_TABLES:
                shutil.rmtree(self.root / table, ignore_errors=True)
            shutil.rmtree(self.own / "staging", ignore_errors=True)
            shutil.rmtree(self.own / "log", ignore_errors=True)


class Convert(Job):
    """Copies a lake with a log of its own, as this package wrote it before Delta Lake, into a lake at --lake.

    Each file is compared with its checksum in the old log, written as a file of the new lake, read again and compared.
    One commit makes it count, once: after a kill the next run goes on. The old program cannot write to the old lake any
    more. Old files stay until --delete-old, which first reads all files of the new lake. A damaged file is left out and
    named, the exit code is 3, and nothing is deleted. `stream --checkpoint OLD/_dbtaskqueue/streams` goes on.
    """

    name = "convert"
    summary = "convert a lake of an earlier version"
    arguments = (
        Argument("old", "the folder of the earlier lake", required=True),
        Argument("delete_old", "delete the old files once all are converted", bool, False),
    )

    def run(self, context: Context) -> Result:
        """Return how many ``files`` and ``rows`` were converted, and how many files before."""
        old, path, database = OldLake(context.options["old"]), context.need_lake(), context.need_database()
        if store_of(path) == store_of(old.root):
            raise LakeError(old.root, "is the old lake itself", "Give the new lake a folder of its own with --lake")
        if context.dry_run:
            files = old.files()
            return {"files": len(files), "rows": sum(one.rows for one in files), "dry_run": True}
        done: dict[str, int] = dict.fromkeys(RESULT_COUNTERS, 0)
        with Batches.locked(database) as batches, old.closed():
            lake = Lake.at(path, create=True)
            withdrawn, kept = end_batches(batches, old)
            files = [one for one in old.files() if one.batch not in kept]
            done["left_out"] = len(old.files()) - len(files)
            for number, one in enumerate(files):
                context.progress("convert", number, len(files))
                if lake.has(one.table, one.token, 1):
                    done["converted_before"] += 1
                    continue
                try:
                    self._file(lake, old, one, withdrawn.get(one.batch, set()), done)
                except LakeError as error:
                    context.damaged.append(str(error))
            for stream, number in old.streams():
                lake.commit("finished", (), once=(stream, number))
            if context.options["delete_old"] and not context.damaged:
                for table in ROW_TABLES:
                    lake.sound(lake.files(table))
                old.delete()
        return done

    def _file(
        self, lake: Lake, old: OldLake, file: OldFile, withdrawn: set[tuple[str, int]], done: dict[str, int]
    ) -> None:
        rows = old.read(file)
        if withdrawn:
            key = "task_id" if file.table == "attempts" else "id"
            tasks = zip(rows["location"].to_pylist(), rows[key].to_pylist(), strict=True)
            kept = rows.filter(pa.array([one not in withdrawn for one in tasks], pa.bool_()))
            done["withdrawn"] += rows.num_rows - kept.num_rows
            rows = kept
        export = Export(lake, file.token)
        added = [export.write_day(file.table, file.day, rows, "converted")] if rows.num_rows else []
        if not lake.commit(file.table, added, once=(file.token, 1)):
            raise PipelineError("Another process is converting this lake. Wait for it to end.")
        done["files"] += 1
        done["rows"] += rows.num_rows


def end_batches(batches: Batches, old: OldLake) -> tuple[dict[str, set[tuple[str, int]]], set[str]]:
    """End the batches that the earlier version left unfinished.

    Return the tasks (location, id) that each batch withdrew, by its token, and the tokens of the batches whose tasks
    did not leave the database.
    """
    withdrawn: dict[str, set[tuple[str, int]]] = {}
    kept: set[str] = set()
    for token, state, lake, tasks in batches.link.run(ALL_BATCHES):
        if state == "open" and lake == str(old.root):
            batches.abandon(token, ABANDONED)
        if state == "deleted":
            batches.link.run(batches.sql.earlier_batch_closed, {"token": token})
        if state in ("open", "abandoned"):
            kept.add(token)
        withdrawn[token] = {
            (location, task) for location, task in (json.loads(tasks) if isinstance(tasks, str) else tasks)
        }
    return withdrawn, kept
