"""The JSON API: closed by default, sessions with CSRF or tokens, bounded answers, and faults that say the way out."""

import hashlib
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError
from django.test import Client

from django_dbtaskqueue.core.json import tail_bytes
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.management.commands.taskqueue import TOO_SLOW_CODE
from django_dbtaskqueue.models import AuditEntry, BulkOperation, Queue, Task, TemporaryTask
from django_dbtaskqueue.models.control import IN_EFFECT
from tests.factories import QUEUE, make_task
from tests.operations.site import TASKS, attempt, client, command, data, post, text, urlpatterns as urlpatterns, user
from tests.support import held, sql, with_settings

TOKEN = "a-token"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
DIGEST = hashlib.sha256(TOKEN.encode()).hexdigest()
EVERYTHING = "view_task", "view_queue", "view_bulkoperation", "view_payload", "reprocess_task", "delete_task"
_settings = with_settings(API_TOKENS={"robot": DIGEST})


def test_it_is_closed_by_default(settings: Any) -> None:
    ada = client(*EVERYTHING)
    for token in ("wrong", "", TOKEN + " x", "\udcff"):  # a session beside it does not help
        assert ada.get("/api/tasks", headers={"Authorization": f"Bearer {token}"}).status_code == 401
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {}}}
    assert ada.get("/api/tasks").status_code == post(ada, "tasks/reprocess/ids", ids=[1]).status_code == 404


def test_a_session_needs_the_csrf_token_for_what_changes_something_and_not_for_reading() -> None:
    task = make_task(Status.ERROR)
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(user(*EVERYTHING))
    assert strict.get("/api/tasks").status_code == 200
    assert post(strict, "tasks/reprocess/ids", ids=[task.pk]).status_code == 403
    assert Task.objects.get().status == Status.ERROR
    strict.cookies["csrftoken"] = strict.defaults["HTTP_X_CSRFTOKEN"] = "x" * 32
    assert post(strict, "tasks/reprocess/ids", ids=[task.pk]).json()["changed"] == 1


@pytest.mark.django_db(databases=["default", "sqlite"])
def test_an_operation_on_another_database_is_found_by_its_queue(settings: Any) -> None:
    settings.DBTASKQUEUE |= {"QUEUES": {"near": {}, "far": {"database": "sqlite"}}}
    ada = client("view_task", "view_bulkoperation", "cancel_task")
    near, far = (post(ada, "tasks/cancel/search", q=f"queue:{name}", reason="why").json() for name in ("near", "far"))
    for one, queue in ((near, "near"), (far, "far")):
        assert ada.get(f"/api/operations/{one['id']}", {"queue": queue}).json() == one
        assert ada.get("/api/operations", {"queue": queue}).json()["operations"] == [one]
    assert post(ada, f"operations/{far['id']}/cancel", queue="far", reason="no").json()["cancelled"] is True
    states = [BulkOperation.objects.using(alias).get().state for alias in ("default", "sqlite")]
    assert states == ["WAITING", "CANCELLED"]
    assert post(ada, f"operations/{far['id']}/put_back", queue="far").status_code == 400
    BulkOperation.objects.update_or_create(pk=far["id"], defaults={"verb": "cancel", "query": "queue:near"})
    for answer in (ada.get(f"/api/operations/{far['id']}"), post(ada, f"operations/{far['id']}/cancel", reason="no")):
        assert (answer.status_code, "several databases" in str(answer.json())) == (400, True)
    BulkOperation.objects.all().delete()
    assert ada.get(f"/api/operations/{far['id']}").json()["query"] == "queue:far"


def test_a_token_is_its_user_and_needs_no_csrf() -> None:
    task = make_task(Status.ERROR)
    robot = user("view_task", "reprocess_task", name="robot")
    caller = Client(enforce_csrf_checks=True, headers=BEARER)
    assert post(caller, "tasks/reprocess/ids", ids=[task.pk], reason="nightly").json()["changed"] == 1
    assert AuditEntry.objects.get().actor == "robot"
    robot.is_active = False
    robot.save()
    assert caller.get("/api/tasks").status_code == 401


