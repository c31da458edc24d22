"""What pollers count, how it is stored and merged, and what pages make of it."""

import json
import re
from dataclasses import fields
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import Sum
from django.utils import timezone

from django_dbtaskqueue import Complete, CompleteDelete, Fail, Poison, Reenqueue, enqueue_many, registry
from django_dbtaskqueue.core.failure_signature import normalised, signature_of
from django_dbtaskqueue.core.lease import LEASED, Lease
from django_dbtaskqueue.core.outcomes import Failed
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow.usage import roll_up
from django_dbtaskqueue.metrics import Collector, class_of, upper
from django_dbtaskqueue.models import Attempt, FailureGroup, Task
from django_dbtaskqueue.operations.queue_stats import overview, quantile, series, stats_of_groups
from django_dbtaskqueue.poller.heartbeat import rescue_due
from django_dbtaskqueue.poller.loop import Poller
from tests.conformance.test_settle import Hostile
from tests.conftest import ProcessDatabase
from tests.factories import make_task
from tests.poller.processes import polling
from tests.support import minute_counts, until, with_settings

both = pytest.mark.django_db(databases=["default", "sqlite"])
HOUR = timedelta(hours=1)
_settings = with_settings("taskqueue_registry", QUEUES={"counted": {"retry": "fixed:1h"}})


def ended(settlement: Any, *, lost: str = "", attempt: int = 1) -> Any:
    """An attempt that ended after ten milliseconds and had waited for two seconds, as a settler accounts it."""
    ready = timezone.now()
    row: dict[str, Any] = dict.fromkeys([field.name for field in fields(Lease)][: len(LEASED)])
    row |= {"queue": "counted", "attempt": attempt, "max_attempts": 2}
    row |= {"ready_text": str(ready), "start_text": str(ready + timedelta(seconds=2))}
    lease = Lease(**row, port=None, lost=lost)
    return lease, lease.result_of(settlement), 0.01


OUTCOMES: dict[str, Any] = {"completed": Complete(), "deleted": CompleteDelete(), "poisoned": Poison("no")}
OUTCOMES |= {"retried": Failed(Fail("no"), timedelta(seconds=1)), "reenqueued": Reenqueue(HOUR)}


@both
def test_a_task_that_is_rescued_is_counted_as_failed(alias: str) -> None:
    spent = {"attempt": 5, "max_attempts": 5, "next_process_time": -timedelta(seconds=1)}
    make_task("PROCESSING", queue="counted", using=alias, **spent)
    metrics = Collector()
    rescue_due(Session.on(alias), Poller({"counted": 1}, using=alias).queues["counted"], -1.0, metrics)
    metrics.store(alias)
    assert dict(minute_counts("outcome", alias).values_list("name", "count")) == {"failed": 1}


@both
def test_each_outcome_is_counted_under_its_name_and_sampled_durations_speak_for_all(alias: str) -> None:
    metrics = Collector()
    for outcome in OUTCOMES.values():
        metrics.add(alias, "counted", [ended(outcome)] * 100)
    metrics.add(alias, "counted", [ended(Failed(Fail("no")), attempt=2), ended(Complete(), lost="complete")])
    metrics.store(alias)
    metrics.store(alias)  # nothing is stored twice
    counts = dict(minute_counts("outcome", alias).values_list("name", "count"))
    assert counts == {**dict.fromkeys(OUTCOMES, 100), "failed": 1, "lost": 1}
    for row in minute_counts("outcome", alias).filter(name__in=OUTCOMES):
        assert sum(row.runs.values()) == sum(row.waits.values()) == 100
        assert (round(row.run_seconds, 6), round(row.wait_seconds, 6)) == (1.0, 200.0)
    (point,) = [point for point in series(alias, HOUR) if point.total]
    assert point.outcomes == counts
    run, wait = point.run.p95, point.wait.p50
    assert run and wait and 0.007 < run < 0.014 and 1.5 < wait < 2.7
    assert series(alias, HOUR, "another")[-1].total == 0


@both
def test_merging_changes_no_sum(alias: str) -> None:
    now = timezone.now().replace(second=0, microsecond=0)
    metrics, failures = minute_counts("outcome", alias), minute_counts("failure", alias)
    durations = {"run_seconds": 0.5, "runs": {"3": 1, "4": 1}, "waits": {"1": 2}}
    for minutes in (5, 5, 6, 300, 301, 302, 303, 60 * 50, 60 * 50 + 25):
        minute = now - timedelta(minutes=minutes)
        for outcome in ("completed", "failed"):
            metrics.create(kind="outcome", queue="counted", minute=minute, name=outcome, count=2, **durations)
        failures.create(kind="failure", name="f", minute=minute, count=3)
    sums = {"count": Sum("count"), "seconds": Sum("run_seconds")}
    before, rows = metrics.aggregate(**sums), metrics.count()
    assert roll_up(Session.on(alias)) > 0 and roll_up(Session.on(alias)) == 0
    assert metrics.aggregate(**sums) == before and metrics.count() < rows
    assert failures.aggregate(n=Sum("count"))["n"] == 27
    histograms = metrics.values_list("count", "runs", "waits")
    assert all(sum(runs.values()) == sum(waits.values()) == count for count, runs, waits in histograms)
    assert sum(point.total for point in series(alias, timedelta(days=4))) == before["count"]


