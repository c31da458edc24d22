"""What the pages and housekeeping look for: an end status that no checkout touches, kinds of failures, months."""

from typing import Any

from django.db import migrations, models
from django.db.migrations.operations.base import Operation

from django_dbtaskqueue.db.partitions import PartitionByMonth

ENDED = ["COMPLETED", "ERROR", "POISON"]
FAILED = ["ERROR", "POISON"]
IN_LINE = (
    models.Q(final_status__isnull=True, parked_by__isnull=True, ready_time__isnull=False) & ~models.Q(status__in=ENDED)
    | models.Q(parked_by__isnull=True, ready_time__isnull=True, status__in=ENDED)
    & models.Q(final_status=models.F("status"), final_status__isnull=False)
    | models.Q(final_status__isnull=True, parked_by__isnull=False, ready_time__isnull=True, status="CREATED")
)


def fill(apps: Any, schema_editor: Any) -> None:
    """Say of rows that have ended by now how they did."""
    for name in ("Task", "TemporaryTask"):
        rows = apps.get_model("dbtaskqueue", name)._base_manager.using(schema_editor.connection.alias)
        rows.filter(status__in=ENDED).update(final_status=models.F("status"))


def columns(table: str) -> list[Operation]:
    """The two columns; the check on them comes when they are filled."""
    return [
        migrations.RemoveConstraint(table, f"dbtaskqueue_{table}_in_line"),
        migrations.AddField(
            table, "final_status", models.CharField("final status", blank=True, max_length=30, null=True)
        ),
        migrations.AddField(
            table, "fingerprint", models.CharField("fingerprint", blank=True, max_length=40, null=True)
        ),
    ]


def guards(table: str) -> list[Operation]:
    """The check on the columns, and their indexes."""
    start = f"dbtaskqueue_{table}"
    failed = models.Q(final_status__in=FAILED)
    kind = models.Q(final_status__in=FAILED, fingerprint__isnull=False)
    indexes = [
        models.Index(
            fields=["queue", "final_status", "id"],
            condition=models.Q(final_status__isnull=False),
            name=f"{start}_end",
        ),
        models.Index(fields=["final_status", "id"], condition=failed, name=f"{start}_fail"),
        models.Index(fields=["fingerprint", "id"], condition=kind, name=f"{start}_kind"),
    ]
    check = models.CheckConstraint(condition=IN_LINE, name=f"{start}_in_line")
    return [migrations.AddConstraint(table, check), *[migrations.AddIndex(table, index) for index in indexes]]


class Migration(migrations.Migration):
    dependencies = [("dbtaskqueue", "0002_call_counts")]

    operations = [
        *columns("task"),
        *columns("temporarytask"),
        migrations.RunPython(fill, migrations.RunPython.noop),
        *guards("task"),
        *guards("temporarytask"),
        PartitionByMonth("taskhistory", "moved_time"),
        migrations.AddField("attempt", "fingerprint", models.CharField("fingerprint", db_default="", max_length=40)),
        migrations.AddIndex("attempt", models.Index(fields=["fingerprint", "id"], name="dbtaskqueue_attempt_print")),
        migrations.CreateModel(
            name="Metric",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("queue", models.CharField(db_column="queue_name", max_length=200, verbose_name="queue")),
                ("minute", models.DateTimeField(verbose_name="minute")),
                ("outcome", models.CharField(max_length=30, verbose_name="outcome")),
                ("count", models.BigIntegerField(verbose_name="count")),
                ("run_seconds", models.FloatField(db_default=0.0, verbose_name="seconds of work")),
                ("wait_seconds", models.FloatField(db_default=0.0, verbose_name="seconds waited in line")),
                (
                    "runs",
                    models.JSONField(
                        db_default=models.Value({}, models.JSONField()), verbose_name="histogram of run times"
                    ),
                ),
                (
                    "waits",
                    models.JSONField(
                        db_default=models.Value({}, models.JSONField()), verbose_name="histogram of waits"
                    ),
                ),
            ],
            options={
                "verbose_name": "metric",
                "verbose_name_plural": "metrics",
                "indexes": [models.Index(fields=["minute", "queue"], name="dbtaskqueue_metric_minute")],
            },
        ),
        migrations.CreateModel(
            name="FailureGroup",
            fields=[
                (
                    "fingerprint",
                    models.CharField(max_length=40, primary_key=True, serialize=False, verbose_name="fingerprint"),
                ),
                ("queue", models.CharField(db_column="queue_name", max_length=200, verbose_name="queue")),
                ("error_type", models.CharField(db_default="", max_length=200, verbose_name="exception")),
                ("frame", models.CharField(db_default="", max_length=300, verbose_name="place in the code")),
                ("message", models.CharField(db_default="", max_length=500, verbose_name="message")),
                ("first_seen", models.DateTimeField(verbose_name="first seen")),
                ("last_seen", models.DateTimeField(verbose_name="last seen")),
            ],
            options={
                "verbose_name": "failure group",
                "verbose_name_plural": "failure groups",
                "indexes": [models.Index(fields=["last_seen"], name="dbtaskqueue_failure_seen")],
            },
        ),
        migrations.CreateModel(
            name="FailureCount",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("fingerprint", models.CharField(max_length=40, verbose_name="fingerprint")),
                ("minute", models.DateTimeField(verbose_name="minute")),
                ("count", models.BigIntegerField(verbose_name="count")),
            ],
            options={
                "verbose_name": "failures in a minute",
                "verbose_name_plural": "failures by the minute",
                "indexes": [models.Index(fields=["minute", "fingerprint"], name="dbtaskqueue_failure_minute")],
            },
        ),
    ]
