"""Steps that last: what tasks have done, and the signals that were sent to them.

A poller of the release before works on: the new column may be NULL, and no statement of it names it. It knows no steps.
"""

from typing import Any

from django.db import migrations, models
from django.db.models import Q
from django.db.models.functions import Now

Fields = list[tuple[str, "models.Field[Any, Any]"]]


def row_of_task() -> Fields:
    """Return the columns that name a task."""
    return [
        ("id", models.BigAutoField(primary_key=True, serialize=False)),
        ("location", models.CharField("location", max_length=200, db_default="dbtaskqueue.task")),
        ("task_id", models.BigIntegerField("task")),
        ("task_time", models.DateTimeField("task created")),
    ]


class Migration(migrations.Migration):
    """Add two tables, a column that may be NULL, which rewrites no row, and a permission."""

    dependencies = [("dbtaskqueue", "0009_dependencies")]

    operations = [
        *(
            migrations.AddField(model, "signals", models.IntegerField("signals", null=True, blank=True))
            for model in ("task", "temporarytask")
        ),
        migrations.CreateModel(
            "Step",
            [
                *row_of_task(),
                ("position", models.IntegerField("position")),
                ("name", models.CharField("name", max_length=200)),
                (
                    "kind",
                    models.CharField(
                        "kind",
                        max_length=30,
                        db_default="step",
                        choices=[
                            ("step", "step"),
                            ("sleep", "sleep"),
                            ("wait", "waits for a signal"),
                            ("signal", "signal"),
                            ("timeout", "no signal in time"),
                        ],
                    ),
                ),
                ("result", models.JSONField("result", null=True, blank=True)),
                ("until_time", models.DateTimeField("until", null=True, blank=True)),
                ("create_time", models.DateTimeField("stored", db_default=Now())),
            ],
            options={
                "verbose_name": "step",
                "verbose_name_plural": "steps",
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
            "Signal",
            [
                *row_of_task(),
                ("name", models.CharField("name", max_length=200)),
                ("data", models.JSONField("data", null=True, blank=True)),
                ("actor", models.CharField("actor", max_length=200, db_default="", blank=True)),
                ("position", models.IntegerField("position", null=True, blank=True)),
                ("create_time", models.DateTimeField("sent", db_default=Now())),
            ],
            options={
                "verbose_name": "signal",
                "verbose_name_plural": "signals",
                "default_permissions": (),
                "indexes": [models.Index(fields=["location", "task_id", "id"], name="dbtaskqueue_signal_task")],
            },
        ),
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
            },
        ),
    ]
