"""The session that runs, and its workers."""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession

from django_dbtaskqueue.pipeline.spark import spark_session


def test_the_running_session_is_the_session_and_its_workers_are_this_python_with_this_package(
    spark: SparkSession,
) -> None:
    def where(_row: object) -> tuple[str, str]:
        import django_dbtaskqueue

        return sys.executable, django_dbtaskqueue.__file__

    assert spark_session(master="local[7]") is spark
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.sparkContext.parallelize([1]).map(where).collect() == [where(None)]
