"""Which rows a stream has not seen yet: told by the transactions that wrote them. PostgreSQL only."""

from __future__ import annotations

from django_dbtaskqueue.core.states import TERMINAL

HORIZON = "SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint"
ROUND = 2**32  # a row holds the low half of its writer's transaction id
FINISHED = ", ".join(f"'{status}'" for status in sorted(TERMINAL))


def window(since: int, until: int, *, finished: bool) -> str:
    """Return the test for rows last written by transactions from ``since`` to below ``until``, both 64 bits wide.

    From 0 on: all but those that later windows bring. ``finished``: rows of TASKS that are terminal.
    """
    tests = [f"status IN ({FINISHED})"] if finished else []
    if since:
        tests.append(f"{_distance(since)} < {until - since}")
    else:  # a row so old that its id has come round again stands in no other window for a long time
        ahead = f"pg_snapshot_xmax(pg_current_snapshot())::text::bigint - {until}"
        tests.append(f"{_distance(until)} >= {ahead}")
    return " AND ".join(tests)


def older(horizon: int) -> str:
    """Return the test for rows last written by transactions below ``horizon``, 64 bits wide.

    It fails for all rows once so many transactions have begun since that a younger row could pass for an older one.
    """
    ahead = f"pg_snapshot_xmax(pg_current_snapshot())::text::bigint - {horizon}"
    return f"{ahead} < {ROUND // 2} AND {_distance(horizon)} >= {ROUND // 2}"


def _distance(start: int) -> str:
    """Return how many transactions after ``start`` a row was written, all the way round."""
    return f"mod(xmin::text::bigint - {start % ROUND} + {ROUND}, {ROUND})"
