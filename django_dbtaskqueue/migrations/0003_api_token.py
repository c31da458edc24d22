"""Tokens of the JSON API with a scope, an expiry and their last use. A new table: pollers do not know it."""

from django.db import migrations, models
from django.db.models import Q
from django.db.models.functions import Now


class Migration(migrations.Migration):
    dependencies = [("dbtaskqueue", "0002_task_changes")]

    operations = [
        migrations.CreateModel(
            name="ApiToken",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("user", models.CharField("user", max_length=200)),
                ("digest", models.CharField("hash", max_length=64, unique=True)),
                ("note", models.CharField("note", blank=True, db_default="", max_length=200)),
                (
                    "scope",
                    models.CharField(
                        "scope",
                        choices=[("read", "read"), ("operate", "operate")],
                        db_default="operate",
                        max_length=30,
                    ),
                ),
                (
                    "queues",
                    models.JSONField("queues", blank=True, db_default=models.Value([], models.JSONField())),
                ),
                ("create_time", models.DateTimeField("created", db_default=Now())),
                ("expire_time", models.DateTimeField("expires", blank=True, null=True)),
                ("last_used_time", models.DateTimeField("last used", blank=True, null=True)),
            ],
            options={
                "verbose_name": "API token",
                "verbose_name_plural": "API tokens",
                "constraints": [
                    models.CheckConstraint(
                        condition=Q(scope__in=["read", "operate"]), name="dbtaskqueue_apitoken_scope"
                    )
                ],
            },
        ),
    ]
