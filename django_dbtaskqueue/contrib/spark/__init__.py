"""Processing on a Spark cluster: ``manage.py runtaskpoller --executor spark --master spark://HOST:7077``.

Spark's workers import this module before Django is set up there, so it imports no model. A partition of tasks arrives
here; ``work`` processes and settles them. ``SparkExecutor`` is resolved on first use.
"""

import os
import traceback
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import django
import pyarrow as pa
from django.utils.module_loading import import_string
from pyspark import TaskContext

from django_dbtaskqueue.core import lazy_names
from django_dbtaskqueue.core.exceptions import PipelineError

if TYPE_CHECKING:
    from django_dbtaskqueue.contrib.spark.executor import SparkExecutor

__all__ = ["SparkExecutor"]

JOB_SCHEMA = pa.schema([("number", pa.int64()), ("leases", pa.binary())])
ANSWER_SCHEMA = pa.schema(
    [("number", pa.int64()), ("answers", pa.binary()), ("seconds", pa.float64()), ("refused", pa.string())]
)
ANSWER_DDL = "number long, answers binary, seconds double, refused string"
Place = tuple[str | None, str]  # the server of a database, where that can be asked, and its name
WORK_FUNCTION = "django_dbtaskqueue.contrib.spark.executor.perform_rows"

_serving: list[dict[str, str]] = []  # the environment that Django was set up with in this process
__getattr__, __dir__ = lazy_names(__name__, {"executor": __all__})


def on_worker(
    batches: Iterator[pa.RecordBatch], *, environment: Mapping[str, str], places: Mapping[str, Place], again: bool
) -> Iterator[pa.RecordBatch]:
    """Process and settle the tasks of a partition; yield a summary of each job. ``again``: they were sent before.

    ``places`` are the poller's databases by alias: the worker's must be the same. An error that stops this worker is
    returned in ``refused``: if it were raised, Spark would try again elsewhere and then give up all partitions.
    """
    for batch in batches:
        try:
            _set_up(dict(environment))
            context = TaskContext.get()
            repeated = again or (context is not None and context.attemptNumber() > 0)
            found = import_string(WORK_FUNCTION)(batch.to_pylist(), again=repeated, places=places)
        except Exception as error:
            refusal = str(error) if isinstance(error, PipelineError) else traceback.format_exc(limit=-3)
            found = [{"number": number, "refused": refusal} for number in batch.column("number").to_pylist()]
        yield pa.RecordBatch.from_pylist(found, schema=ANSWER_SCHEMA)


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
