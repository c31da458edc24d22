"""The operator's tables: what was done, what is being done, and the permission of each verb."""

import django.db.models.deletion
import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("dbtaskqueue", "0003_ended")]

    operations = [
        migrations.CreateModel(
            name="AuditEntry",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                (
                    "time",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), verbose_name="time"),
                ),
                ("actor", models.CharField(max_length=200, verbose_name="who")),
                ("user_key", models.CharField(blank=True, db_default="", max_length=200, verbose_name="user's key")),
                ("way", models.CharField(db_default="", max_length=30, verbose_name="by way of")),
                ("verb", models.CharField(max_length=50, verbose_name="verb")),
                ("queue", models.CharField(blank=True, db_default="", max_length=200, verbose_name="queue")),
                ("query", models.TextField(blank=True, db_default="", verbose_name="search")),
                ("reason", models.CharField(blank=True, db_default="", max_length=500, verbose_name="reason")),
                ("changed", models.BigIntegerField(db_default=0, verbose_name="changed")),
                ("skipped", models.BigIntegerField(db_default=0, verbose_name="skipped")),
                (
                    "details",
                    models.JSONField(
                        blank=True, db_default=models.Value({}, models.JSONField()), verbose_name="details"
                    ),
                ),
            ],
            options={"verbose_name": "audit entry", "verbose_name_plural": "audit"},
        ),
        migrations.CreateModel(
            name="BulkOperation",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("verb", models.CharField(max_length=50, verbose_name="verb")),
                ("query", models.TextField(verbose_name="search")),
                ("location", models.CharField(db_default="dbtaskqueue.task", max_length=200, verbose_name="table")),
                (
                    "options",
                    models.JSONField(
                        blank=True, db_default=models.Value({}, models.JSONField()), verbose_name="options"
                    ),
                ),
                ("most", models.BigIntegerField(blank=True, null=True, verbose_name="at most")),
                ("reason", models.CharField(blank=True, db_default="", max_length=500, verbose_name="reason")),
                ("actor", models.CharField(db_default="", max_length=200, verbose_name="who")),
                ("user_key", models.CharField(blank=True, db_default="", max_length=200, verbose_name="user's key")),
                ("way", models.CharField(blank=True, db_default="", max_length=30, verbose_name="by way of")),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("WAITING", "waiting"),
                            ("RUNNING", "running"),
                            ("FINISHED", "finished"),
                            ("CANCELLED", "cancelled"),
                            ("FAILED", "failed"),
                        ],
                        db_default="WAITING",
                        max_length=30,
                        verbose_name="state",
                    ),
                ),
                ("note", models.TextField(blank=True, db_default="", verbose_name="note")),
                ("cursor", models.BigIntegerField(db_default=0, verbose_name="done up to id")),
                ("first", models.BigIntegerField(db_default=0, verbose_name="first id")),
                ("top", models.BigIntegerField(db_default=0, verbose_name="last id")),
                ("window", models.IntegerField(db_default=20000, verbose_name="ids in a step")),
                ("estimate", models.BigIntegerField(blank=True, null=True, verbose_name="expected")),
                ("estimate_more", models.BooleanField(db_default=False, verbose_name="or more")),
                ("changed", models.BigIntegerField(db_default=0, verbose_name="changed")),
                ("skipped", models.BigIntegerField(db_default=0, verbose_name="skipped")),
                (
                    "skips",
                    models.JSONField(
                        blank=True, db_default=models.Value({}, models.JSONField()), verbose_name="skipped, by reason"
                    ),
                ),
                (
                    "create_time",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), verbose_name="ordered"),
                ),
                ("start_time", models.DateTimeField(blank=True, null=True, verbose_name="started")),
                (
                    "update_time",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(), verbose_name="last step"
                    ),
                ),
                ("finish_time", models.DateTimeField(blank=True, null=True, verbose_name="ended")),
            ],
            options={"verbose_name": "bulk operation", "verbose_name_plural": "bulk operations"},
        ),
        migrations.CreateModel(
            name="BulkSkip",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("reason", models.CharField(max_length=500, verbose_name="reason")),
                ("count", models.IntegerField(verbose_name="tasks")),
                ("task_ids", models.JSONField(verbose_name="their ids")),
            ],
            options={"verbose_name": "skipped tasks", "verbose_name_plural": "skipped tasks"},
        ),
        migrations.CreateModel(
            name="SavedSearch",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("owner", models.CharField(max_length=200, verbose_name="owner")),
                ("name", models.CharField(max_length=100, verbose_name="name")),
                ("query", models.TextField(verbose_name="search")),
                ("shared", models.BooleanField(db_default=False, verbose_name="shared")),
                (
                    "create_time",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), verbose_name="created"),
                ),
            ],
            options={"verbose_name": "saved search", "verbose_name_plural": "saved searches"},
        ),
        migrations.AlterModelOptions(
            name="poller",
            options={
                "permissions": [("control_poller", "Can drain, stop, pause and start pollers")],
                "verbose_name": "poller",
                "verbose_name_plural": "pollers",
            },
        ),
        migrations.AlterModelOptions(
            name="queue",
            options={
                "permissions": [
                    ("pause_queue", "Can pause and resume queues"),
                    ("purge_queue", "Can delete every task of a queue"),
                    ("change_queue_settings", "Can change settings of queues while they run"),
                ],
                "verbose_name": "queue",
                "verbose_name_plural": "queues",
            },
        ),
        migrations.AlterModelOptions(
            name="task",
            options={
                "permissions": [
                    ("reprocess_task", "Can reprocess tasks (ERROR to CREATED)"),
                    ("mark_poison_task", "Can mark tasks as poison (ERROR to POISON)"),
                    ("unpoison_task", "Can take poison back (POISON to ERROR)"),
                    ("kick_task", "Can kick poison back in line (POISON to CREATED)"),
                    ("cancel_task", "Can cancel tasks that wait (CREATED to POISON)"),
                    ("release_task", "Can take tasks from their pollers (PROCESSING to CREATED)"),
                    ("housekeep_task", "Can move or delete finished tasks"),
                    ("view_payload", "Can see payloads, results and tracebacks"),
                ],
                "verbose_name": "task",
                "verbose_name_plural": "tasks",
            },
        ),
        migrations.AddIndex(
            model_name="bulkoperation",
            index=models.Index(
                condition=models.Q(("state__in", ("WAITING", "RUNNING"))),
                fields=["update_time", "id"],
                name="dbtaskqueue_bulk_unfinished",
            ),
        ),
        migrations.AddField(
            model_name="auditentry",
            name="operation",
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.SET_NULL,
                related_name="audit",
                to="dbtaskqueue.bulkoperation",
                verbose_name="bulk operation",
            ),
        ),
        migrations.AddField(
            model_name="bulkskip",
            name="operation",
            field=models.ForeignKey(
                on_delete=django.db.models.deletion.CASCADE,
                related_name="skipped_tasks",
                to="dbtaskqueue.bulkoperation",
                verbose_name="bulk operation",
            ),
        ),
        migrations.AddConstraint(
            model_name="savedsearch",
            constraint=models.UniqueConstraint(fields=("owner", "name"), name="dbtaskqueue_savedsearch_name"),
        ),
        migrations.AddIndex(
            model_name="auditentry", index=models.Index(fields=["queue", "id"], name="dbtaskqueue_audit_queue")
        ),
        migrations.AddIndex(
            model_name="auditentry", index=models.Index(fields=["actor", "id"], name="dbtaskqueue_audit_actor")
        ),
        migrations.CreateModel(
            name="Doctor",
            fields=[],
            options={
                "verbose_name": "doctor",
                "verbose_name_plural": "doctor",
                "proxy": True,
                "default_permissions": (),
                "indexes": [],
                "constraints": [],
            },
            bases=("dbtaskqueue.queue",),
        ),
        migrations.CreateModel(
            name="Overview",
            fields=[],
            options={
                "verbose_name": "overview",
                "verbose_name_plural": "overview",
                "proxy": True,
                "default_permissions": (),
                "indexes": [],
                "constraints": [],
            },
            bases=("dbtaskqueue.queue",),
        ),
        migrations.CreateModel(
            name="PoisonTask",
            fields=[],
            options={
                "verbose_name": "poison task",
                "verbose_name_plural": "poison",
                "proxy": True,
                "default_permissions": (),
                "indexes": [],
                "constraints": [],
            },
            bases=("dbtaskqueue.task",),
        ),
        migrations.AddField(
            model_name="poller",
            name="wanted",
            field=models.CharField(blank=True, db_default="", max_length=30, verbose_name="told to"),
        ),
        migrations.RemoveConstraint(model_name="task", name="dbtaskqueue_task_reference"),
        migrations.RemoveConstraint(model_name="temporarytask", name="dbtaskqueue_temporarytask_reference"),
        migrations.AddConstraint(
            model_name="task",
            constraint=models.UniqueConstraint(
                fields=("reference", "queue"),
                name="dbtaskqueue_task_reference",
                opclasses=["varchar_pattern_ops", "varchar_ops"],
            ),
        ),
        migrations.AddConstraint(
            model_name="temporarytask",
            constraint=models.UniqueConstraint(
                fields=("reference", "queue"),
                name="dbtaskqueue_temporarytask_reference",
                opclasses=["varchar_pattern_ops", "varchar_ops"],
            ),
        ),
    ]
