"""Schedules: when tasks are enqueued by themselves. A new table; pollers of the release before do not know it."""

from django.db import migrations, models
from django.db.models.functions import Now

from django_dbtaskqueue.migrations._task_tables import READABLE

MISSED = [
    ("skip", "skip them"),
    ("one", "enqueue one task for all of them"),
    ("all", "enqueue one task for each, the newest 100 at most"),
]


class Migration(migrations.Migration):
    """Add a table."""

    dependencies = [("dbtaskqueue", "0005_used_references")]

    operations = [
        migrations.CreateModel(
            "Schedule",
            [
                ("name", models.CharField("name", max_length=150, primary_key=True, serialize=False)),
                ("queue", models.CharField("queue", max_length=200, db_column="queue_name")),
                ("cron", models.CharField("cron", max_length=200)),
                ("timezone", models.CharField("time zone", max_length=100, db_default="UTC")),
                ("payload", models.JSONField("payload", null=True, blank=True)),
                ("payload_type", models.CharField("payload type", max_length=200, blank=True, db_default="")),
                ("priority", models.SmallIntegerField("priority", null=True, blank=True)),
                ("missed", models.CharField("missed ticks", max_length=30, choices=MISSED, db_default="one")),
                (
                    "overlap",
                    models.CharField(
                        "earlier task not finished",
                        max_length=30,
                        choices=[("allow", "enqueue the task all the same"), ("skip", "skip the tick")],
                        db_default="allow",
                    ),
                ),
                ("paused", models.BooleanField("paused", db_default=False)),
                (
                    "source",
                    models.CharField(
                        "source",
                        max_length=30,
                        choices=[("code", "code"), ("person", "person")],
                        db_default="person",
                    ),
                ),
                ("code", models.JSONField("the code says", null=True, blank=True)),
                (
                    "edited",
                    models.JSONField("changed by hand", db_default=models.Value([], models.JSONField()), blank=True),
                ),
                ("next_time", models.DateTimeField("next tick", null=True, blank=True)),
                ("last_time", models.DateTimeField("last tick", null=True, blank=True)),
                ("last_task", models.BigIntegerField("last task", null=True, blank=True)),
                ("note", models.CharField("note", max_length=500, blank=True, db_default="")),
                ("create_time", models.DateTimeField("created", db_default=Now())),
            ],
            options={
                "verbose_name": "schedule",
                "verbose_name_plural": "schedules",
                "permissions": [("run_schedule", "Can run schedules now")],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(next_time__range=READABLE, last_time__range=READABLE),
                        name="dbtaskqueue_schedule_times",
                    )
                ],
            },
        )
    ]
