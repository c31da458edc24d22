"""Many groups at once: in a table whose statistics say that there are none, and in one transaction."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from django.db import transaction

from django_dbtaskqueue import enqueue_many
from django_dbtaskqueue.core.exceptions import TooManyGroups
from django_dbtaskqueue.core.sql.dialects import OWN_SESSION_SQL
from django_dbtaskqueue.db.session import Session
from tests.conftest import ProcessDatabase
from tests.factories import make_task

GROUPS, TASKS = 400, 8000
KEYS = [f"g{number}".ljust(150, "-") for number in range(GROUPS)]  # long: the index of groups is higher than others


@pytest.mark.django_db(databases=["default"])
@pytest.mark.parametrize("own", [False, True], ids=["a producer", "a poller"])
def test_no_task_of_another_group_is_read(own: bool) -> None:
    """Enqueuing 40,000 tasks in 4,000 groups took 260 s, because the queue's other tasks were read for each group."""
    for _ in range(50):
        make_task("COMPLETED", queue="claims")
    with suppress(ZeroDivisionError), transaction.atomic():  # dead entries: the index of heads is high, too
        enqueue_many("claims", ({"group": f"x{number}".ljust(150, "-")} for number in range(5000)))
        raise ZeroDivisionError
    session = Session.on("default")
    session.run("ANALYZE dbtaskqueue_task", {})
    tasks = ({"group": KEYS[number % GROUPS], "priority": number % 3} for number in range(TASKS))
    with transaction.atomic():
        enqueue_many("claims", tasks)
    if own:
        session.run(OWN_SESSION_SQL.replace("%", "%%"), {})
    for number in (1, 2):
        params = {"queue_name": "claims", "groups": KEYS, "hold": True}
        params |= {"every": not own, "number": number}
        (answer,) = session.run(f"EXPLAIN (ANALYZE, FORMAT JSON) {session.sql.place_heads}", params)[0]
        plan = (json.loads(answer) if isinstance(answer, str) else answer)[0]["Plan"]
        read = sum(read_rows(node) for node in nodes_of(plan) if node.get("Relation Name") == "dbtaskqueue_task")
        # A head, the parked tasks of its group, whether there is one, and the task that is written.
        assert GROUPS <= read <= GROUPS * (TASKS / GROUPS + 4), [
            (node["Node Type"], node.get("Index Name"), read_rows(node)) for node in nodes_of(plan)
        ]


def test_more_groups_than_the_server_has_locks_for(crash_database: ProcessDatabase) -> None:
    """PostgreSQL's own words were "out of shared memory"."""
    with pytest.raises(TooManyGroups, match=r"'claims'.* in one transaction"), transaction.atomic():
        enqueue_many("claims", ({"group": f"g{number}"} for number in range(60_000)))
    assert enqueue_many("claims", ({"group": f"g{number}"} for number in range(3000))).enqueued == 3000


def nodes_of(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", []):
        yield from nodes_of(child)


def read_rows(node: dict[str, Any]) -> float:
    removed = node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Join Filter", 0)
    return float((node["Actual Rows"] + removed) * node["Actual Loops"])
