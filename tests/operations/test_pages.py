"""The operations pages through Django's test client: what they say, what they keep to themselves, what they do."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.admin import site
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.db import connection, transaction
from django.db.models.functions import Now
from django.http import HttpResponse
from django.test import Client, RequestFactory
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

import django_dbtaskqueue
from django_dbtaskqueue.admin import list_pages
from django_dbtaskqueue.admin.overview_pages import ended
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.models import (
    Attempt,
    AuditEntry,
    BulkOperation,
    FailureCount,
    FailureGroup,
    Metric,
    PipelineReport,
    Poller,
    Queue,
    SavedSearch,
    Task,
)
from django_dbtaskqueue.operations import paging
from django_dbtaskqueue.operations.queue_control import pause
from django_dbtaskqueue.operations.report_page import html_file
from django_dbtaskqueue.operations.trends import Point
from tests.factories import HOLDER, QUEUE, make_task
from tests.poller.processes import polling
from tests.report_figures import report_figures
from tests.support import until

pytestmark = pytest.mark.django_db

ADMIN = "/admin/dbtaskqueue/"
TASKS, OVERVIEW, QUEUES, POLLERS = (f"{ADMIN}{name}/" for name in ("task", "overview", "queue", "poller"))
STATIC = Path(django_dbtaskqueue.__file__).parent / "static" / "dbtaskqueue"


@pytest.fixture(autouse=True)
def _known_queues(settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {"lease": "2m"}, "letters": {}}, "HEARTBEAT": "1s"}


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take its time: what is counted or found late would be shown otherwise."""
    monkeypatch.setattr(list_pages, "COUNT_TIMEOUT", timedelta(seconds=60))
    monkeypatch.setattr(paging, "WHOLE_SEARCH_TIMEOUT", timedelta(seconds=60))


def staff(*codenames: str) -> Client:
    user = User.objects.create_user("staff", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(content_type__app_label="dbtaskqueue", codename__in=codenames))
    client = Client()
    client.force_login(user)
    return client


def text(response: Any) -> str:
    assert response.status_code == 200, response
    response.render() if hasattr(response, "render") and not response.is_rendered else None
    return str(response.content.decode())


def test_breadcrumbs_are_a_list_as_in_django_6(op: Client) -> None:
    task = make_task(reference="A-7")
    (crumbs,) = re.findall(r'<ol class="breadcrumbs">.*?</ol>', text(op.get(f"{TASKS}{task.pk}/change/")), re.DOTALL)
    shown = [re.sub(r"<[^>]*>", "", item) for item in re.findall(r"<li.*?</li>", crumbs)]
    assert shown == ["Home", "Task queue", "Tasks", f"{QUEUE}/A-7"]


# -- the overview -----------------------------------------------------------------------------------------------------


def serve(*queues: str) -> None:
    Poller.objects.create(instance=HOLDER, state="RUNNING", queues=list(queues), heartbeat_time=Now())


def test_the_first_sentence_says_whether_all_is_well(op: Client) -> None:
    serve(QUEUE, "letters")
    make_task()
    assert "All queues are on time." in text(op.get(OVERVIEW))
    for queue, late in ((QUEUE, timedelta(minutes=4, seconds=12)), ("letters", timedelta(minutes=2))):
        make_task(queue=queue, create_time=-late, ready_time=-late)
    assert "2 queues late, oldest 4m1" in text(op.get(OVERVIEW))


def test_what_waits_in_a_paused_queue_is_not_late_and_what_nobody_serves_is_said(op: Client) -> None:
    late = -timedelta(minutes=9)
    make_task(create_time=late, ready_time=late)
    make_task(queue="letters")
    pause([QUEUE], by="ada")
    shown = text(op.get(OVERVIEW))
    assert f"Paused: {QUEUE} (by ada)." in shown
    assert "Nothing serves letters." in shown
    assert "late" not in shown.split("dbtq-health")[1].split("</div>")[0]


def test_cells_lead_to_the_tasks_they_count(op: Client) -> None:
    make_task(Status.ERROR)
    make_task(Status.ERROR)
    assert f'<a href="{TASKS}?q=queue%3A{QUEUE}+status%3AERROR">2</a>' in text(op.get(OVERVIEW))
    found = op.get(f"{TASKS}?q=queue%3A{QUEUE}+status%3AERROR")
    assert text(found)
    assert len(found.context["slice"].rows) == 2


