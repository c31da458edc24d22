"""``python -m tests.benchmarks.explain``: what the hot statements do, by EXPLAIN (ANALYZE, BUFFERS).

Of a checkout behind the bound and of a walk from the front, after a churn; the same with a snapshot open meanwhile.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from tests.benchmarks.drains import TABLE, Drain, empty
from tests.benchmarks.scenarios.pinned import Pinned, snapshot
from tests.benchmarks.server import Server, serving

EXPLAIN = "EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, SUMMARY OFF) "
BOUND = f"""
SELECT ready_time::text, id FROM {TABLE} WHERE queue_name = 'nothing' AND ready_time IS NOT NULL
ORDER BY priority, ready_time, id OFFSET 1000 LIMIT 1
"""
CHURN = 200_000
ID, TOKEN = 0, 5  # columns of a leased row


def show(server: Server, title: str) -> None:
    """Explain each statement in a transaction that is rolled back."""
    from django_dbtaskqueue.db.session import Session

    session = Session.open("default")
    try:
        time, last = session.run(BOUND, {})[0]
        behind, front = {"times": [time], "ids": [last]}, {"times": ["-infinity"], "ids": [0]}
        common = {
            "queue_name": "nothing", "priorities": [0], "limit": 500, "tags": [], "lease": 60.0, "min_lease": 0.0,
            "poller_instance": "explain",
        }  # fmt: skip
        for name, params in (("checkout behind the bound", behind), ("walk from the front", front)):
            _explain(session, f"{title}: {name}", session.sql.checkout_skip_locked, common | params)
        _settle(session, f"{title}: settle", common | behind)
    finally:
        session.close()


def _settle(session: Any, title: str, params: dict[str, Any]) -> None:
    """Explain the settling of what was checked out before, in a transaction that was committed."""
    leases = session.run(session.sql.checkout_skip_locked, params)
    ids, tokens = (",".join(str(row[column]) for row in leases) for column in (ID, TOKEN))
    _explain(session, title, session.sql.complete_plain, {"ids": f"{{{ids}}}", "tokens": f"{{{tokens}}}"})


def _explain(session: Any, title: str, sql: str, params: dict[str, Any]) -> None:
    print(f"\n## {title}\n")
    try:
        with session.atomic():
            for (line,) in session.run(EXPLAIN + sql, params):
                print(line)
            raise _Undo
    except _Undo:
        pass


class _Undo(Exception):
    """Roll the transaction back."""


def main() -> None:
    """Explain free and pinned."""
    with serving() as server:
        import django

        django.setup()
        from django_dbtaskqueue.operations import queue_control

        for title, around in (("free", nullcontext), ("pinned", snapshot)):
            empty(server)
            with around(server):
                Pinned(server, 0, CHURN, snapshot).churned(server)
                Drain(server, 50_000, first=CHURN).fill()
                server.calm(TABLE)
                queue_control.resume(["nothing"])
                show(server, title)


if __name__ == "__main__":
    main()
