"""The admin: who may do what, what a confirmation promises, what an act really changes, and that nothing leaks."""

import json
import re
from collections.abc import Iterable
from datetime import timedelta
from typing import Any
from urllib.parse import quote as url_quote

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.contrib.auth.models import User
from django.contrib.messages import get_messages
from django.db import connection
from django.db.models import CharField, JSONField, Model
from django.test import Client
from django.test.html import parse_html
from django.test.utils import CaptureQueriesContext
from django.urls import path, reverse
from django.utils import timezone

from django_dbtaskqueue import models
from django_dbtaskqueue.admin import TaskAdmin, list_pages
from django_dbtaskqueue.admin.cells import json_box, status_badge
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.models import Attempt, AuditEntry, BulkOperation, Poller, Queue, Task, TaskHistory
from django_dbtaskqueue.operations import actions
from django_dbtaskqueue.operations.queue_control import pause
from django_dbtaskqueue.operations.serializers import message_of, short_error
from django_dbtaskqueue.operations.verbs import QUEUE_VERBS, TASK_VERBS
from tests.factories import HOLDER, QUEUE, age, make_task
from tests.operations.site import ADMIN, OVERVIEW, POLLERS, QUEUES, TASKS, attempt, elements, staff, text as text_of
from tests.operations.test_hostile_rows import kind_of, plain_row, write

MODELS: list[type[Model]] = [Task, Queue, Poller, Attempt, TaskHistory, BulkOperation, AuditEntry]
MODELS += [models.FailureGroup, models.PipelineReport]
EVIL = """"><img src=x onerror=alert(1)>'</script><script>alert(2)</script>{{ 7 }}{% now %}"""
TRACEBACK = """Traceback (most recent call last):
  File "tasks.py", line 1, in assess
    raise Late("two\\nlines")
desk.rules.Late: no report yet
"""

site = admin.AdminSite(name="ops")
site.register(Task, TaskAdmin)
urlpatterns = [path("ops/", site.urls), path("admin/", admin.site.urls)]
ANSWERS = {"housekeep": {"older_than": "0s", "to": "history"}, "delete": {"reason": "no longer wanted"}}


def list_of(model: type[Model]) -> str:
    return f"{ADMIN}{model._meta.model_name}/"


def page_of(row: Model) -> str:
    return reverse(f"admin:dbtaskqueue_{row._meta.model_name}_change", args=[quote(str(row.pk))])


def post(client: Client, verb: str, rows: Iterable[Model], *, url: str = TASKS, **data: Any) -> Any:
    return client.post(url, {"action": verb, "_selected_action": [row.pk for row in rows], **data})


def confirm(client: Client, verb: str, rows: Iterable[Model], *, url: str = TASKS, **data: Any) -> Any:
    return post(client, verb, rows, url=url, confirm="yes", **{**ANSWERS.get(verb, {}), **data})


def messages_of(response: Any) -> list[str]:
    return [str(message).partition(" <a")[0] for message in get_messages(response.wsgi_request)]  # without the undo


def statuses() -> dict[int, str]:
    return dict(Task.objects.values_list("pk", "status"))


def rows_of(response: Any) -> list[Any]:
    text_of(response)
    return list(response.context["slice"].rows)


def one_of_everything(canary: str = "plain") -> list[Model]:
    """Make a row in each table, with ``canary`` in every column that takes it, and tasks of some statuses."""
    text, document = canary[:90], json.dumps({canary: [canary, 2**70]})
    rows: list[Model] = [make_task(status, queue=text) for status in ("PROCESSING", "ERROR", "CREATED")]
    rows += [plain_row(model) for model in (*MODELS[1:], models.SavedSearch, models.TaskChange)]
    for row in rows:
        for field in row._meta.concrete_fields:
            value = {CharField: text[: field.max_length], JSONField: document}.get(kind_of(field))
            if value is not None and write(row, field, value) and field.primary_key:
                row.pk = value
    # What is shown only where it has its shape, or belongs to something that is shown
    now, running = timezone.now(), [{"task_id": rows[0].pk, "queue": text, "reference": canary}, canary, None]
    Queue.objects.update(paused_time=now)
    Poller.objects.update(queues=[{"queue": text, "weight": 2}, text], running=running)
    Attempt.objects.update(task_id=rows[1].pk, location="dbtaskqueue.task")
    for kind, name in (("outcome", text[:30]), ("failure", text[:40])):
        models.MinuteCount.objects.create(kind=kind, queue=text, minute=now, name=name, count=2)
    return rows[: 2 + len(MODELS)]


