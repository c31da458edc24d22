"""All statements of the flow for one location."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from django_dbtaskqueue.core.sql.base import Tables
from django_dbtaskqueue.core.sql.checkout import Checkouts
from django_dbtaskqueue.core.sql.enqueue import Enqueueing
from django_dbtaskqueue.core.sql.groups import Grouping
from django_dbtaskqueue.core.sql.leases import NO_HANDLER, Tending
from django_dbtaskqueue.core.sql.settle import Settling

__all__ = ["NO_HANDLER", "Statements", "Tables"]
COALESCED = "coalesce(payload_type, '')"


class Statements(Enqueueing, Checkouts, Grouping, Tending, Settling):
    """The groups side by side: texts only, no state."""

    @cached_property
    def one(self) -> Statements:
        """The same statements for a single row, by its primary key whatever the statistics say.

        A join to rows of unknown number flips to a scan of the table as soon as PROCESSING looks rarer than they.
        """
        return Statements(self.tables, replace(self.dialect, single=True))

    @cached_property
    def narrowed(self) -> Narrowed:
        """The same, with checkouts that leave out the payload types in the parameter ``without``."""
        return Narrowed(self.tables, self.dialect)


class Narrowed(Statements):
    """Checkouts that leave out payload types ('' stands for none)."""

    @property
    def _wanted(self) -> str:
        return f" AND NOT {self.dialect.one_of(COALESCED, 'without')}"
