"""The JSON API: closed by default, sessions with CSRF or tokens, bounded answers, and faults that say the way out."""

from __future__ import annotations

import hashlib
import io
import json
import threading
from datetime import timedelta
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.db import connection, transaction
from django.test import Client
from django.urls import include, path

from django_dbtaskqueue.core.json import tail_bytes
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.models import Attempt, AuditEntry, BulkOperation, Queue, Task, TemporaryTask
from django_dbtaskqueue.models.control import IN_EFFECT
from django_dbtaskqueue.operations import bulk
from tests.factories import QUEUE, make_task
from tests.support import PATIENCE, actors

urlpatterns = [path("api/", include("django_dbtaskqueue.api.urls")), path("admin/", admin.site.urls)]
pytestmark = [pytest.mark.django_db, pytest.mark.urls(__name__)]
TOKEN = "a-token"
EVERYTHING = "view_task", "view_queue", "view_bulkoperation", "view_payload", "reprocess_task", "delete_task"


@pytest.fixture(autouse=True)
def _open(settings: Any) -> None:
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {}, "letters": {}}, "API": True, "API_TOKENS": {"robot": digest}}


def user(*codenames: str, name: str = "ada") -> User:
    made = User.objects.create_user(name)
    made.user_permissions.set(Permission.objects.filter(content_type__app_label="dbtaskqueue", codename__in=codenames))
    return made


def client(*codenames: str, name: str = "ada") -> Client:
    """Return the client of a logged in user with just these permissions."""
    found = Client(enforce_csrf_checks=False)
    found.force_login(user(*codenames, name=name))
    return found


def post(ada: Client, where: str, **given: Any) -> Any:
    return ada.post(f"/api/{where}", json.dumps(given), content_type="application/json")


def command(*arguments: str) -> str:
    """Return what ``taskqueue`` writes."""
    out = io.StringIO()
    call_command("taskqueue", *arguments, stdout=out, no_color=True)
    return out.getvalue()


# -- the door ----------------------------------------------------------------------------------------------------------


def test_it_is_closed_by_default(settings: Any) -> None:
    ada = client(*EVERYTHING)
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {}}}
    assert ada.get("/api/tasks").status_code == post(ada, "tasks/reprocess/ids", ids=[1]).status_code == 404


def test_nobody_in_particular_is_told_to_log_in() -> None:
    answer = Client().get("/api/tasks")
    assert answer.status_code == 401
    assert "Bearer" in answer.json()["error"]


def test_a_session_needs_the_csrf_token_for_what_changes_something_and_not_for_reading() -> None:
    task = make_task(Status.ERROR)
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(user(*EVERYTHING))
    assert strict.get("/api/tasks").status_code == 200
    assert post(strict, "tasks/reprocess/ids", ids=[task.pk]).status_code == 403
    assert Task.objects.get().status == Status.ERROR
    strict.cookies["csrftoken"] = "x" * 32
    answer = strict.post(
        "/api/tasks/reprocess/ids",
        json.dumps({"ids": [task.pk]}),
        content_type="application/json",
        headers={"X-CSRFToken": "x" * 32},
    )
    assert answer.json()["changed"] == 1


def test_a_token_is_its_user_and_needs_no_csrf() -> None:
    task = make_task(Status.ERROR)
    robot = user("view_task", "reprocess_task", name="robot")
    caller = Client(enforce_csrf_checks=True, headers={"Authorization": f"Bearer {TOKEN}"})
    assert post(caller, "tasks/reprocess/ids", ids=[task.pk], reason="nightly").json()["changed"] == 1
    assert AuditEntry.objects.get().actor == "robot"
    robot.is_active = False
    robot.save()
    assert caller.get("/api/tasks").status_code == 401


