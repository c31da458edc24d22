"""Streams of finished tasks, and the events that they read. Two tables: pollers of the release before do not know them.

The trigger that writes the events is made when a stream is registered, and fires for those pollers as well.
"""

from django.db import migrations, models
from django.db.models.functions import Now


class Migration(migrations.Migration):
    """Add two tables."""

    dependencies = [("dbtaskqueue", "0013_bridge")]

    operations = [
        migrations.CreateModel(
            "StreamPosition",
            [
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("location", models.CharField("location", max_length=200)),
                ("name", models.CharField("stream", max_length=200)),
                ("position", models.BigIntegerField("position", null=True, blank=True)),
                ("read_time", models.DateTimeField("last read", db_default=Now())),
            ],
            options={
                "verbose_name": "stream",
                "verbose_name_plural": "streams",
                "default_permissions": (),
                "constraints": [
                    models.UniqueConstraint(fields=["location", "name"], name="dbtaskqueue_streamposition_name")
                ],
            },
        ),
        migrations.CreateModel(
            "FinishEvent",
            [
                (
                    "pk",
                    models.CompositePrimaryKey(
                        "location",
                        "transaction_id",
                        "task_id",
                        blank=True,
                        editable=False,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                ("location", models.CharField("location", max_length=200)),
                ("transaction_id", models.BigIntegerField("transaction")),
                ("task_id", models.BigIntegerField("task")),
            ],
            options={
                "verbose_name": "finish of a task",
                "verbose_name_plural": "finishes of tasks",
                "default_permissions": (),
            },
        ),
    ]
