"""A queue driver of one's own, as a site would write it: lock the first tasks, then lease it, in one statement.

It knows no watermarks and no ageing of priorities, so a long line of held tasks slows it down. It keeps every promise.
"""

from typing import Any

from django_dbtaskqueue.db.session import Row, Session
from django_dbtaskqueue.flow.checkout import Scan, ScanCursor, take_rows_of_many


class Plain:
    """``DBTASKQUEUE = {"QUEUES": {"parcels": {"strategy": "tests.conformance.driver.Plain"}}}``."""

    def take(self, session: Session, cursor: ScanCursor, params: dict[str, Any]) -> list[Row]:
        sql = session.sql
        statement = sql.tables.rename(
            f"WITH head AS MATERIALIZED (SELECT id AS head_id FROM {sql.tables.task}"
            f" WHERE queue_name = %(queue_name)s AND ready_time IS NOT NULL AND {sql.due_now}"
            " ORDER BY priority, ready_time, id LIMIT %(limit)s FOR NO KEY UPDATE SKIP LOCKED)"
            f" UPDATE {sql.tables.task} SET {sql.claim_set} FROM head WHERE id = head_id RETURNING {sql.leased}"
        )
        return cursor.in_order(session.run(statement, {**params, "queue_name": cursor.queue}))


class Shared:
    """What a poller of many queues does: several queues in one statement."""

    def take(self, session: Session, cursor: ScanCursor, params: dict[str, Any]) -> list[Row]:
        limit = params["limit"]
        scans = [Scan(one, limit) for one in [ScanCursor("other"), cursor, ScanCursor("nothing")]]
        take_rows_of_many(session, scans, params, limit)
        assert not scans[0].rows and not scans[2].rows
        return scans[1].rows


class Lame:
    """A driver that cannot take."""