def test_beside_a_middleware_that_sends_everybody_to_a_login_page(settings: Any) -> None:
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "django.contrib.auth.middleware.LoginRequiredMiddleware"]
    user("view_task", name="robot")
    assert Client().get("/api/tasks").status_code == 401
    assert Client().get("/api/tasks", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_a_wrong_token_is_nobody_even_with_a_session() -> None:
    ada = client(*EVERYTHING)
    for token in ("wrong", "", TOKEN + " x", "\udcff"):
        answer = ada.get("/api/tasks", headers={"Authorization": f"Bearer {token}"})
        assert answer.status_code == 401


def test_a_wrong_method_is_named() -> None:
    ada = client(*EVERYTHING)
    assert ada.get("/api/tasks/reprocess/ids").headers["Allow"] == "POST"
    assert post(ada, "tasks").status_code == 405


# -- reading -----------------------------------------------------------------------------------------------------------


def test_search_in_pages() -> None:
    tasks = [make_task(Status.ERROR, reference=f"r{n}") for n in range(3)]
    make_task(Status.COMPLETED)
    ada = client("view_task")
    first = ada.get("/api/tasks", {"q": "status:ERROR", "limit": 2}).json()
    assert ([row["reference"] for row in first["tasks"]], first["before"]) == (["r2", "r1"], tasks[1].pk)
    rest = ada.get("/api/tasks", {"status": "ERROR", "before": first["before"]}).json()
    assert ([row["reference"] for row in rest["tasks"]], rest["before"], rest["query"]) == (
        ["r0"],
        None,
        "status:ERROR",
    )
    assert ada.get("/api/tasks/count", {"q": "status:ERROR"}).json() == {
        "query": "status:ERROR", "count": 3, "more": False,
    }  # fmt: skip


def test_a_page_costs_the_same_number_of_queries_whatever_is_on_it(django_assert_max_num_queries: Any) -> None:
    ada = client("view_task", "view_payload")
    for number in range(30):
        make_task(Status.ERROR, queue=f"q{number}", payload={"n": number})
    # Session, user, permissions of two kinds, two time limits before and after, their savepoints, the tasks.
    with django_assert_max_num_queries(16):
        assert len(ada.get("/api/tasks", {"limit": 30}).json()["tasks"]) == 30


def test_payloads_results_and_tracebacks_need_their_permission_and_are_masked() -> None:
    payload = {"name": "Ada", "token": "s3cret"}
    error = "Traceback (most recent call last):\n  secret = 'x'\nValueError: no such flight"
    task = make_task(Status.ERROR, payload=payload, process_result=error)
    done = make_task(Status.COMPLETED, process_result="paid 4711", result={"paid": 4711})
    Attempt.objects.create(
        task_id=task.pk, queue=QUEUE, attempt=1, total_attempt=1, error_type="ValueError", message="no such flight",
        traceback=error,
    )  # fmt: skip
    bob, ada = client("view_task", name="bob"), client("view_task", "view_payload")
    # Who may look sees the one line of an error, and nothing else of it
    shown = bob.get(f"/api/tasks/{task.pk}").json()
    assert shown["message"] == shown["attempts"][0]["error"] == "ValueError: no such flight"
    assert {"payload", "result", "context", "process_result"}.isdisjoint(shown)
    assert "traceback" not in shown["attempts"][0]
    assert "4711" not in bob.get("/api/tasks").content.decode() + bob.get(f"/api/tasks/{done.pk}").content.decode()
    # Who may see payloads sees all but secrets
    shown = ada.get(f"/api/tasks/{task.pk}").json()
    assert shown["payload"] == {"name": "Ada", "token": "•••"}
    assert "secret = '•••'" in shown["process_result"] and "secret = '•••'" in shown["attempts"][0]["traceback"]
    assert ada.get(f"/api/tasks/{done.pk}").json()["result"] == {"paid": 4711}


def test_api_command_line_and_admin_show_the_same_message_of_a_traceback(admin_client: Client) -> None:
    frames = "".join(f'  File "desk/rules.py", line {n}, in assess\n    assess(flight)\n' for n in range(90))
    error = tail_bytes(f"Traceback (most recent call last):\n{frames}desk.rules.Late: no report yet\nsince noon\n")
    assert error is not None and not error.startswith("Traceback")  # the stored text has lost its beginning
    task = make_task(Status.ERROR, process_result=error)
    message = "Late: no report yet"
    assert admin_client.get("/api/tasks").json()["tasks"][0]["message"] == message
    assert admin_client.get(f"/api/tasks/{task.pk}").json()["message"] == message
    assert f">{message}<" in admin_client.get("/admin/dbtaskqueue/task/").content.decode()
    assert json.loads(command("list", "--json"))[0]["message"] == message
    assert json.loads(command("show", str(task.pk), "--json"))["message"] == message
    assert command("list").splitlines()[1].endswith(f"  {message}")
    assert f"{message}\n" in command("show", str(task.pk))


@pytest.mark.parametrize("q", ["payload.town:s*", "-result.x:1", "context.who:ada", "error:4711"])
def test_a_search_that_would_tell_a_payload_needs_the_same_permission(q: str) -> None:
    bob = client("view_task", "reprocess_task", name="bob")
    assert bob.get("/api/tasks", {"q": q}).status_code == bob.get("/api/tasks/count", {"q": q}).status_code == 403
    assert post(bob, "tasks/reprocess/preview", q=q).status_code == 403
    assert post(bob, "tasks/reprocess/search", q=q).status_code == 403
    assert client("view_task", "view_payload").get("/api/tasks", {"q": q}).status_code == 200


def test_a_search_for_a_masked_value_is_refused_to_all() -> None:
    ada = client("view_task", "view_payload", "reprocess_task")
    for address in ("/api/tasks", "/api/tasks/count"):
        answer = ada.get(address, {"q": "payload.token:s*"})
        assert (answer.status_code, "payload.token cannot be searched" in answer.json()["error"]) == (403, True)
    assert post(ada, "tasks/reprocess/search", q="payload.token:s*").status_code == 403


def test_queues_and_their_pauses() -> None:
    ada = client("view_queue", "pause_queue")
    make_task(ready_time=-timedelta(minutes=5))
    assert post(ada, f"queues/{QUEUE}/pause", reason="why", **{"for": "30m"}).json() == {"paused": 1}
    assert Queue.objects.filter(IN_EFFECT, paused_until__isnull=False).get().paused_by == "ada"
    answer = ada.get("/api/queues").json()
    assert (answer["health"]["late"], answer["health"]["paused"]) == ([], [QUEUE])
    shown = {row["queue"]: row["paused"] for row in answer["queues"]}
    assert shown["letters"] is None and shown[QUEUE]["reason"] == "why"
    assert post(ada, f"queues/{QUEUE}/start").json() == {"started": 1}
    assert post(ada, f"queues/{QUEUE}/pause", until="2099-01-01T00:00").json() == {"paused": 1}
    assert [entry.source for entry in AuditEntry.objects.all()] == ["api"] * 3


# -- acting ------------------------------------------------------------------------------------------------------------


def test_ids_are_acted_on_at_once_and_each_that_is_not_has_its_reason() -> None:
    failed, done = make_task(Status.ERROR), make_task(Status.COMPLETED)
    answer = post(client("reprocess_task"), "tasks/reprocess/ids", ids=[failed.pk, done.pk, 987654321]).json()
    assert answer == {
        "changed": 1,
        "skipped": 2,
        "skips": {"in COMPLETED, not in ERROR": [done.pk], "there is no such task": [987654321]},
    }


def test_a_search_is_previewed_then_ordered_watched_and_cancelled() -> None:
    make_task(Status.ERROR)
    make_task(Status.COMPLETED)
    ada = client(*EVERYTHING)
    seen = post(ada, "tasks/reprocess/preview", q=f"queue:{QUEUE}").json()
    assert (seen["selected"], seen["would_change"]) == ({"count": 2, "more": False}, {"count": 1, "more": False})
    assert not BulkOperation.objects.exists()
    ordered = [post(ada, "tasks/reprocess/search", q=f"queue:{QUEUE}", reason="fixed") for _ in range(2)]
    assert [answer.status_code for answer in ordered] == [202, 202]
    first, second = (answer.json()["operation"] for answer in ordered)
    assert post(ada, f"operations/{second}/cancel", reason="twice").json()["state"] == "CANCELLED"
    while bulk.turn("default"):
        pass
    shown = ada.get(f"/api/operations/{first}").json()
    assert (shown["state"], shown["changed"], shown["skips"]) == ("FINISHED", 1, {"in COMPLETED, not in ERROR": 1})
    assert ada.get("/api/operations/987654321").status_code == 404


def test_purge_repeats_the_queue_s_name_and_gives_a_reason() -> None:
    make_task()
    ada = client("purge_queue")
    assert post(ada, f"queues/{QUEUE}/purge", reason="test data").status_code == 400
    assert post(ada, f"queues/{QUEUE}/purge", confirm=QUEUE).status_code == 400
    assert post(ada, f"queues/{QUEUE}/purge", confirm=QUEUE, reason="test data").status_code == 202
    while bulk.turn("default"):
        pass
    assert not Task.objects.exists()


FAULTS: list[tuple[str, dict[str, Any], int, str]] = [
    ("tasks/reprocess/ids", {"ids": [True]}, 400, "a list of whole numbers"),
    ("tasks/reprocess/ids", {"ids": list(range(1, 1002))}, 400, "up to 1,000 ids at once"),
    ("tasks/reprocess/ids", {"ids": [1], "raeson": "x"}, 400, "Did you mean 'reason'"),
    ("tasks/reproces/ids", {"ids": [1]}, 404, "There is no verb 'reproces'"),
    ("tasks/delete/ids", {"ids": [1]}, 400, "delete needs a reason"),
    ("tasks/reprocess/search", {"q": ""}, 400, "An empty search would reprocess every task"),
    ("tasks/reprocess/search", {"q": "stauts:ERROR"}, 400, "Did you mean 'status'"),
    ("tasks/reprocess/search", {"q": "status:ERROR", "limit": "many"}, 400, "'limit' must be a whole number"),
    ("tasks/housekeep/search", {"q": "status:ERROR", "older_than": "old"}, 400, "is not a duration"),
    ("tasks/housekeep/search", {"q": "status:ERROR", "to": "moon"}, 400, "'to' must be"),
    ("queues/parcels/pause", {"until": "soon"}, 400, "'until' must be a time"),
    ("queues/parcles/pause", {}, 404, "Did you mean 'parcels'"),
    ("queues/parcles/settings", {"values": {"batch_size": 9}}, 404, "Did you mean 'parcels'"),
    ("queues/parcles/start", {}, 404, "Did you mean 'parcels'"),
    ("queues/parcles/purge", {"confirm": "parcles", "reason": "x"}, 404, "Did you mean 'parcels'"),
    ("tasks/reprocess/ids", {"ids": [1], "queue": "parcles"}, 404, "Did you mean 'parcels'"),
    ("tasks/reprocess/ids", {"ids": [], "queue": "parcles"}, 404, "Did you mean 'parcels'"),
]


def test_a_fault_says_the_way_out() -> None:
    may = "pause_queue", "housekeep_task", "purge_queue", "change_queue_settings"
    ada, wrong = client(*EVERYTHING, *may), []
    for where, given, status, words in FAULTS:
        answer = post(ada, where, **given)
        if answer.status_code != status or words not in answer.json()["error"]:
            wrong.append((where, given, answer.status_code, answer.json()))
    assert wrong == []
    assert not AuditEntry.objects.exists() and not BulkOperation.objects.exists()


@pytest.mark.parametrize("queue", [QUEUE, "parcles"])
def test_without_the_permission_no_queue_is_named(queue: str) -> None:
    ada = client("view_task")
    for where in (f"queues/{queue}/start", f"queues/{queue}/purge", f"queues/{queue}/pause", "tasks/reprocess/ids"):
        given = {"ids": [1], "queue": queue} if where.endswith("ids") else {"reason": "x"}
        answer = post(ada, where, **given)
        assert (answer.status_code, "Known queues" in answer.json()["error"]) == (403, False), where


@pytest.mark.parametrize("verb", ["reprocess", "edit"])
def test_no_id_is_no_work_and_no_record(verb: str) -> None:
    given = {"payload": {}} if verb == "edit" else {}
    answer = post(client(*EVERYTHING, "edit_payload_task", "view_payload"), f"tasks/{verb}/ids", ids=[], **given)
    assert (answer.status_code, answer.json()) == (200, {"changed": 0, "skipped": 0, "skips": {}})
    assert not AuditEntry.objects.exists()


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"q": "stauts:ERROR"}, "Did you mean 'status'"),
        ({"status": "EROR"}, "Did you mean 'ERROR'"),
        ({"limit": "many"}, "must be a whole number"),
        ({"stauts": "ERROR"}, "'stauts' is not a parameter here. Did you mean 'status'"),
    ],
)
def test_a_wrong_search_is_explained_and_finds_nothing(query: dict[str, str], words: str) -> None:
    answer = client("view_task").get("/api/tasks", query)
    assert answer.status_code == 400
    assert words in answer.json()["error"]