def test_beside_a_middleware_that_sends_everybody_to_a_login_page(settings: Any) -> None:
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "django.contrib.auth.middleware.LoginRequiredMiddleware"]
    user("view_task", name="robot")
    refused = Client().get("/api/tasks")
    assert (refused.status_code, "Bearer" in refused.json()["error"]) == (401, True)
    assert Client(headers=BEARER).get("/api/tasks").status_code == 200


def test_search_in_pages() -> None:
    tasks = [make_task(Status.ERROR, reference=f"r{n}") for n in range(3)]
    make_task(Status.COMPLETED)
    ada = client("view_task")
    first = ada.get("/api/tasks", {"q": "status:ERROR", "limit": 2}).json()
    assert ([row["reference"] for row in first["tasks"]], first["before"]) == (["r2", "r1"], tasks[1].pk)
    rest = ada.get("/api/tasks", {"status": "ERROR", "before": first["before"]}).json()
    assert ([row["reference"] for row in rest["tasks"]], rest["before"]) == (["r0"], None)
    counted = ada.get("/api/tasks/count", {"q": rest["query"]}).json()
    asked = [ada.get(f"/api/tasks/{tasks[0].pk}", {"queue": name}).status_code for name in (QUEUE, "letters")]
    assert asked == [200, 404]
    assert counted["count"] == {"number": 3, "more": False, "estimated": False}


def test_a_page_costs_the_same_number_of_queries_whatever_is_on_it(django_assert_max_num_queries: Any) -> None:
    ada = client("view_task", "view_payload")
    for number in range(30):
        make_task(Status.ERROR, queue=f"q{number}", payload={"n": number})
    # Session, user, permissions of two kinds, two time limits before and after, their savepoints, the tasks.
    with django_assert_max_num_queries(16):
        assert len(ada.get("/api/tasks", {"limit": 30}).json()["tasks"]) == 30


def test_payloads_results_and_tracebacks_need_their_permission_and_are_masked() -> None:
    error = "Traceback (most recent call last):\n  secret = 'x'\nValueError: no such flight"
    task = make_task(Status.ERROR, payload={"name": "Ada", "token": "s3cret"}, process_result=error)
    done = make_task(Status.COMPLETED, process_result="paid 4711", result={"paid": 4711})
    attempt(task, error_type="ValueError", message="no such flight", traceback=error)
    bob, ada = client("view_task", name="bob"), client("view_task", "view_payload")
    # Who may look sees the one line of an error, and nothing else of it
    shown = bob.get(f"/api/tasks/{task.pk}").json()
    assert shown["message"] == shown["attempts"][0]["error"] == "ValueError: no such flight"
    assert {"payload", "result", "context", "process_result"}.isdisjoint(shown)
    assert "traceback" not in shown["attempts"][0]
    assert "4711" not in text(bob.get("/api/tasks")) + text(bob.get(f"/api/tasks/{done.pk}"))
    # Who may see payloads sees all but secrets
    shown = ada.get(f"/api/tasks/{task.pk}").json()
    assert shown["payload"] == {"name": "Ada", "token": "•••"}
    assert "secret = '•••'" in shown["process_result"] and "secret = '•••'" in shown["attempts"][0]["traceback"]
    assert ada.get(f"/api/tasks/{done.pk}").json()["result"] == {"paid": 4711}


def test_api_command_line_and_admin_show_the_same_message_of_a_traceback(op: Client) -> None:
    frames = "".join(f'  File "desk/rules.py", line {n}, in assess\n    assess(flight)\n' for n in range(90))
    error = tail_bytes(f"Traceback (most recent call last):\n{frames}desk.rules.Late: no report yet\nsince noon\n")
    assert error is not None and not error.startswith("Traceback")  # the stored text has lost its beginning
    task, message = make_task(Status.ERROR, process_result=error), "Late: no report yet"
    listed, shown = op.get("/api/tasks").json()["tasks"][0], op.get(f"/api/tasks/{task.pk}").json()
    assert {one["message"] for one in (listed, shown, data("list")[0], data("show", task.pk))} == {message}
    assert f">{message}<" in text(op.get(TASKS))
    assert command("list").splitlines()[1].endswith(f"  {message}")
    assert f"{message}\n" in command("show", task.pk)


