"""The lake: finished tasks and failed attempts in a folder or an object store, as tables of Delta Lake.

    LAKE/tasks/       archived tasks: they left the database
    LAKE/attempts/    their failed attempts
    LAKE/finished/    what ``stream`` copied: one row for each finish
    LAKE/summaries/   of each day what reports add up, so that they need not read it again

A table is a folder of Parquet files, in partitions by the day the task finished, and a log, ``_delta_log``. A file
counts when the log names it. A commit adds and removes files in one step, and stores a token, so that it is made only
once. The name of a file ends with the SHA-256 of its bytes. Each reader here compares the two before it uses the file.

The files are in a local folder, or in an object store, which ``deltalake`` gives access to: it finds keys and endpoint
in the environment, or takes the role of the machine. No key is part of a URL, a log, a row or the text of an error.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import date
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import DeltaError
from deltalake.fs import DeltaStorageHandler
from deltalake.transaction import AddAction, RemoveAction
from pyarrow.fs import FileSelector, FileSystem, LocalFileSystem, PyFileSystem, SubTreeFileSystem
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import DateType, StringType, StructField, StructType

from django_dbtaskqueue.core.exceptions import LakeError, PipelineError
from django_dbtaskqueue.core.sql.pipeline import OPEN_BATCHES
from django_dbtaskqueue.pipeline.database import Database, statement_errors
from django_dbtaskqueue.pipeline.source import ATTEMPTS, SUMMARIES, TASKS, Snapshot, arrow_schema, open_snapshot

__all__ = ["Lake", "read_lake"]

Found = TypeVar("Found")

PARTITION = "finished_date"
PARTITION_FIELD = StructField(PARTITION, DateType())
LAKE_TASKS = StructType([StructField("location", StringType()), *TASKS.fields, PARTITION_FIELD])
LAKE_ATTEMPTS = StructType([*ATTEMPTS.fields, PARTITION_FIELD])
LAKE_SUMMARIES = StructType([*SUMMARIES.fields, PARTITION_FIELD])
ROW_TABLES = ("tasks", "attempts", "finished")
LAKE_SCHEMAS = {"tasks": LAKE_TASKS, "attempts": LAKE_ATTEMPTS, "finished": LAKE_TASKS, "summaries": LAKE_SUMMARIES}
MAX_READING_TASKS = 256
READ_BATCH_ROWS = 10_000
GLOB_CHARACTERS = re.compile(r"[][{}*?\\]")
VERIFY_PAGES = {"parquet.page.verify-checksum.enabled": "true"}


class DataFile(NamedTuple):
    """One Parquet file of a table: ``finished_date=DAY/TOKEN-PART-SHA256.parquet``, below the table's folder."""

    table: str
    path: str
    rows: int
    bytes: int

    @property
    def name(self) -> str:
        return f"{self.table}/{self.path}"

    @property
    def day(self) -> str:
        return self.path.partition("/")[0].partition("=")[2]

    @property
    def token(self) -> str:
        return Path(self.path).name.partition("-")[0]

    @property
    def sha256(self) -> str:
        return Path(self.path).stem.rpartition("-")[2]


