"""The lake: finished tasks and failed attempts as Parquet files in a folder, and the log that says which files count.

    LAKE/tasks/finished_date=2026-01-31/queue=claims/….parquet      archived tasks: they left the database
    LAKE/attempts/finished_date=…/queue=…/….parquet                 their failed attempts, in their task's partition
    LAKE/finished/finished_date=…/queue=…/….parquet                 what ``stream`` copied: one row for each finish
    LAKE/_dbtaskqueue/lake.json                                     the version of the layout and of the columns
    LAKE/_dbtaskqueue/log/….json                                    one file for each change: files added, files removed
    LAKE/_dbtaskqueue/staging/…/                                    files on their way in

A change is made by its log entry, which appears at once or not at all: whoever reads through ``read_lake`` never sees
half of one, and never a row twice. Other programs can read ``LAKE/tasks/**/*.parquet`` while nothing is being written.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from pyspark.sql import functions as F
from pyspark.sql.types import DateType, IntegerType, StringType, StructField, StructType

from django_dbtaskqueue.core.exceptions import LakeError, PipelineError
from django_dbtaskqueue.pipeline.lake.lake_files import (
    json_of,
    local_path,
    refuse_newer,
    sound,
    write_safely,
    writing,
)
from django_dbtaskqueue.pipeline.schema import ATTEMPTS, SCHEMA_VERSION, TASKS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from django_dbtaskqueue.pipeline.database import Database

RECENT = 1000  # changes a folded log still knows by their tokens: the last ones are those made again after a kill
LAYOUT = 1  # grows when a lake of this program could mislead an older one
OWN = "_dbtaskqueue"
NOT_ASCII = re.compile("%[89A-F]")
PARTITIONS = StructType([StructField("finished_date", DateType()), StructField("queue", StringType())])
VERSION = StructField("schema_version", IntegerType())
LAKE_TASKS = StructType([StructField("location", StringType()), *TASKS.fields, VERSION, *PARTITIONS.fields])
LAKE_ATTEMPTS = StructType([*ATTEMPTS.fields, VERSION, *PARTITIONS.fields])
SCHEMAS = {"tasks": LAKE_TASKS, "attempts": LAKE_ATTEMPTS, "finished": LAKE_TASKS}
UNSETTLED = "SELECT token, state, withdrawn FROM dbtaskqueue_archivebatch WHERE state IN ('open', 'deleted')"


@dataclass(frozen=True)
class DataFile:
    """One Parquet file: ``path`` is relative to the lake, ``sha256`` is of its bytes."""

    table: str
    path: str
    rows: int
    bytes: int
    sha256: str

    @property
    def token(self) -> str:
        """The token of the change that added it."""
        return Path(self.path).name.partition("-")[0]


@dataclass(frozen=True)
class Entry:
    """One change of the lake. ``token`` names what made it, so that it is made once; ``facts`` describe it."""

    token: str
    kind: str
    files: tuple[DataFile, ...] = ()
    removed: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION
    time: str = field(default_factory=lambda: datetime.now(UTC).isoformat())

    def text(self) -> str:
        """Return the entry as JSON."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def read(cls, path: Path) -> Entry:
        """Return the entry of a file. Raises LakeError for a damaged one and for one of a newer program."""
        found = json_of(path)
        refuse_newer(path, found.get("schema_version", 0), SCHEMA_VERSION)
        try:
            return cls(**{**found, "files": tuple(DataFile(**one) for one in found["files"])})
        except (KeyError, TypeError) as error:
            raise LakeError(path, f"is no entry of a lake's log ({error})", "Restore it from a backup") from None


