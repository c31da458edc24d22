"""All tables. On PostgreSQL also their storage parameters, an UNLOGGED table and a history partitioned by month."""

from datetime import UTC, datetime
from typing import Any

from django.db import migrations, models
from django.db.models import Q
from django.db.models.functions import Coalesce, Now
from django.db.models.lookups import Exact, IsNull

from django_dbtaskqueue.db.storage import PartitionByMonth, TuneTaskTable

STATUSES = ["CREATED", "PROCESSING", "COMPLETED", "ERROR", "POISON"]
ENDED = ["COMPLETED", "ERROR", "POISON"]
FAILED = ["ERROR", "POISON"]
READABLE = (datetime(1900, 1, 1, tzinfo=UTC), datetime(9900, 1, 1, tzinfo=UTC))
MISSED = [
    ("skip", "skip them"),
    ("one", "enqueue one task for all of them"),
    ("all", "enqueue one task for each, the newest 100 at most"),
]
ON_PARENT_FAILURE = [
    ("hold", "wait until the parent completes after all"),
    ("cancel", "cancel the task"),
    ("run", "run the task all the same"),
]

Fields = list[tuple[str, "models.Field[Any, Any]"]]


def key() -> Fields:
    """Return the primary key."""
    return [("id", models.BigAutoField(primary_key=True, serialize=False))]


def task_columns() -> Fields:
    """Return the columns that the task tables and the history have in common."""
    return [
        ("queue", models.CharField("queue", max_length=200, db_column="queue_name")),
        (
            "reference",
            models.CharField("reference", max_length=200, null=True, blank=True, db_column="reference_number"),
        ),
        ("status", models.CharField("status", max_length=30, choices=[(s, s) for s in STATUSES], db_default="CREATED")),
        ("attempt", models.IntegerField("attempt", db_default=0)),
        ("reenqueue_attempt", models.IntegerField("reenqueue attempt", db_default=0)),
        ("total_attempt", models.BigIntegerField("total attempt", db_default=0)),
        ("max_attempts", models.IntegerField("max attempts", db_default=5)),
        ("priority", models.SmallIntegerField("priority", db_default=0)),
        ("payload", models.JSONField("payload", null=True, blank=True)),
        ("payload_type", models.CharField("payload type", max_length=200, null=True, blank=True)),
        ("result", models.JSONField("result", null=True, blank=True)),
        ("process_result", models.TextField("process result", null=True, blank=True)),
        ("context", models.JSONField("context", null=True, blank=True)),
        ("group_key", models.CharField("group", max_length=200, null=True, blank=True)),
        ("tag", models.CharField("tag", max_length=200, null=True, blank=True)),
        ("poller_instance", models.CharField("poller", max_length=200, null=True, blank=True)),
        ("create_time", models.DateTimeField("created", db_default=Now())),
        ("next_process_time", models.DateTimeField("next process time", db_default=Now())),
        ("last_update_time", models.DateTimeField("last update", db_default=Now())),
        ("lease_seconds", models.FloatField("lease in seconds", null=True, blank=True)),
        ("expire_time", models.DateTimeField("expires", null=True, blank=True)),
        ("start_time", models.DateTimeField("started", null=True, blank=True)),
        ("finish_time", models.DateTimeField("finished", null=True, blank=True)),
    ]


