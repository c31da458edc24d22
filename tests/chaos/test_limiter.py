"""Pollers that are killed all the time never run, nor start, more tasks of a queue than its limits allow."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection

from django_dbtaskqueue import enqueue_many
from django_dbtaskqueue.models import Task
from tests.chaos.conftest import Start
from tests.chaos.processes import PollerProcess, until_all
from tests.conftest import ProcessDatabase
from tests.support import until

MAX_RUNNING, RATE, BURST = 5, 40, 8
POLLERS = 3
TASKS_PER_KILL = 60
Seen = tuple[float, float, int, int]
# In the transaction of each change: its begin, how many leases are alive, and how many tasks have just started. A
# token is taken after the begin, and before the task starts.
WATCH = """
CREATE TABLE leases_seen (id serial, begin timestamptz, time timestamptz, running int, started int);
CREATE FUNCTION see_leases() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO leases_seen (begin, time, running, started) SELECT transaction_timestamp(), statement_timestamp(),
        (SELECT count(*) FROM dbtaskqueue_task WHERE queue_name = 'chaos' AND status = 'PROCESSING'
            AND next_process_time > statement_timestamp()),
        (SELECT count(*) FROM new_rows WHERE queue_name = 'chaos' AND start_time = statement_timestamp());
    RETURN NULL;
END $$;
CREATE TRIGGER see_leases AFTER UPDATE ON dbtaskqueue_task REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION see_leases();
"""
# In the transaction of each checkout: which tasks started, without those that were put off in the same transaction.
# A token is taken after the row is, and before the commit.
WATCH_GROUPS = """
CREATE TABLE leases_seen (
    number serial, time timestamptz, committed timestamptz, id bigint, total_attempt bigint, group_key text
);
CREATE FUNCTION see_commit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    UPDATE leases_seen SET committed = clock_timestamp() WHERE number = NEW.number;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER see_commit AFTER INSERT ON leases_seen DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION see_commit();
CREATE FUNCTION see_leases() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO leases_seen (time, id, total_attempt, group_key)
        SELECT clock_timestamp(), id, total_attempt, group_key FROM new_rows
        WHERE status = 'PROCESSING' AND start_time = statement_timestamp();
    DELETE FROM leases_seen AS s USING new_rows AS n WHERE s.id = n.id AND s.total_attempt = n.total_attempt
        AND n.ready_time > statement_timestamp() AND s.xmin = pg_current_xact_id()::xid;
    RETURN NULL;
END $$;
CREATE TRIGGER see_leases AFTER UPDATE ON dbtaskqueue_task REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION see_leases();
"""
UNWATCH = "DROP TRIGGER see_leases ON dbtaskqueue_task; DROP FUNCTION see_leases; DROP TABLE leases_seen;"
UNWATCH_GROUPS = f"{UNWATCH} DROP FUNCTION see_commit;"


@pytest.fixture
def leases_seen(postgres_process_database: ProcessDatabase) -> Iterator[Callable[[], list[Seen]]]:
    with connection.cursor() as cursor:
        cursor.execute(WATCH)

    def seen() -> list[Seen]:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT extract(epoch FROM begin)::float8, extract(epoch FROM time)::float8, running, started"
                " FROM leases_seen ORDER BY time, id"
            )
            return list(cursor.fetchall())

    yield seen
    with connection.cursor() as cursor:
        cursor.execute(UNWATCH)


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.soak)])
def test_limits_hold_whatever_is_killed(
    kills: int,
    postgres_process_database: ProcessDatabase,
    leases_seen: Callable[[], list[Seen]],
    start: Start,
    queues: Callable[..., None],
) -> None:
    # Given pollers with many more threads than the limit allows tasks
    limits = {"max_running": MAX_RUNNING, "rate": f"{RATE}/s", "burst": BURST}
    queues(chaos={**limits, "max_attempts": 1000, "poll_interval": "50ms", "idle_interval": "200ms"})
    pollers = [start(postgres_process_database, "--threads", "8") for _ in range(POLLERS)]

    # When one after the other is killed while it runs tasks
    for _ in range(kills):
        kill_one_that_runs(pollers, [{"payload": {"do": "count", "seconds": 0.02}}] * TASKS_PER_KILL)
        pollers.append(start(postgres_process_database, "--threads", "8"))
    until_all("COMPLETED")

    # Then at no time more ran than the limit, but as many as it, and no more started in any time than the rate
    seen = leases_seen()
    assert max(running for _, _, running, _ in seen) == MAX_RUNNING
    starts = [(begin, time, number) for begin, time, _, number in seen if number]
    for first, (begin, _, _) in enumerate(starts):
        total = 0
        for _, time, number in starts[first:]:
            total += number
            assert total <= BURST + RATE * (time - begin), f"{total} tasks in {time - begin:.3f} s"


def kill_one_that_runs(pollers: list[PollerProcess], items: list[dict[str, Any]]) -> None:
    """Give the pollers work until one is seen to run a task; kill that one, and take it from the list."""
    for poller in pollers:
        poller.ready()
    enqueue_many("chaos", items)
    running = Task.objects.filter(status="PROCESSING").values_list("poller_instance", flat=True)

    def killed() -> bool:
        for instance in running.all():
            for poller in pollers:
                if f":{poller.pid}:" in (instance or ""):
                    poller.signal(signal.SIGKILL)
                    pollers.remove(poller)
                    return True
        if not Task.objects.exclude(status="COMPLETED").exists():  # all ran while this test did not look
            enqueue_many("chaos", items)
        return False

    until(killed)


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.soak)])
def test_groups_keep_their_rate_whatever_is_killed(
    kills: int, postgres_process_database: ProcessDatabase, start: Start, queues: Callable[..., None]
) -> None:
    # Given pollers with many more threads than groups may start tasks
    limits = {"rate_per_group": "10/s", "burst_per_group": 2, "max_running_per_group": 4}
    queues(chaos={**limits, "max_attempts": 1000, "poll_interval": "50ms", "idle_interval": "200ms"})
    with connection.cursor() as cursor:
        cursor.execute(WATCH_GROUPS)
    try:
        pollers = [start(postgres_process_database, "--threads", "8") for _ in range(2)]
        items = [{"payload": {"do": "count", "seconds": 0.02}, "group": f"g{number % 3}"} for number in range(45)]

        # When one after the other is killed while it runs tasks
        for _ in range(kills):
            kill_one_that_runs(pollers, items)
            pollers.append(start(postgres_process_database, "--threads", "8"))
        until_all("COMPLETED")

        # Then no group started more tasks in any time than its rate, and all groups had their turn
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT group_key, extract(epoch FROM time)::float8, extract(epoch FROM committed)::float8"
                " FROM leases_seen ORDER BY time"
            )
            seen = list(cursor.fetchall())
    finally:
        with connection.cursor() as cursor:
            cursor.execute(UNWATCH_GROUPS)
    for group in ("g0", "g1", "g2"):
        times = [(time, committed) for key, time, committed in seen if key == group]
        assert len(times) >= 15 * kills
        for first, (begin, _) in enumerate(times):
            end = begin
            for number, (_, committed) in enumerate(times[first:], 1):
                end = max(end, committed)
                assert number <= 2 + 10 * (end - begin), f"{number} tasks of {group} in {end - begin:.3f} s"
