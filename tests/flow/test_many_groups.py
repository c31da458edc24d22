"""Many groups at once: in a table whose statistics say that there are none, and in one transaction."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pytest
from django.db import transaction

from django_dbtaskqueue import enqueue_many, registry
from django_dbtaskqueue.core.exceptions import TooManyGroups
from django_dbtaskqueue.core.sql.dialects import OWN_SESSION_SQL
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.models import Task
from tests.conftest import ProcessDatabase
from tests.factories import make_task
from tests.poller.processes import polling
from tests.support import taken_back, until

pytestmark = pytest.mark.django_db(transaction=True)
GROUPS, TASKS = 400, 8000
KEYS = [f"g{number}".ljust(150, "-") for number in range(GROUPS)]  # long: the index of groups is higher than others


@pytest.mark.parametrize("vacuumed", [False, True], ids=["", "vacuumed"])
@pytest.mark.parametrize("finished", [0, 50], ids=["an empty table", "no group"])
def test_no_task_of_another_group_is_read(finished: int, vacuumed: bool) -> None:
    """Enqueuing 40,000 tasks in 4,000 groups took 260 s, because the queue's other tasks were read for each group."""
    session = Session.on("default")
    session.run("TRUNCATE dbtaskqueue_task CASCADE", {})  # and the dead entries of other tests
    for _ in range(finished):
        make_task("COMPLETED", queue="claims")
    if finished:
        with taken_back():  # dead entries: the index of heads is high, too
            enqueue_many("claims", (item(f"x{number}".ljust(150, "-"), number) for number in range(5000)))
    session.run("ANALYZE dbtaskqueue_task", {})
    keys = KEYS if finished else [key.rstrip("-") for key in KEYS]
    with transaction.atomic():
        enqueue_many("claims", (item(keys[number % GROUPS], number) for number in range(TASKS)))
        if vacuumed:  # it counts the rows that are not committed as none
            with closing(Session.open("default")) as another:
                another.run("VACUUM dbtaskqueue_task", {})
    for who in ("a producer", "a producer that asked often", "a poller"):
        with taken_back():  # the settings end here
            if who == "a poller":
                session.run(OWN_SESSION_SQL.replace("%", "%%"), {})
            elif who != "a producer":
                session.run("SET LOCAL plan_cache_mode = force_generic_plan", {})
            for number in (1, 2):
                params = {"queue_name": "claims", "groups": keys, "hold": True}
                params |= {"every": who != "a poller", "number": number}
                nodes = [*nodes_of(plan_of(session, session.sql.place_heads, params))]
                read = sum(read_rows(node) for node in nodes if node.get("Relation Name") == "dbtaskqueue_task")
                # A head, the parked tasks of its group, whether there is one, and the task that is written.
                assert GROUPS <= read <= GROUPS * (TASKS / GROUPS + 4), (
                    who, [(node["Node Type"], node.get("Index Name"), read_rows(node)) for node in nodes]
                )  # fmt: skip


@pytest.mark.parametrize(("parked", "probes"), [(False, 1), (True, 1 + GROUPS)])
def test_a_settle_looks_once_where_no_task_is_parked(parked: bool, probes: int) -> None:
    """A poller's plan, made for any parameters, looked for a parked task of each group that it settled."""
    enqueue_many("claims", (item(key, 0) for key in KEYS))
    if parked:
        make_task(queue="claims", group_key="of a task that is not settled", parked_by="group", ready_time=None)
    with closing(Session.open("default")) as session, session.atomic():
        params = {"queue_name": "claims", "groups": KEYS, "hold": True, "every": False, "number": 1}
        assert session.run(session.sql.place_heads, params) == []
        assert session.run("SELECT pg_stat_get_xact_numscans('dbtaskqueue_task_next'::regclass)", {}) == [(probes,)]


def test_a_head_is_written_once(settings: Any) -> None:
    """Inserted as parked and then made ready, it would have two versions, and entries of both in each index."""
    settings.DBTASKQUEUE = {"QUEUES": {"claims": {"max_running_per_group": 2}}}

    def enqueued(*numbers: int) -> int:
        before = updates()
        items = ({"group": f"g{number % 3}", "reference": str(number)} for number in numbers)
        enqueue_many("claims", items, on_duplicate="ignore")
        return updates() - before

    def ready() -> list[str]:
        return list(Task.objects.filter(ready_time__isnull=False).order_by("pk").values_list("reference", flat=True))

    with transaction.atomic():
        make_task("COMPLETED", queue="claims", reference="1", group_key="g1")
        assert enqueued(0) == 0
        # Of group 1 the first has an ignored reference: the third gets its place, by a second write.
        assert enqueued(*range(1, 12)) == 1
        assert ready() == ["0", "2", "3", "4", "5", "7"] and Task.objects.filter(parked_by="group").count() == 5
        assert enqueued(12, 13, 14) == 0
    assert ready() == ["0", "2", "3", "4", "5", "7"]


def updates() -> int:
    sql = "SELECT n_tup_upd FROM pg_stat_xact_user_tables WHERE relname = 'dbtaskqueue_task'"
    return int(Session.on("default").run(sql, {})[0][0])


def item(group: str, number: int) -> dict[str, Any]:
    return {"group": group, "reference": f"{number} {group}", "priority": number % 3}


@pytest.mark.usefixtures("taskqueue_registry")
def test_more_groups_than_there_are_locks(crash_database: ProcessDatabase, caplog: pytest.LogCaptureFixture) -> None:
    """Outcomes do not wait for a producer with many groups: until its commit, each try to store them failed."""
    registry.register("claims", lambda task: None)
    groups = [{"group": f"g{number}"} for number in range(3000)]
    enqueue_many("claims", groups[:300])
    with all_locks_but(150, crash_database.url):
        # PostgreSQL's own words were "out of shared memory"
        with pytest.raises(TooManyGroups, match=r"'claims'.* in one transaction"), transaction.atomic():
            enqueue_many("claims", groups)
        with polling({"claims": 1}):  # it ends more tasks at once, each of another group
            until(lambda: Task.objects.filter(status="COMPLETED").count() == 300)
    assert [record for record in caplog.records if record.name == "psycopg"] == []  # no second error for each first
    assert enqueue_many("claims", groups).enqueued == 3000


@contextmanager
def all_locks_but(few: int, url: str) -> Iterator[None]:
    """Hold all locks that the server has left, but ``few``."""
    with psycopg.connect(url, autocommit=True) as holder:
        with pytest.raises(psycopg.errors.OutOfMemory):
            holder.execute("SELECT pg_advisory_lock(7, n) FROM generate_series(1, 1000000) AS n")
        holder.execute("SELECT pg_advisory_unlock(7, n) FROM generate_series(1, %s) AS n", [few])
        yield
        holder.execute("SELECT pg_advisory_unlock_all()")  # a server that ends a session does so later


def plan_of(session: Session, sql: str, params: dict[str, Any]) -> dict[str, Any]:
    (answer,) = session.run(f"EXPLAIN (ANALYZE, FORMAT JSON) {sql}", params)[0]
    return (json.loads(answer) if isinstance(answer, str) else answer)[0]["Plan"]


def nodes_of(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", []):
        yield from nodes_of(child)


def read_rows(node: dict[str, Any]) -> float:
    removed = node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Join Filter", 0)
    return float((node["Actual Rows"] + removed) * node["Actual Loops"])