def task_constraints(table: str) -> list[models.BaseConstraint]:
    """Return what holds for each row of a task table."""
    ready = Q(ready_time__isnull=False, parked_by__isnull=True, final_status__isnull=True) & ~Q(status__in=ENDED)
    ended = Q(ready_time__isnull=True, status__in=ENDED, parked_by__isnull=True)
    ended &= Q(final_status__isnull=False, final_status=models.F("status"))
    parked = Q(ready_time__isnull=True, status="CREATED", parked_by__isnull=False, final_status__isnull=True)
    counters = Q(attempt__gte=0, reenqueue_attempt__gte=0, max_attempts__gte=1)
    counters &= Q(total_attempt__gte=models.F("attempt"), total_attempt__lte=2**62) & Q(reenqueue_attempt__lte=10**9)
    times = {f"{name}__range": READABLE for name in ("create_time", "next_process_time", "ready_time", "expire_time")}
    return [
        models.UniqueConstraint(
            fields=["reference", "queue"], name=f"{table}_reference", opclasses=["varchar_pattern_ops", "varchar_ops"]
        ),
        models.CheckConstraint(condition=Q(status__in=STATUSES), name=f"{table}_status"),
        models.CheckConstraint(condition=ready | ended | parked, name=f"{table}_ready_time"),
        models.CheckConstraint(condition=Q(finish_time__isnull=True) | Q(status__in=ENDED), name=f"{table}_finished"),
        models.CheckConstraint(
            condition=~Q(status="CREATED") | Q(poller_instance__isnull=True), name=f"{table}_unleased"
        ),
        models.CheckConstraint(condition=counters, name=f"{table}_counters"),
        models.CheckConstraint(
            condition=Q(lease_seconds__gt=0, lease_seconds__lte=3_155_760_000), name=f"{table}_lease"
        ),
        models.CheckConstraint(condition=Q(**times), name=f"{table}_times"),
    ]


def task_indexes(table: str) -> list[models.Index]:
    """Return the indexes of a task table. Each is partial, and checkout writes none of them."""
    columns_and_rows: dict[str, tuple[list[str], Q]] = {
        "rdy": (["queue", "priority", "ready_time", "id"], Q(ready_time__isnull=False)),
        "lead": (
            ["queue", "group_key"],
            Q(IsNull(Coalesce("parked_by", "final_status"), True), group_key__isnull=False),
        ),
        "next": (["queue", "group_key", "priority", "id"], Q(Exact(Coalesce("parked_by", models.Value("")), "group"))),
        "park": (["queue", "payload_type"], Q(parked_by__isnull=False)),
        "nohd": (["queue", "payload_type"], Q(parked_by__startswith="no handler")),
        "end": (["queue", "final_status", "id"], Q(final_status__isnull=False)),
        "fail": (["final_status", "id"], Q(final_status__in=FAILED)),
        "fp": (["fingerprint", "id"], Q(final_status__in=FAILED, fingerprint__isnull=False)),
        "told": (["id"], Q(watched=True, final_status__isnull=False)),
        "bat": (["batch", "final_status"], Q(batch__isnull=False)),
    }
    return [
        models.Index(fields=columns, condition=rows, name=f"{table}_{name}")
        for name, (columns, rows) in columns_and_rows.items()
    ]


def task_table(name: str, **options: Any) -> migrations.CreateModel:
    """Return the step that makes a task table."""
    table = f"dbtaskqueue_{name.lower()}"
    return migrations.CreateModel(
        name=name,
        fields=[
            *task_columns(),
            *key(),
            ("ready_time", models.DateTimeField("ready time", null=True, blank=True, db_default=Now())),
            ("parked_by", models.CharField("parked by", max_length=200, null=True, blank=True)),
            ("final_status", models.CharField("final status", max_length=30, null=True, blank=True)),
            ("fingerprint", models.CharField("fingerprint", max_length=40, null=True, blank=True)),
            ("lost_leases", models.IntegerField("leases lost in a row", db_default=0)),
            ("watched", models.BooleanField("watched", null=True, blank=True)),
            ("batch", models.BigIntegerField("batch", null=True, blank=True)),
            ("signals", models.IntegerField("signals", null=True, blank=True)),
        ],
        options={**options, "abstract": False, "indexes": task_indexes(table), "constraints": task_constraints(table)},
    )


def task_named(prefix: str, name: str) -> Fields:
    """Return the columns that name a task."""
    return [
        (f"{prefix}_location", models.CharField(f"{name}'s location", max_length=200)),
        (f"{prefix}_id", models.BigIntegerField(name)),
    ]


