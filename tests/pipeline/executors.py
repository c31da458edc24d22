"""What tests run on Spark's workers: importable there, so without Django."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pyarrow as pa
from pyspark import TaskContext


def dying_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Pass half of a partition on, then end the Python worker, at the first attempt of the first task."""
    context = TaskContext.get()
    for batch in batches:
        yield batch.slice(0, batch.num_rows // 2)
        if context is not None and context.attemptNumber() == 0 and context.partitionId() == 0:
            os._exit(1)
        yield batch.slice(batch.num_rows // 2)
