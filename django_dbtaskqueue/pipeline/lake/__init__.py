"""The lake: finished tasks and failed attempts as Parquet files in a folder, and the log that names the valid files.

    LAKE/tasks/finished_date=2026-01-31/queue=claims/….parquet      archived tasks: they left the database
    LAKE/attempts/finished_date=…/queue=…/….parquet                 their failed attempts, in their task's partition
    LAKE/finished/finished_date=…/queue=…/….parquet                 what ``stream`` copied: one row for each finish
    LAKE/_dbtaskqueue/lake.json                                     the version of the layout and of the columns
    LAKE/_dbtaskqueue/log/….json                                    one file for each change: files added, files removed
    LAKE/_dbtaskqueue/staging/…/                                    files of changes that are not made yet

A log entry makes a change. It appears whole or not at all, so ``read_lake`` never returns a part of a change, nor a row
twice. Other programs can read ``LAKE/tasks/**/*.parquet`` while no job is writing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from pyspark.sql import functions as F
from pyspark.sql.types import DateType, IntegerType, StringType, StructField, StructType

from django_dbtaskqueue.core.exceptions import LakeError, PipelineError
from django_dbtaskqueue.pipeline.database import DATABASE_ERRORS, Database
from django_dbtaskqueue.pipeline.schema import ATTEMPTS, SCHEMA_VERSION, TASKS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Lake", "read_lake"]

MAX_FOLDED_TOKENS = 1000  # of the last changes, in a folded log: a killed run may repeat these changes
LAYOUT_VERSION = 1  # grows when an older program would misread a lake of this one
LOG_FOLDER = "_dbtaskqueue"
ENCODED_NON_ASCII = re.compile("%[89A-F]")
PARTITION_SCHEMA = StructType([StructField("finished_date", DateType()), StructField("queue", StringType())])
VERSION_FIELD = StructField("schema_version", IntegerType())
LAKE_TASKS = StructType([StructField("location", StringType()), *TASKS.fields, VERSION_FIELD, *PARTITION_SCHEMA.fields])
LAKE_ATTEMPTS = StructType([*ATTEMPTS.fields, VERSION_FIELD, *PARTITION_SCHEMA.fields])
LAKE_SCHEMAS = {"tasks": LAKE_TASKS, "attempts": LAKE_ATTEMPTS, "finished": LAKE_TASKS}
OPEN_BATCHES_SQL = "SELECT token, state, withdrawn FROM dbtaskqueue_archivebatch WHERE state IN ('open', 'deleted')"
DAMAGED_FILE_REMEDY = "Restore it from a backup; `check` says what else is damaged"


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
    """One change of the lake. ``token`` names what made it, so that it is made only once; ``facts`` describe it."""

    token: str
    kind: str
    files: tuple[DataFile, ...] = ()
    removed: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION
    time: str = field(default_factory=lambda: datetime.now(UTC).isoformat())

    def text(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def read(cls, path: Path) -> Entry:
        """Return the entry of a file. Raises LakeError for a damaged one and for one of a newer program."""
        found = json_of(path)
        refuse_newer(path, found.get("schema_version", 0), SCHEMA_VERSION)
        try:
            return cls(**{**found, "files": tuple(DataFile(**one) for one in found["files"])})
        except (KeyError, TypeError) as error:
            raise LakeError(path, f"is not an entry of a lake's log ({error})", "Restore it from a backup") from None


class Lake:
    """A lake's folder. Files are added and removed by entries in its log only."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.own = root / LOG_FOLDER
        self.log = self.own / "log"

    @classmethod
    def at(cls, path: str | os.PathLike[str], *, create: bool = False) -> Lake:
        """Return the lake in a local folder (a path or a ``file:`` URL); ``create`` makes one. Raises LakeError."""
        lake = cls(local_path(path))
        file, versions = lake.own / "lake.json", {"layout": LAYOUT_VERSION, "schema_version": SCHEMA_VERSION}
        found = json_of(file) if file.exists() else {}
        if not found:
            if lake.root.is_dir() and any(lake.root.iterdir()) and not lake.own.exists():
                raise LakeError(lake.root, "holds other data", "Give the lake a folder of its own")
            if not create:
                raise LakeError(lake.root, "is not a lake", "Check the path; `archive` and `stream` make a lake")
        for name, known in versions.items():
            refuse_newer(file, found.get(name, 0), known)
        if create and found != versions:
            with writing(lake.root):
                lake.log.mkdir(parents=True, exist_ok=True)
                write_safely(file, json.dumps(versions))
        return lake

    def staging(self, token: str) -> Path:
        """Return the folder for files that are not published yet."""
        return self.own / "staging" / token

    def entries(self) -> list[Entry]:
        """Return the log, the oldest change first."""
        return list(self._named().values())

    def _named(self) -> dict[str, Entry]:
        found = {path.name: Entry.read(path) for path in sorted(self.log.glob("*.json")) if path.exists()}
        folded = {name for entry in found.values() for name in entry.facts.get("folds", ())}
        return {name: entry for name, entry in found.items() if name not in folded}

    def entry(self, token: str) -> Entry | None:
        """Return the change of that token, or None if the log does not have it."""
        path = next(self.log.glob(f"*-{token}.json"), None)
        if path is not None:
            return Entry.read(path)
        return next((one for one in self.entries() if token in one.facts.get("recent", ())), None)

    def fold(self, *, longer_than: int) -> None:
        """Replace a log of more entries by one entry with the same content, so that reading it stays quick."""
        found = self._named()
        if len(found) <= longer_than:
            return
        recent = [token for entry in found.values() for token in (*entry.facts.get("recent", ()), entry.token)]
        facts = {"folds": [*found], "recent": recent[-MAX_FOLDED_TOKENS:]}
        self.commit(Entry(uuid.uuid4().hex, "fold", tuple(self.files()), facts=facts))
        for path in self.log.glob("*.json"):
            if path.name in found:
                path.unlink()

    def commit(self, entry: Entry) -> None:
        """Write the log entry of a change. Its files must be at their places and on the disk."""
        stamp = datetime.fromisoformat(entry.time).strftime("%Y%m%dT%H%M%S%f")
        with writing(self.root):
            write_safely(self.log / f"{stamp}-{entry.kind}-{entry.token}.json", entry.text())

    def files(self, table: str | None = None, *, without: Collection[str] = ()) -> list[DataFile]:
        """Return the files of a table that count, or of all; not those that changes of the tokens ``without`` added."""
        entries = self.entries()
        removed = {path for entry in entries for path in entry.removed}
        counting = [one for entry in entries for one in entry.files if one.path not in removed]
        return [one for one in counting if table in (None, one.table) and one.token not in without]

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

    A column that is newer than a file is null for its rows. With ``database`` the rows that are still in that database
    are left out, so that database and lake together hold each task once. Raises LakeError, which names the file and the
    remedy, for a lake of a newer program and for files that are missing or cut short.
    """
    if table not in LAKE_SCHEMAS:
        raise PipelineError(f"table={table!r} must be one of {', '.join(map(repr, LAKE_SCHEMAS))}.")
    lake = Lake.at(path)
    under_way, withdrawn = _open_batches(database) if database is not None and table != "finished" else ([], [])
    paths = [str(sound(lake.root / one.path, one.bytes)) for one in lake.files(table, without=under_way)]
    if not paths:
        return spark.createDataFrame([], LAKE_SCHEMAS[table])
    frame = spark.read.schema(LAKE_SCHEMAS[table]).option("basePath", str(lake.root / table)).parquet(*paths)
    if any(map(ENCODED_NON_ASCII.search, paths)):  # Spark decodes a folder's name byte by byte, not as UTF-8
        frame = frame.withColumn("queue", F.col("queue_name"))
    if not withdrawn:
        return frame
    key = "task_id" if table == "attempts" else "id"
    stayed = spark.createDataFrame(withdrawn, f"location string, {key} long, _token string")
    frame = frame.withColumn("_token", F.regexp_extract("_metadata.file_name", "^([0-9a-f]+)-", 1))
    return frame.join(F.broadcast(stayed), ["location", key, "_token"], "left_anti").drop("_token")


def _open_batches(database: Database) -> tuple[list[str], list[tuple[str, int, str]]]:
    """Return the tokens of batches whose rows are still in the database, and the withdrawn rows with their token."""
    try:
        with database.open() as link:
            rows = link.run(OPEN_BATCHES_SQL)
    except DATABASE_ERRORS as error:
        raise PipelineError(f"{database!r} cannot be asked for its archive batches: {error}. Run migrate.") from error
    stayed = []
    for token, state, withdrawn in rows:
        ids = json.loads(withdrawn) if isinstance(withdrawn, str) else withdrawn
        stayed += [(location, task, token) for location, task in ids if state == "deleted"]
    return [token for token, state, _ids in rows if state == "open"], stayed


# -- files -------------------------------------------------------------------------------------------------------------


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return the folder of a path or a ``file:`` URL. Raises LakeError for another kind of URL."""
    text = os.fspath(path)
    parts = urlsplit(text)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return Path(unquote(parts.path)).absolute()
    if "://" in text:
        reason = "is not on a local or mounted file system, where alone a file can be renamed in one step"
        raise LakeError(text, reason, "Mount the store and give its folder, or copy closed files there afterwards")
    return Path(text).absolute()


