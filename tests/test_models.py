"""The task table: what a row may look like, and how PostgreSQL finds rows among very many."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from itertools import product
from typing import Any

import psycopg
import pytest
from django.core.management import call_command
from django.db import DatabaseError, IntegrityError, connection, transaction
from django.db.models import Count, F, Max
from django.db.models.functions import Greatest, Now, TruncDay
from django.utils import timezone

from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.models import Task
from tests.conftest import ProcessDatabase
from tests.factories import HOLDER, make_task
from tests.flow.conftest import alias as alias
from tests.flow.test_many_groups import nodes_of
from tests.support import PATIENCE, ended, sql, with_settings

both = pytest.mark.django_db(databases=["default", "sqlite"])
_settings = with_settings(QUEUES={"parcels": {}})
AS_IN_THE_SEED = """
INSERT INTO dbtaskqueue_task (queue_name, reference_number, status, attempt, payload, process_result, create_time,
    poller_instance, next_process_time, last_update_time)
VALUES ('parcels', 'ref-1', 'CREATED', 0, %s, NULL, CURRENT_TIMESTAMP, NULL, %s, CURRENT_TIMESTAMP)
"""


def insert(alias: str, statement: str, *params: Any) -> Task:
    sql(statement, params, alias)
    return Task.objects.using(alias).latest("id")


@both
def test_a_queue_s_name_is_all_an_insert_needs_and_the_seed_s_columns_are_a_task_too(alias: str) -> None:
    task = insert(alias, "INSERT INTO dbtaskqueue_task (queue_name) VALUES ('parcels')")
    now, tasks = timezone.now(), Task.objects.db_manager(alias)
    assert (task.status, task.attempt, task.total_attempt, task.reenqueue_attempt) == ("CREATED", 0, 0, 0)
    assert (task.max_attempts, task.priority, task.reference, task.payload) == (5, 0, None, None)
    for time in (task.create_time, task.ready_time, task.next_process_time, task.last_update_time):
        assert abs(time - now) < timedelta(seconds=PATIENCE)
    (lease,) = tasks.checkout("parcels", poller_instance="p")
    lease.complete()
    task = insert(alias, AS_IN_THE_SEED, '{"a": 1}', now + timedelta(hours=1))
    assert (task.reference, task.payload) == ("ref-1", {"a": 1})
    assert tasks.checkout("parcels", poller_instance="p") == []
    tasks.update(next_process_time=Now())
    (lease,) = tasks.checkout("parcels", poller_instance="p")
    assert (lease.id, lease.payload) == (task.id, {"a": 1})


def refused(alias: str, **columns: Any) -> bool:
    try:
        with transaction.atomic(using=alias):
            Task.objects.using(alias).create(**{"queue": "parcels", **columns})
    except IntegrityError:
        return True
    return False


STATUSES = ["CREATED", "PROCESSING", *ended()]


@both
def test_only_rows_that_make_sense_are_let_in(alias: str) -> None:
    wrong = []
    for status, ready, parked, finished, held in product(STATUSES, *[[False, True]] * 4):
        over = status in ended()
        sensible = (
            ready == (not over and not parked)  # in line exactly when it can be taken now or later
            and not (parked and status != "CREATED")
            and not (finished and not over)
            and not (held and status == "CREATED")
        )
        shape = {"status": status, "final_status": status if over else None}
        shape |= {"ready_time": Now() if ready else None, "finish_time": Now() if finished else None}
        shape |= {"parked_by": "no handler" if parked else None, "poller_instance": HOLDER if held else None}
        wrong += [shape] if refused(alias, **shape) is sensible else []
    for status, final in product(STATUSES, [None, *STATUSES[1:]]):
        over = status in ended()
        shape = {"status": status, "ready_time": None if over else Now(), "final_status": final}
        wrong += [shape] if refused(alias, **shape) is (final == (status if over else None)) else []
    assert wrong == []


@both
def test_columns_out_of_range_and_a_second_task_of_a_reference_are_refused(alias: str) -> None:
    wrong = [
        *({"status": status} for status in ("DONE", "created", "", None)),
        *({name: None} for name in ("queue", "create_time", "next_process_time")),
        *({"attempt": -1}, {"attempt": 1, "total_attempt": 0}, {"reenqueue_attempt": -1}, {"max_attempts": 0}),
    ]
    assert [columns for columns in wrong if not refused(alias, **columns)] == []
    answers = [refused(alias, **columns) for columns in ({"reference": "r"}, {"reference": "r"}, {}, {})]
    assert answers == [False, True, False, False] and not refused(alias, reference="r", queue="letters")


FAR = "9999-12-31 23:59:59"
HOSTILE: list[tuple[str, Any]] = [
    *(("lease_seconds", value) for value in (1e300, -1.0, 0.0)),
    *((column, FAR) for column in ("create_time", "ready_time", "next_process_time", "expire_time")),
    *(("total_attempt", 2**63 - 1), ("reenqueue_attempt", 2**31 - 1)),
]
ONLY_POSTGRESQL = [
    *(("lease_seconds", value) for value in ("NaN", "infinity")),
    *(("ready_time", value) for value in ("-infinity", "0044-03-15 12:00:00+00 BC")),
    *(("next_process_time", "infinity"), ("expire_time", "infinity"), ("expire_time", "10000-01-01 00:00:00+00")),
]


@both
def test_the_database_refuses_what_would_stop_a_queue(alias: str) -> None:
    """No poller could read such a row, which was written past the API."""
    let_in = []
    for column, value in HOSTILE + (ONLY_POSTGRESQL if alias == "default" else []):  # SQLite has no such values
        with suppress(DatabaseError), transaction.atomic(using=alias):
            sql(f"INSERT INTO dbtaskqueue_task (queue_name, {column}) VALUES ('letters', %s)", [value], alias)
            let_in.append((column, value))
    assert let_in == []


def test_migrations_say_what_the_models_say_and_go_back_and_forward(process_database: ProcessDatabase) -> None:
    call_command("makemigrations", "dbtaskqueue", check=True, dry_run=True, verbosity=0)
    before = schema()
    call_command("migrate", "dbtaskqueue", "zero", verbosity=0)
    assert schema() == {}
    call_command("migrate", "dbtaskqueue", verbosity=0)
    assert schema() == before and "dbtaskqueue_task" in before


def schema() -> dict[str, set[str]]:
    with connection.cursor() as cursor:
        tables = [name for name in connection.introspection.table_names(cursor) if name.startswith("dbtaskqueue_")]
        return {table: set(connection.introspection.get_constraints(cursor, table)) for table in tables}


def updates() -> tuple[int, int]:
    """Return how many updates of the task table this connection has not reported yet, and how many were HOT."""
    numbers = "pg_stat_get_xact_tuples_updated(t), pg_stat_get_xact_tuples_hot_updated(t)"
    ((made, hot),) = sql(f"SELECT {numbers} FROM (SELECT 'dbtaskqueue_task'::regclass::oid AS t) AS x")
    return made, hot


@pytest.mark.django_db
@pytest.mark.parametrize("strategy", ["skip_locked", "optimistic"])
def test_checkout_is_a_hot_update(settings: Any, strategy: str) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {"strategy": strategy}}}
    Task.objects.enqueue_many("parcels", [{"reference": str(number), "payload": number} for number in range(500)])
    before = updates()
    taken = Task.objects.checkout("parcels", poller_instance=HOLDER, limit=500)
    made, hot = (after - earlier for after, earlier in zip(updates(), before, strict=True))
    assert len(taken) == made == 500
    assert hot > 0.75 * made  # the rest found their page full


MIXED = """
INSERT INTO dbtaskqueue_task (queue_name, reference_number, priority, status, attempt, total_attempt, ready_time,
    next_process_time, finish_time, final_status, start_time, poller_instance, parked_by, payload, payload_type)
