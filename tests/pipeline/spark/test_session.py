"""The session that runs, and its workers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from django_dbtaskqueue.pipeline.spark import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_the_running_session_is_the_session(spark: SparkSession) -> None:
    assert spark_session(master="local[7]") is spark
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"


def test_workers_are_this_python_with_this_package(spark: SparkSession) -> None:
    def where(_row: object) -> tuple[str, str]:
        import django_dbtaskqueue

        return sys.executable, django_dbtaskqueue.__file__

    import django_dbtaskqueue

    assert spark.sparkContext.parallelize([1]).map(where).collect() == [(sys.executable, django_dbtaskqueue.__file__)]
