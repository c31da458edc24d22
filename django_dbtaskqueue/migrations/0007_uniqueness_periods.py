"""Let a reference in the ledger expire: rules of uniqueness take one for a period.

A poller of the release before works on: it writes no such reference, and NULL means that one stays taken.
"""

from django.db import migrations, models
from django.db.models import Q

from django_dbtaskqueue.migrations._concurrently import AddConstraintNotValid, AddIndexConcurrently
from django_dbtaskqueue.migrations._task_tables import READABLE


class Migration(migrations.Migration):
    """Add a column that may be NULL, which rewrites no row, an index of its values, and a check of the times."""

    atomic = False
    dependencies = [("dbtaskqueue", "0006_schedule")]

    operations = [
        migrations.AddField("usedreference", "expire_time", models.DateTimeField("expires", null=True, blank=True)),
        AddIndexConcurrently(
            "usedreference",
            models.Index(
                fields=["expire_time"], condition=Q(expire_time__isnull=False), name="dbtaskqueue_usedref_expires"
            ),
        ),
        AddConstraintNotValid(
            "usedreference",
            models.CheckConstraint(
                condition=Q(create_time__range=READABLE, expire_time__range=READABLE),
                name="dbtaskqueue_usedreference_times",
            ),
        ),
    ]
