"""A table of the tasks that operators' actions changed, and permissions of verbs. No existing table changes."""

from typing import Any

from django.db import migrations, models
from django.db.models.functions import Now

from django_dbtaskqueue.migrations._task_tables import key


def link(to: str, verbose_name: str, **options: Any) -> "models.ForeignKey[Any, Any]":
    """Return a foreign key without a constraint: pollers of an earlier state delete the rows it points to."""
    return models.ForeignKey(
        f"dbtaskqueue.{to}",
        models.DO_NOTHING,
        related_name="changes",
        db_constraint=False,
        verbose_name=verbose_name,
        **options,
    )


class Migration(migrations.Migration):
    dependencies = [("dbtaskqueue", "0001_initial")]

    operations = [
        migrations.AlterModelOptions(
            "task",
            {
                "verbose_name": "task",
                "verbose_name_plural": "tasks",
                "permissions": [
                    ("reprocess_task", "Can reprocess tasks (ERROR to CREATED)"),
                    ("mark_poison_task", "Can mark tasks as poison (ERROR to POISON)"),
                    ("unpoison_task", "Can take poison back (POISON to ERROR)"),
                    ("kick_task", "Can kick poison (POISON to CREATED)"),
                    ("cancel_task", "Can cancel tasks that wait (CREATED to POISON)"),
                    ("release_task", "Can take tasks from their pollers (PROCESSING to CREATED)"),
                    ("housekeep_task", "Can move or delete finished tasks"),
                    ("run_now_task", "Can make waiting tasks due now"),
                    ("snooze_task", "Can let waiting tasks wait longer"),
                    ("change_priority_task", "Can change the priority of waiting tasks"),
                    ("move_task", "Can move waiting tasks to another queue"),
                    ("edit_payload_task", "Can edit the payload of failed tasks and retry them"),
                    ("view_payload", "Can see payloads, results and tracebacks"),
                ],
            },
        ),
        migrations.CreateModel(
            name="TaskChange",
            fields=[
                *key(),
                ("time", models.DateTimeField("time", db_default=Now())),
                ("audit", link("auditentry", "audit entry")),
                ("operation", link("bulkoperation", "bulk operation", null=True, blank=True)),
                ("location", models.CharField("table", max_length=200, db_default="dbtaskqueue.task")),
                ("first_task_id", models.BigIntegerField("first task")),
                ("last_task_id", models.BigIntegerField("last task")),
                ("task_ids", models.JSONField("task ids")),
                ("before", models.JSONField("before", null=True, blank=True)),
                ("after_time", models.DateTimeField("last update by the action", null=True, blank=True)),
                ("difference", models.JSONField("difference", null=True, blank=True)),
            ],
            options={
                "verbose_name": "changed tasks",
                "verbose_name_plural": "changed tasks",
                "indexes": [models.Index(fields=["location", "last_task_id"], name="dbtaskqueue_change_task")],
            },
        ),
    ]
