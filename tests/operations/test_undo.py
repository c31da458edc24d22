"""Undo, and the record that answers who did what: as an operator reads it on page, command line and API."""

import json
import re
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from django.core.exceptions import PermissionDenied
from django.core.management import CommandError
from django.test import Client

from django_dbtaskqueue import LeaseLost, QueueFull, batch, enqueue, processor, queue
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow import dependencies
from django_dbtaskqueue.models import AuditEntry, BulkOperation, Task
from django_dbtaskqueue.operations import bulk
from django_dbtaskqueue.operations.actions import ActionRequest, act_on_ids
from django_dbtaskqueue.operations.permissions import Actor
from django_dbtaskqueue.operations.verbs import BULK_VERBS, ID_VERBS, VerbOptions
from django_dbtaskqueue.pull.leases import checkout
from django_dbtaskqueue.testing import advance, drain
from tests.factories import QUEUE, make_task
from tests.operations.site import ADMIN, TASKS, command, failure_group, post, refused, text, user, work as run
from tests.support import taken_back

COLUMNS = [field.name for field in Task._meta.concrete_fields if field.name != "last_update_time"]
HOUR, OPERATIONS = timedelta(hours=1), f"{ADMIN}bulkoperation/"
PRINT = "84e82a" + "0" * 34
SEARCH = f"fingerprint:{PRINT} status:ERROR"


def done(verb: str, q: str = f"queue:{QUEUE}", alias: str = "default") -> BulkOperation:
    operation = bulk.start(verb, q, None, "why", alias, options=VerbOptions(delay=HOUR, priority=-3, queue="letters"))
    run(alias)
    operation.refresh_from_db()
    assert operation.state == "FINISHED", operation.note
    return operation


def put_back(operation: BulkOperation, alias: str = "default") -> BulkOperation:
    back = bulk.put_back(operation, Actor())
    run(alias)
    back.refresh_from_db()
    return back


def rows(alias: str = "default") -> list[dict[str, Any]]:
    return list(Task.objects.using(alias).order_by("pk").values(*COLUMNS))


def test_what_a_bulk_operation_did_is_put_back_as_it_was(settings: Any, alias: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(bulk, "TASKS_PER_CHUNK", 2)
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {"database": alias}, "letters": {"database": alias}}}
    wrong: list[Any] = []
    for verb in [name for name, verb in BULK_VERBS.items() if verb.undoable]:
        with taken_back(), taken_back(alias):
            for number in range(3):
                facts = {"reference": f"r{number}", "priority": number, "attempt": 2, "expire_time": HOUR}
                make_task(BULK_VERBS[verb].sources[0], using=alias, **facts)
            before = rows(alias)
            operation = done(verb, alias=alias)
            if operation.changed != 3 or rows(alias) == before:
                wrong.append((verb, operation.changed))
            back = put_back(operation, alias)
            if (back.state, back.changed, back.skipped) != ("FINISHED", 3, 0) or rows(alias) != before:
                wrong.append((verb, back.state, back.changed, rows(alias)))
    assert wrong == []


def test_a_task_that_was_cancelled_while_it_ran_waits_again(alias: str) -> None:
    make_task(using=alias)
    before = rows(alias)
    (lease,) = checkout(QUEUE, poller_instance="p:1:x", using=alias)
    put_back(done("cancel", alias=alias), alias)
    refused(None, lease.complete, error=LeaseLost)
    taken = {"start_time", "total_attempt", "lost_leases"}
    assert [{**row, **{name: before[0][name] for name in taken}} for row in rows(alias)] == before


def test_what_others_ended_while_it_ran_is_lost_also_if_it_waits_again(alias: str, taskqueue_registry: None) -> None:
    tasks = Task.objects.db_manager(alias)
    ways: list[Callable[[], object]] = [
        lambda: put_back(done("cancel", alias=alias), alias),
        lambda: tasks.cancel() + tasks.kick(1),
        lambda: tasks.cancel() + tasks.unpoison() + tasks.reprocess(),
        lambda: (advance(HOUR, using=alias), drain(QUEUE, using=alias), tasks.reprocess()),
    ]
    processor(QUEUE)(lambda task: ways.pop()() and None if task.total_attempt == 1 else None)
    while ways:
        make_task(using=alias, max_attempts=1)
        assert str(drain(QUEUE, using=alias)) == "1 completed, 1 lost"


