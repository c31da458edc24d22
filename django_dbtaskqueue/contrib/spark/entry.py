"""Where a partition of tasks arrives on a Spark worker: no Django here before it is set up."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Mapping

import django
import pyarrow as pa
from django.utils.module_loading import import_string
from pyspark import TaskContext

ROWS = pa.schema(
    [("number", pa.int64()), ("queue", pa.string()), ("payload_type", pa.string()), ("leases", pa.binary())]
)
ANSWERS = pa.schema(
    [("number", pa.int64()), ("answers", pa.binary()), ("seconds", pa.float64()), ("refused", pa.string())]
)
ANSWERS_IN_SPARK = "number long, answers binary, seconds double, refused string"
WORK = "django_dbtaskqueue.contrib.spark.work.perform_rows"

_serving: list[dict[str, str]] = []  # the environment that Django was set up with in this process, if it was


def on_worker(
    batches: Iterator[pa.RecordBatch], *, environment: Mapping[str, str], again: bool
) -> Iterator[pa.RecordBatch]:
    """Process and settle the tasks of a partition; yield a summary of each job. ``again``: they were sent before.

    What keeps this worker from starting at all, such as a database out of its reach, is told in ``refused``: Spark
    would try the same again elsewhere and then give up all partitions.
    """
    for batch in batches:
        try:
            found = _work(environment, batch, again=again)
        except Exception:
            refusal = traceback.format_exc(limit=-3)
            found = [{"number": number, "refused": refusal} for number in batch.column("number").to_pylist()]
        yield pa.RecordBatch.from_pylist(found, schema=ANSWERS)


def _work(environment: Mapping[str, str], batch: pa.RecordBatch, *, again: bool) -> list[dict[str, object]]:
    _set_up(dict(environment))
    context = TaskContext.get()
    again = again or (context is not None and context.attemptNumber() > 0)
    return import_string(WORK)(batch.to_pylist(), again=again)  # type: ignore[no-any-return]


def _set_up(environment: dict[str, str]) -> None:
    if not _serving:
        os.environ.update(environment)
        django.setup()
        _serving.append(environment)
    if _serving != [environment]:
        raise RuntimeError(
            "This Spark worker has set Django up for a poller with another environment. "
            "Run pollers of different projects or databases as Spark applications of their own."
        )
