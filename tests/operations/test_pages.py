"""The operations pages through Django's test client: what they say, what they keep to themselves, what they do."""

import hashlib
import re
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from django.contrib.admin import site
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.db import connection
from django.db.models.functions import Now
from django.http import HttpResponse
from django.test import Client, RequestFactory
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

import django_dbtaskqueue
from django_dbtaskqueue import models
from django_dbtaskqueue.admin import list_pages
from django_dbtaskqueue.admin.queue_pages import ended_minutes
from django_dbtaskqueue.admin.task_pages import MAX_SAVED_SEARCHES
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.metrics import class_of
from django_dbtaskqueue.models import AuditEntry, BulkOperation, MinuteCount, PipelineReport, Poller, Queue, Task
from django_dbtaskqueue.operations.queue_control import pause
from django_dbtaskqueue.operations.queue_stats import Point
from django_dbtaskqueue.operations.report_page import html_file
from tests.factories import HOLDER, QUEUE, make_task
from tests.operations.site import ADMIN, OVERVIEW, POLLERS, QUEUES, TASKS, attempt, failure_group, staff, text
from tests.report_figures import report_figures
from tests.support import with_settings

_settings = with_settings(QUEUES={QUEUE: {"lease": "2m"}, "letters": {}}, HEARTBEAT="1s")
CHARTS = f"{OVERVIEW}?charts"
STATIC = Path(django_dbtaskqueue.__file__).parent / "static" / "dbtaskqueue"
HOSTILE_TEXTS = ["x", "", " ", "%", "'", "a:b", "-1", "9" * 30, "\ud800", "a\0b", "9999-12-31", "[" * 500, "é" * 300]


def measured(minutes: int = 2, *, outcome: str = "completed", count: int = 5, **columns: Any) -> None:
    minute = Now() - timedelta(minutes=minutes)
    MinuteCount.objects.create(kind="outcome", queue=QUEUE, minute=minute, name=outcome, count=count, **columns)


def test_breadcrumbs_are_a_list_as_in_django_6(op: Client) -> None:
    task = make_task(reference="A-7")
    (crumbs,) = re.findall(r'<ol class="breadcrumbs">.*?</ol>', text(op.get(f"{TASKS}{task.pk}/change/")), re.DOTALL)
    shown = [re.sub(r"<[^>]*>", "", item) for item in re.findall(r"<li.*?</li>", crumbs)]
    assert shown == ["Home", "Task queue", "Tasks", f"{QUEUE}/A-7"]


def serve(*queues: str) -> None:
    Poller.objects.create(instance=HOLDER, state="RUNNING", queues=list(queues), heartbeat_time=Now())


def test_of_a_thousand_queues_the_home_names_those_that_need_care(op: Client, settings: Any) -> None:
    settings.DBTASKQUEUE |= {"QUEUES": {f"q{number:04}": {} for number in range(1000)}}
    make_task(Status.CREATED, queue="q0777", ready_time=-timedelta(minutes=5))
    with CaptureQueriesContext(connection) as queries:
        shown = op.get(OVERVIEW)
    assert len(queries) < 40
    assert [row.name for row in shown.context["queues"].data] == ["q0777"]
    known = len(list(conf.settings_queues()))
    assert f"{known - 1} queues are quiet: " in text(shown) and f"and {known - 6} more" in text(shown)
    assert f"{known} queues; the first 200 by name" in text(op.get(QUEUES))
    assert "q0999</a>" in text(op.get(f"{QUEUES}?name=q0999"))


def test_the_home_shows_new_failures_first_with_their_retry(op: Client) -> None:
    hour = timedelta(hours=1)
    failure_group("old", message="seen for days", first_seen=Now() - 48 * hour)
    failure_group("quiet", first_seen=Now() - 48 * hour, last_seen=Now() - 3 * hour)
    failure_group("new", error_type="desk.KeyError", message="N#", newest="'vat'", queue="letters")
    make_task(Status.ERROR, queue="letters", fingerprint="new")
    home = op.get(OVERVIEW)
    shown = text(home)
    assert [group.pk for group in home.context["failures"].data] == ["new", "old"]
    assert f'formaction="{TASKS}?q=fingerprint%3Anew+status%3AERROR" name="action_on_all" value="reprocess"' in shown
    assert "KeyError" in shown and "KeyError" not in text(staff("view_queue").get(OVERVIEW))


