"""``python -m tests.benchmarks.explain``: what the hot statements do, by EXPLAIN (ANALYZE, BUFFERS).

Of a checkout behind the bound and of a walk from the front, after a churn; the same with a snapshot open meanwhile.
"""

from contextlib import nullcontext
from typing import Any

from psycopg import Rollback

from tests.benchmarks.drains import TABLE, Drain, empty
from tests.benchmarks.scenarios.pinned import churned, snapshot
from tests.benchmarks.server import serving

EXPLAIN = "EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, SUMMARY OFF) "
BOUND = f"""
SELECT ready_time::text, id FROM {TABLE} WHERE queue_name = 'nothing' AND ready_time IS NOT NULL
ORDER BY priority, ready_time, id OFFSET 1000 LIMIT 1
"""
CHURN = 200_000
ID, TOKEN = 0, 5  # columns of a leased row
COMMON = {
    "queue_name": "nothing", "priorities": [0], "limit": 500, "tags": [], "lease": 60.0, "min_lease": 0.0,
    "poller_instance": "explain",
}  # fmt: skip
FRONT = COMMON | {"times": ["-infinity"], "ids": [0]}


def show(title: str) -> None:
    from django_dbtaskqueue.db.session import Session

    session = Session.open("default")
    try:
        ((time, last),) = session.run(BOUND, {})
        behind, checkout = COMMON | {"times": [time], "ids": [last]}, session.sql.checkout_skip_locked
        _explain(session, f"{title}: checkout behind the bound", checkout, behind)
        _explain(session, f"{title}: walk from the front", checkout, FRONT)
        leases = session.run(checkout, behind)  # committed, as before a real settle
        ids, tokens = (",".join(str(row[column]) for row in leases) for column in (ID, TOKEN))
        params = {"ids": f"{{{ids}}}", "tokens": f"{{{tokens}}}"}
        _explain(session, f"{title}: settle", session.sql.complete_plain, params)
    finally:
        session.close()


def _explain(session: Any, title: str, sql: str, params: dict[str, Any]) -> None:
    """Explain a statement in a transaction that is rolled back."""
    print(f"\n## {title}\n")
    with session.atomic():
        for (line,) in session.run(EXPLAIN + sql, params):
            print(line)
        raise Rollback


def main() -> None:
    with serving() as server:
        import django

        django.setup()
        from django_dbtaskqueue.operations import queue_control

        for title, around in (("free", lambda _: nullcontext()), ("pinned", snapshot)):
            empty(server)
            with around(server):
                churned(server, CHURN)
                Drain(server, 50_000, first=CHURN).fill()
                server.calm(TABLE)
                queue_control.resume(["nothing"])
                show(title)


if __name__ == "__main__":
    main()
