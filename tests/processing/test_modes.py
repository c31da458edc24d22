"""``separate``: at least once. ``atomic``: the processor's writes and its outcome are one transaction."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connections, transaction
from django.test import override_settings

from django_dbtaskqueue import Complete, Fail, LeaseLost, Reenqueue, enqueue, processor, registry
from django_dbtaskqueue.core.lease import Lease
from tests.processing.conftest import QUEUE, Site, both
from tests.support import PATIENCE, until
from tests.testapp.models import Booking

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "sqlite"])
ONCE: dict[str, Any] = {"max_attempts": 1}


def book(task: Lease) -> None:
    Booking.objects.using(task.port.alias).create(reference=task.reference or "none")


def booked(site: Site) -> list[str]:
    return list(Booking.objects.using(site.alias).order_by("reference").values_list("reference", flat=True))


@both
@pytest.mark.parametrize(("mode", "left"), [("separate", ["a"]), ("atomic", [])])
def test_what_an_exception_leaves_behind(site: Site, mode: str, left: list[str]) -> None:
    @processor(QUEUE, mode=mode, **ONCE)
    def crash(task: Lease) -> None:
        book(task)
        raise RuntimeError("after the write")

    task = site.enqueue(reference="a")
    site.run()
    assert booked(site) == left
    assert site.task(task).status == "ERROR"
    assert [attempt.message for attempt in site.attempts(task)] == ["after the write"]


@both
def test_atomic_outcome_and_writes_become_visible_together(site: Site) -> None:
    at_the_end, go_on = threading.Event(), threading.Event()

    @processor(QUEUE, mode="atomic")
    def write(task: Lease) -> str:
        book(task)
        at_the_end.set()
        go_on.wait(PATIENCE)
        return "done"

    task = site.enqueue(reference="a")
    with site.poller():
        # Given a processor that has written and not returned
        assert at_the_end.wait(PATIENCE)
        # Then the checkout is committed and nothing else is
        assert site.task(task).status == "PROCESSING"
        assert booked(site) == []
        go_on.set()
    assert (site.task(task).status, site.task(task).result, booked(site)) == ("COMPLETED", "done", ["a"])


@both
def test_atomic_a_returned_outcome_commits_with_the_writes_and_one_without_due_time_does_not(site: Site) -> None:
    outcomes = {"fail": Fail("no", retry=False), "complete": Complete(1), "reenqueue": Reenqueue()}

    @processor(QUEUE, mode="atomic", **ONCE)
    def write(task: Lease) -> Any:
        book(task)
        return outcomes[str(task.reference)]

    tasks = [site.enqueue(reference=name) for name in outcomes]
    site.run()
    assert [site.task(task).status for task in tasks] == ["ERROR", "COMPLETED", "ERROR"]
    assert booked(site) == ["complete", "fail"]


def test_atomic_a_lease_lost_meanwhile_rolls_the_writes_back(site: Site) -> None:
    runs: list[int] = []

    @processor(QUEUE, mode="atomic")
    def write(task: Lease) -> None:
        runs.append(task.total_attempt)
        book(task)
        if len(runs) == 1:  # an operator revokes the lease; SQLite lets nobody else write meanwhile
            done = threading.Thread(target=lambda: (site.tasks().release_all(), connections.close_all()))
            done.start()
            done.join(PATIENCE)

    task = site.enqueue(reference="a")
    poller = site.run()
    assert runs == [1, 2]
    assert (site.task(task).status, booked(site)) == ("COMPLETED", ["a"])
    assert poller.counts.lost == 1


@both
def test_atomic_writes_on_the_queues_own_database(site: Site) -> None:
    inside: list[bool] = []

    @processor(QUEUE, mode="atomic")
    def look(task: Lease) -> None:
        inside.extend(connections[alias].in_atomic_block for alias in ("default", "sqlite"))

    site.enqueue()
    site.run()
    assert inside == [site.alias == "default", site.alias == "sqlite"]


LEFT_OPEN: dict[str, Callable[[str], Any]] = {
    "a transaction": lambda alias: transaction.atomic(using=alias).__enter__(),
    "no autocommit": lambda alias: transaction.set_autocommit(False, using=alias),
}


@both
@pytest.mark.parametrize("how", LEFT_OPEN)
def test_separate_what_a_processor_left_open_reaches_no_other_task(site: Site, how: str) -> None:
    """Given a processor that leaves its connection in a broken transaction, then the next task has one of its own."""

    @processor(QUEUE, **ONCE)
    def leave_open(task: Lease) -> None:
        if task.reference == "left":
            LEFT_OPEN[how](site.alias)
            book(task)
            with suppress(DatabaseError), connections[site.alias].cursor() as cursor:
                cursor.execute("SELECT 1 FROM nowhere")
        else:
            book(task)

    tasks = [site.enqueue(reference=reference) for reference in ("left", "next")]
    site.run(threads=1)
    assert [site.task(task).status for task in tasks] == ["COMPLETED", "COMPLETED"]
    assert booked(site) == ["next"]


@both
def test_separate_settling_in_the_processors_own_transaction(site: Site) -> None:
    @processor(QUEUE, **ONCE)
    def settle_it(task: Lease) -> None:
        with transaction.atomic(using=site.alias):
            book(task)
            task.complete("own")

    task = site.enqueue(reference="a")
    site.run()
    assert (site.task(task).result, booked(site)) == ("own", ["a"])


# -- what cannot work --------------------------------------------------------------------------------------------------


def errors() -> list[str]:
    return [f"{error.id} {error.msg}" for error in checks.run_checks(tags=["dbtaskqueue"])]


def test_an_atomic_processor_of_another_database_is_a_system_check_error() -> None:
    processor(QUEUE, mode="atomic", using="sqlite")(book)
    (error,) = errors()
    assert error.startswith("dbtaskqueue.E004")
    assert "book" in error and "'sqlite'" in error and "'default'" in error


def test_other_combinations_pass_the_check() -> None:
    for mode, using in (("separate", "sqlite"), ("atomic", "default"), ("atomic", None)):
        registry.unregister(QUEUE)
        processor(QUEUE, mode=mode, using=using)(book)
        assert errors() == []


def test_an_atomic_processor_of_the_queues_database_passes_the_check() -> None:
    with override_settings(DBTASKQUEUE={"QUEUES": {QUEUE: {"database": "sqlite"}}}):
        processor(QUEUE, mode="atomic", using="sqlite")(book)
        assert errors() == []
        enqueue(QUEUE, "a")


def test_what_is_no_mode_is_refused() -> None:
    async def process(task: Lease) -> None: ...

    with pytest.raises(ImproperlyConfigured, match="no async atomic"):
        processor(QUEUE, mode="atomic")(process)
    with pytest.raises(ImproperlyConfigured, match="'separate' or 'atomic'"):
        processor(QUEUE, mode="external")(book)


@both
def test_atomic_an_outcome_rolled_back_with_a_savepoint_is_settled_by_what_is_returned(site: Site) -> None:
    @processor(QUEUE, mode="atomic", **ONCE)
    def change_of_mind(task: Lease) -> str:
        book(task)
        with suppress(ValueError), transaction.atomic(using=task.port.alias):
            task.complete("first")
            raise ValueError("not this way")
        return "second"

    task = site.enqueue(reference="a")
    site.run()
    row = site.task(task)
    assert (row.status, row.result, row.total_attempt) == ("COMPLETED", "second", 1)
    assert booked(site) == ["a"]


@both
def test_atomic_a_lost_lease_that_is_hushed_up_rolls_the_writes_back_all_the_same(site: Site) -> None:
    @processor(QUEUE, mode="atomic", **ONCE)
    def hush_up(task: Lease) -> None:
        book(task)
        task.total_attempt -= 1  # as if somebody else held it by now
        with suppress(LeaseLost):
            task.complete()

    site.enqueue(reference="a")
    assert site.drain().lost == 1
    assert booked(site) == []


def test_a_processor_that_hangs_with_its_row_locked_stops_nobody_else(site: Site) -> None:
    """Given an atomic processor past its timeout that keeps its row locked, then others are settled meanwhile."""
    at_work, go_on = threading.Event(), threading.Event()

    @processor(QUEUE, mode="atomic", timeout=timedelta(milliseconds=50), **ONCE)
    def hang(task: Lease) -> None:
        if task.reference == "hangs":
            task.report_progress(0.5)
            at_work.set()
            go_on.wait(PATIENCE)

    hanging = site.enqueue(reference="hangs")
    with site.poller(threads=4) as poller:
        assert at_work.wait(PATIENCE)
        others = [site.enqueue(reference=str(number)) for number in range(20)]
        until(lambda: poller.overdue() or site.tasks(status="COMPLETED").count() == len(others))
        assert site.task(hanging).status == "PROCESSING"
        go_on.set()
    assert site.task(hanging).status in ("COMPLETED", "ERROR")


@both
def test_a_context_that_is_no_object_ends_its_task_alone(site: Site) -> None:
    processor(QUEUE)(lambda task: None)
    with connections[site.alias].cursor() as cursor:
        for context in ("[1]", '"x"', "1"):
            cursor.execute("INSERT INTO dbtaskqueue_task (queue_name, context) VALUES (%s, %s)", [QUEUE, context])
    good = site.enqueue()
    site.run()
    assert site.task(good).status == "COMPLETED"
    bad = site.tasks(status="ERROR")
    assert ["context of a task is a JSON object" in str(task.process_result) for task in bad] == [True] * 3