def test_every_page_and_the_index_have_one_order(op: Client, settings: Any) -> None:
    def listed(address: str) -> list[str]:
        (ours,) = (app for app in op.get(address).context["available_apps"] if app["app_label"] == "dbtaskqueue")
        return [one["model"]._meta.model_name for one in ours["models"]]

    nav = text(op.get(QUEUES)).split('class="dbtq-nav"', 1)[1].split("</nav>", 1)[0]
    main, order = (re.findall(r"/admin/dbtaskqueue/(\w+)/", part) for part in (nav.split("<details")[0], nav))
    assert main == ["overview", "task", "failuregroup", "queue"]
    assert order == listed(QUEUES) == listed("/admin/") and "temporarytask" not in order
    settings.DBTASKQUEUE |= {"QUEUES": {"scratch": {"temporary": True}}}
    assert "temporarytask" in listed("/admin/")
    settings.DBTASKQUEUE |= {"HEARTBEAT": "soon"}
    assert "temporarytask" not in listed("/admin/"), "other apps' pages work without our settings"


def test_the_page_of_a_queue_says_how_it_is(op: Client) -> None:
    serve("letters")
    make_task(Status.ERROR)
    make_task(Status.CREATED, ready_time=-timedelta(minutes=5))
    make_task(Status.CREATED, queue="letters")
    shown = text(op.get(f"{QUEUES}{QUEUE}/change/"))
    assert f"Nothing serves {QUEUE}." in text(op.get(OVERVIEW))
    counted = dict(re.findall(r'class="field-(\w+)"><dt>[^<]*</dt><dd>(?:<a [^>]*>)?([^<]*)<', shown))
    assert [counted[name] for name in ("created", "processing", "error", "total")] == ["1", "0", "1", "2"]
    assert f'href="{TASKS}?q=queue%3A{QUEUE}+status%3AERROR"' in shown
    assert "no poller" in shown and "5m" in counted["oldest"]


def test_charts_are_drawn_from_tables_and_end_before_the_minute_that_runs(op: Client) -> None:
    for outcome, count in (("completed", 120), ("retried", 7), ("failed", 3)):
        measured(outcome=outcome, count=count, runs={"20": count}, waits={"30": count})
    page = op.get(CHARTS)
    shown = text(page)
    throughput, _latency = page.context["charts"]
    counted = [re.findall(r'data-value="([^"]*)"', row) for row in throughput.body.splitlines()]
    failed = "failed is every attempt that did"
    assert [row for row in counted if set(row) != {"0"}] == [["120", "10", "0", "0"]], failed
    assert 'data-table="dbtq-throughput-table"' in shown and 'id="dbtq-throughput-table"' in shown
    assert shown.count("<time") > 100, "a row for each minute, in both"
    past, running = (Point(timezone.now(), seconds, {"completed": count}) for seconds, count in ((60, 500), (3, 1)))
    quiet = Point(timezone.now(), 60)
    assert ended_minutes([past, quiet, running]) == [past, quiet]
    assert ended_minutes([quiet, running]) == [quiet, running], "all there is yet"
    assert ended_minutes([quiet, Point(timezone.now(), 3)]) == []


def test_vendored_files_are_what_was_published() -> None:
    (sums,) = STATIC.glob("vendor/*/SHA256SUMS")
    for line in sums.read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((sums.parent / name).read_bytes()).hexdigest() == digest, name
    assert "MIT" in (sums.parent / "LICENSE").read_text()


def live(client: Client, url: str, etag: str = "") -> HttpResponse:
    headers = {"If-None-Match": etag} if etag else {}
    return client.get(f"{url}{'&' if '?' in url else '?'}_live=1", headers=headers)  # type: ignore[return-value]


@pytest.mark.parametrize("url", [f"{TASKS}?q=status:ERROR", QUEUES, POLLERS, f"{ADMIN}auditentry/"])
def test_what_did_not_change_is_not_sent_again_and_what_is_is_the_part_of_the_page(op: Client, url: str) -> None:
    task = make_task(Status.ERROR)
    serve(QUEUE)
    AuditEntry.objects.create(actor="ada", verb="pause")
    first = live(op, url)
    part, whole = (answer.content.split(b'class="table-container"')[1][:200] for answer in (first, op.get(url)))
    assert part == whole and b"<html" not in first.content
    again = live(op, url, first.headers["ETag"])
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["X-As-Of"] >= first.headers["X-As-Of"]
    pause(QUEUE, "default", by="ada")
    Task.objects.filter(pk=task.pk).reprocess()
    Poller.objects.update(held=7)
    AuditEntry.objects.create(actor="ada", verb="cancel_batch")
    assert live(op, url, first.headers["ETag"]).status_code == 200


