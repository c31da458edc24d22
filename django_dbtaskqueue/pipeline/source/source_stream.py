"""What finishes, as a stream that never skips a row, however late its transaction commits.

An id or a time is given when a row is written and seen when it is committed: whoever remembers the greatest he saw
passes over what commits later. So an offset is a transaction id here, and a micro-batch is what transactions from one
offset to below the next wrote last. The next offset is the oldest transaction still running, and therefore all of them
have ended, whichever way. A transaction that is left open delays the stream; it cannot make it skip.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow

from django_dbtaskqueue.core.exceptions import PipelineError
from django_dbtaskqueue.core.sql.stream import HORIZON, window
from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.source.source_read import SLICE, Selection, Slice, read_slice

BEGIN = 0  # before every transaction


class TaskStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Finished tasks of TASKS, rows of the history, or failed attempts, in the order their transactions ended.

    A row is read once for each change that left it finished: a task that is reprocessed comes again with a greater
    ``total_attempt``, one that is marked as poison comes again as POISON.
    """

    def __init__(self, database: Database, selection: Selection, table: str) -> None:
        if database.vendor != "postgresql":
            raise PipelineError("Finished tasks can be streamed from PostgreSQL only: read SQLite in batches.")
        self.database = database
        self.selection = selection
        self.finished = table == "task"
        self.last: int | None = None

    def initialOffset(self) -> dict[str, int]:
        """Begin with all that is there."""
        return {"transaction": BEGIN}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        """Return the oldest transaction that still runs; everything below it has ended."""
        return {"transaction": max(start["transaction"], self.last or self._horizon())}

    def getDefaultReadLimit(self) -> ReadLimit:
        """Take all there is: transactions cannot be cut into pieces."""
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """End with what has ended by now."""
        self.last = self._horizon()

    def _horizon(self) -> int:
        with self.database.open() as link:
            return int(link.run(HORIZON)[0][0])

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """One slice for a micro-batch; the first one, of everything, is cut by ids."""
        if start["transaction"] == end["transaction"]:
            return []
        since, until = start["transaction"], end["transaction"]
        if since != BEGIN:
            return [Window(None, None, since, until)]
        with self.database.open() as link:
            first, last = self.selection.bounds(self.database, link) or (0, 0)
        edges = [*range(first, last + 1, SLICE), last + 1]
        return [Window(low, high, since, until) for low, high in pairwise(edges)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one slice."""
        assert isinstance(partition, Window)  # noqa: S101 -- what partitions() returns
        test = window(partition.since, partition.until, finished=self.finished)
        return read_slice(self.database, self.selection, partition, None, also=test)


@dataclass
class Window(Slice):
    """Rows last written by transactions from ``since`` to below ``until``."""

    since: int = BEGIN
    until: int = BEGIN