def all_pages(rows: Iterable[Model]) -> list[str]:
    """Return the addresses of every list, of their filters, and of the page and log of each row."""
    pages = [page_of(row) for row in rows]
    lists = [*map(list_of, MODELS), OVERVIEW, f"{ADMIN}poisontask/", f"{ADMIN}doctor/"]
    searches = [f"{TASKS}?{query}" for query in ("status=ERROR", f"queue={QUEUE}", "q=held")]
    logs = [page.replace("/change/", "/history/") for page in pages]
    return [*lists, *searches, *pages, *logs, *(f"{url}?_live=1" for url in (*lists, pages[1]))]


def test_strangers_are_sent_to_the_login() -> None:
    client = staff("reprocess_task", "pause_queue", "view_payload", "control_poller")
    for url in all_pages(one_of_everything()):
        for response in (Client().get(url), Client().post(url, {"action": "reprocess", "_selected_action": "1"})):
            assert (response.status_code, response.headers["Location"][:13]) == (302, "/admin/login/"), url
        assert client.get(url).status_code == 403, url


def test_nobody_writes_a_row_by_hand(op: Client) -> None:
    rows = one_of_everything()
    for model in MODELS:
        row = next(row for row in rows if isinstance(row, model))
        before = model._default_manager.values().get(pk=row.pk)
        for url in (page_of(row), page_of(row).replace("/change/", "/delete/"), f"{list_of(model)}add/"):
            assert op.post(url, {"post": "yes", "status": "COMPLETED", "queue": "x"}).status_code == 403, url
        op.post(list_of(model), {"action": "delete_selected", "_selected_action": row.pk, "post": "yes"})
        assert model._default_manager.values().get(pk=row.pk) == before


def test_acts_are_refused_without_the_csrf_token(admin_user: User) -> None:
    client, task = Client(enforce_csrf_checks=True), make_task(Status.ERROR)
    client.force_login(admin_user)
    assert confirm(client, "reprocess", [task]).status_code == 403
    assert confirm(client, "pause", [Queue(name=QUEUE)], url=QUEUES).status_code == 403
    assert (statuses(), Queue.objects.count()) == ({task.pk: "ERROR"}, 0)


def test_nothing_from_a_row_is_markup_and_looking_changes_nothing(op: Client) -> None:
    rows = one_of_everything(EVIL)
    some, queue = rows[:3], next(row for row in rows if isinstance(row, Queue))
    tables = [*MODELS, LogEntry]
    before = [list(model._default_manager.order_by("pk").values()) for model in tables]
    pages = [*all_pages(rows), *(f"{TASKS}?{key}={url_quote(EVIL)}" for key in ("queue", "status", "q", "ref"))]
    for url in [*pages, f"{QUEUES}?name={url_quote(EVIL)}"]:
        assert_harmless(text_of(op.get(url)), url)
    op.get(f"{TASKS}?action=reprocess&_selected_action={rows[1].pk}&confirm=yes&index=0")
    assert [list(model._default_manager.order_by("pk").values()) for model in tables] == before
    questions = post(op, "reprocess", some, origin=EVIL), post(op, "housekeep", some)
    refused = confirm(op, "pause", [queue], url=QUEUES, until=EVIL, reason=EVIL)
    for answer in (*questions, post(op, "pause", [queue], url=QUEUES), refused):
        assert_harmless(text_of(answer), str(answer.request))
    for done in (confirm(op, "reprocess", some), confirm(op, "pause", [queue], url=QUEUES, reason=EVIL)):
        assert_harmless(text_of(op.get(done.headers["Location"])), "answer")
    for url in (page_of(rows[1]), page_of(rows[1]).replace("/change/", "/history/"), "/admin/"):
        assert_harmless(text_of(op.get(url)), url)
    assert "&lt;img src=x" in text_of(op.get(page_of(rows[1])))


