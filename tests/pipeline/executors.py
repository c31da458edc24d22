"""What tests run on Spark's workers, and in their place: without Django, which is not set up there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import TaskContext, cloudpickle
from pyspark.sql import Row, datasource
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from django_dbtaskqueue.pipeline.source import TaskReader, arrow_schema


def dying_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Pass half of a partition on, then end the Python worker, at the first attempt of the first task."""
    context = TaskContext.get()
    for batch in batches:
        yield batch.slice(0, batch.num_rows // 2)
        if context is not None and context.attemptNumber() == 0 and context.partitionId() == 0:
            os._exit(1)
        yield batch.slice(batch.num_rows // 2)


@dataclass(frozen=True)
class ThisProcess:
    """In place of a session or a DataFrame of Spark that only maps Arrow batches: does so here, without a JVM."""

    batches: Sequence[pa.RecordBatch] = ()

    @property
    def schema(self) -> StructType:
        return from_arrow_schema(self.batches[0].schema)

    @property
    def columns(self) -> list[str]:
        return self.batches[0].schema.names

    def range(self, start: int, end: int, _step: int, _partitions: int) -> ThisProcess:
        return ThisProcess([pa.record_batch({"id": [number]}) for number in range(start, end)])

    def mapInArrow(self, function: Any, _schema: str) -> ThisProcess:
        mapper = cloudpickle.loads(cloudpickle.dumps(function))  # as a worker of Spark gets it
        return ThisProcess([found for batch in self.batches for found in mapper(iter([batch]))])

    def collect(self) -> list[Row]:
        return [Row(**row) for batch in self.batches for row in batch.to_pylist()]


def read(reader: TaskReader, *parts: datasource.InputPartition) -> pa.Table:
    batches = [batch for part in parts or reader.partitions() for batch in reader.read(part)]
    return pa.Table.from_batches(batches, arrow_schema(reader.selection.schema))
