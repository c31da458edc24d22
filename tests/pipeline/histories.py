"""Tasks as plain Python, as DataFrames, and what the report must say of them: an oracle without Spark."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from pyspark.sql import DataFrame, SparkSession

from django_dbtaskqueue.pipeline.reports.transforms import REPORT_COLUMNS
from django_dbtaskqueue.pipeline.source import schema_of

MONDAY, HOUR = datetime(2026, 1, 5, tzinfo=UTC), timedelta(hours=1)
BERLIN = ZoneInfo("Europe/Berlin")


def office(first: datetime, days: int) -> dict[datetime, int]:
    """Return 100 arrivals at nine each day and one at ten, by the clocks of Berlin."""
    nine = [first.replace(tzinfo=BERLIN) + timedelta(days=day, hours=9) for day in range(days)]
    return {one.astimezone(UTC) + HOUR * later: count for one in nine for later, count in ((0, 100), (1, 1))}


def times(created: datetime, *, waited: float = 1, ran: float) -> dict[str, datetime]:
    started = created + timedelta(seconds=waited)
    return {"create_time": created, "start_time": started, "finish_time": started + timedelta(seconds=ran)}


@dataclass(frozen=True)
class Row:
    queue_name: str = "claims"
    status: str = "COMPLETED"
    total_attempt: int = 1
    reenqueue_attempt: int = 0
    create_time: datetime = MONDAY
    start_time: datetime | None = MONDAY
    finish_time: datetime | None = MONDAY
    reference_number: str | None = None
    tag: str | None = None
    process_result: str | None = None


assert tuple(field.name for field in fields(Row)) == REPORT_COLUMNS


def row(*, created: float = 0, waited: float | None = 1, ran: float | None = 1, **columns: Any) -> Row:
    """Return a task created ``created`` seconds after Monday, taken and ended as many seconds later as given."""
    create = MONDAY + timedelta(seconds=created)
    start = None if waited is None else create + timedelta(seconds=waited)
    finish = None if ran is None else (start or create) + timedelta(seconds=ran)
    return Row(create_time=create, start_time=start, finish_time=finish, **columns)


def frame(spark: SparkSession, rows: Iterable[Row]) -> DataFrame:
    return spark.createDataFrame([tuple(asdict(one).values()) for one in rows], schema_of("task", REPORT_COLUMNS))


def hour_of(time: datetime) -> datetime:
    return time.replace(minute=0, second=0, microsecond=0)


def percentile(values: Sequence[float], p: float) -> float | None:
    """Return the least value that the share ``p`` of all does not exceed."""
    return sorted(values)[max(math.ceil(len(values) * p - 1e-9), 1) - 1] if values else None


def levels(rows: Iterable[Row]) -> dict[tuple[str, datetime], dict[str, Any]]:
    """Return what ``service_levels`` by queue and hour must say, times within 1 %."""
    found: dict[tuple[str, datetime], dict[str, Any]] = defaultdict(lambda: defaultdict(list))
    for one in rows:
        found[one.queue_name, hour_of(one.create_time)]["arrived"].append(one)
        if one.status in ("COMPLETED", "ERROR", "POISON") and one.finish_time is not None:
            found[one.queue_name, hour_of(one.finish_time)]["ended"].append(one)
    return {key: _level(group["arrived"], group["ended"]) for key, group in found.items()}


def _level(arrived: list[Row], ended: list[Row]) -> dict[str, Any]:
    retries = [max(one.total_attempt - one.reenqueue_attempt - 1, 0) for one in ended]
    taken = [one for one in ended if one.start_time is not None]
    waits = [(one.start_time - one.create_time) / timedelta(seconds=1) for one in taken if one.total_attempt == 1]
    runs = [(one.finish_time - one.start_time) / timedelta(seconds=1) for one in taken]
    number = len(ended)
    completed = sum(one.status == "COMPLETED" for one in ended)
    found: dict[str, Any] = {
        "arrived": len(arrived),
        "ended": number,
        "completed": completed,
        "errors": sum(one.status == "ERROR" for one in ended),
        "poisoned": sum(one.status == "POISON" for one in ended),
        "attempts": sum(one.total_attempt for one in ended),
        "retried": sum(count > 0 for count in retries),
        "retries": sum(retries),
        "success_rate": completed / number if number else None,
        "retry_rate": sum(count > 0 for count in retries) / number if number else None,
        "failure_rate": 1 - completed / number if number else None,
        "run_seconds": sum(runs),
    }
    for name, p in (("p50", 0.50), ("p95", 0.95), ("p99", 0.99)):
        found[f"wait_{name}"] = percentile(waits, p)
        found[f"run_{name}"] = percentile(runs, p)
    return found


def backlog(rows: Iterable[Row]) -> dict[tuple[str, datetime], int]:
    changes: dict[tuple[str, datetime], int] = defaultdict(int)
    for one in rows:
        changes[one.queue_name, hour_of(one.create_time)] += 1
        if one.status in ("COMPLETED", "ERROR", "POISON") and one.finish_time is not None:
            changes[one.queue_name, hour_of(one.finish_time)] -= 1
    so_far: dict[str, int] = defaultdict(int)
    found = {}
    for queue, hour in sorted(changes):
        so_far[queue] += changes[queue, hour]
        found[queue, hour] = so_far[queue]
    return found