def assert_harmless(shown: str, where: str) -> None:
    """Nothing of the canary became a tag, an attribute or a template's work, and the page brings no code of its own."""
    page = list(elements(parse_html(shown)))
    attributes = [pair for element in page for pair in element.attributes]
    assert ("src", "x") not in attributes, where
    assert not [name for name, _ in attributes if name.startswith("on") or name == "style"], where
    assert not [element for element in page if element.name in ("script", "style") and element.children], where


def test_the_number_of_queries_of_a_list_does_not_grow(op: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_pages, "PAGE_ROWS", 2)
    counts: dict[type[Model], list[int]] = {model: [] for model in MODELS}
    for round_ in range(2):
        for number in range(3):
            one_of_everything(f"{round_}-{number}")
        for model, found in counts.items():
            op.get(list_of(model))
            with CaptureQueriesContext(connection) as queries:
                text_of(op.get(list_of(model)))
            found.append(len(queries))
    # Tabs with numbers on the list of tasks, figures on that of queues
    most = {model: 40 if model in (Task, Queue) else 20 for model in MODELS}
    assert [row for row in counts.items() if row[1][0] != row[1][1] or row[1][1] > most[row[0]]] == []


def test_pages_of_a_list_lead_to_each_other(op: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_pages, "PAGE_ROWS", 2)
    tasks = [make_task().pk for _ in range(5)]
    make_task(queue="letters")
    seen, url = [], f"{TASKS}?q=queue:{QUEUE}"
    while url:
        response = op.get(url)
        seen.append([row.pk for row in rows_of(response)])
        url = response.context["older_url"] if response.context["slice"].older else ""
    assert seen == [tasks[4:2:-1], tasks[2:0:-1], tasks[:1]]
    back = op.get(response.context["newer_url"])
    assert [row.pk for row in rows_of(back)] == seen[1]
    first = op.get(back.context["here"])
    assert ([row.pk for row in rows_of(first)], first.context["slice"].newer) == (seen[0], None)
    assert op.get(f"{TASKS}?before=x").status_code == 400


def test_other_columns_cannot_be_filtered_by(op: Client) -> None:
    task, other = make_task(Status.ERROR, reference="UA-15"), make_task(Status.POISON, queue="nobody-knows-it")
    for query, expected in [
        *(("status=ERROR", [task]), ("queue=nobody-knows-it", [other]), ("status=ERROR&queue=nobody-knows-it", [])),
        *(("status=NONSENSE", []), ("q=status:ERROR,POISON", [other, task]), ("q=UA-1", [task]), ("", [other, task])),
    ]:
        assert rows_of(op.get(f"{TASKS}?{query}")) == expected, query
    for query in ("payload__icontains=x", "process_result__regex=.", "poller_instance=x", "id__gt=1"):
        assert op.get(f"{TASKS}?{query}").status_code == 400, query


def test_the_page_of_a_task_tells_its_story(op: Client) -> None:
    task = make_task(Status.ERROR, payload={"flight": "UA 1545", "big": 2**70}, process_result=TRACEBACK, tag="eu")
    for number in (1, 2):
        attempt(task, attempt=number, total_attempt=number, traceback=f"trace {number}")
    attempt(task, location="other.table")
    poller = Poller.objects.create(instance=HOLDER)
    response = op.get(page_of(task))
    shown = text_of(response)
    told = ["created", "last checked out", "finished", "attempt 1 failed", "attempt 2 failed"]
    assert [event["what"] for event in response.context["events"]] == told
    assert 'class="dbtq-box" tabindex="0">trace 2</pre>' in shown
    assert f'<a href="{page_of(poller)}">{HOLDER}</a>' in shown
    assert f"&quot;big&quot;: {2**70}" in shown, "exact"
    assert "The task ended in ERROR" in shown and "ERROR" in text_of(op.get(TASKS))
    assert "<dt>Tag</dt>" in shown and "<dt>Group</dt>" not in shown
    assert "exist. Perhaps it was deleted?" in text_of(op.get(f"{TASKS}123456/change/", follow=True))


