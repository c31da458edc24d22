"""Business data that tasks are enqueued beside."""

from django.db import models
from django.db.models.functions import Now

from django_dbtaskqueue.models import AbstractTask


class Booking(models.Model):
    """A row that a caller or a processor writes in the same transaction as the queue's."""

    id = models.BigAutoField(primary_key=True)
    reference = models.CharField(max_length=200, unique=True)
    amount = models.IntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.reference}: {self.amount}"


class Parcel(AbstractTask):
    """A task table of one's own: another name, other column names, and a column more."""

    queue = models.CharField(max_length=200, db_column="line")
    reference = models.CharField(max_length=200, null=True, db_column="tracking_number")  # noqa: DJ001 -- as AbstractTask
    ready_time = models.DateTimeField(null=True, db_default=Now(), db_column="place")
    weight = models.IntegerField(db_default=1)

    class Meta(AbstractTask.Meta):
        db_table = "parcel_service"