@pytest.mark.parametrize("q", ["payload.town:s*", "-result.x:1", "context.who:ada", "error:4711"])
def test_a_search_that_would_tell_a_payload_needs_the_same_permission(q: str) -> None:
    def searched(browser: Client, q: str) -> list[int]:
        looks = [browser.get(f"/api/{what}", {"q": q}) for what in ("tasks", "tasks/count")]
        acts = [post(browser, f"tasks/reprocess/{what}", q=q) for what in ("preview", "search")]
        return [answer.status_code for answer in (*looks, *acts)]

    bob, ada = client("view_task", "reprocess_task", name="bob"), client("view_task", "view_payload", "reprocess_task")
    assert (searched(bob, q), searched(ada, q)) == ([403] * 4, [200, 200, 200, 202])
    assert searched(ada, "payload.token:s*") == [403] * 4, "it is masked"


def test_queues_and_their_pauses() -> None:
    ada = client("view_queue", "pause_queue")
    make_task(ready_time=-timedelta(minutes=5))
    for end in ({"for": "30m"}, {"until": "2099-01-01T00:00+20:00"}):
        assert post(ada, f"queues/{QUEUE}/pause", reason="why", **end).json() == {"changed": 1}
        assert Queue.objects.filter(IN_EFFECT, paused_until__isnull=False).get().paused_by == "ada"
    answer = ada.get("/api/queues").json()
    assert (answer["health"]["late"], answer["health"]["paused"]) == ([], [QUEUE])
    shown = {row["queue"]: row["paused"] for row in answer["queues"]}
    assert shown["letters"] is None and shown[QUEUE]["reason"] == "why"


NEAREST = "Did you mean 'parcels'"
FAULTS: list[tuple[str, dict[str, Any], int, str]] = [
    ("tasks/reprocess/ids", {"ids": [True]}, 400, "a list of whole numbers"),
    ("tasks/reprocess/ids", {"ids": list(range(1, 1002))}, 400, "up to 1,000 ids at once"),
    ("tasks/reprocess/ids", {"ids": [1], "raeson": "x"}, 400, "Did you mean 'reason'"),
    ("tasks/reproces/ids", {"ids": [1]}, 404, "There is no verb 'reproces'"),
    ("tasks/delete/ids", {"ids": [1]}, 400, "delete needs a reason"),
    ("tasks/reprocess/search", {"q": ""}, 400, "An empty search would reprocess every task"),
    ("tasks/reprocess/search", {"q": "status:ERROR", "limit": "many"}, 400, "'limit' must be a whole number"),
    ("tasks/housekeep/search", {"q": "status:ERROR", "older_than": "old"}, 400, "is not a duration"),
    ("tasks/housekeep/search", {"q": "status:ERROR", "to": "moon"}, 400, "'to' must be"),
    *(("tasks/signal/ids", {"ids": [1], "signal": name}, 400, "'signal'") for name in ("a\0", "a\ud800", " ")),
    ("queues/parcels/pause", {"until": "soon"}, 400, "'until' must be a time"),
    ("queues/parcels/pause", {"for": "30m", "until": "2099-01-01"}, 400, "give one of both"),
    ("queues/parcels/purge", {"reason": "test data"}, 400, "confirm"),
    *((f"queues/parcles/{verb}", {}, 404, NEAREST) for verb in ("pause", "resume")),
    ("queues/parcles/settings", {"values": {"batch_size": 9}}, 404, NEAREST),
    ("queues/parcels/resume", {"for": "30m"}, 400, "Only a pause has an end"),
    ("queues/parcles/purge", {"confirm": "parcles", "reason": "x"}, 404, NEAREST),
    ("tasks/reprocess/ids", {"ids": [1], "queue": "parcles"}, 404, NEAREST),
]
UNREADABLE: list[tuple[dict[str, Any], str]] = [
    ({"q": "stauts:ERROR"}, "Did you mean 'status'"),
    ({"status": "EROR"}, "Did you mean 'ERROR'"),
    ({"limit": "many"}, "must be a whole number"),
    ({"created": ">=0٣:00"}, "is not a time"),
    ({"queue": ["parcels", "letters"]}, "'queue' is there more than once"),
    ({"stauts": "ERROR"}, "'stauts' is not a parameter here. Did you mean 'status'"),
]


