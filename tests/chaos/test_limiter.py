"""Pollers that are killed all the time never run, nor start, more tasks of a queue or a group than its limits allow."""

import signal
from collections.abc import Sequence
from typing import Any

import pytest
from django.db import connection

from django_dbtaskqueue import enqueue_many
from django_dbtaskqueue.models import Task
from tests.chaos.processes import Configure, PollerProcess, Start, expire_orphans, until_all
from tests.support import until

POLLERS = 3
POLLS = {"max_attempts": 1000, "poll_interval": "50ms", "idle_interval": "200ms"}
MAX_RUNNING, RATE, BURST = 5, 40, 8  # of the queue chaos
GROUPS, GROUP_RATE, GROUP_BURST = ("g0", "g1", "g2"), 10, 2  # of the queue ledger
QUEUE_TASKS, GROUP_TASKS = 60, 12  # of chaos, and of each group, for each kill
# In the transaction of each change: its begin, how many leases are alive, and how many tasks have just started. A
# token is taken after the begin, and before the task starts.
WATCH_QUEUE = """
CREATE TABLE queue_seen (id serial, begin timestamptz, time timestamptz, running int, started int);
CREATE FUNCTION see_queue() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO queue_seen (begin, time, running, started) SELECT transaction_timestamp(), statement_timestamp(),
        (SELECT count(*) FROM dbtaskqueue_task WHERE queue_name = 'chaos' AND status = 'PROCESSING'
            AND next_process_time > statement_timestamp()),
        (SELECT count(*) FROM new_rows WHERE queue_name = 'chaos' AND start_time = statement_timestamp());
    RETURN NULL;
END $$;
CREATE TRIGGER see_queue AFTER UPDATE ON dbtaskqueue_task REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION see_queue();
"""
# In the transaction of each checkout: which tasks started, without those that were put off in the same transaction.
# A token is taken after the row is, and before the commit.
WATCH_GROUPS = """
CREATE TABLE groups_seen (
    number serial, time timestamptz, committed timestamptz, id bigint, total_attempt bigint, group_key text
);
CREATE FUNCTION see_commit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    UPDATE groups_seen SET committed = clock_timestamp() WHERE number = NEW.number;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER see_commit AFTER INSERT ON groups_seen DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION see_commit();
CREATE FUNCTION see_groups() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO groups_seen (time, id, total_attempt, group_key)
        SELECT clock_timestamp(), id, total_attempt, group_key FROM new_rows
        WHERE group_key IS NOT NULL AND status = 'PROCESSING' AND start_time = statement_timestamp();
    DELETE FROM groups_seen AS s USING new_rows AS n WHERE s.id = n.id AND s.total_attempt = n.total_attempt
        AND n.ready_time > statement_timestamp() AND s.xmin = pg_current_xact_id()::xid;
    RETURN NULL;
END $$;
CREATE TRIGGER see_groups AFTER UPDATE ON dbtaskqueue_task REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION see_groups();
"""
SEEN = "SELECT extract(epoch FROM begin), extract(epoch FROM time), running, started FROM queue_seen ORDER BY time, id"
STARTS = """
SELECT extract(epoch FROM time), extract(epoch FROM committed), 1 FROM groups_seen WHERE group_key = '{}' ORDER BY time
"""


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.soak)])
def test_limits_hold_whatever_is_killed(kills: int, start: Start, queues: Configure) -> None:
    of_groups = {"rate_per_group": f"{GROUP_RATE}/s", "burst_per_group": GROUP_BURST, "max_running_per_group": 4}
    queues(chaos={**POLLS, "max_running": MAX_RUNNING, "rate": f"{RATE}/s", "burst": BURST}, ledger=POLLS | of_groups)
    ask(WATCH_QUEUE)
    ask(WATCH_GROUPS)
    pollers = [start("--threads", "8") for _ in range(POLLERS)]
    for _ in range(kills):
        kill_one_that_runs(pollers)
        pollers.append(start("--threads", "8"))
    until_all("COMPLETED")

    # Then at no time more of the queue ran than the limit, but as many as it
    seen = ask(SEEN)
    assert max(running for _, _, running, _ in seen) == MAX_RUNNING
    assert_rate([(begin, time, started) for begin, time, _, started in seen if started], RATE, BURST)
    for group in GROUPS:
        starts = ask(STARTS.format(group))
        assert len(starts) >= GROUP_TASKS * kills
        assert_rate(starts, GROUP_RATE, GROUP_BURST)


def assert_rate(starts: Sequence[tuple[Any, ...]], rate: int, burst: int) -> None:
    """Each start is the earliest and the latest time of it, and a number of tasks."""
    for first, (begin, _, _) in enumerate(starts):
        total, end = 0, begin
        for _, latest, number in starts[first:]:
            total, end = total + number, max(end, latest)
            assert total <= burst + rate * (end - begin), f"{total} tasks in {end - begin:.3f} s"


def kill_one_that_runs(pollers: list[PollerProcess]) -> None:
    """Give the pollers work until one is seen to run a task; kill that one, and take it from the list."""
    for poller in pollers:
        poller.ready()
    payload = {"do": "count", "seconds": 0.02}
    enqueue_many("ledger", [{"payload": payload, "group": group} for group in GROUPS] * GROUP_TASKS)
    enqueue_many("chaos", [{"payload": payload}] * QUEUE_TASKS)
    running = Task.objects.filter(status="PROCESSING").values_list("poller_instance", flat=True)

    def killed() -> bool:
        expire_orphans()  # they count as running
        for instance in running.all():
            for poller in pollers:
                if f":{poller.pid}:" in (instance or ""):
                    poller.signal(signal.SIGKILL)
                    pollers.remove(poller)
                    return True
        if not Task.objects.exclude(status="COMPLETED").exists():  # all ran while this test did not look
            enqueue_many("chaos", [{"payload": payload}] * QUEUE_TASKS)
        return False

    until(killed)


def ask(sql: str) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(sql)
        return list(cursor.fetchall()) if cursor.description else []
