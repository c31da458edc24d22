"""Another condition for the index of the tasks behind the head of their group: the planner confuses it with no other.

A poller of the release before works on: its condition implies the new one.
"""

from django.db import migrations, models
from django.db.models import Q

from django_dbtaskqueue.migrations._concurrently import AddIndexConcurrently, RemoveIndexConcurrently

TABLES = ("task", "temporarytask")


class Migration(migrations.Migration):
    """Add an index to the task tables, then remove the one it replaces."""

    atomic = False
    dependencies = [("dbtaskqueue", "0014_streams")]

    operations = [
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
        *(RemoveIndexConcurrently(table, f"dbtaskqueue_{table}_grp") for table in TABLES),
    ]