def test_a_thousand_queues_are_shown_by_need_and_found_by_name(op: Client, settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {f"q{number:04}": {} for number in range(1000)}}
    make_task(Status.ERROR, queue="q0777")
    with CaptureQueriesContext(connection) as queries:
        shown = text(op.get(OVERVIEW))
    assert len(queries) < 40
    assert shown.index(">q0777</a>") < shown.index(">q0000</a>")
    known = len(list(conf.known_queues()))
    assert f"{known - 100} more queues: search by name." in shown
    assert ">q0999</a>" in text(op.get(f"{OVERVIEW}?name=q0999"))
    assert f"{known} queues; the first 200 by name" in text(op.get(QUEUES))
    assert ">q0999</a>" in text(op.get(f"{QUEUES}?name=q0999"))


def test_the_page_of_a_queue_says_how_it_is(op: Client) -> None:
    """Given tasks in three statuses, then its page counts them and leads to them, as the overview does."""
    serve("letters")
    make_task(Status.ERROR)
    make_task(Status.CREATED, ready_time=-timedelta(minutes=5))
    make_task(Status.CREATED, queue="letters")
    page = op.get(f"{QUEUES}{QUEUE}/change/")
    shown = text(page)
    (row,) = page.context["rows"]
    (same,) = (one for one in op.get(OVERVIEW).context["rows"] if one["name"] == QUEUE)
    assert row["cells"] == same["cells"]
    assert [cell["text"] for cell in row["cells"]] == ["1", "0", "0", "1", "0", "2"]
    assert f'href="{TASKS}?q=queue%3A{QUEUE}+status%3AERROR"' in shown
    assert "no poller" in shown and "5m" in row["oldest"]


def test_charts_are_drawn_from_tables_that_say_the_same(op: Client) -> None:
    minute = Now() - timedelta(minutes=2)
    for outcome, count in (("completed", 120), ("retried", 7), ("failed", 3)):
        runs, waits = {"20": count}, {"30": count}
        Metric.objects.create(queue=QUEUE, minute=minute, outcome=outcome, count=count, runs=runs, waits=waits)
    page = op.get(OVERVIEW)
    shown = text(page)
    throughput, _latency = page.context["charts"]
    counted = [re.findall(r'data-value="([^"]*)"', row) for row in throughput.body.splitlines()]
    assert [row for row in counted if set(row) != {"0"}] == [["120", "10", "0", "0"]], (
        "failed is every attempt that did"
    )
    assert 'data-table="dbtq-throughput-table"' in shown
    assert 'id="dbtq-throughput-table"' in shown
    assert shown.count("<time") > 100, "a row for each minute, in both"


def test_a_chart_ends_before_the_minute_that_runs() -> None:
    then = datetime(2026, 11, 21, 3, tzinfo=UTC)
    past, running = (Point(then, seconds, {"completed": count}) for seconds, count in ((60, 500), (3, 1)))
    quiet = Point(then, 60)
    assert ended([past, quiet, running]) == [past, quiet]
    assert ended([quiet, running]) == [quiet, running], "all there is yet"
    assert ended([quiet, Point(then, 3)]) == []


def test_vendored_files_are_what_was_published() -> None:
    (sums,) = STATIC.glob("vendor/*/SHA256SUMS")
    for line in sums.read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((sums.parent / name).read_bytes()).hexdigest() == digest, name
    assert "MIT" in (sums.parent / "LICENSE").read_text()


# -- the part that refreshes ------------------------------------------------------------------------------------------


def live(client: Client, url: str, etag: str = "") -> HttpResponse:
    headers = {"If-None-Match": etag} if etag else {}
    return client.get(f"{url}{'&' if '?' in url else '?'}_live=1", headers=headers)  # type: ignore[return-value]


@pytest.mark.parametrize("url", [f"{TASKS}?q=status:ERROR", QUEUES, POLLERS, f"{ADMIN}auditentry/"])
def test_what_did_not_change_is_not_sent_again(op: Client, url: str) -> None:
    task = make_task(Status.ERROR)
    serve(QUEUE)
    first = live(op, url)
    assert b"<html" not in first.content
    again = live(op, url, first.headers["ETag"])
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["X-As-Of"] >= first.headers["X-As-Of"]
    # When something changes, then it is sent
    pause([QUEUE], by="ada")
    Task.objects.filter(pk=task.pk).reprocess()
    Poller.objects.update(held=7)
    AuditEntry.objects.create(actor="ada", verb="pause")
    assert live(op, url, first.headers["ETag"]).status_code == 200


