"""Which tasks wait for others, and batches of tasks.

A poller of the release before works on: the columns may be NULL, and no statement of it names them. It tells nothing
about the ends of tasks that it settles; a poller of this release finds them by an index within seconds.
"""

from typing import Any

from django.db import migrations, models
from django.db.models import Q
from django.db.models.functions import Now

from django_dbtaskqueue.migrations._concurrently import AddIndexConcurrently
from django_dbtaskqueue.migrations._task_tables import READABLE

TABLES = ("task", "temporarytask")
ON_PARENT_FAILURE = [
    ("hold", "wait until the parent completes after all"),
    ("cancel", "cancel the task"),
    ("run", "run the task all the same"),
]


def key() -> tuple[str, "models.Field[Any, Any]"]:
    """Return the primary key."""
    return ("id", models.BigAutoField(primary_key=True, serialize=False))


def task(prefix: str, name: str) -> list[tuple[str, "models.Field[Any, Any]"]]:
    """Return the columns that name a task."""
    return [
        (f"{prefix}_location", models.CharField(f"{name}'s location", max_length=200)),
        (f"{prefix}_id", models.BigIntegerField(name)),
    ]


class Migration(migrations.Migration):
    """Add columns that may be NULL, which rewrites no row, indexes of their few values, and new tables."""

    atomic = False
    dependencies = [("dbtaskqueue", "0008_queue_limits")]

    operations = [
        *(
            migrations.AddField(table, "watched", models.BooleanField("watched", null=True, blank=True))
            for table in TABLES
        ),
        *(
            migrations.AddField(table, "batch", models.BigIntegerField("batch", null=True, blank=True))
            for table in TABLES
        ),
        *(
            AddIndexConcurrently(
                table,
                models.Index(
                    fields=["id"],
                    condition=Q(final_status__isnull=False, watched=True),
                    name=f"dbtaskqueue_{table}_told",
                ),
            )
            for table in TABLES
        ),
        *(
            AddIndexConcurrently(
                table,
                models.Index(
                    fields=["batch", "final_status"],
                    condition=Q(batch__isnull=False),
                    name=f"dbtaskqueue_{table}_bat",
                ),
            )
            for table in TABLES
        ),
        migrations.CreateModel(
            "Dependency",
            [
                key(),
                *task("parent", "parent"),
                *task("child", "child"),
                ("name", models.CharField("name", max_length=200, blank=True, db_default="")),
                ("outcome", models.CharField("outcome", max_length=30, null=True, blank=True)),
            ],
            options={
                "verbose_name": "dependency",
                "verbose_name_plural": "dependencies",
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
                key(),
                ("location", models.CharField("location", max_length=200)),
                ("task_id", models.BigIntegerField("task")),
                ("remaining", models.IntegerField("parents to wait for")),
                (
                    "on_parent_failure",
                    models.CharField("when a parent fails", max_length=30, choices=ON_PARENT_FAILURE),
                ),
            ],
            options={
                "verbose_name": "held task",
                "verbose_name_plural": "held tasks",
                "default_permissions": (),
                "constraints": [models.UniqueConstraint(fields=["location", "task_id"], name="dbtaskqueue_hold_task")],
            },
        ),
        migrations.CreateModel(
            "Batch",
            [
                key(),
                ("name", models.CharField("name", max_length=200)),
                ("create_time", models.DateTimeField("created", db_default=Now())),
                ("total", models.IntegerField("tasks", db_default=0)),
                ("queues", models.JSONField("queues", db_default=models.Value([], models.JSONField()))),
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
                    models.CheckConstraint(
                        condition=models.Q(create_time__range=READABLE), name="dbtaskqueue_batch_times"
                    )
                ],
            },
        ),
    ]
