"""Pools of connections. Behind PgBouncer, in transaction mode, each transaction may meet another server process."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from django.core import checks
from django.db import connection, connections, transaction
from django.db.models import Count

from django_dbtaskqueue import enqueue, enqueue_many, registry
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.operations import queue_control
from django_dbtaskqueue.poller.heartbeat import STORE_METRICS_SECONDS
from tests.clock import SteppedClock
from tests.conftest import ProcessDatabase, _as_default
from tests.pgbouncer import HERE, pgbouncer, pgbouncer_program
from tests.poller.processes import SELDOM, completed, polling
from tests.support import alias_beside, minute_counts, sql, until


@pytest.fixture
def pooler(postgres_process_database: ProcessDatabase, django_db_blocker: Any, settings: Any) -> Iterator[None]:
    """``default`` goes through PgBouncer, ``direct`` past it; settings as docs/howto/deploy.md says."""
    program = pgbouncer_program()
    if program is None:
        assert os.environ.get("CI") != "true", "pgbouncer must be installed: apt-get install pgbouncer"
        pytest.skip("pgbouncer is not installed: apt-get install pgbouncer")
    address = urlsplit(postgres_process_database.url)
    with pgbouncer(program, address) as port, alias_beside("direct"):
        behind = address._replace(netloc=f"postgres:any@{HERE}:{port}").geturl()
        with _as_default(replace(postgres_process_database, url=behind), django_db_blocker):
            connections.settings["default"] |= {"DISABLE_SERVER_SIDE_CURSORS": True, "CONN_HEALTH_CHECKS": False}
            settings.DBTASKQUEUE = {"PREPARE": False, "LISTEN": {"default": "direct"}}
            yield


async def later(task: Any) -> None: ...


behind_pgbouncer = pytest.mark.usefixtures("taskqueue_registry", "pooler")


@behind_pgbouncer
def test_every_way_to_process_works_through_the_pooler() -> None:
    # The pooler's own command is known there and nowhere else
    version = psycopg.connect(**connection.get_connection_params() | {"dbname": "pgbouncer"}, autocommit=True)
    with version:
        assert version.execute("SHOW VERSION").fetchone()[0].startswith("PgBouncer")  # type: ignore[index]
    registry.register("pooled", lambda task: {"twice": 2 * task.payload["number"]})
    registry.register("pooled-atomic", lambda task: None, mode="atomic")
    registry.register("pooled-batch", lambda tasks: None, mode="atomic", batch=10)
    registry.register("pooled-async", later)
    with polling(dict.fromkeys(("pooled", "pooled-atomic", "pooled-batch", "pooled-async"), 1)):
        enqueue("pooled", "first", {"number": 1})
        enqueue_many("pooled", ({"reference": f"r-{number}", "payload": {"number": number}} for number in range(2000)))
        for queue in ("pooled-atomic", "pooled-batch", "pooled-async"):
            enqueue_many(queue, [{}] * 50)
        until(lambda: completed() == 2151)
        assert Task.objects.get(reference="r-1999").result == {"twice": 3998}
        assert list(Task.objects.values_list("attempt").annotate(number=Count("pk"))) == [(1, 2151)]
        queue_control.pause("pooled", "default", by="night shift")
        enqueue("pooled", "waiting", {"number": 1})
        assert completed() == 2151
        queue_control.resume("pooled", "default")
        until(lambda: completed() == 2152)


@behind_pgbouncer
def test_a_wake_up_comes_past_the_pooler(settings: Any) -> None:
    """A poller that would look again in an hour starts the task, for it listens on the direct alias."""
    settings.DBTASKQUEUE = settings.DBTASKQUEUE | {"DEFAULTS": SELDOM}
    registry.register("pooled", lambda task: None)
    with polling({"pooled": 1}) as poller:
        queue = poller.queues["pooled"]
        until(lambda: queue.wakes and queue.idle_pause)  # it listens, and has looked since
        with transaction.atomic():  # as another process does
            sql("INSERT INTO dbtaskqueue_task (queue_name) VALUES ('pooled')")  # which tells nobody
            sql("SELECT pg_notify('dbtaskqueue', 'pooled')")
        until(lambda: completed() == 1)


@behind_pgbouncer
def test_enqueue_notices_the_pooler_by_itself(settings: Any) -> None:
    """A site left ``PREPARE`` on, and its threads share server processes."""
    settings.DBTASKQUEUE = {"QUEUES": {"pooled": {}}, "NOTIFY": False}

    def produce(number: int) -> None:
        for _ in range(25):
            enqueue("pooled", payload=number)
        connection.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(produce, range(4)))
    assert Task.objects.count() == 100


# -- Django's pool may be smaller than a poller would like: what nobody uses goes back to it ---------------------------
@pytest.mark.parametrize(
    ("pool", "warned"),
    [({"max_size": 6}, True), (True, True), ({"min_size": 9}, False), ({"max_size": 7}, False), (False, False)],
)
def test_a_small_pool_is_warned_of(settings: Any, monkeypatch: pytest.MonkeyPatch, pool: object, warned: bool) -> None:
    settings.DBTASKQUEUE = {"THREADS": 4}
    monkeypatch.setitem(settings.DATABASES["default"]["OPTIONS"], "pool", pool)
    found = [one.msg for one in checks.run_checks(tags=["dbtaskqueue"]) if one.id == "dbtaskqueue.W006"]
    assert len(found) == warned and all("up to 7 connections of the pool of 'default'" in one for one in found)


@pytest.fixture
def pooled(postgres_process_database: ProcessDatabase, django_db_blocker: Any) -> Iterator[None]:
    """The default database gives out two connections at a time."""
    with _as_default(postgres_process_database, django_db_blocker):
        default = connections.settings["default"]
        default["OPTIONS"] |= {"pool": {"min_size": 1, "max_size": 2, "timeout": 30}}
        default["CONN_MAX_AGE"] = 0
        yield
        connections["default"].close_pool()


def free() -> bool:
    connections["default"].close()
    return True


def test_a_pool_of_two_serves_a_poller(pooled: None, taskqueue_registry: None, clock: SteppedClock) -> None:
    async def count_async(task: Lease) -> int:
        return await Task.objects.acount()

    registry.register("letters", lambda task: Task.objects.count())
    registry.register("parcels", count_async)
    enqueue_many("parcels", [{}] * 9)
    with polling({"letters": 1, "parcels": 1}, threads=3):
        until(lambda: free() and completed() == 9)
        clock.advance(STORE_METRICS_SECONDS)
        until(lambda: free() and minute_counts("outcome").exists())
        # Those who used a connection for a moment, and are idle, leave both to the others
        enqueue_many("letters", [{}] * 20)
        until(lambda: free() and completed() == 29)