def test_the_part_that_refreshes_is_the_part_of_the_page(op: Client) -> None:
    make_task(Status.ERROR, reference="UA-15")
    whole, part = text(op.get(TASKS)), text(live(op, TASKS))
    assert part.split('class="table-container"')[1][:200] == whole.split('class="table-container"')[1][:200]


# -- too slow ---------------------------------------------------------------------------------------------------------


def test_a_search_that_takes_too_long_is_given_up_and_says_how_to_narrow_it(op: Client, settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {}}, "OPERATIONS_TIMEOUT": "1ms"}
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO dbtaskqueue_task (queue_name) SELECT %s FROM generate_series(1, 20000)", [QUEUE])
    response = op.get(f"{TASKS}?q=payload.find:UA-15")
    assert response.status_code == 503
    assert "Narrow the search" in response.content.decode()
    assert response.headers["Retry-After"]


# -- what not everybody sees ------------------------------------------------------------------------------------------


def secret_task() -> Task:
    task = make_task(
        Status.ERROR,
        payload={"card": "4242", "password": "hunter2"},
        process_result="Traceback: password=hunter2",
        context={"who": "zoe"},
    )
    Attempt.objects.create(
        task_id=task.pk, queue=QUEUE, attempt=1, total_attempt=1, message="no", traceback="deep: password=hunter2"
    )
    return task


def test_payloads_and_tracebacks_need_their_permission(op: Client) -> None:
    task = secret_task()
    pages = [f"{TASKS}{task.pk}/change/", f"{ADMIN}attempt/{Attempt.objects.get().pk}/change/"]
    reader, trusted = staff("view_task", "view_attempt"), op
    for page in pages:
        shown = text(reader.get(page))
        assert "4242" not in shown
        assert "deep:" not in shown
        assert "need the permission to see them" in shown
        assert "need the permission" not in text(trusted.get(page))
    assert "4242" in text(trusted.get(pages[0]))


def test_results_and_searches_in_payloads_need_it_too(op: Client) -> None:
    make_task(Status.COMPLETED, process_result="paid 600 to zoe", payload={"card": "4242"})
    reader = staff("view_task")
    page = f"{TASKS}{Task.objects.get().pk}/change/"
    assert "paid 600" in text(op.get(page))
    assert "paid 600" not in text(reader.get(page)) + text(reader.get(TASKS))
    found = {}
    for who, client in (("op", op), ("reader", reader)):
        response = client.get(f"{TASKS}?q=payload.card:4242")
        text(response)
        found[who] = len(response.context["slice"].rows)
    assert found == {"op": 1, "reader": 0}


def not_in_letters(user: Any, verb: str, queue: str) -> bool:
    return verb != "view_payload" or queue != "letters"


def test_payloads_are_seen_and_searched_by_queue(settings: Any) -> None:
    """Given somebody who may see all payloads but those of one queue, then no search tells what stands there."""
    rule = {"CAN_OPERATE": f"{__name__}.not_in_letters"}
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {}, "letters": {}}} | rule
    for queue in (QUEUE, "letters"):
        make_task(Status.ERROR, queue=queue, payload={"card": "4242"}, process_result="no card")
    reader = staff("view_task", "view_payload")
    for search, rows, words in (
        (f"payload.card:4242 queue:{QUEUE}", 1, ""),
        ("payload.card:4242 queue:letters", 0, "Name a queue that you may see"),
        (f"error:card queue:{QUEUE},letters", 0, "Name a queue that you may see"),
        ("payload.card:4242", 0, "Name a queue that you may see"),
        ("status:ERROR", 2, ""),
    ):
        response = reader.get(TASKS, {"q": search})
        assert words in text(response)
        assert len(response.context["slice"].rows) == rows, search
    shown = {task.queue: text(reader.get(f"{TASKS}{task.pk}/change/")) for task in Task.objects.all()}
    assert "4242" in shown[QUEUE]
    assert "4242" not in shown["letters"]