def test_no_verb_makes_a_queue_fuller_than_its_capacity(alias: str, settings: Any) -> None:
    queues: dict[str, Any] = {QUEUE: {"database": alias}, "letters": {"database": alias}}
    settings.DBTASKQUEUE = {"QUEUES": queues}
    with batch("b", using=alias) as made:
        enqueue(QUEUE, after=(parent := enqueue(QUEUE)), on_parent_failure="cancel")
    cancelled = done("cancel", f"id:{parent.pk}", alias)
    dependencies.sweep(Session.on(alias))
    failed, moved, _ = make_task(Status.ERROR, using=alias), enqueue("letters"), enqueue(QUEUE)
    with batch("waits", using=alias) as waiting:
        enqueue(QUEUE)
    settings.DBTASKQUEUE = {"QUEUES": {**queues, QUEUE: {"database": alias, "capacity": 1}}}
    assert waiting.retry() == 0
    tasks, before, options = Task.objects.db_manager(alias).all(), rows(alias), VerbOptions(queue=QUEUE)
    for full in (
        *(tasks.reprocess, partial(tasks.kick, 1), made.retry),
        partial(act_on_ids, tasks, [failed.pk], ActionRequest(ID_VERBS["edit"], options=options), Actor()),
        partial(act_on_ids, tasks, [moved.pk], ActionRequest(ID_VERBS["move"], options=options), Actor()),
    ):
        refused("holds its capacity of 1 live tasks", full, error=QueueFull)
    for ordered in (bulk.start("reprocess", f"queue:{QUEUE}", None, using=alias), bulk.put_back(cancelled, Actor())):
        run(alias)
        ordered.refresh_from_db()
        assert (ordered.state, ordered.note.split(":")[0]) == ("FAILED", "QueueFull")
    assert rows(alias) == before


def test_a_group_comes_back_in_its_order(alias: str) -> None:
    first = make_task(using=alias, group_key="g")
    make_task(using=alias, group_key="g", parked_by="group")
    before = rows(alias)
    operation = done("snooze", f"id:{first.pk}", alias)
    assert rows(alias) != before
    put_back(operation, alias)
    assert [task.pk for task in Task.objects.using(alias).due()] == [first.pk]


def test_a_wait_for_parents_goes_where_the_task_goes_and_ends_when_they_have_ended(alias: str, settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {"database": alias}, "letters": {"database": alias}}}
    enqueue("letters", after=enqueue(QUEUE), on_parent_failure="cancel")
    cancelled = done("cancel", "queue:letters", alias)
    checkout(QUEUE, poller_instance="p:1:x", using=alias)[0].poison()
    assert put_back(cancelled, alias).changed == 1
    dependencies.sweep(Session.on(alias))
    assert "parent task" in Task.objects.using(alias).get(queue="letters").process_result, "it hears of the failure"
    parent = enqueue(QUEUE, using=alias)
    cancelled, moved, grouped = (enqueue(QUEUE, after=parent, group=group, using=alias) for group in (None, None, "g"))
    cancels = [done("cancel", f"id:{task.pk}", alias) for task in (cancelled, grouped)]
    done("move", f"id:{moved.pk}", alias)
    put_back(cancels.pop(), alias)
    assert [task.pk for task in Task.objects.using(alias).due()] == [parent.pk], "a move does not let it go"
    (lease,) = checkout(QUEUE, poller_instance="p:1:x", using=alias)
    lease.complete()
    dependencies.sweep(Session.on(alias))
    put_back(cancels.pop(), alias)
    assert {task.pk for task in Task.objects.using(alias).due()} == {cancelled.pk, moved.pk, grouped.pk}
    assert Task.objects.using(alias).get(pk=moved.pk).queue == "letters"


