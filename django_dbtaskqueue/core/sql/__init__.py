"""Hand-tuned statements as text, without Django: the only SQL of the project that writes ``status``.

``core/sql/X`` is the SQL of ``flow/X``. Parameters are named (``%(queue_name)s``). ``Statements`` renders the
statements of the flow for one location: one table and one dialect.
"""

from dataclasses import replace
from functools import cached_property

from django_dbtaskqueue.core.sql.checkout import CheckoutStatements
from django_dbtaskqueue.core.sql.dependencies import DependencyStatements, StepStatements
from django_dbtaskqueue.core.sql.enqueue import EnqueueStatements
from django_dbtaskqueue.core.sql.groups import GroupStatements, LimitStatements
from django_dbtaskqueue.core.sql.retention import RetentionStatements
from django_dbtaskqueue.core.sql.settle import SettleStatements


class Statements(
    EnqueueStatements,
    CheckoutStatements,
    GroupStatements,
    LimitStatements,
    SettleStatements,
    DependencyStatements,
    StepStatements,
    RetentionStatements,
):
    """The statements of all groups."""

    @cached_property
    def one(self) -> "Statements":
        """The same statements for a single row, found by its primary key.

        For a join to an unknown number of rows the planner scans the table when it expects fewer PROCESSING rows.
        """
        return Statements(self.tables, replace(self.dialect, single=True))

    @cached_property
    def narrowed(self) -> "Statements":
        """The same, with checkouts that leave out the payload types in the array ``without`` ('' stands for none)."""
        twin = Statements(self.tables, self.dialect)
        twin._wanted = " AND NOT " + self.dialect.one_of("coalesce(payload_type, '')", "without")
        return twin