class Lake:
    """A lake's folder or URL. Commits to the logs of its tables add and remove files."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.store = store_of(root)
        self.root = self.store.root  # its absolute path, or its URL

    @classmethod
    def at(cls, path: str | os.PathLike[str], *, create: bool = False) -> "Lake":
        """Return the lake in a local folder (a path or a ``file:`` URL) or in an object store (``s3://BUCKET/FOLDER``).

        ``create`` makes a lake, and adds new columns to the tables of an old one. Raises LakeError.
        """
        lake = cls(path)
        is_lake = lake.has_table("tasks")
        with lake_errors(lake.root, ACCESS_REMEDY):
            found = [] if is_lake else lake.store.files.get_file_info(FileSelector("", allow_not_found=True))
        if any(one.base_name not in LAKE_SCHEMAS for one in found):
            raise LakeError(lake.root, "holds other data", "Give the lake a folder of its own")
        if not is_lake and not create:
            raise LakeError(lake.root, "is not a lake", "Check the path; `archive` and `stream` make a lake")
        if create:
            for table in reversed(LAKE_SCHEMAS):  # "tasks" last: it makes the folder a lake
                lake.prepare(table)
        return lake

    def has_table(self, table: str) -> bool:
        """Whether there is the table; ``summaries`` may be deleted. Raises LakeError."""
        with lake_errors(self.root, ACCESS_REMEDY):
            return DeltaTable.is_deltatable(self.store.place(table), self.store.options)

    def tables(self) -> list[str]:
        return [one for one in LAKE_SCHEMAS if self.has_table(one)]

    def prepare(self, table: str) -> None:
        """Make a table, or add its new columns. Raises LakeError."""
        schema, place = Schema.from_arrow(lake_schema(table)), self.store.place(table)
        with writing(self.root):
            if self.store.path:
                (self.store.path / table).mkdir(parents=True, exist_ok=True)
            delta = DeltaTable.create(place, schema, "ignore", [PARTITION], storage_options=self.store.options)
            known = {one.name for one in delta.schema().fields}
            if new := [one for one in schema.fields if one.name not in known]:
                delta.alter.add_columns(new)
            self.store.flush_log(table, -1)

    def delta(self, table: str, version: int | None = None) -> DeltaTable:
        """Return the table as delta-rs sees it. Raises LakeError for a log that cannot be read."""
        with lake_errors(self.store.place(f"{table}/_delta_log"), "Restore it from a backup"):
            return DeltaTable(self.store.place(table), version, self.store.options)

    def versions(self) -> dict[str, int]:
        """Return the present version of each table with rows of the queue: it grows with each commit."""
        return {table: self.delta(table).version() for table in ROW_TABLES}

    def files(self, table: str, version: int | None = None) -> list[DataFile]:
        """Return the files of a table that count, sorted by day and name."""
        rows = pa.table(self.delta(table, version).get_add_actions(flatten=True)).sort_by("path").to_pylist()
        return [DataFile(table, row["path"], row["num_records"], row["size_bytes"]) for row in rows]

    def counted(self, table: str, state: "State", since: date | None = None) -> list[DataFile]:
        """Return the files of a table that count in a state, of the days since one."""
        first = since.isoformat() if since else ""
        files = self.files(table, state.versions[table])
        return [one for one in files if one.token not in state.under_way and one.day >= first]

    def has(self, table: str, name: str, number: int) -> bool:
        """Whether the commit of this name and number, or one of a later number, was made."""
        return _made(self.delta(table), name, number)

    def commit(
        self, table: str, added: Iterable[DataFile], removed: Iterable[DataFile] = (), *,
        once: tuple[str, int] | None = None,
    ) -> bool:  # fmt: skip
        """Add and remove files in one step. The added files must be durable; the commit is, after this call.

        ``once`` is a name and a number: return False, and change nothing, if that commit or one of the name with a
        greater number was made. Raises LakeError if another writer has removed one of these files.
        """
        delta, now = self.delta(table), int(time.time() * 1000)
        before = delta.version()
        if once and _made(delta, *once):
            return False
        actions: list[AddAction | RemoveAction] = [
            AddAction(one.path, one.bytes, {PARTITION: one.day}, now, True, json.dumps({"numRecords": one.rows}))
            for one in added
        ]
        folders = {f"{table}/{os.path.dirname(one.path)}" for one in actions}
        actions += [RemoveAction(one.path, True, now, one.bytes, {PARTITION: one.day}) for one in removed]
        properties = CommitProperties(app_transactions=[Transaction(*once)] if once else None)
        with writing(self.root):
            self.store.flush(*folders, table)
            delta.create_write_transaction(actions, "append", delta.schema(), PARTITION, commit_properties=properties)
            self.store.flush_log(table, before)
        return True

    def revoke(self, token: str) -> None:
        """Remove what the change of a token added, and prevent that it is made later."""
        for table in ("tasks", "attempts"):
            self.commit(table, (), [one for one in self.files(table) if one.token == token], once=(token, 2))

    def vacuum(self, table: str, hours: int | None = None, *, full: bool = True) -> None:
        """Delete files that have not counted for so long, or a week: replaced ones, and if ``full`` of killed runs."""
        delta = self.delta(table)
        with writing(self.root):
            if delta.vacuum(hours, enforce_retention_duration=False, full=full):
                delta.vacuum(hours, dry_run=False, enforce_retention_duration=False, full=full)

    def path(self, file: DataFile) -> str:
        return self.store.place(file.name)

    def read(self, file: DataFile, columns: list[str] | None = None) -> pa.Table:
        """Return the rows of a file, with those of the columns that it has. Raises LakeError for a damaged one."""
        with lake_errors(self.path(file)), self.store.files.open_input_file(file.name) as stored:
            content = stored.read()
            self._compare(file, hashlib.sha256(content).hexdigest())
            if columns is not None:  # a file of an earlier version lacks the columns that are newer
                there = pq.read_schema(pa.BufferReader(content)).names
                columns = [one for one in columns if one in there]
            return pq.read_table(pa.BufferReader(content), columns=columns, page_checksum_verification=True)

    def sound(self, files: Iterable[DataFile], damaged: list[str] | None = None) -> list[DataFile]:
        """Return the files with the checksum in their name; append the others' errors to ``damaged``, or raise one."""

        def compare(file: DataFile) -> DataFile:
            with lake_errors(self.path(file)):
                self._compare(file, self.store.sha256(file.name))
            return file

        return of_each(compare, files, damaged)

    def rows(
        self, table: str, files: Iterable[DataFile], columns: Collection[str], damaged: list[str] | None = None
    ) -> pa.Table:
        """Return these columns of the files of a table, read by this process. ``damaged`` is as for `sound`."""
        schema = lake_schema(table, columns)
        own = (one for one in files if one.table == table)
        found = of_each(lambda file: conformed(self.read(file, schema.names), table, columns), own, damaged)
        return pa.concat_tables([schema.empty_table(), *found])

    def _compare(self, file: DataFile, sha256: str) -> None:
        if sha256 != file.sha256:
            raise LakeError(self.path(file), "is damaged: its checksum is not the one in its name", DAMAGED_FILE_REMEDY)


def of_each(read: Callable[[DataFile], Found], files: Iterable[DataFile], damaged: list[str] | None) -> list[Found]:
    """Return what ``read`` returns of each file, without those of which it raises LakeError: see `Lake.sound`."""
    found = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for one in [pool.submit(read, file) for file in files]:
            try:
                found.append(one.result())
            except LakeError as error:
                if damaged is None:
                    raise
                damaged.append(str(error))
    return found


def read_lake(
    spark: SparkSession, path: str | os.PathLike[str], *,
    table: str = "tasks", database: Database | None = None, state: "State | None" = None,
    since: date | None = None, damaged: list[str] | None = None,
) -> DataFrame:  # fmt: skip
    """Return the lake's ``tasks`` (or ``attempts``, or ``finished``), each row once, with columns of this version.

    A column that is newer than a file is null for its rows. With ``database`` the rows that are still in that database
    are left out; give a ``state`` instead to read both in the same state while an archive may run. ``since`` leaves out
    earlier days. All files are compared with their checksums first: ``damaged`` is as for `Lake.sound`.
    """
    if table not in ROW_TABLES:
        raise PipelineError(f"table={table!r} must be one of {', '.join(map(repr, ROW_TABLES))}.")
    lake = Lake.at(path)
    with one_state(database, path) if state is None else nullcontext(state) as state:
        files = lake.counted(table, state, since)
    return read_files(spark, lake, table, lake.sound(files, damaged))


def read_files(spark: SparkSession, lake: Lake, table: str, files: Sequence[DataFile]) -> DataFrame:
    """Return the rows of these files of a table, which are `Lake.sound`, with columns of this version."""
    schema = LAKE_SCHEMAS[table]
    if not files:
        return spark.createDataFrame(lake_schema(table).empty_table(), schema)  # a list would start a Python worker
    if lake.store.path is None:  # Spark has no access to an object store of its own
        numbers = spark.range(0, len(files), 1, min(len(files), MAX_READING_TASKS))
        return numbers.mapInArrow(partial(numbered, lake, files), schema)
    reader = spark.read.schema(schema).options(basePath=lake.store.place(table), **VERIFY_PAGES)
    return reader.parquet(*(GLOB_CHARACTERS.sub(r"\\\g<0>", lake.path(one)) for one in files))


def numbered(lake: Lake, files: Sequence[DataFile], numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """For ``mapInArrow`` over numbers of files: read them, and compare each with its checksum."""
    for number in (one for batch in numbers for one in batch.column(0).to_pylist()):
        rows, day = lake.read(files[number]), pa.scalar(date.fromisoformat(files[number].day))
        rows = rows.append_column(PARTITION, pa.repeat(day, rows.num_rows))
        yield from conformed(rows, files[number].table).to_batches(max_chunksize=READ_BATCH_ROWS)


def lake_schema(table: str, columns: Collection[str] | None = None) -> pa.Schema:
    """Return the columns of a table, or those of them that are named, in the order of the table."""
    return arrow_schema(one for one in LAKE_SCHEMAS[table] if columns is None or one.name in columns)


def conformed(rows: pa.Table, table: str, columns: Collection[str] | None = None) -> pa.Table:
    """Return the rows with exactly the columns of `lake_schema`; a missing column is null."""
    schema = lake_schema(table, columns)
    columns = [
        rows[one.name].cast(one.type) if one.name in rows.column_names else pa.nulls(rows.num_rows, one.type)
        for one in schema
    ]
    return pa.table(columns, schema=schema)


def task_ids(tasks: Collection[tuple[str, int]]) -> pa.Table:
    """Return (location, id) of tasks as a table."""
    rows = [{"location": location, "id": task_id} for location, task_id in tasks]
    return pa.Table.from_pylist(rows, lake_schema("tasks", ("location", "id")))


class State(NamedTuple):
    """One state of a database and a lake: files of the tokens ``under_way`` hold tasks that are in the database."""

    snapshot: Snapshot | None
    versions: Mapping[str, int]
    under_way: Collection[str]


@contextmanager
def one_state(database: Database | None, path: str | os.PathLike[str] | None) -> Iterator[State]:
    """Hold the present state of a database and a lake, either of which may be None, in the block.

    The lake's versions are the same before and after the database's snapshot is taken, so nothing moved in between.
    SQLite has no such snapshots: there the state is held only if no archive runs meanwhile.
    """
    lake = Lake.at(path) if path else None
    while True:
        versions = lake.versions() if lake else {}
        with open_snapshot(database) if database else nullcontext(Snapshot(None)) as snapshot:
            under_way = _open_tokens(database, snapshot) if database and lake else ()
            if lake is None or lake.versions() == versions:
                yield State(snapshot, versions, under_way)
                return


def _open_tokens(database: Database, snapshot: Snapshot) -> set[str]:
    refused = statement_errors(f"{database!r} cannot be asked for its archive batches", "Run migrate.")
    with refused, nullcontext(snapshot.link) if snapshot.link else database.open() as link:
        return {token for token, _location, _lake in link.run(OPEN_BATCHES)}


def _made(delta: DeltaTable, name: str, number: int) -> bool:
    found = delta.transaction_version(name)
    return found is not None and found >= number


# -- where the files are -----------------------------------------------------------------------------------------------

OBJECT_STORES = {"s3": "s3", "s3a": "s3", "gs": "gs", "abfss": "abfss", "hdfs": "hdfs"}
ESCAPE = re.compile("%[0-9A-Fa-f]{2}")  # delta-rs writes to such a path, and reads from the one that it stands for
PLAIN_URL = re.compile(r"(?:[\w.-]+@)?[\w.-]+(?::\d+)?(?:/[\w.=+~-]+)*/*", re.ASCII)
KEYS_BELONG_IN_THE_ENVIRONMENT = (
    "Write it as s3://BUCKET/FOLDER. Set keys in the environment, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "or give the machine a role"
)
# Two writers of one version of the log: the store refuses the second, which then tries the next version.
CONDITIONAL_PUT = {"aws_conditional_put": "etag", "aws_s3_allow_unsafe_rename": "false"}
READ_BYTES = 8 * 2**20
MAX_REASON_CHARACTERS = 300
ACCESS_REMEDY = "Check the path, the keys in the environment and the rights"
DAMAGED_FILE_REMEDY = "Restore it from a backup; `check` names all damaged files"
SECRET_VARIABLE = re.compile("SECRET|TOKEN|PASSWORD|KEY|SAS|CREDENTIAL", re.IGNORECASE)
MIN_SECRET_CHARACTERS = 6  # of a value that is replaced in the text of an error
NOISE = re.compile(r"\x1b\[\d*m|<\?xml[^>]*>|</?[A-Za-z]+>|↳")
QUERY = re.compile(r"(?<=[\w/])\?[^\s,}]+")


@dataclass(frozen=True)
class LakeStore:
    """Files below a local folder, or a URL of an object store: S3, Google Cloud Storage, Azure or HDFS.

    Names are relative to it. A write is durable when it returns. The value can be sent to Spark's tasks.
    """

    root: str

    @property
    def path(self) -> Path | None:
        """The folder; None in an object store."""
        return None if "://" in self.root else Path(self.root)

    @property
    def options(self) -> dict[str, str]:
        return {} if self.path else dict(CONDITIONAL_PUT)

    def place(self, name: str) -> str:
        """Return a name as people and errors give it: a path or a URL."""
        return f"{self.root}/{name}"

    @property
    def files(self) -> FileSystem:
        return SubTreeFileSystem(self.root, LocalFileSystem()) if self.path else PyFileSystem(_remote(self.root))

    def sha256(self, name: str) -> str:
        """Return the checksum of a file, of which only a part is in memory at a time."""
        with self.files.open_input_stream(name, compression=None, buffer_size=READ_BYTES) as content:
            return hashlib.file_digest(content, "sha256").hexdigest()

    def write(self, name: str, content: memoryview) -> None:
        """Write a file. No one sees a part of it under the name of a commit."""
        if self.path:
            place = self.path / name
            place.parent.mkdir(parents=True, exist_ok=True)
            part = place.with_name(f"{place.name}.{uuid4().hex}")  # Spark may run a task twice at once
            part.write_bytes(content)
            _sync(part)
            part.replace(place)
            return
        out = _remote(self.root)._handler.open_output_stream(name, None)  # Arrow's passes what delta-rs does not take
        for start in range(0, len(content), READ_BYTES):
            out.write(bytes(content[start : start + READ_BYTES]))
        out.close()  # type: ignore[attr-defined]  # the stub of deltalake 1.6 lacks it

    def flush(self, *folders: str) -> None:
        """Make the files durable that were added to these folders; an object store keeps what it confirmed."""
        if self.path:
            _sync(*(self.path / one for one in folders))

    def flush_log(self, table: str, before: int) -> None:
        """Make the commits of a table durable that came after the version ``before``."""
        if self.path:
            log = self.path / table / "_delta_log"
            _sync(*(one for one in log.glob("*.json") if one.stem > f"{before:020}"), log)
            if before < 0:  # the table is new
                _sync(log.parent, self.path, self.path.parent)


@lru_cache(maxsize=8)
def _remote(root: str) -> DeltaStorageHandler:
    return DeltaStorageHandler(root, dict(CONDITIONAL_PUT))


def store_of(path: str | os.PathLike[str]) -> LakeStore:
    """Return the store of a path or URL. Raises LakeError, which does not repeat a URL that may hold a key."""
    text = os.fspath(path)
    scheme, separator, rest = text.partition("://")
    if not separator and not ESCAPE.search(text):
        return LakeStore(str(Path(text).absolute()))
    parts = urlsplit(text)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return LakeStore(str(Path(unquote(parts.path)).absolute()))
    if scheme not in OBJECT_STORES or not separator:
        stores = ", ".join(f"{one}://" for one in OBJECT_STORES)
        reason = f"is neither a local path without an escape, such as %20, nor a URL of a known store ({stores})"
        raise LakeError(f"{scheme}://…" if separator else text, reason, "Write it as s3://BUCKET/FOLDER, or as a path")
    if not PLAIN_URL.fullmatch(rest) or ("@" in rest and scheme != "abfss"):
        reason = "has a user, a key, a query, or a character other than ASCII letters, digits and . _ = + ~ -"
        raise LakeError(f"{scheme}://…", reason, KEYS_BELONG_IN_THE_ENVIRONMENT)
    return LakeStore(f"{OBJECT_STORES[scheme]}://{rest.rstrip('/')}")


# -- errors ------------------------------------------------------------------------------------------------------------


def writing(place: str) -> AbstractContextManager[None]:
    """Raise the errors of the block as LakeError with a remedy."""
    of_store = "Check the URL, the keys in the environment, the endpoint and the rights on the folder"
    of_disk = "Check path, owner and free space, or give another folder with --lake"
    return lake_errors(place, of_store if "://" in place else of_disk, "written")


@contextmanager
def lake_errors(place: str, remedy: str = DAMAGED_FILE_REMEDY, done: str = "read") -> Iterator[None]:
    """Raise the errors of the block as LakeError with a remedy."""
    try:
        yield
    except (OSError, DeltaError, pa.ArrowInvalid) as error:
        found = getattr(error, "filename", None) or place
        raise LakeError(found, f"cannot be {done}: {_text(error)}", remedy) from None


def _text(error: Exception) -> str:
    """Return what happened, in one line, without queries of URLs and values of secret variables."""
    if number := getattr(error, "errno", None):
        return os.strerror(number)
    text = " ".join(QUERY.sub("", NOISE.sub(" ", str(error))).split())
    for name, value in os.environ.items():
        if SECRET_VARIABLE.search(name) and len(value) >= MIN_SECRET_CHARACTERS:
            text = text.replace(value, "***")
    return text[:MAX_REASON_CHARACTERS].rstrip(". ")


def _sync(*paths: Path) -> None:
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