def test_secrets_are_masked_for_everybody(op: Client) -> None:
    task = secret_task()
    for page in (TASKS, f"{TASKS}{task.pk}/change/", f"{ADMIN}attempt/{Attempt.objects.get().pk}/change/"):
        assert "hunter2" not in text(op.get(page)), page


# -- saved views ------------------------------------------------------------------------------------------------------


def test_a_search_can_be_kept_under_a_name_and_shared(op: Client) -> None:
    url = f"{TASKS}?q=queue:letters"
    op.post(url, {"save_view": "1", "view_name": "Letters", "view_shared": "1"})
    op.post(TASKS, {"save_view": "1", "view_name": "Everything"})
    other = staff("view_task")
    (saved,) = SavedSearch.objects.all()
    assert (saved.owner, saved.query) == ("admin", "queue:letters")
    assert '<a href="?q=queue%3Aletters">Letters</a>' in text(other.get(TASKS))
    other.post(TASKS, {"forget_view": saved.pk})
    assert SavedSearch.objects.exists(), "it belongs to somebody else"
    op.post(TASKS, {"forget_view": saved.pk})
    assert not SavedSearch.objects.exists()


# -- acting on a group, again as new ----------------------------------------------------------------------------------


def test_a_failure_group_is_acted_on_as_a_whole(op: Client) -> None:
    # Given two tasks that failed for one reason, and one that failed for another
    one, other = "a" * 40, "b" * 40
    same = [make_task(Status.ERROR, fingerprint=one) for _ in range(2)]
    apart = make_task(Status.ERROR, fingerprint=other)
    FailureGroup.objects.create(
        fingerprint=one, queue=QUEUE, error_type="desk.Late", message="no report", first_seen=Now(), last_seen=Now()
    )
    FailureCount.objects.create(fingerprint=one, minute=Now(), count=5)
    # When the group is looked at, then it says how often and how many
    page = f"{ADMIN}failuregroup/{one}/change/"
    shown = text(op.get(page))
    assert "Late: no report" in shown
    action = f"{TASKS}?q=fingerprint%3A{one}+status%3AERROR"
    assert f'action="{action}"' in shown
    assert ">5<" in text(op.get(f"{ADMIN}failuregroup/"))
    # When it is reprocessed, then its tasks go back in line, and the other does not
    assert "2 tasks match." in text(op.post(action, {"action": "reprocess", "select_across": "1"}))
    op.post(action, {"action": "reprocess", "select_across": "1", "confirm": "yes"})
    op.post(f"{ADMIN}bulkoperation/", {"operation": BulkOperation.objects.get().pk, "work": "1"})
    assert set(Task.objects.filter(pk__in=[task.pk for task in same]).values_list("status", flat=True)) == {"CREATED"}
    assert Task.objects.get(pk=apart.pk).status == "ERROR"


def test_a_task_can_be_enqueued_again_as_new(op: Client) -> None:
    task = make_task(
        Status.COMPLETED, reference="UA-15", payload={"n": 2**70}, payload_type="desk.Claim", priority=3, tag="eu",
        lease_seconds=90.0, max_attempts=9, create_time=timedelta(hours=-2), expire_time=timedelta(hours=1),
    )  # fmt: skip
    assert "Enqueue again as new" in text(op.get(f"{TASKS}{task.pk}/change/"))
    assert text(op.post(TASKS, {"again": task.pk}))
    assert Task.objects.count() == 1, "it asks first"
    response = op.post(TASKS, {"again": task.pk, "confirm": "yes", "reason": "lost by the printer"})
    fresh = Task.objects.latest("pk")
    assert response.headers["Location"] == f"{TASKS}{fresh.pk}/change/"
    assert (fresh.status, fresh.reference, fresh.payload, fresh.payload_type) == (
        "CREATED",
        None,
        {"n": 2**70},
        "desk.Claim",
    )
    assert (fresh.priority, fresh.tag, fresh.lease_seconds, fresh.max_attempts) == (3, "eu", 90.0, 9)
    assert abs(fresh.expire_time - fresh.create_time - timedelta(hours=3)) < timedelta(seconds=1)
    assert Task.objects.get(pk=task.pk).status == "COMPLETED"
    assert AuditEntry.objects.get().reason == "lost by the printer"


