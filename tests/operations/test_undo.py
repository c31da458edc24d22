"""Undo, and the record that answers who did what: as an operator reads it on page, command line and API."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from django.contrib import admin
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import transaction
from django.test import Client
from django.urls import include, path
from django.utils import timezone

from django_dbtaskqueue.core.exceptions import LeaseLost
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.models import AuditEntry, BulkOperation, FailureGroup, Task, TaskChange
from django_dbtaskqueue.operations import bulk
from django_dbtaskqueue.operations.verb_inputs import VerbOptions
from django_dbtaskqueue.operations.verbs import BULK_VERBS
from django_dbtaskqueue.pull.leases import checkout
from tests.factories import QUEUE, make_task

urlpatterns = [path("admin/", admin.site.urls), path("api/", include("django_dbtaskqueue.api.urls"))]
pytestmark = [pytest.mark.django_db(databases=["default", "sqlite"]), pytest.mark.urls(__name__)]
ADMIN = "/admin/dbtaskqueue"
BOTH = pytest.mark.parametrize("alias", ["default", "sqlite"])
COLUMNS = [field.name for field in Task._meta.concrete_fields if field.name != "last_update_time"]
HOUR = timedelta(hours=1)
OPTIONS = VerbOptions(delay=HOUR, priority=-3, queue="letters")
PRINT = "84e82a" + "0" * 34


@pytest.fixture(autouse=True)
def _known(settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {}, "letters": {}}, "API": True}


def run(alias: str = "default") -> None:
    while bulk.turn(alias):
        pass


def done(verb: str, q: str = f"queue:{QUEUE}", alias: str = "default") -> BulkOperation:
    operation = bulk.start(verb, q, None, "why", alias, options=OPTIONS)
    run(alias)
    operation.refresh_from_db()
    assert operation.state == "FINISHED", operation.note
    return operation


def rows(alias: str = "default") -> list[dict[str, Any]]:
    return list(Task.objects.using(alias).order_by("pk").values(*COLUMNS))


UNDOABLE = [name for name, verb in BULK_VERBS.items() if verb.undoable]


@BOTH
def test_what_a_bulk_operation_did_is_put_back_as_it_was(settings: Any, alias: str) -> None:
    """In every column but the time of the last update."""
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {"database": alias}, "letters": {"database": alias}}}
    wrong: list[Any] = []
    for verb in UNDOABLE:
        with transaction.atomic(), transaction.atomic(using=alias):
            for number in range(3):
                facts = {"reference": f"r{number}", "priority": number, "attempt": 2, "expire_time": HOUR}
                make_task(BULK_VERBS[verb].sources[0], using=alias, **facts)
            before = rows(alias)
            operation = done(verb, alias=alias)
            if operation.changed != 3 or rows(alias) == before:
                wrong.append((verb, operation.changed))
            back = bulk.put_back(operation.pk, None, using=alias)
            run(alias)
            back.refresh_from_db()
            if (back.state, back.changed, back.skipped) != ("FINISHED", 3, 0) or rows(alias) != before:
                wrong.append((verb, back.state, back.changed, rows(alias)))
            for each in {"default", alias}:
                transaction.set_rollback(True, using=each)
    assert wrong == []


@BOTH
def test_a_task_that_was_cancelled_while_it_ran_waits_again(alias: str) -> None:
    make_task(using=alias)
    before = rows(alias)
    (lease,) = checkout(QUEUE, poller_instance="p:1:x", using=alias)
    operation = done("cancel", alias=alias)
    bulk.put_back(operation.pk, None, using=alias)
    run(alias)
    with pytest.raises(LeaseLost):
        lease.complete()
    taken = {"start_time", "total_attempt", "lost_leases"}
    assert [{**row, **{name: before[0][name] for name in taken}} for row in rows(alias)] == before


@BOTH
def test_a_group_comes_back_in_its_order(alias: str) -> None:
    first = make_task(using=alias, group_key="g")
    make_task(using=alias, group_key="g", parked_by="group")
    before = rows(alias)
    operation = done("snooze", f"id:{first.pk}", alias)
    assert rows(alias) != before
    bulk.put_back(operation.pk, None, using=alias)
    run(alias)
    due = Task.objects.using(alias).due()
    assert [task.pk for task in due] == [first.pk]


def test_tasks_that_changed_since_stay_and_are_named() -> None:
    taken, left = make_task(Status.ERROR), make_task(Status.ERROR)
    operation = done("reprocess")
    (lease,) = Task.objects.checkout(QUEUE, poller_instance="p:1:x")
    assert lease.id == taken.pk
    back = bulk.put_back(operation.pk, None)
    run()
    back.refresh_from_db()
    assert (back.changed, back.skips) == (1, {"changed since": 1})
    assert [skip.task_ids for skip in back.skipped_tasks.all()] == [[taken.pk]]
    statuses = dict(Task.objects.values_list("pk", "status"))
    assert statuses == {taken.pk: "PROCESSING", left.pk: "ERROR"}


def test_the_page_offers_it_and_refuses_in_words(op: Client) -> None:
    task = make_task(Status.ERROR)
    operation = done("reprocess")
    page = f"{ADMIN}/bulkoperation/{operation.pk}/change/"
    assert "Put back as it was" in op.get(page).content.decode()
    asked = op.post(f"{ADMIN}/bulkoperation/", {"operation": operation.pk, "put_back": "1"})
    assert "stays as it is" in asked.content.decode(), "it asks for a confirmation"
    answer = op.post(
        f"{ADMIN}/bulkoperation/",
        {"operation": operation.pk, "put_back": "1", "confirm": "yes", "reason": "wrong ones"},
    )
    run()
    assert Task.objects.get(pk=task.pk).status == "ERROR"
    assert "Put back as it was" in op.get(answer.headers["Location"]).content.decode()
    again = op.get(page).content.decode()
    assert "puts its tasks back already" in again and 'name="put_back"' not in again
    make_task(Status.ERROR)
    deleted = done("delete")
    assert "cannot be undone" in op.get(f"{ADMIN}/bulkoperation/{deleted.pk}/change/").content.decode()


def test_an_action_on_ticked_tasks_says_that_it_cannot_be_put_back(op: Client) -> None:
    task = make_task(Status.ERROR)
    words = "This cannot be put back. A bulk operation, on all tasks that match a search, can be put back."
    for form, said in ({"_selected_action": str(task.pk)}, 1), ({"select_across": "1"}, 0):
        asked = op.post(f"{ADMIN}/task/?q=status:ERROR", {"action": "reprocess", **form}).content.decode()
        assert asked.count(words) == said
        assert asked.count("you can put the tasks back as they were") == 1 - said


def test_it_is_undone_on_the_command_line_and_by_the_api(op: Client) -> None:
    task = make_task(Status.ERROR)
    operation = done("reprocess")
    call_command("taskqueue", "bulk", "put-back", str(operation.pk), "--reason", "wrong ones")
    assert Task.objects.get(pk=task.pk).status == "ERROR"
    with pytest.raises(CommandError, match="puts its tasks back already"):
        call_command("taskqueue", "bulk", "put-back", str(operation.pk))
    poison = done("mark_poison")
    answer = op.post(f"/api/operations/{poison.pk}/put_back", "{}", content_type="application/json")
    assert answer.status_code == 202, answer.json()
    run()
    assert Task.objects.get(pk=task.pk).status == "ERROR"


def test_undo_needs_the_permission_of_what_it_undoes(django_user_model: Any) -> None:
    make_task(Status.ERROR)
    operation = done("reprocess")
    user = django_user_model.objects.create_user("bo", is_staff=True)
    with pytest.raises(Exception, match="may not use reprocess"):
        bulk.put_back(operation.pk, user)


def test_an_undo_that_was_killed_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "TASKS_PER_CHUNK", 1)
    for _ in range(3):
        make_task(Status.ERROR)
    operation = done("reprocess")
    assert TaskChange.objects.count() == 3
    back = bulk.put_back(operation.pk, None)
    bulk.turn("default")
    back.refresh_from_db()
    assert back.changed == 1 and 0 < back.progress < 1
    run()
    assert set(Task.objects.values_list("status", flat=True)) == {"ERROR"}


# -- the record --------------------------------------------------------------------------------------------------------


def group() -> None:
    FailureGroup.objects.create(
        fingerprint=PRINT,
        queue=QUEUE,
        error_type="flights.rules.PlaneUnknown",
        message="N14228 is not known",
        first_seen=timezone.now(),
        last_seen=timezone.now(),
    )


def test_the_audit_names_tasks_errors_and_skipped_ids(op: Client) -> None:
    group()
    failed = make_task(Status.ERROR, reference="AA-1141", fingerprint=PRINT)
    others = [make_task(Status.COMPLETED) for _ in range(3)]
    ids = [failed.pk, *(task.pk for task in others)]
    op.post("/api/tasks/reprocess/ids", json.dumps({"ids": ids}), content_type="application/json")
    entry = AuditEntry.objects.get()
    assert entry.details["skipped_ids"] == {"in COMPLETED, not in ERROR": ids[1:]}
    listed = op.get(f"{ADMIN}/auditentry/").content.decode()
    assert "AA-1141" in listed and "PlaneUnknown" in listed


def test_a_group_is_named_by_its_error(op: Client) -> None:
    group()
    make_task(Status.ERROR, fingerprint=PRINT)
    url = f"{ADMIN}/task/?q=fingerprint:{PRINT} status:ERROR"
    asked = op.post(url, {"action": "reprocess", "select_across": "1"}).content.decode()
    assert "PlaneUnknown: N14228 is not known" in asked
    operation = done("reprocess", f"fingerprint:{PRINT} status:ERROR")
    for page in ("auditentry/", "bulkoperation/", f"bulkoperation/{operation.pk}/change/"):
        shown = op.get(f"{ADMIN}/{page}").content.decode()
        assert "PlaneUnknown: N14228 is not known" in shown, page
        assert f"fingerprint:{PRINT}" not in shown, page


def test_the_page_of_a_task_says_who_sent_it_back_and_why_after_a_bulk_operation(op: Client) -> None:
    task, other = make_task(Status.ERROR), make_task(Status.ERROR)
    ada = op.get("/admin/").wsgi_request.user
    bulk.start("reprocess", f"id:{task.pk}", ada, "the register is repaired")
    run()
    shown = op.get(f"{ADMIN}/task/{task.pk}/change/").content.decode()
    assert "the register is repaired" in shown and "Reprocess" in shown and "admin" in shown
    assert "the register is repaired" not in op.get(f"{ADMIN}/task/{other.pk}/change/").content.decode()
    assert "have a change history" not in op.get(f"{ADMIN}/task/{task.pk}/history/", follow=True).content.decode()


def test_the_difference_of_an_edited_payload_is_in_the_audit_for_those_who_see_payloads(op: Client) -> None:
    task = make_task(Status.ERROR, payload={"email": "zoe@exmaple.org", "card_token": "tok_4242"})
    body = {"ids": [task.pk], "payload": {"email": "zoe@example.org", "card_token": "•••"}}
    op.post("/api/tasks/edit/ids", json.dumps(body), content_type="application/json")
    shown = op.get(f"{ADMIN}/auditentry/{AuditEntry.objects.get().pk}/change/").content.decode()
    assert "zoe@exmaple.org" in shown and "zoe@example.org" in shown and "tok_4242" not in shown
    assert "exmaple" not in json.dumps(AuditEntry.objects.get().details), "the entry is read by more people"


def test_the_page_of_a_task_asks_for_the_payload_masked(op: Client) -> None:
    task = make_task(Status.ERROR, payload={"email": "zoe@exmaple.org", "card_token": "tok_4242"})
    page = op.get(f"{ADMIN}/task/{task.pk}/change/").content.decode()
    assert "Edit payload and retry" in page
    asked = op.post(f"{ADMIN}/task/", {"action": "edit", "_selected_action": task.pk, "origin": "page"})
    assert "zoe@exmaple.org" in asked.content.decode() and "tok_4242" not in asked.content.decode()
    text = json.dumps({"email": "zoe@example.org", "card_token": "•••"})
    data = {"action": "edit", "_selected_action": task.pk, "confirm": "yes", "payload": text, "reason": ""}
    op.post(f"{ADMIN}/task/", data)
    assert Task.objects.get(pk=task.pk).payload == {"email": "zoe@example.org", "card_token": "tok_4242"}
