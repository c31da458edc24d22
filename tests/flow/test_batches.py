"""Batches and workflows: what joins, the callback, progress, cancelling and going on."""

from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction

from django_dbtaskqueue import Workflow, batch, chain, enqueue, enqueue_many
from django_dbtaskqueue.core.exceptions import EnqueueError, PayloadError
from django_dbtaskqueue.flow import move, retention
from django_dbtaskqueue.flow.batches import BatchHandle
from django_dbtaskqueue.models import Batch, Dependency, MinuteCount, Task
from django_dbtaskqueue.models.control import LEFT_BATCH
from tests.factories import age
from tests.flow.conftest import POISONED, READY, WAITS, finish, state, take

pytestmark = pytest.mark.django_db(databases=["default", "sqlite"], transaction=True)


def test_the_callback_runs_once_when_all_have_ended(alias: str) -> None:
    with batch("import", on_complete={"queue": "letters", "payload": {"n": 1}}, using=alias) as b:
        enqueue("parcels", using=alias)
        enqueue_many("parcels", [{"payload": n} for n in range(3)], using=alias)
    assert b.progress() == {"CREATED": 4, "PROCESSING": 0, "COMPLETED": 0, "ERROR": 0, "POISON": 0, "total": 4}
    for n in range(4):
        assert take(alias, "letters") is None
        lease = take(alias)
        lease.complete({"n": n}) if n else lease.poison()
    last = take(alias, "letters")
    assert last.payload == {"n": 1} and last.parents.counts == {"COMPLETED": 3, "POISON": 1}
    assert [one.result for one in last.parents if one.status == "COMPLETED"] == [{"n": 1}, {"n": 2}, {"n": 3}]
    last.complete()
    assert take(alias, "letters") is None
    assert (b.progress()["COMPLETED"], b.progress()["POISON"]) == (3, 1)
    assert Task.objects.using(alias).filter(batch=b.id).count() == 4
    with batch("import", on_complete="letters", using=alias) as b:
        pass
    assert b.progress()["total"] == 0
    assert take(alias, "letters").parents.counts == {}


def test_a_callback_that_a_rule_of_its_queue_takes_for_another_is_refused(alias: str, settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"items": {}, "end": {"unique": "unique"}}}
    for end in ("end", {"queue": "end", "reference": "second"}):
        with batch("night", on_complete=end, using=alias):
            enqueue("items", using=alias)
    with pytest.raises(EnqueueError, match="give yours a reference"), batch("night", on_complete="end", using=alias):
        enqueue("items", using=alias)
    assert Task.objects.using(alias).filter(queue="items").count() == 2


def test_a_block_that_raises_stores_nothing(alias: str) -> None:
    with pytest.raises(RuntimeError), batch("import", on_complete="letters", using=alias):
        enqueue("parcels", using=alias)
        raise RuntimeError
    assert not Task.objects.using(alias).exists() and not Batch.objects.using(alias).exists()
    assert state(enqueue("parcels", using=alias)) == READY  # no block is open any more


def test_the_outer_batch_waits_for_the_inner_one(alias: str) -> None:
    with batch("outer", on_complete="letters", using=alias) as outer:
        with batch("inner", using=alias) as inner:
            enqueue("parcels", using=alias)
        enqueue("parcels", using=alias)
    assert (inner.progress()["total"], outer.progress()["total"]) == (1, 1)
    finish(alias)
    assert take(alias, "letters") is None
    finish(alias)
    assert take(alias, "letters") is not None


def test_a_task_that_was_there_before_or_of_another_database_does_not_join(alias: str) -> None:
    for reference in ("one", "many"):
        enqueue("parcels", reference, using=alias)
    with batch("import", using=alias) as b:
        for on_duplicate in ("ignore", "replace"):
            enqueue("parcels", "one", on_duplicate=on_duplicate, using=alias)
            enqueue_many("parcels", [("many", 1), (f"new-{on_duplicate}", 1)], on_duplicate=on_duplicate, using=alias)
    assert sorted(task.reference for tasks in b.tasks() for task in tasks) == ["new-ignore", "new-replace"]
    other = "sqlite" if alias == "default" else "default"
    with pytest.raises(EnqueueError, match="one database"), batch("import", using=alias):
        enqueue("parcels", using=other)
    with pytest.raises(EnqueueError, match="around it"), batch("outer", using=alias), batch("inner", using=other):
        enqueue("parcels", using=other)
    assert not Task.objects.using(other).exists()