def test_a_move_takes_a_reference_that_stays_taken_and_gives_it_back(alias: str, settings: Any) -> None:
    once = {"unique_over": "history", "keep": "delete", "database": alias}
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {"database": alias}, "letters": once}}
    enqueue("letters", "spent")
    queue("letters").ack(queue("letters").take())
    for reference in ("spent", "new", None):
        enqueue(QUEUE, reference)
    moved = done("move", alias=alias)
    assert (moved.changed, moved.skipped) == (2, 1)
    assert put_back(moved, alias).changed == 2
    assert done("move", alias=alias).changed == 2
    for _ in range(2):
        queue("letters").ack(queue("letters").take())
    assert enqueue("letters", "new", on_duplicate="ignore").pk is None


def test_a_parent_that_is_put_back_ends_once_more(alias: str) -> None:
    parent = enqueue(QUEUE, using=alias)
    child = enqueue(QUEUE, after=parent, using=alias)
    cancelled = done("cancel", f"id:{parent.pk}", alias)
    dependencies.sweep(Session.on(alias))
    put_back(cancelled, alias)
    for task in (parent, child):
        (lease,) = checkout(QUEUE, poller_instance="p:1:x", using=alias)
        assert lease.id == task.pk
        lease.complete()
        dependencies.sweep(Session.on(alias))


def test_tasks_that_changed_since_stay_and_are_named() -> None:
    taken, left = make_task(Status.ERROR), make_task(Status.ERROR)
    operation = done("reprocess")
    (lease,) = Task.objects.checkout(QUEUE, poller_instance="p:1:x")
    assert lease.id == taken.pk
    back = put_back(operation)
    assert (back.changed, back.skips) == (1, {"changed since": 1})
    assert [skip.task_ids for skip in back.changes.exclude(skip_reason="")] == [[taken.pk]]
    assert dict(Task.objects.values_list("pk", "status")) == {taken.pk: "PROCESSING", left.pk: "ERROR"}


def test_the_page_offers_it_and_refuses_in_words(op: Client) -> None:
    task = make_task(Status.ERROR)
    operation = done("reprocess")
    page, asked = f"{OPERATIONS}{operation.pk}/change/", {"operation": operation.pk, "put_back": "1"}
    shown = text(op.get(page))
    assert "Put back as it was" in shown and "1 of 1" in shown
    BulkOperation.objects.update(estimate=0)
    shown = text(op.get(page))
    assert "1 of 0" not in shown and ">1</dd>" in shown, "it did not change more than it expected"
    assert "stays as it is" in text(op.post(OPERATIONS, asked)), "it asks for a confirmation"
    answer = op.post(OPERATIONS, {**asked, "confirm": "yes", "reason": "wrong ones"})
    run()
    assert Task.objects.get(pk=task.pk).status == "ERROR"
    assert "Put back as it was" in text(op.get(answer.headers["Location"]))
    again = text(op.get(page))
    assert "puts its tasks back already" in again and 'name="put_back"' not in again
    refusal = op.post(OPERATIONS, {**asked, "confirm": "yes"})
    assert refusal.headers["Location"] == page and "puts its tasks back already" in text(op.get(page))
    refused("puts its tasks back already", command, "bulk", "put-back", operation.pk, error=CommandError)
    refused("may not use reprocess", bulk.put_back, done("reprocess"), Actor(user()), error=PermissionDenied)
    assert "cannot be undone" in text(op.get(f"{OPERATIONS}{done('delete').pk}/change/"))


