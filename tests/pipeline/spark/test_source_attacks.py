"""The options of the data source are data: whoever may only write Spark SQL cannot write SQL of the database."""

import pytest
from pyspark.sql import SparkSession

from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.source import register
from tests.factories import make_task

ATTACKS = {
    "a column": {"where": '[["(SELECT count(*) FROM pg_authid) > 0 AND id", ">", 0]]'},
    "a union": {"where": '[["id < 0 UNION ALL SELECT rolname FROM pg_authid WHERE 1", "=", 1]]'},
    "an operator": {"where": '[["id", "> 0 OR id >", 0]]'},
    "no condition": {"where": '[[["id"], {}, 0]]'},
    "a snapshot": {"snapshot": "00000003-1'; DROP TABLE dbtaskqueue_task; --"},
    "a table": {"table": 'task" WHERE id = (SELECT 1) --'},
    "a location": {"location": "dbtaskqueue.task'; --"},
    "slices": {"slice_ids": "1; DROP TABLE dbtaskqueue_task"},
    "an unknown option": {"query": "SELECT rolname FROM pg_authid"},
}


@pytest.mark.parametrize("options", ATTACKS.values(), ids=ATTACKS)
def test_an_option_is_never_sql(spark: SparkSession, pg: Database, options: dict[str, str]) -> None:
    make_task("COMPLETED", queue="a'b")
    register(spark, pg)
    given = {"url": pg.url_without_password, **options}
    texts = {name: value.replace("\\", "\\\\").replace("'", "\\'") for name, value in given.items()}
    told = ", ".join(f"{name} '{value}'" for name, value in texts.items())
    with pytest.raises(Exception, match=r"PipelineError|ValueError|TypeError"):
        spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW attack USING dbtaskqueue OPTIONS ({told})")
        spark.sql("SELECT count(*) FROM attack").collect()
    assert spark.read.format("dbtaskqueue").option("url", given["url"]).load().where('queue_name = "a\'b"').count() == 1
