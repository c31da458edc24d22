"""A ledger of references that stay taken when their tasks leave the table. No existing table changes."""

from django.db import migrations, models
from django.db.models.functions import Now


class Migration(migrations.Migration):
    """Add a table. Pollers of the release before neither read nor write it."""

    dependencies = [("dbtaskqueue", "0004_lost_leases")]

    operations = [
        migrations.CreateModel(
            "UsedReference",
            [
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("queue", models.CharField("queue", max_length=200, db_column="queue_name")),
                ("reference", models.CharField("reference", max_length=200, db_column="reference_number")),
                ("create_time", models.DateTimeField("created", db_default=Now())),
            ],
            options={
                "verbose_name": "used reference",
                "verbose_name_plural": "used references",
                "default_permissions": (),
                "constraints": [
                    models.UniqueConstraint(fields=["queue", "reference"], name="dbtaskqueue_usedreference_unique")
                ],
            },
        )
    ]