class Lake:
    """A lake's folder. Files are added and removed by entries in its log only."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.own = root / OWN
        self.log = self.own / "log"

    @classmethod
    def at(cls, path: str | os.PathLike[str], *, create: bool = False) -> Lake:
        """Return the lake in a local folder (a path or a ``file:`` URL), made if asked for. Raises LakeError."""
        lake = cls(local_path(path))
        version = lake.own / "lake.json"
        if not version.exists():
            lake._refuse_other_data()
            if not create:
                raise LakeError(lake.root, "is no lake", "Check the path; `archive` and `stream` make a lake")
            with writing(lake.root):
                lake.log.mkdir(parents=True, exist_ok=True)
                write_safely(version, json.dumps({"layout": LAYOUT, "schema_version": SCHEMA_VERSION}))
        found = json_of(version)
        refuse_newer(version, found.get("layout", 0), LAYOUT)
        refuse_newer(version, found.get("schema_version", 0), SCHEMA_VERSION)
        if create and found["schema_version"] < SCHEMA_VERSION:
            write_safely(version, json.dumps({"layout": LAYOUT, "schema_version": SCHEMA_VERSION}))
        return lake

    def _refuse_other_data(self) -> None:
        if self.root.is_dir() and any(self.root.iterdir()) and not self.own.exists():
            raise LakeError(self.root, "holds other data", "Give the lake a folder of its own")

    def staging(self, token: str) -> Path:
        """Return the folder for files on their way in."""
        return self.own / "staging" / token

    def entries(self) -> list[Entry]:
        """Return the log, the oldest change first."""
        return list(self._named().values())

    def _named(self) -> dict[str, Entry]:
        found = {path.name: Entry.read(path) for path in sorted(self.log.glob("*.json")) if path.exists()}
        folded = {name for entry in found.values() for name in entry.facts.get("folds", ())}
        return {name: entry for name, entry in found.items() if name not in folded}

    def entry(self, token: str) -> Entry | None:
        """Return the change of that token, or None while it has not been made."""
        path = next(self.log.glob(f"*-{token}.json"), None)
        if path is not None:
            return Entry.read(path)
        return next((one for one in self.entries() if token in one.facts.get("recent", ())), None)

    def fold(self, *, longer_than: int) -> None:
        """Replace a log of more entries by one that says the same: reading it stays quick."""
        found = self._named()
        if len(found) <= longer_than:
            return
        entries = found.values()
        removed = {path for entry in entries for path in entry.removed}
        files = tuple(one for entry in entries for one in entry.files if one.path not in removed)
        recent = [token for entry in entries for token in (*entry.facts.get("recent", ()), entry.token)]
        self.commit(Entry(uuid.uuid4().hex, "fold", files, facts={"folds": [*found], "recent": recent[-RECENT:]}))
        for path in self.log.glob("*.json"):
            if path.name in found:
                path.unlink()

    def commit(self, entry: Entry) -> None:
        """Make a change. Its files must stand at their places, written through to the disk."""
        stamp = datetime.fromisoformat(entry.time).strftime("%Y%m%dT%H%M%S%f")
        with writing(self.root):
            write_safely(self.log / f"{stamp}-{entry.kind}-{entry.token}.json", entry.text())

    def files(self, table: str, *, without: Collection[str] = ()) -> list[DataFile]:
        """Return the files of a table that count, but for those that changes of the tokens ``without`` added."""
        entries = self.entries()
        removed = {path for entry in entries for path in entry.removed}
        counting = [one for entry in entries for one in entry.files if one.table == table and one.path not in removed]
        return [one for one in counting if one.token not in without]

    def sweep(self) -> None:
        """Remove the files that a committed change has replaced."""
        for entry in self.entries():
            for path in entry.removed:
                (self.root / path).unlink(missing_ok=True)

    def discard(self, token: str) -> None:
        """Remove the staging folder of a change."""
        shutil.rmtree(self.staging(token), ignore_errors=True)


def read_lake(
    spark: SparkSession, path: str | os.PathLike[str], *, table: str = "tasks", database: Database | None = None
) -> DataFrame:
    """Return the lake's ``tasks`` (or ``attempts``, or ``finished``), each row once, with columns of this version.

    A column younger than a file is null for its rows. With ``database`` rows that are on their way into the lake but
    still stand in that database are left out, so that database and lake together hold each task once. Raises LakeError,
    which names the file and the remedy, for a lake of a newer program and for files that are missing or cut short.
    """
    if table not in SCHEMAS:
        raise PipelineError(f"table={table!r} must be one of {', '.join(map(repr, SCHEMAS))}.")
    lake = Lake.at(path)
    under_way, withdrawn = _unsettled(database) if database is not None and table != "finished" else ([], [])
    files = lake.files(table, without=under_way)
    frame = frame_of(spark, lake.root, table, files)
    if not (files and withdrawn):
        return frame
    key = "task_id" if table == "attempts" else "id"
    stayed = spark.createDataFrame(withdrawn, f"location string, {key} long, _token string")
    frame = frame.withColumn("_token", F.regexp_extract("_metadata.file_name", "^([0-9a-f]+)-", 1))
    return frame.join(F.broadcast(stayed), ["location", key, "_token"], "left_anti").drop("_token")


def frame_of(spark: SparkSession, root: Path, table: str, files: Iterable[DataFile]) -> DataFrame:
    """Return the rows of a table's files below ``root``. Raises LakeError for a file that is missing or cut short."""
    paths = [str(sound(root / one.path, one.bytes)) for one in files]
    if not paths:
        return spark.createDataFrame([], SCHEMAS[table])
    frame = spark.read.schema(SCHEMAS[table]).option("basePath", str(root / table)).parquet(*paths)
    # Spark takes the bytes of UTF-8 in a folder's name for letters.
    return frame.withColumn("queue", F.col("queue_name")) if any(map(NOT_ASCII.search, paths)) else frame


def _unsettled(database: Database) -> tuple[list[str], list[tuple[str, int, str]]]:
    """Return the tokens of batches whose rows are still in the database, and the rows that are back in it."""
    connection = database.connect()
    try:
        rows = connection.execute(UNSETTLED).fetchall()
    except (psycopg.Error, sqlite3.Error) as error:
        raise PipelineError(f"{database!r} cannot be asked for its archive batches: {error}. Run migrate.") from error
    finally:
        connection.close()
    stayed = []
    for token, state, withdrawn in rows:
        ids = json.loads(withdrawn) if isinstance(withdrawn, str) else withdrawn
        stayed += [(location, task, token) for location, task in ids if state == "deleted"]
    return [token for token, state, _ids in rows if state == "open"], stayed