def test_payloads_results_and_tracebacks_need_their_permission(op: Client) -> None:
    said, payload = "Traceback: password=hunter2", {"card": "4242", "password": "hunter2"}
    task = make_task(Status.ERROR, payload=payload, process_result=said, context={"who": "zoe"})
    tried = attempt(task, message="no", traceback="deep: password=hunter2")
    of_task = f"{TASKS}{task.pk}/change/"
    done = make_task(Status.COMPLETED, process_result="paid 600 to zoe")
    reader = staff("view_task", "view_attempt")
    for page in (of_task, f"{ADMIN}attempt/{tried.pk}/change/"):
        shown = text(reader.get(page))
        assert "4242" not in shown and "deep:" not in shown and "need the permission to see them" in shown
        assert "need the permission" not in text(op.get(page))
    page = f"{TASKS}{done.pk}/change/"
    assert "4242" in text(op.get(of_task)) and "paid 600" in text(op.get(page))
    assert "paid 600" not in text(reader.get(page)) + text(reader.get(TASKS))


def test_payloads_are_seen_and_searched_by_queue(settings: Any) -> None:
    settings.DBTASKQUEUE |= {"CAN_OPERATE": "tests.operations.site.only_parcels"}
    for queue in (QUEUE, "letters"):
        make_task(Status.ERROR, queue=queue, payload={"card": "4242"}, process_result="no card")
    reader = staff("view_task", "view_payload")
    refused = ("payload.card:4242 queue:letters", f"error:card queue:{QUEUE},letters", "payload.card:4242")
    for search, rows in {f"payload.card:4242 queue:{QUEUE}": 1, "status:ERROR": 2, **dict.fromkeys(refused, 0)}.items():
        response = reader.get(TASKS, {"q": search})
        assert ("Name a queue that you may see" in text(response)) == (search in refused)
        assert len(response.context["slice"].rows) == rows, search
    shown = {task.queue: "4242" in text(reader.get(f"{TASKS}{task.pk}/change/")) for task in Task.objects.all()}
    assert shown == {QUEUE: True, "letters": False}
    assert not staff("view_task", name="blind").get(TASKS, {"q": "payload.card:4242"}).context["slice"].rows


def test_a_search_can_be_kept_under_a_name_and_shared_or_says_why_not(op: Client) -> None:
    op.post(f"{TASKS}?q=queue:letters", {"save_view": "1", "view_name": "Letters", "view_shared": "1"})
    op.post(TASKS, {"save_view": "1", "view_name": "Everything"})
    other = staff("view_task")
    (saved,) = models.SavedSearch.objects.all()
    assert (saved.owner, saved.query) == ("admin", "queue:letters")
    assert '<a href="?q=queue%3Aletters">Letters</a>' in text(other.get(TASKS))
    other.post(TASKS, {"forget_view": saved.pk})
    assert models.SavedSearch.objects.exists(), "it belongs to somebody else"
    op.post(TASKS, {"forget_view": saved.pk})
    kept, views = {"save_view": "1", "view_name": "3"}, models.SavedSearch.objects
    assert not views.exists()
    assert "is not a qualifier" in text(op.post(f"{TASKS}?q=stauts:ERROR", kept, follow=True))
    names = map(str, range(MAX_SAVED_SEARCHES))
    views.bulk_create(models.SavedSearch(owner="admin", name=name, query="id:1") for name in names)
    refused = op.post(f"{TASKS}?q=id:7", {**kept, "view_name": "one more"}, follow=True)
    assert "You have 100 saved searches. Delete one first." in text(refused)
    op.post(f"{TASKS}?q=id:7", kept)
    assert views.count() == MAX_SAVED_SEARCHES
    assert views.get(name="3").query == "id:7", "a saved one can still change"


