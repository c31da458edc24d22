"""What finished, as a table; what failed most, as a view; and a task for each poison task, for somebody to look at."""

import os

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession, functions as F

from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.source import register

database = Database.from_url(os.environ["DATABASE_URL"])  # the password stays out of options and plans
url = database.url_without_password
spark = SparkSession.active()
register(spark, database)


@dp.table
def finished() -> DataFrame:
    columns = "id bigint, queue_name string, reference_number string, status string, finish_time timestamp"
    return spark.readStream.format("dbtaskqueue").option("url", url).schema(columns).load()


@dp.materialized_view
def ends() -> DataFrame:
    return spark.read.table("finished").groupBy("queue_name", "status").count()


dp.create_sink("reviews", "dbtaskqueue", {"url": url, "queue": "reviews", "once": "reviews"})


@dp.append_flow(target="reviews")
def review() -> DataFrame:
    poison = spark.readStream.table("finished").where("status = 'POISON'")
    payload = F.to_json(F.struct(F.col("id").alias("task"), "queue_name"))
    return poison.select(F.concat(F.lit("review-"), "id").alias("reference"), payload.alias("payload"))
