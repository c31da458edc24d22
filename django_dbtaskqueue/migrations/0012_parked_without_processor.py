"""An index of the tasks without a processor, so that pollers read no task that waits for something else.

A poller of the release before works on: it looks for them in the index of all parked tasks.
"""

from django.db import migrations, models
from django.db.models import Q

from django_dbtaskqueue.migrations._concurrently import AddIndexConcurrently


class Migration(migrations.Migration):
    """Add an index to the task tables."""

    atomic = False
    dependencies = [("dbtaskqueue", "0011_limit_leases")]

    operations = [
        AddIndexConcurrently(
            table,
            models.Index(
                fields=["queue", "payload_type"],
                condition=Q(parked_by__startswith="no handler"),
                name=f"dbtaskqueue_{table}_nohd",
            ),
        )
        for table in ("task", "temporarytask")
    ]
