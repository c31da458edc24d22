"""The lake's ``summaries``: of each day what reports add up, in a file whose name begins with a key.

The key stands for the contents of the day's files, and for the options of a report that change the figures. When a file
of the day changes, the summary is out of date: nobody reads it, and the next writer removes it.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from django_dbtaskqueue.core import __version__
from django_dbtaskqueue.pipeline.lake import PARTITION, DataFile, Lake
from django_dbtaskqueue.pipeline.lake.export import Export, described
from django_dbtaskqueue.pipeline.lake.store import reading, writing

SUMMARY_TABLE = "summaries"
VERSION = f"{__version__} 1"  # of what a summary holds: with each release every summary is made again
KEY_CHARACTERS = 32
SORTED = [(name, "ascending") for name in ("part", "queue", "hour", "message", "tag", "reference")]


def key_of(files: Iterable[DataFile], options: str) -> str:
    """Return the key of the summary of a day with these files, for reports with these options."""
    return _key_of_files(files) + _digest(options)


def summaries(lake: Lake, keys: Mapping[str, str]) -> dict[str, DataFile]:
    """Return those summaries that have the key of their day. A damaged one is left out: it is made again."""
    if not _is_there(lake):
        return {}
    own = [one for one in lake.files(SUMMARY_TABLE) if keys.get(one.day) == one.token]
    return {one.day: one for one in lake.sound(own, [])}


def remove_out_of_date(lake: Lake, added: Iterable[DataFile] = ()) -> None:
    """Remove the summaries of days whose files have changed, and add these in the same commit. Raises LakeError."""
    added, old = [*added], _out_of_date(lake)
    if added or old:
        lake.commit(SUMMARY_TABLE, added, old)
    if added and (late := _out_of_date(lake)):  # a day changed meanwhile, as `erase` does: nothing of it may stay
        lake.commit(SUMMARY_TABLE, (), late)
        with writing(lake.root):
            lake.delta(SUMMARY_TABLE).vacuum(0, dry_run=False, enforce_retention_duration=False)


def _is_there(lake: Lake) -> bool:
    with reading(lake.store.place(SUMMARY_TABLE)):
        return lake.has_table(SUMMARY_TABLE)


def _out_of_date(lake: Lake) -> list[DataFile]:
    if not _is_there(lake):
        return []
    days = defaultdict(list)
    for file in (*lake.files("tasks"), *lake.files("attempts")):
        days[file.day].append(file)
    keys = {day: _key_of_files(files) for day, files in days.items()}
    return [one for one in lake.files(SUMMARY_TABLE) if one.token[:KEY_CHARACTERS] != keys.get(one.day)]


def _key_of_files(files: Iterable[DataFile]) -> str:
    return _digest("\n".join([VERSION, *sorted(f"{one.table}/{one.sha256}" for one in files)]))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_CHARACTERS]


@dataclass(frozen=True)
class SummaryWriter:
    """For ``mapInArrow`` over rows of summaries, all of a day in one partition: writes a file for each day."""

    lake: Lake
    keys: Mapping[str, str]  # by day

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        held = [one for one in batches if one.num_rows]
        if not held:
            return
        rows = pa.Table.from_batches(held)
        for day in pc.unique(rows[PARTITION]):
            part = rows.filter(pc.equal(rows[PARTITION], day)).drop_columns(PARTITION).sort_by(SORTED)
            name = day.as_py().isoformat()
            yield from described([Export(self.lake, self.keys[name]).write_day(SUMMARY_TABLE, name, part, "0")])