def test_a_question_says_what_would_change_and_what_changed_since_is_skipped(op: Client) -> None:
    tasks = [make_task(status) for status in (Status.ERROR, Status.ERROR, Status.COMPLETED)]
    shown = text_of(post(op, "reprocess", tasks, index="0"))
    assert "2 would change; the others are skipped: not in ERROR." in shown and "ERROR to CREATED" in shown
    nothing = text_of(post(op, "reprocess", tasks[2:]))
    assert "0 would change; the others are skipped" in nothing and 'name="confirm"' not in nothing
    Task.objects.filter(pk=tasks[0].pk).mark_poison()
    said = "1 task reprocessed, 1 skipped (in POISON, not in ERROR: 1)."
    answer = confirm(op, "reprocess", tasks[:2])
    assert (messages_of(answer), answer.headers["Location"]) == ([said], TASKS)
    assert [statuses()[task.pk] for task in tasks[:2]] == ["POISON", "CREATED"]


def test_all_that_match_become_a_bulk_operation(op: Client) -> None:
    inside = [make_task(Status.ERROR) for _ in range(3)]
    outside = make_task(Status.ERROR, queue="letters")
    url = f"{TASKS}?queue={QUEUE}&status=ERROR"
    shown = text_of(post(op, "reprocess", inside[:1], url=url, select_across="1"))
    assert "3 tasks match." in shown and '<input type="hidden" name="select_across" value="1">' in shown
    assert f'action="{url.replace("&", "&amp;")}"' in shown
    response = confirm(op, "reprocess", inside[:1], url=url, select_across="1", reason="repaired")
    operation = BulkOperation.objects.get()
    assert (operation.verb, operation.reason) == ("reprocess", "repaired")
    assert response.headers["Location"] == page_of(operation) and set(statuses().values()) == {"ERROR"}
    op.post(list_of(BulkOperation), {"operation": operation.pk, "work": "1"})
    assert statuses() == {**{task.pk: "CREATED" for task in inside}, outside.pk: "ERROR"}
    assert "finished" in text_of(op.get(page_of(operation)))


def test_a_bulk_operation_can_be_cancelled_before_its_steps(op: Client) -> None:
    task = make_task(Status.ERROR)
    confirm(op, "reprocess", [], url=f"{TASKS}?q=status:ERROR", select_across="1")
    operation = BulkOperation.objects.get()
    for button in ("cancel", "work"):
        op.post(list_of(BulkOperation), {"operation": operation.pk, button: "1"})
    assert "cancelled by admin" in text_of(op.get(page_of(operation))) and statuses() == {task.pk: "ERROR"}


def test_all_of_everything_is_refused_and_deleting_needs_a_reason(op: Client) -> None:
    task = make_task(Status.ERROR)
    for search in ("", "nosuch:x"):
        answer = confirm(op, "reprocess", [], url=f"{TASKS}?q={search}", select_across="1")
        assert 'class="error"' in text_of(op.get(answer.headers["Location"])) and not BulkOperation.objects.exists()
    assert "This field is required." in text_of(confirm(op, "delete", [task], reason=" "))
    assert statuses() == {task.pk: "ERROR"}