def test_a_body_that_is_no_json_object_is_refused() -> None:
    ada = client(*EVERYTHING)
    for body in ("{", "[1]", "\udcff".encode(errors="surrogateescape")):
        answer = ada.post("/api/tasks/reprocess/ids", body, content_type="application/json")
        assert answer.status_code == 400


@pytest.mark.django_db(transaction=True)
def test_a_search_that_takes_too_long_says_how_to_narrow_it(settings: Any) -> None:
    settings.DBTASKQUEUE = {**settings.DBTASKQUEUE, "OPERATIONS_TIMEOUT": timedelta(milliseconds=100)}
    ada = client("view_task")
    locked, go_on = threading.Event(), threading.Event()

    def lock() -> None:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("LOCK TABLE dbtaskqueue_task")
            locked.set()
            assert go_on.wait(PATIENCE)

    with actors(1) as (other,):
        held = other.do(lock)
        assert locked.wait(PATIENCE)
        answer = ada.get("/api/tasks")
        go_on.set()
        held.result(PATIENCE)
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "10")
    assert "Narrow the search" in answer.json()["error"]


def test_a_table_of_its_own_has_a_view_permission_of_its_own(settings: Any) -> None:
    settings.DBTASKQUEUE |= {"QUEUES": {QUEUE: {}, "secret": {"model": "dbtaskqueue.TemporaryTask"}}}
    hidden = TemporaryTask.objects.create(queue="secret")
    ways = ("tasks?q=queue:secret", "tasks/count?q=queue:secret", f"tasks/{hidden.pk}?queue=secret")
    ada, bob = client("view_task"), client("view_temporarytask", name="bob")
    assert [ada.get(f"/api/{way}").status_code for way in ways] == [403] * 3
    assert [bob.get(f"/api/{way}").status_code for way in ways] == [200] * 3
    assert [bob.get(f"/api/{way}").status_code for way in ("tasks", "tasks/count")] == [403] * 2