@both
def test_counts_that_cannot_be_added_up_delay_no_others(alias: str, caplog: pytest.LogCaptureFixture) -> None:
    minute, metrics = timezone.now() - timedelta(minutes=30), minute_counts("outcome", alias)
    for minutes, count in ((0, 2**63 - 1), (0, 1), (5, 1), (5, 1)):
        at = minute + timedelta(minutes=minutes)
        metrics.create(kind="outcome", queue="q", minute=at, name="completed", count=count)
    assert roll_up(Session.on(alias)) == 1
    assert sorted(metrics.values_list("count", flat=True)) == [1, 2, 2**63 - 1]
    assert "are not rolled up" in caplog.text


def test_a_poller_stores_what_it_did_and_groups_its_failures(process_database: ProcessDatabase, settings: Any) -> None:
    settings.DBTASKQUEUE |= {"RELEASE": "shop@1"}

    def work(task: Lease) -> None:
        if task.payload % 2:
            raise LookupError(f"no parcel {task.payload} in '{task.reference}'")

    registry.register("counted", work)
    enqueue_many("counted", ({"reference": f"r{n}", "payload": n} for n in range(20)))
    with polling({"counted": 1}) as poller:
        until(lambda: poller.counts.finished == 20)
    sums = minute_counts("outcome").values_list("name").annotate(n=Sum("count"))
    assert dict(sums) == {"completed": 10, "retried": 10}
    group = FailureGroup.objects.get()
    assert (group.queue, group.error_type) == ("counted", "builtins.LookupError")
    assert group.message == "no parcel # in '…'" and group.frame.endswith("work")
    assert re.fullmatch(r"no parcel \d+ in 'r\d+'", group.newest) and group.release == "shop@1"
    (figures,) = stats_of_groups([group.fingerprint], "default")
    assert (figures.failed["1h"], figures.failed["7d"]) == (10, 10)
    assert figures.open.number == 0  # they wait for their next attempt
    for rows in (Attempt.objects, Task.objects.filter(attempt=1, status="CREATED")):
        assert set(rows.values_list("fingerprint", flat=True)) == {group.fingerprint}
    (row,) = [row for row in overview().queues if row.queue == "counted"]
    assert (row.failed, row.statuses["COMPLETED"].number, row.statuses["CREATED"].number) == (10, 10, 10)
    assert row.rate_out == pytest.approx(10 / 300)


def failing(error: Exception) -> Exception:
    """Return the error as a processor of ours raises it, through code that is not ours."""
    with pytest.raises(type(error)) as raised:
        json.loads("{}", object_hook=lambda _: (_ for _ in ()).throw(error))
    return raised.value


def test_the_same_failure_of_other_tasks_has_the_same_fingerprint() -> None:
    one, other = failing(ValueError("row 17 of 'a.csv' at 0xBEEF")), failing(ValueError("row 9 of 'b.csv' at 0xF00D"))
    same = signature_of(one, "q")
    assert same[:4] == signature_of(other, "q")[:4] and same.frame.startswith("tests.poller.test_metrics:")
    different = (one, "p"), (failing(KeyError("row")), "q"), (ValueError("row 17"), "q")
    assert len({same.fingerprint, *(signature_of(*kind).fingerprint for kind in different)}) == 4
    # Of any error one can be taken
    for error in (Hostile(), "", "x" * 10_000, ValueError("\ud800\x00")):
        kind = signature_of(error, "q")
        assert len(kind.fingerprint) == 40
        assert len(kind.message) <= 500 and "\x00" not in kind.message


def test_messages_without_what_varies() -> None:
    for message, shown in (
        ("user 1234 is gone\nand more", "user # is gone"),
        ("id 7d9e3b4e-4d5c-4a2e-9f10-0123456789ab", "id #"),
        ("at 2026-11-20 10:00:01", "at # #"),
        ("facade of deadbeef", "facade of deadbeef"),
        ("", ""),
    ):
        assert normalised(message) == shown


@both
def test_open_tasks_of_a_group_are_counted(alias: str) -> None:
    fingerprint, now = "f" * 40, timezone.now()
    FailureGroup.objects.using(alias).create(fingerprint=fingerprint, queue="parcels", first_seen=now, last_seen=now)
    for status in ("ERROR", "ERROR", "POISON", "COMPLETED"):
        make_task(status, fingerprint=fingerprint, using=alias)
    (figures,) = stats_of_groups([fingerprint], alias)
    assert (figures.open.number, figures.open.more, stats_of_groups([], alias)) == (3, False, [])


def test_classes_cover_every_duration_and_quantiles_stay_within_theirs() -> None:
    for seconds in (0.0, -1.0, 0.0001, 0.004, 1.0, 59.9, 86_400.0, 1e12):
        number = class_of(seconds)
        assert seconds <= upper(number) * 1.0001 or number == class_of(1e12)
        assert quantile({number: 5}, 1.0) == pytest.approx(upper(number))
    counts = {class_of(0.01): 90, class_of(1.0): 10}
    half, most = quantile(counts, 0.5), quantile(counts, 0.99)
    assert half and most and half < 0.014 and 0.7 < most < 1.4
    assert quantile({}, 0.5) is None