QUERIES_OF_ITS_OWN = [
    # The UPDATE, the operation to undo, the time of it, the record of what the task was.
    *(("reprocess", Status.ERROR, 4), ("mark_poison", Status.ERROR, 4), ("unpoison", Status.POISON, 4)),
    *(("kick", Status.POISON, 4), ("cancel", Status.CREATED, 4), ("cancel", Status.PROCESSING, 4)),
    ("release", Status.PROCESSING, 3),
    ("delete", Status.ERROR, 5),  # what waits, steps, DELETE, counts, references that stay taken
    # Two rounds with a savepoint each: read, copy, DELETE of steps and the task, then read none.
    ("housekeep", Status.ERROR, 6),
]
STARTS = [
    *('SELECT "django_session"', 'SELECT "auth_user"'),
    *('SELECT "django_content_type"', 'SELECT "django_content_type"'),  # the user's permissions, the groups' ones
    "SAVEPOINT",  # BEGIN, outside a test
    'SELECT "dbtaskqueue_task"',  # reads and locks the task
    'INSERT INTO "django_admin_log"',
    'INSERT INTO "dbtaskqueue_auditentry"',  # with what came of it
    "RELEASE SAVEPOINT",  # COMMIT, outside a test
]


@pytest.mark.parametrize(("verb", "status", "own"), QUERIES_OF_ITS_OWN)
def test_a_confirmed_act_on_one_task_reads_it_once(verb: str, status: Status, own: int) -> None:
    client = staff("view_task", TASK_VERBS[verb].permission)
    confirm(client, verb, [make_task(status)])  # Django reads the content type once in a process
    task = make_task(status)
    with CaptureQueriesContext(connection) as queries:
        confirm(client, verb, [task])
    found = [query["sql"] for query in queries]
    shown = [statement for statement in found if not statement.startswith("SELECT DISTINCT")]
    # The groups to lock before the task, of a verb that can change the head of a group.
    assert len(found) - len(shown) == (verb not in ("mark_poison", "unpoison", "housekeep"))
    assert len(shown) == 9 + own, shown
    # A verb that keeps the task records last what it was: the time of the update, and the record.
    logged = -6 if TASK_VERBS[verb].undoable else -5
    common = shown[:6] + (shown[-3:] if TASK_VERBS[verb].deletes else [shown[logged], shown[-4], shown[-1]])
    assert [one for one, start in zip(common, STARTS, strict=True) if not one.startswith(start)] == []
    assert "FOR UPDATE" in shown[5] and "COUNT(*)" not in "".join(shown)
    assert AuditEntry.objects.filter(verb=verb, changed=1).count() == LogEntry.objects.count() == 2


def test_more_than_a_thousand_ticked_tasks_are_refused(op: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "MAX_TASKS_PER_ACTION", 2)
    tasks = [make_task(Status.ERROR) for _ in range(3)]
    assert "takes up to 2 ids at once, not 3" in text_of(op.get(confirm(op, "mark_poison", tasks).headers["Location"]))
    assert set(statuses().values()) == {"ERROR"}


def test_housekeeping_asks_for_age_and_destination(op: Client) -> None:
    both = [make_task(Status.ERROR), make_task(Status.COMPLETED)]
    age(timedelta(days=15), pk=both[0].pk)
    # The question begins with fourteen days and the history, and counts again for another age
    shown = text_of(post(op, "housekeep", both))
    assert 'name="older_than" value="14d"' in shown and "1 would change;" in shown
    assert "2 would change." in text_of(post(op, "housekeep", both, recount="yes", older_than="0s", to="history"))
    for wrong in ({"older_than": text} for text in ("", "-1", "x", "99999999999")):
        assert "errorlist" in text_of(confirm(op, "housekeep", both, **wrong))
    assert "errorlist" in text_of(confirm(op, "housekeep", both, to="elsewhere")) and Task.objects.count() == 2