SELECT 'parcels', 'r-' || i, (i % 5)::smallint, status, attempt, attempt,
    CASE WHEN status IN ('CREATED', 'PROCESSING') AND NOT parked THEN now() + due END,
    CASE WHEN status = 'PROCESSING' THEN now() + interval '50 s' ELSE now() + due END,
    CASE WHEN status IN ('COMPLETED', 'ERROR', 'POISON') THEN now() - interval '1 h' END,
    CASE WHEN status IN ('COMPLETED', 'ERROR', 'POISON') THEN status END,
    CASE WHEN attempt > 0 THEN now() - interval '10 s' END,
    CASE WHEN status <> 'CREATED' THEN 'poller-1' END,
    CASE WHEN parked THEN 'no handler' END, jsonb_build_object('number', i), CASE WHEN parked THEN 'Alien' END
FROM (
    SELECT i, k = 99 AS parked,
        CASE WHEN k < 56 THEN 'COMPLETED' WHEN k < 59 THEN 'ERROR' WHEN k < 60 THEN 'POISON'
            WHEN k < 62 THEN 'PROCESSING' ELSE 'CREATED' END AS status,
        CASE WHEN k < 62 THEN 1 ELSE 0 END AS attempt,
        CASE WHEN k < 62 THEN interval '-20 s' WHEN k < 80 THEN i * interval '-1 ms' ELSE i * interval '1 min' END
            AS due
    FROM (SELECT i, i % 100 AS k FROM generate_series(1, 200000) AS i) AS s
) AS rows
"""
LINE = {"queue_name": "parcels", "priorities": [0, 1, 2, 3, 4], "times": ["-infinity"] * 5, "ids": [0] * 5}
TAKE = {"lease": 60.0, "min_lease": 0.0, "since": -1e9, "poller_instance": HOLDER, "limit": 500, "tags": []}
LEASES = [{"task_id": 100 * number + 61, "token": 1} for number in range(1, 501)]
RESULTS = json.dumps([{**lease, "result_json": "1"} for lease in LEASES])
ZEROS = dict.fromkeys(("attempts_added", "reenqueues_added", "deaths"), 0)
WRITE = {"new_status": "ERROR", "delay": None, "result_text": "x", "result_json": None, **ZEROS}
FAILURE = {"error_type": "t", "message": "m", "traceback": "b", "failure_key": "f"}
FENCED = {"rows": json.dumps(LEASES)}
PLACE = {"location": "dbtaskqueue.task"}
ONE = {"id": 161, "total_attempt": 1}
BY_LINE, BY_KEY = {"dbtaskqueue_task_rdy"}, {"dbtaskqueue_task_pkey"}
ARRAYS = {key: f"{{{','.join(str(lease[key]) for lease in LEASES)}}}" for key in LEASES[0]}
LINES = {
    "queues": ["nothing", "parcels"], "limits": [500, 500], "firsts": [1, 2], "lasts": [1, 6],
    "priorities": [0, 0, 1, 2, 3, 4], "times": ["-infinity"] * 6, "ids": [0] * 6,
}  # fmt: skip
PLANS: dict[str, tuple[dict[str, Any], set[str]]] = {
    **dict.fromkeys(("checkout_skip_locked", "checkout_beside_others", "candidates", "priorities"), ({}, BY_LINE)),
    **dict.fromkeys(("ages", "exhausted", "seconds_until_exhausted"), ({}, BY_LINE)),
    **dict.fromkeys(("checkout_of_many", "priorities_of_many"), (LINES, BY_LINE)),
    **dict.fromkeys(("checkout_optimistic", "renew", "delete_counted"), (FENCED, BY_KEY)),
    **dict.fromkeys(("delete_settled", "outcome_of"), (FENCED, BY_KEY)),
    "next_due": ({"queues": ["parcels"] * 5}, BY_LINE),
    "soon": ({"horizon": 5.0}, BY_LINE),
    "find": ({"references": ["r-777"]}, {"dbtaskqueue_task_reference"}),
    "touch": ({**ONE, "delta": 5.0}, BY_KEY),
    "progress": ({**ONE, "note": "half"}, BY_KEY),
    "unpark": ({"types": ["city"], "untyped": True}, {"dbtaskqueue_task_nohd"}),
    "complete_plain": (ARRAYS, BY_KEY),
    "complete": ({**ARRAYS, "result_json": f"{{{','.join(['1'] * len(LEASES))}}}"}, BY_KEY),
    "write": ({"rows": json.dumps([{**lease, **WRITE} for lease in LEASES])}, BY_KEY),
    "attempts": ({"rows": json.dumps([{**lease, **FAILURE} for lease in LEASES]), **PLACE}, BY_KEY),
    "to_history": ({"rows": RESULTS, **PLACE}, BY_KEY),
}


@contextmanager
def undone(session: Session) -> Iterator[None]:
    with suppress(ZeroDivisionError), session.atomic():
        yield
        raise ZeroDivisionError


def prepared_plan(session: Session, statement: str, params: dict[str, Any]) -> Any:
    session.run(statement, params)
    names: list[str] = []

    def number(match: re.Match[str]) -> str:
        if match[1] not in names:
            names.append(match[1])
        return f"${names.index(match[1]) + 1}"

    text = re.sub(r"%\((\w+)\)s", number, statement).replace("%%", "%")
    raw = session.connection.connection
    ask = "SELECT name, generic_plans, custom_plans FROM pg_prepared_statements WHERE statement = %s"
    ((name, generic, custom),) = raw.execute(ask, [text]).fetchall()
    assert generic > 0 == custom, "a poller's plans must not flip with the statistics"
    arguments = f"({', '.join(['%s'] * len(names))})" if names else ""
    cursor = psycopg.ClientCursor(raw)
    cursor.execute(f"EXPLAIN (FORMAT JSON) EXECUTE {name} {arguments}", [params[name] for name in names])
    return cursor.fetchone()[0][0]["Plan"]  # type: ignore[index]  # EXPLAIN answers with one row


def faults(plan: Any, wanted: set[str]) -> list[str]:
    found = list(nodes_of(plan))
    scans = [node["Node Type"] for node in found if node.get("Relation Name") == "dbtaskqueue_task"]
    whole = [one for one in found if one.get("Index Name") in BY_KEY and "Index Cond" not in one]
    used = {node["Index Name"] for node in found if str(node.get("Index Name")).startswith("dbtaskqueue_task")}
    wrong = ["Seq Scan"] * ("Seq Scan" in scans) + ["reads all of the primary key"] * bool(whole)
    return wrong + ([f"uses {used or 'no index'}"] if used != wanted else [])


def faults_of_statements(*, undo: bool = True, session: Session | None = None) -> dict[str, list[str]]:
    """Return what is wrong with the plans of all statements, on a session of their own if none is given."""
    mine = session or Session.open("default")
    wrong = {}
    for name, (params, wanted) in PLANS.items():
        with undone(mine) if undo else nullcontext():
            plan = prepared_plan(mine, getattr(mine.sql, name), {**LINE, **TAKE, **params})
            if found := faults(plan, wanted):
                wrong[name] = found
    mine.close()
    return wrong


def test_every_statement_of_the_hot_path_goes_by_an_index(postgres_process_database: ProcessDatabase) -> None:
    """Given 200,000 mixed rows, three in five of them finished, then no plan reads the table through.

    Whether the statistics know of the rows or not, and whether the statements were prepared before they came: a queue
    grows faster than it is analysed, and a burst reaches a poller that has had nothing to do.
    """
    early = Session.open("default")
    # Given the statistics of a small table, for which the statements were planned, then
    sql("ALTER TABLE dbtaskqueue_task SET (autovacuum_enabled = false)")
    sql(MIXED.replace("200000", "20"))
    sql("VACUUM ANALYZE dbtaskqueue_task")
    for name, (params, _) in PLANS.items():  # not undone: at a rollback the driver forgets what it prepared
        early.run(getattr(early.sql, name), {**LINE, **TAKE, **params})
    sql(f"DELETE FROM dbtaskqueue_task; {MIXED}")
    assert faults_of_statements(undo=False, session=early) == {}
    # Given those of an empty table
    sql("DELETE FROM pg_statistic WHERE starelid = 'dbtaskqueue_task'::regclass")
    sql("UPDATE pg_class SET relpages = 0, reltuples = 0 WHERE relname LIKE 'dbtaskqueue_task%'")
    assert faults_of_statements() == {}
    # Given those of the table as it is
    sql("ANALYZE dbtaskqueue_task")
    assert faults_of_statements() == {}
    # The search for faults finds some.
    whole = "SELECT count(*) FROM dbtaskqueue_task WHERE attempt = %(attempt)s"
    session = Session.open("default")
    assert faults(prepared_plan(session, whole, {"attempt": 1}), BY_LINE) == ["Seq Scan", "uses no index"]
    session.close()


@both
def test_a_time_goes_where_a_time_of_django_goes(alias: str) -> None:
    """A SELECT reads it within limits; all else takes it for the plain column."""
    tasks = Task.objects.using(make_task(using=alias)._state.db)
    by_day = tasks.annotate(day=TruncDay("create_time")).values("day").annotate(number=Count("pk")).order_by("day")
    for rows in (
        tasks.distinct().order_by("create_time"),
        tasks.values_list("create_time").distinct().order_by("create_time"),
        tasks.values("create_time").annotate(number=Count("pk")).order_by("create_time"),
        by_day,
        tasks.datetimes("create_time", "day"),
        tasks.annotate(latest=Greatest(Now(), "create_time", "start_time")).order_by("latest"),
        tasks.annotate(wait=F("next_process_time") - F("create_time")).values("wait"),
        tasks.values_list("create_time").union(tasks.values_list("next_process_time")),
        tasks.filter(create_time__in=tasks.values("create_time")),
    ):
        assert list(rows)
    assert tasks.aggregate(last=Max("create_time"))["last"] == tasks.latest("create_time").create_time
