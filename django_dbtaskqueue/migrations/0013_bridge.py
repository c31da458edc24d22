"""What has been received over the HTTP bridge. A new table: pollers of the release before do not know it."""

from django.db import migrations, models
from django.db.models import Q
from django.db.models.functions import Now

from django_dbtaskqueue.migrations._task_tables import READABLE


class Migration(migrations.Migration):
    """Add a table."""

    dependencies = [("dbtaskqueue", "0012_parked_without_processor")]

    operations = [
        migrations.CreateModel(
            "ReceivedTransfer",
            [
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("queue", models.CharField("queue", max_length=200, db_column="queue_name")),
                ("source", models.CharField("peer", max_length=50)),
                ("transfer", models.CharField("transfer", max_length=210)),
                ("digest", models.CharField("hash of the content", max_length=64)),
                ("create_time", models.DateTimeField("created", db_default=Now())),
                ("expire_time", models.DateTimeField("expires", null=True, blank=True)),
            ],
            options={
                "verbose_name": "received transfer",
                "verbose_name_plural": "received transfers",
                "default_permissions": (),
                "constraints": [
                    models.UniqueConstraint(fields=["queue", "source", "transfer"], name="dbtaskqueue_transfer_unique"),
                    models.CheckConstraint(
                        condition=Q(create_time__range=READABLE, expire_time__range=READABLE),
                        name="dbtaskqueue_transfer_times",
                    ),
                ],
                "indexes": [
                    models.Index(
                        fields=["expire_time"],
                        condition=Q(expire_time__isnull=False),
                        name="dbtaskqueue_transfer_expires",
                    )
                ],
            },
        )
    ]
