"""A table of what the limits of queues need between two checkouts. No existing table changes."""

from django.db import migrations, models
from django.db.models.functions import Now


class Migration(migrations.Migration):
    """Add a table. Pollers of the release before neither read nor write it, and obey no limit."""

    dependencies = [("dbtaskqueue", "0007_uniqueness_periods")]

    operations = [
        migrations.CreateModel(
            "QueueLimit",
            [
                (
                    "queue",
                    models.CharField(
                        "queue", max_length=200, primary_key=True, serialize=False, db_column="queue_name"
                    ),
                ),
                ("running", models.JSONField("leases", null=True, blank=True)),
                ("tokens", models.FloatField("tokens", db_default=0.0)),
                ("check_time", models.DateTimeField("last checkout", db_default=Now())),
                ("idle_seconds", models.FloatField("seconds between the last checkouts", null=True, blank=True)),
            ],
            options={
                "verbose_name": "limits of a queue",
                "verbose_name_plural": "limits of queues",
                "default_permissions": (),
            },
        )
    ]