def test_a_task_can_be_enqueued_again_as_new_by_who_sees_what_is_enqueued(op: Client) -> None:
    same = {"payload": {"n": 2**70}, "payload_type": "desk.Claim", "priority": 3, "tag": "eu", "lease_seconds": 90.0}
    times = {"create_time": timedelta(hours=-2), "expire_time": timedelta(hours=1)}
    task = make_task(Status.COMPLETED, reference="UA-15", max_attempts=9, **same, **times)
    assert "Enqueue again as new" in text(op.get(f"{TASKS}{task.pk}/change/"))
    assert text(op.post(TASKS, {"again": task.pk}))
    assert Task.objects.count() == 1, "it asks first"
    response = op.post(TASKS, {"again": task.pk, "confirm": "yes", "reason": "lost by the printer"})
    fresh = Task.objects.latest("pk")
    assert response.headers["Location"] == f"{TASKS}{fresh.pk}/change/"
    assert (fresh.status, fresh.reference, fresh.max_attempts) == ("CREATED", None, 9)
    assert {name: getattr(fresh, name) for name in same} == same
    assert abs(fresh.expire_time - fresh.create_time - timedelta(hours=3)) < timedelta(seconds=1)
    assert Task.objects.get(pk=task.pk).status == "COMPLETED"
    assert AuditEntry.objects.get().reason == "lost by the printer"
    for held in (["add_task"], ["view_payload"], ["add_task", "view_payload"]):
        answer = staff("view_task", *held, name="-".join(held)).post(TASKS, {"again": task.pk, "confirm": "yes"})
        assert (answer.status_code, Task.objects.count()) == ((302, 3) if len(held) == 2 else (403, 2))


def test_settings_in_force_have_a_source_and_are_changed_within_what_is_valid_by_those_who_may(op: Client) -> None:
    page = f"{QUEUES}{QUEUE}/change/"

    def there() -> dict[str, tuple[str, str]]:
        (_, said), (built_in, others) = op.get(page).context["settings"]
        assert built_in == f"{len(others)} built in" and {one.source for one in said}.isdisjoint({"built in"})
        return {one.name: (one.value, one.source) for one in (*said, *others)}

    assert there()["lease"] == ("2m", "the project's settings") and there()["batch_size"][1] == "built in"
    form = {"queue": QUEUE, "set": "lease", "value": "5m", "reason": "slow partner"}
    assert "“lease” is 5m now." in text(op.post(QUEUES, form, follow=True)), "a key keeps its spelling"
    assert there()["lease"] == ("5m", "changed here, while running") and LogEntry.objects.count() == 1
    entry = AuditEntry.objects.get()
    assert (entry.reason, entry.details) == ("slow partner", {"before": {}, "after": {"lease": "PT5M"}})
    op.post(QUEUES, {"queue": QUEUE, "set": "lease", "value": ""})
    for name, value in (("lease", "soon"), ("batch_size", "0"), ("database", "other"), ("x", "1")):
        assert 'class="error"' in text(op.post(QUEUES, {"queue": QUEUE, "set": name, "value": value}, follow=True))
    assert Queue.objects.get(name=QUEUE).overrides == {}
    assert 'name="set"' not in text(staff("view_queue", "pause_queue", "change_queue").get(page))


def test_queues_are_listed_in_order_and_emptied_only_after_their_name_was_typed(op: Client) -> None:
    for number, queue in enumerate(("letters", "other", "parcels")):
        make_task(Status.CREATED, queue=queue, ready_time=-timedelta(minutes=(number + 1) % 3))

    def names(order: str) -> list[str]:
        return [row.record.name for row in op.get(QUEUES, {"order": order}).context["table"].rows]

    by_name = names("")
    assert by_name == sorted(by_name) and names("oldest")[:3] == ["other", "letters", "parcels"]
    assert sorted(names("failed")) == sorted(names("run")) == sorted(names("wait")) == by_name
    assert "Select a valid choice" in text(op.get(QUEUES, {"order": "x"}))
    for given in ({"typed": "letters", "reason": "x"}, {"typed": QUEUE, "reason": " "}):
        assert 'class="error"' in text(op.post(QUEUES, {"purge": QUEUE, **given}, follow=True))
    assert not BulkOperation.objects.exists()


def test_a_report_is_a_page_and_a_file_that_runs_nothing_foreign(op: Client) -> None:
    figures = report_figures("<script>alert(1)</script>")
    report = PipelineReport.objects.create(kind="report", summary="fine", data=figures)
    file = f"{ADMIN}pipelinereport/{report.pk}/report/"
    shown = text(op.get(f"{ADMIN}pipelinereport/{report.pk}/change/"))
    assert "<script>alert(1)" not in shown and "&lt;script&gt;alert(1)&lt;/script&gt;" in shown
    assert f'href="{file}"' in shown and 'id="dbtq-wait-chart"' in shown
    alone = op.get(file)
    assert alone.content.decode() == html_file("report", report.data)
    assert alone.headers["Content-Security-Policy"].startswith("sandbox allow-scripts; default-src 'none'")
    assert [one.get(file).status_code for one in (Client(), staff("view_task"))] == [302, 403]
    older = PipelineReport.objects.create(kind="report", summary="fine", data={"older": 1})
    shown = text(op.get(f"{ADMIN}pipelinereport/{older.pk}/change/"))
    assert "&quot;older&quot;: 1" in shown and "dbtq-report" not in shown, "of another version"
    for number in (older.pk, older.pk + 1):
        assert op.get(f"{ADMIN}pipelinereport/{number}/report/").status_code == 404