@pytest.mark.parametrize("held", [["add_task"], ["view_payload"], ["add_task", "view_payload"]])
def test_enqueueing_again_needs_to_see_what_is_enqueued(held: list[str]) -> None:
    task = make_task(Status.ERROR)
    response = staff("view_task", *held).post(TASKS, {"again": task.pk, "confirm": "yes"})
    assert response.status_code == (302 if len(held) == 2 else 403)
    assert Task.objects.count() == len(held)


# -- queues: settings while running -----------------------------------------------------------------------------------


def test_settings_in_force_have_a_source_and_can_be_changed_while_running(op: Client) -> None:
    page = f"{QUEUES}{QUEUE}/change/"
    rows = {one.name: one for one in op.get(page).context["settings"]}
    assert (rows["lease"].value, rows["lease"].source) == ("2m", "the project's settings")
    assert rows["batch_size"].source == "built in"
    # When an operator changes one, then it is in force, with its source, and in the audit
    op.post(QUEUES, {"queue": QUEUE, "set": "lease", "value": "5m", "reason": "slow partner"})
    rows = {one.name: one for one in op.get(page).context["settings"]}
    assert (rows["lease"].value, rows["lease"].source) == ("5m", "changed here, while running")
    assert AuditEntry.objects.get().reason == "slow partner"
    # and back again
    op.post(QUEUES, {"queue": QUEUE, "set": "lease", "value": ""})
    assert Queue.objects.get(name=QUEUE).overrides == {}


@pytest.mark.parametrize(("name", "value"), [("lease", "soon"), ("batch_size", "0"), ("database", "other"), ("x", "1")])
def test_settings_that_cannot_be_are_refused_in_words(op: Client, name: str, value: str) -> None:
    response = op.post(QUEUES, {"queue": QUEUE, "set": name, "value": value}, follow=True)
    assert 'class="error"' in text(response)
    assert not Queue.objects.filter(overrides__has_key=name).exists()


def test_settings_need_their_permission() -> None:
    client = staff("view_queue", "pause_queue", "change_queue")
    assert client.post(QUEUES, {"queue": QUEUE, "set": "lease", "value": "5m"}).status_code == 403
    assert 'name="set"' not in text(client.get(f"{QUEUES}{QUEUE}/change/"))
    assert not Queue.objects.exists()


def test_a_queue_is_emptied_only_after_its_name_was_typed_with_a_reason(op: Client) -> None:
    task, other = make_task(), make_task(queue="letters")
    wrong = [{"typed": "letters", "reason": "x"}, {"typed": QUEUE, "reason": " "}]
    for given in wrong:
        assert 'class="error"' in text(op.post(QUEUES, {"purge": QUEUE, **given}, follow=True))
    assert not BulkOperation.objects.exists()
    assert staff("view_queue", "delete_task").post(QUEUES, {"purge": QUEUE, "typed": QUEUE}).status_code == 403
    op.post(QUEUES, {"purge": QUEUE, "typed": QUEUE, "reason": "test data"})
    op.post(f"{ADMIN}bulkoperation/", {"operation": BulkOperation.objects.get().pk, "work": "1"})
    assert [row.pk for row in Task.objects.all()] == [other.pk]
    assert task.pk != other.pk


# -- reports ----------------------------------------------------------------------------------------------------------


def test_a_report_is_a_page_and_a_file_that_runs_nothing_foreign(op: Client) -> None:
    report = PipelineReport.objects.create(
        kind="report", summary="fine", data=report_figures("<script>alert(1)</script>")
    )
    page = f"{ADMIN}pipelinereport/{report.pk}/change/"
    shown = text(op.get(page))
    assert "<script>alert(1)" not in shown
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in shown
    assert f'href="{ADMIN}pipelinereport/{report.pk}/report/"' in shown
    assert 'id="dbtq-wait-chart"' in shown
    alone = op.get(f"{ADMIN}pipelinereport/{report.pk}/report/")
    assert alone.content.decode() == html_file("report", report.data)
    policy = alone.headers["Content-Security-Policy"]
    assert policy.startswith("sandbox allow-scripts; default-src 'none'")
    assert Client().get(f"{ADMIN}pipelinereport/{report.pk}/report/").status_code == 302
    assert staff("view_task").get(f"{ADMIN}pipelinereport/{report.pk}/report/").status_code == 403


