"""A queue driver of one's own, as a site would write it: lock the head of the line, then lease it, in one statement.

It knows no bounds and no ageing of priorities, so a long line of held tasks slows it down. It keeps every promise.
"""

from __future__ import annotations

from typing import Any

from django_dbtaskqueue.db.session import Row, Session
from django_dbtaskqueue.flow.checkout import Line
from django_dbtaskqueue.flow.checkout_many import Part, rows_of_many
from django_dbtaskqueue.flow.settle_port import SettleDoor


class Plain:
    """``DBTASKQUEUE = {"QUEUES": {"parcels": {"strategy": "tests.conformance.driver.Plain"}}}``."""

    def take(self, session: Session, line: Line, params: dict[str, Any]) -> list[Row]:
        """Take the head of the line."""
        sql = session.sql
        statement = sql.tables.rename(
            f"WITH head AS MATERIALIZED (SELECT id AS head_id FROM {sql.tables.task}"
            f" WHERE queue_name = %(queue_name)s AND ready_time IS NOT NULL AND {sql.due_now}"
            " ORDER BY priority, ready_time, id LIMIT %(limit)s FOR NO KEY UPDATE SKIP LOCKED)"
            f" UPDATE {sql.tables.task} SET {sql.taken} FROM head WHERE id = head_id RETURNING {sql.leased}"
        )
        return line.in_order(session.run(statement, {**params, "queue_name": line.queue}))


class Shared:
    """What a poller of many queues does: several lines in one statement."""

    def take(self, session: Session, line: Line, params: dict[str, Any]) -> list[Row]:
        """Take between two queues with nothing in line."""
        limit = params["limit"]
        lines = [Line("other"), line, Line("nothing")]
        parts = [Part(one, SettleDoor(session.connection.alias), limit) for one in lines]
        rows_of_many(session, parts, params, limit)
        assert not parts[0].rows and not parts[2].rows
        return parts[1].rows


class Lame:
    """A driver that cannot take."""