def test_pollers_are_told_and_asked_about_before(op: Client) -> None:
    serve(QUEUE)
    Poller.objects.create(instance="ended", state="STOPPED")
    data = {"action": "drain", "_selected_action": [HOLDER, "ended"]}
    assert "1 poller would follow." in text(op.post(POLLERS, data))
    op.post(POLLERS, {**data, "confirm": "yes", "reason": "a new release"})
    assert dict(Poller.objects.values_list("instance", "requested_command")) == {HOLDER: "drain", "ended": ""}
    assert "drain requested" in text(op.get(POLLERS))
    assert (AuditEntry.objects.get().reason, LogEntry.objects.count()) == ("a new release", 1)


def test_no_filter_of_a_list_fails(admin_user: User) -> None:
    lists = [page for page in site._registry.values() if isinstance(page, list_pages.ListAdmin)]
    assert len(lists) > 8
    for page in {page.filterset: page for page in lists}.values():
        for name, hostile in product(page.filterset.base_filters, HOSTILE_TEXTS):
            request = RequestFactory().get("/", {name: hostile.encode("utf-8", "surrogatepass")})
            request.user = admin_user
            list(page.rows_of(page.filtered(request))[:1])


def test_lists_of_rows_let_pick_a_queue_that_the_user_may_view(op: Client, settings: Any) -> None:
    for name in ("failuregroup", "attempt", "taskhistory", "auditentry"):
        shown = text(op.get(f"{ADMIN}{name}/", {"queue": "gone"}))
        offered = {("gone", " selected"), ("letters", ""), (QUEUE, "")}
        assert offered <= set(re.findall(r'<option value="(.+)"( selected)?>', shown)), name
    settings.DBTASKQUEUE = {**settings.DBTASKQUEUE, "CAN_VIEW": "tests.operations.site.only_parcels"}
    assert 'value="letters"' not in text(op.get(f"{ADMIN}taskhistory/"))


def poller(name: str, version: str, started: timedelta, release: str = "") -> None:
    Poller.objects.create(instance=name, version=version, start_time=Now() - started, release=release)


def test_the_start_of_a_new_release_is_marked_and_an_old_one_is_not(op: Client) -> None:
    measured()
    poller("a", "0.1.0", timedelta(days=2))
    poller("b", "0.1.0", timedelta(minutes=9))
    assert "first poller of" not in text(op.get(CHARTS))
    poller("c", "0.2.0", timedelta(minutes=5))
    poller("d", "0.2.0", timedelta(minutes=4))
    shown = text(op.get(CHARTS))
    assert shown.count("first poller of 0.2.0") == 2, "in both charts, once"
    poller("e", "0.2.0", timedelta(minutes=3), "shop@7f3a")
    assert text(op.get(CHARTS)).count("first poller of shop@7f3a") == 2, "a release of the project"
    assert 'data-marks="dbtq-throughput-marks"' in shown
    chart = shown.split('id="dbtq-throughput-chart"', 1)[1].split(">", 1)[0]
    assert "data-bars" in chart and "requeued" in shown, "outcomes stand on each other"


def test_a_queue_has_its_rate_of_the_last_hour_as_bars_that_say_their_numbers(op: Client) -> None:
    assert "dbtq-spark" not in text(op.get(OVERVIEW)), "no task has finished"
    measured(2, count=50, run_seconds=1)
    measured(58, count=500, run_seconds=1)
    measured(2, outcome="retried", count=7)
    numbers = f"100, {'0, ' * 10}10</title>"
    for page in (OVERVIEW, QUEUES, f"{QUEUES}{QUEUE}/change/"):
        shown = text(op.get(page))
        assert f"out per min in the last hour, by 5 minutes: {numbers}" in shown, page
        assert 'd="M2 16v-15M57 16v-2"' in shown, "each bar as high as its rate"