def test_a_report_of_another_version_is_shown_as_its_figures(op: Client) -> None:
    report = PipelineReport.objects.create(kind="report", summary="fine", data={"older": 1})
    shown = text(op.get(f"{ADMIN}pipelinereport/{report.pk}/change/"))
    assert "&quot;older&quot;: 1" in shown
    assert "dbtq-report" not in shown
    assert op.get(f"{ADMIN}pipelinereport/{report.pk}/report/").status_code == 404
    assert op.get(f"{ADMIN}pipelinereport/{report.pk + 1}/report/").status_code == 404


# -- pollers ----------------------------------------------------------------------------------------------------------


def test_telling_pollers_needs_its_permission_and_is_recorded(op: Client) -> None:
    serve(QUEUE)
    data = {"action": "drain", "_selected_action": [HOLDER], "confirm": "yes", "reason": "a new release"}
    assert staff("view_poller").post(POLLERS, data).status_code == 403
    assert Poller.objects.get().requested_command == ""
    assert "1 poller would follow." in text(op.post(POLLERS, {"action": "drain", "_selected_action": [HOLDER]}))
    op.post(POLLERS, data)
    assert Poller.objects.get().requested_command == "drain"
    assert "drain requested" in text(op.get(POLLERS))
    assert (AuditEntry.objects.get().reason, LogEntry.objects.count()) == ("a new release", 1)


def test_pollers_that_ended_are_told_nothing(op: Client) -> None:
    Poller.objects.create(instance=HOLDER, state="STOPPED")
    op.post(POLLERS, {"action": "stop", "_selected_action": [HOLDER], "confirm": "yes"})
    assert Poller.objects.get().requested_command == ""


@pytest.mark.django_db(transaction=True)
def test_a_poller_follows_what_it_is_told(settings: Any) -> None:
    """Pause, start, and an end, by the row alone."""
    settings.DBTASKQUEUE = {"HEARTBEAT": "100ms"}

    def tell(command: str, shows: Callable[[], bool]) -> None:
        Poller.objects.filter(pk=poller.instance).update(requested_command=command)
        until(shows)

    with polling({"work": 1}) as poller:
        until(lambda: Poller.objects.filter(pk=poller.instance, state="RUNNING").exists())
        # When it is paused, then it takes nothing
        tell("pause", lambda: poller.paused)
        until(lambda: Poller.objects.get().state == "PAUSED")
        waiting = make_task(queue="work")
        poller.wake("work")
        # When it is started again, then it does
        tell("start", lambda: not poller.paused)
        until(lambda: Task.objects.get(pk=waiting.pk).status == "COMPLETED")
        # When it is drained, then it ends
        tell("drain", lambda: poller.wait(0.1))
    assert Poller.objects.get().requested_command == ""


HOSTILE_TEXTS = ["x", "", " ", "%", "'", "a:b", "-1", "9" * 30, "\ud800", "a\0b", "9999-12-31", "[" * 500, "é" * 300]


def test_no_filter_of_a_list_answers_500(admin_user: User) -> None:
    """Every filter with what nobody would type, and a third of it on the page of each list."""
    lists = [page for page in site._registry.values() if isinstance(page, list_pages.ListAdmin)]
    assert len(lists) > 8
    browser, wrong = Client(raise_request_exception=False), []
    browser.force_login(admin_user)
    seen = set[type]()
    for place, page in enumerate(lists):
        address = reverse(f"admin:{page.opts.app_label}_{page.opts.model_name}_changelist")
        names = list(page.filterset.base_filters)
        for turn, hostile in enumerate(HOSTILE_TEXTS):
            typed = hostile.encode("utf-8", "surrogatepass")
            for name in names if page.filterset not in seen else ():
                request = RequestFactory().get(address, {name: typed})
                request.user = admin_user
                try:
                    with transaction.atomic():
                        list(page.rows_of(page.filtered(request))[:1])
                except Exception as error:
                    wrong.append((address, name, hostile, error))
            if (turn + place) % 3 == 0:
                name = names[turn % len(names)]
                answer = browser.get(address, {name: typed})
                wrong += [(address, name, hostile, answer.status_code)] if answer.status_code >= 500 else []
        seen.add(page.filterset)
    assert wrong == []