def test_cancel_all(alias: str) -> None:
    with batch("import", on_complete="letters", using=alias) as b:
        enqueue("parcels", after=[enqueue("parcels", using=alias) for _ in range(3)], using=alias)
    take(alias)
    assert b.cancel() == 4
    assert b.progress()["POISON"] == 4
    assert b.retry() == 0 and b.progress()["POISON"] == 4
    assert take(alias, "letters").parents.counts == {"POISON": 4}


@pytest.mark.parametrize("name", ["a\0", "a\ud800", "x" * 201])
def test_a_name_that_no_database_stores_is_refused(alias: str, name: str) -> None:
    with pytest.raises(EnqueueError, match="a name of 1 to 200 characters"), batch(name, using=alias):
        pass
    with pytest.raises(EnqueueError, match="at most 200 characters"):
        enqueue("parcels", after={name: enqueue("parcels", using=alias)}, using=alias)


def test_a_workflow_takes_no_more_arguments_than_enqueue(alias: str) -> None:
    workflow = Workflow("nightly", using=alias).add("load", "parcels").add("check", "parcels", "C1", {}, ["load"])
    with pytest.raises(TypeError, match="positional"):
        workflow.enqueue()
    assert not Batch.objects.using(alias).exists()


def test_a_retry_goes_on_from_where_it_failed(alias: str, settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {"max_attempts": 1}, "letters": {}}}
    workflow = Workflow("nightly", using=alias).add("load", "parcels").add("check", "parcels", after="load")
    workflow.add("send", "letters", after=["check"], on_parent_failure="cancel")
    workflow.add("bill", "letters", after=["send"], on_parent_failure="cancel")
    handle, tasks = workflow.enqueue()
    finish(alias)
    take(alias).fail("broken")
    assert [state(tasks[name]) for name in ("check", "send", "bill")] == [("ERROR", None), POISONED, POISONED]
    assert BatchHandle(Batch.objects.using(alias).get(), alias).retry() == 1
    assert state(tasks["load"]) == ("COMPLETED", None)
    assert [state(tasks[name]) for name in ("check", "send", "bill")] == [READY, WAITS, WAITS]
    finish(alias)
    finish(alias, "letters")
    assert take(alias, "letters").id == tasks["bill"].pk
    assert handle.progress()["COMPLETED"] == 3


def test_a_retry_cancels_again_what_waits_for_a_poisoned_task(alias: str) -> None:
    outside = enqueue("parcels", using=alias)
    with batch("import", using=alias) as b:
        parent = enqueue("parcels", using=alias)
        for one in (parent, outside):
            enqueue("letters", after=one, on_parent_failure="cancel", using=alias)
    for _ in range(2):
        take(alias).poison()
    assert b.retry() == 0
    assert b.progress()["POISON"] == 3
    assert move.change_statuses(Task.objects.using(alias).filter(pk=parent.pk), "kick") == 1
    finish(alias)


def test_a_retry_lets_a_task_wait_again_that_its_parent_cancelled_and_no_other(alias: str) -> None:
    waits: Any = {"on_parent_failure": "cancel", "ttl": timedelta(hours=1), "using": alias}
    with batch("import", using=alias) as b:
        parent = enqueue("parcels", using=alias)
        ran, late, stopped, kicked = (enqueue("letters", after=parent, **waits) for _ in range(4))
    move.change_statuses(Task.objects.using(alias).filter(pk=stopped.pk), "cancel")
    take(alias).fail("broken", retry=False)
    assert move.kick(Task.objects.using(alias).filter(pk=ran.pk), 1) == 1
    take(alias, "letters").poison()
    assert [move.change_statuses(Task.objects.using(alias).filter(pk=kicked.pk), verb) for verb in ("kick", "cancel")]
    age(timedelta(hours=3), using=alias)
    assert (b.retry(), *map(state, (ran, late, stopped, kicked))) == (1, POISONED, WAITS, POISONED, POISONED)
    finish(alias)
    assert finish(alias, "letters") == late.pk and b.progress()["POISON"] == 3


def test_a_fan_in_reads_the_results_of_its_parents_by_name(alias: str, settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {"keep": "history"}, "letters": {}}}
    workflow = Workflow("w", using=alias).add("end", "letters", after=["left", "right"])
    workflow.add("left", "parcels", "l").add("right", "parcels", "r")
    workflow.enqueue()
    for _ in range(2):
        lease = take(alias)
        lease.complete({"of": lease.reference})
    parents = take(alias, "letters").parents
    assert (parents["left"].result, parents["right"].result) == ({"of": "l"}, {"of": "r"})
    assert parents.counts == {"COMPLETED": 2}
    with pytest.raises(KeyError, match="left"):
        parents["lefd"]