def test_run_times_and_waits_are_mapped_by_time(op: Client) -> None:
    quick, slow = class_of(0.004), class_of(2.0)
    measured(count=4, runs={quick: 3, slow: 1})
    shown = text(op.get(CHARTS))
    body = shown.split('id="dbtq-runs-map"', 1)[1].split("</table>", 1)[0].split("<tbody>", 1)[1]
    rows = re.findall(r'<th scope="row">([^<]*)</th>(.*?)</tr>', body, re.S)
    assert [head for head, _cells in rows] == ["up to 10s", "up to 1s", "up to 100ms", "up to 10ms"]
    cells = [re.findall(r'dbtq-heat-([1-9])">(\d+)<', cells) for _head, cells in rows]
    assert cells == [[("3", "1")], [], [], [("7", "3")]]
    assert "dbtq-waits-map" not in shown, "no wait was measured"


DAY, PRINT = timedelta(days=1), "9f2c" * 10
TRACE = 'Traceback (most recent call last):\n  File "tasks.py", line 41, in assess\nPlaneUnknown: N14228'
FAILURES = f"{ADMIN}failuregroup/"
OF_PRINT = f"{FAILURES}{PRINT}/change/"
OF_GROUP = f"{TASKS}?q=fingerprint%3A{PRINT}+status%3AERROR"


@pytest.fixture
def failed() -> Task:
    failure_group(PRINT, error_type="desk.PlaneUnknown", message="N#", newest="N14228", frame="desk:assess")
    models.MinuteCount.objects.create(kind="failure", name=PRINT, minute=Now(), count=5)
    task = make_task(Status.ERROR, fingerprint=PRINT)
    for trace in ("an older one", TRACE):
        attempt(task, fingerprint=PRINT, traceback=trace)
    return task


def test_failures_have_the_newest_traceback_the_number_and_the_actions(op: Client, failed: Task) -> None:
    shown = text(op.get(FAILURES))
    assert "PlaneUnknown: N14228</a>" in shown and "line 41, in assess" in shown and "an older one" not in shown
    assert f'formaction="{OF_GROUP}"' in shown and 'name="action_on_all" value="reprocess"' in shown and ">5<" in shown
    shown = text(op.get(OF_PRINT))
    assert "line 41, in assess" in shown and f'action="{OF_GROUP}"' in shown and "runs failed tasks again" in shown
    assert 'value="delete" class="button dbtq-danger"' in shown
    bo = staff("view_failuregroup")
    for address in (FAILURES, OF_PRINT):
        shown = text(bo.get(address))
        assert "PlaneUnknown: N14228" in shown and "line 41, in assess" not in shown and "action_on_all" not in shown


def test_what_a_deploy_broke_is_two_clicks_away(op: Client, failed: Task) -> None:
    """Those first seen since a release came, and by which release; or since any time that a search can say."""
    models.FailureGroup.objects.update(first_seen=Now() - timedelta(minutes=30), release="shop@2")
    failure_group("old", error_type="desk.Old", first_seen=Now() - 3 * DAY, last_seen=Now() - DAY, release="shop@1")
    poller("a", "1", timedelta(days=4), "shop@1")
    poller("b", "1", timedelta(minutes=40), "shop@2")
    shown = text(op.get(FAILURES))
    assert shown.count("✱") == 1 and "shop@1" in shown and "desk.Old" not in shown and "Old" in shown
    (link,) = re.findall(r'<a href="([^"]*)">shop@2 came', shown)
    since = text(op.get(link))
    assert "PlaneUnknown" in since and ">Old" not in since and "N#" in since, "the pattern, small"
    ago = timezone.localtime() - timedelta(minutes=35)
    for wanted in ("1h", f"{ago:%H:%M}", f"{ago:%Y-%m-%dT%H:%M}"):
        assert ">Old" not in text(op.get(FAILURES, {"new": wanted})), wanted
    first = [text(op.get(FAILURES, {"sort": sort})) for sort in ("-first_seen", "release", "")]
    assert [one.index("PlaneUnknown") < one.index(">Old") for one in first] == [True, False, True]
    assert "is not a time" in text(op.get(FAILURES, {"new": "25:00"}))
    make_task(Status.ERROR)  # of no group, so the button of the list does not ask about it
    asked = text(op.post(OF_GROUP, {"action_on_all": "reprocess"}))
    assert "1 task matches." in asked and 'name="select_across" value="1"' in asked
