"""Tasks that wait for others: when they start, and what happens when a parent fails."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction

from django_dbtaskqueue import Complete, batch, enqueue, enqueue_many
from django_dbtaskqueue.core.context import wake_listeners
from django_dbtaskqueue.core.exceptions import EnqueueError
from django_dbtaskqueue.core.states import CREATED, ERROR, POISON, PROCESSING
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow import dependencies, move, retention
from django_dbtaskqueue.flow.dependencies import TaskKey, rows_of
from django_dbtaskqueue.flow.port import SettlePort
from django_dbtaskqueue.flow.rescue import rescue
from django_dbtaskqueue.flow.settle import plan
from django_dbtaskqueue.models import Dependency, Hold, Task, TaskHistory
from django_dbtaskqueue.testing import advance, run_poller
from tests.clock import SteppedClock
from tests.factories import make_task
from tests.flow.conftest import POISONED, READY, WAITS, finish, state, take
from tests.support import at_once, refused

pytestmark = pytest.mark.django_db(databases=["default", "sqlite"], transaction=True)


@pytest.fixture
def put(alias: str) -> Callable[..., Task]:
    return lambda *args, **options: enqueue(*(args or ("parcels",)), using=alias, **options)


def test_a_task_waits_for_all_of_its_parents(alias: str, put: Callable[..., Task]) -> None:
    first, second = put(), put("letters")
    child = put(after=[first, second.pk])
    assert state(child) == WAITS
    assert finish(alias) == first.pk
    assert take(alias) is None
    finish(alias, "letters")
    assert state(child) == READY
    assert take(alias).id == child.pk
    assert not Hold.objects.using(alias).exists()
    assert set(Dependency.objects.using(alias).values_list("outcome", flat=True)) == {"COMPLETED"}


def test_a_parent_that_has_completed_counts_at_once(alias: str, put: Callable[..., Task]) -> None:
    done, other = put(), put()
    finish(alias)
    assert state(put(after=[done])) == READY
    assert state(put(after=[done, other])) == WAITS
    assert Hold.objects.using(alias).get().remaining == 1


def test_a_parent_fails(alias: str, put: Callable[..., Task]) -> None:
    wanted = {"hold": WAITS, "cancel": POISONED, "run": READY}
    parent = put()
    before = {policy: put("letters", after=[parent], on_parent_failure=policy) for policy in wanted}
    take(alias).poison("bad")
    for children in (before, {policy: put("letters", after=[parent], on_parent_failure=policy) for policy in wanted}):
        assert {policy: state(child) for policy, child in children.items()} == wanted
        text = Task.objects.using(alias).get(pk=children["cancel"].pk).process_result
        assert text == f"Cancelled: parent task {parent.pk} ended as POISON."


def test_a_cancelled_child_cancels_its_children(alias: str, put: Callable[..., Task]) -> None:
    with transaction.atomic(using=alias):
        links = [put()]
        for _ in range(100):  # more than a call for each link could take
            links.append(put(after=links[-1], on_parent_failure="cancel"))
        last = put(after=links[-1], on_parent_failure="run")
    take(alias).poison()
    found = Task.objects.using(alias).filter(pk__in=[link.pk for link in links]).values_list("status", "parked_by")
    assert set(found) == {(str(POISON), None)}
    assert take(alias).id == last.pk


def test_an_operator_cancels_or_deletes_a_parent(alias: str, put: Callable[..., Task]) -> None:
    cancelled, deleted = put(), put()
    child = put(after=[cancelled], on_parent_failure="cancel")
    held, free = (put(after=[deleted], on_parent_failure=policy) for policy in ("hold", "run"))
    move.change_statuses(Task.objects.using(alias).filter(pk=cancelled.pk), "cancel")
    move.change_statuses(Task.objects.using(alias).filter(pk=deleted.pk), "delete")
    assert [state(task) for task in (child, held, free)] == [POISONED, WAITS, READY]
    assert Dependency.objects.using(alias).get(child_id=held.pk).outcome == "DELETED"


def test_a_parent_that_expired_has_not_completed(alias: str, put: Callable[..., Task], settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {"ttl": "1h", "expired": "delete"}, "letters": {}}}
    with batch("import", using=alias) as b:
        parents = [put(group=group) for group in ("g", None)]
    children = [put("letters", after=parents, on_parent_failure=how, group="h") for how in ("hold", "cancel", "run")]
    advance(timedelta(hours=2), using=alias)
    with run_poller("parcels", using=alias):
        pass
    assert [state(child) for child in children] == [WAITS, POISONED, READY]
    assert take(alias, "letters").parents.counts == {"DELETED": 2} and b.progress()["COMPLETED"] == 0


def test_parents_that_leave_the_table_count(alias: str, put: Callable[..., Task], settings: Any) -> None:
    for keep in ("history", "delete"):
        settings.DBTASKQUEUE = {"QUEUES": {"parcels": {"keep": keep}, "letters": {}}}
        child = put("letters", after=[put()])
        finish(alias)
        assert state(child) == READY


def test_a_sweep_finds_parents_whose_process_died(alias: str, put: Callable[..., Task]) -> None:
    """The process died between the commit that moved the parent and the one that tells it."""
    moved, gone = put(), put()
    children = [put(after=[moved]), put(after=[gone])]
    TaskHistory.objects.using(alias).create(task_id=moved.pk, queue="parcels", status="COMPLETED")
    Task.objects.using(alias).filter(pk__in=[moved.pk, gone.pk])._raw_delete(alias)
    assert dependencies.sweep_missing(Session.on(alias), 0) == 0
    assert [state(child) for child in children] == [READY] * 2


def test_a_child_in_a_group_takes_its_place(alias: str, put: Callable[..., Task]) -> None:
    parent, head = put("letters"), put(group="g")
    child = put(after=[parent], group="g")
    finish(alias, "letters")
    assert state(child) == ("CREATED", "group")
    assert finish(alias) == head.pk
    assert take(alias).id == child.pk


def test_a_chain_inside_one_group_and_a_delay_both_count(alias: str, put: Callable[..., Task]) -> None:
    tasks = [put(group="g")]
    for _ in range(3):
        tasks.append(put(group="g", after=tasks[-1]))
    later = put(after=tasks[-1], delay=timedelta(hours=1))
    assert [finish(alias) for _ in tasks] == [task.pk for task in tasks]
    later.refresh_from_db()
    assert later.parked_by is None and later.ready_time - later.create_time >= timedelta(minutes=59)


def test_what_cannot_be_kept_is_refused(alias: str, put: Callable[..., Task], settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {}, "scratch": {"temporary": True}}}
    for after, says in ((10**9, "not in the table"), ("x", "must be a task"), (True, "must be a task")):
        with pytest.raises(EnqueueError, match=says):
            put(after=[after])
    assert not Task.objects.using(alias).exists()
    parent = put("scratch")
    with pytest.raises(EnqueueError, match="temporary"):
        put(after=[parent])
    child = put("scratch", after=[put()])
    finish(alias)
    assert take(alias, "scratch").id == parent.pk
    assert take(alias, "scratch").id == child.pk
    kept, other = put(), enqueue("parcels", using="sqlite" if alias == "default" else "default")
    for after, says, options in (
        (kept, "on_parent_failure", {"on_parent_failure": "wait"}),
        (kept, "on_duplicate='replace'", {"reference": "r", "on_duplicate": "replace"}),
        (other, "own database", {}),
    ):
        with pytest.raises(EnqueueError, match=says):
            put(after=[after], **options)
    with pytest.raises(EnqueueError, match="a rule of uniqueness"):
        enqueue_many("parcels", [{}], after=kept, unique="debounce:1h", using=alias)


def test_retention_keeps_a_parent_that_a_child_waits_for(alias: str, put: Callable[..., Task]) -> None:
    parent = put()
    child = put(after=[parent])
    take(alias).poison()
    cursor = retention.RetentionCursor("parcels", "POISON")
    assert retention.housekeep_batch(Session.on(alias), cursor, older_than=timedelta(0)) == 0
    assert Task.objects.using(alias).housekeep(older_than=timedelta(0)) == 0  # nor does an operator take it
    move.change_statuses(Task.objects.using(alias).filter(pk=parent.pk), "kick")
    finish(alias)
    cursor = retention.RetentionCursor("parcels", "COMPLETED")
    assert retention.housekeep_batch(Session.on(alias), cursor, older_than=timedelta(0)) == 1
    assert take(alias).id == child.pk


def test_parents_that_end_at_the_same_time_let_a_child_go_once() -> None:
    parents = [enqueue("parcels") for _ in range(8)]
    children = {enqueue("letters", after=parents).pk, enqueue("letters", group="g", after=parents).pk}
    at_once(8, lambda _: finish("default"))
    dependencies.sweep(Session.on("default"))
    assert {take("default", "letters").id, take("default", "letters").id} == children
    assert not Hold.objects.exists()


def test_a_sweep_tells_an_end_that_was_told_before_only_once(alias: str, put: Callable[..., Task]) -> None:
    parents = [make_task(POISON, using=alias, watched=True), put()]
    child = put(after=parents, on_parent_failure="run")
    session = Session.on(alias)
    for _ in range(2):
        dependencies.tell_ends(session, [parents[0].pk])
        dependencies.sweep(session)
    assert Hold.objects.using(alias).get().remaining == 1 and state(child) == WAITS


def test_what_a_task_waited_for_goes_when_the_task_is_gone(alias: str, put: Callable[..., Task]) -> None:
    child = put("letters", after=[put()])
    finish(alias)
    dependencies.sweep_missing(Session.on(alias), 0)
    assert Dependency.objects.using(alias).count() == 1
    Task.objects.using(alias).filter(pk=child.pk)._raw_delete(alias)
    dependencies.sweep_missing(Session.on(alias), 0)
    assert not Dependency.objects.using(alias).exists()


def test_a_dependency_of_no_task_table_stops_nothing_beside_it(alias: str, put: Callable[..., Task]) -> None:
    """Given an edge and a hold that SQL wrote, when its parent and another end, then all children are released."""
    parent, other = put(), put()
    children = [put(after=parent), put(after=other)]
    for location in ("nosuch.model", "auth.user", "", "x"):
        edge = {"parent_location": "dbtaskqueue.task", "parent_id": parent.pk, "child_location": location}
        Dependency.objects.using(alias).create(**edge, child_id=1)
        Hold.objects.using(alias).create(location=location, task_id=1, remaining=1, on_parent_failure="run")
    session = Session.on(alias)
    make = take(alias), take(alias)
    session.together(plan(session, [(lease, Complete()) for lease in make]))  # by a process that died there
    assert dependencies.sweep(session) == 2
    assert [state(child) for child in children] == [("CREATED", None)] * 2
    assert not Dependency.objects.using(alias).filter(outcome=None).exists()
    assert rows_of({TaskKey("nosuch.model", 1)}, alias) == {}


def test_an_end_that_cannot_be_told_delays_no_other(alias: str, put: Callable[..., Task], clock: SteppedClock) -> None:
    parents = [put() for _ in range(5)]
    children = [put("letters", f"child {number}", after=[parent]) for number, parent in enumerate(parents)]
    clock.stop()
    with refused("OLD.reference_number = 'child 2'", alias):
        for _ in parents:
            finish(alias)
        dependencies.sweep(Session.on(alias))
        assert [state(child) for child in children] == [READY, READY, WAITS, READY, READY]
    dependencies.sweep(Session.on(alias))
    assert state(children[2]) == WAITS  # it rests
    clock.advance(5)
    dependencies.sweep(Session.on(alias))
    assert state(children[2]) == READY


# -- the end of a task that something waits for is told once, by whatever ended it -------------------------------------
@pytest.fixture
def told() -> Any:
    names: list[str] = []
    wake_listeners.add(names.append)
    yield lambda: [int(name.removeprefix(notify.TASK_ENDED)) for name in names if name.startswith(notify.TASK_ENDED)]
    wake_listeners.discard(names.append)


def watched(alias: str) -> Task:
    task = enqueue("parcels", using=alias)
    Task.objects.using(alias).filter(pk=task.pk).update(watched=True)
    return task


def row(task: Task) -> dict[str, Any]:
    return Task.objects.using(task._state.db).values("status", "watched").get(pk=task.pk)


def test_an_outcome_tells_an_end_and_nothing_else(alias: str, told: Callable[[], list[int]], settings: Any) -> None:
    ended = []
    for verb, status in (("complete", "COMPLETED"), ("poison", "POISON"), ("fail", "CREATED")):
        task = watched(alias)
        with transaction.atomic(using=alias):
            getattr(take(alias), verb)()
            assert told() == ended, "it is told after the commit"
        assert row(task) == {"status": status, "watched": True if status == CREATED else None}
        ended += [] if status == CREATED else [task.pk]
        assert told() == ended
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {"keep": "delete"}}}
    task = watched(alias)
    take(alias).complete()
    assert not Task.objects.using(alias).filter(pk=task.pk).exists() and told() == [*ended, task.pk]


def test_an_operator_and_a_rescue_tell_an_end(alias: str, told: Callable[[], list[int]]) -> None:
    cancelled = watched(alias)
    assert move.change_statuses(Task.objects.using(alias), "cancel") == 1
    assert row(cancelled) == {"status": str(POISON), "watched": None}
    spent = {"attempt": 5, "max_attempts": 5, "next_process_time": -timedelta(seconds=1)}
    dead = make_task(PROCESSING, using=alias, watched=True, **spent)
    assert len(rescue(Session.on(alias), "parcels", SettlePort(alias))) == 1
    assert told() == [cancelled.pk, dead.pk]


def test_a_task_that_comes_back_is_watched_again(alias: str) -> None:
    """It was told that the task failed; something waits for another end."""
    for status, verb in ((ERROR, "reprocess"), (POISON, "kick")):
        task = make_task(status, using=alias, watched=False)
        assert move.change_statuses(Task.objects.using(alias), verb) == 1
        assert row(task) == {"status": str(CREATED), "watched": True}


def test_a_sweep_tells_what_a_dead_process_did_not(alias: str, told: Callable[[], list[int]]) -> None:
    ended = [make_task(POISON, using=alias, watched=True).pk for _ in range(3)]
    make_task(POISON, using=alias, watched=False)
    make_task(using=alias, watched=True)
    assert dependencies.sweep(Session.on(alias)) == 3
    assert told() == ended
    assert dependencies.sweep(Session.on(alias)) == 0