def test_acting_from_the_page_of_a_task_leads_back_to_it(op: Client) -> None:
    def offered(shown: str) -> list[str]:
        return re.findall(r'name="action" value="(\w+)"', shown)

    task = make_task(Status.ERROR)
    assert offered(text_of(op.get(page_of(task)))) == ["reprocess", "mark_poison", "housekeep", "edit", "delete"]
    assert f'href="{page_of(task)}"' in text_of(post(op, "reprocess", [task], origin="page"))
    editor = staff("view_task", "edit_payload_task")
    assert confirm(editor, "edit", [task], origin="page", payload="1").headers["Location"] == page_of(task)
    assert "you need the permission to see payloads" in text_of(editor.get(page_of(task)))
    assert confirm(op, "reprocess", [task], origin="page").headers["Location"] == page_of(task)
    shown = text_of(op.get(page_of(task)))
    assert "1 task reprocessed." in shown
    assert offered(shown) == ["cancel", "run_now", "snooze", "change_priority", "move", "signal", "delete"]


def test_pause_with_reason_and_end_then_resume(op: Client) -> None:
    confirm(op, "pause", [Queue(name="no-such-queue")], url=QUEUES)
    both = [Queue(name=QUEUE), Queue(name="letters")]
    assert "2 queues are selected." in text_of(post(op, "pause", both, url=QUEUES))
    assert not Queue.objects.exists()
    tomorrow = (timezone.now() + timedelta(days=1)).replace(second=0, microsecond=0)
    response = confirm(op, "pause", both, url=QUEUES, reason="maintenance", until=f"{tomorrow:%Y-%m-%dT%H:%M}")
    assert messages_of(response) == ["2 queues paused."]
    row = Queue.objects.get(name=QUEUE)
    assert (row.paused_reason, row.paused_by, row.paused_until) == ("maintenance", "admin", tomorrow)
    assert f"by admin: maintenance, until {tomorrow:%Y-%m-%d %H:%M}" in text_of(op.get(QUEUES))
    assert LogEntry.objects.count() == 2
    response = confirm(op, "resume", both[:1], url=QUEUES, origin="page")
    assert response.headers["Location"] == page_of(both[0])
    assert messages_of(response)[-1:] == ["1 queue resumed."]
    op.get(QUEUES)
    assert messages_of(confirm(op, "resume", both, url=QUEUES)) == ["1 queue resumed, 1 skipped: not paused."]
    assert not Queue.objects.filter(paused_time__isnull=False).exists()


def test_a_pause_ends_in_the_future_and_is_offered_to_those_who_may(op: Client) -> None:
    yesterday = f"{timezone.now() - timedelta(days=1):%Y-%m-%dT%H:%M}"
    shown = text_of(confirm(op, "pause", [Queue(name=QUEUE)], url=QUEUES, until=yesterday))
    assert "Give a time in the future, or none." in shown and not Queue.objects.exists()
    pause(QUEUE, "default", by="ada", until=timezone.now() + timedelta(hours=1))
    assert ">paused<" in text_of(op.get(QUEUES))
    age(timedelta(hours=2), model=Queue, name=QUEUE)
    assert ">paused<" not in text_of(op.get(QUEUES))
    for held in ("pause_queue", "change_queue"):
        page = text_of(staff("view_queue", held, name=held).get(QUEUES))
        offered = {verb: f'name="action" value="{verb}"' in page for verb in QUEUE_VERBS}
        assert offered == dict.fromkeys(QUEUE_VERBS, held == "pause_queue")


def test_pollers_that_missed_three_heartbeats_are_late_and_attempts_are_found_by_task(op: Client) -> None:
    task = make_task(Status.PROCESSING)
    queues = [{"queue": QUEUE, "weight": 1}, {"queue": "letters", "weight": 3}]
    facts = {"held": 1, "slots": 4, "queues": queues, "running": [{"task_id": task.pk, "queue": QUEUE}]}
    same = ["1/4", f"{QUEUE}, letters:3", f'<a href="{page_of(task)}">{task.pk}</a>']
    for silent, words in ((1, "RUNNING<"), (200, "RUNNING, late"), (200, "STOPPED<"), (1, "WAITING<")):
        poller = Poller.objects.create(instance=HOLDER, state=words[:7], **facts)
        age(timedelta(seconds=silent), model=Poller, pk=poller.pk)
        for url in (POLLERS, page_of(poller)):
            shown = text_of(op.get(url))
            assert [one for one in (words, *same) if one not in shown] == [], (words, url)
        poller.delete()
    for model, more in ((Attempt, {"attempt": 1, "total_attempt": 1}), (TaskHistory, {})):
        rows = [model._default_manager.create(task_id=number, queue=QUEUE, **more) for number in (7, 8)]
        for term, expected in [("7", rows[:1]), ("70", []), ("x", []), ("", rows[::-1])]:
            assert rows_of(op.get(list_of(model), {"task_id": term})) == expected


