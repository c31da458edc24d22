"""Business data that tasks are enqueued beside."""

from __future__ import annotations

from django.db import models


class Booking(models.Model):
    """A row that a caller or a processor writes in the same transaction as the queue's."""

    id = models.BigAutoField(primary_key=True)
    reference = models.CharField(max_length=200, unique=True)
    amount = models.IntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.reference}: {self.amount}"
