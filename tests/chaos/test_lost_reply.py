"""The connection breaks before a statement arrives, or before its answer does: nothing is lost, nothing done twice."""

from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from django.db import connections, transaction
from django.db.utils import OperationalError

from django_dbtaskqueue import enqueue
from django_dbtaskqueue.models import Attempt, Task
from example_project.database import database_from_url
from tests.chaos import ATOMIC
from tests.chaos.processes import Configure, Start, until_all
from tests.poller.processes import lines
from tests.proxy import Loss, Proxy
from tests.support import alias_beside, until
from tests.testapp.models import Booking


def test_enqueue(proxy: Proxy, queues: Configure) -> None:
    losses: list[Loss] = ["request", "reply"]
    with alias_beside("far", **database_from_url(proxy.url)) as far:
        for statement, loss in product(['INSERT INTO "dbtaskqueue_task"', "COMMIT"], losses):
            reference = f"{loss} of {statement}"

            def file(reference: str = reference, in_transaction: bool = statement == "COMMIT") -> Task:
                with transaction.atomic(using=far) if in_transaction else nullcontext():
                    return enqueue("chaos", reference, on_duplicate="ignore", using=far)

            connections[far].ensure_connection()
            # The thread that stores counts commits, too.
            proxy.arm(statement, loss, after='INSERT INTO "dbtaskqueue_task"' if statement == "COMMIT" else "")
            with pytest.raises(OperationalError):
                file()
            connections[far].close()
            # Then the task is there exactly if the server had it all, and asking again is safe whichever it was
            rows = Task.objects.filter(reference=reference)
            assert rows.count() == (loss == "reply"), reference
            task = file()
            assert [row.pk for row in rows.all()] == [task.pk]


class Case(NamedTuple):
    """A statement of a poller that breaks, and how often its task is then started and checked out."""

    statement: str
    loss: Loss
    starts: int = 1
    checkouts: int = 1
    do: str = "ok"
    queue: str = "chaos"
    after: str = ""


HISTORY, DELETED, RENEWED = "alone0", "alone1", "alone2"  # queues with settings of their own
CHECKOUT, COMPLETE, REMOVE = "SET status = 'PROCESSING'", "SET status = 'COMPLETED'", "DELETE FROM"
FAILURE, RENEWAL = 'INSERT INTO "dbtaskqueue_attempt"', "SET next_process_time ="
CASES = (
    Case(CHECKOUT, "request"),
    Case(CHECKOUT, "reply", checkouts=2),  # of which nobody knew, so it was given back
    Case(COMPLETE, "request"),
    Case(COMPLETE, "reply"),
    Case(FAILURE, "request", starts=2, checkouts=2, do="raise"),
    Case(FAILURE, "reply", starts=2, checkouts=2, do="raise"),
    Case(RENEWAL, "request", do="hold", queue=RENEWED),
    Case(RENEWAL, "reply", do="hold", queue=RENEWED),
    Case(REMOVE, "reply", queue=HISTORY),
    Case(REMOVE, "reply", queue=DELETED),
    # The processor's transaction, with its effect and its outcome: a commit that nobody heard of is no failure.
    Case("COMMIT", "request", starts=2, checkouts=2, do="bump", queue="ledger", after='UPDATE "testapp_booking"'),
    *(Case("COMMIT", "reply", do="bump", queue=queue, after='UPDATE "testapp_booking"') for queue in ATOMIC),
)


def test_a_pollers_statements(audited: None, proxy: Proxy, start: Start, queues: Configure, tmp_path: Path) -> None:
    """A poller's connection breaks at one statement after the other. What is done at last was done once."""
    leaves = dict.fromkeys((HISTORY, "moved"), "history") | dict.fromkeys((DELETED, "dropped"), "delete")
    queues(**{name: {"keep": keep} for name, keep in leaves.items()}, **{RENEWED: {"lease": "6s"}})
    poller = start(queue=f"chaos,ledger,{RENEWED},{','.join(leaves)}", url=proxy.url).ready()
    for number, case in enumerate(CASES):
        mark, gate = tmp_path / f"mark{number}", tmp_path / f"gate{number}"
        proxy.struck.clear()
        proxy.arm(case.statement, case.loss, after=case.after)
        with transaction.atomic():
            Booking.objects.create(reference=str(number))
            payload: dict[str, Any] = {"do": case.do, "until_attempt": 2, "until": str(gate), "mark": str(mark)}
            task = enqueue(case.queue, str(number), payload)
        until(proxy.struck.is_set)
        if case.statement == RENEWAL:  # then a later one works
            lease_until = Task.objects.get(pk=task.pk).next_process_time
            until(Task.objects.filter(pk=task.pk, next_process_time__gt=lease_until).exists)
            gate.touch()
        if case.queue in leaves:
            until(lambda task=task: not Task.objects.filter(pk=task.pk).exists())
        else:
            until_all("COMPLETED", pk=task.pk)
            assert Task.objects.get(pk=task.pk).total_attempt == case.checkouts, case
        assert len(lines(mark)) == case.starts, case
        assert Attempt.objects.filter(task_id=task.pk).count() == case.starts - 1, case
        assert Booking.objects.get(reference=str(number)).amount == (case.do == "bump"), case
    assert "gone" not in poller.log, "outcomes were stored, not lost"
    poller.ready().stop()
    failed = sum(case.starts - 1 for case in CASES)
    assert poller.log.count("failed, attempt 1") == failed, "what is reported is what is stored"
    assert f"Stopped: {len(CASES)} completed, 0 failed, 0 lost in" in poller.log