def test_queues_with_a_table_of_their_own(op: Client, settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"quick": {"temporary": True}}}
    tasks, url = models.TemporaryTask.objects, f"{ADMIN}temporarytask/"
    task = tasks.create(queue="quick", status=Status.ERROR, ready_time=None, final_status=Status.ERROR)
    link = f'<a href="{page_of(task)}">{task.pk}</a>'
    assert link in text_of(op.get(page_of(attempt(task, location="dbtaskqueue.temporarytask"))))
    assert f'<a href="{url}?q=queue%3Aquick+status%3AERROR">1</a>' in text_of(op.get(QUEUES))
    assert f'href="{url}?q=queue%3Aquick"' in text_of(op.get(url))
    assert 'value="reprocess"' in text_of(op.get(page_of(task)))
    response = confirm(op, "reprocess", [task], url=url, origin="page")
    assert (messages_of(response), response.headers["Location"]) == (["1 task reprocessed."], page_of(task))
    assert tasks.get().status == Status.CREATED


@pytest.mark.django_db(databases=["default", "sqlite"])
def test_queues_on_another_database(op: Client, settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"far": {"database": "sqlite"}}}
    make_task(queue="far", using="sqlite")
    far = Queue(name="far")
    confirm(op, "pause", [far], url=QUEUES, reason="moving")
    assert not Queue.objects.exists()
    assert "by admin: moving" in text_of(op.get(page_of(far)))
    assert [queue.paused_reason for queue in rows_of(op.get(QUEUES)) if queue.name == "far"] == ["moving"]
    confirm(op, "resume", [far], url=QUEUES)
    assert not Queue.objects.using("sqlite").filter(paused_time__isnull=False).exists()


def test_the_admin_works_on_a_site_of_ones_own(op: Client, settings: Any) -> None:
    settings.ROOT_URLCONF = __name__
    task, tasks = make_task(Status.ERROR), "/ops/dbtaskqueue/task/"
    shown = text_of(op.get(tasks)) + text_of(op.get(f"{tasks}{task.pk}/change/"))
    assert "/admin/dbtaskqueue" not in shown + text_of(post(op, "reprocess", [task], url=tasks, origin="page"))
    assert confirm(op, "reprocess", [task], url=tasks, origin="page").headers["Location"] == f"{tasks}{task.pk}/change/"
    assert statuses() == {task.pk: "CREATED"}


def test_how_odd_values_and_long_messages_are_shown() -> None:
    for text, line in (
        *((None, ""), ("one\ntwo", "one"), (TRACEBACK, "Late: no report yet")),
        ('  File "x.py", line 1\n    cut', "cut"),
        ('  File "x.py", line 1\n    cut\nLate: one\ntwo', "Late: one"),
        ("Traceback (most recent call last):", "Traceback (most recent call last):"),
        ("x" * 500, "x" * 159 + "…"),
    ):
        assert message_of(text) == line
    for line, short in (("a.b.C: d.e", "C: d.e"), ("a.b.C", "C"), ("see a.b: c", "see a.b: c"), ("", "")):
        assert short_error(line) == short, "without its module"
    assert [json_box(value) for value in (None, False)] == ["-", '<pre class="dbtq-box" tabindex="0">false</pre>']
    assert "dbtq-unknown" in status_badge("LATER")
