"""The pipeline's tables."""

import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("dbtaskqueue", "0004_operations"),
    ]
    operations = [
        migrations.CreateModel(
            name="ArchiveBatch",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("token", models.CharField(max_length=32, unique=True, verbose_name="token")),
                ("location", models.CharField(max_length=200, verbose_name="location")),
                ("source", models.CharField(max_length=30, verbose_name="table")),
                ("lake", models.TextField(verbose_name="lake")),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("open", "open"),
                            ("deleted", "deleted"),
                            ("closed", "closed"),
                            ("abandoned", "abandoned"),
                        ],
                        db_default="open",
                        max_length=30,
                        verbose_name="state",
                    ),
                ),
                ("first_id", models.BigIntegerField(verbose_name="first id")),
                ("last_id", models.BigIntegerField(verbose_name="last id")),
                ("cutoff", models.DateTimeField(verbose_name="finished before")),
                (
                    "statuses",
                    models.JSONField(db_default=models.Value([], models.JSONField()), verbose_name="statuses"),
                ),
                (
                    "queues",
                    models.JSONField(
                        blank=True, db_default=models.Value([], models.JSONField()), verbose_name="queues"
                    ),
                ),
                ("tasks", models.BigIntegerField(db_default=0, verbose_name="tasks archived")),
                ("attempts", models.BigIntegerField(db_default=0, verbose_name="failed attempts archived")),
                (
                    "withdrawn",
                    models.JSONField(
                        blank=True, db_default=models.Value([], models.JSONField()), verbose_name="withdrawn"
                    ),
                ),
                ("size", models.BigIntegerField(db_default=0, verbose_name="bytes")),
                ("note", models.TextField(blank=True, db_default="", verbose_name="note")),
                (
                    "create_time",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), verbose_name="created"),
                ),
                ("close_time", models.DateTimeField(blank=True, null=True, verbose_name="closed at")),
            ],
            options={
                "verbose_name": "archive batch",
                "verbose_name_plural": "archive batches",
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(("state__in", ["open", "deleted", "closed", "abandoned"])),
                        name="dbtaskqueue_archivebatch_state",
                    ),
                    models.UniqueConstraint(
                        condition=models.Q(("state__in", ["open", "deleted"])),
                        fields=("location", "source"),
                        name="dbtaskqueue_archivebatch_one_open",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="StreamLedger",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("query", models.CharField(max_length=200, verbose_name="streaming query")),
                ("batch", models.BigIntegerField(verbose_name="micro-batch")),
                ("rows", models.BigIntegerField(db_default=0, verbose_name="rows")),
                (
                    "time",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), verbose_name="time"),
                ),
            ],
            options={
                "verbose_name": "streamed batch",
                "verbose_name_plural": "streamed batches",
                "constraints": [
                    models.UniqueConstraint(fields=("query", "batch"), name="dbtaskqueue_streamledger_batch")
                ],
            },
        ),
        migrations.CreateModel(
            name="PipelineReport",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("kind", models.CharField(max_length=30, verbose_name="job")),
                (
                    "create_time",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), verbose_name="created"),
                ),
                ("since", models.DateTimeField(blank=True, null=True, verbose_name="from")),
                ("until", models.DateTimeField(blank=True, null=True, verbose_name="to")),
                ("summary", models.TextField(blank=True, db_default="", verbose_name="summary")),
                (
                    "data",
                    models.JSONField(
                        blank=True, db_default=models.Value({}, models.JSONField()), verbose_name="figures"
                    ),
                ),
                ("html", models.TextField(blank=True, db_default="", verbose_name="page")),
                ("location", models.TextField(blank=True, db_default="", verbose_name="files")),
            ],
            options={
                "verbose_name": "pipeline report",
                "verbose_name_plural": "pipeline reports",
            },
        ),
    ]