def link(to: str, verbose_name: str, **options: Any) -> "models.ForeignKey[Any, Any]":
    """Return a foreign key without a constraint: retention deletes each table by its own times."""
    return models.ForeignKey(
        f"dbtaskqueue.{to}",
        models.DO_NOTHING,
        related_name="changes",
        db_constraint=False,
        verbose_name=verbose_name,
        **options,
    )


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
            default_permissions=("add", "delete", "view"),
            permissions=[
                ("reprocess_task", "Can reprocess tasks (ERROR to CREATED)"),
                ("mark_poison_task", "Can mark tasks as poison (ERROR to POISON)"),
                ("unpoison_task", "Can take poison back (POISON to ERROR)"),
                ("kick_task", "Can kick poison (POISON to CREATED)"),
                ("cancel_task", "Can cancel tasks that wait or run (to POISON)"),
                ("release_task", "Can take tasks from their pollers (PROCESSING to CREATED)"),
                ("housekeep_task", "Can move or delete finished tasks"),
                ("run_now_task", "Can make waiting tasks due now"),
                ("snooze_task", "Can let waiting tasks wait longer"),
                ("change_priority_task", "Can change the priority of waiting tasks"),
                ("move_task", "Can move waiting tasks to another queue"),
                ("edit_payload_task", "Can edit the payload of failed tasks and retry them"),
                ("signal_task", "Can send signals to tasks"),
                ("view_payload", "Can see payloads, results and tracebacks"),
            ],
        ),
        TuneTaskTable("task"),
        task_table(
            "TemporaryTask",
            default_permissions=("view",),
            verbose_name="temporary task",
            verbose_name_plural="temporary tasks",
        ),
        TuneTaskTable("temporarytask", unlogged=True),
        migrations.CreateModel(
            "TaskHistory",
            fields=[
                *task_columns(),
                *key(),
                ("location", models.CharField("location", max_length=200, db_default="dbtaskqueue.task")),
                ("task_id", models.BigIntegerField("task")),
                ("moved_time", models.DateTimeField("moved", db_default=Now())),
            ],
            options={
                "default_permissions": ("view",),
                "verbose_name": "task in history",
                "verbose_name_plural": "history",
            },
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
            "Attempt",
            [
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
                "default_permissions": ("view",),
                "verbose_name": "failed attempt",
                "verbose_name_plural": "failed attempts",
                "indexes": [
                    models.Index(fields=["location", "task_id", "total_attempt"], name="dbtaskqueue_attempt_task"),
                    models.Index(fields=["fingerprint", "id"], name="dbtaskqueue_attempt_fp"),
                ],
            },
        ),
        migrations.CreateModel(
            "Step",
            [
                *key(),
                ("location", models.CharField("location", max_length=200, db_default="dbtaskqueue.task")),
                ("task_id", models.BigIntegerField("task")),
                ("task_time", models.DateTimeField("task created")),
                ("position", models.IntegerField("position", null=True, blank=True)),
                ("name", models.CharField("name", max_length=200)),
                (
                    "kind",
                    models.CharField(
                        "kind",
                        max_length=30,
                        db_default="sent",
                        choices=[
                            ("step", "step"),
                            ("sleep", "sleep"),
                            ("wait", "waits for a signal"),
                            ("signal", "signal"),
                            ("timeout", "no signal in time"),
                            ("sent", "signal"),
                        ],
                    ),
                ),
                ("result", models.JSONField("result", null=True, blank=True)),
                ("actor", models.CharField("actor", max_length=200, db_default="", blank=True)),
                ("until_time", models.DateTimeField("until", null=True, blank=True)),
                ("create_time", models.DateTimeField("stored", db_default=Now())),
            ],
            options={
                "default_permissions": (),
                "indexes": [
                    models.Index(fields=["name", "id"], condition=Q(kind="wait"), name="dbtaskqueue_step_waits")
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=["location", "task_id", "position"], name="dbtaskqueue_step_position"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            "UsedReference",
            [
                *key(),
                ("queue", models.CharField("queue", max_length=300, db_column="queue_name")),
                ("reference", models.CharField("reference", max_length=300, db_column="reference_number")),
                ("digest", models.CharField("hash of the content", max_length=64, blank=True, db_default="")),
                ("create_time", models.DateTimeField("created", db_default=Now())),
                ("expire_time", models.DateTimeField("expires", null=True, blank=True)),
            ],
            options={
                "default_permissions": (),
                "constraints": [
                    models.UniqueConstraint(fields=["queue", "reference"], name="dbtaskqueue_usedreference_unique"),
                    models.CheckConstraint(
                        condition=Q(create_time__range=READABLE, expire_time__range=READABLE),
                        name="dbtaskqueue_usedreference_times",
                    ),
                ],
                "indexes": [
                    models.Index(
                        fields=["expire_time"],
                        condition=Q(expire_time__isnull=False),
                        name="dbtaskqueue_usedref_expires",
                    )
                ],
            },
        ),
        # What waits for what, and batches
        migrations.CreateModel(
            "Dependency",
            [
                *key(),
                *task_named("parent", "parent"),
                *task_named("child", "child"),
                ("name", models.CharField("name", max_length=200, blank=True, db_default="")),
                ("outcome", models.CharField("outcome", max_length=30, null=True, blank=True)),
            ],
            options={
                "default_permissions": (),
                "indexes": [
                    models.Index(fields=["parent_location", "parent_id"], name="dbtaskqueue_dependency_parent"),
                    models.Index(fields=["child_location", "child_id"], name="dbtaskqueue_dependency_child"),
                ],
            },
        ),
        migrations.CreateModel(
            "Hold",
            [
                *key(),
                ("location", models.CharField("location", max_length=200)),
                ("task_id", models.BigIntegerField("task")),
                ("remaining", models.IntegerField("parents to wait for")),
                (
                    "on_parent_failure",
                    models.CharField("when a parent fails", max_length=30, choices=ON_PARENT_FAILURE),
                ),
            ],
            options={
                "default_permissions": (),
                "constraints": [models.UniqueConstraint(fields=["location", "task_id"], name="dbtaskqueue_hold_task")],
            },
        ),
        migrations.CreateModel(
            "Batch",
            [
                *key(),
                ("name", models.CharField("name", max_length=200)),
                ("create_time", models.DateTimeField("created", db_default=Now())),
                ("total", models.IntegerField("tasks", db_default=0)),
                ("queues", models.JSONField("queues", db_default=empty([]))),
                (
                    "callback_location",
                    models.CharField("location of the last task", max_length=200, blank=True, db_default=""),
                ),
                ("callback_id", models.BigIntegerField("last task", null=True, blank=True)),
            ],
            options={
                "verbose_name": "batch",
                "verbose_name_plural": "batches",
                "default_permissions": ("view",),
                "constraints": [
                    models.CheckConstraint(condition=Q(create_time__range=READABLE), name="dbtaskqueue_batch_times")
                ],
            },
        ),
        # Queues, schedules and pollers
        migrations.CreateModel(
            "Queue",
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
                "default_permissions": ("view",),
                "verbose_name": "queue",
                "verbose_name_plural": "queues",
                "permissions": [
                    ("pause_queue", "Can pause and resume queues"),
                    ("purge_queue", "Can delete every task of a queue"),
                    ("change_queue_settings", "Can change settings of queues while they run"),
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=Q(paused_time__range=READABLE, paused_until__range=READABLE),
                        name="dbtaskqueue_queue_times",
                    )
                ],
            },
        ),
        migrations.CreateModel(
            "Limit",
            [
                *key(),
                ("queue", models.CharField("queue", max_length=200, db_column="queue_name")),
                ("group", models.CharField("group", max_length=200, blank=True, db_default="", db_column="group_key")),
                ("leases", models.TextField("leases", blank=True, db_default="")),
                ("stamp", models.CharField("stamp", max_length=32, blank=True, db_default="")),
                ("tokens", models.FloatField("tokens", db_default=0.0)),
                ("check_time", models.DateTimeField("last checkout", db_default=Now())),
                ("idle_seconds", models.FloatField("seconds between the last checkouts", null=True, blank=True)),
                ("full_time", models.DateTimeField("full again", null=True, blank=True)),
            ],
            options={
                "default_permissions": (),
                "constraints": [models.UniqueConstraint(fields=["queue", "group"], name="dbtaskqueue_limit_unique")],
                "indexes": [
                    models.Index(
                        fields=["full_time"], condition=Q(full_time__isnull=False), name="dbtaskqueue_limit_full"
                    )
                ],
            },
        ),
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
                        "source", max_length=30, choices=[("code", "code"), ("person", "person")], db_default="person"
                    ),
                ),
                ("code", models.JSONField("the code says", null=True, blank=True)),
                ("edited", models.JSONField("changed by hand", db_default=empty([]), blank=True)),
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
                        condition=Q(next_time__range=READABLE, last_time__range=READABLE),
                        name="dbtaskqueue_schedule_times",
                    )
                ],
            },
        ),
        migrations.CreateModel(
            "Poller",
            fields=[
                ("instance", models.CharField("instance", max_length=200, primary_key=True, serialize=False)),
                ("host", models.CharField("host", max_length=200, db_default="")),
                ("pid", models.IntegerField("process", db_default=0)),
                ("version", models.CharField("version", max_length=50, db_default="")),
                ("release", models.CharField("release", max_length=100, db_default="")),
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
                "default_permissions": ("view",),
                "verbose_name": "poller",
                "verbose_name_plural": "pollers",
                "permissions": [("control_poller", "Can drain, stop, pause and start pollers")],
            },
        ),
        # Counters: rows are only appended, and old rows are merged
        migrations.CreateModel(
            "MinuteCount",
            [
                *key(),
                ("kind", models.CharField("kind", max_length=30)),
                ("queue", models.CharField("queue", max_length=200, db_column="queue_name")),
                ("name", models.CharField("name", max_length=40, blank=True, db_default="")),
                ("minute", models.DateTimeField("minute", db_default=Now())),
                ("count", models.BigIntegerField("count")),
                ("run_seconds", models.FloatField("seconds of work", db_default=0.0)),
                ("wait_seconds", models.FloatField("seconds waited", db_default=0.0)),
                ("runs", models.JSONField("histogram of run times", db_default=empty({}))),
                ("waits", models.JSONField("histogram of waits", db_default=empty({}))),
            ],
            options={
                "default_permissions": (),
                "indexes": [
                    models.Index(fields=["kind", "minute", "queue"], name="dbtaskqueue_count_minute"),
                    models.Index(fields=["queue"], condition=Q(kind="call"), name="dbtaskqueue_count_calls"),
                ],
            },
        ),
        migrations.CreateModel(
            "FailureGroup",
            fields=[
                ("fingerprint", models.CharField("fingerprint", max_length=40, primary_key=True, serialize=False)),
                ("queue", models.CharField("queue", max_length=200, db_column="queue_name")),
                ("error_type", models.CharField("exception", max_length=200, db_default="")),
                ("frame", models.CharField("place in the code", max_length=300, db_default="")),
                ("message", models.CharField("message", max_length=500, db_default="")),
                ("newest", models.CharField("newest message", max_length=500, db_default="")),
                ("release", models.CharField("release", max_length=100, db_default="")),
                ("first_seen", models.DateTimeField("first seen")),
                ("last_seen", models.DateTimeField("last seen")),
            ],
            options={
                "default_permissions": ("view",),
                "verbose_name": "failure group",
                "verbose_name_plural": "failure groups",
                "indexes": [models.Index(fields=["last_seen"], name="dbtaskqueue_failure_seen")],
            },
        ),
        # Operators
        migrations.CreateModel(
            "BulkOperation",
            [
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
                "default_permissions": ("view",),
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
            "AuditEntry",
            [
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
                "default_permissions": ("view",),
                "verbose_name": "audit entry",
                "verbose_name_plural": "audit",
                "indexes": [
                    models.Index(fields=["queue", "id"], name="dbtaskqueue_audit_queue"),
                    models.Index(fields=["actor", "id"], name="dbtaskqueue_audit_actor"),
                ],
            },
        ),
        migrations.CreateModel(
            "TaskChange",
            [
                *key(),
                ("time", models.DateTimeField("time", db_default=Now())),
                ("audit", link("auditentry", "audit entry")),
                ("operation", link("bulkoperation", "bulk operation", null=True, blank=True)),
                ("location", models.CharField("table", max_length=200, db_default="dbtaskqueue.task")),
                ("first_task_id", models.BigIntegerField("first task")),
                ("last_task_id", models.BigIntegerField("last task")),
                ("task_ids", models.JSONField("task ids")),
                ("skip_reason", models.CharField("reason", max_length=500, blank=True, db_default="")),
                ("before", models.JSONField("before", null=True, blank=True)),
                ("after_time", models.DateTimeField("last update by the action", null=True, blank=True)),
                ("difference", models.JSONField("difference", null=True, blank=True)),
            ],
            options={
                "default_permissions": (),
                "indexes": [
                    models.Index(
                        fields=["location", "last_task_id"], condition=Q(skip_reason=""), name="dbtaskqueue_change_task"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            "SavedSearch",
            [
                *key(),
                ("owner", models.CharField("owner", max_length=200)),
                ("name", models.CharField("name", max_length=100)),
                ("query", models.TextField("search")),
                ("shared", models.BooleanField("shared", db_default=False)),
                ("create_time", models.DateTimeField("created", db_default=Now())),
            ],
            options={
                "default_permissions": (),
                "constraints": [models.UniqueConstraint(fields=["owner", "name"], name="dbtaskqueue_savedsearch_name")],
            },
        ),
        migrations.CreateModel(
            "ApiToken",
            [
                *key(),
                ("user", models.CharField("user", max_length=200)),
                ("digest", models.CharField("hash", max_length=64, unique=True)),
                ("note", models.CharField("note", blank=True, db_default="", max_length=200)),
                (
                    "scope",
                    models.CharField(
                        "scope", choices=[("read", "read"), ("operate", "operate")], db_default="operate", max_length=30
                    ),
                ),
                ("queues", models.JSONField("queues", blank=True, db_default=empty([]))),
                ("create_time", models.DateTimeField("created", db_default=Now())),
                ("expire_time", models.DateTimeField("expires", blank=True, null=True)),
                ("last_used_time", models.DateTimeField("last used", blank=True, null=True)),
                ("actor_id", models.CharField("actor id", max_length=200, db_default="")),
            ],
            options={
                "default_permissions": (),
                "constraints": [
                    models.CheckConstraint(
                        condition=Q(scope__in=["read", "operate"]), name="dbtaskqueue_apitoken_scope"
                    )
                ],
            },
        ),
        # The pipeline
        migrations.CreateModel(
            "ArchiveBatch",
            [
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
                        choices=[(s, s) for s in ("open", "closed", "abandoned")],
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
                "default_permissions": (),
                "constraints": [
                    models.CheckConstraint(
                        condition=Q(state__in=["open", "closed", "abandoned"]), name="dbtaskqueue_archivebatch_state"
                    ),
                    models.UniqueConstraint(
                        fields=["location", "source"],
                        condition=Q(state="open"),
                        name="dbtaskqueue_archivebatch_one_open",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            "PipelineReport",
            [
                *key(),
                ("kind", models.CharField("job", max_length=30)),
                ("create_time", models.DateTimeField("created", db_default=Now())),
                ("since", models.DateTimeField("from", null=True, blank=True)),
                ("until", models.DateTimeField("to", null=True, blank=True)),
                ("summary", models.TextField("summary", db_default="", blank=True)),
                ("data", models.JSONField("figures", db_default=empty({}), blank=True)),
                ("location", models.TextField("files", db_default="", blank=True)),
            ],
            options={
                "default_permissions": ("view",),
                "verbose_name": "pipeline report",
                "verbose_name_plural": "pipeline reports",
            },
        ),
        migrations.CreateModel(
            "StreamPosition",
            [
                *key(),
                ("location", models.CharField("location", max_length=200)),
                ("name", models.CharField("stream", max_length=200)),
                ("position", models.BigIntegerField("position", null=True, blank=True)),
                ("read_time", models.DateTimeField("last read", db_default=Now())),
            ],
            options={
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
            options={"default_permissions": ()},
        ),
        # Pages of the admin
        page("Doctor", "queue", "doctor", "doctor"),
        page("Overview", "queue", "overview", "overview"),
        page("PoisonTask", "task", "poison task", "poison"),
    ]