def test_what_was_done_to_one_task_is_put_back_like_a_bulk_operation(op: Client) -> None:
    task = make_task(Status.ERROR, attempt=3)
    before = rows()
    form = {"_selected_action": str(task.pk), "action": "reprocess", "origin": "page"}
    assert "cannot be put back" not in text(op.post(TASKS, form))
    answer = text(op.post(TASKS, {**form, "confirm": "yes", "reason": ""}, follow=True))
    (link,) = re.findall(r'1 task .*?<a href="([^"]*)">Put back as it was…</a>', answer)
    assert rows() != before and 'name="put_back"' in text(op.get(link))
    op.post(OPERATIONS, {"operation": BulkOperation.objects.get().pk, "put_back": "1", "confirm": "yes", "reason": ""})
    run()
    assert rows() == before
    assert post(op, "tasks/mark_poison/ids", ids=[task.pk, 0]).json()["changed"] == 1
    operation = BulkOperation.objects.latest("pk")
    assert (operation.changed, operation.skipped, operation.actor) == (1, 1, "admin")
    command("bulk", "put-back", operation.pk)
    assert rows() == before
    post(op, "tasks/mark_poison/ids", ids=[0])
    assert BulkOperation.objects.latest("pk").verb == "put_back", "nothing changed, so there is nothing to put back"


def test_a_group_is_named_by_its_error_and_a_task_by_its_reference(op: Client) -> None:
    failure_group(PRINT, error_type="flights.rules.PlaneUnknown", message="N14228 is not known")
    post(op, "tasks/reprocess/ids", ids=[make_task(Status.ERROR, reference="AA-1141", fingerprint=PRINT).pk])
    listed = text(op.get(f"{ADMIN}auditentry/"))
    assert "AA-1141" in listed and "PlaneUnknown" in listed
    make_task(Status.ERROR, fingerprint=PRINT)
    asked = text(op.post(f"{TASKS}?q={SEARCH}", {"action": "reprocess", "select_across": "1"}))
    assert "PlaneUnknown: N14228 is not known" in asked
    operation = done("reprocess", SEARCH)
    for page in ("auditentry/", "bulkoperation/", f"bulkoperation/{operation.pk}/change/"):
        shown = text(op.get(f"{ADMIN}{page}"))
        assert "PlaneUnknown: N14228 is not known" in shown, page
        assert f"fingerprint:{PRINT}" not in shown, page


def test_the_page_of_a_task_says_who_sent_it_back_and_why_after_a_bulk_operation(op: Client) -> None:
    task, other = make_task(Status.ERROR), make_task(Status.ERROR)
    bulk.start("reprocess", f"id:{task.pk}", op.get("/admin/").wsgi_request.user, "the register is repaired")
    run()
    shown = text(op.get(f"{TASKS}{task.pk}/change/"))
    assert "the register is repaired" in shown and "Retry" in shown and "admin" in shown
    assert "the register is repaired" not in text(op.get(f"{TASKS}{other.pk}/change/"))
    assert "have a change history" not in text(op.get(f"{TASKS}{task.pk}/history/", follow=True))


TYPED, TOKEN = {"email": "zoe@exmaple.org"}, {"card_token": "tok_4242"}
REPAIRED, MASKED = {"email": "zoe@example.org"}, {"card_token": "•••"}


def test_the_page_of_a_task_asks_for_the_payload_masked_and_the_audit_has_the_difference(op: Client) -> None:
    task = make_task(Status.ERROR, payload=TYPED | TOKEN)
    assert "Edit payload and retry" in text(op.get(f"{TASKS}{task.pk}/change/"))
    form = {"action": "edit", "_selected_action": task.pk}
    asked = text(op.post(TASKS, {**form, "origin": "page"}))
    assert "zoe@exmaple.org" in asked and "tok_4242" not in asked
    op.post(TASKS, {**form, "confirm": "yes", "payload": json.dumps(REPAIRED | MASKED), "reason": ""})
    assert Task.objects.get(pk=task.pk).payload == REPAIRED | TOKEN
    entry = AuditEntry.objects.get()
    shown = text(op.get(f"{ADMIN}auditentry/{entry.pk}/change/"))
    assert "zoe@exmaple.org" in shown and "zoe@example.org" in shown and "tok_4242" not in shown
    assert "exmaple" not in json.dumps(entry.details), "the entry is read by more people"
