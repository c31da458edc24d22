"""All statements of the flow for one location."""

from __future__ import annotations

from django_dbtaskqueue.flow.sql.base import Tables
from django_dbtaskqueue.flow.sql.checkouts import Checkouts
from django_dbtaskqueue.flow.sql.enqueueing import Enqueueing
from django_dbtaskqueue.flow.sql.grouping import Grouping
from django_dbtaskqueue.flow.sql.settling import Settling
from django_dbtaskqueue.flow.sql.tending import NO_HANDLER, Tending

__all__ = ["NO_HANDLER", "Statements", "Tables"]


class Statements(Enqueueing, Checkouts, Grouping, Tending, Settling):
    """The groups side by side: texts only, no state."""