def test_the_task_at_a_workflows_end_knows_by_name_what_joined(alias: str) -> None:
    enqueue("parcels", "there before", using=alias)
    workflow = Workflow("w", on_complete="letters", using=alias).add("mine", "parcels")
    workflow.add("other", "parcels", "there before", on_duplicate="ignore").enqueue()
    for _ in range(2):
        take(alias).complete()
    parents = take(alias, "letters").parents
    assert parents["mine"].status == "COMPLETED" and parents.counts == {"COMPLETED": 1}


def test_a_workflows_end_waits_for_a_task_without_a_name_too(settings: Any) -> None:
    def router(*_facts: object) -> str:
        enqueue("notes")
        return "default"

    shards = {"shards": ["default", "sqlite"], "router": router}
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": shards, "letters": {}, "notes": {}}}
    Workflow("w", on_complete="letters").add("mine", "parcels").enqueue()
    take("default").complete()
    assert take("default", "letters") is None
    take("default", "notes").complete()
    assert take("default", "letters").parents.counts == {"COMPLETED": 2}


def test_cycles_and_unknown_names_are_refused_before_anything_is_written(alias: str) -> None:
    cycle = Workflow("w", using=alias).add("a", "parcels", after="c").add("b", "parcels", after="a")
    cycle.add("c", "parcels", after="b")
    with pytest.raises(EnqueueError, match=r"wait for each other: [abc] → [abc] → [abc] → [abc]"):
        cycle.enqueue()
    unknown = Workflow("w", using=alias).add("load", "parcels").add("b", "parcels", after="lode")
    with pytest.raises(EnqueueError, match=r"'lode', which is none of its tasks.*load"):
        unknown.enqueue()
    with pytest.raises(EnqueueError, match="two tasks"):
        unknown.add("load", "parcels")
    assert not Task.objects.using(alias).exists()


def test_a_chain(alias: str) -> None:
    tasks = chain({"queue": "parcels"}, {"queue": "letters"}, {"queue": "parcels", "payload": 3}, using=alias)
    assert take(alias, "letters") is None
    finish(alias)
    finish(alias, "letters")
    assert take(alias).id == tasks[2].pk


@pytest.mark.parametrize("far", [{"database": "sqlite"}, {"shards": ["sqlite", "default"]}])
def test_a_chain_on_another_database_is_stored_whole_or_not(settings: Any, far: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": far}}
    for _ in range(2):
        with pytest.raises(PayloadError):
            chain({"queue": "parcels"}, {"queue": "parcels", "payload": object()})
    assert not any(Task.objects.using(alias).exists() for alias in ("default", "sqlite"))


def test_enqueue_many_after_a_parent(alias: str) -> None:
    parent = enqueue("letters", using=alias)
    report = enqueue_many("parcels", [{"group": "g"}, {"group": "g"}, {}], after={"start": parent}, using=alias)
    assert report.enqueued == 3
    assert take(alias) is None
    take(alias, "letters").complete("x")
    leases = [take(alias), take(alias)]
    assert take(alias) is None  # the other one of the group
    assert leases[0].parents["start"].result == "x" and Dependency.objects.using(alias).count() == 3


def test_what_a_savepoint_takes_back_does_not_join(alias: str) -> None:
    with batch("import", on_complete="letters", using=alias) as b:
        for options in ({"after": enqueue("parcels", using=alias)}, {}):
            with suppress(ZeroDivisionError), transaction.atomic(using=alias):
                enqueue("letters", using=alias, **options)
                raise ZeroDivisionError
        last = enqueue("parcels", using=alias)
    assert (b.progress()["total"], b.row.queues, state(last)) == (2, ["parcels"], READY)
    for _ in range(2):
        finish(alias)
    assert take(alias, "letters").parents.counts == {"COMPLETED": 2}


@pytest.mark.parametrize("to", ["history", "delete"])
def test_a_task_that_has_left_counts_as_it_ended(alias: str, to: str) -> None:
    with batch("import", using=alias) as b:
        tasks = [enqueue("parcels", using=alias) for _ in range(4)]
    finish(alias)
    take(alias).poison()
    take(alias).fail("broken", retry=False)
    before, there = b.progress(), Task.objects.using(alias)
    assert retention.housekeep(there, older_than=timedelta(0), to=to) == 3 and b.progress() == before
    assert retention.delete_empty_batches(alias, [Task], older_than=timedelta(0)) == 0
    assert move.change_statuses(there.filter(pk=tasks[3].pk), "delete") == 1
    assert b.progress() == {**before, "CREATED": 0}
    assert retention.delete_empty_batches(alias, [Task], older_than=timedelta(hours=1)) == 0
    assert retention.delete_empty_batches(alias, [Task], older_than=timedelta(0)) == 1
    assert not MinuteCount.objects.using(alias).filter(kind__startswith=LEFT_BATCH).exists()
