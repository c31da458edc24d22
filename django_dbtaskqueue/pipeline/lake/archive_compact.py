"""Compaction: many small files of one partition become one, in one change of the lake."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from django_dbtaskqueue.core.exceptions import LakeError
from django_dbtaskqueue.pipeline.jobs import Progress, silent
from django_dbtaskqueue.pipeline.lake.archive_files import data_file
from django_dbtaskqueue.pipeline.lake.archive_write import encodings
from django_dbtaskqueue.pipeline.lake.lake import DataFile, Entry, Lake
from django_dbtaskqueue.pipeline.lake.lake_files import DAMAGED, sound, sync, writing

SMALL = 32 * 2**20  # bytes; larger files stay as they are
TARGET = 128 * 2**20  # bytes that one new file may come to, about
FEWEST = 8  # small files in one partition that are worth a change
ROWS = 131_072  # read and written at once
LONG_LOG = 200  # entries after which the log is folded


def compact(lake: Lake, *, without: Collection[str] = (), fewest: int = FEWEST, progress: Progress = silent) -> int:
    """Merge the small files of each partition with at least ``fewest`` of them; return how many files went.

    Call it under the lake's lock; files of the changes ``without``, which may yet be withdrawn from, stay. No row is
    changed, added or lost; a run that is killed leaves either the old files counting or the new ones.
    """
    tables = [lake.files(table, without=without) for table in ("tasks", "attempts", "finished")]
    groups = [group for files in tables for group in _groups(files, fewest)]
    for done, group in enumerate(groups):
        progress("compact", done, len(groups))
        _merge(lake, group)
    lake.sweep()
    lake.fold(longer_than=LONG_LOG)
    return sum(map(len, groups))


def _groups(files: Sequence[DataFile], fewest: int) -> Iterator[list[DataFile]]:
    partitions = defaultdict(list)
    for one in files:
        if one.bytes < SMALL:
            partitions[Path(one.path).parent].append(one)
    for near in partitions.values():
        group: list[DataFile] = []
        for one in near:
            if sum(each.bytes for each in group) + one.bytes > TARGET:
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
        raise LakeError(place, f"came to {merged.rows} rows instead of {expected}", "The old files still count")
    lake.commit(Entry(token, "compact", (merged,), tuple(one.path for one in files)))
    lake.discard(token)


def _write(half: Path, paths: Sequence[Path]) -> None:
    schema = pa.unify_schemas([_opened(path).schema_arrow.remove_metadata() for path in paths])
    with pq.ParquetWriter(half, schema, **encodings(schema)) as writer:
        for path in paths:
            for batch in _opened(path).iter_batches(ROWS):
                columns = [
                    batch[name] if name in batch.schema.names else pa.nulls(batch.num_rows, schema.field(name).type)
                    for name in schema.names
                ]
                writer.write_batch(pa.record_batch(columns, schema=schema))


def _opened(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise LakeError(path, f"is damaged ({error})", DAMAGED) from error
