"""Other conditions for the two indexes of groups: the planner confuses them with no other.

A poller of the release before works on: its conditions imply the new ones.
"""

from django.db import migrations, models
from django.db.models import Q

from django_dbtaskqueue.migrations._concurrently import AddIndexConcurrently, RemoveIndexConcurrently

TABLES = ("task", "temporarytask")


class Migration(migrations.Migration):
    """Add two indexes to the task tables, then remove those they replace."""

    atomic = False
    dependencies = [("dbtaskqueue", "0014_streams")]

    operations = [
        *(
            AddIndexConcurrently(
                table,
                models.Index(
                    fields=["queue", "group_key"],
                    condition=Q(group_key__isnull=False)
                    & (Q(ready_time__isnull=False) | Q(parked_by__isnull=True, final_status__isnull=True)),
                    name=f"dbtaskqueue_{table}_lead",
                ),
            )
            for table in TABLES
        ),
        *(
            AddIndexConcurrently(
                table,
                models.Index(
                    fields=["queue", "group_key", "priority", "id"],
                    condition=Q(parked_by="group")
                    | Q(parked_by__isnull=True, ready_time__isnull=True, final_status__isnull=True),
                    name=f"dbtaskqueue_{table}_next",
                ),
            )
            for table in TABLES
        ),
        *(
            RemoveIndexConcurrently(table, f"dbtaskqueue_{table}_{name}")
            for table in TABLES
            for name in ("head", "grp")
        ),
    ]