@contextmanager
def writing(root: Path) -> Iterator[None]:
    """Raise the OSErrors of the block as LakeError with a remedy."""
    try:
        yield
    except OSError as error:
        reason = f"cannot be written: {error.strerror or error}"
        remedy = "Check path, owner and free space, or give another folder with --lake"
        raise LakeError(error.filename or root, reason, remedy) from error


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock of that file; raise LakeError at once if another process holds it. A process's end releases it."""
    with writing(path), path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reason = "is held: another archive or compaction is writing to this lake"
            raise LakeError(path, reason, "Wait for it to end, then start again") from None
        yield


def write_safely(path: Path, text: str) -> None:
    """Write a small file: it is on the disk after this call, and no reader ever sees a part of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    write_bytes(part, text.encode())
    part.replace(path)
    sync(path.parent)


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """Write a file: it is on the disk after this call."""
    path.write_bytes(content)
    sync(path)


def sync(path: Path) -> None:
    """Flush a file, or a folder's list of files, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _reading(path: Path, remedy: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LakeError(path, f"cannot be read: {error.strerror}", remedy) from None


def sound(path: Path, size: int) -> Path:
    """Return the path of a file of that size. Raises LakeError for one that is missing or of another size."""
    with _reading(path, DAMAGED_FILE_REMEDY):
        found = path.stat().st_size
    if found != size:
        reason = f"is damaged: {found:,} bytes instead of the {size:,} in the lake's log"
        raise LakeError(path, reason, DAMAGED_FILE_REMEDY)
    return path


def intact(path: Path, sha256: str) -> bytes:
    """Return the bytes of a file. Raises LakeError if they do not have the checksum."""
    with _reading(path, DAMAGED_FILE_REMEDY):
        content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != sha256:
        raise LakeError(path, "is damaged: its checksum is not the one in the lake's log", DAMAGED_FILE_REMEDY)
    return content


def json_of(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises LakeError."""
    with _reading(path, "Check that this user may read it"):
        text = path.read_text()
    try:
        found = json.loads(text)
    except ValueError as error:
        raise LakeError(path, f"is not JSON ({error})", "Restore it from a backup") from None
    if not isinstance(found, dict):
        raise LakeError(path, "is not a JSON object", "Restore it from a backup")
    return found


def refuse_newer(path: Path, found: int, known: int) -> None:
    """Raise LakeError for a file of a newer version than ``known``."""
    if found > known:
        reason = f"was written by a newer django-dbtaskqueue (version {found}, and this one knows {known})"
        raise LakeError(path, reason, 'Upgrade here: pip install --upgrade "django-dbtaskqueue[spark]"')
