"""The timetable as Spark sees it: transforms from DataFrame to DataFrame, without a database."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

MISSING = "NA"  # what the file says where nothing is on record


def read(spark: SparkSession, file: Path) -> DataFrame:
    """Return the raw file, each column as text; what is not on record is null."""
    return spark.read.csv(str(file), header=True, nullValue=MISSING)


def cleaned(raw: DataFrame) -> DataFrame:
    """Return sound flights, each once, with the types and the reference the desk uses.

    A flight without a date, carrier, number or route cannot be named, so nobody can claim for it.
    """
    from pyspark.sql import functions as F

    key = ("year", "month", "day", "carrier", "flight", "origin", "dest")
    return (
        raw.select(
            _reference().alias("flight"),
            F.make_date(*(F.col(name).cast("int") for name in ("year", "month", "day"))).alias("flown_on"),
            "carrier",
            F.col("flight").cast("int").alias("number"),
            "origin",
            F.col("dest").alias("destination"),
            F.col("dep_delay").cast("int").alias("departure_delay"),
            F.col("arr_delay").cast("int").alias("arrival_delay"),
            F.col("tailnum").alias("tail_number"),
            F.col("distance").cast("int").alias("distance_miles"),
            F.greatest(*(F.col(name).isNull() for name in key)).alias("nameless"),
        )
        .where("NOT nameless")
        .dropDuplicates(["flight"])
        .select(
            "flight", "flown_on", "carrier", "number", "origin", "destination",
            "departure_delay", "arrival_delay", "tail_number", "distance_miles",
        )
    )  # fmt: skip


def claims(flights: DataFrame, references: Collection[str], passenger: str) -> DataFrame:
    """Return a claim of ``passenger`` for each of the flights that is among ``references``."""
    from pyspark.sql import functions as F

    wanted = flights.sparkSession.createDataFrame([(reference,) for reference in references], "flight string")
    return flights.join(F.broadcast(wanted), "flight").select("flight", F.lit(passenger).alias("passenger"))


def _reference() -> Column:
    """Return the natural reference, as ``data.reference_of`` writes it."""
    from pyspark.sql import functions as F

    parts = [
        F.col("year"),
        F.lpad("month", 2, "0"),
        F.lpad("day", 2, "0"),
        *map(F.col, ("carrier", "flight", "origin")),
    ]
    return F.concat_ws("-", *parts, F.col("dest"))
