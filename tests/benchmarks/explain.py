"""``python -m tests.benchmarks.explain``: what the hot statements do, by EXPLAIN (ANALYZE, BUFFERS).

Of a checkout behind the bound and of a walk from the front, after a churn; the same with a snapshot open meanwhile.
"""

from contextlib import closing, nullcontext
from typing import Any

from psycopg import Rollback

from tests.benchmarks.drains import TABLE, Drain, empty
from tests.benchmarks.scenarios.pickup import churned, snapshot
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


def show(title: str) -> None:
    from django_dbtaskqueue.db.session import Session

    def explain(what: str, sql: str, params: dict[str, Any]) -> None:
        """Explain a statement in a transaction that is rolled back."""
        print(f"\n## {title}: {what}\n")
        with session.atomic():
            print(*(line for (line,) in session.run(EXPLAIN + sql, params)), sep="\n")
            raise Rollback

    with closing(Session.open("default")) as session:
        ((time, last),) = session.run(BOUND, {})
        behind, checkout = COMMON | {"times": [time], "ids": [last]}, session.sql.checkout_skip_locked
        explain("checkout behind the bound", checkout, behind)
        explain("walk from the front", checkout, COMMON | {"times": ["-infinity"], "ids": [0]})
        leases = session.run(checkout, behind)  # committed, as before a real settle
        ids, tokens = (",".join(str(row[column]) for row in leases) for column in (ID, TOKEN))
        explain("settle", session.sql.complete_plain, {"ids": f"{{{ids}}}", "tokens": f"{{{tokens}}}"})


if __name__ == "__main__":
    with serving() as server:
        from django_dbtaskqueue.operations import queue_control

        for title, around in (("free", nullcontext), ("pinned", snapshot)):
            empty(server)
            with around(server):
                churned(server, CHURN)
                Drain(server, 50_000, first=CHURN).fill()
                server.calm(TABLE)
                queue_control.resume(["nothing"])
                show(title)
