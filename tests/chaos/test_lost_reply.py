"""The connection breaks before a statement arrives, or before its answer does: nothing is lost, nothing done twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from django.db import connections, transaction
from django.db.utils import OperationalError

from django_dbtaskqueue import enqueue
from django_dbtaskqueue.models import Attempt, Task
from example_project.database import database_from_url
from tests.chaos.conftest import Start
from tests.chaos.processes import audit, until_all
from tests.chaos.proxy import Loss, Proxy, proxied
from tests.conftest import ProcessDatabase
from tests.patience import SLOWNESS
from tests.poller.processes import lines
from tests.support import until
from tests.testapp.models import Booking

LOSSES: list[Loss] = ["request", "reply"]
CHECKOUT = "SET status = 'PROCESSING'"
COMPLETE = "SET status = 'COMPLETED'"
FAILURE = 'INSERT INTO "dbtaskqueue_attempt"'
RENEWAL = "SET next_process_time ="


@pytest.fixture
def proxy(postgres_process_database: ProcessDatabase) -> Iterator[Proxy]:
    with proxied(postgres_process_database.url) as found:
        yield found


@pytest.fixture
def far_database(postgres_process_database: ProcessDatabase, proxy: Proxy) -> ProcessDatabase:
    """The database as it is reached through the proxy."""
    return replace(postgres_process_database, url=proxy.url)


@pytest.fixture
def far_alias(far_database: ProcessDatabase) -> Iterator[str]:
    """An alias for it in this process."""
    connections.settings["far"] = connections.configure_settings({"default": database_from_url(far_database.url)})[
        "default"
    ]
    yield "far"
    connections["far"].close()
    del connections["far"]
    del connections.settings["far"]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("statement", ["INSERT", "COMMIT"])
def test_enqueue(statement: str, loss: Loss, far_alias: str, proxy: Proxy, queues: Callable[..., None]) -> None:
    # Given a caller whose connection breaks while it enqueues
    connections[far_alias].ensure_connection()
    proxy.arm(statement, loss)
    with pytest.raises(OperationalError):
        file("A", far_alias, in_transaction=statement == "COMMIT")
    connections[far_alias].close()
    assert proxy.struck.is_set()

    # Then the task is there exactly if the server had it all
    assert Task.objects.count() == (loss == "reply")

    # ... and asking again, under the same reference, is safe whichever it was
    task = file("A", far_alias, in_transaction=statement == "COMMIT")
    assert [row.pk for row in Task.objects.all()] == [task.pk]


def file(reference: str, alias: str, *, in_transaction: bool) -> Task:
    if not in_transaction:
        return enqueue("chaos", reference, on_duplicate="ignore", using=alias)
    with transaction.atomic(using=alias):
        return enqueue("chaos", reference, on_duplicate="ignore", using=alias)


@pytest.mark.parametrize(
    ("statement", "loss", "do", "starts", "checkouts"),
    [
        (CHECKOUT, "request", "ok", 1, 1),
        (CHECKOUT, "reply", "ok", 1, 2),  # nobody knew of the lease, so it ran out
        (COMPLETE, "request", "ok", 1, 1),
        (COMPLETE, "reply", "ok", 1, 1),
        (FAILURE, "request", "raise", 2, 2),
        (FAILURE, "reply", "raise", 2, 2),
        (RENEWAL, "request", "sleep", 1, 1),
        (RENEWAL, "reply", "sleep", 1, 1),
    ],
)
def test_a_pollers_statement(
    statement: str,
    loss: Loss,
    do: str,
    starts: int,
    checkouts: int,
    far_database: ProcessDatabase,
    proxy: Proxy,
    start: Start,
    queues: Callable[..., None],
    tmp_path: Path,
) -> None:
    # Given a poller whose connection breaks at a statement
    queues(
        lease=f"{int(1500 * SLOWNESS)}ms"
    )  # a poller that stalls for longer would lose its lease, and start the task again
    watched, mark = audit(), tmp_path / "mark"
    proxy.arm(statement, loss)
    enqueue("chaos", None, {"do": do, "until_attempt": 2, "seconds": 2.25 * SLOWNESS, "mark": str(mark)})
    poller = start(far_database)

    # Then the task is done all the same, and was not started once too often
    until_all("COMPLETED")
    assert proxy.struck.is_set()
    assert len(lines(mark)) == starts
    assert Task.objects.get().total_attempt == checkouts
    assert Attempt.objects.count() == (do == "raise"), "an attempt is recorded once"
    assert watched.problems() == []
    assert "gone" not in poller.log, "its outcome was stored, not lost"
    poller.ready().end()


@pytest.mark.parametrize("keep", ["history", "delete"])
def test_an_outcome_that_removes_its_task(
    keep: str, far_database: ProcessDatabase, proxy: Proxy, start: Start, queues: Callable[..., None], tmp_path: Path
) -> None:
    # Given a poller whose connection breaks after the outcome was committed
    queues(keep=keep)
    proxy.arm("DELETE FROM", "reply")
    enqueue("chaos", None, {"do": "ok", "mark": str(tmp_path / "mark")})
    poller = start(far_database)

    # Then it does not count as lost
    until(lambda: not Task.objects.exists())
    poller.ready()
    enqueue("chaos", None, {"do": "ok"})
    until(lambda: not Task.objects.exists())
    poller.end()
    assert proxy.struck.is_set()
    assert "gone" not in poller.log
    assert "2 finished, 0 failed, 0 lost" in poller.log
    assert len(lines(tmp_path / "mark")) == 1


@pytest.mark.parametrize(("loss", "starts"), [("request", 2), ("reply", 1)])
def test_the_commit_of_an_atomic_task(
    loss: Loss,
    starts: int,
    far_database: ProcessDatabase,
    proxy: Proxy,
    start: Start,
    queues: Callable[..., None],
    tmp_path: Path,
) -> None:
    # Given a processor's transaction, with its effect and its outcome, that breaks at its commit
    mark = tmp_path / "mark"
    proxy.arm("COMMIT", loss, after='UPDATE "testapp_booking"')
    with transaction.atomic():
        Booking.objects.create(reference="A")
        enqueue("ledger", "A", {"do": "bump", "mark": str(mark)})
    poller = start(far_database)

    # Then it took effect exactly once, and a commit that nobody heard of is no failure
    until_all("COMPLETED")
    assert proxy.struck.is_set()
    assert Booking.objects.get().amount == 1
    assert len(lines(mark)) == starts
    assert Attempt.objects.count() == starts - 1
    assert Task.objects.get().total_attempt == starts
    assert ("failed, attempt 1" in poller.log) == (loss == "request"), "what is reported is what is stored"
    poller.ready().end()
