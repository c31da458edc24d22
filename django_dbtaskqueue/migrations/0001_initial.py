"""All tables. On PostgreSQL also their storage parameters, an UNLOGGED table and a history partitioned by month."""

from typing import Any

from django.db import migrations, models
from django.db.models import Q
from django.db.models.functions import Now

from django_dbtaskqueue.db.partitions import PartitionByMonth
from django_dbtaskqueue.db.storage import TuneTaskTable
from django_dbtaskqueue.migrations._task_tables import READABLE, key, task_columns, task_table


def empty(value: Any) -> models.Value:
    """Return an empty JSON value as a column's default."""
    return models.Value(value, models.JSONField())


def page(name: str, model: str, verbose_name: str, verbose_name_plural: str) -> migrations.CreateModel:
    """Return the proxy model that stands for a page of the admin."""
    names = {"verbose_name": verbose_name, "verbose_name_plural": verbose_name_plural}
    return migrations.CreateModel(
        name=name,
        fields=[],
        options={**names, "proxy": True, "default_permissions": (), "indexes": [], "constraints": []},
        bases=(f"dbtaskqueue.{model}",),
    )


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        # Tasks
        task_table(
            "Task",
            verbose_name="task",
            verbose_name_plural="tasks",
            permissions=[
                ("reprocess_task", "Can reprocess tasks (ERROR to CREATED)"),
                ("mark_poison_task", "Can mark tasks as poison (ERROR to POISON)"),
                ("unpoison_task", "Can take poison back (POISON to ERROR)"),
                ("kick_task", "Can kick poison (POISON to CREATED)"),
                ("cancel_task", "Can cancel tasks that wait (CREATED to POISON)"),
                ("release_task", "Can take tasks from their pollers (PROCESSING to CREATED)"),
                ("housekeep_task", "Can move or delete finished tasks"),
                ("view_payload", "Can see payloads, results and tracebacks"),
            ],
        ),
        TuneTaskTable("task"),
        task_table("TemporaryTask", verbose_name="temporary task", verbose_name_plural="temporary tasks"),
        TuneTaskTable("temporarytask", unlogged=True),
        migrations.CreateModel(
            name="TaskHistory",
            fields=[
                *task_columns(),
                *key(),
                ("location", models.CharField("location", max_length=200, db_default="dbtaskqueue.task")),
                ("task_id", models.BigIntegerField("task")),
                ("moved_time", models.DateTimeField("moved", db_default=Now())),
            ],
            options={"verbose_name": "task in history", "verbose_name_plural": "history"},
        ),
        # The indexes come last. ``CreateModel`` would make them at the end of the migration, on the partitioned table,
        # where ``PartitionByMonth`` has already made them.
        PartitionByMonth("taskhistory", "moved_time"),
        migrations.AddIndex(
            "taskhistory", models.Index(fields=["location", "task_id"], name="dbtaskqueue_history_task")
        ),
        migrations.AddIndex(
            "taskhistory", models.Index(fields=["queue", "finish_time"], name="dbtaskqueue_history_finished")
        ),
        migrations.CreateModel(
            name="Attempt",
            fields=[
                *key(),
                ("location", models.CharField("location", max_length=200, db_default="dbtaskqueue.task")),
                ("task_id", models.BigIntegerField("task")),
                ("queue", models.CharField("queue", max_length=200, db_column="queue_name")),
                ("attempt", models.IntegerField("attempt")),
                ("total_attempt", models.BigIntegerField("total attempt")),
                ("poller_instance", models.CharField("poller", max_length=200, null=True, blank=True)),
                ("start_time", models.DateTimeField("started", null=True, blank=True)),
                ("finish_time", models.DateTimeField("failed", db_default=Now())),
                ("error_type", models.CharField("exception", max_length=200, db_default="")),
                ("message", models.TextField("message", db_default="")),
                ("traceback", models.TextField("traceback", db_default="")),
                ("fingerprint", models.CharField("fingerprint", max_length=40, db_default="")),
            ],
            options={
                "verbose_name": "failed attempt",
                "verbose_name_plural": "failed attempts",
                "indexes": [
                    models.Index(fields=["location", "task_id", "total_attempt"], name="dbtaskqueue_attempt_task"),
                    models.Index(fields=["fingerprint", "id"], name="dbtaskqueue_attempt_fp"),
                ],
            },
        ),
        # Queues and pollers
        migrations.CreateModel(
            name="Queue",
            fields=[
                ("name", models.CharField("name", max_length=200, primary_key=True, serialize=False)),
                ("overrides", models.JSONField("runtime overrides", db_default=empty({}), blank=True)),
                ("create_time", models.DateTimeField("created", db_default=Now())),
                ("paused_time", models.DateTimeField("paused since", null=True, blank=True)),
                ("paused_until", models.DateTimeField("paused until", null=True, blank=True)),
                ("paused_by", models.CharField("paused by", max_length=200, blank=True, db_default="")),
                ("paused_reason", models.CharField("reason", max_length=500, blank=True, db_default="")),
            ],
            options={
                "verbose_name": "queue",
                "verbose_name_plural": "queues",
                "permissions": [
                    ("pause_queue", "Can pause and resume queues"),
                    ("purge_queue", "Can delete every task of a queue"),
                    ("change_queue_settings", "Can change settings of queues while they run"),
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(paused_time__range=READABLE, paused_until__range=READABLE),
                        name="dbtaskqueue_queue_times",
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="Poller",
            fields=[
                ("instance", models.CharField("instance", max_length=200, primary_key=True, serialize=False)),
                ("host", models.CharField("host", max_length=200, db_default="")),
                ("pid", models.IntegerField("process", db_default=0)),
                ("version", models.CharField("version", max_length=50, db_default="")),
                ("queues", models.JSONField("queues", db_default=empty([]))),
                ("state", models.CharField("state", max_length=30, db_default="INIT")),
                ("start_time", models.DateTimeField("started", db_default=Now())),
                ("heartbeat_time", models.DateTimeField("heartbeat", db_default=Now())),
                ("slots", models.IntegerField("slots", db_default=0)),
                ("held", models.IntegerField("leases held", db_default=0)),
                ("finished", models.BigIntegerField("tasks finished", db_default=0)),
                ("failed", models.BigIntegerField("attempts failed", db_default=0)),
                ("running", models.JSONField("running", db_default=empty([]))),
                ("applied_settings", models.TextField("applied settings", db_default="")),
                ("requested_command", models.CharField("requested command", max_length=30, blank=True, db_default="")),
            ],
            options={
                "verbose_name": "poller",
                "verbose_name_plural": "pollers",
                "permissions": [("control_poller", "Can drain, stop, pause and start pollers")],
            },
        ),
        # Counters: rows are only appended, and old rows are merged
        migrations.CreateModel(
            name="DeletedTasks",
            fields=[
                *key(),
                ("queue", models.CharField("queue", max_length=200, db_column="queue_name")),
                ("count", models.BigIntegerField("count")),
                ("time", models.DateTimeField("time", db_default=Now())),
            ],
            options={"verbose_name": "deleted tasks", "verbose_name_plural": "deleted tasks"},
        ),
        migrations.CreateModel(
            name="UsageCount",
            fields=[
                *key(),
                ("queue", models.CharField("queue", max_length=200, db_column="queue_name")),
                ("minute", models.DateTimeField("minute")),
                ("call", models.CharField("call", max_length=30)),
                ("count", models.BigIntegerField("count")),
            ],
            options={
                "verbose_name": "calls in a minute",
                "verbose_name_plural": "calls by the minute",
                "indexes": [models.Index(fields=["queue", "minute"], name="dbtaskqueue_usagecount_minute")],
            },
        ),
        migrations.CreateModel(
            name="Metric",
            fields=[
                *key(),
                ("queue", models.CharField("queue", max_length=200, db_column="queue_name")),
                ("minute", models.DateTimeField("minute")),
                ("outcome", models.CharField("outcome", max_length=30)),
                ("count", models.BigIntegerField("count")),
                ("run_seconds", models.FloatField("seconds of work", db_default=0.0)),
                ("wait_seconds", models.FloatField("seconds waited", db_default=0.0)),
                ("runs", models.JSONField("histogram of run times", db_default=empty({}))),
                ("waits", models.JSONField("histogram of waits", db_default=empty({}))),
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
                ("fingerprint", models.CharField("fingerprint", max_length=40, primary_key=True, serialize=False)),
                ("queue", models.CharField("queue", max_length=200, db_column="queue_name")),
                ("error_type", models.CharField("exception", max_length=200, db_default="")),
                ("frame", models.CharField("place in the code", max_length=300, db_default="")),
                ("message", models.CharField("message", max_length=500, db_default="")),
                ("first_seen", models.DateTimeField("first seen")),
                ("last_seen", models.DateTimeField("last seen")),
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
                *key(),
                ("fingerprint", models.CharField("fingerprint", max_length=40)),
                ("minute", models.DateTimeField("minute")),
                ("count", models.BigIntegerField("count")),
            ],
            options={
                "verbose_name": "failures in a minute",
                "verbose_name_plural": "failures by the minute",
                "indexes": [models.Index(fields=["minute", "fingerprint"], name="dbtaskqueue_failure_minute")],
            },
        ),
        # Operators
        migrations.CreateModel(
            name="BulkOperation",
            fields=[
                *key(),
                ("verb", models.CharField("verb", max_length=50)),
                ("query", models.TextField("search")),
                ("location", models.CharField("table", max_length=200, db_default="dbtaskqueue.task")),
                ("options", models.JSONField("options", db_default=empty({}), blank=True)),
                ("max_tasks", models.BigIntegerField("max tasks", null=True, blank=True)),
                ("reason", models.CharField("reason", max_length=500, blank=True, db_default="")),
                ("actor", models.CharField("actor", max_length=200, db_default="")),
                ("actor_id", models.CharField("actor id", max_length=200, blank=True, db_default="")),
                ("source", models.CharField("source", max_length=30, blank=True, db_default="")),
                (
                    "state",
                    models.CharField(
                        "state",
                        max_length=30,
                        choices=[
                            ("WAITING", "waiting"),
                            ("RUNNING", "running"),
                            ("FINISHED", "finished"),
                            ("CANCELLED", "cancelled"),
                            ("FAILED", "failed"),
                        ],
                        db_default="WAITING",
                    ),
                ),
                ("note", models.TextField("note", blank=True, db_default="")),
                ("cursor", models.BigIntegerField("done up to id", db_default=0)),
                ("first_id", models.BigIntegerField("first id", db_default=0)),
                ("last_id", models.BigIntegerField("last id", db_default=0)),
                ("window_size", models.IntegerField("window size", db_default=20_000)),
                ("estimate", models.BigIntegerField("expected", null=True, blank=True)),
                ("estimate_more", models.BooleanField("or more", db_default=False)),
                ("changed", models.BigIntegerField("changed", db_default=0)),
                ("skipped", models.BigIntegerField("skipped", db_default=0)),
                ("skips", models.JSONField("skipped, by reason", db_default=empty({}), blank=True)),
                ("create_time", models.DateTimeField("ordered", db_default=Now())),
                ("start_time", models.DateTimeField("started", null=True, blank=True)),
                ("update_time", models.DateTimeField("last step", db_default=Now())),
                ("finish_time", models.DateTimeField("ended", null=True, blank=True)),
            ],
            options={
                "verbose_name": "bulk operation",
                "verbose_name_plural": "bulk operations",
                "indexes": [
                    models.Index(
                        fields=["update_time", "id"],
                        condition=Q(state__in=("WAITING", "RUNNING")),
                        name="dbtaskqueue_bulk_unfinished",
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="BulkSkip",
            fields=[
                *key(),
                (
                    "operation",
                    models.ForeignKey(
                        "dbtaskqueue.bulkoperation",
                        models.CASCADE,
                        related_name="skipped_tasks",
                        verbose_name="bulk operation",
                    ),
                ),
                ("reason", models.CharField("reason", max_length=500)),
                ("count", models.IntegerField("tasks")),
                ("task_ids", models.JSONField("task ids")),
            ],
            options={"verbose_name": "skipped tasks", "verbose_name_plural": "skipped tasks"},
        ),
        migrations.CreateModel(
            name="AuditEntry",
            fields=[
                *key(),
                ("time", models.DateTimeField("time", db_default=Now())),
                ("actor", models.CharField("actor", max_length=200)),
                ("actor_id", models.CharField("actor id", max_length=200, blank=True, db_default="")),
                ("source", models.CharField("source", max_length=30, db_default="")),
                ("verb", models.CharField("verb", max_length=50)),
                ("queue", models.CharField("queue", max_length=200, blank=True, db_default="")),
                ("query", models.TextField("search", blank=True, db_default="")),
                ("reason", models.CharField("reason", max_length=500, blank=True, db_default="")),
                ("changed", models.BigIntegerField("changed", db_default=0)),
                ("skipped", models.BigIntegerField("skipped", db_default=0)),
                ("details", models.JSONField("details", db_default=empty({}), blank=True)),
                (
                    "operation",
                    models.ForeignKey(
                        "dbtaskqueue.bulkoperation",
                        models.SET_NULL,
                        null=True,
                        blank=True,
                        related_name="audit",
                        verbose_name="bulk operation",
                    ),
                ),
            ],
            options={
                "verbose_name": "audit entry",
                "verbose_name_plural": "audit",
                "indexes": [
                    models.Index(fields=["queue", "id"], name="dbtaskqueue_audit_queue"),
                    models.Index(fields=["actor", "id"], name="dbtaskqueue_audit_actor"),
                ],
            },
        ),
        migrations.CreateModel(
            name="SavedSearch",
            fields=[
                *key(),
                ("owner", models.CharField("owner", max_length=200)),
                ("name", models.CharField("name", max_length=100)),
                ("query", models.TextField("search")),
                ("shared", models.BooleanField("shared", db_default=False)),
                ("create_time", models.DateTimeField("created", db_default=Now())),
            ],
            options={
                "verbose_name": "saved search",
                "verbose_name_plural": "saved searches",
                "constraints": [models.UniqueConstraint(fields=["owner", "name"], name="dbtaskqueue_savedsearch_name")],
            },
        ),
        # The pipeline
        migrations.CreateModel(
            name="ArchiveBatch",
            fields=[
                *key(),
                ("token", models.CharField("token", max_length=32, unique=True)),
                ("location", models.CharField("location", max_length=200)),
                ("source", models.CharField("table", max_length=30)),
                ("lake", models.TextField("lake")),
                (
                    "state",
                    models.CharField(
                        "state",
                        max_length=30,
                        choices=[(s, s) for s in ("open", "deleted", "closed", "abandoned")],
                        db_default="open",
                    ),
                ),
                ("first_id", models.BigIntegerField("first id")),
                ("last_id", models.BigIntegerField("last id")),
                ("cutoff", models.DateTimeField("finished before")),
                ("statuses", models.JSONField("statuses", db_default=empty([]))),
                ("queues", models.JSONField("queues", db_default=empty([]), blank=True)),
                ("tasks", models.BigIntegerField("tasks archived", db_default=0)),
                ("attempts", models.BigIntegerField("failed attempts archived", db_default=0)),
                ("withdrawn", models.JSONField("withdrawn", db_default=empty([]), blank=True)),
                ("size", models.BigIntegerField("bytes", db_default=0)),
                ("note", models.TextField("note", blank=True, db_default="")),
                ("create_time", models.DateTimeField("created", db_default=Now())),
                ("close_time", models.DateTimeField("closed at", null=True, blank=True)),
            ],
            options={
                "verbose_name": "archive batch",
                "verbose_name_plural": "archive batches",
                "constraints": [
                    models.CheckConstraint(
                        condition=Q(state__in=["open", "deleted", "closed", "abandoned"]),
                        name="dbtaskqueue_archivebatch_state",
                    ),
                    models.UniqueConstraint(
                        fields=["location", "source"],
                        condition=Q(state__in=["open", "deleted"]),
                        name="dbtaskqueue_archivebatch_one_open",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="StreamLedger",
            fields=[
                *key(),
                ("query", models.CharField("streaming query", max_length=200)),
                ("batch", models.BigIntegerField("micro-batch")),
                ("rows", models.BigIntegerField("rows", db_default=0)),
                ("time", models.DateTimeField("time", db_default=Now())),
            ],
            options={
                "verbose_name": "streamed batch",
                "verbose_name_plural": "streamed batches",
                "constraints": [
                    models.UniqueConstraint(fields=["query", "batch"], name="dbtaskqueue_streamledger_batch")
                ],
            },
        ),
        migrations.CreateModel(
            name="PipelineReport",
            fields=[
                *key(),
                ("kind", models.CharField("job", max_length=30)),
                ("create_time", models.DateTimeField("created", db_default=Now())),
                ("since", models.DateTimeField("from", null=True, blank=True)),
                ("until", models.DateTimeField("to", null=True, blank=True)),
                ("summary", models.TextField("summary", db_default="", blank=True)),
                ("data", models.JSONField("figures", db_default=empty({}), blank=True)),
                ("location", models.TextField("files", db_default="", blank=True)),
            ],
            options={"verbose_name": "pipeline report", "verbose_name_plural": "pipeline reports"},
        ),
        # Pages of the admin
        page("Doctor", "queue", "doctor", "doctor"),
        page("Overview", "queue", "overview", "overview"),
        page("PoisonTask", "task", "poison task", "poison"),
    ]