def test_a_fault_says_the_way_out() -> None:
    ada = client(*EVERYTHING, "pause_queue", "housekeep_task", "purge_queue", "change_queue_settings", "signal_task")
    asked = [(post(ada, where, **given), where, given, status, words) for where, given, status, words in FAULTS]
    asked += [(ada.get("/api/tasks", query), "tasks", query, 400, words) for query, words in UNREADABLE]
    asked += [(ada.get(f"/api/{at}?queue=parcles"), at, {}, 404, NEAREST) for at in ("status", "trends", "operations")]
    for answer, where, given, status, words in asked:
        assert (answer.status_code, words in answer.json()["error"]) == (status, True), (where, given, answer.json())
    for body in ("{", "[1]", "\udcff".encode(errors="surrogateescape")):
        assert ada.post("/api/tasks/reprocess/ids", body, content_type="application/json").status_code == 400
    assert not AuditEntry.objects.exists() and not BulkOperation.objects.exists()


@pytest.mark.parametrize("queue", [QUEUE, "parcles"])
def test_without_the_permission_no_queue_is_named(queue: str) -> None:
    ada = client("view_task")
    answers = [post(ada, f"queues/{queue}/{verb}", reason="x") for verb in ("resume", "purge", "pause")]
    for answer in (*answers, post(ada, "tasks/reprocess/ids", ids=[1], queue=queue)):
        assert (answer.status_code, "Known queues" in answer.json()["error"]) == (403, False)


@pytest.mark.parametrize(("verb", "given"), [("reprocess", {}), ("edit", {"payload": {}})])
def test_no_id_is_no_work_and_no_record(verb: str, given: dict[str, Any]) -> None:
    answer = post(client(*EVERYTHING, "edit_payload_task"), f"tasks/{verb}/ids", ids=[], **given)
    assert (answer.status_code, answer.json()) == (200, {"changed": 0, "skipped": 0, "skips": {}})
    assert not AuditEntry.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_a_search_that_takes_too_long_says_how_to_narrow_it(settings: Any) -> None:
    settings.DBTASKQUEUE |= {"OPERATIONS_TIMEOUT": timedelta(milliseconds=100)}
    ada = client("view_task", staff=True)
    with held(lambda: sql("LOCK TABLE dbtaskqueue_task")):
        answers = [ada.get("/api/tasks"), ada.get(TASKS)]
        with pytest.raises(CommandError, match="Narrow the search") as error:
            command("list")
    assert [(one.status_code, one.headers["Retry-After"]) for one in answers] == [(503, "10"), (503, "60")]
    assert all("Narrow the search" in one.content.decode() for one in answers)
    assert error.value.returncode == TOO_SLOW_CODE


def test_a_table_of_its_own_has_a_view_permission_of_its_own(settings: Any) -> None:
    settings.DBTASKQUEUE |= {"QUEUES": {QUEUE: {}, "secret": {"model": "dbtaskqueue.TemporaryTask"}}}
    hidden = TemporaryTask.objects.create(queue="secret")
    ways = ("tasks?q=queue:secret", "tasks/count?q=queue:secret", f"tasks/{hidden.pk}?queue=secret")
    ada, bob = client("view_task"), client("view_temporarytask", name="bob")
    assert [ada.get(f"/api/{way}").status_code for way in ways] == [403] * 3
    assert [bob.get(f"/api/{way}").status_code for way in ways] == [200] * 3
    assert [bob.get(f"/api/{way}").status_code for way in ("tasks", "tasks/count")] == [403] * 2
