"""The leases of a limited queue as text, which a checkout reads and writes faster than JSON; tokens of groups."""

from django.db import migrations, models


class Migration(migrations.Migration):
    """Add columns with defaults, and a table. Pollers of the release before write ``running``, so others count anew."""

    dependencies = [("dbtaskqueue", "0010_steps")]

    operations = [
        migrations.AddField("QueueLimit", "leases", models.TextField("leases", blank=True, db_default="")),
        migrations.AddField("QueueLimit", "stamp", models.CharField("stamp", max_length=32, blank=True, db_default="")),
        migrations.CreateModel(
            "GroupLimit",
            [
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("queue", models.CharField("queue", max_length=200, db_column="queue_name")),
                ("group", models.CharField("group", max_length=200, db_column="group_key")),
                ("tokens", models.FloatField("tokens")),
                ("check_time", models.DateTimeField("last checkout")),
                ("full_time", models.DateTimeField("full again")),
            ],
            options={
                "verbose_name": "limit of a group",
                "verbose_name_plural": "limits of groups",
                "default_permissions": (),
                "constraints": [
                    models.UniqueConstraint(fields=["queue", "group"], name="dbtaskqueue_grouplimit_unique")
                ],
                "indexes": [models.Index(fields=["full_time"], name="dbtaskqueue_grouplimit_full")],
            },
        ),
    ]
