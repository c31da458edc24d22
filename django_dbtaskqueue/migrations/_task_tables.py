"""The task tables as the first migration makes them. A later change of them is a migration of its own."""

from datetime import UTC, datetime
from typing import Any

from django.db import migrations, models
from django.db.models import Q
from django.db.models.functions import Now

STATUSES = ["CREATED", "PROCESSING", "COMPLETED", "ERROR", "POISON"]
ENDED = ["COMPLETED", "ERROR", "POISON"]
FAILED = ["ERROR", "POISON"]
READABLE = (datetime(1900, 1, 1, tzinfo=UTC), datetime(9900, 1, 1, tzinfo=UTC))

Fields = list[tuple[str, "models.Field[Any, Any]"]]


def key() -> Fields:
    """Return the primary key."""
    return [("id", models.BigAutoField(primary_key=True, serialize=False))]


def task_columns() -> Fields:
    """Return the columns that the task tables and the history have in common."""
    return [
        ("queue", models.CharField("queue", max_length=200, db_column="queue_name")),
        (
            "reference",
            models.CharField("reference", max_length=200, null=True, blank=True, db_column="reference_number"),
        ),
        ("status", models.CharField("status", max_length=30, choices=[(s, s) for s in STATUSES], db_default="CREATED")),
        ("attempt", models.IntegerField("attempt", db_default=0)),
        ("reenqueue_attempt", models.IntegerField("reenqueue attempt", db_default=0)),
        ("total_attempt", models.BigIntegerField("total attempt", db_default=0)),
        ("max_attempts", models.IntegerField("max attempts", db_default=5)),
        ("priority", models.SmallIntegerField("priority", db_default=0)),
        ("payload", models.JSONField("payload", null=True, blank=True)),
        ("payload_type", models.CharField("payload type", max_length=200, null=True, blank=True)),
        ("result", models.JSONField("result", null=True, blank=True)),
        ("process_result", models.TextField("process result", null=True, blank=True)),
        ("context", models.JSONField("context", null=True, blank=True)),
        ("group_key", models.CharField("group", max_length=200, null=True, blank=True)),
        ("tag", models.CharField("tag", max_length=200, null=True, blank=True)),
        ("poller_instance", models.CharField("poller", max_length=200, null=True, blank=True)),
        ("create_time", models.DateTimeField("created", db_default=Now())),
        ("next_process_time", models.DateTimeField("next process time", db_default=Now())),
        ("last_update_time", models.DateTimeField("last update", db_default=Now())),
        ("lease_seconds", models.FloatField("lease in seconds", null=True, blank=True)),
        ("expire_time", models.DateTimeField("expires", null=True, blank=True)),
        ("start_time", models.DateTimeField("started", null=True, blank=True)),
        ("finish_time", models.DateTimeField("finished", null=True, blank=True)),
    ]


def task_constraints(table: str) -> list[models.BaseConstraint]:
    """Return what holds for each row of a task table."""
    ready = Q(ready_time__isnull=False, parked_by__isnull=True, final_status__isnull=True) & ~Q(status__in=ENDED)
    ended = Q(ready_time__isnull=True, status__in=ENDED, parked_by__isnull=True)
    ended &= Q(final_status__isnull=False, final_status=models.F("status"))
    parked = Q(ready_time__isnull=True, status="CREATED", parked_by__isnull=False, final_status__isnull=True)
    counters = Q(attempt__gte=0, reenqueue_attempt__gte=0, max_attempts__gte=1)
    counters &= Q(total_attempt__gte=models.F("attempt"), total_attempt__lte=2**62) & Q(reenqueue_attempt__lte=10**9)
    times = {f"{name}__range": READABLE for name in ("create_time", "next_process_time", "ready_time", "expire_time")}
    return [
        models.UniqueConstraint(
            fields=["reference", "queue"],
            name=f"{table}_reference",
            opclasses=["varchar_pattern_ops", "varchar_ops"],
        ),
        models.CheckConstraint(condition=Q(status__in=STATUSES), name=f"{table}_status"),
        models.CheckConstraint(condition=ready | ended | parked, name=f"{table}_ready_time"),
        models.CheckConstraint(condition=Q(finish_time__isnull=True) | Q(status__in=ENDED), name=f"{table}_finished"),
        models.CheckConstraint(
            condition=~Q(status="CREATED") | Q(poller_instance__isnull=True), name=f"{table}_unleased"
        ),
        models.CheckConstraint(condition=counters, name=f"{table}_counters"),
        models.CheckConstraint(
            condition=Q(lease_seconds__gt=0, lease_seconds__lte=3_155_760_000), name=f"{table}_lease"
        ),
        models.CheckConstraint(condition=Q(**times), name=f"{table}_times"),
    ]


def task_indexes(table: str) -> list[models.Index]:
    """Return the indexes of a task table. Each is partial, and checkout writes none of them."""
    ready = Q(ready_time__isnull=False)
    columns_and_rows: dict[str, tuple[list[str], Q]] = {
        "rdy": (["queue", "priority", "ready_time", "id"], ready),
        "head": (["queue", "group_key"], Q(group_key__isnull=False, ready_time__isnull=False)),
        "grp": (["queue", "group_key", "priority", "id"], Q(parked_by="group")),
        "park": (["queue", "payload_type"], Q(parked_by__isnull=False)),
        "end": (["queue", "final_status", "id"], Q(final_status__isnull=False)),
        "fail": (["final_status", "id"], Q(final_status__in=FAILED)),
        "fp": (["fingerprint", "id"], Q(final_status__in=FAILED, fingerprint__isnull=False)),
    }
    return [
        models.Index(fields=columns, condition=rows, name=f"{table}_{name}")
        for name, (columns, rows) in columns_and_rows.items()
    ]


def task_table(name: str, **options: Any) -> migrations.CreateModel:
    """Return the step that makes a task table."""
    table = f"dbtaskqueue_{name.lower()}"
    return migrations.CreateModel(
        name=name,
        fields=[
            *task_columns(),
            *key(),
            ("ready_time", models.DateTimeField("ready time", null=True, blank=True, db_default=Now())),
            ("parked_by", models.CharField("parked by", max_length=200, null=True, blank=True)),
            ("final_status", models.CharField("final status", max_length=30, null=True, blank=True)),
            ("fingerprint", models.CharField("fingerprint", max_length=40, null=True, blank=True)),
        ],
        options={
            **options,
            "abstract": False,
            "indexes": task_indexes(table),
            "constraints": task_constraints(table),
        },
    )
